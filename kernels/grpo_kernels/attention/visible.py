"""Who attends to whom in packed rows, as one vector, and the tiles in which anybody does. Pure.

A row is a sequence of segments; a segment is a prompt, then its completions, each of which is one
run of places and is called a branch. Token q attends to token k if

    k ≤ q < until[k]      and, with a window,      position[q] < limit[k]

where `until` is the end of k's segment if k is of the prompt, else the end of k's branch, and 0 for
padding. So the mask of [T T] pairs is O(T) numbers, for trees of any shape. Kernels take it apart
into tiles of queries × keys: dead ones are skipped, whole ones need no mask.

If a row is dealt out in parts (`row_parts`), tokens are in another order: `Places` has the place of
each, and everything else holds as it is, for T queries of one part and S keys of the whole row.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

WHOLE = 2**30  # a window longer than any context; sums with a position stay in int32.


class Places(NamedTuple):
  """Places of tokens that are not in the order of their row.

  Attributes:
    queries: Place of each query; -1: it sees nothing.
    keys: Place of each key.
  """

  queries: Int[Array, "B T"]
  keys: Int[Array, "B S"]


class Visible(NamedTuple):
  """Which keys each token of packed rows sees.

  Attributes:
    until: Place after the last token that sees each key; 0 for padding.
    positions: Position of each query in prompt + completion; None without a window.
    limit: First position that no longer sees each key; None without a window.
    tiles: Tiles of the implementation that was asked to prepare them; None: none were prepared.
    places: Places of rows that are dealt out in parts; None: tokens are in order, and T = S.
  """

  until: Int[Array, "B S"]
  positions: Int[Array, "B T"] | None = None
  limit: Int[Array, "B S"] | None = None
  tiles: Any = None
  places: Places | None = None


def visible(
  segment_ids: Int[Array, "B T"],
  branch_ids: Int[Array, "B T"] | None = None,
  *,
  positions: Int[Array, "B T"] | None = None,
  window: int | Int[Array, ""] | None = None,
) -> Visible:
  """Returns which keys each token of packed rows sees.

  Args:
    segment_ids: Segment of each token, which is one run of places; 0 is padding.
    branch_ids: Branch of each token, which is one run of places of its segment: 0 is the prompt,
      1.. its completions; None: one branch in every segment.
    positions: Position of each token in prompt + completion, which rises by 1 within a run; needed
      with a window only. Places in the row would be wrong: other completions may be between a
      completion and its prompt.
    window: Number of tokens that a token sees, itself included; None: all.
  """
  ends = _is_last(segment_ids)
  until = own = end = _next(ends)
  if branch_ids is not None:
    own = _next(ends | _is_last(branch_ids))
    until = jnp.where(branch_ids == 0, end, own)
  until = jnp.where(segment_ids == 0, 0, until)
  if window is None:
    return Visible(until)
  assert positions is not None, "a window needs positions"
  window = jnp.minimum(window, WHOLE)
  # A window that ends within the token's own run ends at a place. That is what leaves tiles out
  # whose positions are mixed, since a tile of queries may hold the ends of several completions.
  last = jnp.arange(until.shape[1])[None] + window
  until = jnp.where(last <= own, jnp.minimum(until, last), until)
  return Visible(until, positions, positions + window)


def mask(seen: Visible) -> Bool[Array, "B T S"]:
  """Returns the whole mask: True where a query (second axis) attends to a key (third axis)."""
  queries, keys = _places(seen)
  return pairs(queries, keys, seen.until, seen.positions, seen.limit)


def _places(seen: Visible) -> tuple[Array, Array]:
  """Returns the places of the queries and of the keys, [T] or [B T]."""
  if seen.places is not None:
    return seen.places
  places = jnp.arange(seen.until.shape[1])
  return places, places


def pairs(
  queries: Int[Array, "*B q"],
  keys: Int[Array, "*B k"],
  until: Int[Array, "B k"],
  positions: Int[Array, "B q"] | None,
  limit: Int[Array, "B k"] | None,
) -> Bool[Array, "B q k"]:
  """Returns the mask of some queries and some keys.

  Args:
    queries: Places of the queries, the same in all rows or those of each.
    keys: Places of the keys, likewise.
    until: `Visible.until` of the keys.
    positions: `Visible.positions` of the queries.
    limit: `Visible.limit` of the keys.
  """
  queries, keys = jnp.atleast_2d(queries)[:, :, None], jnp.atleast_2d(keys)[:, None]
  allowed = (keys <= queries) & (queries < until[:, None])
  if limit is None:
    return allowed
  assert positions is not None, "a window needs positions"
  return allowed & (positions[..., None] < limit[:, None])


def live_tiles(
  seen: Visible, queries: int, keys: int
) -> tuple[Bool[Array, "B n m"], Bool[Array, "B n m"]]:
  """Returns which tiles hold a pair, and which hold all of theirs.

  A tile that holds no pair is never called whole. With a window a tile may be called live that is
  not, because positions are compared by their extremes, and likewise if a tile of a part holds
  places from several runs.

  Args:
    seen: Visibility of rows whose T and S the tile lengths divide.
    queries: Number of queries of a tile.
    keys: Number of keys of a tile.
  """
  by_keys = lambda x: x.reshape(x.shape[0], 1, -1, keys)
  by_queries = lambda x: x.reshape(x.shape[0], -1, 1, queries)
  of_queries, of_keys = (jnp.atleast_2d(places) for places in _places(seen))
  of_queries, of_keys, until = by_queries(of_queries), by_keys(of_keys), by_keys(seen.until)
  first_query, last_query = of_queries.min(-1), of_queries.max(-1)
  first_key, last_key = of_keys.min(-1), of_keys.max(-1)
  live = (first_key <= last_query) & (until.max(-1) > jnp.maximum(first_query, first_key))
  whole = (last_key <= first_query) & (until.min(-1) > last_query)
  if seen.limit is not None:
    assert seen.positions is not None
    limit, positions = by_keys(seen.limit), by_queries(seen.positions)
    live &= positions.min(-1) < limit.max(-1)
    whole &= positions.max(-1) < limit.min(-1)
  return live, live & whole


def padded(seen: Visible, length: int, queries: int | None = None) -> Visible:
  """Returns the visibility of rows with padding on the right, up to a length.

  Args:
    seen: Visibility of the rows.
    length: Number of keys with padding.
    queries: Number of queries with padding; None: as many.
  """
  queries = length if queries is None else queries

  def pad(x: Array | None, length: int, value: int = 0) -> Array | None:
    if x is None or x.shape[1] == length:
      return x
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1])), constant_values=value)

  until, limit = pad(seen.until, length), pad(seen.limit, length)
  found = seen._replace(until=until, limit=limit, positions=pad(seen.positions, queries))
  if seen.places is None:
    return found
  of_queries, of_keys = pad(seen.places.queries, queries, -1), pad(seen.places.keys, length)
  assert of_queries is not None and of_keys is not None
  return found._replace(places=Places(of_queries, of_keys))


def _is_last(ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
  """Returns whether a place is the last of a run of equal numbers."""
  differs = ids[:, 1:] != ids[:, :-1]
  return jnp.concatenate([differs, jnp.ones_like(ids[:, :1], bool)], axis=1)


def _next(is_last: Bool[Array, "B T"]) -> Int[Array, "B T"]:
  """Returns the place after the end of the run that each place is in."""
  length = is_last.shape[1]
  ends = jnp.where(is_last, jnp.arange(1, length + 1, dtype=jnp.int32)[None], length)
  return jax.lax.cummin(ends, axis=1, reverse=True)
