"""Ranks → rewards, by hand."""

import numpy as np
import pytest

from grpo_jax.data import ranks


@pytest.mark.parametrize(
  "ties, expected",
  [
    ("mean", [0, 1.5, 1.5, 3]),  # the two of rank 2 take up the places 1 and 2.
    ("best", [0, 1, 1, 3]),
    ("worst", [0, 2, 2, 3]),
    ("dense", [0, 1, 1, 2]),
  ],
)
def test_places_of_equal_ranks(ties, expected):
  assert ranks.places([1, 2, 2, 7], ties=ties).tolist() == expected


@pytest.mark.parametrize(
  "options, expected",
  [
    (dict(), [1, 0.5, 0.5, 0]),  # places 0, 1.5, 1.5, 3 of 3.
    (dict(ties="best"), [1, 2 / 3, 2 / 3, 0]),
    (dict(ties="worst"), [1, 1 / 3, 1 / 3, 0]),
    (dict(ties="dense"), [1, 0.5, 0.5, 0]),  # places 0, 1, 1, 2 of 2.
    (dict(best="highest"), [0, 0.5, 0.5, 1]),
    (dict(mapping="reciprocal", ties="best"), [1, 1 / 2, 1 / 2, 1 / 4]),
    (dict(mapping="top"), [1, 0, 0, 0]),
    (dict(mapping="top", best="highest"), [0, 0, 0, 1]),
    (dict(mapping="negative"), [-1, -2, -2, -7]),
    (dict(mapping="negative", best="highest"), [1, 2, 2, 7]),
  ],
)
def test_rewards_of_ranks(options, expected):
  np.testing.assert_allclose(ranks.rewards([1, 2, 2, 7], **options), expected, rtol=1e-12)


def test_softmax_shares_one_reward_and_gives_the_best_more_at_lower_temperature():
  at_one = ranks.rewards([1, 2, 3], mapping="softmax")
  e = np.exp([0.0, -1.0, -2.0])
  np.testing.assert_allclose(at_one, e / e.sum(), rtol=1e-12)
  assert ranks.rewards([1, 2, 3], mapping="softmax", temperature=0.1)[0] > 0.9999


@pytest.mark.parametrize("mapping", sorted(ranks.MAPPINGS))
@pytest.mark.parametrize("ties", sorted(ranks.TIES))
def test_equal_ranks_get_equal_rewards_and_order_is_all_that_is_read(mapping, ties):
  given = [3.0, 1.0, 3.0, 2.0]
  rewards = ranks.rewards(given, mapping=mapping, ties=ties)
  assert rewards[0] == rewards[2]
  assert rewards[1] == rewards.max()
  assert len(set(ranks.rewards([4, 4, 4], mapping=mapping, ties=ties))) == 1  # no signal.
  if mapping != "negative":
    scaled = ranks.rewards([10 * rank for rank in given], mapping=mapping, ties=ties)
    assert scaled.tolist() == rewards.tolist()
  order = [2, 0, 3, 1]
  permuted = ranks.rewards([given[i] for i in order], mapping=mapping, ties=ties)
  np.testing.assert_allclose(permuted, rewards[order], rtol=1e-12)


def test_a_group_of_one_has_a_reward():
  assert ranks.rewards([1]).tolist() == [1.0]


def squares(given):
  return 100 - np.square(given)


def too_few(given):
  return given[1:]


def test_a_function_of_the_users_gets_the_ranks():
  assert ranks.rewards([1, 2, 3], mapping=f"{__name__}.squares").tolist() == [99, 96, 91]
  with pytest.raises(ValueError, match="too_few must return 3 finite rewards"):
    ranks.rewards([1, 2, 3], mapping=f"{__name__}.too_few")


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(mapping="liner"), "did you mean 'linear'"),
    (dict(ties="avg"), "rule for ties 'avg'"),
    (dict(best="first"), "'lowest' or 'highest', got 'first'"),
    (dict(temperature=0.0), "above 0, got 0.0"),
  ],
)
def test_wrong_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    ranks.rewards([1, 2], **options)


def fails(ranks):
  return 1 / 0


def test_a_function_of_the_user_that_raises_is_one_line_with_its_place():
  with pytest.raises(
    ValueError, match=r"fails failed: .*test_ranks.py:\d+: ZeroDivisionError: div"
  ):
    ranks.rewards([1, 2], mapping=f"{__name__}.fails", ties="mean", best="lowest", temperature=1.0)
