"""Streams of groups, from which the loop learns step by step.

The online stream samples. With dynamic sampling it continues until a step is full of groups
that pass the filters; surplus groups come first in the next step.

A stream returns rewards as they were scored. The loop shapes them, for every stream alike.
"""

import collections
import dataclasses
import logging
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import numpy as np

from grpo_jax import metrics, processes
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.engines.base import OnProgress, SamplingParams, mismatch_warning
from grpo_jax.environments.base import AnyFactory
from grpo_jax.errors import ExpectedFailure
from grpo_jax.groups import filters, group_json
from grpo_jax.rollouts import rollout, work_sharing
from grpo_jax.rollouts.background_attempts import BackgroundAttempts
from grpo_jax.rollouts.group_source import GroupSource
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.rollouts.options import DynamicOptions, RolloutOptions
from grpo_jax.rollouts.turn_sampling import Generator
from grpo_jax.types import Prompt, RolloutGroup
from grpo_jax.values import options

_log = logging.getLogger(__name__)


@runtime_checkable
class GroupStream(Protocol):
  """A source of the groups of each step, sampled or recorded."""

  def take(self, step: int) -> list[RolloutGroup]:
    """Returns the groups of a step with the rewards as scored; none when the data has ended."""
    ...

  def state(self) -> dict[str, Any]:
    """Returns, as strict JSON, what a new stream needs to continue after the last `take`.

    Called before the first `take`, and after each step that was learned.
    """
    ...

  def metrics(self) -> dict[str, float]:
    """Returns the metrics of the last `take`; their names are in metrics/table.py."""
    ...

  def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """Records the metrics of a learned step, without times; called before `state`."""
    ...

  def settle(self, *, has_learned: bool = True) -> None:
    """Prepares for the weights that the engine gets next; called before each update of them.

    Args:
      has_learned: Whether an update has been made that is not saved yet. It must not be lost: what
        goes wrong here is then raised by the next `take`, and a run that is asked to end is only
        waited for a while.

    Raises:
      Stopped: The run is asked to end; not if `has_learned`.
      Exception: What `take` raises; not if `has_learned`.
    """
    ...

  def close(self) -> None:
    """Ends what is still sampled; called when the run ends."""
    ...


# Shows how far a long phase has come: (description, total) -> a context with `advance(count)`.
Progress = Callable[[str, int], AbstractContextManager[Callable[..., None]]]


@dataclasses.dataclass(frozen=True)
class RolloutSampler:
  """An engine and environments: attempts prompts, and scores the attempts."""

  engine: Generator
  environments: Mapping[str, AnyFactory]
  tokenizer: Tokenizer
  group_size: int
  sampling: SamplingParams
  seed: int  # random seed of the run.
  limits: rollout.AttemptLimits
  progress: Progress
  loop: LoopThread  # event loop of the run.
  stop: Any = False  # becomes true when the run is asked to end; see `interrupts.Flag`.
  with_greedy: bool = False  # one more attempt at each prompt, at temperature 0.
  # Order of later turns; see `rollout.groups`.
  schedule: rollout.Schedule = RolloutOptions.schedule

  def __post_init__(self):
    """Warns, whatever the engine, if training computes another distribution than is sampled."""
    if warning := mismatch_warning(self.sampling):
      _log.warning("%s", warning)

  def __call__(self, prompts: Sequence[Prompt], step: int) -> list[RolloutGroup]:
    """Returns one group for each prompt, in their order.

    Args:
      prompts: Prompts of different ids.
      step: Step that they are for.

    Raises:
      interrupts.Stopped: The run is asked to end.
      TooManyFailures: See `rollout.groups`.
    """

    def attempted(
      own: Sequence[Prompt], limits: rollout.AttemptLimits, stop: Any
    ) -> list[RolloutGroup]:
      """Attempts prompts on this process."""
      total = len(own) * (self.group_size + self.with_greedy)
      with self.progress(f"step {step}: sampling{work_sharing.shown()}", total) as advance:
        asked = rollout.for_step(own, step)
        return rollout.in_order(self._finished(asked, limits, stop, rollout.counting(advance)))

    return work_sharing.among_processes(
      prompts, attempted, limits=self.limits, stop=self.stop, what=f"the groups of step {step}"
    )

  def finished(
    self, prompts: Sequence[rollout.StepPrompt], *, on_progress: OnProgress | None = None
  ) -> Iterator[rollout.Finished]:
    """Yields each group when its last attempt is scored; see `rollout.groups`.

    Sampling begins when the first group is requested. Close the iterator (`contextlib.closing`)
    if it is not read to its end. All prompts are attempted by this process.
    """
    return self._finished(prompts, self.limits, self.stop, on_progress)

  def in_background(self, in_turn: bool) -> BackgroundAttempts:
    """Returns what attempts prompts while the caller does something else.

    Failures of environments end nothing: the caller decides over all groups of a step.

    Args:
      in_turn: Whether one block is sampled after the other; see
        `background_attempts.BackgroundAttempts`.
    """
    limits = dataclasses.replace(self.limits, max_error_share=1.0)
    slots = rollout.Slots.of(limits)  # of all that is attempted side by side.
    return BackgroundAttempts(
      self.loop, lambda asked: self._groups(asked, limits, None, slots), in_turn=in_turn
    )

  def _finished(
    self,
    prompts: Sequence[rollout.StepPrompt],
    limits: rollout.AttemptLimits,
    stop: Any,
    on_progress: OnProgress | None,
  ) -> Iterator[rollout.Finished]:
    return self.loop.iterate(self._groups(prompts, limits, on_progress), stop=stop)

  def _groups(
    self,
    prompts: Sequence[rollout.StepPrompt],
    limits: rollout.AttemptLimits,
    on_progress: OnProgress | None,
    slots: rollout.Slots | None = None,
  ) -> AsyncGenerator[rollout.Finished, None]:
    return rollout.groups(
      self.engine,
      self.environments,
      prompts,
      self.tokenizer,
      group_size=self.group_size,
      sampling=self.sampling,
      seed=self.seed,
      limits=limits,
      slots=slots,
      with_greedy=self.with_greedy,
      schedule=self.schedule,
      on_progress=on_progress,
    )


Filter = Callable[[Sequence[RolloutGroup]], filters.Filtered]


class TooFewGroups(ExpectedFailure, RuntimeError):
  """Dynamic sampling reached its bound before the step was full."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicSampling(DynamicOptions):
  """Bounds of drawing prompts for one step, checked when made."""

  def __post_init__(self):
    options.require(self, of="dynamic_sampling")


class OnlineStream:
  """Fills the steps with groups that are sampled when they are needed, or ahead of that."""

  def __init__(
    self,
    source: GroupSource,
    *,
    prompts_per_step: int,
    dynamic: DynamicSampling | None = None,
    keep: Filter = filters.apply,
    surplus: Sequence[Mapping[str, Any]] = (),
  ):
    """Makes a stream that continues at the position of `source`.

    Args:
      source: Source of groups: `group_source.SynchronousSource` or `ahead.AheadSource`.
      prompts_per_step: Number of groups of a step; fewer when the data ends.
      dynamic: Options of dynamic sampling; None: one round a step, whichever groups it yields.
      keep: With `dynamic`, a filter that says which groups count. It must judge each group
        independently of the others.
      surplus: Surplus of an earlier stream's `state()`, if a run is resumed.
    """
    self._source = source
    self._target = prompts_per_step
    self._dynamic = dynamic
    self._keep = keep
    self._surplus = [group_json.decode(record) for record in surplus]
    self._metrics: dict[str, float] = {}

  def take(self, step: int) -> list[RolloutGroup]:
    """Returns the groups of a step; none when the data ended.

    With dynamic sampling these are the surplus of earlier steps, oldest first, and then the
    groups that are drawn now. If a step cannot be filled, because the data has ended or because
    the bound is reached and `on_limit` is "train", groups that do not count fill it up. They are
    reported, and the loop's filters leave them out.

    Args:
      step: Step that the groups are for.

    Raises:
      TooFewGroups: The bound of dynamic sampling was reached, and `on_limit` is "raise".
      TooManyFailures: See `rollout.groups`.
      DisagreementError: The processes of the run have different prompts.
      OtherProcessError: Reading, sampling or scoring failed on another process.
    """
    self._metrics = {}
    self._source.begin(step, self._surplus)
    if self._dynamic is None:
      groups = self._draw(self._target, step, ())
    else:
      groups = self._fill(step, self._dynamic)
    self._metrics |= self._source.step_metrics()
    return groups

  def state(self) -> dict[str, Any]:
    """Returns the position in the data, and the surplus."""
    surplus = [group_json.encode(group) for group in self._surplus]
    return {**self._source.state(), "surplus": surplus}

  def settle(self, *, has_learned: bool = True) -> None:
    """Waits for groups under way that must not see the next weights."""
    self._source.settle(has_learned=has_learned)

  def close(self) -> None:
    """Ends what is still sampled."""
    self._source.close()

  def metrics(self) -> dict[str, float]:
    """Returns data/*, rollout/errors/* and dynamic_sampling/* of all rounds of the last `take`."""
    return dict(self._metrics)

  def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """Passes the metrics of a step to the source of prompts, if it uses them."""
    self._source.record_metrics(step, metrics)

  def _draw(self, count: int, step: int, held: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Draws the next groups, and joins the metrics of the rounds of a step."""
    groups = self._source.draw(count, step, held)
    self._metrics = metrics.joined_rounds(self._metrics, self._source.metrics())
    return groups

  def _fill(self, step: int, dynamic: DynamicSampling) -> list[RolloutGroup]:
    """Draws prompts until the step is full of groups that count."""
    found, discarded, drawn = list(self._surplus), [], []
    reasons: collections.Counter[str] = collections.Counter()
    rounds = 0
    while len(found) < self._target and rounds < dynamic.max_rounds:
      groups = self._draw(dynamic.prompts_per_round or self._target, step, found)
      if not groups:
        break
      rounds += 1
      kept, dropped = self._split(groups)
      found += kept
      counting = {group.prompt.prompt_id for group in kept}
      discarded += [group for group in groups if group.prompt.prompt_id not in counting]
      reasons.update(dropped)
      drawn += groups
    found = self._source.ordered(found)
    is_short = len(found) < self._target
    at_limit = is_short and rounds == dynamic.max_rounds
    if at_limit:
      report = lambda: self._report_limit(dynamic, len(found), len(drawn), reasons)
      processes.together(report, what=f"dynamic sampling of step {step}")
    self._metrics |= {
      "dynamic_sampling/rounds": float(rounds),
      "dynamic_sampling/prompts": float(len(drawn)),
      "dynamic_sampling/reward_mean": _reward_mean(drawn),
      "dynamic_sampling/from_surplus": float(min(len(self._surplus), self._target)),
      "dynamic_sampling/surplus": float(max(len(found) - self._target, 0)),
      "dynamic_sampling/limit_reached": float(at_limit),
      **{f"dynamic_sampling/discarded/{name}": float(n) for name, n in sorted(reasons.items())},
    }
    self._surplus = [group_json.without_info(group) for group in found[self._target :]]
    return (found + discarded)[: self._target]

  def _split(self, groups: Sequence[RolloutGroup]) -> tuple[list[RolloutGroup], dict[str, int]]:
    """Returns the groups that count, and how many do not, by reason."""
    weighty = [group for group in groups if group.prompt.weight > 0]
    filtered = self._keep(weighty)
    return list(filtered.kept), {**filtered.dropped, "zero_weight": len(groups) - len(weighty)}

  def _report_limit(
    self, dynamic: DynamicSampling, found: int, drawn: int, reasons: Mapping[str, int]
  ) -> None:
    """Raises TooFewGroups, or warns."""
    why = ", ".join(f"{name} {count}" for name, count in reasons.items() if count)
    message = (
      f"dynamic sampling drew {drawn} prompts in {dynamic.max_rounds} rounds and has {found} of "
      f"the {self._target} groups that a step needs (discarded: {why or 'none'})"
    )
    if dynamic.on_limit == "raise":
      raise TooFewGroups(
        f"{message}. The task is too easy or too hard for the policy, or the filters are too "
        "strict: raise dynamic_sampling.max_rounds, or set dynamic_sampling.on_limit='train' to "
        "learn from what was found"
      )
    _log.warning("%s; the step learns from these", message)


def _reward_mean(groups: Sequence[RolloutGroup]) -> float:
  rewards = [filters.scored_rewards(group) for group in groups]
  scored = np.concatenate([np.zeros(0), *rewards])
  return float(scored.mean()) if scored.size else math.nan
