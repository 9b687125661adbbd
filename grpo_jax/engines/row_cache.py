"""The form of the cache for accelerators: rows have columns, pages have readers. Pure.

* Token number j of a row is in column j of the row, keys and values [R K C E]; in column j mod C of
  a layer whose C columns hold its window.
* A page belongs to one prompt and has at most G readers, so one product of all pages where they lie
  with the queries of their readers is attention to the prompts. More rows of a prompt get a copy of
  its pages.

No loop of a decode step depends on data: the host would be asked before each round. `cache_forms`
says what each function is for, and `kv_cache` has the letters of sizes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from grpo_kernels import decode_attention
from grpo_kernels.attention import parts
from grpo_kernels.attention.parts import Partial
from grpo_kernels.implementations import chip_of, current_chip
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from grpo_jax.engines import cached_attention, kv_cache, stored_keys
from grpo_jax.engines.kv_cache import Cache, LayerCache
from grpo_jax.engines.sampler_inputs import Pieces, ProgramOptions, Readers, RowPrompts, RowStates

_KEYS = decode_attention.KEYS  # columns are a multiple of it, unless there are fewer.
# Columns that are read at once when many tokens attend to them.
_COLUMNS_AT_ONCE = 1024


def empty(blocks: int, rows: int, length: int, options: ProgramOptions) -> Cache:
  """Returns zeros [R K C E] for `rows` rows of at most `blocks` times `length` columns."""
  config = options.config

  def make(window):
    shape = (rows, config.num_kv_heads, held_columns(blocks * length, window), config.head_dim)
    return kv_cache.placed(stored_keys.empty(shape, options), options, row_axis=0)

  return [(make(kind.window), make(kind.window)) for kind in config.kinds]


def held_columns(columns: int, window: int | None) -> int:
  """Returns the columns of a layer, of at most `columns`."""
  return kv_cache.held(columns, window, multiple=min(_KEYS, columns))


def grown(
  layer: LayerCache,
  places: Any,
  window: int | None,
  blocks: int,
  length: int,
  options: ProgramOptions,
) -> LayerCache:
  """Returns a layer of `blocks` times `length` columns in which the first are as before."""
  del places  # columns that are too few for a window hold their tokens in order, as all others do.
  room = held_columns(blocks * length, window) - layer[0].shape[2]
  longer = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, room), (0, 0))), layer)
  return kv_cache.placed(longer, options, row_axis=0)


def moved(own: Cache, rows: RowStates, options: ProgramOptions) -> Cache:
  """Moves rows, one after another."""
  return kv_cache.moved(own, rows, options, row_axis=0)


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
  _, lengths, prompt_lengths = at
  columns, tables = own[0].shape[2], prompts.tables
  is_ring = _is_ring(columns, window)
  # A row that has ended may be full; what it writes is never read.
  lengths = lengths if is_ring else jnp.minimum(lengths, columns - 1)
  first = cached_attention.first_seen(prompt_lengths + lengths, window)
  # The kernel reads columns in the order of their tokens.
  if not is_ring and (kernel := _kernel(asked, own, pages, options)):
    begin = jnp.zeros_like(lengths) if first is None else tables.local(first)
    asked, key, value = (x.astype(options.products.compute_dtype) for x in (asked, key, value))
    held = jnp.asarray(tables.pages), tables.local(prompt_lengths)
    attend_on_device = _on_devices(kernel.attend, len(asked), options)
    return attend_on_device(asked, (key, value), own, pages, *held, lengths, begin)
  own = append(own, key, value, lengths % columns if is_ring else lengths, options)
  of_own = over_columns(asked, own, lengths, window, options)
  of_prompts = over_prompts(asked, pages, prompts.shared, first, options)
  found = parts.joined(of_own, of_prompts)
  return found.mixed / found.total[..., None], own


def _is_ring(columns: int, window: int | None) -> bool:
  """Says whether columns are taken again, because they hold a window."""
  return window is not None and columns >= window


def _kernel(asked: Array, own: LayerCache, pages: LayerCache, options: ProgramOptions) -> Any:
  """Returns the kernel of this chip for these arrays; None: the products below are used."""
  dtype = options.products.compute_dtype
  if stored_keys.dtype_of(options) != dtype:
    return None  # it reads the compute dtype.
  chip = current_chip()
  if options.mesh is not None:
    if asked.shape[0] != own[0].shape[0]:
      return None  # a device has other rows of the cache than of the program.
    chip = chip_of(options.mesh.devices.flat[0])
  _, _, queries, width = asked.shape
  tokens = pages[0].shape[2], own[0].shape[2]
  sizes = {"width": width, "queries": queries, "tokens": tokens}
  return decode_attention.kernel(options.attention.implementation, chip, dtype, **sizes)


def _on_devices(attend: Any, count: int, options: ProgramOptions) -> Any:
  """Returns a kernel's function as every device of the mesh runs it, on its part of `count` rows.

  The compiler cannot split a kernel. Nothing is exchanged: each device has all pages of its heads.
  """
  if options.mesh is None:
    return attend
  rows, heads = kv_cache.rows_spec(count, options), options.head_axis
  of_rows, of_heads, of_pages = (
    PartitionSpec(*axes) for axes in ((rows,), (rows, heads), (None, heads))
  )
  both = of_heads, of_heads
  return jax.shard_map(
    attend,
    mesh=options.mesh,
    in_specs=(of_heads, both, both, (of_pages, of_pages), *[of_rows] * 4),
    out_specs=(of_heads, both),
    check_vma=False,
  )


def append(
  own: LayerCache,
  key: Float[Array, "R K E"],
  value: Float[Array, "R K E"],
  places: Int[Array, " R"],
  options: ProgramOptions,
) -> LayerCache:
  """Writes one token of every row into the column at its place."""
  count, settings = key.shape[0], {"unique_indices": True, "indices_are_sorted": True}
  new = stored_keys.stored(key, options), stored_keys.stored(value, options)
  is_here = (jnp.arange(own[0].shape[2])[None] == places[:, None])[:, None, :, None]

  def put(to, new):
    if to.shape[-1] == 1:  # scales: a write of single numbers would pad them to tiles on a TPU.
      return to.at[:count].set(jnp.where(is_here, new[:, :, None], to[:count]))
    to = to.at[jnp.arange(count), :, places]
    return to.set(new, mode="promise_in_bounds", **settings)

  return kv_cache.placed(jax.tree.map(put, own, new), options, row_axis=0)


def over_columns(
  asked: Float[Array, "R K r E"],
  own: LayerCache,
  lengths: Int[Array, " R"],
  window: int | None,
  options: ProgramOptions,
) -> Partial:
  """Attends to the first `lengths` + 1 tokens of each row; with a window, to the last of these."""
  keys, values = jax.tree.map(lambda x: x[: asked.shape[0]], own)
  contract, column = options.products.contract, jnp.arange(keys.shape[2])
  if window is None:
    allowed = column[None] <= lengths[:, None]
  else:
    number = _numbers(lengths, len(column))
    allowed = (number >= 0) & (number > lengths[:, None] - window)
  scores = stored_keys.scores(contract, "rkme,rkce->rkmc", asked, keys)
  mix = lambda weights: stored_keys.mixed(contract, "rkmc,rkce->rkme", weights, values)
  return parts.softmax(scores, allowed[:, None, None], mix, options.products)


def _numbers(last: Int[Array, " R"], columns: int) -> Int[Array, "R C"]:
  """Returns the number of the token in each column of rows whose last token is number `last`.

  It is below 0 in a column that has none.
  """
  return last[:, None] - (last[:, None] - jnp.arange(columns)[None]) % columns


def over_prompts(
  asked: Float[Array, "R K r E"],
  pages: LayerCache,
  readers: Readers,
  first: Int[Array, " R"] | None,
  options: ProgramOptions,
) -> Partial:
  """Attends to the prompts of all rows: every page with the queries of its readers.

  Args:
    asked: Scaled queries, r for each key/value head.
    pages: Pages of a layer, [N K T E].
    readers: The rows that read each page.
    first: First position that each row sees; None: all.
    options: Options of the program; static.
  """
  keys, values = pages
  _, kv_heads, repeats, width = asked.shape
  rows, contract = jnp.asarray(readers.rows), options.products.contract
  count, group = rows.shape
  asked = kv_cache.placed(asked, options)  # on a mesh all rows move, and not each for each page.
  tiled = jnp.take(asked, rows, axis=0).transpose(0, 2, 1, 3, 4)
  tiled = tiled.reshape(count, kv_heads, group * repeats, width)
  place = jnp.arange(keys.shape[2])
  allowed = (place[None] < jnp.asarray(readers.lengths)[:, None])[:, None, None]
  if first is not None:
    seen = jnp.repeat(jnp.take(first, rows), repeats, axis=1)
    position = jnp.asarray(readers.starts)[:, None] + place[None]
    allowed = allowed & (position[:, None, None] >= seen[:, None, :, None])
  scores = stored_keys.scores(contract, "nkme,nkte->nkmt", tiled, keys)
  mix = lambda weights: stored_keys.mixed(contract, "nkmt,nkte->nkme", weights, values)
  found = parts.softmax(scores, allowed, mix, options.products)
  places = jnp.asarray(readers.places)

  def by_row(x):
    """[N K G·r ...] → [R W K r ...]."""
    x = x.reshape(count, kv_heads, group, repeats, *x.shape[3:]).swapaxes(1, 2)
    x = x.reshape(count * group, kv_heads, repeats, *x.shape[4:])
    return jnp.take(x, jnp.maximum(places, 0), axis=0)

  is_read = (places >= 0)[:, :, None, None]
  return parts.joined_along(parts.only_where(is_read, jax.tree.map(by_row, found)), axis=1)


def write_again(
  own: LayerCache,
  new: LayerCache,
  pieces: Pieces,
  window: int | None,
  options: ProgramOptions,
) -> LayerCache:
  """Writes the stored keys and values [n K E] of pieces into the columns of their tokens."""
  columns, rows = own[0].shape[2], jnp.asarray(pieces.rows)
  each = lambda x: jnp.repeat(jnp.asarray(x), len(pieces.tokens) // len(rows))
  number = jnp.asarray(pieces.positions) - each(pieces.prompt_lengths)
  # A token of padding goes to a column that does not exist.
  if window is None:
    column = jnp.where(jnp.asarray(pieces.steps) < 0, columns, number)
  else:
    column = jnp.where(kv_cache.stays(pieces, columns), number % columns, columns)

  def put(to, new):
    return to.at[each(rows), :, column].set(new, mode="drop")

  return kv_cache.placed(jax.tree.map(put, own, new), options, row_axis=0)


def over_past(
  asked: Float[Array, "S K m E"],
  found: Partial,
  own: LayerCache,
  pieces: Pieces,
  first: Int[Array, "S m"] | None,
  options: ProgramOptions,
) -> Partial:
  """Adds attention to the first `past` tokens of each piece's row.

  Queries see these tokens from number `first` on; None: all. Columns after the longest `past` are
  not read.
  """
  columns, contract = own[0].shape[2], options.products.contract
  width = cached_attention.divisor(columns, at_most=_COLUMNS_AT_ONCE)
  rows, past = jnp.asarray(pieces.rows), jnp.asarray(pieces.past)

  def add_some(i, found):
    part = lambda x: jax.lax.dynamic_slice_in_dim(x, i * width, width, axis=2)
    keys, values = jax.tree.map(lambda x: jnp.take(part(x), rows, axis=0), own)
    number = (i * width + jnp.arange(width))[None]
    if first is not None:
      number = jax.lax.dynamic_slice_in_dim(_numbers(past - 1, columns), i * width, width, axis=1)
    allowed = (number < past[:, None])[:, None, None]
    if first is not None:
      seen = jnp.maximum(first, 0)[:, None, :, None]
      allowed = allowed & (number[:, None, None] >= seen)
    scores = stored_keys.scores(contract, "bkme,bkce->bkmc", asked, keys)
    mask = jnp.broadcast_to(allowed, scores.shape)
    mix = lambda weights: stored_keys.mixed(contract, "bkmc,bkce->bkme", weights, values)
    return parts.joined(found, parts.softmax(scores, mask, mix, options.products))

  rounds = (jnp.minimum(jnp.max(past), columns) + width - 1) // width
  return jax.lax.fori_loop(0, rounds, add_some, found)
