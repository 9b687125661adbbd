"""What a run writes and prints about each step once it has been learned."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from grpo_jax import batching, metrics, processes
from grpo_jax.compilation import compiling
from grpo_jax.groups import credit, learning_signal, shaping
from grpo_jax.groups.filters import Filtered
from grpo_jax.learn import monitoring
from grpo_jax.metrics import scored_groups, timing
from grpo_jax.processes import arrays
from grpo_jax.rl.estimators import Estimator
from grpo_jax.run_folder.hosts import Hosts
from grpo_jax.run_folder.loggers import Logger
from grpo_jax.types import Metrics, RolloutGroup

_log = logging.getLogger(__name__)

# For each rollout of each group: one number per completion token; NaN where not computed.
GroupLogprobs = Sequence[Sequence[Float[np.ndarray, " _"]]]


@dataclasses.dataclass(frozen=True)
class StepRecord:
  """What a step did.

  Attributes:
    step: Number of the step, and version of the weights that it started from.
    groups: Groups of the step, with rewards as they were scored.
    shaped: The same groups with shaped rewards.
    kept: The groups that passed the filters.
    advantages: Advantages of the kept groups.
    batch: The kept groups as they were packed; NumPy.
    watched: Metrics of all completions, where they were measured.
    learned: Metrics of the update.
    logprobs: Logprobs that the update computed, by minibatch and microbatch; on the devices.
  """

  step: int
  groups: Sequence[RolloutGroup]
  shaped: Sequence[RolloutGroup]
  kept: Filtered
  advantages: Sequence[Float[np.ndarray, " _"]]
  batch: batching.Assembled
  watched: Mapping[str, float]
  learned: Metrics
  logprobs: Sequence[Sequence[Float[Array, "_ _"]]]


@dataclasses.dataclass(frozen=True)
class StepRecorder:
  """Records steps: recorder.record(record) writes the metrics of a step and returns them.

  Attributes:
    logger: Writes metrics and rollouts, and prints lines.
    timer: Measures the phases of a step.
    compilations: Lists the programs that were compiled.
    signal_watch: Detects steps with nothing to learn from.
    first_step: Step at which this process began or continued the run.
    shaping: Options of reward shaping.
    estimator: Estimator of the advantages.
    sources: Functions that return further metrics of the step: of the stream, the engine, and so
      on.
    rank: Function (kept groups, logprobs) → metrics of how the policy ranks recorded responses;
      None if responses are sampled.
    by_dataset: Whether metrics are also reported for each dataset.
    by_staleness: Whether metrics are also reported by the ages of tokens.
    has_teacher: Whether a teacher teaches on every completion in the loss.
    devices: Devices of this process.
    hosts: Exchanges times, memory and notices with the other processes.
  """

  logger: Logger
  timer: timing.Timer
  compilations: compiling.CompilationMonitor
  signal_watch: learning_signal.Watch
  first_step: int
  shaping: shaping.Shaping
  estimator: Estimator
  sources: Sequence[Callable[[], Mapping[str, float]]]
  rank: Callable[[Sequence[RolloutGroup], GroupLogprobs], dict[str, float]] | None
  by_dataset: bool
  devices: Sequence[Any]
  by_staleness: bool = False
  has_teacher: bool = False
  hosts: Hosts = dataclasses.field(default_factory=Hosts)

  def record(self, record: StepRecord) -> dict[str, float]:
    """Writes the metrics and rollouts of a step, and prints what a user should know.

    Returns:
      All metrics of the step; see docs/metrics.md. All processes return those of the main one.

    Raises:
      Exception: This process could not record the step.
      OtherProcessError: Another process could not record the step.
    """
    computed = arrays.fetch(record.logprobs)
    compiled = self.compilations.take()
    memory = monitoring.device_memory(self.devices)
    of_hosts = self.hosts.record(
      record.step,
      self.timer,
      device_gib=memory.get("perf/device_peak_gib"),
      compilations=compiling.metrics(compiled)["perf/compilations"],
    )

    # What can fail on one process exchanges nothing, so that the others do not wait for it there.
    def measure() -> tuple[dict[str, float], GroupLogprobs, learning_signal.Signal]:
      logprobs = batching.per_rollout(record.batch, computed, record.kept.kept)
      signal = self._signal(record)
      values = {**self._described(record, logprobs), **memory, **of_hosts}
      values |= {**record.watched, **signal.metrics(), **_computed_share(record, logprobs)}
      values |= compiling.metrics(compiled)
      return {name: float(value) for name, value in values.items()}, logprobs, signal

    def write() -> None:
      self.logger.write(record.step, values)
      self._write_rollouts(record, logprobs)
      for line in self.signal_watch.lines(record.step, signal):
        self.logger.print(line)
      if record.step > self.first_step:
        self._print_late(f"step {record.step}", compiled)

    own, logprobs, signal = processes.together(measure, what=f"measuring step {record.step}")
    values = processes.broadcast(own)  # a curriculum learns from them, on every process alike.
    processes.together(write, what=f"recording step {record.step}")
    return values

  def report_no_signal(self, step: int) -> None:
    """Logs that the run learned nothing from rewards, if that is the case.

    Args:
      step: Number of steps done.
    """
    if step > 0 and not self.signal_watch.has_learned:
      self.logger.print("NOTHING WAS LEARNED FROM REWARDS in this run; the lines above say why")

  def report_late_compilations(self, step: int) -> None:
    """Logs which programs the end of the run compiled, unless the run made no step.

    Args:
      step: Number of steps done.
    """
    compiled = self.compilations.take()
    if step > self.first_step:
      self._print_late("the end of the run", compiled)
    self.hosts.show_notices()

  def _print_late(self, when: str, compiled: Sequence[compiling.Compilation]) -> None:
    if line := compiling.late_line(when, compiled):
      if processes.is_main():
        self.logger.print(line)
      else:
        _log.warning("%s", line)  # the main process shows it.

  def _signal(self, record: StepRecord) -> learning_signal.Signal:
    """Returns what there is to learn from the step."""
    return learning_signal.find(
      record.groups,
      record.kept.select(record.shaped),
      record.advantages,
      record.batch.not_computed,
      self.estimator,
      needs_advantage=not self.has_teacher,
    )

  def _described(self, record: StepRecord, logprobs: GroupLogprobs) -> dict[str, float]:
    """Returns the metrics that are measured in every step."""
    times = self.timer.collect()
    groups, kept = record.groups, record.kept
    return {
      "weight_version": float(record.step),
      **scored_groups.rollout_metrics(groups, step=record.step),
      **shaping.group_metrics(groups, record.shaped, self.shaping),
      **{name: value for source in self.sources for name, value in source().items()},
      **(scored_groups.dataset_metrics(groups) if self.by_dataset else {}),
      **(scored_groups.staleness_metrics(groups, step=record.step) if self.by_staleness else {}),
      **{f"filter/{reason}": float(count) for reason, count in kept.dropped.items()},
      **credit.advantage_metrics(record.advantages),
      **metrics.to_floats(record.batch.metrics),
      **metrics.to_floats(record.learned),
      **(self.rank(kept.kept, logprobs) if self.rank else {}),
      **times,
      **timing.phase_shares(times),
      "perf/tokens_per_s": _tokens(groups) / times["time/step_s"],
      "perf/peak_rss_gib": timing.peak_rss_gib(),
    }

  def _write_rollouts(self, record: StepRecord, logprobs: GroupLogprobs) -> None:
    """Writes all rollouts of a step; missing values of filtered groups are NaN."""
    known = dict(
      zip(record.kept.places, zip(record.advantages, logprobs, strict=True), strict=True)
    )
    columns = [known.get(i) or _unknown(group) for i, group in enumerate(record.groups)]
    shaped = [group.rewards for group in record.shaped]
    self.logger.write_rollouts(
      record.step, record.groups, *zip(*columns, strict=True), shaped_rewards=shaped
    )


def _unknown(group: RolloutGroup) -> tuple[np.ndarray, list[np.ndarray]]:
  """Returns advantages and logprobs of a filtered group."""
  lengths = [len(rollout.completion_ids) for rollout in group.rollouts]
  return np.full(len(lengths), np.nan), [np.full(n, np.nan, np.float32) for n in lengths]


def _computed_share(record: StepRecord, logprobs: GroupLogprobs) -> dict[str, float]:
  """Returns batch/computed_token_share: the share of tokens in train/entropy."""
  total = sum(int(rollout.loss_mask.sum()) for rollout in _rollouts(record.groups))
  share = monitoring.token_shares(record.kept.kept, logprobs, total)
  return {"batch/computed_token_share": share}


def _tokens(groups: Sequence[RolloutGroup]) -> int:
  """Returns the number of tokens of all prompts and completions; a prompt counts per completion."""
  return sum(
    len(group.prompt.token_ids) + len(rollout.completion_ids)
    for group in groups
    for rollout in group.rollouts
  )


def _rollouts(groups: Sequence[RolloutGroup]) -> Iterator[Any]:
  return (rollout for group in groups for rollout in group.rollouts)
