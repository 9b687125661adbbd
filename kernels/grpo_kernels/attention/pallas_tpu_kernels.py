"""The three Pallas kernels for TPU and their calls; `pallas_tpu` explains them. Pure.

A program of the grid (key/value heads, tiles of the list) has one tile of queries × keys, and all R
query heads that use the key/value head. Numbers of queries or of keys that are needed down a column
are kept as columns [size 128], the same in all lanes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from grpo_kernels.attention import pallas_tpu_tiles as tiling
from grpo_kernels.attention.core import NOTHING, Settings
from grpo_kernels.attention.pallas_tpu_tiles import FIRST, LANES, LAST, PARTIAL, WHOLE, Tiles, Walk

# Running maximum before the first key, and what is added to the score of a pair that is not
# allowed: 2 to the power of their difference is 0, and so is exp(ABSENT - NOTHING).
START, ABSENT = -1e29, -1e30
# Query heads whose operations are written out, so that products of one overlap the softmax of
# another.
MOST_AT_ONCE = 8

LOG2_E, LN_2 = float(np.log2(np.e)), float(np.log(2.0))


class Rows(NamedTuple):
  """What the kernels read about packed rows, whose T and S the size of the tiles divides.

  Attributes:
    of_keys: `Visible.until`; with a window `Visible.limit` too. Before them, the places of keys if
      they are not in order.
    of_queries: Places of queries if they are not in order, and `Visible.positions` with a window;
      None if there is neither.
    has_places: Whether there are places.
  """

  of_keys: Int[Array, "B facts S"]
  of_queries: Int[Array, "B facts T"] | None
  has_places: bool


# --- forward ---


def forward(
  settings: Settings,
  tiles: Tiles,
  walk: Walk,
  rows: Rows,
  q: Float[Array, "B K R T E"],
  k: Float[Array, "B K S E"],
  v: Float[Array, "B K S E"],
) -> tuple[Float[Array, "B K R T E"], Float[Array, "B K R T"]]:
  """Returns the output, in the dtype of q, and the log-sum-exp; `walk` goes by queries."""
  repeats, _, width = q.shape[2:]
  call = _Call.of(settings, tiles, walk, rows, q, k)
  column = pltpu.VMEM((repeats, tiles.size, LANES), jnp.float32)
  mixed = pltpu.VMEM((repeats, tiles.size, width), jnp.float32)
  log_sum = jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)
  return call(
    _forward_kernel,
    "attention_forward",
    inputs=[(q, call.heads(q)), (k, call.keys(k)), (v, call.keys(v))],
    outputs=[(q, call.heads(q)), (log_sum, call.numbers(q))],
    scratch=[column, column, mixed],
    keys_are_lanes=True,
  )


def _forward_kernel(
  tile, bias_ref, q_ref, k_ref, v_ref, out_ref, log_sum_ref, highest_ref, total_ref, mixed_ref
):
  """Adds one tile of keys to the softmax of some queries; writes it after the last tile."""
  width = q_ref.shape[-1]

  @tile.when(FIRST)
  def _():
    highest_ref[...] = jnp.full_like(highest_ref, START)
    total_ref[...] = jnp.zeros_like(total_ref)
    mixed_ref[...] = jnp.zeros_like(mixed_ref)

  @tile.for_each_head
  def _(head):
    scores = _dot(q_ref[0, 0, head], k_ref[0, 0], 1, 1) * LOG2_E + bias_ref[...]
    old = highest_ref[head]
    # A whole number: in two tiles the same weight differs by a power of two, if at all, and is
    # rounded alike.
    new = jnp.maximum(old, jnp.ceil(jnp.max(scores, axis=1, keepdims=True)))
    weights = jnp.exp2(scores - _spread(new, scores.shape[1]))
    fade = _power_of_two(old - new)
    highest_ref[head] = new
    total_ref[head] = total_ref[head] * fade + _sum_by_lane(weights)
    mixed = _dot(weights.astype(v_ref.dtype), v_ref[0, 0], 1, 0)
    mixed_ref[head] = mixed_ref[head] * _spread(fade, width) + mixed

  @tile.when(LAST)
  def _():
    for head in range(q_ref.shape[2]):
      total = jnp.sum(total_ref[head], axis=1, keepdims=True)
      some = total > 0
      total = jnp.where(some, total, 1.0)
      out_ref[0, 0, head] = (mixed_ref[head] * (1.0 / total)).astype(out_ref.dtype)
      log_sum = jnp.where(some, highest_ref[head] * LN_2 + jnp.log(total), NOTHING)
      log_sum_ref[0, 0, head : head + 1] = log_sum.T[:1]


# --- backward ---


def backward_of_queries(
  settings: Settings,
  tiles: Tiles,
  walk: Walk,
  rows: Rows,
  q: Float[Array, "B K R T E"],
  k: Float[Array, "B K S E"],
  v: Float[Array, "B K S E"],
  g: Float[Array, "B K R T E"],
  log_sum: Float[Array, "B K R T"],
  delta: Float[Array, "B K R T"],
) -> Float[Array, "B K R T E"]:
  """Returns dQ in the dtype of q; `walk` goes by queries."""
  repeats, _, width = q.shape[2:]
  call = _Call.of(settings, tiles, walk, rows, q, k)
  column = pltpu.VMEM((repeats, tiles.size, LANES), jnp.float32)
  (dq,) = call(
    _queries_kernel,
    "attention_dq",
    inputs=call.of_backward(q, k, v, g, log_sum, delta),
    outputs=[(q, call.heads(q))],
    scratch=[column, column, pltpu.VMEM((repeats, tiles.size, width), jnp.float32)],
    keys_are_lanes=True,
  )
  return dq


def _queries_kernel(
  tile,
  bias_ref,
  q_ref,
  k_ref,
  v_ref,
  g_ref,
  log_sum_ref,
  delta_ref,
  dq_ref,
  log_sums_ref,
  deltas_ref,
  sum_ref,
):
  """Adds one tile of keys to dQ of some queries; writes it after the last tile."""

  @tile.when(FIRST)
  def _():
    sum_ref[...] = jnp.zeros_like(sum_ref)
    for head in range(q_ref.shape[2]):
      log_sums_ref[head] = _as_column(log_sum_ref[0, 0, head : head + 1])
      deltas_ref[head] = _as_column(delta_ref[0, 0, head : head + 1])

  @tile.for_each_head
  def _(head):
    scores = _dot(q_ref[0, 0, head], k_ref[0, 0], 1, 1) + bias_ref[...]
    keys = scores.shape[1]
    weights = jnp.exp(scores - _spread(log_sums_ref[head], keys))
    slopes = _dot(g_ref[0, 0, head], v_ref[0, 0], 1, 1) - _spread(deltas_ref[head], keys)
    slopes = (slopes * weights).astype(k_ref.dtype)
    sum_ref[head] += _dot(slopes, k_ref[0, 0], 1, 0)

  @tile.when(LAST)
  def _():
    dq_ref[0, 0] = sum_ref[...].astype(dq_ref.dtype)


def backward_of_keys(
  settings: Settings,
  tiles: Tiles,
  walk: Walk,
  rows: Rows,
  q: Float[Array, "B K R T E"],
  k: Float[Array, "B K S E"],
  v: Float[Array, "B K S E"],
  g: Float[Array, "B K R T E"],
  log_sum: Float[Array, "B K R T"],
  delta: Float[Array, "B K R T"],
) -> tuple[Float[Array, "B K S E"], Float[Array, "B K S E"]]:
  """Returns dK and dV in the dtype of k; `walk` goes by keys."""
  call = _Call.of(settings, tiles, walk, rows, q, k)
  of_keys = pltpu.VMEM((tiles.size, k.shape[-1]), jnp.float32)
  return call(
    _keys_kernel,
    "attention_dkv",
    inputs=call.of_backward(q, k, v, g, log_sum, delta),
    outputs=[(k, call.keys(k)), (v, call.keys(v))],
    scratch=[of_keys, of_keys],
    keys_are_lanes=False,
  )


def _keys_kernel(
  tile,
  bias_ref,
  q_ref,
  k_ref,
  v_ref,
  g_ref,
  log_sum_ref,
  delta_ref,
  dk_ref,
  dv_ref,
  dk_sum_ref,
  dv_sum_ref,
):
  """Adds one tile of queries to dK and dV of some keys; writes them after the last tile."""

  @tile.when(FIRST)
  def _():
    dk_sum_ref[...] = jnp.zeros_like(dk_sum_ref)
    dv_sum_ref[...] = jnp.zeros_like(dv_sum_ref)

  @tile.for_each_head
  def _(head):
    q, g = q_ref[0, 0, head], g_ref[0, 0, head]
    scores = _dot(k_ref[0, 0], q, 1, 1) + bias_ref[...]  # [keys queries].
    weights = jnp.exp(scores - log_sum_ref[0, 0, pl.ds(head, 1)])
    dv_sum_ref[...] += _dot(weights.astype(g.dtype), g, 1, 0)
    slopes = _dot(v_ref[0, 0], g, 1, 1) - delta_ref[0, 0, pl.ds(head, 1)]
    dk_sum_ref[...] += _dot((slopes * weights).astype(q.dtype), q, 1, 0)

  @tile.when(LAST)
  def _():
    dk_ref[0, 0] = dk_sum_ref[...].astype(dk_ref.dtype)
    dv_ref[0, 0] = dv_sum_ref[...].astype(dv_ref.dtype)


# --- what the kernels share ---


class _Tile(NamedTuple):
  """The tile that a program has.

  Attributes:
    flags: Flags of the entry of the list, as `pallas_tpu_tiles` defines them.
    heads: Number of query heads R.
  """

  flags: Array
  heads: int

  def when(self, flags: int) -> Callable[[Callable[[], None]], None]:
    """Returns a decorator that runs a function if the tile has one of the flags."""
    return pl.when((self.flags & flags) > 0)

  def for_each_head(self, visit: Callable[[Any], None]) -> None:
    """Runs `visit(head)` for all query heads, unless the tile holds no pair."""
    at_once = max(n for n in range(1, MOST_AT_ONCE + 1) if self.heads % n == 0)

    @self.when(PARTIAL | WHOLE)
    def _():
      if at_once == self.heads:
        for head in range(self.heads):
          visit(head)
        return

      def visit_some(index, _):
        for head in range(at_once):
          visit(index * at_once + head)

      jax.lax.fori_loop(0, self.heads // at_once, visit_some, None)


class _Call(NamedTuple):
  """A call of a kernel, and the blocks of its arrays."""

  settings: Settings
  tiles: Tiles
  walk: Walk
  rows: Rows
  bits: int  # of the number of a tile in an entry.

  @classmethod
  def of(
    cls, settings: Settings, tiles: Tiles, walk: Walk, rows: Rows, q: Array, k: Array
  ) -> "_Call":
    longest = max(q.shape[3], k.shape[2])
    return cls(settings, tiles, walk, rows, tiling.field_bits(longest // tiles.size))

  def __call__(self, kernel, name, *, inputs, outputs, scratch, keys_are_lanes: bool) -> Any:
    """Runs a kernel; returns its results.

    Args:
      kernel: Function of a `_Tile` and references to the bias, inputs, outputs and scratch.
      name: Name of the kernel, for profiles.
      inputs: Arrays and their blocks; the queries first.
      outputs: Arrays that have the shapes and dtypes of the results, and their blocks.
      scratch: Memory that the programs of a key/value head share.
      keys_are_lanes: Whether scores are [queries keys]; False: [keys queries].
    """
    of_keys, of_queries, has_places = self.rows
    about = [(of_keys, self._facts(of_keys, of_queries=False))]
    if of_queries is not None:
      about.append((of_queries, self._facts(of_queries, of_queries=True)))
    arrays, blocks = zip(*about, *inputs, strict=True)
    results, result_blocks = zip(*outputs, strict=True)
    down, own = of_queries if keys_are_lanes else of_keys, []
    if down is not None:
      own.append(pltpu.VMEM((down.shape[1], self.tiles.size, LANES), jnp.int32))
    own.append(pltpu.VMEM((self.tiles.size, self.tiles.size), jnp.float32))
    return pl.pallas_call(
      functools.partial(
        _program, kernel, self.bits, of_queries is not None, has_places, keys_are_lanes
      ),
      out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(inputs[0][0].shape[1], self.walk.count),
        in_specs=blocks,
        out_specs=result_blocks,
        scratch_shapes=[*scratch, *own],
      ),
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=self.tiles.vmem_limit_bytes,
      ),
      name=name,
      interpret=pltpu.InterpretParams() if self.settings.interpret else False,
    )(self.walk.entries, *arrays)

  def of_backward(self, q: Array, k: Array, v: Array, g: Array, log_sum: Array, delta: Array):
    """Returns the inputs of a backward pass, with their blocks."""
    queries, keys, numbers = self.heads(q), self.keys(k), self.numbers(q)
    blocks = (queries, keys, keys, queries, numbers, numbers)
    return list(zip((q, k, v, g, log_sum, delta), blocks, strict=True))

  def heads(self, q: Array) -> pl.BlockSpec:
    """Returns the blocks of queries [B K R T E], and of what has their shape."""
    shape = (1, 1, q.shape[2], self.tiles.size, q.shape[4])
    return self._blocks(shape, lambda head, batch, query, key: (batch, head, 0, query, 0))

  def keys(self, k: Array) -> pl.BlockSpec:
    """Returns the blocks of keys and values [B K T E]."""
    shape = (1, 1, self.tiles.size, k.shape[3])
    return self._blocks(shape, lambda head, batch, query, key: (batch, head, key, 0))

  def numbers(self, q: Array) -> pl.BlockSpec:
    """Returns the blocks of one number for each query [B K R T]."""
    shape = (1, 1, q.shape[2], self.tiles.size)
    return self._blocks(shape, lambda head, batch, query, key: (batch, head, 0, query))

  def _facts(self, x: Array, *, of_queries: bool) -> pl.BlockSpec:
    """Returns the blocks of [B facts T]."""
    shape = (1, x.shape[1], self.tiles.size)
    return self._blocks(
      shape, lambda head, batch, query, key: (batch, 0, query if of_queries else key)
    )

  def _blocks(self, shape: tuple[int, ...], at: Callable[..., tuple]) -> pl.BlockSpec:
    """Returns blocks; `at` maps (key/value head, row, tile of queries, of keys) to their place."""

    def place(head, step, entries_ref):
      batch, query, key, _ = tiling.unpacked(entries_ref[step], self.bits)
      return at(head, batch, query, key)

    return pl.BlockSpec(shape, place)


def _program(
  kernel, bits, has_queries, has_places, keys_are_lanes, entries_ref, of_keys_ref, *refs
) -> None:
  """Runs a kernel on one tile.

  Args:
    kernel: Kernel of `_Call`.
    bits: Bits of the number of a tile in an entry.
    has_queries: Whether there are `Rows.of_queries`.
    has_places: Whether places are read; otherwise they are those of the tile.
    keys_are_lanes: Whether scores are [queries keys]; False: [keys queries].
    entries_ref: Reference to the list of tiles.
    of_keys_ref: Reference to `Rows.of_keys` of the tile.
    refs: References to `Rows.of_queries` if there are any, what the kernel takes, columns of what
      is needed down a column, and the bias.
  """
  *refs, bias_ref = refs
  of_queries_ref = refs.pop(0) if has_queries else None
  down_ref = of_queries_ref if keys_are_lanes else of_keys_ref
  columns_ref: Any = None if down_ref is None else refs.pop()
  _, query, key, flags = tiling.unpacked(entries_ref[pl.program_id(1)], bits)
  size = bias_ref.shape[0]

  def facts(ref) -> list[Array]:
    """Returns numbers of keys or of queries, each to be compared with all pairs of the tile."""
    if ref is down_ref:
      return [_spread(columns_ref[i], size) for i in range(ref.shape[1])]
    return [ref[0, i : i + 1] for i in range(ref.shape[1])]

  tile = _Tile(flags, refs[0].shape[2])

  if down_ref is not None:

    @tile.when(FIRST)
    def _():
      for i in range(down_ref.shape[1]):
        columns_ref[i] = _as_column(down_ref[0, i : i + 1])

  @tile.when(WHOLE)
  def _():
    bias_ref[...] = jnp.zeros_like(bias_ref)

  @tile.when(PARTIAL)
  def _():
    at = lambda tile, axis: tile * size + jax.lax.broadcasted_iota(jnp.int32, (size, size), axis)
    of_keys = facts(of_keys_ref)
    of_queries = facts(of_queries_ref) if has_queries else []
    if has_places:
      queries, keys = of_queries.pop(0), of_keys.pop(0)
    else:
      queries, keys = at(query, 1 - keys_are_lanes), at(key, int(keys_are_lanes))
    until, *limit = of_keys
    allowed = (keys <= queries) & (queries < until)
    if limit:
      allowed &= of_queries[0] < limit[0]
    bias_ref[...] = jnp.where(allowed, 0.0, ABSENT)

  kernel(tile, bias_ref, *refs)


def _dot(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
  """Contracts two matrices of one dtype over an axis of each, in float32.

  Products of bfloat16 are exact there; float32 operands are not rounded to bfloat16.
  """
  highest = left.dtype == jnp.float32
  return jax.lax.dot_general(
    left,
    right,
    (((left_axis,), (right_axis,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST if highest else jax.lax.Precision.DEFAULT,
    preferred_element_type=jnp.float32,
  )


def _power_of_two(n: Float[Array, "..."]) -> Float[Array, "..."]:
  """Returns 2 to the power of whole numbers n ≤ 0, without rounding; 0 below the normal ones."""
  # The low bits of 2²³ + m are those of the whole number m; the shift drops the others.
  exponent = jnp.maximum(n, -127.0) + (2.0**23 + 127.0)
  bits = jax.lax.bitcast_convert_type(exponent, jnp.int32)
  return jax.lax.bitcast_convert_type(bits << 23, jnp.float32)


def _as_column(row: Array) -> Array:
  """Returns [1 n] as [n 128], the same in all lanes."""
  return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _spread(column: Array, width: int) -> Array:
  """Returns [n 128], the same in all lanes, as [n width]."""
  if width <= LANES:
    return column[:, :width]
  return jnp.concatenate([column] * (width // LANES), axis=1)


def _sum_by_lane(x: Float[Array, "n width"]) -> Float[Array, "n 128"]:
  """Returns the sum of what each lane holds."""
  groups = [x[:, at : at + LANES] for at in range(0, x.shape[1], LANES)]
  return functools.reduce(jnp.add, groups)
