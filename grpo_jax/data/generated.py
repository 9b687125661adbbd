"""Rows of reasoning-gym tasks: generated whenever they are read, never stored."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from grpo_jax.data import formats
from grpo_jax.errors import MissingExtra
from grpo_jax.registry import choose, nearest


class ReasoningGymSource:
  """Rows of a task of the reasoning-gym package: generated from (seed, row), never stored.

  A row has `entry` (question, answer, metadata); `task` and `task_args` make its scorer.
  """

  def __init__(
    self,
    task: str,
    *,
    size: int,
    seed: int,
    task_args: Mapping[str, Any] | None = None,
    name: str | None = None,
  ):
    """Creates the task.

    Args:
      task: Name of a reasoning-gym dataset, e.g. "chain_sum".
      size: Number of rows.
      seed: Seed of the generator. Most tasks generate row r from seed + r: two datasets share
        rows unless their seeds are at least `size` apart.
      task_args: Further arguments of the task, e.g. {"max_terms": 2}.
      name: Name of the dataset; None: "TASK-SEED".

    Raises:
      MissingExtra: The package reasoning-gym is not installed.
      ValueError: There is no such task, or it rejects an argument.
    """
    self.name = name or f"{task}-{seed}"
    self._task = task
    self._args = {**(task_args or {}), "size": size, "seed": seed}
    self._dataset = make_task(task, self._args)

  def __len__(self) -> int:
    return len(self._dataset)

  def __getitem__(self, row: int) -> Mapping[str, Any]:
    try:
      entry = self._dataset[row]
    except Exception as error:  # a generator of the package may fail on some seed.
      raise formats.RowError(self.where(row), f"{type(error).__name__}: {error}") from error
    return {"entry": entry, "task": self._task, "task_args": self._args}

  @property
  def seeds(self) -> range:
    """Seeds of the rows, in their order; a few tasks of the package do not depend on them alone."""
    return range(self._args["seed"], self._args["seed"] + len(self))

  def where(self, row: int) -> str:
    return f"{self.name}:{row + 1}"


def make_task(task: str, args: Mapping[str, Any]) -> Any:
  """Creates a reasoning-gym dataset; errors list the valid names."""
  # reasoning-gym imports this package; Python prints it when it compiles it to byte code.
  warnings.filterwarnings("ignore", category=SyntaxWarning, module=".*cellpylib")
  try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
  except ImportError as error:
    raise MissingExtra(f"the reasoning-gym task {task!r}", "reasoning-gym", error) from error

  _, config = choose("reasoning-gym task", task, DATASETS)
  known = [field.name for field in dataclasses.fields(config)]
  for key in args:
    if key not in known:
      raise ValueError(
        f"reasoning-gym task {task!r} has no argument {key!r}{nearest(key, known)}; "
        f"there are: {', '.join(known)}"
      )
  try:
    return reasoning_gym.create_dataset(task, **args)
  except (AssertionError, AttributeError, TypeError, ValueError) as error:
    raise ValueError(f"reasoning-gym task {task!r} rejects {dict(args)}: {error}") from error
