"""Streams of groups: what the loop learns from, one step after the other.

The online stream samples. With dynamic sampling it goes on until a step is full of groups
that pass the filters; those that were not needed are the first ones of the next step.

A stream gives rewards as they were scored. They are shaped by the loop, which does so for
every stream alike.
"""

import collections
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from grpo_jax import checked, metrics
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.engines.base import SamplingParams
from grpo_jax.environments.base import EnvironmentFactory
from grpo_jax.errors import ExpectedFailure
from grpo_jax.groups import filters, group_json
from grpo_jax.rollouts import collecting as rollout
from grpo_jax.types import Prompt, RolloutGroup

_log = logging.getLogger(__name__)


@runtime_checkable
class GroupStream(Protocol):
  """Where the groups of a step come from: sampled, or recorded."""

  def take(self, step: int) -> list[RolloutGroup]:
    """Returns the groups of a step, with the rewards as scored; none when the data ended."""
    ...

  def state(self) -> dict[str, Any]:
    """Returns, as strict JSON, what a stream made anew needs to go on after the last `take`.

    Called before the first `take`, and after each step that was learned.
    """
    ...

  def metrics(self) -> dict[str, float]:
    """Returns what there is to tell about the last `take`; names as in metric_table.py."""
    ...

  def tell(self, step: int, metrics: Mapping[str, float]) -> None:
    """Tells the metrics of a step that was learned, without clocks; comes before `state`."""
    ...


@runtime_checkable
class PromptSource(Protocol):
  """What the online stream needs of the data; see `data.prompts.PromptStream`."""

  def take(self, n: int) -> list[Prompt]:
    """Takes the next n prompts; fewer, at last none, when the data ends."""
    ...

  def state(self) -> dict[str, Any]:
    """Returns where it stands, as JSON."""
    ...

  def metrics(self) -> dict[str, float]:
    """Returns what there is to tell about the last `take`."""
    ...


@runtime_checkable
class Listening(Protocol):
  """A source of prompts whose order depends on past steps: a curriculum."""

  def tell(self, step: int, metrics: Mapping[str, float]) -> None:
    """Takes note of the metrics of a step."""
    ...


# Shows how far a long phase has come: (description, total) -> a context with `advance(count)`.
Progress = Callable[[str, int], AbstractContextManager[Callable[..., None]]]


@dataclasses.dataclass(frozen=True)
class Sampler:
  """An engine and environments: attempts prompts, and scores the attempts."""

  engine: rollout.Generator
  environments: Mapping[str, EnvironmentFactory]
  tokenizer: Tokenizer
  group_size: int
  sampling: SamplingParams
  seed: int
  limits: rollout.Limits
  progress: Progress
  stop: Any = False  # becomes true when the run is asked to end; see `interrupts.Flag`.

  def __call__(self, prompts: Sequence[Prompt], step: int) -> list[RolloutGroup]:
    """Returns one group a prompt, in order; see `rollout.collect`.

    Raises:
      interrupts.Stopped: the run is asked to end.
    """
    total = len(prompts) * self.group_size
    with self.progress(f"step {step}: sampling", total) as advance:
      return rollout.collect_sync(
        self.engine,
        self.environments,
        prompts,
        self.tokenizer,
        group_size=self.group_size,
        sampling=self.sampling,
        seed=self.seed,
        step=step,
        limits=self.limits,
        on_progress=rollout.counting(advance),
        stop=self.stop,
      )


Sample = Callable[[Sequence[Prompt], int], list[RolloutGroup]]  # such as a `Sampler`.
Filter = Callable[[Sequence[RolloutGroup]], filters.Filtered]


class TooFewGroups(ExpectedFailure, RuntimeError):
  """Dynamic sampling reached its bound before the step was full."""


DYNAMIC_KINDS: Mapping[str, checked.Kind] = {
  "max_rounds": checked.whole(low=1),
  "prompts_per_round": checked.whole(low=1, none=True),
  "on_limit": checked.choice(("raise", "train")),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSampling:
  """How long prompts are drawn for one step."""

  max_rounds: int = 10  # of drawing and sampling prompts, a step.
  prompts_per_round: int | None = None  # None: as many as a step has.
  # When the bound is reached: "raise", or "train": learn from those found, with a warning.
  on_limit: Literal["raise", "train"] = "raise"

  def __post_init__(self):
    checked.require(DYNAMIC_KINDS, checked.fields_of(self), of="dynamic_sampling")


class OnlineStream:
  """Samples the groups of every step with the engine's present weights."""

  def __init__(
    self,
    prompts: PromptSource,
    sample: Sample,
    *,
    prompts_per_step: int,
    dynamic: DynamicSampling | None = None,
    keep: Filter = filters.apply,
    surplus: Sequence[Mapping[str, Any]] = (),
  ):
    """Places the stream where its parts stand.

    Args:
      prompts: in training order.
      sample: attempts prompts and scores the attempts.
      prompts_per_step: groups of a step; fewer when the data ends.
      dynamic: None: one round a step, whatever its groups are worth.
      keep: with `dynamic`: which groups count. Must look at each group by itself.
      surplus: of `state()`, when a run goes on.
    """
    self._prompts = prompts
    self._sample = sample
    self._target = prompts_per_step
    self._dynamic = dynamic
    self._keep = keep
    self._surplus = [group_json.decode(record) for record in surplus]
    self._metrics: dict[str, float] = {}

  def take(self, step: int) -> list[RolloutGroup]:
    """Returns the groups of a step; none when the data ended.

    With dynamic sampling these are the surplus of earlier steps, oldest first, and what is
    drawn now. A step that cannot be filled, since the data ended or at the bound if that
    may be, is filled up with groups that do not count, so that they are seen; the loop's
    filters leave them out.

    Raises:
      TooFewGroups: the bound of dynamic sampling was reached, and `on_limit` is "raise".
      rollout.TooManyFailures: see `rollout.collect`.
    """
    self._metrics = {}
    if self._dynamic is None:
      return self._draw(self._target, step)
    return self._fill(step, self._dynamic)

  def state(self) -> dict[str, Any]:
    """Returns where the data stands, and the surplus."""
    return {
      "prompts": self._prompts.state(),
      "surplus": [group_json.encode(group) for group in self._surplus],
    }

  def metrics(self) -> dict[str, float]:
    """Returns data/*, rollout/errors/* and dynamic_sampling/* of the last `take`, all rounds."""
    return dict(self._metrics)

  def tell(self, step: int, metrics: Mapping[str, float]) -> None:
    """Hands the metrics on to prompts that listen."""
    if isinstance(self._prompts, Listening):
      self._prompts.tell(step, metrics)

  def _draw(self, count: int, step: int) -> list[RolloutGroup]:
    """Attempts the next prompts; none are left if it returns none."""
    prompts = self._prompts.take(count)
    groups = self._sample(prompts, step) if prompts else []
    told = {**self._prompts.metrics(), **rollout.error_counts(groups)}
    self._metrics = metrics.of_rounds(self._metrics, told)
    return groups

  def _fill(self, step: int, dynamic: DynamicSampling) -> list[RolloutGroup]:
    """Draws prompts until the step is full of groups that count."""
    found, discarded, drawn = list(self._surplus), [], []
    reasons: collections.Counter[str] = collections.Counter()
    rounds = 0
    while len(found) < self._target and rounds < dynamic.max_rounds:
      groups = self._draw(dynamic.prompts_per_round or self._target, step)
      if not groups:
        break
      rounds += 1
      kept, dropped = self._split(groups)
      found += kept
      counting = {group.prompt.prompt_id for group in kept}
      discarded += [group for group in groups if group.prompt.prompt_id not in counting]
      reasons.update(dropped)
      drawn += groups
    is_short = len(found) < self._target
    at_limit = is_short and rounds == dynamic.max_rounds
    if at_limit:
      self._tell_limit(dynamic, len(found), len(drawn), reasons)
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

  def _tell_limit(
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
