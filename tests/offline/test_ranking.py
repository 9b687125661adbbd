"""Ranking accuracy by hand, and its properties."""

import numpy as np
import pytest

from grpo_jax import metrics
from grpo_jax.offline import ranking
from grpo_jax.offline.ranking import Ranked
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup


def ranked(scores, rewards, kind=None):
  return Ranked(np.asarray(scores, np.float64), np.asarray(rewards, np.float32), kind)


@pytest.mark.parametrize(
  "scores, rewards, pairs, exact, places",
  [
    ([3, 2, 1], [1, 0.5, 0], [1, 1, 1], True, [1, 1, 1]),
    ([1, 2, 3], [1, 0.5, 0], [0, 0, 0], False, [0, 1, 0]),
    ([3, 1, 2], [1, 0.5, 0], [1, 1, 0], False, [1, 0, 0]),
    # Two equals: their order does not matter, and 2 pairs count, not 3.
    ([3, 1, 2], [1, 0, 0], [1, 1], True, [1, 1, 1]),
    ([2, 3, 1], [1, 1, 0], [1, 1], True, [1, 1, 1]),
    ([1, 3, 2], [1, 1, 0], [0, 1], False, [0, 1, 0]),  # predicted: 1, 2, 0.
    ([1, 1], [1, 0], [0.5], False, [1, 1]),  # equal scores: half a pair, and not exact.
    ([1, 2, np.nan], [1, 0, 5], [0], False, [0, 0]),  # what has no score takes no part.
  ],
)
def test_pairs_exact_and_places_by_hand(scores, rewards, pairs, exact, places):
  group = ranked(scores, rewards)
  assert sorted(ranking.pairs(group)) == sorted(pairs)
  assert ranking.is_exact(group) == exact
  assert ranking.places_right(group).tolist() == places


def test_of_groups_by_hand():
  groups = [
    ranked([3, 2, 1], [1, 0.5, 0], "easy"),  # pairs 1, exact, margin 3 - 1.5.
    ranked([1, 2, 3], [1, 0.5, 0], "hard"),  # pairs 0, chosen reward 0, margin 1 - 2.5.
    ranked([3, 1, 2], [1, 0.5, 0], "hard"),  # pairs 2/3, margin 3 - 1.5.
    ranked([1, 2, 3], [1, 1, 1], "hard"),  # nothing to rank.
  ]
  found = ranking.group_metrics(groups, name="v")
  expected = {
    "eval/v/groups": 4,
    "eval/v/no_order_share": 1 / 4,
    "eval/v/accuracy": (1 + 0 + 2 / 3) / 3,
    "eval/v/exact_accuracy": 1 / 3,
    "eval/v/place_accuracy": (1 + 1 / 3 + 1 / 3) / 3,
    "eval/v/best_accuracy": 2 / 3,
    "eval/v/chosen_reward_mean": 2 / 3,
    "eval/v/margin": 0.5,
    "eval/v/easy/accuracy": 1,
    "eval/v/hard/accuracy": 1 / 3,
    "eval/v/hard/groups": 3,
    "eval/v/consistency": 1 - 2 / 3,
  }
  assert {name: found[name] for name in expected} == pytest.approx(expected)
  assert metrics.unknown(found) == []


def test_without_types_there_is_no_consistency():
  found = ranking.group_metrics([ranked([2, 1], [1, 0])], name="v")
  assert "eval/v/consistency" not in found and found["eval/v/accuracy"] == 1.0
  one = ranking.group_metrics([ranked([2, 1], [1, 0], "a/b")], name="v")
  assert "eval/v/consistency" not in one and one["eval/v/a_b/accuracy"] == 1.0


def test_accuracy_does_not_depend_on_the_order_or_the_scale():
  rng = np.random.default_rng(0)
  for _ in range(20):
    scores, rewards = rng.normal(size=6), rng.integers(0, 3, 6).astype(np.float32)
    order = rng.permutation(6)
    one, other = ranked(scores, rewards), ranked(scores[order] * 7 + 1, rewards[order] * 2)
    assert sorted(ranking.pairs(one)) == sorted(ranking.pairs(other))
    assert ranking.is_exact(one) == ranking.is_exact(other)
    opposite = ranking.pairs(ranked(-scores, rewards))
    assert np.array_equal(np.sort(1 - opposite), np.sort(ranking.pairs(one)))


def test_scores_are_over_sampled_tokens():
  rollout = Rollout(
    completion_ids=np.arange(4, dtype=np.int32),
    loss_mask=np.asarray([True, False, True, True]),
    behavior_logprobs=np.zeros(4, np.float32),
    weight_versions=np.zeros(4, np.int32),
    finish_reason=FinishReason.STOP,
    reward=0.0,
  )
  group = RolloutGroup(Prompt("p", np.arange(2, dtype=np.int32), "e"), (rollout, rollout))
  known = np.asarray([-1.0, np.nan, -2.0, -3.0], np.float32)
  missing = np.asarray([-1.0, 0.0, np.nan, -3.0], np.float32)
  assert ranking.response_scores(group, [known, known]).tolist() == [-2.0, -2.0]
  assert ranking.response_scores(group, [known, known], score="sum").tolist() == [-6.0, -6.0]
  assert np.isnan(ranking.response_scores(group, [known, missing])[1])
  with pytest.raises(ValueError, match="scored by one of"):
    ranking.response_scores(group, [known, known], score="median")


def test_a_step_without_any_order_has_no_accuracy():
  assert np.isnan(ranking.step_metrics([ranked([1, 2], [1, 1])])["train/rank_accuracy"])
  assert ranking.step_metrics([ranked([2, 1], [1, 0])])["train/rank_accuracy"] == 1.0
