"""Reads the list of arrays in a checkpoint, and checks it against the files and the run.

Digests show that a file has not changed since it was written, but not that it was right: a
checkpoint may have been edited together with its manifest, or written by another program.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.values import json_text


class UnusableCheckpoint(Exception):
  """A checkpoint cannot be used; the message says why."""


class OtherState(UnusableCheckpoint):
  """A checkpoint is intact but belongs to another model or optimizer."""


Leaves = dict[str, tuple[tuple[int, ...], str]]  # shape and dtype by name.


@dataclasses.dataclass(frozen=True)
class Info:
  """The content of info.json."""

  step: int
  metrics: dict[str, Any]
  extra: dict[str, Any]
  leaves: Leaves


def read(file: pathlib.Path) -> Info:
  """Reads info.json.

  Raises:
    UnusableCheckpoint: The file is missing or cannot be parsed, or a field is missing or has the
      wrong type.
    PermissionError: The file exists but may not be read.
  """
  try:
    return parsed(file.read_bytes())
  except PermissionError:
    raise
  except OSError as error:
    raise UnusableCheckpoint(f"{file.name} cannot be read: {error.strerror}") from error


def parsed(content: bytes) -> Info:
  """Returns what the content of an info.json says.

  Raises:
    UnusableCheckpoint: The text cannot be parsed, or a field is missing or has the wrong type.
  """
  try:
    stored = json_text.parsed(content)
  except ValueError as error:
    raise UnusableCheckpoint(f"info.json cannot be parsed: {error}") from error
  if not isinstance(stored, dict):
    raise UnusableCheckpoint(f"info.json holds {_kind(stored)}, not an object")
  for name, kind in {"step": int, "metrics": dict, "extra": dict, "leaves": dict}.items():
    value = stored.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
      raise UnusableCheckpoint(f"{name!r} in info.json is {_kind(value)}, not {_ARTICLES[kind]}")
  leaves = {name: _leaf(name, entry) for name, entry in stored["leaves"].items()}
  return Info(stored["step"], stored["metrics"], stored["extra"], leaves)


def check_needed(present: Leaves, needed: Leaves) -> None:
  """Compares the leaves of a checkpoint with those of the run.

  Raises:
    OtherState: The leaves differ; the message names the first differences.
  """
  if present != needed:
    raise OtherState(f"belongs to another model or optimizer: {_unlike(present, needed)}")


def check_stored(stored: Leaves, listed: Leaves) -> None:
  """Compares the arrays in a checkpoint with those that its info.json lists.

  Raises:
    UnusableCheckpoint: The arrays differ; the message names the first differences.
  """
  if stored != listed:
    raise UnusableCheckpoint(
      f"its arrays are not those that info.json lists: {_unlike(stored, listed)}"
    )


def _leaf(name: str, entry: Any) -> tuple[tuple[int, ...], str]:
  """Returns shape and dtype of an entry [[sizes], dtype]."""
  try:
    shape, dtype = entry
    is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or not isinstance(dtype, str):
      raise TypeError
    return tuple(shape), dtype
  except (TypeError, ValueError) as error:
    raise UnusableCheckpoint(
      f"leaf {name!r} in info.json is {entry!r:.80}, not [shape, dtype]"
    ) from error


def _unlike(present: Mapping[str, Any], expected: Mapping[str, Any], limit: int = 5) -> str:
  """Describes the first differences between two tables of leaves."""
  lines = [
    f"{name}: saved {present.get(name, 'nothing')}, needed {expected.get(name, 'nothing')}"
    for name in sorted(present.keys() | expected.keys())
    if present.get(name) != expected.get(name)
  ]
  more = f"; and {len(lines) - limit} more" if len(lines) > limit else ""
  return "; ".join(lines[:limit]) + more


def first_not_finite(tree: Any) -> str | None:
  """Returns the path of the first array with a NaN or an infinity; None if all are finite."""
  for path, array in jax.tree_util.tree_leaves_with_path(tree):
    if jnp.issubdtype(array.dtype, jnp.floating) and not _is_finite(array):
      return jax.tree_util.keystr(path, simple=True, separator=".")
  return None


def _is_finite(array: Any) -> bool:
  """Checks an array on the host; on the devices each shape would compile a program."""
  shards = array.addressable_shards if isinstance(array, jax.Array) else [array]
  return all(bool(np.isfinite(np.asarray(getattr(x, "data", x))).all()) for x in shards)


def _kind(value: Any) -> str:
  return "missing" if value is None else f"{value!r:.60} ({type(value).__name__})"


_ARTICLES = {int: "a whole number", dict: "an object"}
