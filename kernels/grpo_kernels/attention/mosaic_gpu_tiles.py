"""Sizes of the tiles of the `mosaic_gpu` kernels, and the lists of those to visit. Pure.

A block of a kernel keeps one tile of tokens and walks over a list of tiles of other tokens: for the
output and dQ queries stay and keys come by, for dK and dV keys stay and queries come by. Blocks
with longer lists are launched first, so that the short ones fill the gaps at the end.

The keys of a long prompt are seen by all its completions, most others by a few tiles of queries.
One block for each tile of keys would leave most of the chip waiting for the longest (a prototype on
an H200, 2026-11-26, 4 rows of 4096: 1.5 ms, where the other two kernels took 0.4 together). So a
list that is at least twice as long as the average one of its row is cut into pieces, whose float32
sums are added up afterwards in a fixed order. A row has at most twice as many pieces as tiles, and
none is longer than two average lists. The pieces of a row depend on nothing but the row.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from grpo_kernels.attention import visible
from grpo_kernels.attention.visible import Visible

ROW_MULTIPLE = 128  # rows are padded to a multiple of it: all tiles divide it.


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Numbers of tokens of the tiles; hashable.

  Attributes:
    queries: Queries of a block of the output and of dQ, half for each consumer.
    keys: Keys of a slot of the output.
    keys_dq: Keys of a slot of dQ.
    keys_dkv: Keys of a block of dK and dV, half for each consumer.
    queries_dkv: Queries of a slot of dK and dV.
    stages: Slots of each ring.
  """

  queries: int = 128
  keys: int = 128
  keys_dq: int = 64
  keys_dkv: int = 128
  queries_dkv: int = 64
  stages: int = 2

  def __post_init__(self):
    blocks, slots = (self.queries, self.keys_dkv), (self.keys, self.keys_dq, self.queries_dkv)
    if set(blocks) != {128} or any(x not in (32, 64, 128) for x in slots) or self.stages < 1:
      raise ValueError(f"tiles need blocks of 128 tokens and slots of 32, 64 or 128, got {self}")


# Width of a head → tiles.
TILES = {64: Tiles(), 128: Tiles()}


class Lists(NamedTuple):
  """What each block visits, by its place in the order of launch.

  Attributes:
    tile: Tile that a block keeps.
    count: Number of tiles that it visits.
    entries: Tiles that it visits, in ascending order; see `tile_of` and `is_partial`.
  """

  tile: Int[Array, "B n"]
  count: Int[Array, "B n"]
  entries: Int[Array, "B n m"]


class Pieces(NamedTuple):
  """Lists of tiles of queries, cut into pieces of similar length.

  Attributes:
    tile: Tile of keys of each piece, like `begin`, `count` and `slot` by the order of launch.
    begin: Number of entries of the list before the piece.
    count: Number of entries of the piece; 0: the place has no piece.
    slot: Place of the piece in the order of tiles of keys.
    first: Number of pieces of all tiles of keys before each one; the last is the number of all.
    entries: List of each tile of keys, in ascending order; see `tile_of` and `is_partial`.
  """

  tile: Int[Array, "B slots"]
  begin: Int[Array, "B slots"]
  count: Int[Array, "B slots"]
  slot: Int[Array, "B slots"]
  first: Int[Array, "B n+1"]
  entries: Int[Array, "B n m"]


def lists(seen: Visible, queries: int, keys: int) -> Lists:
  """Returns the lists of tiles of keys of each tile of queries.

  Args:
    seen: Visibility of rows whose T and S the tile lengths divide.
    queries: Number of queries of a tile.
    keys: Number of keys of a tile.
  """
  entries, count = _lists(*visible.live_tiles(seen, queries, keys))
  order = jnp.argsort(-count, axis=-1, stable=True).astype(jnp.int32)
  entries = jnp.take_along_axis(entries, order[..., None], axis=1)
  return Lists(order, jnp.take_along_axis(count, order, axis=1), entries)


def pieces(seen: Visible, queries: int, keys: int) -> Pieces:
  """Returns the lists of tiles of queries of each tile of keys, in pieces.

  Args:
    seen: Visibility of rows whose T and S the tile lengths divide.
    queries: Number of queries of a tile.
    keys: Number of keys of a tile.
  """
  live, whole = visible.live_tiles(seen, queries, keys)
  entries, count = _lists(live.swapaxes(1, 2), whole.swapaxes(1, 2))
  first, parts = cuts(count)
  places = jnp.arange(2 * count.shape[1], dtype=jnp.int32)[None]
  # The tile of a place is the number of tiles whose pieces all lie before it.
  tile = jnp.sum(first[:, None, 1:] <= places[..., None], axis=-1, dtype=jnp.int32)
  tile = jnp.minimum(tile, count.shape[1] - 1)
  of_tile = lambda x: jnp.take_along_axis(x, tile, axis=1)
  length, part, of = of_tile(count), places - of_tile(first), jnp.maximum(of_tile(parts), 1)
  begin, end = length * part // of, length * (part + 1) // of
  here = jnp.where(places < first[:, -1:], end - begin, 0)
  order = jnp.argsort(-here, axis=-1, stable=True).astype(jnp.int32)
  launched = lambda x: jnp.take_along_axis(x, order, axis=1)
  return Pieces(launched(tile), launched(begin), launched(here), order, first, entries)


def cuts(count: Int[Array, "B n"]) -> tuple[Int[Array, "B n+1"], Int[Array, "B n"]]:
  """Returns (number of pieces before each list, number of pieces of each) from lengths of lists.

  A list shorter than two average ones of its row is one piece; an empty list has none.
  """
  average = jnp.maximum(-(-jnp.sum(count, axis=-1, keepdims=True) // count.shape[1]), 1)
  parts = jnp.where(count > 0, jnp.maximum(count // average, 1), 0)
  before = jnp.cumsum(parts, axis=-1, dtype=jnp.int32)
  return jnp.pad(before, ((0, 0), (1, 0))), parts


def tile_of(entry):
  """Returns the tile that an entry of a list names."""
  return lax.div(entry, 2)


def is_partial(entry):
  """Returns whether some pairs of an entry's tile are not allowed, so that it needs the mask."""
  return lax.rem(entry, 2) == 1


def _lists(
  live: Bool[Array, "B n m"], whole: Bool[Array, "B n m"]
) -> tuple[Int[Array, "B n m"], Int[Array, "B n"]]:
  """Returns the entries of live tiles, in front of others, and their number."""
  order = jnp.argsort(~live, axis=-1, stable=True).astype(jnp.int32)
  partial = jnp.take_along_axis(~whole, order, axis=-1).astype(jnp.int32)
  return order * 2 + partial, jnp.sum(live, axis=-1, dtype=jnp.int32)
