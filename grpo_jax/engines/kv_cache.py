"""The sampler's cache of keys and values: the layout of its arrays, and their changes. Pure.

* The keys and values of a prompt are stored once, in pages, for all completions of the prompt. The
  last token of the prompt is the first that a row feeds to the model, so pages hold the prompt
  without it.
* The keys and values of sampled tokens are stored by row, in one of two forms: `ring_cache` for
  CPUs, `row_cache` for accelerators. `cache_forms` chooses between them.

Sizes: R rows of the program, at most as many as the cache has; C columns of a row; N pages of T
tokens; W pages of the longest prompt; G rows that share a prompt.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from grpo_jax.engines.sampler_inputs import ProgramOptions, RowStates

# Keys and values of every layer. Pages: [N K T E] each. Sampled tokens: see the forms.
Cache = list[tuple[Array, Array]]


def token_bytes(options: ProgramOptions) -> int:
  """Returns the bytes of the keys and values of one token."""
  config, dtype = options.config, options.products.compute_dtype
  return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


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


def moved(own: Cache, rows: RowStates, *, row_axis: int) -> Cache:
  """Moves rows of the caches of sampled tokens, one after another."""

  def move(i, own):
    at, to = jnp.asarray(rows.moves)[i]
    # Not a slice: on a mesh it would bring all rows to every device.
    take = lambda x: jnp.take(x, at[None], axis=row_axis, mode="clip")
    put = lambda x: jax.lax.dynamic_update_slice_in_dim(x, take(x), to, axis=row_axis)
    return jax.tree.map(put, own)

  return jax.lax.fori_loop(0, jnp.asarray(rows.num_moves), move, own)


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
