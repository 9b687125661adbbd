"""From logits to tokens and their logprobs. Pure.

One uniform number per token selects it by inverting the cumulative distribution in two levels, over
blocks of the vocabulary and then within one. That gives the normaliser for free, and needs neither
a random number per vocabulary entry nor a sort. `sample` makes two passes over the logits, and more
with filters; `sample_in_one_pass` is for accelerators, on which a pass takes as long as its bytes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from grpo_kernels.linear_logprobs import core
from grpo_kernels.truncation import keep
from jaxtyping import Array, Bool, Float, Int, UInt

__all__ = ["invert_cdf", "keep", "sample", "sample_in_one_pass", "uniforms"]

_BLOCK = 256  # vocabulary entries in a block of the two-level search.


def sample(
  logits: Float[Array, "B V"],
  uniforms: Float[Array, " B"],
  *,
  temperature: Float[Array, " B"],
  filters: tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]] | None = None,
  num_valid: int | None = None,
  report_truncated: bool | Bool[Array, " B"] = False,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
  """Samples one token per row, and returns it with its logprob.

      token = the first with Σ_{v ≤ token} p(v) > u,   p = softmax(logits / temperature)

  Args:
    logits: Logits in float32.
    uniforms: Random numbers u in [0, 1).
    temperature: Temperature of each row; 0 selects the most likely token (the first of equals),
      with its logprob at temperature 1.
    filters: Top-k, top-p and min-p of each row (see `keep`); None if no row has any, which
      saves their cost.
    num_valid: Number of valid ids. Larger ids (padding rows of the embedding) are never sampled,
      but count in the normaliser of the logprobs, as in the trainer's. None: all are valid.
    report_truncated: Whether to return the logprob under the distribution actually sampled,
      renormalised over the tokens that the filters keep, and not under the full softmax; for all
      rows, or for each.

  Returns:
    Token ids; their logprobs, in nats.
  """
  vocabulary = logits.shape[1]
  greedy = temperature == 0
  scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
  # -inf has probability 0: padding to whole blocks and invalid ids are never sampled.
  blocks = -(-vocabulary // _BLOCK)
  scaled = jnp.pad(scaled, ((0, 0), (0, blocks * _BLOCK - vocabulary)), constant_values=-jnp.inf)
  allowed = scaled
  if num_valid is not None:
    is_valid = jnp.asarray(np.arange(blocks * _BLOCK) < num_valid)[None]
    allowed = jnp.where(is_valid, scaled, -jnp.inf)
  block_max = jnp.max(allowed.reshape(-1, blocks, _BLOCK), axis=2)
  highest = jnp.max(block_max, axis=1)
  weights = jnp.exp(allowed - highest[:, None])
  kept = weights if filters is None else jnp.where(keep(weights, *filters), weights, 0.0)
  drawn = invert_cdf(kept, uniforms)
  token = jnp.where(greedy, _first_highest(allowed, block_max), drawn)

  everything = weights if num_valid is None else jnp.exp(scaled - highest[:, None])
  counted = everything
  if report_truncated is not False:
    counted = jnp.where((jnp.asarray(report_truncated) & ~greedy)[..., None], kept, everything)
  at_token = jnp.take_along_axis(scaled, token[:, None], axis=1)[:, 0]
  found = core.Statistics(highest, jnp.sum(counted, axis=1), None, at_token)
  logprobs, _ = core.outputs(core.Settings(), found)  # computed as in the trainer and the scorer.
  return token, logprobs


def sample_in_one_pass(
  logits: Float[Array, "B V"],
  uniforms: Float[Array, " B"],
  *,
  temperature: Float[Array, " B"],
  num_valid: int | None = None,
  report_truncated: bool = False,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
  """Returns what `sample` does without filters, to rounding.

  One reduction gives the highest logit of each block and the block's sum relative to it. What then
  is read of the logits is the chosen block.

  Args:
    logits: Logits in float32.
    uniforms: Random numbers u in [0, 1).
    temperature: Temperature of each row; 0 selects the most likely token.
    num_valid: Number of valid ids; None: all are valid.
    report_truncated: Whether larger ids do not count in the logprobs of drawn tokens.

  Returns:
    Token ids; their logprobs, in nats.
  """
  count, vocabulary = logits.shape
  greedy = temperature == 0
  scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
  blocks = -(-vocabulary // _BLOCK)
  padding = ((0, 0), (0, blocks * _BLOCK - vocabulary))
  allowed = jnp.pad(scaled, padding, constant_values=-jnp.inf)
  if num_valid is not None:
    is_valid = jnp.asarray(np.arange(blocks * _BLOCK) < num_valid)[None]
    allowed = jnp.where(is_valid, allowed, -jnp.inf)
  by_block = allowed.reshape(count, blocks, _BLOCK)
  block_max, block_sums = _highest_and_sums(by_block)
  highest = jnp.max(block_max, axis=1)
  sums = block_sums * jnp.exp(block_max - highest[:, None])
  ends = jnp.cumsum(sums, axis=1)
  target = uniforms * ends[:, -1]
  block = jnp.where(greedy, jnp.argmax(block_max, axis=1), _first_above(ends, sums, target))
  of_block = lambda x: jnp.take_along_axis(x, block[:, None], axis=1)[:, 0]
  within = jnp.take_along_axis(by_block, block[:, None, None], axis=1)[:, 0]
  weights, left = jnp.exp(within - highest[:, None]), target - (of_block(ends) - of_block(sums))
  place = _first_above(jnp.cumsum(weights, axis=1), weights, left)
  place = jnp.where(greedy, jnp.argmax(within, axis=1), place)

  total = jnp.sum(sums, axis=1)
  if num_valid is not None and num_valid < vocabulary:
    rest = jnp.sum(jnp.exp(scaled[:, num_valid:] - highest[:, None]), axis=1)
    total = total + (jnp.where(greedy, rest, 0.0) if report_truncated else rest)
  at_token = jnp.take_along_axis(within, place[:, None], axis=1)[:, 0]
  logprobs, _ = core.outputs(core.Settings(), core.Statistics(highest, total, None, at_token))
  return (block * _BLOCK + place).astype(jnp.int32), logprobs


def _highest_and_sums(
  x: Float[Array, "B n m"],
) -> tuple[Float[Array, "B n"], Float[Array, "B n"]]:
  """Returns max x and Σ exp(x - max x) over the last axis; -∞ counts as `core.LOWEST`."""
  x = jnp.maximum(x, core.LOWEST)  # so that no difference is ∞ - ∞.

  def join(one, other):
    (highest, total), (highest2, total2) = one, other
    fade = jnp.exp(-jnp.abs(highest - highest2))
    is_first = highest >= highest2
    total = jnp.where(is_first, total + total2 * fade, total * fade + total2)
    return jnp.maximum(highest, highest2), total

  start = (np.float32(core.LOWEST), np.float32(0))
  return tuple(jax.lax.reduce((x, jnp.ones_like(x)), start, join, (2,)))


def invert_cdf(weights: Float[Array, "B V"], uniforms: Float[Array, " B"]) -> Int[Array, " B"]:
  """Returns the first index at which the cumulative weight exceeds u times the total.

  Args:
    weights: Unnormalised probabilities, at least one positive per row; V a multiple of 256.
    uniforms: Random numbers u in [0, 1).

  Returns:
    Indices; the weight at an index is never 0, whatever the rounding.
  """
  blocks = weights.reshape(weights.shape[0], -1, _BLOCK)
  sums = jnp.sum(blocks, axis=2)
  ends = jnp.cumsum(sums, axis=1)
  target = uniforms * ends[:, -1]
  block = _first_above(ends, sums, target)
  in_block = lambda x: jnp.take_along_axis(x, block[:, None], axis=1)[:, 0]
  within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  left = target - (in_block(ends) - in_block(sums))
  return block * _BLOCK + _first_above(jnp.cumsum(within, axis=1), within, left)


def uniforms(seeds: UInt[Array, "B 2"], indices: Int[Array, " B"]) -> Float[Array, " B"]:
  """Returns u in [0, 1) for each row; u depends on the row's seed and the token's index only.

  Args:
    seeds: Seed of each request as (high, low) words of 32 bits.
    indices: Index of the token to be sampled within its completion.
  """
  one = lambda seed, index: jax.random.uniform(
    jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), index),
    dtype=jnp.float32,
  )
  return jax.vmap(one)(seeds, indices)


def _first_above(
  cumulative: Float[Array, "B n"], weights: Float[Array, "B n"], target: Float[Array, " B"]
) -> Int[Array, " B"]:
  """Returns the first index of weight > 0 whose cumulative weight exceeds the target."""
  places = jnp.arange(weights.shape[1])[None]
  first = jnp.sum(cumulative <= target[:, None], axis=1)[:, None]
  # Rounding may point past the end, or at a weight of 0: move on to the next weight > 0.
  after = jnp.min(jnp.where((weights > 0) & (places >= first), places, places.size), axis=1)
  last = jnp.max(jnp.where(weights > 0, places, 0), axis=1)
  return jnp.minimum(after, last).astype(jnp.int32)


def _first_highest(scores: Float[Array, "B V"], block_max: Float[Array, "B n"]) -> Int[Array, " B"]:
  """Returns argmax in two levels; over the whole row at once it is slow on CPUs."""
  block = jnp.argmax(block_max, axis=1)
  blocks = scores.reshape(scores.shape[0], -1, _BLOCK)
  within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  return (block * _BLOCK + jnp.argmax(within, axis=1)).astype(jnp.int32)
