"""Same as `reference`, by chunks of the vocabulary: logits [N V] never exist at once. Pure.

Runs on every platform. The forward pass keeps a running maximum, sum and
(for the entropy) first moment per token. The backward pass computes each
chunk's logits again, turns them into S = ∂/∂logits and uses two plain
matmuls: the chunk's rows of the head's gradient are written once, over
all tokens; the hidden's gradient is accumulated in float32. Chunks of tokens
instead would read and write the whole head's gradient once per chunk.
"""

import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_kernels import precision
from grpo_kernels.linear_logprobs import core, reference
from grpo_kernels.linear_logprobs.core import LOWEST, Settings, Statistics

# Logits alive at once: 16 MiB in float32, about a last-level cache ...
MAX_CHUNK_ELEMENTS = 1 << 22
MIN_WIDE_CHUNK = 4096  # ... unless that would make the matmuls narrower than this ...
MAX_CHUNK = 16384  # ... and never more columns than this.
MIN_CHUNKS = 4  # a small vocabulary is split too: no [N V] whatever the sizes.


def statistics(
  settings: Settings,
  hidden: Float[Array, "N D"],
  head: Float[Array, "_ _"],
  targets: Int[Array, " N"],
  columns: Int[Array, ""] | None,
) -> Statistics:
  """Returns maximum, sum, moment and target's logit of each token; see `core.Implementation`."""
  zeros = jnp.zeros(hidden.shape[0], jnp.float32)
  start = Statistics(zeros + LOWEST, zeros, zeros if settings.with_entropy else None, zeros)

  def visit(carry: Statistics, logits, first, _) -> Statistics:
    is_real = _is_real(logits.shape[1], first, columns)
    if is_real is not None:
      logits = jnp.where(is_real, logits, LOWEST)
    largest = jnp.maximum(carry.largest, jnp.max(logits, axis=-1))
    shifted = core.tempered(settings, logits - largest[:, None])
    weights = jnp.exp(shifted)
    if is_real is not None:
      weights = jnp.where(is_real, weights, 0.0)  # also where no column was real so far.
    change = core.tempered(settings, carry.largest - largest)
    scale = jnp.exp(change)
    moment = None
    if carry.moment is not None:
      # Moments about the running maximum: no difference of large numbers at the end.
      before = scale * (carry.moment + carry.total * change)
      moment = before + jnp.sum(weights * shifted, axis=-1)
    total = scale * carry.total + jnp.sum(weights, axis=-1)
    column = targets - first
    here = (column >= 0) & (column < logits.shape[1])
    if columns is not None:
      here &= targets < columns
    place = jnp.clip(column, 0, logits.shape[1] - 1)[:, None]
    chosen = jnp.take_along_axis(logits, place, axis=-1)[:, 0]
    return Statistics(largest, total, moment, jnp.where(here, chosen, carry.target))

  return _over_chunks(settings, visit, start, hidden, head)


def gradients(
  settings: Settings,
  hidden: Float[Array, "N D"],
  head: Float[Array, "_ _"],
  targets: Int[Array, " N"],
  columns: Int[Array, ""] | None,
  log_normaliser: tuple[Float[Array, " N"], Float[Array, " N"]],
  entropy: Float[Array, " N"] | None,
  of_logprobs: Float[Array, " N"],
  of_entropy: Float[Array, " N"] | None,
) -> tuple[Float[Array, "N D"], Float[Array, "_ _"] | None]:
  """Returns the cotangents of hidden (float32) and head; see `core.Implementation`.

  S is rounded to the dtype of `hidden` before its two matmuls.
  """
  largest, log_total = log_normaliser
  dot = functools.partial(
    jax.lax.dot_general,
    precision=precision.precision_of(hidden.dtype),
    preferred_element_type=jnp.float32,
  )

  def visit(carry, logits, first, weights):
    d_hidden, d_head = carry
    logprobs = core.tempered(settings, logits - largest[:, None]) - log_total[:, None]
    probabilities = jnp.exp(logprobs)
    is_real = _is_real(logits.shape[1], first, columns)
    if is_real is not None:
      probabilities = jnp.where(is_real, probabilities, 0.0)
    column = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    is_target = column == (targets - first)[:, None]
    slope = of_logprobs[:, None]
    if of_entropy is not None and entropy is not None:
      slope = slope + of_entropy[:, None] * (logprobs + entropy[:, None])
    d_logits = jnp.where(is_target, of_logprobs[:, None], 0.0) - probabilities * slope
    d_logits = (d_logits / settings.temperature).astype(hidden.dtype)
    d_hidden = d_hidden + dot(d_logits, weights, (((1,), (settings.vocab_axis,)), ((), ())))
    if d_head is None:
      return d_hidden, None
    pair = (d_logits, hidden) if settings.width_axis == 1 else (hidden, d_logits)
    d_weights = dot(*pair, (((0,), (0,)), ((), ()))).astype(d_head.dtype)
    d_head = jax.lax.dynamic_update_slice_in_dim(d_head, d_weights, first, settings.vocab_axis)
    return d_hidden, d_head

  start = (
    jnp.zeros(hidden.shape, jnp.float32),
    None if settings.head_is_frozen else jnp.zeros(head.shape, settings.dtype_of_gradient(head)),
  )
  return _over_chunks(settings, visit, start, hidden, head)


def chunk_size(tokens: int, vocabulary: int) -> int:
  """Returns the number of vocabulary columns to hold at once, for a number of tokens."""
  widest = min(MAX_CHUNK, max(MIN_WIDE_CHUNK, MAX_CHUNK_ELEMENTS // max(tokens, 1)))
  chunks = max(MIN_CHUNKS, -(-vocabulary // widest))
  chunk = max(1, -(-vocabulary // chunks))
  return chunk if chunk < 1024 else -(-chunk // 128) * 128


def _is_real(size: int, first, columns: Int[Array, ""] | None):
  """Returns which columns of a chunk are real, [1 size]; None if all are."""
  if columns is None:
    return None
  return (jnp.arange(size, dtype=jnp.int32) + first < columns)[None, :]


def _over_chunks(settings: Settings, visit: Callable, carry, hidden, head):
  """Folds `visit(carry, logits, first column, head chunk)` over the chunks of the vocabulary.

  Whole chunks are scanned; the rest of V, if any, is one shorter chunk after them.
  """
  vocabulary = head.shape[settings.vocab_axis]
  chunk = settings.vocab_chunk or chunk_size(hidden.shape[0], vocabulary)

  def one(carry, first, size: int):
    weights = jax.lax.dynamic_slice_in_dim(head, first, size, settings.vocab_axis)
    weights = weights.astype(hidden.dtype)
    logits = reference.dot(hidden, weights, head_layout=settings.head_layout)
    return visit(carry, logits, first, weights)

  whole = vocabulary // chunk
  firsts: Int[Array, " chunks"] = jnp.arange(whole, dtype=jnp.int32) * chunk
  if whole:
    carry, _ = jax.lax.scan(lambda carry, first: (one(carry, first, chunk), None), carry, firsts)
  rest = vocabulary - whole * chunk
  return one(carry, jnp.int32(whole * chunk), rest) if rest else carry


linear_logprobs = core.entry(sys.modules[__name__])
