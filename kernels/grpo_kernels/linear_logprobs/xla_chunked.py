"""As `reference`, by chunks of the vocabulary: logits [N V] never exist at once. Pure.

Runs on every platform. The forward pass keeps a running maximum, sum and
(for the entropy) first moment per token. The backward pass computes each
chunk's logits once more, turns them into S = ∂/∂logits and spends two plain
matmuls on it: the chunk's rows of the head's gradient are written once, over
all tokens; the hidden's gradient is accumulated in float32. Chunks of tokens
instead would read and write the whole head's gradient once per chunk.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_kernels.linear_logprobs import reference

MAX_CHUNK_ELEMENTS = (
  1 << 22
)  # logits alive at once: 16 MiB in float32, about a last-level cache ...
MIN_WIDE_CHUNK = 4096  # ... unless that would make the matmuls narrower than this ...
MAX_CHUNK = 16384  # ... and never more columns than this.
MIN_CHUNKS = 4  # a small vocabulary is split too: no [N V] whatever the sizes.


def linear_logprobs(
  hidden: Float[Array, "N D"],
  head: Float[Array, "_ _"],
  targets: Int[Array, " N"],
  *,
  head_layout: str = "vd",
  temperature: float = 1.0,
  return_entropy: bool = False,
  vocab_chunk: int | None = None,
) -> Float[Array, " N"] | tuple[Float[Array, " N"], Float[Array, " N"]]:
  """See `reference.linear_logprobs`, of which this is the memory-lean equal.

      S = [g (onehot_t - p) - gₑ p (log p + H)] / τ      dW = Sᵀh      dh = S W

  with cotangents g of the logprobs and gₑ of the entropy. S is rounded to the
  dtype of `hidden` before its two matmuls.

  Args:
    hidden: as in the reference.
    head: as in the reference.
    targets: as in the reference.
    head_layout: as in the reference.
    temperature: as in the reference.
    return_entropy: as in the reference; costs a few per cent more time.
    vocab_chunk: columns per chunk; None chooses by N and V.
  """
  vocabulary = head.shape[1 - reference.HEAD_AXIS_OF_WIDTH[head_layout]]
  settings = _Settings(
    head_layout=head_layout,
    temperature=temperature,
    with_entropy=return_entropy,
    chunk=vocab_chunk or chunk_size(hidden.shape[0], vocabulary),
  )
  outputs: Any = _logprobs(settings, hidden, head, targets)
  logprobs, entropy = outputs
  in_range = (targets >= 0) & (targets < vocabulary)
  logprobs = jnp.where(in_range, logprobs, jnp.nan)
  return (logprobs, entropy) if return_entropy else logprobs


def chunk_size(tokens: int, vocabulary: int) -> int:
  """Returns how many columns of the vocabulary to hold at once, for that many tokens."""
  widest = min(MAX_CHUNK, max(MIN_WIDE_CHUNK, MAX_CHUNK_ELEMENTS // max(tokens, 1)))
  chunks = max(MIN_CHUNKS, -(-vocabulary // widest))
  chunk = max(1, -(-vocabulary // chunks))
  return chunk if chunk < 1024 else -(-chunk // 128) * 128


@dataclasses.dataclass(frozen=True)
class _Settings:
  """What is static."""

  head_layout: str
  temperature: float
  with_entropy: bool
  chunk: int

  @property
  def vocab_axis(self) -> int:
    return 1 - reference.HEAD_AXIS_OF_WIDTH[self.head_layout]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(settings, hidden, head, targets) -> tuple[Array, Array | None]:
  """Returns (logprobs, entropy or None); the entry point of differentiation."""
  return _forward(settings, hidden, head, targets)[0]


def _forward(settings: _Settings, hidden, head, targets):
  """Returns the outputs and what the backward pass needs of them."""
  tokens = hidden.shape[0]
  zeros = jnp.zeros(tokens, jnp.float32)
  # Finite, so that the first rescaling is 0 · finite and not 0 · inf.
  start = jnp.full(tokens, jnp.finfo(jnp.float32).min / 2)

  def visit(carry, logits, first, _):
    largest, total, moment, target_logit = carry
    new = jnp.maximum(largest, jnp.max(logits, axis=-1))
    shifted = logits - new[:, None]
    weights = jnp.exp(shifted)
    scale = jnp.exp(largest - new)
    if settings.with_entropy:
      # Moments about the running maximum: no difference of large numbers at the end.
      moment = scale * (moment + total * (largest - new)) + jnp.sum(weights * shifted, axis=-1)
    total = scale * total + jnp.sum(weights, axis=-1)
    column = targets - first
    here = (column >= 0) & (column < logits.shape[1])
    place = jnp.clip(column, 0, logits.shape[1] - 1)[:, None]
    chosen = jnp.take_along_axis(logits, place, axis=-1)[:, 0]
    return new, total, moment, jnp.where(here, chosen, target_logit)

  carry = _over_chunks(settings, visit, (start, zeros, zeros, zeros), hidden, head)
  largest, total, moment, target_logit = carry
  log_total = jnp.log(total)
  logprobs = (target_logit - largest) - log_total
  entropy = log_total - moment / total if settings.with_entropy else None
  return (logprobs, entropy), (hidden, head, targets, largest, log_total, entropy)


def _backward(settings: _Settings, residuals, cotangents):
  """Returns the cotangents of hidden and head, each in the dtype of its input."""
  hidden, head, targets, largest, log_total, entropy = residuals
  of_logprobs, of_entropy = cotangents
  precision = reference.precision_of(hidden.dtype)
  width_axis = 1 - settings.vocab_axis
  dot = functools.partial(
    jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32
  )

  def visit(carry, logits, first, weights):
    d_hidden, d_head = carry
    logprobs = (logits - largest[:, None]) - log_total[:, None]
    column = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    is_target = column == (targets - first)[:, None]
    slope = of_logprobs[:, None]
    if settings.with_entropy:
      slope = slope + of_entropy[:, None] * (logprobs + entropy[:, None])
    d_logits = jnp.where(is_target, of_logprobs[:, None], 0.0) - jnp.exp(logprobs) * slope
    d_logits = (d_logits / settings.temperature).astype(hidden.dtype)
    d_hidden = d_hidden + dot(d_logits, weights, (((1,), (settings.vocab_axis,)), ((), ())))
    pair = (d_logits, hidden) if width_axis == 1 else (hidden, d_logits)
    d_weights = dot(*pair, (((0,), (0,)), ((), ()))).astype(head.dtype)
    d_head = jax.lax.dynamic_update_slice_in_dim(d_head, d_weights, first, settings.vocab_axis)
    return d_hidden, d_head

  start = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(head))
  d_hidden, d_head = _over_chunks(settings, visit, start, hidden, head)
  return d_hidden.astype(hidden.dtype), d_head, None


_logprobs.defvjp(_forward, _backward)


def _over_chunks(settings: _Settings, visit: Callable, carry, hidden, head):
  """Folds `visit(carry, logits, first column, head chunk)` over the chunks of the vocabulary.

  Whole chunks are scanned; the rest of V, if any, is one shorter chunk after them.
  """
  vocabulary = head.shape[settings.vocab_axis]

  def one(carry, first, size: int):
    weights = jax.lax.dynamic_slice_in_dim(head, first, size, settings.vocab_axis)
    weights = weights.astype(hidden.dtype)
    logits = reference.dot(hidden, weights, head_layout=settings.head_layout)
    if settings.temperature != 1.0:
      logits = logits / settings.temperature
    return visit(carry, logits, first, weights)

  whole = vocabulary // settings.chunk
  firsts: Int[Array, " chunks"] = jnp.arange(whole, dtype=jnp.int32) * settings.chunk
  if whole:
    carry, _ = jax.lax.scan(
      lambda carry, first: (one(carry, first, settings.chunk), None), carry, firsts
    )
  rest = vocabulary - whole * settings.chunk
  return one(carry, jnp.int32(whole * settings.chunk), rest) if rest else carry
