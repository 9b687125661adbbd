"""Every implementation of attention against float64, its parts, and what the entry refuses."""

import importlib
import logging

import attention_conformance as conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels import attention as package
from grpo_kernels import implementations
from grpo_kernels.attention import (
  Attention,
  attention,
  choice,
  core,
  mosaic_gpu_tiles,
  pallas_tpu_tiles,
  parts,
  reference,
  visible,
  xla_blocked,
)

CPU = choice.Chip("cpu", "cpu")
# Two prompts with completions, of which some are empty, and padding.
ROW = conformance.packed((5, 4, 0, 6), (3, 2), (1, 9), length=33)


def in_small_tiles(name):
  """Returns an implementation; the blocked one with tiles of 8 tokens."""
  module = importlib.import_module(f"grpo_kernels.attention.{name}")
  return conformance.with_tiles(module) if name == "xla_blocked" else module


def test_suite_knows_every_implementation():
  kernels = {"mosaic_gpu", "pallas_tpu"}  # their own files hold them to the same.
  assert {*conformance.NAMES} == {*package.IMPLEMENTATIONS} - kernels


@pytest.mark.long
@pytest.mark.parametrize("name", conformance.NAMES)
@pytest.mark.parametrize(
  ("window", "dtype"), [(None, "float32"), (4, "float32"), (1, "float32"), (4, "bfloat16")]
)
def test_values_and_gradients_are_those_of_float64(name, window, dtype):
  conformance.check(in_small_tiles(name), ROW, window=window, dtype=dtype)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (6, 1)])
def test_query_heads_share_key_heads(heads):
  conformance.check(reference, ROW, heads=heads[0], kv_heads=heads[1])


def test_a_row_of_padding_gets_zeros_and_no_gradient():
  row = conformance.packed(length=9)
  conformance.check(in_small_tiles("xla_blocked"), row, window=3)


@pytest.mark.parametrize("window", [None, 1, 2, 6])
def test_mask_is_the_rule(window):
  seen = seen_by(ROW, window)
  np.testing.assert_array_equal(visible.mask(seen), conformance.allowed(ROW, window))


def seen_by(row, window=None):
  """Returns the visibility of rows."""
  segments, branches, positions = map(jnp.asarray, row)
  return visible.visible(segments, branches, positions=positions, window=window)


@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("seed", range(3))
def test_tiles_are_those_of_the_mask(window, seed):
  """Exactly without a window; with one, a dead tile may be called live, and nothing else."""
  row, sizes = conformance.random_rows(seed, rows=2, length=48), (8, 16)
  live, whole = visible.live_tiles(seen_by(row, window), *sizes)
  mask = conformance.allowed(row, window).reshape(2, 48 // 8, 8, 48 // 16, 16)
  if window is None:
    np.testing.assert_array_equal(live, mask.any((2, 4)))
    np.testing.assert_array_equal(whole, mask.all((2, 4)))
  assert np.asarray(live)[mask.any((2, 4))].all() and mask.all((2, 4))[np.asarray(whole)].all()
  assert not np.asarray(whole & ~live).any()


# Prompt and completions of rows of 4096 tokens.
LONG_ROWS = {
  "one sequence": ((1, 4095),),
  "several prompts": ((64, 448),) * 8,
  "two completions": ((100, 1948, 2047),),
  "uneven completions": ((700, 300, 900, 150, 40, 1200, 806),),
}


@pytest.mark.long
@pytest.mark.parametrize("groups", LONG_ROWS.values(), ids=LONG_ROWS)
def test_with_a_window_the_lists_of_all_implementations_leave_out_the_tiles_outside(groups):
  row, window = conformance.packed(*groups, length=4096), 512
  seen, size = seen_by(row, window), 128
  mask = np.asarray(visible.mask(seen)).reshape(1, 4096 // size, size, 4096 // size, size)
  holding = mask.any((2, 4)).sum()
  of_tpu = pallas_tpu_tiles.lists(seen, size)
  listed = (
    int(xla_blocked.prepare(seen, 64).is_live.sum()) * 4,  # 256 × 256.
    int(of_tpu.by_queries.count),
    int(of_tpu.by_keys.count),
    int(mosaic_gpu_tiles.lists(seen, size, size).count.sum()),
    int(mosaic_gpu_tiles.pieces(seen, size, size).count.sum()),
  )
  # A tile of queries is 4 tiles of keys and a part of a fifth; so is its prompt's end, if it is in
  # several completions.
  assert holding <= max(listed[1:]) <= 1.02 * holding + 4 and max(listed[1:]) <= 32 * (5 + 2)
  assert listed[0] <= 4 * 16 * (3 + 2)
  if len(groups) == 1 and len(groups[0]) == 2:
    causal = int(visible.live_tiles(seen_by(row), size, size)[0].sum())
    assert (causal, *listed) == (32 * 33 / 2, 4 * 45, *[150] * 4)


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
  conformance.check(in_small_tiles("xla_blocked"), row)


@pytest.mark.parametrize("length", [8, 9, 40, 64, 100])
def test_tiles_cover_rows_of_any_length(length):
  row = conformance.random_rows(length, rows=2, length=length)
  conformance.check(in_small_tiles("xla_blocked"), row, heads=2, kv_heads=1)


@pytest.mark.long
def test_no_array_holds_all_pairs_of_a_long_row():
  q = jax.ShapeDtypeStruct((1, 2048, 4, 8), jnp.float32)
  k = jax.ShapeDtypeStruct((1, 2048, 1, 8), jnp.float32)
  segments = jax.ShapeDtypeStruct((1, 2048), jnp.int32)

  def largest(name):
    total = lambda q, k, v, s: attention(q, k, v, s, implementation=name).sum()
    jaxpr = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(q, k, k, segments)
    return max(x.size for x in conformance.arrays(jaxpr.jaxpr))

  assert largest("reference") == 4 * 2048**2
  assert largest("xla_blocked") <= 4 * 256 * 256


@pytest.mark.long
def test_the_program_does_not_grow_with_the_row():
  def size(length):
    q = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
    total = lambda q, s: attention(q, q, q, s).sum()
    return len(str(jax.make_jaxpr(jax.grad(total))(q, segments)))

  assert size(8192) < 1.05 * size(1024)


@pytest.mark.long
def test_only_tiles_that_hold_anything_are_computed():
  """NaN in the keys of dead tiles reaches nothing: they are never multiplied."""
  row = conformance.packed((8, 8), (16,), length=40)
  q, k, v, g = conformance.inputs(row, heads=1, kv_heads=1)
  segments, branches, _ = map(jnp.asarray, row)

  def both(k, v):
    seen = visible.visible(segments, branches)
    attend = lambda q: core.attend(in_small_tiles("xla_blocked"), core.Settings(), q, k, v, seen)[0]
    out, pull = jax.vjp(attend, q)
    return out, pull(g)[0]

  # Places 32.. are padding; queries 16..31 are the second segment, which sees nothing before.
  hidden = jnp.arange(40)[None, :, None, None] < 16
  spoilt = jax.jit(both)(jnp.where(hidden, jnp.nan, k), jnp.where(hidden, jnp.nan, v))
  for mine, right in zip(spoilt, jax.jit(both)(k, v), strict=True):
    np.testing.assert_array_equal(mine[:, 16:], right[:, 16:])


def test_the_log_sum_exp_has_a_gradient():
  row = conformance.packed((5, 4, 6), length=17)
  q, k, v, g = conformance.inputs(row)
  weights = jnp.asarray(np.random.default_rng(1).normal(size=(1, 4, 17)), jnp.float32)

  def loss(q, k, v, module):
    out, log_sum = core.attend(module, core.Settings(), q, k, v, seen_by(row))
    return jnp.sum(out * g) + jnp.sum(jnp.where(log_sum > -1e9, log_sum * weights, 0.0))

  def by_hand(q, k, v):
    scores = jnp.einsum("btkre,bske->bkrts", q.reshape(1, 17, 2, 2, 6), k) * 6**-0.5
    mask = jnp.asarray(conformance.allowed(row))[:, None, None]
    scores = jnp.where(mask, scores, -1e9)
    log_sum = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.where(mask, jnp.exp(scores - log_sum[..., None]), 0.0)
    out = jnp.einsum("bkrts,bske->btkre", p, v).reshape(q.shape)
    log_sum = log_sum.reshape(1, 4, 17)
    return jnp.sum(out * g) + jnp.sum(jnp.where(log_sum > -1e8, log_sum * weights, 0.0))

  wanted = jax.grad(by_hand, argnums=(0, 1, 2))(q, k, v)
  got = jax.grad(loss, argnums=(0, 1, 2))(q, k, v, in_small_tiles("xla_blocked"))
  for mine, right in zip(got, wanted, strict=True):
    np.testing.assert_allclose(mine, right, atol=3e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", conformance.NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_the_keys_join_to_all_keys(name, dtype):
  q, k, v, _ = conformance.inputs(ROW)
  segments = jnp.asarray(np.where(ROW.segment_ids == 1, 1, 0))  # one branch of fifteen tokens.
  settings = {"positions": jnp.arange(33)[None], "window": 11, "products": core.Plain(dtype)}
  attend, products = Attention(name), settings.pop("products")
  whole = visible.visible(segments, **settings)
  wanted, _ = core.unrounded(reference, core.Settings(products), q, k, v, whole)
  early, late = (jnp.arange(33)[None] < 6), (jnp.arange(33)[None] >= 6)
  seen = visible.visible(jnp.where(late, segments, 0), **settings)
  with_others = attend.partial(q, k, v, seen, products=products)
  # The later tokens see the earlier ones through another call, as a sampler sees its cache.
  mask = visible.mask(whole)
  asked = parts.by_kv_head(parts.scaled(q, 2))
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
  assert [r.getMessage() for r in caplog.records] == ["attention on cpu: xla_blocked"]


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
    core.check_heads(*(given.pop(name) for name in "qkv"))
    core.check_rows((1, 33), **given)
