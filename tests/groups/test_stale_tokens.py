"""Tokens that are too old are masked; completions, rewards and versions stay."""

import dataclasses
import math

import numpy as np
import pytest

from grpo_jax import batching
from grpo_jax.batching import packing
from grpo_jax.groups import stale_tokens
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup


def a_rollout(versions, mask=None):
  versions = np.asarray(versions, np.int32)
  mask = np.ones(len(versions), bool) if mask is None else np.asarray(mask, bool)
  return Rollout(
    completion_ids=np.arange(len(versions), dtype=np.int32),
    loss_mask=mask,
    behavior_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
    weight_versions=versions,
    finish_reason=FinishReason.STOP,
    reward=1.0,
  )


def a_group(*rollouts, **fields):
  return RolloutGroup(Prompt("p", np.arange(3, dtype=np.int32), "math"), rollouts, **fields)


def test_tokens_above_the_largest_age_are_masked():
  old = a_rollout([4, 5, -1, 6, 7], mask=[True, True, False, True, True])
  group = a_group(old, a_rollout([7, 7]), greedy=a_rollout([0, 0]))
  found = stale_tokens.masked(group, step=7, max_staleness=1)
  first, second = found.rollouts
  np.testing.assert_array_equal(first.loss_mask, [False, False, False, True, True])
  np.testing.assert_array_equal(first.behavior_logprobs, np.float32([0, 0, 0, -0.5, -0.5]))
  assert first.behavior_logprobs.dtype == np.float32
  unchanged = {"loss_mask": old.loss_mask, "behavior_logprobs": old.behavior_logprobs}
  restored = dataclasses.replace(first, **unchanged)
  for field in dataclasses.fields(Rollout):
    np.testing.assert_array_equal(getattr(restored, field.name), getattr(old, field.name))
  assert second is group.rollouts[1] and found.greedy is group.greedy
  assert found.prompt is group.prompt
  share = stale_tokens.masked_metrics([group], [found])
  assert share == {"rollout/stale_tokens_masked_share": 2 / 6}


def test_a_group_without_stale_tokens_is_the_same_object():
  group = a_group(a_rollout([6, 7]), a_rollout([-1, 6]))  # an unknown age is kept.
  assert stale_tokens.masked(group, step=7, max_staleness=1) is group
  assert stale_tokens.masked(group, step=7, max_staleness=0) is not group
  assert stale_tokens.masked_metrics([group], [group])["rollout/stale_tokens_masked_share"] == 0
  assert math.isnan(stale_tokens.masked_metrics([], [])["rollout/stale_tokens_masked_share"])


def test_a_completion_that_is_stale_as_a_whole_is_left_out_and_counted():
  group = a_group(a_rollout([1, 2]), a_rollout([2, 7]))
  found = stale_tokens.masked(group, step=7, max_staleness=2)
  made = batching.assemble(
    [found],
    [np.ones(2, np.float32)],
    shapes=(packing.Shape(1, 16, 16),),
    skip_zero_advantage=False,
    step=7,
  )
  assert made.not_computed == {(0, 0): "empty"}
  [minibatch] = made.minibatches
  assert (minibatch.denominators.tokens, minibatch.denominators.sequences) == (1, 1)
  assert minibatch.microbatches[0].ages.max() == 0


@pytest.mark.parametrize(
  "options, message",
  [
    ({"step": 7, "max_staleness": -1}, "max_staleness must be at least 0, got -1"),
    ({"step": 6, "max_staleness": 1}, "at most version 6, got version 7"),
  ],
)
def test_arguments_that_make_no_sense_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    stale_tokens.masked(a_group(a_rollout([6, 7])), **options)
