"""Shaping of rewards: numbers by hand, what cannot be scored, components, and refusals."""

import math

import numpy as np
import pytest

from grpo_jax.groups import shaping
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup

NAN, INF = float("nan"), float("inf")


def group(rewards, *, tokens=None, truncated=(), components=None, written=0):
  """Returns a group; `written` tokens of every completion are the environment's."""
  lengths = tokens or [4] * len(rewards)
  rollouts = tuple(
    Rollout(
      completion_ids=np.arange(length + written, dtype=np.int32),
      loss_mask=np.arange(length + written) < length,
      behavior_logprobs=np.where(np.arange(length + written) < length, -1.0, 0).astype(np.float32),
      weight_versions=np.zeros(length + written, np.int32),
      finish_reason=FinishReason.LENGTH if i in truncated else FinishReason.STOP,
      reward=reward,
      reward_components=components[i] if components else {},
    )
    for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
  )
  return RolloutGroup(Prompt("p", np.asarray([1], np.int32), "none"), rollouts)


def rewards_of(made: RolloutGroup) -> list[float]:
  return [rollout.reward for rollout in made.rollouts]


def shape(made: RolloutGroup, **options) -> RolloutGroup:
  return shaping.apply([made], shaping.make(**options))[0]


def test_scaling_clamps_and_maps_linearly():
  shaped = shape(group([-1.0, 0.0, 0.25, 1.0, 7.0]), scale_from=(0, 1), scale_to=(-1, 1))
  assert rewards_of(shaped) == [-1.0, -1.0, -0.5, 1.0, 1.0]
  shaped = shape(group([2.0, 3.0, 10.0]), scale_from=(2, 10), scale_to=(0.0, 4.0))
  assert rewards_of(shaped) == [0.0, 0.5, 4.0]
  turned = shape(group([0.0, 1.0, 4.0]), scale_from=(0, 4), scale_to=(1.0, 0.0))
  assert rewards_of(turned) == [1.0, 0.75, 0.0]


def test_stop_properly_takes_from_truncated_completions_only_and_never_gives():
  made = group([1.0, 1.0, 0.5, -1.0, 0.0], truncated=(1, 2, 3, 4))
  assert rewards_of(shape(made, stop_properly_coef=0.25)) == [1.0, 0.25, 0.125, -1.0, 0.0]
  assert rewards_of(shape(made, stop_properly_coef=0.0)) == [1.0, 0.0, 0.0, -1.0, 0.0]
  assert rewards_of(shape(made, stop_properly_coef=1.0)) == rewards_of(made)


# DAPO, equation 13, with L_max 20 and L_cache 8: 0 up to 12 tokens, then -1/8 a token, -1 beyond.
DAPO = {1: 0, 12: 0, 13: -1 / 8, 16: -1 / 2, 20: -1, 21: -1, 40: -1}
NEMO_RL = DAPO | {21: -9 / 8, 40: -28 / 8}


@pytest.mark.parametrize(("floor", "expected"), [(True, DAPO), (False, NEMO_RL)])
def test_overlong_penalty_counts_tokens(floor, expected):
  made = group([1.0] * len(expected), tokens=list(expected))
  options = {"overlong_buffer_tokens": 8, "max_completion_tokens": 20, "overlong_floor": floor}
  penalties = np.asarray(rewards_of(shape(made, **options))) - 1.0
  assert penalties.tolist() == list(expected.values())
  doubled = np.asarray(rewards_of(shape(made, **options, overlong_penalty=2.0))) - 1.0
  assert doubled.tolist() == [2 * p for p in expected.values()]


def test_overlong_penalty_does_not_count_what_the_environment_wrote():
  options = {"overlong_buffer_tokens": 8, "max_completion_tokens": 20}
  alone, talkative = group([1.0], tokens=[16]), group([1.0], tokens=[16], written=30)
  assert rewards_of(shape(alone, **options)) == rewards_of(shape(talkative, **options)) == [0.5]


def test_the_order_is_scale_then_stop_properly_then_overlong():
  made = group([0.75, 0.75], tokens=[20, 16], truncated=(0,))
  shaped = shape(
    made,
    scale_from=(0, 1),
    scale_to=(0, 4),
    stop_properly_coef=0.5,
    overlong_buffer_tokens=8,
    max_completion_tokens=20,
  )
  assert rewards_of(shaped) == [0.75 * 4 * 0.5 - 1.0, 0.75 * 4 - 0.5]


EVERYTHING = {
  "scale_from": (0, 1),
  "scale_to": (-1, 1),
  "stop_properly_coef": 0.0,
  "overlong_buffer_tokens": 4,
  "max_completion_tokens": 4,
}


def test_what_could_not_be_scored_stays_so():
  made = group([NAN, INF, -INF, 1.0], truncated=(0, 1, 2, 3), tokens=[4, 4, 4, 4])
  shaped = rewards_of(shape(made, **EVERYTHING))
  assert math.isnan(shaped[0]) and shaped[1:3] == [INF, -INF]
  assert shaped[3] == -1.0  # 1 → 1, times 0, less 1.


def test_only_rewards_change_and_the_group_given_does_not():
  made = group([0.0, 1.0], truncated=(1,))
  shaped = shape(made, **EVERYTHING)
  assert rewards_of(made) == [0.0, 1.0]
  assert shaped.prompt is made.prompt
  for before, after in zip(made.rollouts, shaped.rollouts, strict=True):
    assert after.completion_ids is before.completion_ids
    assert after.finish_reason is before.finish_reason
  assert shaping.apply([made], shaping.make()) == (made,)
  assert shaping.apply([made], shaping.make())[0] is made
  assert shape(group([]), **EVERYTHING).rollouts == ()


def test_components_are_shaped_and_the_penalty_becomes_one():
  components = [{"format": 1.0, "right": 0.0}, {"format": 0.5, "right": 1.0}, {}]
  made = group([1.0, 1.5, NAN], tokens=[16, 12, 12], truncated=(1,), components=components)
  shaped = shape(
    made,
    scale_from=(0, 2),
    scale_to=(0, 4),
    stop_properly_coef=0.5,
    overlong_buffer_tokens=8,
    max_completion_tokens=20,
  )
  assert rewards_of(shaped)[:2] == [2.0 - 0.5, 1.5]
  assert [r.reward_components for r in shaped.rollouts] == [
    {"format": 2.0, "right": 0.0, "overlong": -0.5},
    {"format": 0.5, "right": 1.0, "overlong": 0.0},
    {},
  ]
  own = group([1.0], tokens=[16], components=[{"overlong": 1.0}])
  options = {"overlong_buffer_tokens": 8, "max_completion_tokens": 20}
  assert shape(own, **options).rollouts[0].reward_components == {"overlong": 0.5}


def test_metrics_distinguish_raw_and_shaped_rewards():
  made = [
    group([1.0, 1.0, 2.0, NAN], tokens=[20, 12, 12, 20], truncated=(0,)),
    group([0.0, 0.0, 0.0, 0.0], tokens=[4, 4, 4, 4]),
  ]
  options = shaping.make(scale_from=(0, 1), overlong_buffer_tokens=8, max_completion_tokens=20)
  reported = shaping.group_metrics(made, shaping.apply(made, options), options)
  assert reported == {
    "shaping/reward_mean": pytest.approx((0 + 1 + 1 + 0 * 4) / 7),
    "shaping/changed_share": pytest.approx(2 / 7),
    "shaping/no_signal_share": 0.5,
    "shaping/clamped_share": pytest.approx(1 / 7),
    "shaping/overlong_share": pytest.approx(1 / 7),
    "shaping/overlong_penalty_mean": pytest.approx(-1 / 7),
  }
  assert shaping.group_metrics(made, made, shaping.make()) == {}
  assert all(math.isnan(value) for value in shaping.group_metrics([], [], options).values())


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"scale_from": (1, 1)}, "must rise"),
    ({"scale_from": (2, 1)}, "must rise"),
    ({"scale_from": (0, 1, 2)}, "must be a list of 2 elements, each a finite number"),
    ({"scale_from": (0, INF)}, "must be a list of 2 elements, each a finite number"),
    ({"scale_from": (0, "one")}, r"scale_from must be a list .*, got \(0, 'one'\)"),
    ({"scale_from": (0, 1), "scale_to": (1, 1)}, "same value"),
    ({"scale_to": (-1, 1)}, "changes nothing without scale_from"),
    ({"stop_properly_coef": 1.5}, "from 0 to 1"),
    ({"stop_properly_coef": -0.5}, "from 0 to 1"),
    ({"overlong_buffer_tokens": 8}, "needs max_completion_tokens"),
    (
      {"overlong_buffer_tokens": 0, "max_completion_tokens": 8},
      "overlong_buffer_tokens must be an integer",
    ),
    ({"overlong_buffer_tokens": 9, "max_completion_tokens": 8}, "from 1 to"),
    (
      {"overlong_buffer_tokens": 8, "max_completion_tokens": 8, "overlong_penalty": 0.0},
      "overlong_penalty must be a finite number > 0",
    ),
    ({"overlong_penalty": 2.0}, "change nothing without overlong_buffer_tokens"),
    ({"max_completion_tokens": 8}, "change nothing without overlong_buffer_tokens"),
  ],
)
def test_what_makes_no_sense_or_does_nothing_is_refused(options, message):
  with pytest.raises(ValueError, match=message):
    shaping.make(**options)
