"""Which groups are left out of a step, and under which reason they are counted."""

import numpy as np
import pytest

from grpo_jax.groups import filters
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup

NAN = float("nan")


def group(*rewards, truncated=0, components=None):
  """Returns a group with these rewards, the first few of them truncated."""
  rollouts = tuple(
    Rollout(
      completion_ids=np.asarray([1]),
      loss_mask=np.asarray([True]),
      behavior_logprobs=np.asarray([-1.0], np.float32),
      weight_versions=np.asarray([0]),
      finish_reason=FinishReason.LENGTH if i < truncated else FinishReason.STOP,
      reward=reward,
      reward_components={} if components is None else {"format": components[i]},
    )
    for i, reward in enumerate(rewards)
  )
  return RolloutGroup(Prompt("p", np.asarray([1]), "none"), rollouts)


def reasons(groups, **options):
  """Returns the counts that are not 0."""
  return {name: n for name, n in filters.apply(groups, **options).dropped.items() if n}


def test_defaults_drop_only_groups_in_which_nothing_was_scored():
  groups = [group(1.0, 1.0), group(NAN, NAN), group(0.0, 1.0), group()]
  filtered = filters.apply(groups)
  assert filtered.kept == (groups[0], groups[2])
  assert filtered.dropped == {
    "too_few_scored": 2,
    "no_signal": 0,
    "reward_mean_too_low": 0,
    "reward_mean_too_high": 0,
    "too_many_truncated": 0,
  }


@pytest.mark.parametrize(
  ("rewards", "has_signal"),
  [
    ((0.0, 0.0), False),
    ((0.5, 0.5, 0.5), False),
    ((0.1 + 0.2, 0.3), False),  # equal once stored in float32.
    ((0.4, 0.6), True),  # a mean of 0.5 says nothing (OpenRLHF's fault).
    ((1.0, 1.0, 1.0 + 1e-6), True),
    ((1.0, NAN), False),
    ((1.0, NAN, 0.0), True),
    ((1.0,), False),
  ],
)
def test_no_signal_is_exact_equality_of_scored_rewards(rewards, has_signal):
  assert filters.has_signal(group(*rewards)) is has_signal
  dropped = reasons([group(*rewards)], drop_no_signal=True)
  assert dropped == ({} if has_signal else {"no_signal": 1})


def test_component_that_differs_is_signal_if_components_are_looked_at():
  g = group(1.0, 1.0, components=[0.0, 1.0])
  assert reasons([g], drop_no_signal=True) == {"no_signal": 1}
  assert reasons([g], drop_no_signal=True, by_component=True) == {}
  equal = group(1.0, 1.0, components=[0.5, 0.5])
  assert reasons([equal], drop_no_signal=True, by_component=True) == {"no_signal": 1}
  half = group(1.0, 1.0, components=[0.5, NAN])
  assert reasons([half], drop_no_signal=True, by_component=True) == {"no_signal": 1}
  unscored = group(1.0, NAN, components=[0.5, 0.0])
  assert reasons([unscored], drop_no_signal=True, by_component=True) == {"no_signal": 1}


def test_min_scored_counts_finite_rewards():
  groups = [group(1.0, NAN, 0.0), group(1.0, NAN, NAN), group(1.0, float("inf"))]
  assert reasons(groups, min_scored=2) == {"too_few_scored": 2}


def test_bounds_of_the_mean_reward_are_inclusive():
  groups = [group(0.0, 0.5), group(0.5, 1.0), group(0.0, 1.0)]
  options = {"min_reward_mean": 0.5, "max_reward_mean": 0.5}
  assert reasons(groups, **options) == {"reward_mean_too_low": 1, "reward_mean_too_high": 1}


def test_truncated_share_above_the_limit_drops_the_group():
  groups = [group(0.0, 1.0, 0.0, 1.0, truncated=n) for n in range(5)]
  assert reasons(groups, max_truncated_share=0.5) == {"too_many_truncated": 2}
  assert reasons(groups) == {}


def test_group_is_counted_under_the_first_reason_only():
  groups = [group(NAN, NAN, truncated=2), group(0.0, 0.0, truncated=2)]
  options = {"drop_no_signal": True, "min_reward_mean": 0.5, "max_truncated_share": 0.0}
  assert reasons(groups, **options) == {"too_few_scored": 1, "no_signal": 1}


def test_order_is_kept_and_nothing_is_changed():
  groups = [group(0.0, 1.0), group(1.0, 1.0), group(1.0, 0.0)]
  assert filters.apply(groups, drop_no_signal=True).kept == (groups[0], groups[2])
  assert filters.apply([]).kept == ()


@pytest.mark.parametrize(
  "options",
  [
    {"max_truncated_share": 1.5},
    {"min_reward_mean": 1.0, "max_reward_mean": 0.0},
    {"min_reward_mean": float("nan")},
  ],
)
def test_senseless_options_raise(options):
  with pytest.raises(ValueError, match="finite number from 0 to 1|is above|must be a number"):
    filters.apply([], **options)
