"""Selects the rows of a source for a dataset: one side of a split, once or repeatedly. Pure."""

import math

import numpy as np
from jaxtyping import Int

from grpo_jax.data.options import DataOptions


class RowSelection:
  """A selection of row numbers, in the source's order.

  The rows of the validation split are drawn once from the seed, and only their numbers are kept.
  """

  def __init__(
    self,
    rows: int,
    *,
    side: str = "all",
    split_validation_size: float | int = DataOptions.split_validation_size,
    split_seed: int = 0,
    repeat: int = DataOptions.repeat,
  ):
    """Draws the split.

    Args:
      rows: Number of rows of the source.
      side: "all", "train" (without the validation rows), or "validation" (only those).
      split_validation_size: Validation rows: a share of all if below 1, otherwise a number.
      split_seed: Random seed of the split. The same numbers give the same split in every run.
      repeat: Number of times that the rows are repeated.

    Raises:
      ValueError: A side of the split would be empty, or a number is out of range.
    """
    if repeat < 1:
      raise ValueError(f"repeat must be at least 1, got {repeat}")
    if side not in ("all", "train", "validation"):
      raise ValueError(f"side must be 'all', 'train' or 'validation', got {side!r}")
    self._side = side
    self._drawn = np.zeros(0, np.int64)
    if side != "all" and split_validation_size:
      size = _drawn_rows(rows, split_validation_size)
      generator = np.random.default_rng(split_seed)
      self._drawn = np.sort(generator.choice(rows, size, replace=False, shuffle=False))
    elif side == "validation":
      raise ValueError("the validation side needs split_validation_size above 0")
    self.rows = len(self._drawn) if side == "validation" else rows - len(self._drawn)
    # gaps[k]: number of rows before the k-th drawn row that are not drawn.
    self._gaps: Int[np.ndarray, " drawn"] = self._drawn - np.arange(len(self._drawn))
    self._repeat = repeat

  def __len__(self) -> int:
    return self.rows * self._repeat

  def source_row(self, row: int) -> int:
    """Returns the number in the source of a row of this part."""
    row %= self.rows
    if self._side == "validation":
      return int(self._drawn[row])
    return row + int(np.searchsorted(self._gaps, row, side="right"))

  def takes(self, source_row: int) -> bool:
    """Returns whether a row of the source, by its number there, is in this part."""
    is_drawn = bool(np.isin(source_row, self._drawn))
    return is_drawn if self._side == "validation" else not is_drawn

  def round_of(self, row: int) -> int:
    """Returns how often the row occurred before in the same epoch."""
    return row // self.rows


def _drawn_rows(rows: int, size: float | int) -> int:
  if size < 0:
    raise ValueError(f"split_validation_size must not be negative, got {size}")
  drawn = math.ceil(rows * size) if size < 1 else int(size)
  if size >= 1 and drawn != size:
    raise ValueError(f"split_validation_size is a share below 1 or a whole number, got {size}")
  if not 0 < drawn < rows:
    raise ValueError(
      f"split_validation_size={size} splits {drawn} of {rows} rows off: both sides need one"
    )
  return drawn
