"""The Hopper kernels in the interpreter that simulates threads, barriers, TMA and wgmma."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.linear_logprobs import core, mosaic_gpu, mosaic_gpu_kernels
from grpo_kernels.linear_logprobs import mosaic_gpu_tiles as tiling
from grpo_kernels.linear_logprobs.mosaic_gpu_tiles import Tiles
from jax.experimental.pallas import mosaic_gpu as plgpu

interpreted = pytest.mark.skipif(
  not hasattr(plgpu, "InterpretGPUParams"),
  reason="the interpreter of Mosaic GPU kernels needs jax 0.11 or later",
)

# Two row tiles a launch, three parts of the vocabulary, two stages: all seams within a few tiles.
SMALL = Tiles(
  rows=128, columns=64, stages=2, lead=1, group=2, splits=3, chunk=128, band=2, processors=3
)
LOGPROB, ENTROPY = 2e-5, 5e-5  # absolute, in nats: float32 sums of exact products.
GRADIENT = 4e-3  # relative to the largest: S is rounded to bfloat16, which is 2⁻⁹.


def problem(tokens: int, width: int, vocabulary: int, *, head_layout: str = "vd", size=1.0):
  """Returns hidden, head and targets, bfloat16, with targets on the edges of tiles among them."""
  rng = np.random.default_rng(tokens + width + vocabulary)
  hidden = jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16)
  head = jnp.asarray(size * rng.normal(size=(vocabulary, width)) / np.sqrt(width), jnp.bfloat16)
  targets = rng.integers(0, vocabulary, tokens)
  edges = [0, 63, 64, 127, 128, vocabulary - 1, vocabulary // 64 * 64]
  for at, edge in enumerate(edges[:tokens]):
    targets[at] = edge if edge < vocabulary else 0
  return hidden, head if head_layout == "vd" else head.T, jnp.asarray(targets, jnp.int32)


def exact(hidden, head, targets, *, head_layout="vd", temperature=1.0, columns=None):
  """Returns (logprobs, entropy) and, for cotangents g and gₑ, S @ W and Sᵀ h, in float64."""
  h, w = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
  w = w if head_layout == "vd" else w.T
  z = (h @ w[:columns].T) / temperature
  z -= z.max(axis=1, keepdims=True)
  logp = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
  p = np.exp(logp)
  entropy = -(p * logp).sum(axis=1)

  def gradients(g, ge):
    onehot = np.zeros_like(p)
    onehot[np.arange(len(p)), np.asarray(targets)] = 1
    slopes = g[:, None] * (onehot - p) - ge[:, None] * p * (logp + entropy[:, None])
    slopes /= temperature
    d_head = np.zeros_like(w)
    d_head[: p.shape[1]] = slopes.T @ h
    return slopes @ w[: p.shape[1]], d_head if head_layout == "vd" else d_head.T

  return logp[np.arange(len(p)), np.asarray(targets)], entropy, gradients


def value_and_gradients(tiles, settings, hidden, head, targets, g, ge):
  """Returns ((logprobs, entropy), (d_hidden, d_head)) by the kernels."""
  run = functools.partial(core.linear_logprobs, mosaic_gpu.Kernels(tiles), settings)
  found, pull = jax.vjp(lambda hidden, head: run(hidden, head, targets), hidden, head)
  return found, pull((jnp.asarray(g, jnp.float32), jnp.asarray(ge, jnp.float32)))


CASES = {
  "one token, one column": (1, 64, 1, "vd", 1.0),
  "ragged": (150, 128, 200, "vd", 0.7),
  "ragged, dv": (150, 128, 200, "dv", 1.7),
  "no multiple of eight": (77, 64, 131, "vd", 0.3),
}


def close(ours, theirs) -> None:
  """Asserts that a gradient is right, by the norm of its error."""
  error = np.linalg.norm(np.asarray(ours, np.float64) - theirs)
  assert error <= GRADIENT * np.linalg.norm(theirs) + 1e-30


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_float64(case, tiles=SMALL):
  tokens, width, vocabulary, head_layout, temperature = CASES[case]
  hidden, head, targets = problem(tokens, width, vocabulary, head_layout=head_layout)
  settings = core.Settings(head_layout, temperature, with_entropy=True, interpret=True)
  g, ge = np.random.default_rng(0).normal(size=(2, tokens))
  logprobs, entropy, gradients = exact(
    hidden, head, targets, head_layout=head_layout, temperature=temperature
  )
  found, got = value_and_gradients(tiles, settings, hidden, head, targets, g, ge)
  np.testing.assert_allclose(found[0], logprobs, atol=LOGPROB, rtol=0)
  np.testing.assert_allclose(found[1], entropy, atol=ENTROPY, rtol=0)
  for ours, theirs in zip(got, gradients(g, ge), strict=True):
    close(ours, theirs)


@interpreted
def test_kernels_equal_float64_with_the_tiles_of_the_chip():
  test_kernels_equal_float64("ragged", Tiles(group=1, splits=2, chunk=128, processors=2))


@interpreted
def test_statistics_keep_their_digits_at_huge_equal_and_one_hot_logits():
  width, vocabulary = 64, 200
  hidden = jnp.zeros((3, width), jnp.bfloat16).at[:, 0].set(1.0)
  head = np.zeros((vocabulary, width), np.float32)
  head[:, 0] = -1000.0
  head[::7, 0] = 1000.0  # 29 logits of +1000, the others of -1000.
  settings = core.Settings(with_entropy=True, interpret=True)
  run = jax.jit(functools.partial(core.linear_logprobs, mosaic_gpu.Kernels(SMALL), settings))
  targets = jnp.asarray([0, 7, 1], jnp.int32)
  logprobs, entropy = run(hidden, jnp.asarray(head, jnp.bfloat16), targets)
  np.testing.assert_allclose(logprobs, [-np.log(29), -np.log(29), -2000 - np.log(29)], atol=2e-5)
  np.testing.assert_allclose(entropy, np.full(3, np.log(29)), atol=5e-5)
  equal = jnp.full((vocabulary, width), 3.0, jnp.bfloat16)
  logprobs, entropy = run(hidden, equal, targets)
  np.testing.assert_allclose(logprobs, np.full(3, -np.log(vocabulary)), atol=LOGPROB)
  np.testing.assert_allclose(entropy, np.full(3, np.log(vocabulary)), atol=ENTROPY)
  lonely = jnp.asarray(-head, jnp.bfloat16).at[7].set(hidden[0] * 4000)
  logprobs, entropy = run(hidden, lonely, targets.at[:].set(7))
  np.testing.assert_array_equal(logprobs, np.zeros(3))
  np.testing.assert_array_equal(entropy, np.zeros(3))


@interpreted
@pytest.mark.parametrize("columns", [0, 64, 150])
def test_columns_that_are_not_real_have_no_part_in_anything(columns):
  hidden, head, targets = problem(130, 64, 200)
  targets = targets.at[:].set(jnp.arange(130) % max(columns, 1)) if columns else targets
  head = head.at[columns:].set(100.0)
  settings = core.Settings(with_entropy=True, interpret=True)
  kernels = mosaic_gpu.Kernels(SMALL)
  real = jnp.int32(columns)
  found = jax.jit(functools.partial(kernels.statistics, settings))(hidden, head, targets, real)
  if not columns:
    np.testing.assert_array_equal(found.largest, np.full(130, core.LOWEST, np.float32))
    for nothing in found[1:]:
      np.testing.assert_array_equal(nothing, np.zeros(130))
    return
  logprobs, entropy, gradients = exact(hidden, head, targets, columns=columns)
  ours, its_entropy = core.outputs(settings, found)
  np.testing.assert_allclose(ours, logprobs, atol=LOGPROB, rtol=0)
  np.testing.assert_allclose(its_entropy, entropy, atol=ENTROPY, rtol=0)
  g, ge = jnp.asarray(np.random.default_rng(0).normal(size=(2, 130)), jnp.float32)
  normaliser = found.largest, jnp.log(found.total)
  got = kernels.gradients(settings, hidden, head, targets, real, normaliser, its_entropy, g, ge)
  for mine, theirs in zip(got, gradients(g, ge), strict=True):
    close(mine, theirs)
  np.testing.assert_array_equal(np.asarray(got[1])[columns:], 0)


@interpreted
def test_statistics_repeat_bit_by_bit_and_do_not_depend_on_the_split_but_for_rounding():
  hidden, head, targets = problem(140, 128, 200)
  settings = core.Settings(with_entropy=True, interpret=True)

  def run(splits: int):
    tiles = Tiles(rows=128, columns=64, stages=3, group=1, splits=splits, chunk=64, processors=2)
    return mosaic_gpu.Kernels(tiles).statistics(settings, hidden, head, targets, None)

  first, second, whole = run(2), run(2), run(1)
  for one, other in zip(first, second, strict=True):
    np.testing.assert_array_equal(one, other)
  np.testing.assert_array_equal(first.largest, whole.largest)
  np.testing.assert_array_equal(first.target, whole.target)
  np.testing.assert_allclose(first.total, whole.total, rtol=2e-6)
  np.testing.assert_allclose(first.moment, whole.moment, rtol=2e-6, atol=2e-6)


def test_a_width_or_dtype_that_cannot_run_is_refused_with_its_reason():
  hidden, head, targets = problem(8, 96, 64)
  settings = core.Settings(interpret=True)
  with pytest.raises(ValueError, match="multiple of 64, got 96"):
    mosaic_gpu.statistics(settings, hidden, head, targets, None)
  hidden, head, targets = problem(8, 64, 64)
  with pytest.raises(NotImplementedError, match="bfloat16, got float32"):
    mosaic_gpu.statistics(settings, hidden.astype(jnp.float32), head, targets, None)


@pytest.mark.parametrize(
  "tokens, width, vocabulary",
  [
    (16384, 1536, 151936),
    (16384, 3584, 152064),
    (16384, 4096, 128256),
    (1024, 576, 49152),
    (1, 64, 1),
    (5000, 1536, 50257),
  ],
)
def test_chosen_tiles_keep_memory_small_and_most_of_the_chip_busy(tokens, width, vocabulary):
  tiles = tiling.choose_tiles(tokens, width, vocabulary)
  blocks = tiles.group * tiles.splits
  assert blocks <= tiling.PROCESSORS
  parts_bytes = 4 * blocks * tiles.rows * 4
  assert parts_bytes <= 600 << 10
  assert tokens * tiles.chunk * 2 <= 264 * tiling.MIB
  row_tiles = tiling.tiles_over(tokens, tiles.rows)
  column_tiles = tiling.tiles_over(vocabulary, tiles.columns)
  spent = tiling.tiles_over(row_tiles, tiles.group) * tiling.tiles_over(column_tiles, tiles.splits)
  least = row_tiles * column_tiles / tiling.PROCESSORS
  assert spent <= max(1.06 * least, least + 2)


def test_tiles_that_cannot_be_are_refused():
  for wrong in ({"rows": 192}, {"columns": 96}, {"depth": 32}, {"chunk": 100}, {"lead": 4}):
    with pytest.raises(ValueError, match="got Tiles"):
      Tiles(**wrong)


@pytest.mark.parametrize("row_tiles, column_tiles, band", [(1, 1, 1), (5, 3, 2), (7, 4, 8)])
def test_bands_visit_every_tile_once(row_tiles, column_tiles, band):
  seen = {
    tuple(int(x) for x in mosaic_gpu_kernels.banded(jnp.int32(i), row_tiles, column_tiles, band))
    for i in range(row_tiles * column_tiles)
  }
  assert seen == {(r, c) for r in range(row_tiles) for c in range(column_tiles)}
