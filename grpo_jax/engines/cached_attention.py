"""Attention of the sampler's tokens to the pages of prompts, for both forms of the cache. Pure.

`kv_cache` describes the pages and has the letters of sizes.
"""

import jax
import jax.numpy as jnp
from grpo_kernels.attention import parts
from grpo_kernels.attention.parts import Partial
from jaxtyping import Array, Float, Int

from grpo_jax.engines import stored_keys
from grpo_jax.engines.kv_cache import LayerCache
from grpo_jax.engines.sampler_inputs import ProgramOptions


def over_pages(
  asked: Float[Array, "B K m E"],
  found: Partial,
  pages: LayerCache,
  tables: Int[Array, "B W"],
  lengths: Int[Array, " B"],
  first: Int[Array, "B m"] | None,
  options: ProgramOptions,
) -> Partial:
  """Adds attention to the first `lengths` tokens of the pages that `tables` lists.

  Rounds end with the pages of the longest of `lengths`, however many pages a table has room for.
  Queries see the tokens from number `first` on; None: all. See `Tables.local`.
  """
  size, at_once = pages[0].shape[2], min(options.pages_at_once, tables.shape[1])
  tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % at_once)))
  inside = jnp.arange(at_once * size).reshape(at_once, size)
  contract = options.products.contract

  def add_some(i, found):
    table = jax.lax.dynamic_slice_in_dim(tables, i * at_once, at_once, axis=1)
    keys, values = jax.tree.map(lambda x: jnp.take(x, table, axis=0), pages)
    place = i * at_once * size + inside
    allowed = place[None] < lengths[:, None, None]
    scores = stored_keys.scores(contract, "bkme,bnkpe->bkmnp", asked, keys)
    allowed = allowed[:, None, None]
    if first is not None:
      allowed = allowed & (place[None, None, None] >= first[:, None, :, None, None])
    mask = jnp.broadcast_to(allowed, scores.shape)
    flat = lambda x: x.reshape(*x.shape[:3], at_once * size)
    back = lambda x: x.reshape(*x.shape[:3], at_once, size)
    mix = lambda w: stored_keys.mixed(contract, "bkmnp,bnkpe->bkme", back(w), values)
    return parts.joined(found, parts.softmax(flat(scores), flat(mask), mix, options.products))

  rounds = (jnp.max(lengths) + at_once * size - 1) // (at_once * size)
  return jax.lax.fori_loop(0, rounds, add_some, found)


def first_seen(positions: Int[Array, "..."], window: int | None) -> Int[Array, "..."] | None:
  """Returns the first position that each token sees; None: all positions are seen."""
  return None if window is None else positions - (window - 1)


def for_queries(first: Int[Array, "B n"] | None, repeats: int) -> Int[Array, "B m"] | None:
  """Repeats the first visible position for each query of a key/value head."""
  return None if first is None else jnp.repeat(first, repeats, axis=1)


def divisor(number: int, *, at_most: int) -> int:
  """Returns the largest divisor of a number that is not above a limit."""
  return next(n for n in range(min(number, at_most), 0, -1) if number % n == 0)
