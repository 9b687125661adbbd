"""The pure functions of a layer against slow loops and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import layers, rotary
from grpo_jax.models.config import RopeScaling
from grpo_jax.models.products import Products
from tests.models import tiny


def random(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_contract_in_bfloat16_rounds_factors_and_sums_in_float32():
  x, w = random(5, 300), random(300, 7, seed=1)
  rounded = lambda a: np.asarray(a.astype(jnp.bfloat16).astype(jnp.float32), np.float64)
  got, pull = jax.vjp(lambda x, w: Products(jnp.bfloat16).dot(x, w), x, w)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, rounded(x) @ rounded(w), rtol=1e-5, atol=1e-5)
  cotangent = random(5, 7, seed=2)
  dx, dw = pull(cotangent)
  assert (dx.dtype, dw.dtype) == (jnp.float32, jnp.float32)
  np.testing.assert_allclose(dx, rounded(cotangent) @ rounded(w).T, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(dw, rounded(x).T @ rounded(cotangent), rtol=1e-5, atol=1e-5)
  assert np.abs(got - np.asarray(x) @ np.asarray(w)).max() > 1e-3


def test_contract_gives_gradients_in_the_dtype_of_their_operands():
  x, w = random(2, 3, 4), random(4, 5, seed=1).astype(jnp.bfloat16)
  out, pull = jax.vjp(lambda x, w: Products(jnp.bfloat16).dot(x, w), x, w)
  assert [g.dtype for g in pull(out)] == [jnp.float32, jnp.bfloat16]


def test_rms_norm_has_unit_root_mean_square_before_its_weight():
  x, weight = random(3, 2, 50) * 7, random(50, seed=1)
  got = np.asarray(layers.rms_norm(x, weight, 1e-12)) / np.asarray(weight)
  np.testing.assert_allclose(np.sqrt((got**2).mean(-1)), 1.0, rtol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_has_the_gradient_of_its_definition_and_keeps_little_for_it(offset):
  x, weight, g = random(3, 2, 50) * 7, random(50, seed=1), random(3, 2, 50, seed=2)
  x = x.at[0, 0].multiply(1e-4)  # where ε counts.

  def definition(x, weight):
    mean = jnp.mean(x**2, axis=-1, keepdims=True)
    return (weight + offset)[None, None] * x / jnp.sqrt(mean + 1e-6)

  norm = lambda x, weight: layers.rms_norm(x, weight, 1e-6, offset)
  found, pull = jax.vjp(norm, x, weight)
  wanted, pull_wanted = jax.vjp(definition, x, weight)
  np.testing.assert_allclose(found, wanted, rtol=1e-6)
  for mine, right in zip(pull(g), pull_wanted(g), strict=True):
    np.testing.assert_allclose(mine, right, atol=1e-6 * np.abs(right).max())
  kept = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(norm, *a)[1], x, weight))
  assert sum(leaf.size for leaf in kept) == x.size + 6 + 50


def test_rope_turns_by_position_and_keeps_relative_angles():
  config = tiny.config(head_dim=8)
  q, k = random(1, 1, 1, 8), random(1, 1, 1, 8, seed=1)

  def product(place_q, place_k):
    turned = []
    for x, place in ((q, place_q), (k, place_k)):
      turned.append(rotary.rotated(x, *rotary.angles(jnp.asarray([[place]]), config)))
    return float(jnp.sum(turned[0] * turned[1]))

  assert product(7, 3) == pytest.approx(product(104, 100), rel=1e-4)
  assert product(7, 3) != pytest.approx(product(7, 4), rel=1e-3)


def test_llama3_scaling_divides_low_frequencies_and_keeps_high_ones():
  scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
  plain = rotary.frequencies(128, 5e5, None)
  scaled = rotary.frequencies(128, 5e5, scaling)
  # Wavelengths 2π/ω: below 8192/4 kept, above 8192/1 divided by 8, between in between.
  wavelengths = 2 * np.pi / plain
  np.testing.assert_array_equal(scaled[wavelengths < 2048], plain[wavelengths < 2048])
  np.testing.assert_allclose(scaled[wavelengths > 8192], plain[wavelengths > 8192] / 8, rtol=1e-6)
  between = (wavelengths > 2048) & (wavelengths < 8192)
  assert between.any()
  assert ((scaled < plain) & (scaled > plain / 8))[between].all()
