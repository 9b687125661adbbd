"""Same as `reference`, tile by tile in one loop over the tiles that hold anything. Pure.

Runs on every platform and in every dtype. A tile is some queries × as many keys of all rows; tiles
that no row needs are skipped. The loop compiles once, whatever the length of the rows. The
backward pass computes the scores of a tile again from the log-sum-exp, and nothing else, so no
array is [T, T].

A row that fits in a tile is one tile without a loop. Of rows that are dealt out in parts, a tile of
queries is of one part.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_kernels.attention import parts, visible
from grpo_kernels.attention.core import NOTHING, Settings
from grpo_kernels.attention.visible import Places, Visible

TILE = 256  # queries, and keys, of a tile.
MOST_TILES = 16  # of a row; a longer row has longer tiles, because every round of the loop costs.
MOST_OF_PART = 8  # tiles of queries of a part of a row.


class Tiles(NamedTuple):
  """The n × m tiles of packed rows; n = m for whole rows.

  Attributes:
    is_live: Whether a tile holds a pair of any row, by its place among the queries and the keys.
  """

  is_live: Bool[Array, "n m"]


def prepare(seen: Visible, width: int, *, tile: int = TILE) -> Tiles:
  """Returns the tiles of packed rows; see `core.Implementation`.

  Args:
    seen: Visibility of the rows.
    width: Width of a head; not read.
    tile: Number of queries of a tile of a row that is not longer than 16 tiles.
  """
  del width
  of_queries, length, most = seen.until.shape[1], seen.until.shape[1], MOST_TILES
  if seen.places is not None:
    of_queries, most = seen.places.queries.shape[1], MOST_OF_PART
  longest = max(tile, -(-of_queries // most))
  queries, keys = (_Cut(each, -(-each // longest)) for each in (of_queries, length))
  live, _ = visible.live_tiles(
    visible.padded(seen, keys.whole, queries.whole), queries.size, keys.size
  )
  return Tiles(jnp.any(live, axis=0))


def forward(
  settings: Settings,
  q: Float[Array, "B T H E"],
  k: Float[Array, "B S K E"],
  v: Float[Array, "B S K E"],
  seen: Visible,
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
  """Returns output and log-sum-exp; see `core.Implementation`.

  A tile is joined to the tiles before it as `parts.joined` says: an online softmax.
  """
  rows = _Rows.of(settings, seen, q, k)
  q, k, v = rows.by_query(q), rows.by_key(k), rows.by_key(v)

  def softmax(tile):
    scores, allowed = rows.scores(q, k, tile)
    mix = lambda weights: rows.contract("bkms,bkse->bkme", weights, v[tile.keys])
    return parts.softmax(scores, allowed, mix, settings.products)

  def visit(tile, found):
    earlier = jax.tree.map(lambda x: x[tile.queries], found)
    both = parts.joined(earlier, softmax(tile))
    return jax.tree.map(lambda x, y: x.at[tile.queries].set(y), found, both)

  if rows.is_one_tile:
    found = jax.tree.map(lambda x: x[None], softmax(_Tile(0, 0)))
  else:
    found = rows.walk(visit, parts.nothing(q))
  some = found.highest > NOTHING
  total = jnp.where(some, found.total, 1.0)
  mixed = jnp.where(some[..., None], found.mixed / total[..., None], 0.0)
  log_sum = jnp.where(some, found.highest + jnp.log(total), NOTHING)
  of_tokens = rows.queries.by_token
  return of_tokens(mixed), of_tokens(log_sum).swapaxes(1, 2)


def backward(
  settings: Settings,
  q: Float[Array, "B T H E"],
  k: Float[Array, "B S K E"],
  v: Float[Array, "B S K E"],
  seen: Visible,
  log_sum: Float[Array, "B H T"],
  delta: Float[Array, "B H T"],
  g: Float[Array, "B T H E"],
) -> tuple[Float[Array, "B T H E"], Float[Array, "B S K E"], Float[Array, "B S K E"]]:
  """Returns the cotangents of queries, keys and values; see `core.Implementation`."""
  rows = _Rows.of(settings, seen, q, k)
  q, k, v, g = rows.by_query(q), rows.by_key(k), rows.by_key(v), rows.by_query(g)
  log_sum, delta = (rows.by_query(x.swapaxes(1, 2)) for x in (log_sum, delta))
  contract = rows.contract

  def visit(tile, found):
    dq, dk, dv = found
    at, of = tile.queries, tile.keys
    scores, allowed = rows.scores(q, k, tile)
    weights = jnp.where(allowed, jnp.exp(scores - log_sum[at][..., None]), 0.0)
    slopes = contract("bkme,bkse->bkms", g[at], v[of]) - delta[at][..., None]
    slopes = slopes * weights
    dq = dq.at[at].add(contract("bkms,bkse->bkme", slopes, k[of]))
    dk = dk.at[of].add(contract("bkms,bkme->bkse", slopes, q[at]))
    dv = dv.at[of].add(contract("bkms,bkme->bkse", weights, g[at]))
    return dq, dk, dv

  start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
  dq, dk, dv = visit(_Tile(0, 0), start) if rows.is_one_tile else rows.walk(visit, start)
  return rows.queries.by_token(dq), rows.keys.by_token(dk), rows.keys.by_token(dv)


class _Tile(NamedTuple):
  """Places of a tile among the tiles of the queries and of the keys."""

  queries: Any
  keys: Any


class _Cut(NamedTuple):
  """Tokens of rows, cut in tiles.

  Arrays of heads [B T h ...] become [n B K m ...]: the m = T h / (n K) heads of a tile of tokens
  that use the same key/value head, token after token.
  """

  length: int  # T.
  count: int  # n.

  @property
  def size(self) -> int:
    """Number of tokens of a tile."""
    return self.length if self.count == 1 else -(-self.length // (8 * self.count)) * 8

  @property
  def whole(self) -> int:
    """Number of tokens of all tiles."""
    return self.count * self.size

  def by_tile(self, x: Float[Array, "B T h ..."], kv_heads: int) -> Float[Array, "n B K m ..."]:
    """Returns heads by the tile that they are in, with padding."""
    batch, length, heads, *rest = x.shape
    if length < self.whole:
      x = jnp.pad(x, ((0, 0), (0, self.whole - length)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(batch, self.count, self.size, kv_heads, heads // kv_heads, *rest)
    x = x.transpose(1, 0, 3, 2, 4, *range(5, x.ndim))
    return x.reshape(*x.shape[:3], -1, *rest)

  def by_token(self, x: Float[Array, "n B K m ..."]) -> Float[Array, "B T h ..."]:
    """Returns [B T h ...] of what is in tiles, without the padding."""
    count, batch, kv_heads, _, *rest = x.shape
    x = x.reshape(count, batch, kv_heads, self.size, -1, *rest)
    x = x.transpose(1, 0, 3, 2, 4, *range(5, x.ndim))
    return x.reshape(batch, self.whole, -1, *rest)[:, : self.length]


class _Rows(NamedTuple):
  """Packed rows in n tiles of queries, and m of keys."""

  contract: Callable[[str, Array, Array], Array]
  seen: Visible  # padded, each array [n B size], or [m B size] of keys.
  is_live: Bool[Array, "n m"]
  queries: _Cut
  keys: _Cut
  kv_heads: int  # K.

  @classmethod
  def of(cls, settings: Settings, seen: Visible, q: Array, k: Array) -> "_Rows":
    """Returns the rows of these queries and keys."""
    is_live: Array = seen.tiles.is_live
    queries, keys = (_Cut(x.shape[1], n) for x, n in zip((q, k), is_live.shape, strict=True))
    padded = visible.padded(seen._replace(tiles=None), keys.whole, queries.whole)

    def split(x: Array, cut: _Cut) -> Array:
      return x.reshape(x.shape[0], cut.count, -1).swapaxes(0, 1)

    of = lambda tree, cut: jax.tree.map(lambda x: split(x, cut), tree)
    until, limit = of((padded.until, padded.limit), keys)
    in_tiles = Visible(until, of(padded.positions, queries), limit)
    if padded.places is not None:
      of_queries, of_keys = padded.places
      in_tiles = in_tiles._replace(places=Places(of(of_queries, queries), of(of_keys, keys)))
    return cls(settings.products.contract, in_tiles, is_live, queries, keys, k.shape[2])

  @property
  def is_one_tile(self) -> bool:
    return self.is_live.shape == (1, 1)

  def by_query(self, x: Float[Array, "B T h ..."]) -> Float[Array, "n B K m ..."]:
    return self.queries.by_tile(x, self.kv_heads)

  def by_key(self, x: Float[Array, "B S K E"]) -> Float[Array, "n B K s E"]:
    return self.keys.by_tile(x, self.kv_heads)

  def scores(self, q: Array, k: Array, tile: _Tile) -> tuple[Array, Array]:
    """Returns the scores of a tile [B K m s], and a mask that broadcasts to them."""
    found = self.contract("bkme,bkse->bkms", q[tile.queries], k[tile.keys])
    at = lambda x, index: None if x is None else x[index]
    if self.seen.places is None:
      queries = tile.queries * self.queries.size + jnp.arange(self.queries.size)
      keys = tile.keys * self.keys.size + jnp.arange(self.keys.size)
    else:
      queries, keys = self.seen.places.queries[tile.queries], self.seen.places.keys[tile.keys]
    allowed = visible.pairs(
      queries,
      keys,
      self.seen.until[tile.keys],
      at(self.seen.positions, tile.queries),
      at(self.seen.limit, tile.keys),
    )
    return found, jnp.repeat(allowed, found.shape[2] // self.queries.size, axis=1)[:, None]

  def walk(self, visit: Callable[[_Tile, Any], Any], start: Any) -> Any:
    """Returns what `visit(tile, found)` has found after all tiles that hold anything."""
    most = self.is_live.size
    if self.seen.places is None:  # keys are not after their queries.
      most = self.queries.count * (self.queries.count + 1) // 2
    queries, keys = jnp.nonzero(self.is_live, size=most, fill_value=0)
    step = lambda i, found: visit(_Tile(queries[i], keys[i]), found)
    return jax.lax.fori_loop(0, jnp.sum(self.is_live), step, start)
