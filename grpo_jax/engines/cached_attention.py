"""Attention of the sampler's tokens to the keys and values in its cache. Pure.

`kv_cache` describes the cache, its pages, its ring and the tiles, and has the letters of sizes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from grpo_kernels import rounding
from grpo_kernels.attention import parts
from grpo_kernels.attention.parts import Partial
from jaxtyping import Array, Float, Int

from grpo_jax.engines.sampler_inputs import Pieces, ProgramOptions, RowStates

# Columns of the ring that one round of a loop reads when many tokens attend to them.
_COLUMNS_AT_ONCE = 1024


def tiles_at_once(rows: int, group: int) -> int:
  """Returns how many tiles one round of the loop over tiles computes: enough for about all rows."""
  return 1 << max((rows // group).bit_length() - 1, 0)


def max_tiles(rows: int, group: int) -> int:
  """Returns A, the most tiles that rows can form: a tile has two rows or more."""
  at_once = tiles_at_once(rows, group)
  return -(-max(rows // 2, 1) // at_once) * at_once


def over_tiles(
  asked: Float[Array, "R K r E"],
  found: Partial,
  pages: tuple[Array, Array],
  rows: RowStates,
  first: Int[Array, " R"] | None,
  options: ProgramOptions,
) -> Partial:
  """Adds the attention of rows that share their prompts to these prompts.

  Args:
    asked: Scaled queries, r for each key/value head.
    found: Partial softmax over the keys read before.
    pages: Pages of a layer, [N K T E].
    rows: State of the rows; the tiles are read.
    first: First position that each row sees; None: all.
    options: Options of the program; static.

  Returns:
    The partial softmax over the keys read before and those of the tiles.
  """
  if options.group == 1:
    return found
  count, kv_heads, repeats, width = asked.shape
  at_once = tiles_at_once(count, options.group)
  num_places = at_once * options.group
  places = jnp.asarray(rows.places)

  def add_some(i, found):
    part = lambda x, size: jax.lax.dynamic_slice_in_dim(jnp.asarray(x), i * size, size)
    tile_rows = part(rows.tile_rows, at_once)
    tiled = jnp.take(asked, tile_rows.reshape(-1), axis=0)
    tiled = tiled.reshape(at_once, options.group, kv_heads, repeats, width)
    tiled = tiled.transpose(0, 2, 1, 3, 4).reshape(at_once, kv_heads, -1, width)
    tables = part(rows.tile_pages, at_once), part(rows.tile_lengths, at_once)
    seen = for_queries(None if first is None else jnp.take(first, tile_rows), repeats)
    partial = over_pages(tiled, parts.nothing(tiled), pages, *tables, seen, options)
    here = places - i * num_places
    is_here = (here >= 0) & (here < num_places) & (places >= 0)

    def by_row(x):
      x = x.reshape(at_once, kv_heads, options.group, repeats, *x.shape[3:]).swapaxes(1, 2)
      x = x.reshape(num_places, kv_heads, repeats, *x.shape[4:])
      return jnp.take(x, jnp.clip(here, 0, num_places - 1), axis=0)

    partial = parts.only_where(is_here[:, None, None], jax.tree.map(by_row, partial))
    return parts.joined(found, partial)

  rounds = (jnp.max(places) + num_places) // num_places  # none if all are -1.
  return jax.lax.fori_loop(0, rounds, add_some, found)


def over_pages(
  asked: Float[Array, "B K m E"],
  found: Partial,
  pages: tuple[Array, Array],
  tables: Int[Array, "B W"],
  lengths: Int[Array, " B"],
  first: Int[Array, "B m"] | None,
  options: ProgramOptions,
) -> Partial:
  """Adds attention to the first `lengths` tokens of the pages that `tables` lists.

  Queries see the positions from `first` on; None: all.
  """
  size, at_once = pages[0].shape[2], options.pages_at_once
  inside = jnp.arange(at_once * size).reshape(at_once, size)
  contract = options.products.contract

  def add_some(i, found):
    table = jax.lax.dynamic_slice_in_dim(tables, i * at_once, at_once, axis=1)
    keys, values = (jnp.take(x, table, axis=0) for x in pages)
    place = i * at_once * size + inside
    allowed = place[None] < lengths[:, None, None]
    scores = contract("bkme,bnkpe->bkmnp", asked, keys)
    allowed = allowed[:, None, None]
    if first is not None:
      allowed = allowed & (place[None, None, None] >= first[:, None, :, None, None])
    mask = jnp.broadcast_to(allowed, scores.shape)
    flat = lambda x: x.reshape(*x.shape[:3], at_once * size)
    back = lambda x: x.reshape(*x.shape[:3], at_once, size)
    mix = lambda weights: contract("bkmnp,bnkpe->bkme", back(weights), values)
    return parts.joined(found, parts.softmax(flat(scores), flat(mask), mix, options.products))

  rounds = (jnp.max(lengths) + at_once * size - 1) // (at_once * size)
  return jax.lax.fori_loop(0, rounds, add_some, found)


def over_ring(
  asked: Float[Array, "R K r E"],
  ring: tuple[Array, Array],
  step: Int[Array, ""],
  lengths: Int[Array, " R"],
  window: int | None,
  options: ProgramOptions,
) -> Partial:
  """Attends to the last `lengths` + 1 columns of the ring, up to the column of the step.

  With a window, to the last `window` of these.
  """
  count = asked.shape[0]
  keys, values = ring
  blocks, columns = keys.shape[0], keys.shape[-1]
  rounded = functools.partial(rounding.rounded, dtype=options.products.compute_dtype)
  queries = rounded(asked)[..., None]

  def attend_to_block(index):
    row_wise = lambda x: x[:count].astype(jnp.float32)[:, :, None]  # [R K 1 ...]
    at = index % blocks
    age = (step - at * columns - jnp.arange(columns)) % (blocks * columns)
    scores = jnp.sum(queries * row_wise(_at(keys, at)), axis=-2)
    allowed = age[None] <= lengths[:, None]
    if window is not None:
      allowed = allowed & (age[None] < window)
    mix = lambda w: jnp.sum(rounded(w)[..., None] * row_wise(_at(values, at)), axis=-2)
    return parts.softmax(scores, allowed[:, None, None], mix, options.products)

  if blocks == 1:
    return attend_to_block(0)
  last = step // columns
  first = jnp.maximum((step - jnp.max(lengths)) // columns, last - blocks + 1)
  merge = lambda index, found: parts.joined(found, attend_to_block(index))
  return jax.lax.fori_loop(first, last + 1, merge, parts.nothing(asked))


def over_past(
  asked: Float[Array, "S K m E"],
  found: Partial,
  ring: tuple[Array, Array],
  pieces: Pieces,
  first: Int[Array, "S m"] | None,
  options: ProgramOptions,
) -> Partial:
  """Adds attention to the first `past` tokens of each piece's row in the ring.

  Queries see these tokens from number `first` on; None: all.
  """
  keys, values = ring
  blocks, columns = keys.shape[0], keys.shape[-1]
  width = _divisor(columns, at_most=_COLUMNS_AT_ONCE)
  count, contract = blocks * columns // width, options.products.contract
  rows, step = jnp.asarray(pieces.rows), jnp.asarray(pieces.step)
  lengths, past = jnp.asarray(pieces.lengths), jnp.asarray(pieces.past)

  def columns_of(x, at, axis):
    """Returns some columns of the rows of the pieces."""
    x = _at(x, at * width // columns)
    x = jax.lax.dynamic_slice_in_dim(x, at * width % columns, width, axis)
    return jnp.take(x, rows, axis=0)

  def add_some(index, found):
    at = index % count
    age = (step - 1 - at * width - jnp.arange(width)) % (blocks * columns)
    number = lengths[:, None] - 1 - age[None]  # of the row's token in each column.
    allowed = ((number >= 0) & (number < past[:, None]))[:, None, None]
    if first is not None:
      allowed = allowed & (number[:, None, None] >= first[:, None, :, None])
    scores = contract("bkme,bkec->bkmc", asked, columns_of(keys, at, -1))
    mask = jnp.broadcast_to(allowed, scores.shape)
    mix = lambda weights: contract("bkmc,bkce->bkme", weights, columns_of(values, at, -2))
    return parts.joined(found, parts.softmax(scores, mask, mix, options.products))

  last = (step - 1) // width
  oldest = jnp.maximum((step - jnp.max(lengths)) // width, last - count + 1)
  end = jnp.where(jnp.max(past) > 0, last + 1, oldest)
  return jax.lax.fori_loop(oldest, end, add_some, found)


def first_seen(positions: Int[Array, "..."], window: int | None) -> Int[Array, "..."] | None:
  """Returns the first position that each token sees; None: all positions are seen."""
  return None if window is None else positions - (window - 1)


def for_queries(first: Int[Array, "B n"] | None, repeats: int) -> Int[Array, "B m"] | None:
  """Repeats the first visible position for each query of a key/value head."""
  return None if first is None else jnp.repeat(first, repeats, axis=1)


def _divisor(number: int, *, at_most: int) -> int:
  """Returns the largest divisor of a number that is not above a limit."""
  return next(n for n in range(min(number, at_most), 0, -1) if number % n == 0)


def _at(x: Array, index: Any) -> Array:
  return x[0] if x.shape[0] == 1 else jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
