"""Reductions of a per-token loss to a scalar. Pure; the caller supplies the denominators.

The denominators are those of the whole optimizer step (all microbatches, all
devices). The losses of the parts of a batch therefore *add up* to the loss of the
batch, and splitting, packing, padding or sharding it changes nothing. The divisor is
where published GRPO variants differ most; see docs/algorithms.md. Weights of completions are
factors of their losses ℓ, and their denominators are sums of weights.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Bool, Float, Int

from grpo_jax.rl import arrays, masks
from grpo_jax.rl.numerics import safe_divide
from grpo_jax.types import Denominators


def token_mean(
  losses: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  denominators: Denominators,
  sequence_ids: Int[Array, "B N"] | None = None,
) -> Float[Array, ""]:
  """Averages over all tokens, so that a long completion weighs more: Σᵢ Σₜ ℓᵢₜ / N_tokens.

  Args:
    losses: Loss ℓ of each token.
    mask: True on the tokens that are learned from.
    denominators: Counts of the whole optimizer step; only `tokens` is used.
    sequence_ids: Only its shape is checked; accepted so that all reductions have one signature.

  Returns:
    This part's share of the loss; 0 if the denominator is 0.

  Reference:
    DAPO, arXiv:2503.14476, equation 12 (there per group; over the step as in NeMo RL, TRL).
  """
  _check(losses, mask, denominators, sequence_ids)
  return safe_divide(masks.masked_sum(losses, mask), denominators.tokens)


def sequence_mean(
  losses: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  denominators: Denominators,
  sequence_ids: Int[Array, "B N"] | None = None,
) -> Float[Array, ""]:
  """Averages the token means of the completions: Σᵢ (Σₜ ℓᵢₜ / |oᵢ|) / N_sequences.

  |oᵢ| counts the unmasked tokens of completion i, all of which must be in
  one row; a completion without unmasked tokens counts in neither sum.

  Args:
    losses: Loss ℓ of each token.
    mask: True on the tokens that are learned from.
    denominators: Counts of the whole optimizer step; only `sequences` is used.
    sequence_ids: Sequence of each token within its row, 0 <= id < N; None: every row is one
      sequence.

  Returns:
    The share of these rows in the loss of the optimizer step, a scalar.

  Reference:
    Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, equation 3.
  """
  _check(losses, mask, denominators, sequence_ids)
  means = masks.sequence_means(losses, mask, sequence_ids)
  return safe_divide(means.sum(), denominators.sequences)


def constant_length(
  losses: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  denominators: Denominators,
  sequence_ids: Int[Array, "B N"] | None = None,
  *,
  max_completion_tokens: int,
) -> Float[Array, ""]:
  """Divides every completion by the same length: Σᵢ Σₜ ℓᵢₜ / (N_sequences · L_max).

  With L_max = 1 this is the mean over completions of their token *sum*. TRL's
  `dr_grpo` is the same; verl's `seq-mean-token-sum-norm` does not divide by N_sequences.

  Args:
    losses: Loss ℓ of each token.
    mask: True on the tokens that are learned from.
    denominators: Counts of the whole optimizer step; only `sequences` is used.
    sequence_ids: Only its shape is checked; accepted so that all reductions have one signature.
    max_completion_tokens: L_max, in tokens; the same for every completion.

  Returns:
    The share of these rows in the loss of the optimizer step, a scalar.

  Reference:
    Liu et al. 2025, Dr. GRPO, arXiv:2503.20783, section 3.2 and listing 1.
  """
  _check(losses, mask, denominators, sequence_ids)
  arrays.number("max_completion_tokens", max_completion_tokens, low=1)
  total = masks.masked_sum(losses, mask)
  return safe_divide(total, denominators.sequences * float(max_completion_tokens))


def local_denominators(
  mask: arrays.Mask,
  sequence_ids: Int[Array, "B N"] | None = None,
  weights: Float[Array, "B N"] | None = None,
) -> Denominators:
  """Counts the tokens and completions of one part; the parts' counts add up to the step's.

  Args:
    mask: True on the tokens that are learned from.
    sequence_ids: Sequence of each token within its row; None: every row is one sequence.
    weights: Weight of the completion, on each of its tokens; None: all are 1.

  Returns:
    The sum of the weights of the tokens, and that of the completions that have a token.
  """
  arrays.tokens(mask=mask, sequence_ids=sequence_ids)
  if weights is not None:
    arrays.tokens(weights=weights, mask=mask, sequence_ids=sequence_ids)
    means = masks.sequence_means(weights, mask, sequence_ids)
    return Denominators(masks.masked_sum(weights, mask), means.sum())
  return Denominators(
    tokens=arrays.mask(mask).sum(dtype="float32"),
    sequences=masks.count_sequences(mask, sequence_ids),
  )


def check_denominators(denominators: Any) -> None:
  """Raises ValueError for denominators of another type, such as one number."""
  if not isinstance(denominators, Denominators):
    raise ValueError(
      "denominators must be types.Denominators, which aggregate.local_denominators(mask) counts,"
      f" got {type(denominators).__name__}"
    )


def _check(losses: Any, mask: Any, denominators: Any, sequence_ids: Any) -> None:
  """Raises ValueError if the arrays have different shapes, or the denominators another type."""
  arrays.tokens(losses=losses, mask=mask, sequence_ids=sequence_ids)
  check_denominators(denominators)


AGGREGATIONS: dict[str, Callable[..., Float[Array, ""]]] = {
  "token_mean": token_mean,
  "sequence_mean": sequence_mean,
  "constant_length": constant_length,
}
