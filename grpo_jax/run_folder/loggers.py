"""Passes what a run records to its sinks: metrics.jsonl, TensorBoard, the console, and others.

`write` has flushed every line when it returns: write the line of a step before its checkpoint. A
resumed run leaves the same files as an uninterrupted one, except for the fields that
`metrics.reproducible` leaves out (time/*, perf/*, hosts/*). Only the main process writes.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from grpo_jax import metrics as table
from grpo_jax import processes
from grpo_jax.files.disk import writing
from grpo_jax.run_folder import console as consoles
from grpo_jax.run_folder import sinks as all_sinks
from grpo_jax.run_folder.options import LoggingOptions
from grpo_jax.run_folder.rollout_log import Decode
from grpo_jax.run_folder.sinks import Choice, Opening, Sink, StepRollouts
from grpo_jax.types import RolloutGroup

_log = logging.getLogger(__name__)


@runtime_checkable
class Logger(Protocol):
  """Where a run reports what it does."""

  def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
    """Records the metrics of a step; several calls for one step make one line.

    Args:
      step: Number of updates done before the measurement; never lower than in the previous call.
      metrics: Values by name. Names without a row in `metrics.METRICS` are recorded with a warning.
    """
    ...

  def write_rollouts(
    self,
    step: int,
    groups: Sequence[RolloutGroup],
    advantages: Sequence[np.ndarray],
    policy_logprobs: Sequence[Sequence[np.ndarray]] | None = None,
    shaped_rewards: Sequence[np.ndarray] | None = None,
  ) -> None:
    """Records what was sampled in a step, and prints some of it.

    The arguments are the attributes of `sinks.StepRollouts`.

    Raises:
      ValueError: Lengths differ.
    """
    ...

  def print(self, line: str) -> None:
    """Logs a notice."""
    ...

  def progress(
    self, description: str, total: int | None = None
  ) -> AbstractContextManager[Callable[..., None]]:
    """Shows the progress of a long phase; the context is a function `advance(count=1)`."""
    ...

  def close(self) -> None:
    """Closes all sinks. No call may follow."""
    ...


def make(
  workdir: str | Path,
  *,
  start_step: int = 0,
  total_steps: int | None = None,
  decode: Decode | None = None,
  sinks: Sequence[Choice] = LoggingOptions.sinks,
  samples_every_steps: int = LoggingOptions.samples_every_steps,
  rollouts_every_steps: int = LoggingOptions.rollouts_every_steps,
  timeout_s: float = LoggingOptions.timeout_s,
  screen: consoles.TrainingScreen | None = None,
  more_sinks: Sequence[Sink] = (),
  wandb: Mapping[str, Any] | None = None,
) -> Logger:
  """Opens the logs of a new or resumed run; processes other than the main one get a silent logger.

  Args:
    workdir: Run folder; created if it is missing.
    start_step: Step that runs next. Records of steps >= start_step are dropped.
    total_steps: Number of steps of the run, for the console; None if there is no end.
    decode: Function from token ids to text, special tokens included. It splits completions into
      the texts of their tokens; None omits these.
    sinks: Names of the sinks, or mappings with a name and options; see `run_folder.sinks`.
    samples_every_steps: Steps between two prints of a group's best and worst completion, and
      between two tables of completions of a tracker; 0: never.
    rollouts_every_steps: Steps between two files rollouts/step_NNNNNN.jsonl; 0: never.
    timeout_s: Seconds after which a tracker, or a user's own sink, counts as hanging.
    screen: Screen to print on; None: standard output.
    more_sinks: Open sinks, used after those that are named.
    wandb: Options of the sink "wandb"; None stands for a default.

  Raises:
    ValueError: A number of steps is negative.
    SinkError: A sink cannot be opened.
    WriteError: The folder cannot be written to.
  """
  counts = {
    "start_step": start_step,
    "samples_every_steps": samples_every_steps,
    "rollouts_every_steps": rollouts_every_steps,
  }
  for name, value in counts.items():
    if value < 0:
      raise ValueError(f"{name} must be at least 0, got {value}")
  if not processes.is_main():
    return SilentLogger()
  screen = screen or consoles.TrainingScreen()
  defaults: dict[str, Mapping[str, Any]] = {
    "jsonl": {"rollouts_every_steps": rollouts_every_steps},
    "console": {"samples_every_steps": samples_every_steps},
  }
  shared = {"samples_every_steps": samples_every_steps, "timeout_s": timeout_s}
  defaults |= {name: shared for name in all_sinks.TRACKERS}
  given = {key: value for key, value in (wandb or {}).items() if value is not None}
  defaults["wandb"] = {**shared, **given}
  chosen = [all_sinks.split(choice) for choice in sinks]
  choices = [{"name": name, **defaults.get(name, {}), **options} for name, options in chosen]
  opening = Opening(Path(workdir), start_step, total_steps, screen, decode)
  with writing(opening.workdir):
    opening.workdir.mkdir(parents=True, exist_ok=True)
  named = all_sinks.make(choices, opening, timeout_s=timeout_s)
  return RunLogger([*named, *more_sinks], screen)


class RunLogger:
  """Passes everything to the sinks, in their order; made by `make`."""

  def __init__(self, sinks: Sequence[Sink], screen: consoles.TrainingScreen):
    """Makes a logger.

    Args:
      sinks: Open sinks.
      screen: Screen that shows progress.
    """
    self._sinks = sinks
    self._screen = screen
    self._unknown: set[str] = set()  # names without a row in the table, already warned about.

  def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
    """See `Logger`."""
    values = {name: float(value) for name, value in metrics.items()}
    for name in set(table.unknown(values)) - self._unknown:
      self._unknown.add(name)
      warnings.warn(f"metric {name!r} has no row in grpo_jax.metrics.METRICS", stacklevel=2)
    for sink in self._sinks:
      sink.write(step, values)

  def write_rollouts(
    self,
    step: int,
    groups: Sequence[RolloutGroup],
    advantages: Sequence[np.ndarray],
    policy_logprobs: Sequence[Sequence[np.ndarray]] | None = None,
    shaped_rewards: Sequence[np.ndarray] | None = None,
  ) -> None:
    """See `Logger`."""
    rollouts = StepRollouts(step, groups, advantages, policy_logprobs, shaped_rewards)
    for sink in self._sinks:
      sink.write_rollouts(rollouts)

  def print(self, line: str) -> None:
    """See `Logger`."""
    _log.info(line)

  def progress(
    self, description: str, total: int | None = None
  ) -> AbstractContextManager[Callable[..., None]]:
    """See `Logger`."""
    return self._screen.progress(description, total)

  def close(self) -> None:
    """See `Logger`."""
    for sink in self._sinks:
      sink.close()


class SilentLogger:
  """The logger of all processes other than the main one: does nothing; see `Logger`."""

  def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
    """See `Logger`."""

  def write_rollouts(
    self,
    step: int,
    groups: Sequence[RolloutGroup],
    advantages: Sequence[np.ndarray],
    policy_logprobs: Sequence[Sequence[np.ndarray]] | None = None,
    shaped_rewards: Sequence[np.ndarray] | None = None,
  ) -> None:
    """See `Logger`."""

  def print(self, line: str) -> None:
    """See `Logger`."""

  def progress(
    self, description: str, total: int | None = None
  ) -> AbstractContextManager[Callable[..., None]]:
    """See `Logger`."""
    return nullcontext(lambda count=1: None)

  def close(self) -> None:
    """See `Logger`."""
