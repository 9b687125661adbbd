"""Shaping of rewards, between the filters and the advantages. Pure, NumPy.

    scale  →  stop-properly penalty  →  overlong penalty

A reward that is not finite (it could not be scored) is not changed. Filters, metrics and dynamic
sampling see the rewards of the environments; only advantages and the loss see shaped rewards.
The formulas are in docs/rewards.md.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from grpo_jax.groups.options import ShapingOptions
from grpo_jax.metrics import scored_groups
from grpo_jax.types import Rollout, RolloutGroup
from grpo_jax.values import checked
from grpo_jax.values.options import kinds

_KINDS = kinds(ShapingOptions)
OVERLONG = "overlong"  # name of the penalty among the reward's components.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shaping(ShapingOptions):
  """How the rewards of a step are changed, checked when made; by default they are not."""

  def __post_init__(self):
    problems = checked.problems(_KINDS, checked.fields_of(self))
    problems = problems or [*_scaling_problems(self), *_penalty_problems(self)]
    if problems:
      raise ValueError("shaping: " + "; ".join(problems))

  @property
  def is_on(self) -> bool:
    """Whether any reward can change."""
    settings = (self.scale_from, self.stop_properly_coef, self.overlong_buffer_tokens)
    return any(setting is not None for setting in settings)


def make(**options: Any) -> Shaping:
  """Makes a checked choice of shaping from the fields of a config.

  Raises:
    ValueError: An option makes no sense, or would change nothing.
    TypeError: There is no such option.
  """
  checked.require(_KINDS, options, of="shaping")
  for name in ("scale_from", "scale_to"):
    if options.get(name) is not None:
      low, high = map(float, options[name])
      options[name] = (low, high)
  return Shaping(**options)


def scaled(
  rewards: Float[np.ndarray, "*shape"],
  *,
  scale_from: tuple[float, float],
  scale_to: tuple[float, float] = ShapingOptions.scale_to,
) -> Float[np.ndarray, "*shape"]:
  """Clamps rewards to one range and maps it linearly to another.

      r' = t₀ + (clip(r, s₀, s₁) - s₀) / (s₁ - s₀) · (t₁ - t₀)

  Args:
    rewards: Rewards; those that are not finite are not changed.
    scale_from: Bounds s₀ < s₁ of the first range.
    scale_to: Bounds t₀ and t₁ of the second range.

  Reference:
    NeMo RL's `reward_scaling`.
  """
  (low, high), (new_low, new_high) = scale_from, scale_to
  share = (np.clip(rewards, low, high) - low) / (high - low)
  return np.where(np.isfinite(rewards), new_low + share * (new_high - new_low), rewards)


def stopped_properly(
  rewards: Float[np.ndarray, "*shape"], is_truncated: np.ndarray, *, coef: float
) -> Float[np.ndarray, "*shape"]:
  """Reduces the reward of completions that the token limit cut.

      r' = min(r, c·r)   for a truncated completion,   r for any other

  A negative reward is not changed: c·r alone would reward truncation.

  Args:
    rewards: Rewards; those that are not finite are not changed.
    is_truncated: Whether each completion was truncated; same shape.
    coef: Factor c, from 0 (no reward remains) to 1 (no change).

  Reference:
    NeMo RL's `stop_properly_penalty_coef`, there c·r whatever the sign.
  """
  hit = is_truncated & np.isfinite(rewards)
  return np.where(hit, np.minimum(rewards, coef * np.where(hit, rewards, 0)), rewards)


def overlong_penalties(
  tokens: Int[np.ndarray, "*shape"],
  *,
  max_completion_tokens: int,
  buffer_tokens: int,
  penalty: float = ShapingOptions.overlong_penalty,
  floor: bool = True,
) -> Float[np.ndarray, "*shape"]:
  """Returns the penalties that are added to the rewards of completions close to the limit.

      p = -λ · clip((|o| - (L_max - L_buf)) / L_buf, 0, 1)     without the 1 if not `floor`

  Args:
    tokens: Number |o| of sampled tokens of each completion, the stop id included.
    max_completion_tokens: Limit L_max.
    buffer_tokens: Buffer L_buf; the penalty begins that many tokens before the limit.
    penalty: Penalty λ at the limit.
    floor: Whether the penalty stops growing at L_max.

  Returns:
    Numbers that are at most 0.

  Reference:
    Yu et al. 2025, DAPO, arXiv:2503.14476, equation 13 (λ = 1, with the floor); verl's
    `overlong_buffer` and NeMo RL's `reward_shaping` have no floor.
  """
  excess = (tokens - (max_completion_tokens - buffer_tokens)) / buffer_tokens
  return -penalty * np.clip(excess, 0, 1 if floor else None)


def apply(groups: Sequence[RolloutGroup], shaping: Shaping) -> tuple[RolloutGroup, ...]:
  """Returns the groups with shaped rewards; the same groups if shaping is off.

  Scaling and the stop-properly penalty also change every reward component, since GDPO learns from
  them. The overlong penalty becomes a component of its own, "overlong".
  """
  return tuple(_shaped(group, shaping) for group in groups) if shaping.is_on else tuple(groups)


def group_metrics(
  groups: Sequence[RolloutGroup], after: Sequence[RolloutGroup], shaping: Shaping
) -> dict[str, float]:
  """Describes how shaping changes groups, before any filter.

  Args:
    groups: Groups of a step, with the rewards as they were scored.
    after: The same groups as `apply` returned them.
    shaping: Options with which `apply` was called.

  Returns:
    {name: value} of shaping/*, over scored completions; nothing if shaping is off.
  """
  if not shaping.is_on:
    return {}
  raw = np.concatenate([np.zeros(0), *(_rewards(group) for group in groups)])
  new = np.concatenate([np.zeros(0), *(_rewards(group) for group in after)])
  scored = np.isfinite(raw)
  values = {
    "shaping/reward_mean": new[scored],
    "shaping/changed_share": (new != raw)[scored],
    "shaping/no_signal_share": [not scored_groups.has_signal(group) for group in after],
  }
  if shaping.scale_from is not None:
    low, high = shaping.scale_from
    values["shaping/clamped_share"] = ((raw < low) | (raw > high))[scored]
  if shaping.overlong_buffer_tokens is not None:
    penalties = np.concatenate([np.zeros(0), *(_penalties(group, shaping) for group in groups)])
    values["shaping/overlong_share"] = (penalties < 0)[scored]
    values["shaping/overlong_penalty_mean"] = penalties[scored]
  return {name: _mean(np.asarray(value, np.float64)) for name, value in values.items()}


def _shaped(group: RolloutGroup, shaping: Shaping) -> RolloutGroup:
  """Shapes the rewards and the components of one group."""
  names = sorted({name for rollout in group.rollouts for name in rollout.reward_components})
  cut = np.asarray([rollout.is_truncated for rollout in group.rollouts], bool)
  rewards = _scaled_and_cut(_rewards(group), cut, shaping)
  columns = {name: _scaled_and_cut(_component(group, name), cut, shaping) for name in names}
  if shaping.overlong_buffer_tokens is not None:
    penalties = _penalties(group, shaping)
    rewards = np.where(np.isfinite(rewards), rewards + penalties, rewards)
    columns |= {OVERLONG: columns.get(OVERLONG, 0.0) + penalties} if names else {}
  rollouts = (
    _with_rewards(rollout, float(rewards[i]), {name: float(v[i]) for name, v in columns.items()})
    for i, rollout in enumerate(group.rollouts)
  )
  greedy = group.greedy
  if greedy is not None:  # what rewards are compared with changes as they do.
    alone = RolloutGroup(group.prompt, (greedy,))
    greedy = _shaped(alone, shaping).rollouts[0]
  return dataclasses.replace(group, rollouts=tuple(rollouts), greedy=greedy)


def _scaled_and_cut(
  values: Float[np.ndarray, " G"], is_truncated: np.ndarray, shaping: Shaping
) -> Float[np.ndarray, " G"]:
  if shaping.scale_from is not None:
    values = scaled(values, scale_from=shaping.scale_from, scale_to=shaping.scale_to)
  if shaping.stop_properly_coef is not None:
    values = stopped_properly(values, is_truncated, coef=shaping.stop_properly_coef)
  return values


def _with_rewards(rollout: Rollout, reward: float, components: Mapping[str, float]) -> Rollout:
  """Replaces reward and components; a component that the rollout lacks stays missing."""
  own = {
    name: value
    for name, value in components.items()
    if name in rollout.reward_components or (name == OVERLONG and rollout.reward_components)
  }
  return dataclasses.replace(rollout, reward=reward, reward_components=own)


def _penalties(group: RolloutGroup, shaping: Shaping) -> Float[np.ndarray, " G"]:
  assert shaping.overlong_buffer_tokens is not None and shaping.max_completion_tokens is not None
  return overlong_penalties(
    np.asarray([rollout.loss_mask.sum() for rollout in group.rollouts], np.int64),
    max_completion_tokens=shaping.max_completion_tokens,
    buffer_tokens=shaping.overlong_buffer_tokens,
    penalty=shaping.overlong_penalty,
    floor=shaping.overlong_floor,
  )


def _rewards(group: RolloutGroup) -> Float[np.ndarray, " G"]:
  return np.asarray([rollout.reward for rollout in group.rollouts], np.float64)


def _component(group: RolloutGroup, name: str) -> Float[np.ndarray, " G"]:
  values = [rollout.reward_components.get(name, math.nan) for rollout in group.rollouts]
  return np.asarray(values, np.float64)


def _mean(values: np.ndarray) -> float:
  return float(values.mean()) if values.size else math.nan


def _scaling_problems(shaping: Shaping) -> list[str]:
  """Returns what is wrong with the options of scaling."""
  problems = []
  if shaping.scale_from is None:
    if shaping.scale_to != ShapingOptions.scale_to:
      problems.append("scale_to changes nothing without scale_from")
  elif not shaping.scale_from[0] < shaping.scale_from[1]:
    problems.append(f"scale_from must rise, got {shaping.scale_from}")
  if shaping.scale_to[0] == shaping.scale_to[1]:
    problems.append(f"scale_to gives every reward the same value, {shaping.scale_to[0]}")
  return problems


def _penalty_problems(shaping: Shaping) -> list[str]:
  """Returns what is wrong with the options of the two penalties."""
  problems = []
  buffer, limit = shaping.overlong_buffer_tokens, shaping.max_completion_tokens
  if buffer is None:
    if (shaping.overlong_penalty, shaping.overlong_floor, limit) != (
      ShapingOptions.overlong_penalty,
      True,
      None,
    ):
      problems.append(
        "overlong_penalty, overlong_floor and max_completion_tokens change nothing without "
        "overlong_buffer_tokens"
      )
    return problems
  if limit is None:
    problems.append("overlong_buffer_tokens needs max_completion_tokens")
  elif not 1 <= buffer <= limit:
    problems.append(
      f"overlong_buffer_tokens must be from 1 to max_completion_tokens={limit}, got {buffer}"
    )
  return problems
