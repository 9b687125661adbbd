"""Which groups are worth learning from, by their rewards. Pure; filters.py counts the reasons."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from grpo_jax.rl import advantages, arrays, moments


def has_signal(rewards: arrays.Numbers, mask: arrays.Mask | None = None) -> Bool[Array, " P"]:
  """Returns True for groups in which at least two valid attempts have different rewards.

  It is True exactly where advantages with a group baseline are not all 0. The spread of the
  rewards decides, not their mean: a group of rewards 0.4 and 0.6 has signal, one of 0.5 and 0.5
  has none. (OpenRLHF tests the mean.)

  Reference:
    DAPO's dynamic sampling, arXiv:2503.14476, section 3.2.
  """
  rewards, mask, _ = arrays.groups(rewards, mask)
  return jnp.asarray(moments.has_spread(*advantages.valid_rewards(rewards, mask)))


def has_valid_attempts(
  rewards: arrays.Numbers, mask: arrays.Mask | None = None, *, at_least: int = 1
) -> Bool[Array, " P"]:
  """Returns True for groups with that many attempts that exist and could be scored.

  Args:
    rewards: one reward for each attempt, P prompts by G attempts.
    mask: True for attempts that exist and could be scored.
    at_least: number of attempts that a group needs.

  Returns:
    One truth value for each group.
  """
  rewards, mask, _ = arrays.groups(rewards, mask)
  _, valid = advantages.valid_rewards(rewards, mask)
  return valid.sum(axis=-1) >= at_least


def mean_is_within(
  rewards: arrays.Numbers,
  mask: arrays.Mask | None = None,
  *,
  low: float = -float("inf"),
  high: float = float("inf"),
) -> Bool[Array, " P"]:
  """Returns True for groups whose mean valid reward lies in [low, high]: difficulty in range.

  Args:
    rewards: one reward for each attempt, P prompts by G attempts.
    mask: True for attempts that exist and could be scored.
    low: lowest mean, inclusive.
    high: highest mean, inclusive.

  Returns:
    One truth value for each group.
  """
  rewards, mask, _ = arrays.groups(rewards, mask)
  clean, valid = advantages.valid_rewards(rewards, mask)
  mean, _ = moments.centre_and_spread(clean, valid)
  return valid.any(axis=-1) & (mean[:, 0] >= low) & (mean[:, 0] <= high)


def drop_reasons(
  rewards: arrays.Numbers,
  mask: arrays.Mask | None = None,
  *,
  mean_low: float = -float("inf"),
  mean_high: float = float("inf"),
) -> dict[str, Bool[Array, " P"]]:
  """Returns which groups to leave out, under the one reason that comes first.

  unscorable      no valid attempt
  single_attempt  one valid attempt: nothing to compare with
  no_signal       all valid rewards are equal
  out_of_range    mean reward outside [mean_low, mean_high]

  Args:
    rewards: one reward for each attempt, P prompts by G attempts.
    mask: True for attempts that exist and could be scored.
    mean_low: lowest mean reward of a group that is kept, inclusive.
    mean_high: highest mean reward of a group that is kept, inclusive.

  Returns:
    Reason to one truth value for each group; a group is True under one reason at most.
  """
  rewards, mask, _ = arrays.groups(rewards, mask)
  verdicts = {
    "unscorable": ~has_valid_attempts(rewards, mask),
    "single_attempt": ~has_valid_attempts(rewards, mask, at_least=2),
    "no_signal": ~has_signal(rewards, mask),
    "out_of_range": ~mean_is_within(rewards, mask, low=mean_low, high=mean_high),
  }
  taken = jnp.zeros(rewards.shape[0], bool)
  reasons = {}
  for reason, verdict in verdicts.items():
    reasons[reason] = verdict & ~taken
    taken = taken | verdict
  return reasons
