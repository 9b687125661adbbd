"""The sampler's cache of keys and values: the layout of its arrays, and their changes. Pure.

* The keys and values of a prompt are stored once, in pages, for all completions of the prompt. The
  last token of the prompt is the first that a row feeds to the model, so pages hold the prompt
  without it. Layers of the same window use the same pages; `prompt_pages` says which.
* The keys and values of sampled tokens are stored by row, in one of two forms: `ring_cache` for
  CPUs, `row_cache` for accelerators. `cache_forms` chooses between them.
* `stored_keys` says how a key is stored, in which dtype. What moves, takes or places tokens maps
  over the arrays of it.
* A layer with a window keeps its window only: a new token takes the page or the column of one that
  no later token sees. What reads many tokens at once therefore reads before it writes.

Sizes: R rows of the program, at most as many as the cache has; C columns of a row; N pages of T
tokens; W pages of the longest prompt; G rows that share a prompt.
"""

import collections
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from grpo_jax.engines import stored_keys
from grpo_jax.engines.sampler_inputs import Pieces, ProgramOptions, RowStates
from grpo_jax.engines.stored_keys import Stored
from grpo_jax.models.config import ModelConfig

# Keys and values of a layer. Pages: [N K T E] each. Sampled tokens: see the forms.
LayerCache = tuple[Stored, Stored]
Cache = list[LayerCache]

WINDOW_MULTIPLE = 64  # columns of a window are rounded up to it, at most.


def token_bytes(options: ProgramOptions) -> dict[int | None, int]:
  """Returns the bytes of the keys and values of one token in all layers of each window."""
  config = options.config
  of_layer = 2 * config.num_kv_heads * stored_keys.head_bytes(options)
  layers = collections.Counter(kind.window for kind in config.kinds)
  return {window: count * of_layer for window, count in layers.items()}


def row_bytes(columns: int, options: ProgramOptions) -> int:
  """Returns the most bytes that a row of that many columns takes on a device that has it."""
  width = lambda window: held(columns, window, multiple=min(WINDOW_MULTIPLE, columns))
  taken = sum(width(window) * size for window, size in token_bytes(options).items())
  return taken // _parts(options.head_axis, options)


def fitting_rows(room: int, wanted: int, columns: int, options: ProgramOptions) -> int:
  """Returns how many of the wanted rows fit into `room` bytes of each device.

  If devices have parts of the wanted rows, they have equal parts of those that fit.
  """
  parts = _row_parts(wanted, options)
  return min(wanted, parts * (room // row_bytes(columns, options)))


def rows_of_device(rows: int, wanted: int, options: ProgramOptions) -> int:
  """Returns how many of some rows one device has, where all that are wanted may be in parts."""
  return -(-rows // _row_parts(wanted, options))


def _row_parts(wanted: int, options: ProgramOptions) -> int:
  """Returns the number of parts in which devices have the wanted rows; 1: each has all of them."""
  parts = _parts(options.row_axes, options)
  return 1 if wanted % parts else parts


def _parts(axes: Any, options: ProgramOptions) -> int:
  """Returns the number of parts into which mesh axes split an array."""
  if options.mesh is None:
    return 1
  names = (axes,) if isinstance(axes, str) else axes or ()
  return math.prod(options.mesh.shape[name] for name in names)


def held(columns: int, window: int | None, *, multiple: int) -> int:
  """Returns how many columns of a row a window leaves: all, or a multiple that holds it."""
  return columns if window is None else min(columns, -(-window // multiple) * multiple)


def stays(pieces: Pieces, columns: int) -> Bool[Array, " n"]:
  """Returns which tokens of pieces a layer with a window writes: those that its columns hold.

  Later tokens of the same row and call take the columns of the others. Padding is not written.
  """
  rows = jnp.asarray(pieces.rows)
  steps = jnp.asarray(pieces.steps).reshape(len(rows), -1)
  last = jnp.where(rows[:, None] == rows[None], jnp.max(steps, axis=1)[None], -1)
  last = jnp.max(last, axis=1, keepdims=True)  # of the row of each piece.
  return ((steps >= 0) & (steps > last - columns)).reshape(-1)


def windows(config: ModelConfig) -> tuple[int | None, ...]:
  """Returns the windows of the layers, in the order of their first use."""
  return tuple(dict.fromkeys(kind.window for kind in config.kinds))


def by_layer(of_windows: Sequence[Any], config: ModelConfig) -> list[Any]:
  """Returns for each layer what belongs to its window, of a sequence like `windows`."""
  found = dict(zip(windows(config), of_windows, strict=True))
  return [found[kind.window] for kind in config.kinds]


def empty_pages(counts: tuple[int, ...], length: int, options: ProgramOptions) -> Cache:
  """Returns pages of zeros, each for `length` tokens.

  Args:
    counts: Number of pages of the layers of each window.
    length: Tokens of a page.
    options: Options of the programs.
  """
  config = options.config

  def make(count):
    shape = (count, config.num_kv_heads, length, config.head_dim)
    return placed(stored_keys.empty(shape, options), options)

  return [(make(count), make(count)) for count in by_layer(counts, config)]


def other_pages(cache: Cache, places: Sequence[Int[Array, " _"]], options: ProgramOptions) -> Cache:
  """Returns the pages at `places`, which are given for each window."""
  found = by_layer(places, options.config)
  return [resize(layer, at, options) for layer, at in zip(cache, found, strict=True)]


def resize(
  layer: LayerCache,
  places: Int[Array, " n"],
  options: ProgramOptions,
  *,
  row_axis: int | None = None,
) -> LayerCache:
  """Returns the blocks of a layer's ring, or its pages, at `places`."""
  taken = jax.tree.map(lambda x: jnp.take(x, places, axis=0), layer)
  return placed(taken, options, row_axis=row_axis)


def moved(own: Cache, rows: RowStates, options: ProgramOptions, *, row_axis: int) -> Cache:
  """Moves rows of the caches of sampled tokens, one after another."""
  moves, count = jnp.asarray(rows.moves), jnp.asarray(rows.num_moves)
  split = rows_spec(jax.tree.leaves(own)[0].shape[row_axis], options)
  move = _moved_on_devices(row_axis, split, options) if split else _moved(row_axis)

  def body(i, own):
    at, to = moves[i]
    return jax.tree.map(lambda x: move(x, at, to), own)

  return jax.lax.fori_loop(0, count, body, own)


def _moved(row_axis: int) -> Any:
  """Returns a function that copies a row of an array to another row."""

  def move(x, at, to):
    row = jnp.take(x, at[None], axis=row_axis, mode="clip")
    return jax.lax.dynamic_update_slice_in_dim(x, row, to, axis=row_axis)

  return move


def _moved_on_devices(row_axis: int, split: tuple[str, ...], options: ProgramOptions) -> Any:
  """Returns the same for rows that are split: the compiler would bring all of them to each device.

  The device that has the row adds it to the zeros of the others.
  """
  spec = PartitionSpec(*[None] * row_axis, split, options.head_axis)

  def of_device(x, at, to):
    count = x.shape[row_axis]
    first = jax.lax.axis_index(split) * count
    is_here = lambda row: (row >= first) & (row < first + count)
    row_at = lambda row: jax.lax.dynamic_slice_in_dim(x, row - first, 1, axis=row_axis)
    row = jax.lax.psum(jnp.where(is_here(at), row_at(at), jnp.zeros((), x.dtype)), split)
    row = jnp.where(is_here(to), row, row_at(to))
    return jax.lax.dynamic_update_slice_in_dim(x, row, to - first, axis=row_axis)

  whole = PartitionSpec()
  return jax.shard_map(
    of_device, mesh=options.mesh, in_specs=(spec, whole, whole), out_specs=spec, check_vma=False
  )


def rows_spec(count: int, options: ProgramOptions) -> tuple[str, ...] | None:
  """Returns the mesh axes that split a number of rows; None: every device has all of them."""
  if options.mesh is None:
    return None
  parts = _parts(options.row_axes, options)
  return options.row_axes if parts > 1 and count % parts == 0 else None


def placed(cache: Any, options: ProgramOptions, *, row_axis: int | None = None) -> Any:
  """Splits a cache's heads as the key projection is split, and rows over the other mesh axes.

  Queries are split the same way: otherwise the ring would move to them. Pages are copied to every
  device that may have a row of their prompt.

  Args:
    cache: Array, or tree of arrays.
    options: Options of the programs.
    row_axis: Axis of rows; None: the first axis is of pages.
  """
  mesh = options.mesh
  if mesh is None:
    return cache

  def place(x):
    axes = [] if row_axis is None else [*[None] * row_axis, rows_spec(x.shape[row_axis], options)]
    spec = PartitionSpec(*(axes or [None]), options.head_axis)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

  return jax.tree.map(place, cache)
