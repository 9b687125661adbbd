"""A weighted mixture of sources as one source of rows: several reasoning-gym tasks at once."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from grpo_jax.registry import nearest

LABEL = "mixture"  # field of a row: the label of the part that it is from.


@runtime_checkable
class Rows(Protocol):
  """What a mixture needs of a source."""

  def __len__(self) -> int: ...

  def __getitem__(self, row: int) -> Mapping[str, Any]: ...

  def where(self, row: int) -> str: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
  """One task of a mixture."""

  task: str  # name of the reasoning-gym dataset.
  weight: float = 1.0  # its share of the rows is weight / sum of the weights.
  task_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class MixtureSource:
  """Rows of several sources, in a random order that the seed settles.

  Row r is row r of the source that it is assigned to, so that no source repeats itself.
  """

  def __init__(
    self,
    sources: Mapping[str, Rows],
    *,
    weights: Mapping[str, float],
    size: int,
    seed: int,
    name: str,
  ):
    """Assigns the rows.

    Args:
      sources: by label, each of at least `size` rows.
      weights: of the sources, by label; shares of the rows, exact to one row.
      size: number of rows.
      seed: of the order.
      name: of the dataset.

    Raises:
      ValueError: a weight is not positive, or a source is too short.
    """
    for label, source in sources.items():
      if not 0 < weights[label] < float("inf"):
        raise ValueError(f"mixture: the weight of {label!r} must be positive, got {weights[label]}")
      if len(source) < size:
        raise ValueError(f"mixture: {label!r} has {len(source)} rows, {size} are needed")
    self.name = name
    self._sources = list(sources.items())
    self._assigned = assign([weights[label] for label in sources], size, seed)

  def __len__(self) -> int:
    return len(self._assigned)

  def __getitem__(self, row: int) -> Mapping[str, Any]:
    label, source = self._sources[self._assigned[row]]
    return {**source[row], LABEL: label}

  def where(self, row: int) -> str:
    """Returns the place of a row, for messages: the part and its row."""
    label, source = self._sources[self._assigned[row]]
    return f"{self.name}, {label}: {source.where(row)}"


def read_parts(mixture: Mapping[str, Mapping[str, Any]]) -> dict[str, Part]:
  """Reads `{label: {"task": …, "weight": …, "task_args": {…}}}`, all fields optional.

  Args:
    mixture: by label, which stands in the metrics, and names the task where no field does.

  Raises:
    ValueError: an unknown field.
  """
  known = [field.name for field in dataclasses.fields(Part)]
  for label, settings in mixture.items():
    for key in settings:
      if key not in known:
        raise ValueError(
          f"data.mixture.{label} has no field {key!r}{nearest(key, known)}; "
          f"there are: {', '.join(known)}"
        )
  return {
    label: Part(
      task=settings.get("task", label),
      weight=float(settings.get("weight", 1.0)),
      task_args=settings.get("task_args", {}),
    )
    for label, settings in mixture.items()
  }


def assign(weights: Sequence[float], size: int, seed: int) -> Int[np.ndarray, " rows"]:
  """Says of which source each row is: the shares are exact to one row, the order is random.

  Args:
    weights: of the sources, positive.
    size: number of rows.
    seed: of the order.

  Returns:
    Numbers of sources; their counts are rounded by the largest remainder.
  """
  exact = np.asarray(weights, np.float64) / np.sum(weights) * size
  counts = np.floor(exact).astype(np.int64)
  by_remainder = np.argsort(counts - exact, kind="stable")
  counts[by_remainder[: size - counts.sum()]] += 1
  rows = np.repeat(np.arange(len(weights), dtype=np.int32), counts)
  return np.random.default_rng(seed).permutation(rows)
