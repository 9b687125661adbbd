"""The operations of the `mosaic_gpu` kernels on a tile of logits in registers. Mosaic GPU.

A warpgroup's logits are spread over its threads as wgmma leaves them: of every eight columns a
thread has two neighbours, in two rows of every 64. All is written in strips of columns, so that
few numbers besides the logits are alive at once: nothing spills.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from grpo_kernels import hopper
from grpo_kernels.linear_logprobs.core import Settings

STORED_COLUMNS = 64  # of S at once: 64 of bf16 are one swizzled row of shared memory.
LANE_COLUMNS = 8  # the narrowest matrix whose elements lie in threads as those of the logits do.
# What is stored is computed in strips, for registers; jax 0.10 cannot put strips together.
STRIP_COLUMNS = STORED_COLUMNS if hopper.IS_JAX_0_10 else LANE_COLUMNS
LOG2_E = math.log2(math.e)
# The logit, before scaling, of no column: 2 to the power of it is 0, and 0 times it is not NaN.
ABSENT = -1e30


def nothing(rows: int):
  """Returns what `absorb` begins with."""
  lowest = jnp.full((rows,), ABSENT, jnp.float32)
  zeros = plgpu.layout_cast(jnp.zeros((rows, LANE_COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
  return plgpu.layout_cast(lowest, plgpu.Layout.WGMMA.reduce(1)), zeros, zeros, zeros


def no_numerators(rows: int):
  """Returns what `numerate` begins with."""
  _, zeros, *_ = nothing(rows)
  lowest = plgpu.layout_cast(
    jnp.full((rows, LANE_COLUMNS), ABSENT, jnp.float32), plgpu.Layout.WGMMA
  )
  return lowest, zeros, zeros, zeros


def absorb(settings: Settings, logits, found, wanted, live):
  """Returns (m, l, u, a_t) of each row after a tile; `wanted` and `live` count from its column 0.

  m is of the row; l, u and a_t are matrices of `LANE_COLUMNS` columns. Each thread keeps
  the elements whose columns it has the logits of; they are added up once, after the last tile.
  Differences are taken before they are scaled: exact for logits of any size.
  """
  largest, total, moment, target = found
  scale = LOG2_E / settings.temperature
  logits = masked(logits, live)
  newest = jnp.maximum(largest, jnp.max(logits, axis=1))
  change = (largest - newest) * scale
  fade = across(jnp.exp2(change), total)
  if settings.with_entropy:
    moment = fade * (moment + total * across(change, total))
  total = fade * total
  reference = across(newest, total)
  distance = across(wanted, total) - columns_of(total)
  for strip in range(0, logits.shape[1], LANE_COLUMNS):
    part = logits[:, strip : strip + LANE_COLUMNS]
    target = jnp.where(distance == strip, part, target)
    exponents = (part - reference) * scale
    weights = jnp.exp2(exponents)
    total = total + weights
    if settings.with_entropy:
      moment = moment + weights * exponents
  return newest, total, moment, target


def of_rows(found):
  """Returns (m, l, u, a_t), one number per row each, of what `absorb` found."""
  largest, *sums = found
  return largest, *(jnp.sum(x, axis=1) for x in sums)


def of_lanes(found):
  """Returns (m, l, u, a_t), one number per row each, of what `numerate` found."""
  largest, *sums = found
  return jnp.max(largest, axis=1), *(jnp.sum(x, axis=1) for x in sums)


def numerate(settings: Settings, logits, found, reference, wanted, live, store):
  """Returns (m, l, u, a_t) after a tile like `absorb`, but about a given logit of each row.

  All four are matrices of `LANE_COLUMNS` columns. `store(column, numerators)` gets the tile's
  2^((a - reference) c), in bfloat16, `STORED_COLUMNS` columns at a time.
  """
  largest, total, moment, target = found
  scale = LOG2_E / settings.temperature
  logits = masked(logits, live)
  distance = across(wanted, total) - columns_of(total)
  reference = across(reference, logits[:, :STRIP_COLUMNS])
  for begin in range(0, logits.shape[1], STORED_COLUMNS):
    strips = []
    for at in range(begin, begin + STORED_COLUMNS, STRIP_COLUMNS):
      strip = logits[:, at : at + STRIP_COLUMNS]
      exponents = (strip - reference) * scale
      numerators = jnp.exp2(exponents)
      strips.append(numerators.astype(jnp.bfloat16))
      for lane in range(0, STRIP_COLUMNS, LANE_COLUMNS):
        part, exponent, numerator = (
          x[:, lane : lane + LANE_COLUMNS] for x in (strip, exponents, numerators)
        )
        largest = jnp.maximum(largest, part)
        target = jnp.where(distance == at + lane, part, target)
        total = total + numerator
        if settings.with_entropy:
          moment = moment + numerator * exponent
    store(begin, jnp.concatenate(strips, axis=1))
  return largest, total, moment, target


def slopes(settings: Settings, logits, of_rows, wanted, live):
  """Yields (column, S) of `STORED_COLUMNS` columns at a time, in bfloat16.

  `of_rows` is what `mosaic_gpu_kernels.slopes` has of rows; `wanted` and `live` count from the
  tile's column 0.
  """
  logits = masked(logits, live)
  like = logits[:, :STRIP_COLUMNS]
  distance = across(wanted, like) - columns_of(like)
  r, of_logprob, *slope = (across(x, like) for x in of_rows)
  for begin in range(0, logits.shape[1], STORED_COLUMNS):
    strips = []
    for at in range(begin, begin + STORED_COLUMNS, STRIP_COLUMNS):
      strip = logits[:, at : at + STRIP_COLUMNS]
      log2_p = strip * (LOG2_E / settings.temperature) - r
      of_p = slope[0] + slope[1] * log2_p if settings.with_entropy else of_logprob
      onehot = jnp.where(distance == at, of_logprob, 0.0)
      strips.append((onehot - jnp.exp2(log2_p) * of_p).astype(jnp.bfloat16))
    yield begin, jnp.concatenate(strips, axis=1)


def masked(logits, live):
  """Returns logits with `ABSENT` in columns ≥ `live`, looking at each only where there are such."""
  return lax.cond(
    live < logits.shape[1],
    lambda x: jnp.where(columns_of(x) < live, x, ABSENT),
    lambda x: x,
    logits,
  )


def columns_of(logits):
  """Returns the number of each element's column, laid out over threads as the logits are."""
  return plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)


def across(row_values, like):
  """Returns one number per row as a matrix of the shape of another."""
  return lax.broadcast_in_dim(row_values, like.shape, (0,))
