"""Leaves groups out of a training step and counts the reasons. Pure.

A group that is left out counts neither in the loss nor in its denominators. `batching` leaves out
single completions.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from grpo_jax.groups.options import FilterOptions
from grpo_jax.metrics import scored_groups
from grpo_jax.types import RolloutGroup
from grpo_jax.values import checked
from grpo_jax.values.options import kinds

_KINDS = {**kinds(FilterOptions), "by_component": checked.switch()}


@dataclasses.dataclass(frozen=True)
class Filtered:
  """The groups of a step that passed the filters.

  Attributes:
    kept: Groups that passed, in order.
    dropped: Number of groups left out, by the first reason that held.
    places: Index of each kept group in the groups given.
  """

  kept: tuple[RolloutGroup, ...]
  dropped: dict[str, int]
  places: tuple[int, ...]

  def select(self, groups: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
    """Returns the kept groups in another form, such as with shaped rewards.

    Args:
      groups: All groups of the step in that form, in the order in which the filters saw them.
    """
    return tuple(groups[place] for place in self.places)


def apply(
  groups: Sequence[RolloutGroup],
  *,
  drop_no_signal: bool = FilterOptions.drop_no_signal,
  min_scored: int = FilterOptions.min_scored,
  by_component: bool = False,
  min_reward_mean: float = FilterOptions.min_reward_mean,
  max_reward_mean: float = FilterOptions.max_reward_mean,
  max_truncated_share: float = FilterOptions.max_truncated_share,
) -> Filtered:
  """Keeps the groups worth learning from.

  Args:
    groups: Groups of one training step.
    drop_no_signal: Whether to leave out groups whose scored rewards are all equal up to rounding
      (the mean does not matter); the "dynamic sampling" of DAPO.
    min_scored: Smallest number of completions with a finite reward that a group needs.
    by_component: Whether `drop_no_signal` also keeps a group in which one of the reward
      components differs (GDPO learns from each of them).
    min_reward_mean: Smallest mean of the scored rewards; groups below it are too hard.
    max_reward_mean: Largest mean of the scored rewards; groups above it are too easy.
    max_truncated_share: Largest share of truncated completions of a group, from 0 to 1.

  Returns:
    The groups kept and the counts by reason: "too_few_scored", "no_signal",
    "reward_mean_too_low", "reward_mean_too_high", "too_many_truncated"; 0 if none.

  Raises:
    ValueError: A share is outside 0 to 1, or the bounds of the mean are reversed.
  """
  given = {
    "drop_no_signal": drop_no_signal,
    "min_scored": min_scored,
    "min_reward_mean": min_reward_mean,
    "max_reward_mean": max_reward_mean,
    "max_truncated_share": max_truncated_share,
  }
  checked.require(_KINDS, {**given, "by_component": by_component}, of="filters")
  if not min_reward_mean <= max_reward_mean:
    raise ValueError(
      f"min_reward_mean {min_reward_mean} is above max_reward_mean {max_reward_mean}"
    )
  reasons: dict[str, Callable[[RolloutGroup], bool]] = {
    "too_few_scored": lambda g: scored_rewards(g).size < min_scored,
    "no_signal": lambda g: drop_no_signal and not has_signal(g, by_component=by_component),
    "reward_mean_too_low": lambda g: bool(_mean(g) < min_reward_mean),
    "reward_mean_too_high": lambda g: bool(_mean(g) > max_reward_mean),
    "too_many_truncated": lambda g: truncated_share(g) > max_truncated_share,
  }
  places, dropped = [], dict.fromkeys(reasons, 0)
  for place, group in enumerate(groups):
    reason = next((name for name, holds in reasons.items() if holds(group)), None)
    if reason is None:
      places.append(place)
    else:
      dropped[reason] += 1
  return Filtered(tuple(groups[place] for place in places), dropped, tuple(places))


def scored_rewards(group: RolloutGroup) -> Float[np.ndarray, " scored"]:
  """Returns the rewards of the completions that could be scored."""
  rewards = group.rewards
  return rewards[np.isfinite(rewards)]


def has_signal(group: RolloutGroup, *, by_component: bool = False) -> bool:
  """Returns whether two scored rewards differ or, `by_component`, two values of a component.

  The rule is that of `moments.has_spread`: rewards 0.4 and 0.6 have signal, two of 0.5 have none. A
  component that a completion lacks counts as not scored for it.
  """
  if scored_groups.has_signal(group):
    return True
  valid = [r.reward_components for r in group.rollouts if np.isfinite(r.reward)]
  names = {name for components in valid for name in components} if by_component else set()
  for name in names:
    own = np.asarray([components[name] for components in valid if name in components], np.float32)
    if scored_groups.differs(own):
      return True
  return False


def truncated_share(group: RolloutGroup) -> float:
  """Returns the share of truncated completions of a group; 0 for an empty group."""
  return sum(r.is_truncated for r in group.rollouts) / max(len(group.rollouts), 1)


def _mean(group: RolloutGroup) -> float:
  """Returns the mean scored reward; NaN, which passes all bounds, if nothing was scored."""
  scored = scored_rewards(group)
  return float(scored.mean(dtype=np.float64)) if scored.size else math.nan
