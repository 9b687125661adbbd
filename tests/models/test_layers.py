"""The pure functions of a layer against slow loops and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import layers
from grpo_jax.models.config import RopeScaling
from grpo_jax.models.products import Products
from tests.models import tiny


def random(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_attention_mask_is_the_rule_of_packed_rows():
  segments = np.array([[0, 1, 1, 1, 1, 1, 2, 2, 2, 0]])
  branches = np.array([[0, 0, 0, 1, 1, 2, 0, 1, 2, 0]])
  got = np.asarray(layers.attention_mask(jnp.asarray(segments), jnp.asarray(branches)))
  for q in range(10):
    for k in range(10):
      same = segments[0, q] == segments[0, k] != 0
      visible = branches[0, k] == 0 or branches[0, k] == branches[0, q]
      assert got[0, q, k] == (same and k <= q and visible), (q, k)


def test_attention_mask_of_a_block_is_a_cut_of_the_whole():
  segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0]])
  branches = jnp.asarray([[0, 1, 2, 0, 0, 1, 2, 0]])
  whole = layers.attention_mask(segments, branches)
  block = layers.attention_mask(segments, branches, start=3, stop=6)
  np.testing.assert_array_equal(block, whole[:, 3:6, :6])
  assert not whole[:, 3:6, 6:].any()


@pytest.mark.parametrize("kv_layout", ["bske", "bkse"])
def test_attention_is_softmax_over_the_keys_of_the_heads_group(kv_layout):
  q, k, v = random(2, 3, 6, 4), random(2, 5, 2, 4, seed=1), random(2, 5, 2, 4, seed=2)
  mask = np.random.default_rng(3).random((2, 3, 5)) < 0.6
  mask[:, :, 0] = True
  mask[1, 2] = False  # one query that may see nothing.
  wanted = np.zeros((2, 3, 6, 4))
  for b in range(2):
    for t in range(3):
      for h in range(6):
        seen = np.flatnonzero(mask[b, t])
        if not len(seen):
          continue
        scores = np.asarray(k)[b, seen, h // 3] @ np.asarray(q)[b, t, h] / np.sqrt(4.0)
        weights = np.exp(scores - scores.max())
        wanted[b, t, h] = weights / weights.sum() @ np.asarray(v)[b, seen, h // 3]
  if kv_layout == "bkse":
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
  got = layers.attention(q, k, v, jnp.asarray(mask), kv_layout=kv_layout)
  np.testing.assert_allclose(got, wanted, atol=2e-6)


def test_a_query_that_sees_nothing_gets_zero_and_no_gradient():
  q, k, v = random(1, 4, 2, 4), random(1, 4, 1, 4, seed=1), random(1, 4, 1, 4, seed=2)
  segments = jnp.asarray([[0, 1, 1, 0]])

  def total(q, k, v):
    out = layers.packed_attention(q, k, v, segments)
    return jnp.sum(jnp.sin(out) + out), out

  (_, out), grads = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
  np.testing.assert_array_equal(out[0, 0], 0)
  np.testing.assert_array_equal(out[0, 3], 0)
  for grad in grads:
    assert np.isfinite(grad).all()
    np.testing.assert_array_equal(grad[0, 0], 0)
    np.testing.assert_array_equal(grad[0, 3], 0)
  assert np.abs(grads[2][0, 1]).max() > 0


@pytest.mark.parametrize("length", [31, 32, 37])
def test_packed_attention_by_blocks_is_that_of_one_block(length):
  q, k, v = (
    random(2, length, 4, 6),
    random(2, length, 2, 6, seed=1),
    random(2, length, 2, 6, seed=2),
  )
  segments = jnp.asarray(np.sort(tiny.tokens((2, length), vocab_size=4), axis=1))
  branches = jnp.asarray(tiny.tokens((2, length), seed=1, vocab_size=3))

  def run(block_length):
    total = lambda *qkv: jnp.sum(
      jnp.sin(layers.packed_attention(*qkv, segments, branches, block_length=block_length))
    )
    return tiny.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(q, k, v)

  for got, wanted in zip(jax.tree.leaves(run(8)), jax.tree.leaves(run(64)), strict=True):
    assert tiny.relative_error(got, wanted) < 1e-5


def test_packed_attention_by_blocks_saves_memory_in_long_rows():
  q = jax.ShapeDtypeStruct((1, 2048, 4, 8), jnp.float32)
  k = jax.ShapeDtypeStruct((1, 2048, 1, 8), jnp.float32)
  segments = jax.ShapeDtypeStruct((1, 2048), jnp.int32)

  def temporary_bytes(block_length):
    total = lambda q, k, v, s: layers.packed_attention(q, k, v, s, block_length=block_length).sum()
    compiled = tiny.jit(jax.grad(total, argnums=(0, 1, 2))).lower(q, k, k, segments).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporary_bytes(256) < 0.45 * temporary_bytes(2048)


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


def test_rope_turns_by_position_and_keeps_relative_angles():
  config = tiny.config(head_dim=8)
  q, k = random(1, 1, 1, 8), random(1, 1, 1, 8, seed=1)

  def product(place_q, place_k):
    turned = []
    for x, place in ((q, place_q), (k, place_k)):
      turned.append(layers.rope(x, *layers.rope_angles(jnp.asarray([[place]]), config)))
    return float(jnp.sum(turned[0] * turned[1]))

  assert product(7, 3) == pytest.approx(product(104, 100), rel=1e-4)
  assert product(7, 3) != pytest.approx(product(7, 4), rel=1e-3)


def test_llama3_scaling_divides_low_frequencies_and_keeps_high_ones():
  scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
  plain = layers.rope_frequencies(128, 5e5, None)
  scaled = layers.rope_frequencies(128, 5e5, scaling)
  # Wavelengths 2π/ω: below 8192/4 kept, above 8192/1 divided by 8, between in between.
  wavelengths = 2 * np.pi / plain
  np.testing.assert_array_equal(scaled[wavelengths < 2048], plain[wavelengths < 2048])
  np.testing.assert_allclose(scaled[wavelengths > 8192], plain[wavelengths > 8192] / 8, rtol=1e-6)
  between = (wavelengths > 2048) & (wavelengths < 8192)
  assert between.any()
  assert ((scaled < plain) & (scaled > plain / 8))[between].all()
