"""Attention within packed rows: the definition, with all scores at once, O(T²) memory. Pure."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_kernels.attention import parts, visible
from grpo_kernels.attention.core import NOTHING, Settings
from grpo_kernels.attention.visible import Visible


def prepare(seen: Visible, width: int) -> None:
  """Returns None: there are no tiles."""
  del seen, width


def forward(
  settings: Settings,
  q: Float[Array, "B T H E"],
  k: Float[Array, "B S K E"],
  v: Float[Array, "B S K E"],
  seen: Visible,
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
  """Returns output and log-sum-exp; see `core.Implementation`."""
  contract = settings.products.contract
  scores, mask = _scores(settings, q, k, seen)
  highest = jnp.maximum(jnp.max(jnp.where(mask, scores, NOTHING), axis=-1), NOTHING)
  shift = parts.softmax_shift(highest, settings.products)
  weights = jnp.where(mask, jnp.exp(scores - shift[..., None]), 0.0)
  total = jnp.sum(weights, axis=-1)
  mixed = contract("bkrts,bske->bkrte", weights, v)
  some = total > 0
  total = jnp.where(some, total, 1.0)
  log_sum = jnp.where(some, shift + jnp.log(total), NOTHING)
  return _heads_last(mixed / total[..., None]), log_sum.reshape(q.shape[0], q.shape[2], -1)


def backward(
  settings: Settings,
  q: Float[Array, "B T H E"],
  k: Float[Array, "B S K E"],
  v: Float[Array, "B S K E"],
  seen: Visible,
  log_sum: Float[Array, "B H T"],
  delta: Float[Array, "B H T"],
  g: Float[Array, "B T H E"],
) -> tuple[Float[Array, "B T H E"], Float[Array, "B S K E"], Float[Array, "B S K E"]]:
  """Returns the cotangents of queries, keys and values; see `core.Implementation`."""
  contract = settings.products.contract
  scores, mask = _scores(settings, q, k, seen)
  of_row = lambda x: x.reshape(*scores.shape[:-1], 1)
  weights = jnp.where(mask, jnp.exp(scores - of_row(log_sum)), 0.0)
  g = _by_kv_head(g, k.shape[2])
  slopes = weights * (contract("btkre,bske->bkrts", g, v) - of_row(delta))
  dq = contract("bkrts,bske->bkrte", slopes, k)
  dk = contract("bkrts,btkre->bske", slopes, _by_kv_head(q, k.shape[2]))
  return _heads_last(dq), dk, contract("bkrts,btkre->bske", weights, g)


def _scores(settings: Settings, q: Array, k: Array, seen: Visible) -> tuple[Array, Array]:
  """Returns scores [B K r T T], and the mask that broadcasts to them."""
  q = _by_kv_head(q, k.shape[2])
  scores = settings.products.contract("btkre,bske->bkrts", q, k)
  return scores, visible.mask(seen)[:, None, None]


def _by_kv_head(x: Float[Array, "B T H E"], kv_heads: int) -> Float[Array, "B T K r E"]:
  """Returns heads by the key/value head that they use."""
  batch, length, heads, width = x.shape
  return x.reshape(batch, length, kv_heads, heads // kv_heads, width)


def _heads_last(x: Float[Array, "B K r T E"]) -> Float[Array, "B T H E"]:
  """Returns what is by key/value head as heads of tokens."""
  batch, kv_heads, repeats, length, width = x.shape
  return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * repeats, width)
