"""How much older than a step the weights are that sampled its tokens. Pure."""

import dataclasses

import numpy as np

from grpo_jax.types import Rollout, RolloutGroup


def oldest(group: RolloutGroup) -> int:
  """Returns the oldest version of the weights among the sampled tokens of a group; -1: none."""
  members = [*group.rollouts, *([group.greedy] if group.greedy else [])]
  found = [r.weight_versions[r.loss_mask & (r.weight_versions >= 0)] for r in members]
  return min((int(each.min()) for each in found if each.size), default=-1)


def masked(group: RolloutGroup, step: int, max_staleness: int) -> RolloutGroup:
  """Returns the group without those of its tokens that are too old to be learned from.

  Args:
    group: Group with the versions of the weights that sampled its tokens.
    step: Step s that learns from it, which begins with weights of version s.
    max_staleness: Largest s - v at which a token of version v is learned from.
  """
  rollouts = tuple(_masked(rollout, step - max_staleness) for rollout in group.rollouts)
  return dataclasses.replace(group, rollouts=rollouts)


def _masked(rollout: Rollout, first: int) -> Rollout:
  keep = rollout.loss_mask & (rollout.weight_versions >= first)
  if np.array_equal(keep, rollout.loss_mask):
    return rollout
  logprobs = np.where(keep, rollout.behavior_logprobs, 0).astype(np.float32)
  return dataclasses.replace(rollout, loss_mask=keep, behavior_logprobs=logprobs)
