"""Advantages of groups: what a prompt's weight does to them."""

import numpy as np
import pytest

from grpo_jax.groups import credit
from grpo_jax.rl import estimators
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


def test_a_prompts_weight_scales_its_advantages_and_those_of_no_other():
  estimator = estimators.make(estimator="dr_grpo")  # the reward less the group's mean.
  whole, half = credit.advantages_of([group(1.0, [1.0, 0.0]), group(0.5, [1.0, 0.0])], estimator)
  assert whole.tolist() == pytest.approx([0.5, -0.5])
  assert half.tolist() == pytest.approx([0.25, -0.25])


def test_a_prompt_of_weight_zero_shows_its_advantages_and_is_left_out_elsewhere():
  (shown,) = credit.advantages_of([group(0.0, [1.0, 0.0])], estimators.make(estimator="dr_grpo"))
  assert shown.tolist() == pytest.approx([0.5, -0.5])
