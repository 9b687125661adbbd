"""Tokens that are too old to be learned from are masked; the rest of their completion is not. Pure.

The age of a token is the number of training steps between the weights that sampled it and those
that the step begins with; see `rl.staleness`.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from grpo_jax.rl import staleness
from grpo_jax.types import Rollout, RolloutGroup


def masked(group: RolloutGroup, *, step: int, max_staleness: int) -> RolloutGroup:
  """Returns the group without the tokens above an age in the loss.

  A masked token stays in its completion: later tokens see it, and the reward of the completion is
  in the baseline of its group. Tokens of unknown age are kept. The greedy attempt, which is never
  learned from, stays as it is.

  Args:
    group: Group that the step learns from.
    step: Number of the training step, which is the version of the weights that it begins with.
    max_staleness: Largest age of a token that is learned from, in training steps.

  Returns:
    The group with `loss_mask` False and `behavior_logprobs` 0 on the tokens that are too old; the
    same object if there are none. The versions of masked tokens stay.

  Raises:
    ValueError: `max_staleness` is negative, or a token was sampled by weights that do not exist
      before the step.
  """
  if max_staleness < 0:
    raise ValueError(f"max_staleness must be at least 0, got {max_staleness}")
  rollouts = tuple(_masked(rollout, step, max_staleness) for rollout in group.rollouts)
  if all(new is old for new, old in zip(rollouts, group.rollouts, strict=True)):
    return group
  return dataclasses.replace(group, rollouts=rollouts)


def oldest(group: RolloutGroup) -> int:
  """Returns the oldest version of the weights that sampled tokens of a group; -1: none is known."""
  members = [*group.rollouts, *([group.greedy] if group.greedy else [])]
  found = [r.weight_versions[r.loss_mask & (r.weight_versions >= 0)] for r in members]
  return min((int(each.min()) for each in found if each.size), default=-1)


def masked_metrics(
  before: Sequence[RolloutGroup], after: Sequence[RolloutGroup]
) -> dict[str, float]:
  """Describes what `masked` did to the groups of a step.

  Args:
    before: Groups as they were sampled.
    after: The same groups, masked.

  Returns:
    "rollout/stale_tokens_masked_share", the masked part of the sampled tokens; NaN if nothing was
    sampled.
  """
  sampled, left = _loss_tokens(before), _loss_tokens(after)
  share = (sampled - left) / sampled if sampled else math.nan
  return {"rollout/stale_tokens_masked_share": share}


def _masked(rollout: Rollout, step: int, max_staleness: int) -> Rollout:
  ages = staleness.ages(rollout.weight_versions, step)
  is_stale = rollout.loss_mask & (ages > max_staleness)
  if not is_stale.any():
    return rollout
  behavior = np.where(is_stale, 0, rollout.behavior_logprobs).astype(np.float32)
  return dataclasses.replace(
    rollout, loss_mask=rollout.loss_mask & ~is_stale, behavior_logprobs=behavior
  )


def _loss_tokens(groups: Sequence[RolloutGroup]) -> int:
  return sum(int(rollout.loss_mask.sum()) for group in groups for rollout in group.rollouts)
