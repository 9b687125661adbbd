"""The Pallas kernels for TPU, in the interpreter that simulates one, with tiles small enough."""

import functools
import itertools

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.linear_logprobs import core, pallas_tpu, xla_chunked
from grpo_kernels.linear_logprobs import pallas_tpu_tiles as tiling
from grpo_kernels.linear_logprobs.core import LOWEST, Settings
from grpo_kernels.linear_logprobs.pallas_tpu_tiles import MIB, Tiles

# Two groups of lanes to a tile and two tiles to a chunk, so that 700 columns are one chunk and a
# ragged rest of a ragged tile, and 130 tokens are two tiles.
TILES = Tiles(rows=128, columns=256, chunk=512, vmem_limit_bytes=MIB)
SMALL = pallas_tpu.PallasTpu(tiles=TILES)
operate = functools.partial(core.entry(SMALL), interpret=True)


@pytest.mark.long
@pytest.mark.parametrize(
  ("n", "d", "v", "dtype", "head_layout", "temperature"),
  [
    pytest.param(130, 20, 700, "float32", "vd", 0.3, id="two-row-tiles-ragged"),
    pytest.param(5, 16, 700, "bfloat16", "dv", 1.7, id="dv-bf16"),
    pytest.param(3, 24, 1024, "bfloat16", "vd", 1.0, id="whole-chunks"),
    pytest.param(1, 8, 513, "float32", "dv", 1.0, id="one-token-one-column-left"),
  ],
)
def test_small_tiles_agree_with_float64(n, d, v, dtype, head_layout, temperature):
  conformance.check(operate, n, d, v, dtype=dtype, head_layout=head_layout, temperature=temperature)


@pytest.mark.long
@pytest.mark.parametrize(("n", "d", "v"), [(2, 8, 1), (3, 8, 2), (4, 130, 1009)])
def test_chosen_tiles_agree_with_float64(n, d, v):
  chosen = functools.partial(pallas_tpu.linear_logprobs, interpret=True)
  conformance.check(chosen, n, d, v, dtype="float32", temperature=0.7)


@pytest.mark.long
def test_targets_on_the_edges_of_lanes_tiles_and_chunks():
  edges = [0, 127, 128, 255, 256, 511, 512, 640, 767, 768, 777]
  conformance.check(operate, len(edges), 16, 778, dtype="float32", targets=edges)


@pytest.mark.long
@pytest.mark.parametrize(
  "logits",
  [
    pytest.param(np.linspace(-1000.0, 1000.0, 641), id="up-to-1e3"),
    pytest.param(np.where(np.arange(641) % 2, 1000.0, 999.5), id="two-heights-at-1e3"),
    pytest.param(np.full(641, 250.0), id="all-equal"),
    pytest.param(np.where(np.arange(641) == 640, 1000.0, -1000.0), id="one-hot-in-the-last-tile"),
  ],
)
def test_extreme_logits_lose_nothing(logits):
  # Column v of a head of width 2 is (a, b) with 32 a + b = logit: products and sums are exact.
  a = np.round(logits / 32)
  head = np.stack([a, logits - 32 * a], axis=1).astype(np.float32)
  hidden = np.asarray([[32.0, 1.0], [-32.0, -1.0]], np.float32)
  targets = np.asarray([640, 3], np.int32)
  g, g_entropy = conformance.cotangents(2)
  settings = {"head_layout": "vd", "temperature": 1.0}
  exact = conformance.oracle(hidden, head, targets, g=g, g_entropy=g_entropy, **settings)
  got = conformance.differentiate(operate, hidden, head, targets, g, g_entropy, **settings)
  # float32 keeps a logprob of -2000 to 1.2e-4.
  scale = max(1.0, np.abs(exact.outcome.logprobs).max() / 100)
  conformance.assert_conforms(got, exact, 1e-5, value_scale=scale, cancels=True)


@pytest.mark.long
def test_head_in_another_dtype_is_converted_tile_by_tile():
  hidden, head, targets = conformance.random_case(4, 16, 700, dtype="float32", head_layout="dv")
  hidden = hidden.astype(jnp.bfloat16)
  g, g_entropy = conformance.cotangents(4)
  settings = {"head_layout": "dv", "temperature": 1.0}
  got = conformance.differentiate(operate, hidden, head, targets, g, g_entropy, **settings)
  rounded = head.astype(jnp.bfloat16)
  exact = conformance.oracle(hidden, rounded, targets, g=g, g_entropy=g_entropy, **settings)
  conformance.assert_conforms(got, exact, conformance.TOLERANCES["gradient bfloat16"])


@functools.partial(jax.jit, static_argnums=(0, 1))
def both_passes(implementation, settings, hidden, head, targets, columns):
  """Returns statistics and gradients, the latter by the former as the whole vocabulary's."""
  found = implementation.statistics(settings, hidden, head, targets, columns)
  normaliser = found.largest, jnp.log(jnp.maximum(found.total, 1e-30))
  g = jnp.linspace(-1.0, 2.0, hidden.shape[0])
  rows = normaliser, 0.5 * g, g, g + 1.0
  return found, implementation.gradients(settings, hidden, head, targets, columns, *rows)


@pytest.mark.long
@pytest.mark.parametrize("columns", [600, 512, 130])
def test_columns_behind_the_limit_have_no_probability_and_no_gradient(columns):
  hidden, head, targets = conformance.random_case(6, 16, 700, dtype="float32")
  head = np.array(head)
  head[columns:] = 50.0
  settings = Settings(temperature=0.7, with_entropy=True, interpret=True)
  limit = jnp.int32(columns)
  found, (d_hidden, d_head) = both_passes(SMALL, settings, hidden, head, targets, limit)
  # Targets behind the limit are another shard's: their logit is 0.
  want, (want_hidden, want_head) = both_passes(
    xla_chunked, settings, hidden, head[:columns], targets, limit
  )
  for mine, right in zip(found, want, strict=True):
    np.testing.assert_allclose(mine, right, rtol=2e-6, atol=2e-6)
  np.testing.assert_allclose(d_hidden, want_hidden, atol=1e-5)
  np.testing.assert_allclose(d_head[:columns], want_head, atol=1e-5)
  assert not d_head[columns:].any()


@pytest.mark.long
def test_shard_without_columns_is_neutral_and_has_no_nan():
  hidden, head, targets = conformance.random_case(3, 16, 300, dtype="bfloat16")
  settings = Settings(temperature=0.3, with_entropy=True, interpret=True)
  found, (d_hidden, d_head) = both_passes(SMALL, settings, hidden, head, targets, jnp.int32(0))
  np.testing.assert_array_equal(found.largest, np.full(3, LOWEST, np.float32))
  for neutral in (found.total, found.moment, found.target, d_hidden, d_head):
    assert (np.asarray(neutral) == 0).all()


def test_no_tokens_give_empty_statistics_and_no_gradient():
  hidden, head = jnp.zeros((0, 16)), jnp.ones((300, 16), jnp.bfloat16)
  none, empty = jnp.zeros(0, jnp.int32), jnp.zeros(0)
  found = SMALL.statistics(Settings(), hidden, head, none, None)
  assert found.moment is None and found.total.shape == (0,)
  d_hidden, d_head = SMALL.gradients(
    Settings(), hidden, head, none, None, (empty, empty), None, empty, None
  )
  assert d_hidden.shape == (0, 16) and d_head.dtype == jnp.bfloat16 and not d_head.any()


@pytest.mark.parametrize("kind", list(tiling.PREFERRED))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chosen_tiles_divide_each_other_and_fit(kind, dtype):
  size = jnp.dtype(dtype).itemsize
  for n, d, v in itertools.product([1, 200, 16384], [64, 576, 4096], [1, 5003, 151936]):
    tiles = tiling.choose_tiles(kind, n, d, v, hidden_dtype=dtype, head_dtype=dtype)
    assert tiles.rows % 128 == tiles.columns % 128 == tiles.chunk % tiles.columns == 0
    taken = tiling.vmem_bytes(tiles.rows, tiles.columns, d, size, size)
    assert taken <= tiles.vmem_limit_bytes <= 128 * MIB
    assert v == 1 or tiles.chunk < v  # S is never [N V].


def test_tiles_of_real_models_are_above_the_ridge_of_their_chip():
  # Operations per byte of the head: 2 · rows a column over 2 bytes of bf16.
  for width, vocabulary in ((1536, 151936), (4096, 128256)):
    assert tiling.choose_tiles("TPU v5 lite", 16384, width, vocabulary).rows >= 197e12 / 819e9
    assert tiling.choose_tiles("TPU v6 lite", 16384, width, vocabulary).rows >= 918e12 / 1640e9


def test_width_beyond_vmem_is_refused_with_its_reason():
  with pytest.raises(ValueError, match="D = 131072 does not fit in 64 MiB"):
    tiling.choose_tiles("TPU v5 lite", 16, 131072, 1000)
