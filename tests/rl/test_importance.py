"""Engine/trainer weights: worked numbers, inclusive bounds, packing, masked junk."""

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.rl import importance

NAN = float("nan")
# One row, two sequences; ratios old/behavior 2, 1/2, 4 | 3, and a masked place.
BEHAVIOR = jnp.log(jnp.asarray([[0.1, 0.4, 0.2, 0.1, 1.0]]))
OLD = jnp.log(jnp.asarray([[0.2, 0.2, 0.8, 0.3, 1.0]])).at[0, 4].set(NAN)
MASK = jnp.asarray([[True, True, True, True, False]])
IDS = jnp.asarray([[0, 0, 0, 1, 1]])


def _weights(**options):
  got, inside = importance.correction_weights(OLD, BEHAVIOR, MASK, IDS, **options)
  return np.asarray(got)[0, :4], np.asarray(inside)[0, :4]


@pytest.mark.parametrize(
  "level, expected",
  [
    ("none", [2, 0.5, 4, 3]),
    ("token", [2, 0.5, 4, 3]),
    ("sequence", [4, 4, 4, 3]),
    ("sequence_mean", [4 ** (1 / 3)] * 3 + [3]),
  ],
)
def test_weights_match_values_worked_by_hand(level, expected):
  got, inside = _weights(level=level)
  np.testing.assert_allclose(got, expected, rtol=1e-5)
  assert inside.all()


@pytest.mark.parametrize(
  "options, expected, inside",
  [
    ({"truncation": "tis", "high": 2.5}, [2, 0.5, 2.5, 2.5], [1, 1, 0, 0]),
    ({"truncation": "tis", "low": 1.0, "high": 2.5}, [2, 1, 2.5, 2.5], [1, 0, 0, 0]),
    ({"truncation": "icepop", "low": 1.0, "high": 3.5}, [2, 0, 0, 3], [1, 0, 0, 1]),
    ({"truncation": "seq_mask", "low": 1.0, "high": 2.0}, [2, 0.5, 4, 0], [1, 1, 1, 0]),
    ({"truncation": "icepop", "high": 3.5, "level": "sequence"}, [0, 0, 0, 3], [0, 0, 0, 1]),
  ],
)
def test_truncations_match_values_worked_by_hand(options, expected, inside):
  got, got_inside = _weights(**options)
  np.testing.assert_allclose(got, expected, rtol=1e-5)
  np.testing.assert_array_equal(got_inside, np.asarray(inside, bool))


@pytest.mark.long
def test_bounds_are_inclusive():
  weights = jnp.asarray([0.5, 0.75, 2.0])
  np.testing.assert_array_equal(importance.zero_outside(weights, low=0.5, high=2.0), weights)
  np.testing.assert_array_equal(importance.truncate(weights, low=0.5, high=2.0), weights)
  behavior = jnp.zeros((1, 2))
  assert importance.sequence_mask(
    behavior, behavior, jnp.ones((1, 2), bool), low=1.0, high=1.0
  ).all()


def test_weights_that_are_not_finite_are_zero():
  old, behavior = jnp.asarray([0.0, -jnp.inf, NAN]), jnp.asarray([-500.0, -1.0, -1.0])
  np.testing.assert_array_equal(importance.token_weights(old, behavior), [0.0, 0.0, 0.0])


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
def test_a_weight_that_no_float_holds_is_not_raised_to_the_lower_bound(level):
  log_ratio = jnp.asarray([[88.0], [89.0], [np.inf], [NAN], [1e4], [-3.0]], jnp.float32)
  weights, _ = importance.correction_weights(
    log_ratio,
    jnp.zeros((6, 1)),
    jnp.ones((6, 1), bool),
    level=level,
    truncation="tis",
    low=0.5,
    high=2.0,
  )
  np.testing.assert_array_equal(weights[:, 0], [2.0, 0.0, 0.0, 0.0, 0.0, 0.5])


@pytest.mark.long
def test_off_policy_mask_drops_bad_sequences_that_are_far_off():
  policy = jnp.asarray([[-2.0, -2.0, -1.0, -1.0, -5.0, NAN]])
  behavior = jnp.full((1, 6), -1.0)
  advantages = jnp.asarray([[-1.0, -1.0, -1.0, -1.0, 1.0, -1.0]])
  mask = jnp.asarray([[True] * 5 + [False]])
  ids = jnp.asarray([[0, 0, 1, 1, 2, 2]])
  keep = importance.off_policy_sequence_mask(policy, behavior, advantages, mask, ids, threshold=0.5)
  np.testing.assert_array_equal(keep[0, :5], [False, False, True, True, True])
  at_threshold = importance.off_policy_sequence_mask(
    policy, behavior, advantages, mask, ids, threshold=1.0
  )
  assert at_threshold[0, :2].all()  # the gap is exactly 1: not above the threshold.


def test_rows_without_ids_are_one_sequence_each():
  got = importance.sequence_weights(OLD[:, :4], BEHAVIOR[:, :4], MASK[:, :4])
  np.testing.assert_allclose(got, [[12.0] * 4], rtol=1e-5)


def test_an_unknown_form_is_refused():
  with pytest.raises(ValueError, match="median"):
    importance.sequence_weights(OLD, BEHAVIOR, MASK, form="median")
