"""The Pallas kernels of `mosaic_gpu`: one pipeline, three epilogues. Mosaic GPU, Hopper only.

A block has three warpgroups. The last, the producer, asks the copy engine (TMA) for slices of both
operands, [rows depth] of hidden and [columns depth] of the head, into a ring of `stages` slots of
shared memory. The first two, the consumers, feed the tensor cores (wgmma) from the ring; each holds
half of the tile's rows as float32 sums in registers, and then works on its logits: the epilogue.

    full[slot]   the copy engine arrives when a slot's bytes are there    consumers wait
    free[slot]   each consumer arrives when it has read a slot            the producer waits
    lead         the first consumer arrives when it is some slices ahead  the second waits, once

One product stays in flight: a slot is freed one slice late, after the product that followed it was
issued. The producer runs on into the next tile while the consumers are in an epilogue, so the ring
is full when they come back. `lead` keeps them from being in the epilogue both at once: the second
keeps the tensor cores busy while the first is in it, and the other way round.

The copy engine fills what lies outside of hidden or head with 0 and drops what would be stored
outside of S or E; columns that are not real are masked in the tiles that have some.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from grpo_kernels import hopper
from grpo_kernels.hopper import CONSUMER_REGISTERS, CONSUMERS, PRODUCER_REGISTERS
from grpo_kernels.linear_logprobs import mosaic_gpu_epilogues as epilogues
from grpo_kernels.linear_logprobs.core import Settings
from grpo_kernels.linear_logprobs.mosaic_gpu_tiles import Tiles, tiles_over


def statistics(
  settings: Settings,
  tiles: Tiles,
  scalars: Int[Array, " 2"],
  hidden: Float[Array, "N D"],
  head: Float[Array, "_ _"],
  targets: Int[Array, "blocks half"],
) -> list[Float[Array, "splits group_blocks half"]]:
  """Returns four numbers of each token of `tiles.group` row tiles, of each part of the vocabulary.

      m = max a      l = Σ 2^((a - m) c)      u = Σ 2^((a - m) c) (a - m) c      a_t

  where a = h · W is a logit before the temperature and c = log₂(e) / τ. A part that has no
  column gives m = `ABSENT` and zeros. Without entropy u is 0.

  Args:
    settings: Static settings.
    tiles: Tile sizes.
    scalars: Number of the first row tile; number of real columns.
    hidden: Hidden states in bfloat16; N is a multiple of 8, D of 64.
    head: Head in bfloat16; V is a multiple of 8 in layout "vd", of 64 in "dv".
    targets: Targets of all tokens, by half row tiles; -1 for none.
  """
  width = hidden.shape[1]

  def body(scalars, hidden, head, targets, *parts):
    split = lax.axis_index("split")
    row_tile = scalars[0] + lax.axis_index("row_tile")
    begin, count = _part(live_tiles(scalars[1], tiles.columns), tiles, split)

    def place(item):
      return row_tile * tiles.rows, (begin + item) * tiles.columns

    def consume(ring, warpgroup):
      wanted = hopper.load(targets.at[CONSUMERS * row_tile + warpgroup])

      def visit(item, found):
        first_column = place(item)[1]
        logits = ring.multiply(item, warpgroup)
        live = scalars[1] - first_column
        return epilogues.absorb(settings, logits, found, wanted - first_column, live)

      found = lax.fori_loop(0, count, visit, epilogues.nothing(tiles.half))
      at = CONSUMERS * lax.axis_index("row_tile") + warpgroup
      for part, value in zip(parts, epilogues.of_rows(found), strict=True):
        part[split, at] = value

    _Pipeline(settings, tiles, width, hidden, head).run(place, count, consume)

  part = jax.ShapeDtypeStruct((tiles.splits, CONSUMERS * tiles.group, tiles.half), jnp.float32)
  return hopper.kernel(
    body,
    [part] * 4,
    grid={"row_tile": tiles.group, "split": tiles.splits},
    name="linear_logprobs_statistics",
    interpret=settings.interpret,
  )(scalars, hidden, head, targets)


def numerators(
  settings: Settings,
  tiles: Tiles,
  scalars: Int[Array, " 1"],
  hidden: Float[Array, "N D"],
  head: Float[Array, "_ _"],
  targets: Int[Array, "blocks half"],
  references: Float[Array, "blocks half"],
) -> tuple[Float[Array, "N V"], list[Float[Array, "splits blocks half"]]]:
  """Returns the numerators of all tokens' softmax, in bfloat16, and four numbers of each part.

      E = 2^((a - r) c)      m = max a      l = Σ E      u = Σ E (a - r) c      a_t

  The sums are of E before it is rounded. r is any number, such that E is finite: bfloat16 has the
  exponents of float32. Columns that are not real have E = 0.

  Args:
    settings: Static settings.
    tiles: Tile sizes; `group` row tiles are at work at once, each in `splits` parts.
    scalars: Number of real columns.
    hidden: Hidden states in bfloat16; N is a multiple of 8, D of 64.
    head: Head in bfloat16, as the layout says; V is a multiple of 8 in layout "vd", of 64 in "dv".
    targets: Targets of all tokens, by half row tiles; -1 for none.
    references: Reference r of all tokens, by half row tiles.
  """
  width, vocabulary = hidden.shape[1], head.shape[settings.vocab_axis]
  row_tiles = tiles_over(hidden.shape[0], tiles.rows)
  group = min(tiles.group, row_tiles)

  def body(scalars, hidden, head, targets, references, out, *parts):
    first, split = lax.axis_index("row_tile"), lax.axis_index("split")
    begin, count = _part(tiles_over(vocabulary, tiles.columns), tiles, split)
    rounds = lax.div(row_tiles - first + (group - 1), group)

    def place(item):
      done = lax.div(item, lax.max(count, 1))
      return (first + done * group) * tiles.rows, (begin + item - done * count) * tiles.columns

    def consume(ring, warpgroup, staged):
      @pl.loop(0, rounds)
      def _row_tiles(done):
        block = CONSUMERS * (first + done * group) + warpgroup
        wanted = hopper.load(targets.at[block])
        reference = hopper.load(references.at[block])

        def visit(item, found):
          first_column = (begin + item) * tiles.columns
          store = _Store(out, staged, warpgroup, block * tiles.half, first_column)
          logits = ring.multiply(done * count + item, warpgroup)
          live = scalars[0] - first_column
          return epilogues.numerate(
            settings, logits, found, reference, wanted - first_column, live, store
          )

        found = lax.fori_loop(0, count, visit, epilogues.no_numerators(tiles.half))
        for part, value in zip(parts, epilogues.of_lanes(found), strict=True):
          part[split, block] = value

      plgpu.wait_smem_to_gmem(0)

    _Pipeline(settings, tiles, width, hidden, head).run(
      place, rounds * count, consume, _staged(tiles)
    )

  part = jax.ShapeDtypeStruct((tiles.splits, CONSUMERS * row_tiles, tiles.half), jnp.float32)
  found, *parts = hopper.kernel(
    body,
    [jax.ShapeDtypeStruct((hidden.shape[0], vocabulary), jnp.bfloat16), *[part] * 4],
    grid={"row_tile": group, "split": tiles.splits},
    name="linear_logprobs_numerators",
    interpret=settings.interpret,
  )(scalars, hidden, head, targets, references)
  return found, parts


def slopes(
  settings: Settings,
  tiles: Tiles,
  scalars: Int[Array, " 2"],
  hidden: Float[Array, "N D"],
  head: Float[Array, "_ _"],
  targets: Int[Array, "blocks half"],
  rows: Float[Array, "kinds blocks half"],
  size: int,
) -> Float[Array, "N size"]:
  """Returns S = ∂/∂logits of `size` columns of the head, in bfloat16.

      S = [g (onehot_t - p) - gₑ p (log p + H)] / τ = onehot_t g/τ - p (s₀ + s₁ log₂ p)
      log₂ p = a c - r      c = log₂(e) / τ      r = log₂ Σ 2^(a c)

  Args:
    settings: Static settings.
    tiles: Tile sizes.
    scalars: Number of the first column tile, so that one kernel serves every chunk; number of real
      columns of the head.
    hidden: Hidden states in bfloat16; N is a multiple of 8, D of 64.
    head: Head in bfloat16; V is a multiple of 8 in layout "vd", of 64 in "dv".
    targets: Targets of all tokens, by half row tiles; -1 for none.
    rows: Values of all tokens, by half row tiles: r, g/τ and, with entropy, s₀ and s₁ (else they
      are g/τ and 0). Zeros for tokens that are not there.
    size: Number of columns, a multiple of 64.
  """
  width = hidden.shape[1]
  row_tiles = tiles_over(hidden.shape[0], tiles.rows)
  column_tiles = tiles_over(size, tiles.columns)
  blocks = min(tiles.processors, row_tiles * column_tiles)

  def body(scalars, hidden, head, targets, rows, out):
    first = lax.axis_index("block")
    count = lax.div(row_tiles * column_tiles - first + (blocks - 1), blocks)

    def tile_of(item):
      return banded(first + item * blocks, row_tiles, column_tiles, tiles.band)

    def place(item):
      row_tile, column_tile = tile_of(item)
      return row_tile * tiles.rows, (scalars[0] + column_tile) * tiles.columns

    def consume(ring, warpgroup, staged):
      @pl.loop(0, count)
      def _tiles(item):
        row_tile, column_tile = tile_of(item)
        first_column = place(item)[1]
        block = CONSUMERS * row_tile + warpgroup
        of_rows = [hopper.load(rows.at[kind, block]) for kind in range(rows.shape[0])]
        wanted = hopper.load(targets.at[block]) - first_column
        logits = ring.multiply(item, warpgroup)
        found = epilogues.slopes(settings, logits, of_rows, wanted, scalars[1] - first_column)
        store = _Store(out, staged, warpgroup, block * tiles.half, column_tile * tiles.columns)
        for column, part in found:
          store(column, part)

      plgpu.wait_smem_to_gmem(0)

    _Pipeline(settings, tiles, width, hidden, head).run(place, count, consume, _staged(tiles))

  return hopper.kernel(
    body,
    jax.ShapeDtypeStruct((hidden.shape[0], size), jnp.bfloat16),
    grid={"block": blocks},
    name="linear_logprobs_slopes",
    interpret=settings.interpret,
  )(scalars, hidden, head, targets, rows)


def _part(column_tiles, tiles: Tiles, split):
  """Returns the first column tile, and the number of them, of a part of the vocabulary."""
  begin = _share(column_tiles, split, tiles.splits)
  return begin, _share(column_tiles, split + 1, tiles.splits) - begin


@dataclasses.dataclass(frozen=True)
class _Store:
  """Writes strips of one consumer's tile to device memory, through shared memory."""

  out: Any  # [N _]
  staged: Any  # [consumers half STORED_COLUMNS]
  warpgroup: Any
  first_row: Any
  first_column: Any

  def __call__(self, column: int, part) -> None:
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    self.staged[self.warpgroup] = part
    plgpu.commit_smem()
    mine = pl.ds(self.first_row, self.staged.shape[1])
    across = pl.ds(self.first_column + column, epilogues.STORED_COLUMNS)
    plgpu.copy_smem_to_gmem(self.staged.at[self.warpgroup], self.out.at[mine, across])


def _staged(tiles: Tiles):
  """Returns the shared memory of `_Store`."""
  shape = CONSUMERS, tiles.half, epilogues.STORED_COLUMNS
  return hopper.swizzled(shape, jnp.bfloat16)


def live_tiles(columns, tile: int):
  """Returns how many column tiles have a real column; the last may have few."""
  return lax.div(columns + (tile - 1), tile)


@dataclasses.dataclass(frozen=True)
class _Pipeline:
  """Both operands on their way from device memory to the tensor cores, for one block."""

  settings: Settings
  tiles: Tiles
  width: int  # D.
  hidden: Any  # reference [N D].
  head: Any  # reference, as the layout says.

  def run(self, place, count, consume, *scratch) -> None:
    """Walks over `count` tiles; `place(item)` gives the (first row, first column) of each.

    Args:
      place: Function item → (first row, first column) in hidden and head.
      count: Number of items; may be 0.
      consume: Function that each of the two consumers calls as consume(ring, warpgroup, *scratch).
      *scratch: Shared memory for `consume`.
    """
    tiles = self.tiles
    by_columns = self.settings.head_layout == "vd"
    columns_shape = (tiles.columns, tiles.depth) if by_columns else (tiles.depth, tiles.columns)
    memory = functools.partial(hopper.swizzled, dtype=jnp.bfloat16)

    def block(rows, columns, full, free, lead, *scratch):
      ring = _Ring(self, rows, columns, full, free, lead)
      warpgroup = lax.axis_index("warpgroup")

      @pl.when(warpgroup < CONSUMERS)
      def _consumers():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        ring.fall_behind(count, warpgroup)
        consume(ring, warpgroup, *scratch)

      @pl.when(warpgroup == CONSUMERS)
      def _producer():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        ring.fill(place, count)

    pl.run_scoped(
      block,
      memory((tiles.stages, tiles.rows, tiles.depth)),
      memory((tiles.stages, *columns_shape)),
      plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages),
      plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tiles.stages),
      plgpu.Barrier(num_arrivals=1),
      *scratch,
      collective_axes="warpgroup",
    )

  @property
  def depths(self) -> int:
    """Number of slices of a tile."""
    return self.width // self.tiles.depth


@dataclasses.dataclass(frozen=True)
class _Ring:
  """The slots in shared memory and their barriers. Slices are numbered through, over all tiles."""

  pipeline: _Pipeline
  rows: Any  # [stages rows depth]
  columns: Any  # [stages columns depth], or [stages depth columns].
  full: Any
  free: Any
  lead: Any

  def slot(self, step):
    """Returns where a slice lies."""
    return lax.rem(step, self.pipeline.tiles.stages)

  def fill(self, place, count) -> None:
    """Copies all slices in turn, each as soon as its slot is free. Producer."""
    p, tiles, depths = self.pipeline, self.pipeline.tiles, self.pipeline.depths
    by_columns = p.settings.head_layout == "vd"

    @pl.loop(0, count)
    def _items(item):
      first_row, first_column = place(item)
      across = pl.ds(first_column, tiles.columns)

      @pl.loop(0, depths)
      def _slices(k):
        step = item * depths + k
        slot = self.slot(step)
        await_free(self.free, slot, step, tiles.stages)
        along = pl.ds(k * tiles.depth, tiles.depth)
        of_hidden = p.hidden.at[pl.ds(first_row, tiles.rows), along]
        of_head = p.head.at[across, along] if by_columns else p.head.at[along, across]
        plgpu.copy_gmem_to_smem(of_hidden, self.rows.at[slot], self.full.at[slot])
        plgpu.copy_gmem_to_smem(of_head, self.columns.at[slot], self.full.at[slot])

    # Each phase of a barrier must be awaited: none may be pending when the block ends.
    steps = count * depths

    @pl.loop(lax.max(steps - tiles.stages, 0), steps)
    def _drain(step):
      plgpu.barrier_wait(self.free.at[self.slot(step)])

  def multiply(self, item, warpgroup):
    """Returns the logits [half columns] of a tile, before the temperature. Consumers."""
    tiles, depths = self.pipeline.tiles, self.pipeline.depths
    first = item * depths
    mine = pl.ds(warpgroup * tiles.half, tiles.half)
    by_columns = self.pipeline.settings.head_layout == "vd"

    def products(sums):
      @pl.loop(0, depths)
      def _slices(k):
        slot = self.slot(first + k)
        await_full(self.full, slot)
        columns = self.columns.at[slot]
        plgpu.wgmma(sums, self.rows.at[slot, mine], columns.T if by_columns else columns)
        plgpu.wgmma_wait(1)  # all but the one just issued: the slice before it has been read.

        @pl.when(k > 0)
        def _free():
          plgpu.barrier_arrive(self.free.at[self.slot(first + k - 1)])

        if tiles.lead:

          @pl.when((first + k == min(tiles.lead, depths - 1)) & (warpgroup == 0))
          def _ahead():
            plgpu.barrier_arrive(self.lead)

      logits = sums[...]  # waits for all.
      plgpu.barrier_arrive(self.free.at[self.slot(first + depths - 1)])
      return logits

    return pl.run_scoped(
      products, plgpu.WGMMAAccumulatorRef((tiles.half, tiles.columns), jnp.float32)
    )

  def fall_behind(self, count, warpgroup) -> None:
    """Makes the second consumer wait until the first is `lead` slices ahead."""
    if self.pipeline.tiles.lead:

      @pl.when(jnp.logical_and(count > 0, warpgroup == 1))
      def _behind():
        plgpu.barrier_wait(self.lead)


def await_free(free, slot, step, stages: int) -> None:
  """Waits until both consumers have read what a slot held before; the first round has nothing."""

  @pl.when(step >= stages)
  def _wait():
    plgpu.barrier_wait(free.at[slot])


def await_full(full, slot) -> None:
  """Waits until the copy engine has filled a slot."""
  plgpu.barrier_wait(full.at[slot])


def _share(total, part, parts: int):
  """Returns where a part of `total` begins, of `parts` that differ by one at most."""
  return lax.div(total * part, parts)


def banded(index, row_tiles: int, column_tiles: int, band: int):
  """Returns (row tile, column tile) of the index-th tile: bands of row tiles, columns in turn."""
  above = lax.div(index, band * column_tiles) * band
  height = lax.min(row_tiles - above, band)
  within = index - above * column_tiles
  return above + lax.rem(within, height), lax.div(within, height)
