"""Which tensors of a version of the weights differ from those of the version before (I/O).

A server proves with it that tensors arrived; see `checksums`. Tensors that differ do so near their
beginning, so little is read of what an update changes.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping

import numpy as np
from jaxtyping import UInt8

from grpo_jax import processes
from grpo_jax.engines.checksums import Changes
from grpo_jax.models import safetensors

_FIRST, _LARGEST = 1 << 12, 1 << 20  # bytes that are compared at a time.


class Comparison:
  """Compares tensors with those of an older folder while they are written."""

  def __init__(self, folder: pathlib.Path, since: int):
    """Makes it; nothing is read.

    Args:
      folder: Folder of the version before, in safetensors files.
      since: That version.
    """
    self._folder = folder
    self._since = since
    self._is_changed: dict[str, bool | None] = {}

  @functools.cached_property
  def _before(self) -> Mapping[str, UInt8[np.ndarray, " n"]]:
    return safetensors.mapped(self._folder)

  def on(self, tensor: safetensors.ToWrite, *, is_same: bool = False) -> safetensors.ToWrite:
    """Returns the same tensor, which is compared when this process fetches it.

    Args:
      tensor: Tensor to write.
      is_same: Whether it is known to be the same as before.
    """
    self._is_changed[tensor.name] = False if is_same else None
    if is_same:
      return tensor
    return dataclasses.replace(tensor, values=functools.partial(self._values, tensor))

  def _values(self, tensor: safetensors.ToWrite) -> np.ndarray:
    values = tensor.values()
    before = self._before.get(tensor.name)
    if before is not None:
      own = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
      self._is_changed[tensor.name] = not _are_same(own, before)
    return values

  def changes(self) -> Changes:
    """Returns what was found. All processes have to call this, each of which compared a part."""
    known = {name: x for name, x in self._is_changed.items() if x is not None}
    found = dict.fromkeys(self._is_changed)
    for of_one in processes.exchange(known, what="which tensors have changed"):
      found.update(of_one)
    return Changes(self._since, found)


def _are_same(one: UInt8[np.ndarray, " n"], other: UInt8[np.ndarray, " m"]) -> bool:
  """Returns whether bytes are equal; ends at the first part that is not."""
  if one.size != other.size:
    return False
  begin, length = 0, _FIRST
  while begin < one.size:
    if not np.array_equal(one[begin : begin + length], other[begin : begin + length]):
      return False
    begin, length = begin + length, min(2 * length, _LARGEST)
  return True
