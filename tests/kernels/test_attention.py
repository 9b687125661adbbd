"""Every implementation of attention against float64, its parts, and what the entry refuses."""

import functools
import importlib
import logging

import attention_conformance as conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels import attention as package
from grpo_kernels import implementations
from grpo_kernels.attention import Attention, attention, choice, core, parts, reference, xla_chunked

CPU = choice.Chip("cpu", "cpu")
# Two prompts with completions, of which some are empty, and padding.
ROW = conformance.packed((5, 4, 0, 6), (3, 2), (1, 9), length=33)


def in_small_blocks(name):
  """Returns an implementation; the chunked one with blocks of 8 queries."""
  module = importlib.import_module(f"grpo_kernels.attention.{name}")
  return with_blocks(module) if name == "xla_chunked" else module


def with_blocks(module, length=8):
  """Returns a stand-in for the chunked module that has shorter blocks."""

  class Short:
    attention = staticmethod(functools.partial(module.attention, block_length=length))

  return Short


def test_suite_knows_every_implementation():
  assert set(conformance.NAMES) == set(package.IMPLEMENTATIONS)


@pytest.mark.long
@pytest.mark.parametrize("name", conformance.NAMES)
@pytest.mark.parametrize(
  ("window", "dtype"), [(None, "float32"), (4, "float32"), (1, "float32"), (4, "bfloat16")]
)
def test_values_and_gradients_are_those_of_float64(name, window, dtype):
  conformance.check(in_small_blocks(name), ROW, window=window, dtype=dtype)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (6, 1)])
def test_query_heads_share_key_heads(heads):
  conformance.check(reference, ROW, heads=heads[0], kv_heads=heads[1])


def test_a_row_of_padding_gets_zeros_and_no_gradient():
  row = conformance.packed(length=9)
  conformance.check(in_small_blocks("xla_chunked"), row, window=3)


@pytest.mark.long
def test_mask_is_the_rule_and_a_block_of_it_is_a_cut():
  for window in (None, 2, 6):
    settings = {"positions": jnp.asarray(ROW.positions), "window": window}
    mask = functools.partial(reference.attention_mask, *map(jnp.asarray, ROW[:2]), **settings)
    np.testing.assert_array_equal(mask(), conformance.allowed(ROW, window))
    np.testing.assert_array_equal(mask(start=7, stop=19), np.asarray(mask())[:, 7:19, :19])
    assert not np.asarray(mask())[:, 7:19, 19:].any()


def test_a_window_counts_positions_and_not_places():
  row = conformance.packed((4, 10, 3), length=17)
  mask = conformance.allowed(row, window=4)
  second = 14  # first token of the second completion; ten of the first lie before it.
  assert np.flatnonzero(mask[0, second]).tolist() == [1, 2, 3, 14]


@pytest.mark.long
def test_a_window_may_be_an_array():
  q, k, v, _ = conformance.inputs(ROW)
  ids = [jnp.asarray(x) for x in ROW[:2]]
  run = jax.jit(lambda n: attention(q, k, v, *ids, positions=jnp.asarray(ROW.positions), window=n))
  for window in (3, 2**31 - 1):
    whole = None if window > 100 else window
    wanted = attention(q, k, v, *ids, positions=jnp.asarray(ROW.positions), window=whole)
    np.testing.assert_allclose(run(jnp.int32(window)), wanted, atol=1e-6)


def test_a_last_block_may_be_whole_and_completions_may_be_left_out():
  row = conformance.packed((5,), (3, 2), (1, 9), length=24)
  conformance.check(in_small_blocks("xla_chunked"), row)


@pytest.mark.long
def test_blocks_save_memory_in_long_rows():
  q = jax.ShapeDtypeStruct((1, 2048, 4, 8), jnp.float32)
  k = jax.ShapeDtypeStruct((1, 2048, 1, 8), jnp.float32)
  segments = jax.ShapeDtypeStruct((1, 2048), jnp.int32)

  def temporary_bytes(module):
    total = lambda q, k, v, s: module.attention(q, k, v, s).sum()
    options = {"xla_backend_optimization_level": 0}
    grad = jax.jit(jax.grad(total, argnums=(0, 1, 2)), compiler_options=options)
    return grad.lower(q, k, k, segments).compile().memory_analysis().temp_size_in_bytes

  assert temporary_bytes(xla_chunked) < 0.45 * temporary_bytes(reference)


@pytest.mark.long
@pytest.mark.parametrize("name", conformance.NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_the_keys_join_to_all_keys(name, dtype):
  q, k, v, _ = conformance.inputs(ROW)
  segments = jnp.asarray(np.where(ROW.segment_ids == 1, 1, 0))  # one branch of fifteen tokens.
  settings = {"positions": jnp.arange(33)[None], "window": 11, "products": core.Plain(dtype)}
  wanted = attention(q, k, v, segments, **settings)
  attend = Attention(name)
  early, late = (jnp.arange(33)[None] < 6), (jnp.arange(33)[None] >= 6)
  with_others = attend.partial(q, k, v, jnp.where(late, segments, 0), **settings)
  # The later tokens see the earlier ones through another call, as a sampler sees its cache.
  mask = reference.attention_mask(segments, None, positions=jnp.arange(33)[None], window=11)
  asked = parts.by_kv_head(parts.scaled(q, 2))
  products = settings["products"]
  allowed = jnp.repeat(mask & early[:, None], 2, axis=1)[:, None]
  mix = lambda weights: products.contract("bkms,bske->bkme", weights, v)
  scores = products.contract("bkme,bske->bkms", asked, k)
  before = parts.by_token(parts.softmax(scores, allowed, mix, products), 4)
  found = parts.joined(with_others, before)
  got = found.mixed / found.total[..., None]
  tolerance = 1e-6 if dtype == "float32" else 1e-5  # weights are rounded alike.
  np.testing.assert_allclose(got[:, 6:15], wanted[:, 6:15], atol=tolerance)


def test_choice_is_logged_once(caplog):
  implementations.log_once.cache_clear()
  q, k, v, _ = conformance.inputs(ROW)
  with caplog.at_level(logging.INFO, "grpo_kernels.attention"):
    for _ in range(2):
      attention(q, k, v, jnp.asarray(ROW.segment_ids))
  assert [r.getMessage() for r in caplog.records] == ["attention on cpu: xla_chunked"]


def test_names_that_do_not_exist_or_cannot_run_are_refused(monkeypatch):
  with pytest.raises(ValueError, match="attention has no implementation 'flash'; there are ref"):
    choice.pick("flash", CPU, dtype="bfloat16")
  of_tpu = choice.Implementation("reference", platform="tpu", dtypes=("bfloat16",))
  monkeypatch.setitem(choice.IMPLEMENTATIONS, "kernel", of_tpu)
  with pytest.raises(NotImplementedError, match="'kernel' runs on tpu; this process .* on cpu"):
    choice.pick("kernel", CPU, dtype="bfloat16")
  v5e = choice.Chip("tpu", "TPU v5 lite")
  with pytest.raises(NotImplementedError, match="computes in bfloat16, got float32"):
    choice.pick("kernel", v5e, dtype="float32")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"v": jnp.zeros((1, 33, 2, 5))}, "keys and values need the same shape"),
    ({"q": jnp.zeros((1, 33, 3, 6))}, "H a multiple of K"),
    ({"q": jnp.zeros((1, 32, 4, 6))}, "the same B, T and E"),
    ({"segment_ids": jnp.zeros((1, 32), int)}, r"segment_ids needs the shape \(1, 33\)"),
    ({"branch_ids": jnp.zeros((2, 33), int)}, r"branch_ids needs the shape \(1, 33\)"),
    ({"window": 3}, "a window needs positions"),
    ({"window": 0, "positions": jnp.zeros((1, 33), int)}, "at least 1 token, got 0"),
  ],
)
def test_what_does_not_fit_is_refused(change, message):
  q, k, v, _ = conformance.inputs(ROW)
  nothing = dict.fromkeys(("branch_ids", "positions", "window"))
  given = {"q": q, "k": k, "v": v, "segment_ids": jnp.asarray(ROW.segment_ids), **nothing, **change}
  with pytest.raises(ValueError, match=message):
    core.check(**given)
