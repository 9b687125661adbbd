"""The checkpoints in a folder, the best of them, and those that are kept."""

import contextlib
import math
import pathlib
import re
from collections.abc import Mapping, Sequence

from grpo_jax.values import json_text

_STEP = re.compile(r"step_(\d{8,})")


def folder(directory: pathlib.Path, step: int) -> pathlib.Path:
  """Returns the folder of one checkpoint."""
  return directory / f"step_{step:08d}"


def number(name: str) -> int | None:
  """Returns the step that a folder of this name is of; None if it is not of a step."""
  found = _STEP.fullmatch(name)
  return int(found[1]) if found else None


def complete(directory: pathlib.Path) -> list[int]:
  """Returns the complete steps in ascending order; does not check whether they are intact."""
  if not directory.is_dir():
    return []
  numbers = (number(path.name) for path in directory.iterdir())
  return sorted(step for step in numbers if step is not None)


def metric(checkpoint: pathlib.Path, names: Sequence[str]) -> float | None:
  """Returns the metric that ranks a checkpoint: the first of `names` that was measured at it."""
  return chosen(metrics(checkpoint), names)


def chosen(found: Mapping[str, float], names: Sequence[str]) -> float | None:
  """Returns the first of the named metrics that was measured; None if none was."""
  return next((found[name] for name in names if name in found), None)


def metrics(checkpoint: pathlib.Path) -> dict[str, float]:
  """Returns the metrics that were measured at a checkpoint; empty if its info.json is damaged."""
  with contextlib.suppress(OSError):
    return metrics_in((checkpoint / "info.json").read_bytes())
  return {}


def metrics_in(info: bytes) -> dict[str, float]:
  """Returns the metrics that the content of an info.json lists; empty if it is damaged."""
  try:
    found = json_text.parsed(info)["metrics"]
    return {name: float(value) for name, value in found.items()}
  except json_text.UNEXPECTED:
    return {}


def best_first(metric_of: Mapping[int, float | None], mode: str = "max") -> list[int]:
  """Returns the steps, the best one first.

  Steps without a metric, or with NaN, rank last; of two equal metrics the newer step ranks higher.

  Args:
    metric_of: Metric that ranks each step, by step; None where it was not measured.
    mode: Direction of the metric: "max" if larger is better, "min" if smaller is better.
  """

  def rank(step: int) -> tuple[bool, float]:
    metric = metric_of[step]
    if metric is None or math.isnan(metric):
      return True, 0.0
    return False, -metric if mode == "max" else metric

  return sorted(
    sorted(metric_of, reverse=True), key=rank
  )  # stable: of equal ones, the newer first.


def kept(
  metric_of: Mapping[int, float | None],
  *,
  keep_last: int | None,
  keep_best: int,
  mode: str = "max",
) -> set[int]:
  """Returns the steps to keep: the newest `keep_last` and the best `keep_best`.

  The newest is always kept. Steps without a metric, or with NaN, rank last;
  of two equal metrics the newer step ranks higher.

  Args:
    metric_of: Metric that ranks each step, by step; None where it was not measured.
    keep_last: Number of newest steps to keep; None keeps every step.
    keep_best: Number of best steps to keep.
    mode: Direction of the metric: "max" if larger is better, "min" if smaller is better.
  """
  newest_first = sorted(metric_of, reverse=True)
  if keep_last is None:
    return set(newest_first)
  ranked = best_first(metric_of, mode)
  return set(newest_first[: max(keep_last, 1)]) | set(ranked[:keep_best])
