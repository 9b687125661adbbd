"""Bytes among the JSON of a checkpoint, which lie in a file beside it. Pure.

The experts of groups that are not learned from yet are the reason: hundreds of bytes a token, and
info.json is read whole whenever checkpoints are ranked.
"""

from collections.abc import Mapping
from typing import Any

from grpo_jax.run_folder.stored_leaves import UnusableCheckpoint
from grpo_jax.values import json_text

FILE = "attached.bin"
_PLACE = "attached bytes"  # the key of [first byte, number of bytes], in place of them.


def taken_out(tree: Any) -> tuple[Any, bytes]:
  """Returns JSON with places in place of bytes, and all bytes one after another."""
  parts: list[bytes] = []
  return _without(tree, parts, [0]), b"".join(parts)


def _without(tree: Any, parts: list[bytes], end: list[int]) -> Any:
  if isinstance(tree, bytes):
    place = [end[0], len(tree)]
    parts.append(tree)
    end[0] += len(tree)
    return {_PLACE: place}
  if isinstance(tree, Mapping):
    return {name: _without(value, parts, end) for name, value in tree.items()}
  if isinstance(tree, list | tuple):
    return [_without(value, parts, end) for value in tree]
  return tree


def is_in(tree: Any) -> bool:
  """Returns whether JSON has the place of any bytes."""
  if isinstance(tree, dict):
    return tree.keys() == {_PLACE} or any(map(is_in, tree.values()))
  return isinstance(tree, list) and any(map(is_in, tree))


def put_back(tree: Any, data: bytes) -> Any:
  """Returns what `taken_out` was given.

  Raises:
    UnusableCheckpoint: A place is not one of these bytes.
  """
  if isinstance(tree, dict) and tree.keys() == {_PLACE}:
    try:
      first, count = (int(number) for number in tree[_PLACE])
    except json_text.UNEXPECTED as error:
      raise UnusableCheckpoint(f"info.json has attached bytes at {tree[_PLACE]!r:.60}") from error
    if not 0 <= first <= first + count <= len(data):
      raise UnusableCheckpoint(
        f"{FILE} has {len(data)} bytes, and info.json names those from {first} to {first + count}"
      )
    return data[first : first + count]
  if isinstance(tree, dict):
    return {name: put_back(value, data) for name, value in tree.items()}
  return [put_back(value, data) for value in tree] if isinstance(tree, list) else tree
