"""Digests of what must be equal on all processes of a run."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from grpo_jax import processes

SIZE = 16  # bytes of a digest.


def of_bytes(data: bytes | bytearray | memoryview) -> str:
  """Returns the BLAKE2b digest of bytes, as hexadecimal digits."""
  return hashlib.blake2b(data, digest_size=SIZE).hexdigest()


def of_values(values: Iterable[Any]) -> str:
  """Returns the digest of values: arrays of NumPy bit for bit, and all others as JSON.

  Args:
    values: NumPy arrays, JSON values, or dataclasses, lists, tuples and dicts of such.

  Raises:
    TypeError: A value has another type.
  """
  found = hashlib.blake2b(digest_size=SIZE)
  for value in values:
    _add(found, value)
  return found.hexdigest()


def agree(values: Iterable[Any], *, what: str) -> None:
  """Checks that values are equal on all processes, by their digests.

  All processes must make the same calls in the same order, on their main threads.

  Args:
    values: Arguments of `of_values`.
    what: Description of the values, for the message: "the batch of step 3".

  Raises:
    DisagreementError: The values differ; the message has the digest of each process.
  """
  if processes.count() > 1:
    processes.agree(of_values(values), what=f"the digest of {what}")


def _add(found: Any, value: Any) -> None:
  if isinstance(value, np.ndarray | np.generic):
    array = np.ascontiguousarray(value)
    found.update(f"array {array.dtype.str} {array.shape} ".encode())
    found.update(array.reshape(-1).view(np.uint8).data)
  elif dataclasses.is_dataclass(value):
    _add(found, {each.name: getattr(value, each.name) for each in dataclasses.fields(value)})
  elif isinstance(value, Mapping):
    found.update(f"mapping {len(value)} ".encode())
    for name, each in value.items():
      _add(found, name)
      _add(found, each)
  elif isinstance(value, list | tuple):
    found.update(f"sequence {len(value)} ".encode())
    for each in value:
      _add(found, each)
  else:
    found.update(f"{json.dumps(value)} ".encode())
