"""Divisions by what should be 0: advantages against rational arithmetic, in float32 and float64."""

import fractions
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.rl import advantages, estimators

G = 6
SIZES = (0.1, 1 / 3, 0.7, 1e6 + 0.1, 3e-30, 1e30, 2.0**-20 + 1e-7)


UNOPTIMISED = {"xla_backend_optimization_level": 0}


def compiled(function):
  return jax.jit(function, compiler_options=UNOPTIMISED)


def rewards_of(dtype):
  """Returns groups whose spread, mean or comparison set is 0, or nearly, and random ones."""
  rng = np.random.default_rng(0)
  groups = []
  for x in SIZES:
    groups += [[x] * G, [0.0] * (G - 1) + [x], [x] * (G - 1) + [2 * x], [x] * (G - 1) + [0.0]]
  groups += [[0.0] * G, [1.0] + [0.15] * (G - 1)]
  groups += np.round(rng.uniform(0, 2, (30, G)), 2).tolist()
  return np.asarray(groups, dtype)


def exact(values):
  """Returns numbers as fractions: what a float holds, without rounding."""
  return [fractions.Fraction(float(x)) for x in values]


def root(x):
  """Returns the square root of a fraction, which may be too small for a float."""
  digits = 10**40
  return fractions.Fraction(math.isqrt(int(x * digits**4)), digits**2)


def deviation(values, ddof):
  mean = sum(values) / len(values)
  below = len(values) - ddof
  return root(sum((x - mean) ** 2 for x in values) / below) if below > 0 else fractions.Fraction(0)


def by_hand(name, group):
  """Returns the advantages of one group by their definition, without ε."""
  others = [[*group[:i], *group[i + 1 :]] for i in range(G)]
  mean = sum(group) / G
  if name in ("grpo", "dr_grpo", "maxrl"):
    below = {"grpo": deviation(group, 1), "dr_grpo": 1, "maxrl": mean}[name]
    return [(x - mean) / below if below else fractions.Fraction(0) for x in group]
  if name == "leave_one_out":
    spreads = [deviation(rest, 1) or 1 for rest in others]
    means = [sum(rest) / (G - 1) for rest in others]
    return [(x - m) / s for x, m, s in zip(group, means, spreads, strict=True)]
  assert name == "pass_at_k"
  sets = list(itertools.combinations(range(G), 3))
  best = [max(group[i] for i in chosen) for chosen in sets]
  sigma, centre = deviation(best, 0), sum(best) / len(best)
  means = [
    fractions.Fraction(sum(b for b, chosen in zip(best, sets, strict=True) if i in chosen), 10)
    for i in range(G)
  ]
  return [(x - centre) / sigma if sigma else fractions.Fraction(0) for x in means]


ESTIMATES = {
  "grpo": functools.partial(advantages.grpo, eps=0.0),
  "dr_grpo": advantages.dr_grpo,
  "maxrl": advantages.maxrl,
  "leave_one_out": functools.partial(advantages.group_relative, baseline="leave_one_out", eps=0.0),
  "pass_at_k": functools.partial(advantages.pass_at_k, k=3, eps=0.0),
}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_advantages_are_those_of_rational_arithmetic(dtype):
  rewards, wrong = rewards_of(dtype), []
  estimates = compiled(lambda given: {name: of(given) for name, of in ESTIMATES.items()})
  with jax.enable_x64(dtype == np.float64):
    for name, found in jax.device_get(estimates(rewards)).items():
      assert found.dtype == dtype
      for group, got in zip(rewards, found, strict=True):
        expected = by_hand(name, exact(group))
        size = max(map(abs, expected))
        error = max(abs(a - b) for a, b in zip(exact(got), expected, strict=True))
        if error > 40 * np.finfo(dtype).eps * size:  # exactly 0 where all are 0.
          wrong.append((name, group.tolist(), got.tolist(), [*map(float, expected)]))
  assert not wrong


@pytest.mark.long
def test_equal_rewards_have_no_advantage_by_any_estimator():
  rewards, wrong = np.asarray([[x] * G for x in SIZES], np.float32), []
  ones = jnp.ones((1, G), bool)
  every = {
    name: estimators.make(name, **({"pass_k": 2} if name == "pass_at_k" else {}))
    for name in estimators.ESTIMATORS
  }

  def estimate(made, given):
    parts = jnp.stack([given, 1 - given])
    lengths = 1 + jnp.arange(G, dtype=jnp.float32)[None]
    found = made(given, ones, parts, lengths=lengths, greedy=given[:, 0])
    return advantages.whiten(found, ones, floor=0.0) if made.needs_whitening else found

  estimates = compiled(lambda given: {name: estimate(of, given) for name, of in every.items()})
  for group in rewards:  # one after the other: some estimators compare groups.
    found = estimates(group[None])
    wrong += [(name, group[0]) for name, values in found.items() if np.any(values)]
  assert not wrong


@pytest.mark.long
def test_what_differs_by_rounding_alone_is_not_scaled_up():
  """Of whitened values, of the best of all sets, of components that cancel."""
  one = np.float32(0.3)
  near = np.asarray([one, np.nextafter(one, np.float32(1)), one, one, one, one])
  whiten = compiled(functools.partial(advantages.whiten, floor=0.0))
  for values in (near, near * np.float32(2**20)):
    np.testing.assert_array_equal(whiten(values[None], np.ones((1, G), bool)), 0)
  best = np.asarray([[*near[:5], 0.0]], np.float32)
  of_five = compiled(functools.partial(advantages.pass_at_k, k=5, eps=0.0))
  np.testing.assert_array_equal(of_five(best), 0)
  assert np.abs(of_five(best + np.arange(G, dtype=np.float32))).max() > 0.1

  part = np.asarray(np.random.default_rng(1).uniform(0, 1, (5, G)), np.float32)
  for weights, is_left in (((0.7, 0.7), False), ((0.7, 0.6), True)):
    found = compiled(functools.partial(advantages.gdpo, weights=weights))(
      np.stack([part, 1 - part])
    )
    np.testing.assert_allclose(np.std(found, ddof=1), float(is_left), rtol=1e-5)


SYMMETRIC = [[-0.3, -1.1, -0.4, 0.3, 1.1, 0.4], [0.7, -0.7, 0.1, -0.1, 0.7, -0.7]]


@pytest.mark.long
def test_maxrl_is_silent_where_the_mean_is_0_but_for_rounding():
  maxrl = compiled(advantages.maxrl)
  x, y = np.round(np.random.default_rng(0).uniform(-2, 2, (2, 300)), 2)
  mixed = np.concatenate([SYMMETRIC, np.stack([x, -x, y, -y, x, -x], axis=1)])
  np.testing.assert_array_equal(maxrl(np.asarray(mixed, np.float32)), 0)
  np.testing.assert_array_equal(maxrl(np.asarray(SYMMETRIC, np.float32)), 0)
  balanced = np.asarray([[0.3, 0.8, -1.1], [1.7, -0.45, -1.25], [-0.01, -0.09, 0.1]])
  for half in (jnp.float16, jnp.bfloat16):  # the rewards are rounded, not only their sum.
    np.testing.assert_array_equal(maxrl(balanced.astype(half)), 0)
  uneven = maxrl(np.asarray([[-1.0, 1.5, 0.25]], np.float32))  # mean 1/4
  np.testing.assert_allclose(uneven, [[-5.0, 5.0, 0.0]], rtol=1e-6)
  # A masked negative reward does not count.
  found = maxrl(np.asarray([[0.0, 1.0, -5.0]], np.float32), np.asarray([[True, True, False]]))
  np.testing.assert_allclose(found, [[-1, 1, 0]])
  many = np.zeros((1, 5000), np.float32)
  many[0, 7] = 1
  np.testing.assert_allclose(maxrl(many)[0, 7], 4999, rtol=1e-6)  # one success is not rounding.
