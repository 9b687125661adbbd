"""Masked sums, sequences in packed rows, reductions: slow loops, splits, junk under masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.rl import aggregate, masks, numerics
from grpo_jax.types import Denominators

X = jnp.asarray([[1.0, 2.0, 3.0, 4.0, jnp.nan], [5.0, jnp.inf, 7.0, 8.0, 9.0]])
MASK = jnp.asarray([[True, True, True, True, False], [True, False, True, True, True]])
IDS = jnp.asarray([[0, 0, 1, 1, 1], [0, 0, 0, 2, 2]])


def test_masked_sums_ignore_what_masked_places_hold():
  assert masks.masked_sum(X, MASK) == 39.0
  assert masks.masked_max(X, MASK) == 9.0 and masks.masked_min(X, MASK) == 1.0


def test_nothing_unmasked_gives_zero_and_empty_extremes():
  nothing = jnp.zeros_like(MASK)
  assert masks.masked_sum(X, nothing) == 0.0
  assert masks.masked_max(X, nothing) == -jnp.inf and masks.masked_min(X, nothing) == jnp.inf


def test_masked_places_get_a_zero_gradient():
  grad = jax.grad(lambda x: masks.masked_sum(jnp.log(masks.fill(x, MASK, 1.0)), MASK))(X)
  np.testing.assert_allclose(grad, np.where(MASK, 1 / np.where(MASK, X, 1), 0), rtol=1e-6)


def test_sequence_sums_and_means_are_those_of_each_sequence():
  np.testing.assert_array_equal(
    masks.sequence_totals(X, MASK, IDS), [[3, 7, 0, 0, 0], [12, 0, 17, 0, 0]]
  )
  np.testing.assert_array_equal(
    masks.sequence_means(X, MASK, IDS), [[1.5, 3.5, 0, 0, 0], [6, 0, 8.5, 0, 0]]
  )
  np.testing.assert_array_equal(masks.sequence_totals(X, MASK), [[10], [29]])
  assert masks.count_sequences(MASK, IDS) == 4 and masks.count_sequences(MASK) == 2


def test_tokens_get_the_value_of_their_sequence():
  totals = masks.sequence_totals(X, MASK, IDS)
  np.testing.assert_array_equal(
    masks.to_tokens(totals, MASK, IDS), [[3, 3, 7, 7, 7], [12, 12, 12, 17, 17]]
  )


def test_completion_ends_with_its_first_stop_id_included():
  tokens = jnp.asarray([[5, 7, 2, 7], [2, 5, 5, 5], [9, 5, 2, 5], [5, 5, 5, 5]])
  expected = [[1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
  np.testing.assert_array_equal(masks.until_stop(tokens, (2, 9)), np.asarray(expected, bool))


def test_loss_mask_is_sampled_tokens_of_kept_completions():
  completion = jnp.arange(3)[None] < jnp.asarray([0, 2, 3])[:, None]
  sampled = jnp.asarray([[True, True, True], [True, True, True], [True, False, True]])
  got = masks.loss_mask(completion, sampled, jnp.asarray([True, False, True]))
  np.testing.assert_array_equal(got, np.asarray([[0, 0, 0], [0, 0, 0], [1, 0, 1]], bool))


def test_overlong_filter_takes_whole_truncated_completions_out():
  got = masks.overlong_filter(jnp.ones((2, 3), bool), jnp.asarray([True, False]))
  np.testing.assert_array_equal(got, [[False] * 3, [True] * 3])


def test_top_entropy_keeps_the_share_of_largest_entropies():
  entropy = jnp.asarray([[0.1, 0.2, 0.3, 0.4, 9.0]])
  mask = jnp.asarray([[True] * 4 + [False]])
  # the 0.75 quantile of 0.1..0.4 is 0.325.
  np.testing.assert_array_equal(
    masks.top_entropy(entropy, mask, 0.25), [[False, False, False, True, False]]
  )
  np.testing.assert_array_equal(masks.top_entropy(entropy, mask, 1.0), mask)
  with pytest.raises(ValueError, match="share"):
    masks.top_entropy(entropy, mask, 0.0)


@pytest.mark.parametrize(
  "name, expected",
  [
    ("token_mean", 39 / 8),
    ("sequence_mean", (1.5 + 3.5 + 6 + 8.5) / 4),
    ("constant_length", 39 / (4 * 10)),
  ],
)
def test_reductions_match_values_worked_by_hand(name, expected):
  options = {"max_completion_tokens": 10} if name == "constant_length" else {}
  denominators = aggregate.local_denominators(MASK, IDS)
  got = aggregate.AGGREGATIONS[name](X, MASK, denominators, IDS, **options)
  np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("name", aggregate.AGGREGATIONS)
def test_parts_add_up_to_the_whole_and_empty_batches_give_zero(name):
  options = {"max_completion_tokens": 10} if name == "constant_length" else {}
  reduce = aggregate.AGGREGATIONS[name]
  step = aggregate.local_denominators(MASK, IDS)
  whole = reduce(X, MASK, step, IDS, **options)
  parts = [reduce(X[i : i + 1], MASK[i : i + 1], step, IDS[i : i + 1], **options) for i in (0, 1)]
  np.testing.assert_allclose(sum(parts), whole, rtol=1e-6)
  value, grad = jax.value_and_grad(
    lambda x: reduce(x, jnp.zeros_like(MASK), Denominators(0.0, 0.0), IDS, **options)
  )(X)
  assert value == 0.0
  np.testing.assert_array_equal(grad, np.zeros((2, 5)))


def test_clamp_has_a_whole_gradient_on_its_bounds():
  grad = jax.grad(lambda x: numerics.clamp(x, -1.0, 1.0).sum())(jnp.asarray([-2.0, -1, 0, 1, 2]))
  np.testing.assert_array_equal(grad, [0, 1, 1, 1, 0])
