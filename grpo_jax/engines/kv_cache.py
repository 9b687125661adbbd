"""The sampler's cache of keys and values: the layout of its arrays, and their changes. Pure.

* The keys and values of a prompt are stored once, in pages, for all completions of the prompt. The
  rows of a prompt form tiles, and each page is multiplied with all queries of its tile at once. A
  row that shares its prompt with no other row is in no tile and reads its pages itself.
* The keys and values of sampled tokens are stored in a ring. In every step all rows write to the
  same column, that of the step, so the n tokens of a row are in the last n columns.

The last token of the prompt is the first that a row feeds to the model, so pages hold the prompt
without it.

Sizes: R rows of the program, at most as many as the ring has; M blocks of C columns in the ring; N
pages of T tokens; W pages of the longest prompt; A tiles of G rows.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from grpo_jax.engines.sampler_inputs import ProgramOptions, RowStates

# Keys and values of every layer. Pages: [N K T E] each. Ring: [M R K E C] and [M R K C E], because
# products of a single query are sums over columns, which are fastest in these layouts.
Cache = list[tuple[Array, Array]]


def token_bytes(options: ProgramOptions) -> int:
  """Returns the bytes of the keys and values of one token."""
  config, dtype = options.config, options.products.compute_dtype
  return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def empty_ring(blocks: int, rows: int, length: int, options: ProgramOptions) -> Cache:
  """Returns a ring of zeros: `blocks` blocks of `length` columns, for `rows` rows."""
  config, dtype = options.config, options.products.compute_dtype
  keys = (blocks, rows, config.num_kv_heads, config.head_dim, length)
  values = (*keys[:3], length, config.head_dim)
  make = lambda shape: placed(jnp.zeros(shape, dtype), options, row_axis=1)
  return [(make(keys), make(values)) for _ in range(config.num_layers)]


def empty_pages(count: int, length: int, options: ProgramOptions) -> Cache:
  """Returns `count` pages of zeros, each for `length` tokens."""
  config = options.config
  shape = (count, config.num_kv_heads, length, config.head_dim)
  make = lambda: placed(jnp.zeros(shape, options.products.compute_dtype), options)
  return [(make(), make()) for _ in range(config.num_layers)]


def resize(
  cache: Cache, places: Int[Array, " n"], options: ProgramOptions, *, row_axis: int | None = None
) -> Cache:
  """Returns the blocks of a ring, or the pages, at `places`."""
  one = lambda x: placed(jnp.take(x, places, axis=0), options, row_axis=row_axis)
  return jax.tree.map(one, cache)


def append(
  ring: tuple[Array, Array],
  key: Float[Array, "R K E"],
  value: Float[Array, "R K E"],
  step: Int[Array, ""],
  options: ProgramOptions,
) -> tuple[Array, Array]:
  """Writes one token of every row into the column of the step."""
  keys, values = ring
  blocks, columns = keys.shape[0], keys.shape[-1]
  block, column = step // columns % blocks, step % columns
  write = jax.lax.dynamic_update_slice
  keys = write(keys, key.astype(keys.dtype)[None, ..., None], (block, 0, 0, 0, column))
  values = write(values, value.astype(values.dtype)[None, :, :, None], (block, 0, 0, column, 0))
  return placed(keys, options, row_axis=1), placed(values, options, row_axis=1)


def moved(ring: Cache, rows: RowStates) -> Cache:
  """Moves rows of the ring, one after another."""

  def move(i, ring):
    at, to = jnp.asarray(rows.moves)[i]
    # Not a slice: on a mesh it would bring all rows to every device.
    take = lambda x: jnp.take(x, at[None], axis=1, mode="clip")
    put = lambda x: jax.lax.dynamic_update_slice_in_dim(x, take(x), to, axis=1)
    return jax.tree.map(put, ring)

  return jax.lax.fori_loop(0, jnp.asarray(rows.num_moves), move, ring)


def placed(cache: Array, options: ProgramOptions, *, row_axis: int | None = None) -> Array:
  """Splits a cache's heads as the key projection is split, and rows over the other mesh axes.

  Queries are split the same way: otherwise the ring would move to them. Pages are copied to every
  device that may have a row of their prompt.
  """
  if options.mesh is None:
    return cache
  parts = math.prod(options.mesh.shape[axis] for axis in options.row_axes)
  if row_axis is None:
    spec = PartitionSpec(None, options.head_axis)
  else:
    is_even = cache.shape[row_axis] % parts == 0
    rows = options.row_axes if is_even else None
    spec = PartitionSpec(*[None] * row_axis, rows, options.head_axis)
  return jax.lax.with_sharding_constraint(cache, NamedSharding(options.mesh, spec))
