"""Why completions teach nothing, by hand; when that is said; and that the reasons are complete."""

import dataclasses
import math

import numpy as np
import pytest

from grpo_jax import batching
from grpo_jax.batching import packing
from grpo_jax.groups import credit, filters, learning_signal
from grpo_jax.rl import estimators
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup


def a_rollout(reward, *, tokens=3, is_cut=False) -> Rollout:
  return Rollout(
    completion_ids=np.arange(tokens, dtype=np.int32),
    loss_mask=np.ones(tokens, bool),
    behavior_logprobs=np.full(tokens, -0.5, np.float32),
    weight_versions=np.zeros(tokens, np.int32),
    finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
    reward=reward,
  )


def a_group(name, *rollouts, weight=1.0) -> RolloutGroup:
  return RolloutGroup(Prompt(name, np.arange(4, dtype=np.int32), "math", weight=weight), rollouts)


def rewards(name, *values) -> RolloutGroup:
  return a_group(name, *map(a_rollout, values))


def signal_of(groups, *, estimator="grpo", drop_truncated=False, row_tokens=32, skip=True, **keep):
  """Goes the way of a training step, from its groups to its signal."""
  made = estimators.make(estimator)
  kept = filters.apply(groups, **keep).kept
  advantages = credit.advantages_of(kept, made)
  assembled = batching.assemble(
    kept,
    advantages,
    shapes=(packing.Shape(8, row_tokens, row_tokens),),
    drop_truncated=drop_truncated,
    skip_zero_advantage=skip and not made.needs_whitening,
  )
  return learning_signal.find(groups, kept, advantages, assembled.not_computed, made)


def with_greedy(greedy, group) -> RolloutGroup:
  return dataclasses.replace(group, greedy=a_rollout(greedy))


CUT = [a_group("a", *(a_rollout(0.0, is_cut=True) for _ in range(3)))]
CASES = {
  "group_of_one": ([rewards("a", 1.0), rewards("b", 0.0), rewards("c", 1.0, math.nan)], {}),
  "equal_rewards": ([rewards("a", 1.0, 1.0), rewards("b", 0.0, 0.0)], {}),
  "all_truncated": (CUT, {}),
  "truncated": (CUT, {"drop_truncated": True}),
  "unscorable": ([rewards("a", math.nan, math.nan)], {}),
  "filtered": ([rewards("a", 1.0, 1.0), rewards("b", 0.0, 0.0)], {"drop_no_signal": True}),
  "zero_weight": ([a_group("a", a_rollout(0.0), a_rollout(1.0), weight=0.0)], {}),
  "too_long": ([rewards("a", 0.0, 1.0)], {"row_tokens": 6}),
  "prompt_too_long": ([rewards("a", 0.0, 1.0)], {"row_tokens": 4}),
  "empty": ([a_group("a", a_rollout(0.0, tokens=0), a_rollout(1.0, tokens=0))], {}),
  "equal_rewards_in_step": (
    [rewards("a", 1.0), rewards("b", 1.0, 1.0)],
    {"estimator": "reinforce_pp"},
  ),
  "equal_to_greedy": ([with_greedy(1.0, rewards("a", 1.0, 1.0))], {"estimator": "remax"}),
  "greedy_unscorable": ([with_greedy(math.nan, rewards("a", 1.0, 0.0))], {"estimator": "remax"}),
}


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("reason", CASES)
def test_a_step_that_teaches_nothing_says_why_and_what_to_do(reason, skip):
  groups, options = CASES[reason]
  found = signal_of(groups, skip=skip, **options)
  assert found.is_empty and max(found.lost, key=lambda name: found.lost[name]) == reason
  assert sum(found.lost.values()) == found.completions == sum(len(g.rollouts) for g in groups)
  assert found.metrics()["signal/lost_share"] == 1.0
  reported = "\n".join(learning_signal.Watch(has_learned=False).lines(0, found))
  assert reported.startswith("Step 0: NOTHING TO LEARN FROM")
  assert learning_signal.REASONS[reason].what in reported
  assert learning_signal.REASONS[reason].remedy in reported


def test_every_reason_for_which_a_completion_is_left_out_has_a_remedy():
  assert {*batching.LEFT_OUT} <= learning_signal.REASONS.keys()
  # One has no step of its own: beside it stand completions that are learned from.
  assert learning_signal.REASONS.keys() - CASES.keys() == {"at_baseline"}


def test_what_is_learned_from_is_not_lost():
  mixed = [rewards("a", 1.0, 0.0), rewards("b", 0.0, 0.5, 1.0), rewards("c", 1.0)]
  found = signal_of(mixed)
  assert found.lost == {"group_of_one": 1, "at_baseline": 1} and not found.is_empty
  assert found.metrics()["signal/lost_share"] == 2 / 6
  assert learning_signal.Watch(has_learned=False).lines(0, found) == []


def test_an_estimator_over_the_step_learns_from_groups_of_one():
  groups = [rewards("a", 1.0), rewards("b", 0.0), rewards("c", 1.0)]
  assert signal_of(groups).is_empty
  assert signal_of(groups, estimator="reinforce_pp").lost == {}
  within = signal_of(groups, estimator="reinforce_pp_baseline")
  assert within.lost == {"group_of_one": 3}


def test_one_completion_is_enough_beside_a_greedy_one():
  groups = [with_greedy(0.0, rewards("a", 1.0)), with_greedy(1.0, rewards("b", 1.0, 1.0))]
  found = signal_of(groups, estimator="remax")
  assert found.lost == {"equal_to_greedy": 2} and found.completions == 3


def test_the_first_steps_are_reported_at_once_and_then_ever_less_often():
  nothing = learning_signal.Signal(4, {"equal_rewards": 4})
  something = learning_signal.Signal(4, {"equal_rewards": 3})
  watch = learning_signal.Watch(has_learned=False)
  reported = {step: lines[0] for step in range(40) if (lines := watch.lines(step, nothing))}
  assert list(reported) == [0, 2, 9, 29]
  assert reported[9].startswith("Steps 0 to 9: NOTHING TO LEARN FROM")
  assert watch.lines(40, something) == []
  late = [step for step in range(41, 90) if watch.lines(step, nothing)]
  assert late == [50, 70]  # ten and thirty in a row.
  resumed = learning_signal.Watch(has_learned=True)
  assert resumed.lines(7, nothing) == []


def test_a_step_without_completions_has_no_share():
  assert math.isnan(learning_signal.Signal(0, {}).metrics()["signal/lost_share"])
