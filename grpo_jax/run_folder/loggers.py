"""Writes what a run tells: metrics.jsonl, TensorBoard, sampled rollouts, and the console.

A folder that is opened again at step s loses what steps >= s had written (they are repeated), so
that a killed and resumed run leaves the files of one that was never killed; only the fields that
`metrics.reproducible` leaves out (time/*, perf/*) differ. Every line is on its way to the disk
when `write` returns: write the line of a step before its checkpoint. Of several processes only
the first writes.
"""

import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from grpo_jax import metrics as table
from grpo_jax import processes
from grpo_jax.files.disk import writing
from grpo_jax.run_folder import console as consoles
from grpo_jax.run_folder.rollout_log import (
  Decode,
  TokenTexts,
  drop_rollouts,
  json_line,
  replace_file,
  rollout_records,
)
from grpo_jax.types import RolloutGroup

if TYPE_CHECKING:
  from grpo_jax.run_folder.event_files import EventFile


_log = logging.getLogger(__name__)


@runtime_checkable
class Logger(Protocol):
  """Where a run tells what it does."""

  def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
    """Records the metrics of a step; several calls for one step make one line."""
    ...

  def write_rollouts(
    self,
    step: int,
    groups: Sequence[RolloutGroup],
    advantages: Sequence[np.ndarray],
    policy_logprobs: Sequence[Sequence[np.ndarray]] | None = None,
    shaped_rewards: Sequence[np.ndarray] | None = None,
  ) -> None:
    """Records what was sampled in a step, and prints some of it."""
    ...

  def print(self, line: str) -> None:
    """Logs a notice."""
    ...

  def progress(
    self, description: str, total: int | None = None
  ) -> AbstractContextManager[Callable[..., None]]:
    """Shows how far a long phase has come; gives a function `advance(count=1)`."""
    ...

  def close(self) -> None:
    """Ends all files. No call may follow."""
    ...


def make(
  workdir: str | Path,
  *,
  start_step: int = 0,
  total_steps: int | None = None,
  decode: Decode | None = None,
  tensorboard: bool = True,
  samples_every_steps: int = 10,
  rollouts_every_steps: int = 1,
  screen: consoles.Screen | None = None,
) -> Logger:
  """Opens the logs of a run folder, new or resumed; a silent one on all processes but the first.

  Args:
    workdir: the run folder; made if missing.
    start_step: the step that runs next. What steps >= start_step had written is dropped.
    total_steps: of the run, for the console; None if there is no end.
    decode: token ids to text, special tokens included; splits completions into the texts of
      their tokens. None leaves these out.
    tensorboard: whether to write event files, too.
    samples_every_steps: print a group's best and worst completion; 0: never.
    rollouts_every_steps: write rollouts/step_NNNNNN.jsonl; 0: never.
    screen: None prints to standard output.

  Raises:
    ValueError: if a number of steps is negative.
    WriteError: the folder cannot be written.
  """
  given = {
    "start_step": start_step,
    "samples_every_steps": samples_every_steps,
    "rollouts_every_steps": rollouts_every_steps,
  }
  for name, value in given.items():
    if value < 0:
      raise ValueError(f"{name} must be at least 0, got {value}")
  if not processes.is_main():
    return SilentLogger()
  workdir = Path(workdir)
  with writing(workdir):
    workdir.mkdir(parents=True, exist_ok=True)
    drop_rollouts(workdir / "rollouts", start_step)
  events = None
  if tensorboard:
    from grpo_jax.run_folder.event_files import (
      EventFile,  # tensorboardX imports torch where it is installed.
    )

    events = EventFile(workdir / "tensorboard", start_step)
  return RunLogger(
    workdir,
    lines=MetricLines(workdir / "metrics.jsonl", start_step),
    events=events,
    screen=screen or consoles.Screen(),
    total_steps=total_steps,
    decode=decode,
    samples_every_steps=samples_every_steps,
    rollouts_every_steps=rollouts_every_steps,
  )


class MetricLines:
  """The file metrics.jsonl: one object a step, in the order of steps.

  JSON knows no NaN and no infinity: both are written as null.
  """

  def __init__(self, path: Path, start_step: int):
    """Opens the file at a step, without the lines of that step and later ones."""
    text = path.read_text(errors="replace") if path.exists() else ""
    rows, broken = table.parse_lines(text)
    self.kept = [row for row in rows if row["step"] < start_step]
    self.broken = [number for number in broken if number < text.count("\n") + 1]
    replace_file(path, (json_line(row) for row in self.kept))
    self._path = path
    self._offset = path.stat().st_size  # where the last line begins.
    self._last: dict[str, Any] = {"step": start_step - 1}  # no line of this opening yet.
    self._start_step = start_step

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Adds a line, or adds the values to the last line if it is that of the same step."""
    if step < max(self._start_step, self._last["step"]):
      raise ValueError(f"steps must not go back: got {step} after {self._last['step']}")
    finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
    if step == self._last["step"]:
      self._last |= finite
    else:
      self._offset = self._path.stat().st_size
      self._last = {"step": step} | finite
    with writing(self._path), open(self._path, "r+b") as file:
      file.seek(self._offset)
      file.write(json_line(self._last).encode())
      file.truncate()


class RunLogger:
  """Writes a run folder and the console; made by `make`."""

  def __init__(
    self,
    workdir: Path,
    *,
    lines: MetricLines,
    events: "EventFile | None",
    screen: consoles.Screen,
    total_steps: int | None,
    decode: Decode | None,
    samples_every_steps: int,
    rollouts_every_steps: int,
  ):
    self._workdir = workdir
    self._lines = lines
    self._events = events
    self._screen = screen
    self._total_steps = total_steps
    self._texts = TokenTexts(decode) if decode else None
    self._samples_every_steps = samples_every_steps
    self._rollouts_every_steps = rollouts_every_steps
    self._told: set[str] = set()  # names found to be in no table.
    self._first: dict[str, float] = {}  # the first value of every evaluation metric.
    for row in lines.kept:
      self._remember_first(row)
    if lines.broken:
      _log.warning("metrics.jsonl: lines %s could not be read and were dropped", lines.broken)

  def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
    """Records the metrics of a step; several calls for one step make one line.

    Args:
      step: updates done before what is measured; never lower than in the call before.
      metrics: {name: value}; names as in `metrics.METRICS`, others are recorded with a warning.
    """
    values = {name: float(value) for name, value in metrics.items()}
    for name in set(table.unknown(values)) - self._told:
      self._told.add(name)
      warnings.warn(f"metric {name!r} is in no row of grpo_jax.metrics.METRICS", stacklevel=2)
    self._lines.write(step, values)
    if self._events is not None:
      finite = {name: value for name, value in values.items() if math.isfinite(value)}
      self._events.write(step, finite)
    for name in evaluations(values):
      self._screen.print(consoles.eval_line(name, step, values, self._first))
    if "rollout/reward_mean" in values:
      self._screen.step(step, self._total_steps, values)
    self._remember_first(values)

  def write_rollouts(
    self,
    step: int,
    groups: Sequence[RolloutGroup],
    advantages: Sequence[np.ndarray],
    policy_logprobs: Sequence[Sequence[np.ndarray]] | None = None,
    shaped_rewards: Sequence[np.ndarray] | None = None,
  ) -> None:
    """Records what was sampled in a step, and prints some of it.

    Args:
      step: as in `write`.
      groups: of the step.
      advantages: [G] of every group; NaN where a rollout has none.
      policy_logprobs: the trainer's logprobs of every group's every rollout, aligned with its
        completion, in nats; NaN on tokens that have none. None if they were not computed.
      shaped_rewards: [G] of every group, what the advantages are of; None: the rewards.

    Raises:
      ValueError: if lengths differ.
    """
    if self._rollouts_every_steps and step % self._rollouts_every_steps == 0:
      records = rollout_records(
        step, groups, advantages, policy_logprobs, self._texts, shaped_rewards
      )
      folder = self._workdir / "rollouts"
      with writing(folder):
        folder.mkdir(exist_ok=True)
      replace_file(folder / f"step_{step:06d}.jsonl", map(json_line, records))
    for line in consoles.failure_lines(groups):
      self._screen.print(line)
    if groups and self._samples_every_steps and step % self._samples_every_steps == 0:
      chosen = next((i for i, group in enumerate(groups) if table.has_signal(group)), 0)
      if groups[chosen].rollouts:
        self._screen.sample(step, groups[chosen], advantages[chosen])

  def print(self, line: str) -> None:
    """Logs a notice."""
    _log.info(line)

  def progress(
    self, description: str, total: int | None = None
  ) -> AbstractContextManager[Callable[..., None]]:
    """Shows how far a long phase has come; gives a function `advance(count=1)`."""
    return self._screen.progress(description, total)

  def close(self) -> None:
    """Ends all files. No call may follow."""
    if self._events is not None:
      self._events.close()

  def _remember_first(self, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
      if name.startswith("eval/") and value is not None:
        self._first.setdefault(name, value)


class SilentLogger:
  """Writes nothing: what all processes but the first get."""

  def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
    """Does nothing."""

  def write_rollouts(
    self,
    step: int,
    groups: Sequence[RolloutGroup],
    advantages: Sequence[np.ndarray],
    policy_logprobs: Sequence[Sequence[np.ndarray]] | None = None,
    shaped_rewards: Sequence[np.ndarray] | None = None,
  ) -> None:
    """Does nothing."""

  def print(self, line: str) -> None:
    """Does nothing."""

  def progress(
    self, description: str, total: int | None = None
  ) -> AbstractContextManager[Callable[..., None]]:
    """Gives a function that does nothing."""
    return nullcontext(lambda count=1: None)

  def close(self) -> None:
    """Does nothing."""


def evaluations(names: Iterable[str]) -> list[str]:
  """Returns the NAMEs of metrics eval/NAME/..., sorted."""
  pattern = re.compile(r"eval/(.+?)(/errors)?/[^/]+$")
  return sorted({found[1] for name in names if (found := pattern.match(name))})
