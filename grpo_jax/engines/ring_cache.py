"""The form of the cache for CPUs: sampled tokens in a ring, rows of a prompt in tiles. Pure.

* In every step all rows write to the same column of the ring, that of the step, so the n tokens of
  a row are in the last n columns. The ring of a layer with a window has as few blocks as hold it.
* The rows of a prompt form tiles, and each page is multiplied with all queries of its tile at once.
  A row that shares its prompt with no other row is in no tile and reads its pages itself.

Loops over blocks and pages run only as far as needed, which is cheap on a CPU. `cache_forms` says
what each function is for, and `kv_cache` has the letters of sizes; here the ring has M blocks of C
columns, and there are A tiles of G rows.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from grpo_kernels import rounding
from grpo_kernels.attention import parts
from grpo_kernels.attention.parts import Partial
from jaxtyping import Array, Float, Int

from grpo_jax.engines import cached_attention, kv_cache, stored_keys
from grpo_jax.engines.kv_cache import Cache, LayerCache
from grpo_jax.engines.sampler_inputs import Pieces, ProgramOptions, RowPrompts, RowStates, Tiles

# Columns of the ring that one round of a loop reads when many tokens attend to them.
_COLUMNS_AT_ONCE = 1024


def empty(blocks: int, rows: int, length: int, options: ProgramOptions) -> Cache:
  """Returns a ring of zeros: at most `blocks` blocks of `length` columns, for `rows` rows.

  Keys are [M R K E C] and values [M R K C E], because products of a single query are sums over
  columns, which are fastest in these layouts.
  """
  config = options.config

  def of_layer(window):
    shape = (held_blocks(blocks, window, length), rows, config.num_kv_heads)
    keys = stored_keys.empty((*shape, config.head_dim, length), options, axis=-2)
    values = stored_keys.empty((*shape, length, config.head_dim), options)
    return kv_cache.placed((keys, values), options, row_axis=1)

  return [of_layer(kind.window) for kind in config.kinds]


def held_blocks(blocks: int, window: int | None, length: int) -> int:
  """Returns the blocks of a layer, of at most `blocks`, each of `length` columns."""
  return kv_cache.held(blocks * length, window, multiple=length) // length


def grown(
  layer: LayerCache,
  places: Mapping[int, Int[Array, " M"]],
  window: int | None,
  blocks: int,
  length: int,
  options: ProgramOptions,
) -> LayerCache:
  """Returns a longer ring of a layer with the same tokens.

  Args:
    layer: The ring of the layer.
    places: Number of blocks of a longer ring → the block of the old one at each place.
    window: Window of the layer; static.
    blocks: Blocks of a layer without a window; static.
    length: Columns of a block; static.
    options: Options of the program; static.
  """
  count = held_blocks(blocks, window, length)
  is_same = count == layer[0].shape[0]
  return layer if is_same else kv_cache.resize(layer, places[count], options, row_axis=1)


def moved(own: Cache, rows: RowStates, options: ProgramOptions) -> Cache:
  """Moves rows, one after another."""
  return kv_cache.moved(own, rows, options, row_axis=1)


def attend(
  asked: Float[Array, "R K r E"],
  key: Float[Array, "R K E"],
  value: Float[Array, "R K E"],
  own: LayerCache,
  pages: LayerCache,
  prompts: RowPrompts,
  at: tuple[Int[Array, ""], Int[Array, " R"], Int[Array, " R"]],
  window: int | None,
  options: ProgramOptions,
) -> tuple[Float[Array, "R K r E"], LayerCache]:
  """Writes a token of every row; attends to its prompt and to its own tokens, this one included."""
  step, lengths, prompt_lengths = at
  own = append(own, key, value, step, options)
  first = cached_attention.first_seen(prompt_lengths + lengths, window)
  first = prompts.tables.local(first)
  found = over_ring(asked, own, step, lengths, window, options)
  alone = jnp.where(prompts.shared.places < 0, prompts.tables.local(prompt_lengths), 0)
  seen = cached_attention.for_queries(None if first is None else first[:, None], asked.shape[2])
  tables = jnp.asarray(prompts.tables.pages)
  found = cached_attention.over_pages(asked, found, pages, tables, alone, seen, options)
  found = over_tiles(asked, found, pages, prompts.shared, first, options)
  return found.mixed / found.total[..., None], own


def append(
  ring: LayerCache,
  key: Float[Array, "R K E"],
  value: Float[Array, "R K E"],
  step: Int[Array, ""],
  options: ProgramOptions,
) -> LayerCache:
  """Writes one token of every row into the column of the step."""
  keys, values = ring
  blocks, columns = keys.shape[0], keys.shape[-1]
  block, column = step // columns % blocks, step % columns
  write = jax.lax.dynamic_update_slice
  put = lambda to, new: write(to, new[None, ..., None], (block, 0, 0, 0, column))
  keys = jax.tree.map(put, keys, stored_keys.stored(key, options))
  put = lambda to, new: write(to, new[None, :, :, None], (block, 0, 0, column, 0))
  values = jax.tree.map(put, values, stored_keys.stored(value, options))
  return kv_cache.placed((keys, values), options, row_axis=1)


def write_again(
  ring: LayerCache,
  new: LayerCache,
  pieces: Pieces,
  window: int | None,
  options: ProgramOptions,
) -> LayerCache:
  """Writes the stored keys and values [n K E] of pieces into the columns of their steps."""
  blocks, columns = ring[0].shape[0], ring[0].shape[-1]
  steps, rows = jnp.asarray(pieces.steps), jnp.asarray(pieces.rows)
  # A token of padding goes to a block that does not exist.
  is_left_out = steps < 0 if window is None else ~kv_cache.stays(pieces, blocks * columns)
  block = jnp.where(is_left_out, blocks, steps // columns % blocks)
  column, row = steps % columns, jnp.repeat(rows, len(pieces.tokens) // len(rows))
  put = lambda to, new: to.at[block, row, :, :, column].set(new, mode="drop")
  keys = jax.tree.map(put, ring[0], new[0])
  put = lambda to, new: to.at[block, row, :, column].set(new, mode="drop")
  values = jax.tree.map(put, ring[1], new[1])
  return kv_cache.placed((keys, values), options, row_axis=1)


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
  pages: LayerCache,
  tiles: Tiles,
  first: Int[Array, " R"] | None,
  options: ProgramOptions,
) -> Partial:
  """Adds the attention of rows that share their prompts to these prompts.

  Args:
    asked: Scaled queries, r for each key/value head.
    found: Partial softmax over the keys read before.
    pages: Pages of a layer, [N K T E].
    tiles: The tiles.
    first: Number of the first token of its pages that each row sees; None: all.
    options: Options of the program; static.

  Returns:
    The partial softmax over the keys read before and those of the tiles.
  """
  if options.group == 1:
    return found
  count, kv_heads, repeats, width = asked.shape
  at_once = tiles_at_once(count, options.group)
  num_places = at_once * options.group
  places = jnp.asarray(tiles.places)

  def add_some(i, found):
    part = lambda x, size: jax.lax.dynamic_slice_in_dim(jnp.asarray(x), i * size, size)
    tile_rows = part(tiles.rows, at_once)
    tiled = jnp.take(asked, tile_rows.reshape(-1), axis=0)
    tiled = tiled.reshape(at_once, options.group, kv_heads, repeats, width)
    tiled = tiled.transpose(0, 2, 1, 3, 4).reshape(at_once, kv_heads, -1, width)
    tables = part(tiles.pages, at_once), part(tiles.lengths, at_once)
    seen = cached_attention.for_queries(
      None if first is None else jnp.take(first, tile_rows), repeats
    )
    nothing = parts.nothing(tiled)
    partial = cached_attention.over_pages(tiled, nothing, pages, *tables, seen, options)
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


def over_ring(
  asked: Float[Array, "R K r E"],
  ring: LayerCache,
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
  row_wise = lambda x: x.astype(jnp.float32)[:, :, None]  # [R K 1 ...]

  def product(_, x, y):
    x = rounding.rounded(x, options.products.compute_dtype)
    return jnp.sum(x[..., None] * row_wise(y), axis=-2)

  def attend_to_block(index):
    at = index % blocks
    of_rows = lambda x: _at(x, at)[:count]
    age = (step - at * columns - jnp.arange(columns)) % (blocks * columns)
    of_block = jax.tree.map(of_rows, keys)
    scores = stored_keys.scores(product, "rkme,rkec->rkmc", asked, of_block)
    allowed = age[None] <= lengths[:, None]
    if window is not None:
      allowed = allowed & (age[None] < window)

    def mix(weights):
      of_block = jax.tree.map(of_rows, values)
      return stored_keys.mixed(product, "rkmc,rkce->rkme", weights, of_block)

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
  ring: LayerCache,
  pieces: Pieces,
  first: Int[Array, "S m"] | None,
  options: ProgramOptions,
) -> Partial:
  """Adds attention to the first `past` tokens of each piece's row in the ring.

  Queries see these tokens from number `first` on; None: all. With a window the ring holds the last
  of these tokens, as it did when the next one was about to be written.
  """
  keys, values = ring
  blocks, columns = keys.shape[0], keys.shape[-1]
  width = cached_attention.divisor(columns, at_most=_COLUMNS_AT_ONCE)
  count, contract = blocks * columns // width, options.products.contract
  rows, step = jnp.asarray(pieces.rows), jnp.asarray(pieces.step)
  lengths, past = jnp.asarray(pieces.lengths), jnp.asarray(pieces.past)
  # Tokens that the ring has of each row, and the step after the last of them.
  held, now = (lengths, step[None]) if first is None else (past, step - lengths + past)

  def columns_of(x, at, axis):
    """Returns some columns of the rows of the pieces."""

    def take(x):
      x = _at(x, at * width // columns)
      x = jax.lax.dynamic_slice_in_dim(x, at * width % columns, width, axis)
      return jnp.take(x, rows, axis=0)

    return jax.tree.map(take, x)

  def add_some(index, found):
    at = index % count
    age = (now[:, None] - 1 - at * width - jnp.arange(width)[None]) % (blocks * columns)
    number = held[:, None] - 1 - age  # of the row's token in each column.
    allowed = ((number >= 0) & (number < past[:, None]))[:, None, None]
    if first is not None:
      allowed = allowed & (number[:, None, None] >= first[:, None, :, None])
    keys_here = columns_of(keys, at, -1)
    scores = stored_keys.scores(contract, "bkme,bkec->bkmc", asked, keys_here)
    mask = jnp.broadcast_to(allowed, scores.shape)
    spec, values_here = "bkmc,bkce->bkme", columns_of(values, at, -2)
    mix = lambda weights: stored_keys.mixed(contract, spec, weights, values_here)
    return parts.joined(found, parts.softmax(scores, mask, mix, options.products))

  last = (step - 1) // width
  oldest = jnp.maximum((step - jnp.max(lengths)) // width, last - count + 1)
  end = jnp.where(jnp.max(past) > 0, last + 1, oldest)
  return jax.lax.fori_loop(oldest, end, add_some, found)


def _at(x: Array, index: Any) -> Array:
  return x[0] if x.shape[0] == 1 else jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
