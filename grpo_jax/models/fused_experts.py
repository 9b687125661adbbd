"""Files in which one tensor holds the experts of a layer, read as one tensor for each expert (I/O).

transformers 5 has `mlp.experts.gate_up_proj` [X, 2 F, D] and `mlp.experts.down_proj` [X, D, F]. It
reads and writes files with one tensor for each expert by default, as older versions and inference
servers do; a folder that was saved with `save_original_format=False` has the fused ones.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.models import leaves
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.safetensors import Tensors

# Leaf → its fused tensor's name; which part of the second axis it is, of how many.
_FUSED = {
  "expert_gate": ("gate_up_proj", 0, 2),
  "expert_up": ("gate_up_proj", 1, 2),
  "expert_down": ("down_proj", 0, 1),
}


def apart(tensors: Tensors, config: ModelConfig) -> Tensors:
  """Returns tensors with one for each expert, whether or not the files have fused ones.

  A fused tensor of another shape than the config implies stays as it is.

  Args:
    tensors: Tensors of a folder.
    config: Sizes of the model in it.
  """
  parts: dict[str, _Part] = {}
  for stored in leaves.stored(config):
    if stored.expert is None:
      continue
    name, number, of = _FUSED[stored.path[-1]]
    fused = stored.name.rpartition(f".{stored.expert}.")[0] + f".{name}"
    rows, columns = stored.shape
    if tensors.shapes.get(fused) == (stored.leaf.shape[0], of * rows, columns):
      parts[stored.name] = _Part(fused, stored.expert, number * rows, (rows, columns))
  return _Apart(tensors, parts) if parts else tensors


class _Part(NamedTuple):
  """The tensor of one expert within a fused one."""

  fused: str
  expert: int
  first: int  # row of the expert's.
  shape: tuple[int, int]


class _Apart:
  """Tensors of files with fused ones; that of one expert is kept, as readers take parts of it."""

  def __init__(self, tensors: Tensors, parts: Mapping[str, _Part]):
    self._tensors, self._parts = tensors, parts
    fused = {part.fused for part in parts.values()}
    others = {name: shape for name, shape in tensors.shapes.items() if name not in fused}
    self._shapes = {**others, **{name: part.shape for name, part in parts.items()}}
    self._last: tuple[Any, np.ndarray] | None = None

  @property
  def shapes(self) -> Mapping[str, tuple[int, ...]]:
    return self._shapes

  def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
    part = self._parts.get(name)
    if part is None:
      return self._tensors.read(name, rows)
    key = part.fused, part.expert
    if self._last is None or self._last[0] != key:
      self._last = None  # never two at once.
      (own,) = self._tensors.read(part.fused, slice(part.expert, part.expert + 1))
      self._last = key, own
    return self._last[1][part.first : part.first + part.shape[0]][rows]
