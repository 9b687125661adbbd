"""How long a run still takes: its steps, evaluations and checkpoints that are left, and its end.

The time of a step is the median of the last ten, from the line of the step or evaluation before it
to its own line. Compilation and other delays of single steps therefore do not count, and the first
step of a process counts only until there is a second one. What has not been measured yet counts as
nothing: evaluations until the first, the end (the last checkpoint and the export, which are
written at the same time) until a checkpoint was written.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

STEPS = 10  # number of steps whose median is expected.


class Ahead(NamedTuple):
  """What a run still has to do."""

  steps: int
  evaluations: int = 0
  saves: int = 0  # checkpoints between steps.


class TimeLeft:
  """Expects how long a run still takes, from what it has measured; safe to ask from any thread."""

  def __init__(
    self,
    ahead: Callable[..., Ahead | None],
    *,
    end_s: Callable[[], float] = lambda: math.nan,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Expects nothing yet.

    Args:
      ahead: Function (number of steps done, is_evaluated) → what is left of the run; None if
        nobody knows.
      end_s: Function that returns the expected seconds of the end; NaN if unknown.
      clock: Function that returns monotonic seconds.
    """
    self._ahead_of = ahead
    self._end_s = end_s
    self._clock = clock
    self._ahead: Ahead | None = None
    self._since = 0.0  # when that was left.
    self._steps: Sequence[float] = ()  # seconds of the last steps.
    self._evaluation = self._save = math.nan  # seconds of the last one.
    self._count = 0  # steps of this process.

  def recall(self, rows: Iterable[Mapping[str, Any]], done: int) -> None:
    """Takes what an earlier process of the run has measured, until this one has its own.

    Args:
      rows: Metrics of the steps before this process, in order.
      done: Number of steps done.
    """
    for row in rows:
      self._measured(row)
      self._step(_seconds(row, "time/step_s"))
    self._moved(self._ahead_of(done, is_evaluated=False))

  def stepped(self, done: int, values: Mapping[str, Any]) -> None:
    """Takes the metrics of a step that has just been recorded.

    Args:
      done: Number of steps done, this one included.
      values: Metrics of the step.
    """
    self._measured(values)
    took = _seconds(values, "time/step_s")
    if self._count:
      saving = _seconds(values, "time/checkpoint_s")
      took = self._clock() - self._since - (saving if math.isfinite(saving) else 0.0)
    if self._count < 2:  # those of another process, or a first one.
      self._steps = ()
    self._count += 1
    self._step(took)
    self._moved(self._ahead_of(done, is_evaluated=False))

  def evaluated(self, done: int, values: Mapping[str, Any]) -> None:
    """Takes the metrics of an evaluation that has just been recorded.

    Args:
      done: Number of steps done.
      values: Metrics of the evaluation.
    """
    self._measured(values)
    self._moved(self._ahead_of(done, is_evaluated=True))

  def seconds(self) -> float:
    """Returns the expected seconds until the end of the run, from now; NaN if unknown."""
    if self._ahead is None or not self._steps:
      return math.nan
    units = (statistics.median(self._steps), self._evaluation, self._save, self._end_s())
    parts = [
      (count, unit)
      for count, unit in zip((*self._ahead, 1), units, strict=True)
      if count and math.isfinite(unit)
    ]
    left = sum(count * unit for count, unit in parts)
    current = max((unit for _, unit in parts), default=0.0)  # it may take longer than expected.
    return left - min(self._clock() - self._since, current)

  def _measured(self, values: Mapping[str, Any]) -> None:
    evaluation, save = (_seconds(values, f"time/{what}_s") for what in ("evaluate", "checkpoint"))
    self._evaluation = evaluation if math.isfinite(evaluation) else self._evaluation
    self._save = save if math.isfinite(save) else self._save

  def _step(self, took: float) -> None:
    if math.isfinite(took):
      self._steps = (*self._steps[1 - STEPS :], took)

  def _moved(self, ahead: Ahead | None) -> None:
    self._ahead, self._since = ahead, self._clock()


def of_steps(total: int | None) -> Callable[..., Ahead | None]:
  """Returns what a run of steps alone has to do; None: nobody knows how many."""

  def ahead(done: int, *, is_evaluated: bool) -> Ahead | None:
    del is_evaluated
    return None if total is None else Ahead(total - done)

  return ahead


def _seconds(values: Mapping[str, Any], name: str) -> float:
  """Returns a metric; NaN if it is missing, also as the null of a file."""
  value = values.get(name)
  return math.nan if value is None else float(value)
