"""Who attends to whom in packed rows, as one vector, and the tiles in which anybody does. Pure.

A row is a sequence of segments; a segment is a prompt, then its completions, each of which is one
run of places and is called a branch. Token q attends to token k if

    k ≤ q < until[k]      and, with a window,      position[q] < limit[k]

where `until` is the end of k's segment if k is of the prompt, else the end of k's branch, and 0 for
padding. So the mask of [T T] pairs is O(T) numbers, for trees of any shape. Kernels take it apart
into tiles of queries × keys: dead ones are skipped, whole ones need no mask.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

WHOLE = 2**30  # a window longer than any context; sums with a position stay in int32.


class Visible(NamedTuple):
  """Which keys each token of packed rows sees.

  Attributes:
    until: Place after the last token that sees each token; 0 for padding.
    positions: Position of each token in prompt + completion; None without a window.
    limit: First position that no longer sees each token; None without a window.
    tiles: Tiles of the implementation that was asked to prepare them; None: none were prepared.
  """

  until: Int[Array, "B T"]
  positions: Int[Array, "B T"] | None = None
  limit: Int[Array, "B T"] | None = None
  tiles: Any = None


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


def mask(seen: Visible) -> Bool[Array, "B T T"]:
  """Returns the whole mask: True where a query (second axis) attends to a key (third axis)."""
  places = jnp.arange(seen.until.shape[1])
  return pairs(places, places, seen.until, seen.positions, seen.limit)


def pairs(
  queries: Int[Array, " q"],
  keys: Int[Array, " k"],
  until: Int[Array, "B k"],
  positions: Int[Array, "B q"] | None,
  limit: Int[Array, "B k"] | None,
) -> Bool[Array, "B q k"]:
  """Returns the mask of some queries and some keys.

  Args:
    queries: Places of the queries.
    keys: Places of the keys.
    until: `Visible.until` of the keys.
    positions: `Visible.positions` of the queries.
    limit: `Visible.limit` of the keys.
  """
  queries, keys = queries[None, :, None], keys[None, None]
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
  not, because positions are compared by their extremes.

  Args:
    seen: Visibility of rows whose T both tile lengths divide.
    queries: Number of queries of a tile.
    keys: Number of keys of a tile.
  """
  rows, length = seen.until.shape
  by_keys = lambda x: x.reshape(rows, 1, length // keys, keys)
  by_queries = lambda x: x.reshape(rows, length // queries, 1, queries)
  until = by_keys(seen.until)
  first_key = jnp.arange(0, length, keys)[None, None]
  first_query = jnp.arange(0, length, queries)[None, :, None]
  last_key, last_query = first_key + keys - 1, first_query + queries - 1
  live = (first_key <= last_query) & (until.max(-1) > jnp.maximum(first_query, first_key))
  whole = (last_key <= first_query) & (until.min(-1) > last_query)
  if seen.limit is not None:
    assert seen.positions is not None
    limit, positions = by_keys(seen.limit), by_queries(seen.positions)
    live &= positions.min(-1) < limit.max(-1)
    whole &= positions.max(-1) < limit.min(-1)
  return live, live & whole


def padded(seen: Visible, length: int) -> Visible:
  """Returns the visibility of rows with padding on the right, up to a length."""
  missing = length - seen.until.shape[1]
  if not missing:
    return seen
  pad = lambda x: None if x is None else jnp.pad(x, ((0, 0), (0, missing)))
  return seen._replace(until=pad(seen.until), positions=pad(seen.positions), limit=pad(seen.limit))


def _is_last(ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
  """Returns whether a place is the last of a run of equal numbers."""
  differs = ids[:, 1:] != ids[:, :-1]
  return jnp.concatenate([differs, jnp.ones_like(ids[:, :1], bool)], axis=1)


def _next(is_last: Bool[Array, "B T"]) -> Int[Array, "B T"]:
  """Returns the place after the end of the run that each place is in."""
  length = is_last.shape[1]
  ends = jnp.where(is_last, jnp.arange(1, length + 1, dtype=jnp.int32)[None], length)
  return jax.lax.cummin(ends, axis=1, reverse=True)
