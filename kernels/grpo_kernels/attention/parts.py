"""Softmax over a part of the keys, to be joined with other parts. Pure.

For callers that have the keys in several places, such as a sampler with a cache: each part gives
three arrays, and two parts are joined without the keys.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from grpo_kernels.attention.core import Products

_LN2 = float(np.log(2.0))
MASKED = -1e30  # finite: a query that sees no key must not become NaN.


class Partial(NamedTuple):
  """A softmax over some of the keys; float32.

  Attributes:
    highest: Highest score, after `softmax_shift`, so that weights are rounded as in one softmax
      over all keys. `MASKED` if no key is allowed.
    total: Sum of the weights, Σ exp(score - highest).
    mixed: Weighted sum of the values, Σ exp(score - highest) value, with one more axis.
  """

  highest: Float[Array, "..."]
  total: Float[Array, "..."]
  mixed: Float[Array, "... E"]


def softmax_shift(highest: Float[Array, "..."], products: Products) -> Float[Array, "..."]:
  """Returns the number to subtract from scores before they are exponentiated.

  In float32 this is the highest score. If the weights are rounded to bfloat16 it is the next
  multiple of ln 2: weights for two such shifts differ by a power of two, which rounding preserves.
  So a sampler that sees the keys in parts rounds each weight as the trainer does.

  Args:
    highest: Highest of the scores, or of a part of them.
    products: Options of the product of weights and values.
  """
  if products.compute_dtype == jnp.float32:
    return highest
  return jnp.maximum(jnp.ceil(highest / _LN2) * _LN2, highest)


def softmax(
  scores: Float[Array, "... s"],
  allowed: Bool[Array, "..."],
  mix: Callable[[Float[Array, "... s"]], Float[Array, "... E"]],
  products: Products,
) -> Partial:
  """Returns the softmax over the keys of some scores.

  If no key is allowed, `highest` is `MASKED`, so that joining the result has no effect.

  Args:
    scores: Products of scaled queries with keys.
    allowed: Whether a query may see a key; broadcast to the scores.
    mix: Function from the weights to the weighted sums of the values.
    products: Options of the products in `mix`.
  """
  scores = jnp.where(allowed, scores, MASKED)
  highest = softmax_shift(jnp.max(scores, axis=-1), products)
  weights = jnp.exp(scores - highest[..., None])
  return Partial(highest, jnp.sum(weights, axis=-1), mix(weights))


def joined(one: Partial, other: Partial) -> Partial:
  """Returns the softmax over the keys of both."""
  highest = jnp.maximum(one.highest, other.highest)
  a, b = jnp.exp(one.highest - highest), jnp.exp(other.highest - highest)
  total = one.total * a + other.total * b
  return Partial(highest, total, one.mixed * a[..., None] + other.mixed * b[..., None])


def joined_along(found: Partial, axis: int) -> Partial:
  """Returns the softmax over the keys of all entries of an axis."""
  highest = jnp.max(found.highest, axis=axis, keepdims=True)
  scale = jnp.exp(found.highest - highest)
  return Partial(
    jnp.squeeze(highest, axis),
    jnp.sum(found.total * scale, axis=axis),
    jnp.sum(found.mixed * scale[..., None], axis=axis),
  )


def nothing(queries: Float[Array, "... E"]) -> Partial:
  """Returns the softmax of queries over no keys."""
  zeros = jnp.zeros(queries.shape, jnp.float32)
  return Partial(jnp.full(queries.shape[:-1], MASKED, jnp.float32), zeros[..., 0], zeros)


def only_where(condition: Bool[Array, "..."], partial: Partial) -> Partial:
  """Returns a softmax over no keys where the condition is False."""
  return partial._replace(highest=jnp.where(condition, partial.highest, MASKED))


def scaled(q: Float[Array, "B T H E"], kv_heads: int) -> Float[Array, "B T K r E"]:
  """Returns queries divided by √E, by the key/value head that they use."""
  batch, length, heads, width = q.shape
  return q.reshape(batch, length, kv_heads, heads // kv_heads, width) * (width**-0.5)


def by_kv_head(q: Float[Array, "B T K r E"]) -> Float[Array, "B K m E"]:
  """Returns all queries of a key/value head side by side, m = T r."""
  batch, _, kv_heads, _, width = q.shape
  return q.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, width)


def by_token(partial: Partial, heads: int) -> Partial:
  """Returns [B T H] of a softmax of queries that `by_kv_head` arranged, [B K m]."""
  batch, kv_heads, count = partial.total.shape
  repeats = heads // kv_heads

  def of(x: Array) -> Array:
    x = x.reshape(batch, kv_heads, count // repeats, repeats, *x.shape[3:])
    return jnp.moveaxis(x, 1, 2).reshape(batch, count // repeats, heads, *x.shape[4:])

  return Partial(*(of(x) for x in partial))
