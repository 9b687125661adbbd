"""Same as `reference`, tile by tile in one loop over the tiles that hold anything. Pure.

Runs on every platform and in every dtype. A tile is some queries × as many keys of all rows; tiles
that no row needs are skipped. The loop compiles once, whatever the length of the rows. The
backward pass computes the scores of a tile again from the log-sum-exp, and nothing else, so no
array is [T, T].

A row that is no longer than a tile is one tile without a loop.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_kernels.attention import core, parts, visible
from grpo_kernels.attention.core import NOTHING, Settings
from grpo_kernels.attention.visible import Visible

TILE = 256  # queries, and keys, of a tile.
MOST_TILES = 16  # of a row; a longer row has longer tiles, because every round of the loop costs.


class Tiles(NamedTuple):
  """The n × n tiles of packed rows.

  Attributes:
    is_live: Whether a tile holds a pair of any row, by its place among the queries and the keys.
  """

  is_live: Bool[Array, "n n"]


def prepare(seen: Visible, width: int, *, tile: int = TILE) -> Tiles:
  """Returns the tiles of packed rows; see `core.Implementation`.

  Args:
    seen: Visibility of the rows.
    width: Width of a head; not read.
    tile: Number of queries of a tile of a row that is not longer than 16 tiles.
  """
  del width
  length = seen.until.shape[1]
  count = -(-length // max(tile, -(-length // MOST_TILES)))
  size = _size(length, count)
  live, _ = visible.live_tiles(visible.padded(seen, count * size), size, size)
  return Tiles(jnp.any(live, axis=0))


def forward(
  settings: Settings,
  q: Float[Array, "B T H E"],
  k: Float[Array, "B T K E"],
  v: Float[Array, "B T K E"],
  seen: Visible,
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
  """Returns output and log-sum-exp; see `core.Implementation`.

  A tile is joined to the tiles before it as `parts.joined` says: an online softmax.
  """
  rows, (q, k, v) = _Rows.of(settings, seen, q, k, v)

  def softmax(tile):
    scores, allowed = rows.scores(q, k, tile)
    mix = lambda weights: rows.contract("bkms,bkse->bkme", weights, v[tile.keys])
    return parts.softmax(scores, allowed, mix, settings.products)

  def visit(tile, found):
    earlier = jax.tree.map(lambda x: x[tile.queries], found)
    both = parts.joined(earlier, softmax(tile))
    return jax.tree.map(lambda x, y: x.at[tile.queries].set(y), found, both)

  if rows.count == 1:
    found = jax.tree.map(lambda x: x[None], softmax(_Tile(0, 0)))
  else:
    found = rows.walk(visit, parts.nothing(q))
  some = found.highest > NOTHING
  total = jnp.where(some, found.total, 1.0)
  mixed = jnp.where(some[..., None], found.mixed / total[..., None], 0.0)
  log_sum = jnp.where(some, found.highest + jnp.log(total), NOTHING)
  return rows.by_token(mixed), rows.by_token(log_sum).swapaxes(1, 2)


def backward(
  settings: Settings,
  q: Float[Array, "B T H E"],
  k: Float[Array, "B T K E"],
  v: Float[Array, "B T K E"],
  seen: Visible,
  log_sum: Float[Array, "B H T"],
  delta: Float[Array, "B H T"],
  g: Float[Array, "B T H E"],
) -> tuple[Float[Array, "B T H E"], Float[Array, "B T K E"], Float[Array, "B T K E"]]:
  """Returns the cotangents of queries, keys and values; see `core.Implementation`."""
  by_head = (log_sum.swapaxes(1, 2), delta.swapaxes(1, 2))
  rows, (q, k, v, g, log_sum, delta) = _Rows.of(settings, seen, q, k, v, g, *by_head)
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
  dq, dk, dv = visit(_Tile(0, 0), start) if rows.count == 1 else rows.walk(visit, start)
  return rows.by_token(dq), rows.by_token(dk), rows.by_token(dv)


class _Tile(NamedTuple):
  """Places of a tile among the tiles of the queries and of the keys."""

  queries: Any
  keys: Any


class _Rows(NamedTuple):
  """Packed rows in n tiles of queries, and n of keys.

  Arrays of heads [B T h ...] become [n B K m ...]: the m = T h / (n K) heads of a tile of tokens
  that use the same key/value head, token after token.
  """

  contract: Callable[[str, Array, Array], Array]
  seen: Visible  # padded, each array [n B size].
  is_live: Bool[Array, "n n"]
  length: int  # T.
  kv_heads: int  # K.

  @classmethod
  def of(cls, settings: Settings, seen: Visible, q, k, *others) -> tuple["_Rows", list[Array]]:
    """Returns the rows, and arrays of heads in tiles."""
    is_live, length = seen.tiles.is_live, q.shape[1]
    count = is_live.shape[0]
    whole = count * _size(length, count)
    padded, *arrays = core.padded(whole, seen._replace(tiles=None), q, k, *others)
    split = lambda x: x.reshape(x.shape[0], count, -1).swapaxes(0, 1)
    rows = cls(settings.products.contract, jax.tree.map(split, padded), is_live, length, k.shape[2])
    return rows, [rows._by_tile(x) for x in arrays]

  @property
  def count(self) -> int:
    return self.is_live.shape[0]

  def _by_tile(self, x: Float[Array, "B T h ..."]) -> Float[Array, "n B K m ..."]:
    batch, length, heads, *rest = x.shape
    repeats = heads // self.kv_heads
    x = x.reshape(batch, self.count, length // self.count, self.kv_heads, repeats, *rest)
    x = x.transpose(1, 0, 3, 2, 4, *range(5, x.ndim))
    return x.reshape(*x.shape[:3], -1, *rest)

  def by_token(self, x: Float[Array, "n B K m ..."]) -> Float[Array, "B T h ..."]:
    """Returns [B T h ...] of what is in tiles, without the padding."""
    count, batch, kv_heads, _, *rest = x.shape
    size = _size(self.length, count)
    x = x.reshape(count, batch, kv_heads, size, -1, *rest)
    x = x.transpose(1, 0, 3, 2, 4, *range(5, x.ndim))
    return x.reshape(batch, count * size, -1, *rest)[:, : self.length]

  def scores(self, q: Array, k: Array, tile: _Tile) -> tuple[Array, Array]:
    """Returns the scores of a tile [B K m s], and a mask that broadcasts to them."""
    found = self.contract("bkme,bkse->bkms", q[tile.queries], k[tile.keys])
    size, places = self.seen.until.shape[-1], jnp.arange(self.seen.until.shape[-1])
    of = lambda at: jax.tree.map(lambda x: x[at], self.seen)
    of_queries, of_keys = of(tile.queries), of(tile.keys)
    allowed = visible.pairs(
      tile.queries * size + places,
      tile.keys * size + places,
      of_keys.until,
      of_queries.positions,
      of_keys.limit,
    )
    return found, jnp.repeat(allowed, found.shape[2] // size, axis=1)[:, None]

  def walk(self, visit: Callable[[_Tile, Any], Any], start: Any) -> Any:
    """Returns what `visit(tile, found)` has found after all tiles that hold anything."""
    most = self.count * (self.count + 1) // 2  # keys are not after their queries.
    queries, keys = jnp.nonzero(self.is_live, size=most, fill_value=0)
    step = lambda i, found: visit(_Tile(queries[i], keys[i]), found)
    return jax.lax.fori_loop(0, jnp.sum(self.is_live), step, start)


def _size(length: int, count: int) -> int:
  """Returns the number of tokens of each tile of a row of several."""
  return length if count == 1 else -(-length // (8 * count)) * 8
