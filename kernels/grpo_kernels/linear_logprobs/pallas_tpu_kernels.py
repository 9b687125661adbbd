"""The three Pallas kernels for TPU and their calls; `pallas_tpu` explains them. Pure."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from grpo_kernels.linear_logprobs import pallas_tpu_tiles as tiling
from grpo_kernels.linear_logprobs.core import LOWEST, Settings
from grpo_kernels.linear_logprobs.pallas_tpu_tiles import LANES, Tiles

# Logits, before the temperature, of no column. exp of a difference to a real one is 0, of
# NOTHING to START as well, and 0 times the difference is a number: a lane needs no second look at
# which of its columns were real, not even if none was.
START, NOTHING = -1e29, -1e30


# --- statistics ---


def statistics(
  settings: Settings,
  tiles: Tiles,
  limit: Int[Array, " 1"],
  hidden: Float[Array, "N D"],
  head: Float[Array, "_ _"],
  targets: Int[Array, " N"],
) -> Float[Array, "4 N"]:
  """Returns (largest, total, moment, target) of each token; the moment is 0 without entropy."""
  (tokens, width), vocabulary = hidden.shape, head.shape[settings.vocab_axis]
  steps = tiling.tiles_over(vocabulary, tiles.columns)
  of_row = pltpu.VMEM((tiles.rows, LANES), jnp.float32)
  return pl.pallas_call(
    functools.partial(_statistics_kernel, settings, tiles, steps),
    out_shape=jax.ShapeDtypeStruct((4, tokens), jnp.float32),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(tiling.tiles_over(tokens, tiles.rows), steps),
      in_specs=[
        pl.BlockSpec((1, tiles.rows), lambda i, j, *_: (0, i)),
        pl.BlockSpec((tiles.rows, width), lambda i, j, *_: (i, 0)),
        _head_spec(settings, tiles, width, lambda i, j, *_: j),
      ],
      out_specs=pl.BlockSpec((4, tiles.rows), lambda i, j, *_: (0, i)),
      scratch_shapes=[pltpu.VMEM((tiles.rows, LANES), jnp.int32)] + [of_row] * 4,
    ),
    compiler_params=_compiler_params(tiles),
    cost_estimate=_cost(tiles, hidden, head, columns=vocabulary, written=16 * tokens),
    interpret=_interpreter(settings),
  )(limit, targets[None], hidden, head)


def _statistics_kernel(
  settings, tiles, steps, limit_ref, targets_ref, hidden_ref, head_ref, found_ref, *state
):
  """Adds one tile of the head to each lane's statistics; combines lanes after the last tile."""
  target_ref, *lanes = state
  step, limit = pl.program_id(1), limit_ref[0]
  first = step * tiles.columns

  @pl.when(step == 0)
  def _():
    target_ref[...] = _as_column(targets_ref[...])
    lanes[0][...] = jnp.full_like(lanes[0], START)
    for ref in lanes[1:]:
      ref[...] = jnp.zeros_like(ref)

  @pl.when(first < limit)
  def _():
    groups = [
      (jnp.where(is_column(column, limit), logits, NOTHING), column)
      for logits, column in _logits(settings, hidden_ref, head_ref, first)
    ]
    _fold(settings, groups, target_ref, lanes)

  @pl.when(step == steps - 1)
  def _():
    found_ref[...] = _combine(settings, [ref[...] for ref in lanes])


def _fold(settings: Settings, groups: list[tuple[Array, Array]], target_ref, lanes) -> None:
  """Adds groups of logits, not yet tempered, to each lane's maximum, sum, moment and target."""
  largest_ref, total_ref, moment_ref, chosen_ref = lanes
  old, targets, chosen = largest_ref[...], target_ref[...], chosen_ref[...]
  new = functools.reduce(jnp.maximum, [logits for logits, _ in groups], old)
  # Differences first, then the temperature: logits of 1e3 lose nothing.
  shift = _tempered(settings, old - new)
  scale = jnp.exp(shift)
  total, moment = scale * total_ref[...], moment_ref[...]
  if settings.with_entropy:
    moment = scale * (moment + total_ref[...] * shift)
  for logits, column in groups:
    shifted = _tempered(settings, logits - new)
    weights = jnp.exp(shifted)
    total = total + weights
    if settings.with_entropy:
      moment = moment + weights * shifted
    chosen = jnp.where(column == targets, logits, chosen)
  largest_ref[...], total_ref[...], moment_ref[...], chosen_ref[...] = new, total, moment, chosen


def _combine(settings: Settings, lanes: list[Array]) -> Float[Array, "4 rows"]:
  """Returns (largest, total, moment, target) over all lanes, tokens along lanes."""
  largest, total, moment, chosen = lanes
  top = jnp.max(largest, axis=1, keepdims=True)
  shift = _tempered(settings, largest - top)
  scale = jnp.exp(shift)
  return _of_rows(top, scale * total, scale * (moment + total * shift), chosen)


def _of_rows(top: Array, *sums: Array) -> Float[Array, "4 rows"]:
  """Returns the largest logit [rows 1] and the sums of lanes [rows 128], tokens along lanes."""
  columns = jnp.where(top > START, top, LOWEST), *(jnp.sum(x, axis=1, keepdims=True) for x in sums)
  lane = jax.lax.broadcasted_iota(jnp.int32, sums[0].shape, 1)
  table = jnp.zeros_like(sums[0])
  for place, column in enumerate(columns):
    table = jnp.where(lane == place, column, table)
  return table.T[: len(columns)]


# --- numerators ---


def numerators(
  settings: Settings,
  tiles: Tiles,
  limit: Int[Array, " 1"],
  hidden: Float[Array, "N D"],
  head: Float[Array, "_ _"],
  targets: Int[Array, " N"],
  references: Float[Array, " N"],
) -> tuple[Float[Array, "N V"], Float[Array, "4 N"]]:
  """Returns E = exp((a - r) / τ) in bfloat16, and (largest, total, moment, target) of each token.

  The sums are about r and of E before it is rounded; the moment is 0 without entropy. Columns that
  are not real have E = 0.
  """
  (tokens, width), vocabulary = hidden.shape, head.shape[settings.vocab_axis]
  steps = tiling.tiles_over(vocabulary, tiles.columns)
  of_row = pltpu.VMEM((tiles.rows, LANES), jnp.float32)
  written = 2 * tokens * vocabulary + 16 * tokens
  return pl.pallas_call(
    functools.partial(_numerators_kernel, settings, tiles, steps),
    out_shape=[
      jax.ShapeDtypeStruct((tokens, vocabulary), jnp.bfloat16),
      jax.ShapeDtypeStruct((4, tokens), jnp.float32),
    ],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(tiling.tiles_over(tokens, tiles.rows), steps),
      in_specs=[
        pl.BlockSpec((1, tiles.rows), lambda i, j, *_: (0, i)),
        pl.BlockSpec((1, tiles.rows), lambda i, j, *_: (0, i)),
        pl.BlockSpec((tiles.rows, width), lambda i, j, *_: (i, 0)),
        _head_spec(settings, tiles, width, lambda i, j, *_: j),
      ],
      out_specs=[
        pl.BlockSpec((tiles.rows, tiles.columns), lambda i, j, *_: (i, j)),
        pl.BlockSpec((4, tiles.rows), lambda i, j, *_: (0, i)),
      ],
      scratch_shapes=[pltpu.VMEM((tiles.rows, LANES), jnp.int32)] + [of_row] * 5,
    ),
    compiler_params=_compiler_params(tiles),
    cost_estimate=_cost(tiles, hidden, head, columns=vocabulary, written=written),
    interpret=_interpreter(settings),
    name="linear_logprobs_numerators",
  )(limit, targets[None], references[None], hidden, head)


def _numerators_kernel(
  settings,
  tiles,
  steps,
  limit_ref,
  targets_ref,
  references_ref,
  hidden_ref,
  head_ref,
  out_ref,
  found_ref,
  *state,
):
  """Writes E of one tile, and adds to each lane's statistics; adds lanes up after the last tile."""
  target_ref, reference_ref, *lanes = state
  step, limit = pl.program_id(1), limit_ref[0]
  first = step * tiles.columns

  @pl.when(step == 0)
  def _():
    target_ref[...] = _as_column(targets_ref[...])
    reference_ref[...] = _as_column(references_ref[...])
    lanes[0][...] = jnp.full_like(lanes[0], START)
    for ref in lanes[1:]:
      ref[...] = jnp.zeros_like(ref)

  @pl.when(first >= limit)
  def _():
    out_ref[...] = jnp.zeros_like(out_ref)

  @pl.when(first < limit)
  def _():
    targets, reference = target_ref[...], reference_ref[...]
    largest, total, moment, chosen = (ref[...] for ref in lanes)
    for place, (logits, column) in enumerate(_logits(settings, hidden_ref, head_ref, first)):
      logits = jnp.where(is_column(column, limit), logits, NOTHING)
      exponents = _tempered(settings, logits - reference)
      found = jnp.exp(exponents)
      out_ref[:, place * LANES : (place + 1) * LANES] = found.astype(out_ref.dtype)
      largest, total = jnp.maximum(largest, logits), total + found
      if settings.with_entropy:
        moment = moment + found * exponents
      chosen = jnp.where(column == targets, logits, chosen)
    for ref, value in zip(lanes, (largest, total, moment, chosen), strict=True):
      ref[...] = value

  @pl.when(step == steps - 1)
  def _():
    largest, *sums = (ref[...] for ref in lanes)
    found_ref[...] = _of_rows(jnp.max(largest, axis=1, keepdims=True), *sums)


# --- slopes ---


def slopes(
  settings: Settings,
  tiles: Tiles,
  limit: Int[Array, " 1"],
  hidden: Float[Array, "N D"],
  head: Float[Array, "_ _"],
  targets: Int[Array, " N"],
  rows: Float[Array, "facts N"],
  first: Any,
  size: int,
) -> Float[Array, "N size"]:
  """Returns S of `size` columns from column `first`, a multiple of the tile, in hidden's dtype.

  `rows` has largest, log total and g / τ of each token; with entropy gₑ / τ and H too.
  """
  (tokens, width), facts = hidden.shape, rows.shape[0]
  first_tile = jax.lax.div(jnp.asarray(first, jnp.int32), jnp.int32(tiles.columns)).reshape(1)
  column = pltpu.VMEM((tiles.rows, LANES), jnp.float32)
  written = tokens * size * hidden.dtype.itemsize
  return pl.pallas_call(
    functools.partial(_slopes_kernel, settings, tiles),
    out_shape=jax.ShapeDtypeStruct((tokens, size), hidden.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(tiling.tiles_over(tokens, tiles.rows), tiling.tiles_over(size, tiles.columns)),
      in_specs=[
        pl.BlockSpec((1, tiles.rows), lambda i, j, *_: (0, i)),
        pl.BlockSpec((facts, tiles.rows), lambda i, j, *_: (0, i)),
        pl.BlockSpec((tiles.rows, width), lambda i, j, *_: (i, 0)),
        _head_spec(settings, tiles, width, lambda i, j, _, first_tile: first_tile[0] + j),
      ],
      out_specs=pl.BlockSpec((tiles.rows, tiles.columns), lambda i, j, *_: (i, j)),
      scratch_shapes=[pltpu.VMEM((tiles.rows, LANES), jnp.int32)] + [column] * facts,
    ),
    compiler_params=_compiler_params(tiles),
    cost_estimate=_cost(tiles, hidden, head, columns=size, written=written),
    interpret=_interpreter(settings),
  )(limit, first_tile, targets[None], rows, hidden, head)


def _slopes_kernel(
  settings,
  tiles,
  limit_ref,
  first_ref,
  targets_ref,
  rows_ref,
  hidden_ref,
  head_ref,
  out_ref,
  *state,
):
  """Writes S of one tile; columns that are not real get 0."""
  target_ref, *facts = state
  step, limit = pl.program_id(1), limit_ref[0]
  first = (first_ref[0] + step) * tiles.columns

  @pl.when(step == 0)
  def _():
    target_ref[...] = _as_column(targets_ref[...])
    for place, ref in enumerate(facts):
      ref[...] = _as_column(rows_ref[place : place + 1, :])

  targets, (largest, log_total, g, *of_entropy) = target_ref[...], [ref[...] for ref in facts]
  for place, (logits, column) in enumerate(_logits(settings, hidden_ref, head_ref, first)):
    logprobs = _tempered(settings, logits - largest) - log_total
    slope = g
    if settings.with_entropy:
      g_entropy, entropy = of_entropy
      slope = g + g_entropy * (logprobs + entropy)
    s = jnp.where(column == targets, g, 0.0) - jnp.exp(logprobs) * slope
    s = jnp.where(is_column(column, limit), s, 0.0)
    out_ref[:, place * LANES : (place + 1) * LANES] = s.astype(out_ref.dtype)


# --- what all kernels need ---


def _logits(settings: Settings, hidden_ref, head_ref, first) -> list[tuple[Array, Array]]:
  """Returns the logits of a tile, before the temperature, by lanes.

  Args:
    settings: Static settings.
    hidden_ref: Reference to hidden states [rows D].
    head_ref: Reference to a tile of the head, in its layout.
    first: First column of the tile.

  Returns:
    Pairs of logits [rows 128] and their columns [1 128].
  """
  head = head_ref[...].astype(hidden_ref.dtype)
  logits = dot(hidden_ref[...], head, 1, settings.width_axis)
  lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
  return [
    (logits[:, at : at + LANES], lane + (first + at)) for at in range(0, logits.shape[1], LANES)
  ]


def dot(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
  """Contracts two matrices of one dtype over an axis of each, in float32.

  Products of bf16 are exact there; float32 operands are not rounded to bf16 (where
  `jax_default_matmul_precision` asks for less, `choice` takes another implementation).
  """
  highest = left.dtype == jnp.float32
  return jax.lax.dot_general(
    left,
    right,
    (((left_axis,), (right_axis,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST if highest else jax.lax.Precision.DEFAULT,
    preferred_element_type=jnp.float32,
  )


def is_column(column: Array, limit: Any) -> Array:
  """Returns whether a column is within the vocabulary."""
  return column < limit


def _tempered(settings: Settings, difference: Array) -> Array:
  """Returns a difference of logits, divided by τ."""
  return difference if settings.temperature == 1.0 else difference * (1.0 / settings.temperature)


def _as_column(row: Array) -> Array:
  """Returns [1 rows] as [rows 128], the same in all lanes."""
  return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _head_spec(settings: Settings, tiles: Tiles, width: int, place) -> pl.BlockSpec:
  """Returns the tiles of the head along V; `place` maps grid indices to the number of a tile."""
  if settings.vocab_axis == 0:
    return pl.BlockSpec((tiles.columns, width), lambda *at: (place(*at), 0))
  return pl.BlockSpec((width, tiles.columns), lambda *at: (0, place(*at)))


def _compiler_params(tiles: Tiles) -> pltpu.CompilerParams:
  """Returns that tiles of tokens are independent and tiles of columns in order, and the VMEM."""
  return pltpu.CompilerParams(
    dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=tiles.vmem_limit_bytes
  )


def _cost(tiles: Tiles, hidden: Array, head: Array, *, columns: int, written: int):
  """Returns the cost, for XLA's scheduler, of a walk over that many columns."""
  tokens, width = hidden.shape
  streamed = tiling.tiles_over(tokens, tiles.rows) * columns * width * head.dtype.itemsize
  return pl.CostEstimate(
    flops=2 * tokens * width * columns,
    transcendentals=tokens * columns,
    bytes_accessed=hidden.size * hidden.dtype.itemsize + streamed + written,
  )


def _interpreter(settings: Settings) -> Any:
  """Returns how `pallas_call` is to run: compiled, or simulated with VMEM, DMA and NaN-filled."""
  return pltpu.InterpretParams() if settings.interpret else False
