"""The four Pallas kernels of `mosaic_gpu`: output, dQ, dK with dV, and their sums. Hopper only.

    kernel    blocks               stays    comes by   registers of sums    shared memory, E = 128
    forward   tiles of queries, H  q        k, v       scores 64, out 64    161 KiB
    dq        tiles of queries, H  q, g     k, v       2 × 32, dq 64        129 KiB
    dkv       pieces, K            k, v     q, g       2 × 32, dk, dv 128   130 KiB
    sums      tiles of keys, K     dk, dv   parts      64                   -

A block of `dkv` adds up all query heads that use its key/value head. Heads are the fastest axis of
each grid, so that those which share keys run beside each other and find them in the L2 cache.

An entry of a list says whether all pairs of a tile are allowed; only the others look at the numbers
of `Visible`. No two blocks write to the same place, so a repetition gives the same bits.

Arguments that the kernels share:

    settings  static settings; only `interpret` is read
    tiles     sizes of the tiles, which divide T
    seen      visibility, without tiles
    q, k, v   scaled queries, keys and values in bfloat16
    log2_sum  log-sum-exp in units of log 2
    delta     what is subtracted from the cotangents of weights
    g         cotangent of the output in bfloat16
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from grpo_kernels import hopper
from grpo_kernels.attention import mosaic_gpu_blocks as blocks
from grpo_kernels.attention import mosaic_gpu_tiles as tiling
from grpo_kernels.attention.core import NOTHING, Settings
from grpo_kernels.attention.mosaic_gpu_blocks import LOG2_E, Numbers, Ring, across
from grpo_kernels.attention.mosaic_gpu_tiles import Lists, Pieces, Tiles
from grpo_kernels.attention.visible import Visible
from grpo_kernels.hopper import BY_COLUMN, BY_ROW, CONSUMERS, MATRIX

LN_2 = 1 / LOG2_E
# What the highest score of a query begins with: an integer in units of log 2, above `ABSENT`.
LOWEST = -1e29


def forward(
  settings: Settings,
  tiles: Tiles,
  lists: Lists,
  seen: Visible,
  q: Float[Array, "B T H E"],
  k: Float[Array, "B S K E"],
  v: Float[Array, "B S K E"],
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
  """Returns the output in bfloat16 and the log-sum-exp; see `core.Implementation`.

  `lists` has the tiles of keys of each tile of queries.
  """
  batch, length, heads, width = q.shape
  half = tiles.queries // CONSUMERS

  def body(lists, seen, q, k, v, out, log_sum):
    block = _QueryBlock.here(tiles, tiles.keys, heads // k.shape[2], lists, seen)
    at = block.row, block.head

    def consume(warpgroup, own, arrived, keys, values):
      own, here = own.at[warpgroup], block.share(warpgroup)
      mine = block.queries(warpgroup)
      plgpu.copy_gmem_to_smem(q.at[block.row, here, block.head], own, arrived.at[warpgroup])
      plgpu.barrier_wait(arrived.at[warpgroup])

      def visit(step, found):
        acc, highest, total = found
        slot = lax.rem(step, tiles.stages)
        blocks.await_full(keys.full, slot)
        scores = blocks.product(own, keys.slots[0].at[slot].T)
        scores = block.masked(scores, step, mine, keys)
        plgpu.barrier_arrive(keys.free.at[slot])
        weights, fade, highest, total = blocks.softmax_step(scores, highest, total)
        acc, weights = acc * across(fade, acc, 0), weights.astype(jnp.bfloat16)
        blocks.await_full(values.full, slot)
        values_of_tile = values.slots[0].at[slot]
        acc = blocks.plus_product(acc, weights, values_of_tile, interpret=settings.interpret)
        plgpu.barrier_arrive(values.free.at[slot])
        return acc, highest, total

      acc, highest, total = lax.fori_loop(0, block.count, visit, _no_keys(half, width))
      some = total > 0
      total = jnp.where(some, total, 1.0)
      log_sum[(*at, here)] = jnp.where(some, highest * LN_2 + jnp.log(total), NOTHING)
      blocks.store(own, acc * across(1 / total, acc, 0), out.at[block.row, here, block.head])

    def produce(_own, _arrived, keys, values):
      block.fill(keys, values, k, v)

    blocks.run(
      consume,
      produce,
      hopper.swizzled((CONSUMERS, half, width), jnp.bfloat16),
      plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS),
      *block.rings(width),
    )

  log_sum = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
  run = hopper.kernel(
    body,
    [jax.ShapeDtypeStruct(q.shape, jnp.bfloat16), log_sum],
    grid={"place": length // tiles.queries, "row": batch, "head": heads},
    name="attention_forward",
    interpret=settings.interpret,
  )
  out, log_sum = run(lists, seen, q, k, v)
  return out, log_sum


def backward_q(
  settings: Settings,
  tiles: Tiles,
  lists: Lists,
  seen: Visible,
  q: Float[Array, "B T H E"],
  k: Float[Array, "B S K E"],
  v: Float[Array, "B S K E"],
  log2_sum: Float[Array, "B H T"],
  delta: Float[Array, "B H T"],
  g: Float[Array, "B T H E"],
) -> Float[Array, "B T H E"]:
  """Returns dQ in bfloat16; see `core.Implementation`.

  `lists` has the tiles of keys of each tile of queries.
  """
  batch, length, heads, width = q.shape
  half, size = tiles.queries // CONSUMERS, tiles.keys_dq

  def body(lists, seen, q, k, v, log2_sum, delta, g, dq):
    block = _QueryBlock.here(tiles, size, heads // k.shape[2], lists, seen)

    def consume(warpgroup, own_q, own_g, arrived, keys, values, *spare):
      own_q, own_g, *spare = (x.at[warpgroup] for x in (own_q, own_g, *spare))
      here, mine = block.share(warpgroup), block.queries(warpgroup)
      plgpu.copy_gmem_to_smem(q.at[block.row, here, block.head], own_q, arrived.at[warpgroup])
      plgpu.copy_gmem_to_smem(g.at[block.row, here, block.head], own_g, arrived.at[warpgroup])
      of_row = [hopper.load(x.at[block.row, block.head, here]) for x in (log2_sum, delta)]
      plgpu.barrier_wait(arrived.at[warpgroup])

      def loop(acc):
        @pl.loop(0, block.count)
        def _visit(step):
          slot = lax.rem(step, tiles.stages)
          keys_of_tile, values_of_tile = keys.slots[0].at[slot], values.slots[0].at[slot]
          blocks.await_full(keys.full, slot)
          scores = block.masked(blocks.product(own_q, keys_of_tile.T), step, mine, keys)
          subtracted = [across(x, scores, 0) for x in of_row]
          weights = jnp.exp2(scores * LOG2_E - subtracted[0])
          blocks.await_full(values.full, slot)
          slopes = blocks.product(own_g, values_of_tile.T)
          plgpu.barrier_arrive(values.free.at[slot])
          slopes = weights * (slopes - subtracted[1])
          blocks.add_product(acc, slopes.astype(jnp.bfloat16), keys_of_tile, spare)
          plgpu.barrier_arrive(keys.free.at[slot])

        return acc[...]

      found = pl.run_scoped(loop, plgpu.WGMMAAccumulatorRef((half, width), jnp.float32))
      blocks.store(own_q, found, dq.at[block.row, here, block.head])

    def produce(_own_q, _own_g, _arrived, keys, values, *_spare):
      block.fill(keys, values, k, v)

    own = hopper.swizzled((CONSUMERS, half, width), jnp.bfloat16)
    arrived = plgpu.Barrier(num_arrivals=2, num_barriers=CONSUMERS)
    spare = blocks.spare(settings.interpret, half, size)
    blocks.run(consume, produce, own, own, arrived, *block.rings(width), *spare)

  return hopper.kernel(
    body,
    jax.ShapeDtypeStruct(q.shape, jnp.bfloat16),
    grid={"place": length // tiles.queries, "row": batch, "head": heads},
    name="attention_dq",
    interpret=settings.interpret,
  )(lists, seen, q, k, v, log2_sum, delta, g)


def backward_kv(
  settings: Settings,
  tiles: Tiles,
  pieces: Pieces,
  seen: Visible,
  q: Float[Array, "B T H E"],
  k: Float[Array, "B S K E"],
  v: Float[Array, "B S K E"],
  log2_sum: Float[Array, "B H T"],
  delta: Float[Array, "B H T"],
  g: Float[Array, "B T H E"],
) -> list[Float[Array, "B slots K keys E"]]:
  """Returns the parts of dK and dV that each piece has, in float32, for `sums`.

  `pieces` has the tiles of queries of each tile of keys; places that no piece has are not written.
  """
  batch, _, heads, width = q.shape
  kv_heads, places = k.shape[2], pieces.tile.shape[1]
  half, size = tiles.keys_dkv // CONSUMERS, tiles.queries_dkv

  def body(pieces, seen, q, k, v, log2_sum, delta, g, dk, dv):
    block = _KeyBlock.here(tiles, heads // kv_heads, pieces, seen)

    def consume(warpgroup, own_k, own_v, offsets, arrived, queries, slopes, *spare):
      own_k, own_v, offsets, *spare = (x.at[warpgroup] for x in (own_k, own_v, offsets, *spare))
      offsets[...] = blocks.places(0, size, BY_COLUMN)
      plgpu.commit_smem()
      here, mine = block.share(warpgroup), block.keys(warpgroup)
      plgpu.copy_gmem_to_smem(k.at[block.row, here, block.head], own_k, arrived.at[warpgroup])
      plgpu.copy_gmem_to_smem(v.at[block.row, here, block.head], own_v, arrived.at[warpgroup])
      plgpu.barrier_wait(arrived.at[warpgroup])

      def loop(dk, dv):
        @pl.loop(0, block.steps)
        def _visit(step):
          slot = lax.rem(step, tiles.stages)
          q_of_tile, g_of_tile = queries.slots[0].at[slot], slopes.slots[0].at[slot]
          blocks.await_full(queries.full, slot)
          scores = blocks.product(own_k, q_of_tile.T)
          scores = block.masked(scores, step, mine, queries, offsets)
          of_column = lambda one: across(hopper.load(one.slots[1].at[slot], BY_COLUMN), scores, 1)
          weights = jnp.exp2(scores * LOG2_E - of_column(queries))
          blocks.await_full(slopes.full, slot)
          blocks.add_product(dv, weights.astype(jnp.bfloat16), g_of_tile, spare)
          start = -of_column(slopes)  # not subtracted afterwards: registers would spill.
          found = blocks.plus_product(start, own_v, g_of_tile.T, interpret=settings.interpret)
          plgpu.barrier_arrive(slopes.free.at[slot])
          found = (weights * found).astype(jnp.bfloat16)
          blocks.add_product(dk, found, q_of_tile, spare)
          plgpu.barrier_arrive(queries.free.at[slot])

        return dk[...], dv[...]

      acc = plgpu.WGMMAAccumulatorRef((half, width), jnp.float32)
      part_of = pieces.slot[block.row, block.place]
      for part, found in zip((dk, dv), pl.run_scoped(loop, acc, acc), strict=True):
        part[block.row, part_of, block.head, pl.ds(warpgroup * half, half)] = found

    @pl.when(block.count > 0)
    def _there_is_such_a_piece():
      block.run(consume, width, (q, log2_sum), (g, delta), interpret=settings.interpret)

  part = jax.ShapeDtypeStruct((batch, places, kv_heads, tiles.keys_dkv, width), jnp.float32)
  return hopper.kernel(
    body,
    [part, part],
    grid={"place": places, "row": batch, "head": kv_heads},
    name="attention_dkv",
    interpret=settings.interpret,
  )(pieces, seen, q, k, v, log2_sum, delta, g)


def sums(
  settings: Settings,
  tiles: Tiles,
  pieces: Pieces,
  parts: list[Float[Array, "B slots K keys E"]],
  dtype: Any,
) -> list[Float[Array, "B S K E"]]:
  """Returns dK and dV in a dtype: the sums of the parts of each tile of keys, in their order."""
  batch, _, kv_heads, size, width = parts[0].shape
  count, half = pieces.first.shape[1] - 1, size // CONSUMERS

  def body(first, of_keys, of_values, dk, dv):
    row, head, tile = (lax.axis_index(x) for x in ("row", "head", "tile"))
    mine = lax.axis_index("warpgroup") * half
    begin, end = first[row, tile], first[row, tile + 1]
    for part, out in ((of_keys, dk), (of_values, dv)):

      def add(place, found, part=part):
        return found + hopper.load(part.at[row, place, head, pl.ds(mine, half)], MATRIX)

      found = plgpu.layout_cast(jnp.zeros((half, width), jnp.float32), MATRIX)
      found = lax.fori_loop(begin, end, add, found).astype(dtype)
      out[row, pl.ds(tile * size + mine, half), head] = found

  out = jax.ShapeDtypeStruct((batch, count * tiles.keys_dkv, kv_heads, width), dtype)
  return hopper.kernel(
    body,
    [out, out],
    grid={"tile": count, "row": batch, "head": kv_heads},
    name="attention_dkv_sums",
    interpret=settings.interpret,
    warpgroups=CONSUMERS,
  )(pieces.first, *parts)


@dataclasses.dataclass(frozen=True)
class _QueryBlock:
  """One block of `forward` or `backward_q`: the queries stay, the keys come by."""

  tiles: Tiles
  size: int  # keys of a tile.
  group: int  # query heads of a key/value head.
  lists: Any  # `Lists` of references.
  seen: Any  # `Visible` of references.

  row: Any
  head: Any
  place: Any  # in the order of launch.
  tile: Any  # of the queries.
  count: Any  # of tiles that come by.

  @classmethod
  def here(cls, tiles: Tiles, size: int, group: int, lists: Any, seen: Any) -> "_QueryBlock":
    """Returns the block that runs."""
    row, head, place = (lax.axis_index(x) for x in ("row", "head", "place"))
    tile, count = lists.tile[row, place], lists.count[row, place]
    return cls(tiles, size, group, lists, seen, row, head, place, tile, count)

  def first(self, warpgroup):
    """Returns the first query of a consumer."""
    return self.tile * self.tiles.queries + warpgroup * (self.tiles.queries // CONSUMERS)

  def share(self, warpgroup):
    """Returns the queries of a consumer."""
    return pl.ds(self.first(warpgroup), self.tiles.queries // CONSUMERS)

  def queries(self, warpgroup) -> Numbers:
    """Returns what the mask needs of the queries of a consumer."""
    half, here = self.tiles.queries // CONSUMERS, self.share(warpgroup)
    place = lambda: blocks.places(self.first(warpgroup), half, BY_ROW)
    found = [hopper.load(x.at[self.row, here]) for x in _of_queries(self.seen)]
    return _with_places(self.seen, place, [lambda x=x: x for x in found])

  def entry(self, step):
    """Returns the entry of the tile that comes by in a step."""
    return self.lists.entries[self.row, self.place, step]

  def masked(self, scores, step, queries: Numbers, keys: Ring):
    """Returns the scores of a tile with its mask."""
    slot, entry = lax.rem(step, self.tiles.stages), self.entry(step)
    first = tiling.tile_of(entry) * self.size
    place = lambda: blocks.places(first, self.size, BY_COLUMN)
    numbers = [lambda x=x: hopper.load(x.at[slot], BY_COLUMN) for x in keys.slots[1:]]
    numbers = _with_places(self.seen, place, numbers)
    return blocks.masked(scores, entry, queries, numbers, query_axis=0)

  def rings(self, width: int) -> tuple[Ring, Ring]:
    """Returns the types of the rings of keys and of values."""
    stages, matrix = self.tiles.stages, (self.size, width)
    numbers = [jnp.int32 for _ in _of_keys(self.seen)]
    return blocks.ring(stages, matrix, *numbers), blocks.ring(stages, matrix)

  def fill(self, keys: Ring, values: Ring, k, v) -> None:
    """Copies all keys and values that come by."""
    row, kv_head = self.row, lax.div(self.head, self.group)
    matrix = lambda x: lambda there: x.at[row, there, kv_head]
    numbers = [lambda there, x=x: x.at[row, there] for x in _of_keys(self.seen)]
    place = lambda step: pl.ds(tiling.tile_of(self.entry(step)) * self.size, self.size)
    rings = (keys, [matrix(k), *numbers]), (values, [matrix(v)])
    blocks.fill(rings, self.count, place)


@dataclasses.dataclass(frozen=True)
class _KeyBlock:
  """One block of `backward_kv`: the keys stay, the queries of one head after the other come by."""

  tiles: Tiles
  group: int  # query heads of a key/value head.
  pieces: Any  # `Pieces` of references.
  seen: Any  # `Visible` of references.

  row: Any
  head: Any
  place: Any  # in the order of launch.
  tile: Any  # of the keys.
  begin: Any  # entries of the list before the piece.
  count: Any  # of tiles of each head that come by.

  @classmethod
  def here(cls, tiles: Tiles, group: int, pieces: Any, seen: Any) -> "_KeyBlock":
    """Returns the block that runs."""
    row, head, place = (lax.axis_index(x) for x in ("row", "head", "place"))
    of_piece = (x[row, place] for x in (pieces.tile, pieces.begin, pieces.count))
    return cls(tiles, group, pieces, seen, row, head, place, *of_piece)

  @property
  def steps(self):
    """Number of tiles that come by."""
    return self.count * self.group

  def first(self, warpgroup):
    """Returns the first key of a consumer."""
    return self.tile * self.tiles.keys_dkv + warpgroup * (self.tiles.keys_dkv // CONSUMERS)

  def share(self, warpgroup):
    """Returns the keys of a consumer."""
    return pl.ds(self.first(warpgroup), self.tiles.keys_dkv // CONSUMERS)

  def keys(self, warpgroup) -> Numbers:
    """Returns what the mask needs of the keys of a consumer."""
    half, here = self.tiles.keys_dkv // CONSUMERS, self.share(warpgroup)
    place = lambda: blocks.places(self.first(warpgroup), half, BY_ROW)
    found = [hopper.load(x.at[self.row, here]) for x in _of_keys(self.seen)]
    return _with_places(self.seen, place, [lambda x=x: x for x in found])

  def entry(self, step):
    """Returns the entry of the tile that comes by in a step."""
    at = self.begin + lax.rem(step, self.count)
    return self.pieces.entries[self.row, self.tile, at]

  def masked(self, scores, step, keys: Numbers, queries: Ring, offsets):
    """Returns the scores [keys queries] of a tile with its mask.

    `offsets` are 0, 1, 2... in shared memory: the compiler would keep them in registers and spill.
    """
    slot, entry = lax.rem(step, self.tiles.stages), self.entry(step)
    first = tiling.tile_of(entry) * self.tiles.queries_dkv
    place = lambda: first + hopper.load(offsets, BY_COLUMN)
    numbers = [lambda x=x: hopper.load(x.at[slot], BY_COLUMN) for x in queries.slots[2:]]
    numbers = _with_places(self.seen, place, numbers)
    return blocks.masked(scores, entry, numbers, keys, query_axis=1)

  def run(self, consume, width: int, of_queries, of_slopes, *, interpret: bool) -> None:
    """Runs the warpgroups of the block.

    Args:
      consume: Function (number of the consumer, k, v, offsets, barriers of k and v, ring of
        queries, ring of cotangents, *spare).
      width: Width of a head.
      of_queries: Queries and log-sum-exp.
      of_slopes: Cotangents of the output, and delta.
      interpret: Whether it runs in the interpreter.
    """
    half, size = self.tiles.keys_dkv // CONSUMERS, self.tiles.queries_dkv
    stages, numbers = self.tiles.stages, [jnp.int32 for _ in _of_queries(self.seen)]

    def produce(_own_k, _own_v, _offsets, _arrived, queries, slopes, *_spare):
      self._fill(queries, slopes, of_queries, of_slopes)

    blocks.run(
      consume,
      produce,
      *(hopper.swizzled((CONSUMERS, half, width), jnp.bfloat16) for _ in "kv"),
      plgpu.SMEM((CONSUMERS, size), jnp.int32),
      plgpu.Barrier(num_arrivals=2, num_barriers=CONSUMERS),
      blocks.ring(stages, (size, width), jnp.float32, *numbers),
      blocks.ring(stages, (size, width), jnp.float32),
      *blocks.spare(interpret, half, size),
    )

  def _fill(self, queries: Ring, slopes: Ring, of_queries, of_slopes) -> None:
    """Copies all queries and cotangents that come by, each a pair of matrices and numbers."""
    row, first, size = self.row, self.head * self.group, self.tiles.queries_dkv

    def place(step):
      there = tiling.tile_of(self.entry(step)) * size
      return first + lax.div(step, self.count), pl.ds(there, size)

    def pair(matrix, numbers):
      yield lambda at: matrix.at[row, at[1], at[0]]
      yield lambda at: numbers.at[row, at[0], at[1]]

    numbers = [lambda at, x=x: x.at[row, at[1]] for x in _of_queries(self.seen)]
    rings = (queries, [*pair(*of_queries), *numbers]), (slopes, [*pair(*of_slopes)])
    blocks.fill(rings, self.steps, place)


def _of_queries(seen: Any) -> list[Any]:
  """Returns the numbers that a mask reads of queries."""
  places = [] if seen.places is None else [seen.places.queries]
  return places if seen.limit is None else [*places, seen.positions]


def _of_keys(seen: Any) -> list[Any]:
  """Returns the numbers that a mask reads of keys."""
  numbers = [seen.until] if seen.places is None else [seen.places.keys, seen.until]
  return numbers if seen.limit is None else [*numbers, seen.limit]


def _with_places(seen: Any, place: Callable[[], Any], numbers: list[Any]) -> Numbers:
  """Returns what a mask needs: the numbers that it reads, after places if tokens are in order."""
  return [place, *numbers] if seen.places is None else numbers


def _no_keys(rows: int, width: int):
  """Returns (output, highest, total) of queries that have seen no key."""
  return (
    plgpu.layout_cast(jnp.zeros((rows, width), jnp.float32), MATRIX),
    plgpu.layout_cast(jnp.full((rows,), LOWEST, jnp.float32), BY_ROW),
    plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), BY_ROW),
  )
