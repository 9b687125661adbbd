"""Advantages of groups, and their whitening: what the weight of a prompt does to them."""

import dataclasses

import numpy as np
import pytest

from grpo_jax import batching
from grpo_jax.batching import packing
from grpo_jax.groups import credit
from grpo_jax.rl import estimators, objective_options
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup


def group(weight, rewards):
  prompt = Prompt("p", np.ones(2, np.int32), "math", weight=weight)
  one = np.ones(1)
  attempt = lambda reward: Rollout(
    completion_ids=one.astype(np.int32),
    loss_mask=one.astype(bool),
    behavior_logprobs=np.zeros(1, np.float32),
    weight_versions=np.zeros(1, np.int32),
    finish_reason=FinishReason.STOP,
    reward=reward,
  )
  return RolloutGroup(prompt, tuple(map(attempt, rewards)))


def test_advantages_do_not_depend_on_the_weight_of_a_prompt():
  estimator = estimators.make(estimator="dr_grpo")  # the reward less the group's mean.
  groups = [group(weight, [1.0, 0.0]) for weight in (1.0, 0.5, 3.0, 0.0)]
  for shown in credit.advantages_of(groups, estimator):
    assert shown.tolist() == pytest.approx([0.5, -0.5])


@pytest.mark.long
@pytest.mark.parametrize("name", ["lite_ppo", "gdpo"])
def test_a_prompt_of_weight_zero_changes_no_other_where_groups_are_compared(name):
  estimator = estimators.make(estimator=name)
  groups = [with_parts(group(w, r)) for w, r in [(1.0, [1.0, 0.0]), (0.5, [3.0, 1.0])]]
  extreme = with_parts(group(0.0, [100.0, 0.0]))
  alone = credit.advantages_of(groups, estimator)
  *others, left_out = credit.advantages_of([*groups, extreme], estimator)
  np.testing.assert_array_equal(others, alone)
  assert np.abs(alone).min() > 0.1 and not left_out.any()


def with_parts(one):
  """Returns the group with its rewards in two components."""
  parts = lambda r: {"a": 2 * r.reward, "b": r.reward**2}
  rollouts = (dataclasses.replace(r, reward_components=parts(r)) for r in one.rollouts)
  return RolloutGroup(one.prompt, tuple(rollouts))


def whitened(groups):
  """Returns the whitened advantages, the weights and the denominators of one microbatch."""
  estimator = estimators.make(estimator="reinforce_pp")
  made = batching.assemble(
    groups,
    credit.advantages_of(groups, estimator),
    shapes=(packing.Shape(1, 16, 16),),
    skip_zero_advantage=False,
  )
  options = objective_options.make({"kl_coef": 0.0})
  (minibatch,) = credit.whitened(made, estimator, options).minibatches
  (batch,) = minibatch.microbatches
  weights = None if batch.weights is None else batch.weights[0, : len(groups)]
  values = batch.advantages[0, batch.loss_places[0, : len(groups)]]
  return values, weights, minibatch.denominators


def test_whitening_counts_a_completion_by_its_weight_and_leaves_the_weight_to_the_loss():
  """Rewards 1, 1, 1, 0 of weights ½, 1, 1, 1: mean 5/7, variance (2.5 (2/7)² + (5/7)²) / 3.5."""
  groups = [group(w, [r]) for w, r in [(0.5, 1.0), (1.0, 1.0), (1.0, 1.0), (1.0, 0.0)]]
  values, weights, counts = whitened(groups)
  deviation = ((2.5 * (2 / 7) ** 2 + (5 / 7) ** 2) / 3.5) ** 0.5
  order = np.argsort(values)
  np.testing.assert_allclose(values[order], np.asarray([-5, 2, 2, 2]) / 7 / deviation, rtol=1e-6)
  assert sorted(weights) == [0.5, 1.0, 1.0, 1.0] and (counts.tokens, counts.sequences) == (3.5, 3.5)
  np.testing.assert_allclose((weights * values).sum(), 0.0, atol=1e-6)


def test_equal_weights_whiten_as_none():
  plain, none, _ = whitened([group(1.0, [r]) for r in (1.0, 1.0, 1.0, 0.0)])
  halves, weights, _ = whitened([group(0.5, [r]) for r in (1.0, 1.0, 1.0, 0.0)])
  assert none is None and weights.tolist() == [0.5] * 4
  np.testing.assert_allclose(plain, [3**-0.5] * 3 + [-(3**0.5)], rtol=1e-6)
  np.testing.assert_allclose(halves, plain, rtol=1e-6)
