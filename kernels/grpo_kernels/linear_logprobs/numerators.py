"""The numerators of a softmax by a kernel, about a logit that is known before. Pure.

    E_v = exp((a_v - r) / τ)      p_v = E_v / Σ E

An online softmax corrects its sums whenever it meets a larger logit. Numerators that are in memory
cannot be corrected, so r has to be known before the product: the largest of the target's logit and
those of the first columns, or of the latter alone where reading single columns would copy the head
(`gathered_layouts` of a kernel). That is not the largest of all, and it need not be: bfloat16 has
the exponents of float32, so E is as exact as p if the largest is at most 2⁶⁰ times the one of r. If
it is not, which nothing excludes, the kernel runs once more with the largest that it found.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_kernels.linear_logprobs import core, reference
from grpo_kernels.linear_logprobs.core import LOWEST, Settings, Statistics

FIRST_COLUMNS = 128  # whose logits are computed before: a thousandth of the product.
# Powers of 2 by which a numerator may exceed 1. Sums of V numbers stay far below 2¹²⁷, and the
# gradient of the loss divided by them stays far above 2⁻¹²⁶.
MOST_POWERS = 60.0


class Numerators(NamedTuple):
  """The result of a kernel's pass over the columns of a head."""

  values: Float[Array, "M V"]  # E in bfloat16; rows beyond N mean nothing.
  largest: Float[Array, " N"]  # max a.
  statistics: Statistics  # about r, which takes the place of the largest; of E before rounding.


def numerators_of(
  kernels: Any,
  settings: Settings,
  hidden: Float[Array, "N D"],
  head: Float[Array, "_ _"],
  targets: Int[Array, " N"],
  columns: Int[Array, ""] | None,
  axis: str | None,
) -> Numerators:
  """Returns the numerators of this device's columns; the rest is of the whole vocabulary.

  Args:
    kernels: Implementation with `numerators`, such as `mosaic_gpu`.
    settings: Static settings.
    hidden: Hidden states.
    head: This device's part of the head, in the dtype of the hidden states.
    targets: Token ids, counted from the first of these columns.
    columns: Number of real columns; None: all.
    axis: Mesh axis over which the vocabulary is split; None: it is not split. All its devices use
      the same r.
  """
  run = functools.partial(_run, kernels, settings, hidden, head, targets, columns)
  over = (lambda largest: largest) if axis is None else lambda x: jax.lax.pmax(x, axis)

  def about(references) -> Numerators:
    values, largest, statistics = run(references)
    return Numerators(values, over(largest), statistics)

  def exceeds(found: Numerators):
    excess = core.tempered(settings, found.largest - found.statistics.largest)
    return jnp.any(excess > MOST_POWERS * math.log(2))

  # One call in the program, for both runs: nothing was found yet, and everything exceeds that.
  nearby = _references(
    settings, hidden, head, targets, columns, settings.head_layout in kernels.gathered_layouts
  )
  nearby = over(nearby)
  shapes = jax.eval_shape(about, nearby)
  nothing = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes.statistics)
  nothing = nothing._replace(largest=jnp.full_like(nearby, LOWEST))
  values = jax.lax.empty(shapes.values.shape, shapes.values.dtype)
  found = jax.lax.while_loop(
    exceeds, lambda found: about(found.largest), Numerators(values, nearby, nothing)
  )
  if axis is None:
    return found
  reference, *sums = found.statistics
  return found._replace(statistics=Statistics(reference, *jax.lax.psum(sums, axis)))


def slopes(
  settings: Settings,
  found: Numerators,
  targets: Int[Array, " N"],
  logprobs: Float[Array, " N"],
  entropy: Float[Array, " N"],
  of_logprobs: Float[Array, " N"],
  of_entropy: Float[Array, " N"],
) -> Float[Array, "M V"]:
  """Returns ∂/∂logits from numerators, in their dtype; 0 after the last token.

      S = [g (onehot_t - p) - gₑ p (log p + H)] / τ      log p = log E - log Σ E

  E is rounded, and log E is off by as much. Where p is close to 1, log p + H is smaller than that,
  so the largest logits and the target's are taken from float32 numbers: their p is known.

  Args:
    settings: Static settings.
    found: Result of `numerators_of`.
    targets: Token ids, counted from the first of these columns.
    logprobs: Logprobs of the targets.
    entropy: Entropies H.
    of_logprobs: Derivatives g of the loss by the logprobs.
    of_entropy: Derivatives gₑ of the loss by the entropies.
  """
  g, g_entropy = of_logprobs / settings.temperature, of_entropy / settings.temperature
  reference, total, *_ = found.statistics
  top = core.tempered(settings, found.largest - reference)
  log_total = jnp.log(total)

  def of(logprobs):  # of a column that is not the target.
    return -jnp.exp(logprobs) * (g + g_entropy * (logprobs + entropy))

  size, columns = found.values.shape
  row = lambda x: jnp.pad(x, (0, size - x.shape[0]))[:, None]
  numerators = found.values.astype(jnp.float32)
  logs = jnp.log(jnp.maximum(numerators, jnp.finfo(jnp.float32).tiny))
  slope = row(g + g_entropy * (entropy - log_total)) + row(g_entropy) * logs
  result = row(-1 / total) * numerators * slope
  is_top = found.values >= row(jnp.exp(top).astype(found.values.dtype))
  result = jnp.where(is_top, row(of(top - log_total)), result)
  column = jax.lax.broadcasted_iota(jnp.int32, (1, columns), 1)
  return jnp.where(column == row(targets), row(of(logprobs) + g), result).astype(found.values.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(kernels, settings, hidden, head, targets, columns, references):
  """Returns what a kernel does: a function of its own, traced and lowered once for all chunks."""
  return kernels.numerators(settings, hidden, head, targets, columns, references)


def _references(
  settings: Settings, hidden, head, targets, columns, with_target: bool
) -> Float[Array, " N"]:
  """Returns the largest logit of each token among the first columns and, if wanted, its target."""
  axis = settings.vocab_axis
  size = head.shape[axis]
  first = jax.lax.slice_in_dim(head, 0, min(FIRST_COLUMNS, size), axis=axis)
  logits = reference.dot(hidden, first, head_layout=settings.head_layout)
  real = size if columns is None else columns
  column = jax.lax.broadcasted_iota(jnp.int32, (1, logits.shape[1]), 1)
  largest = jnp.max(jnp.where(column < real, logits, LOWEST), axis=1)
  if not with_target:
    return largest
  own = jnp.take(head, jnp.clip(targets, 0, size - 1), axis=axis)
  of_target = jnp.einsum(
    "nd,nd->n" if axis == 0 else "nd,dn->n", hidden, own, preferred_element_type=jnp.float32
  )
  of_target = jnp.where((targets >= 0) & (targets < real), of_target, LOWEST)
  return jnp.maximum(largest, of_target)
