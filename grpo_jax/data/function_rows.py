"""Rows that a function makes from a seed: tasks without a file."""

from collections.abc import Callable, Mapping
from typing import Any

from grpo_jax.data import formats
from grpo_jax.errors import place_and_reason
from grpo_jax.registry import check_arguments, function, in_one_line


class FunctionSource:
  """Rows of a function `(*, seed, **task_args) -> fields`; row r has the seed `seed + r`.

  Nothing is stored: a row is made whenever it is read, always the same.
  """

  def __init__(
    self,
    path: str,
    *,
    size: int,
    seed: int = 0,
    task_args: Mapping[str, Any] | None = None,
    name: str | None = None,
  ):
    """Loads the function and makes the first row.

    Args:
      path: Dotted path of the function.
      size: Number of rows.
      seed: Seed of row 0. Two datasets share rows unless their seeds are at least `size` apart.
      task_args: Further keyword arguments of the function.
      name: Name of the dataset; None: "FUNCTION-SEED".

    Raises:
      ValueError: There is no such function, it rejects its arguments, or does not return a mapping.
    """
    if size < 1:
      raise ValueError(f"size must be at least 1, got {size}")
    self.name = name or f"{path.rpartition('.')[2]}-{seed}"
    self._make: Callable[..., Any] = function(path)
    self._size = size
    self._seed = seed
    self._args = dict(task_args or {})
    check_arguments(f"data.task {path}", self._make, self._args, usual=["seed"])
    with in_one_line(f"data.task {path} failed for seed {seed}", path):
      first = self._make(seed=seed, **self._args)
    if not isinstance(first, Mapping):
      raise ValueError(f"{path} must return a mapping of fields, it returned {first!r:.100}")

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, row: int) -> Mapping[str, Any]:
    try:
      return dict(self._make(seed=self._seed + row, **self._args))
    except Exception as error:  # the user's function may fail on some seed.
      raise formats.RowError(self.where(row), place_and_reason(error)) from error

  @property
  def seeds(self) -> range:
    """Seeds of the rows, in their order."""
    return range(self._seed, self._seed + self._size)

  def where(self, row: int) -> str:
    """Returns the place of a row, for messages."""
    return f"{self.name}:{row + 1}"
