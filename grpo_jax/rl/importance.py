"""Weights for the mismatch between the engine that sampled and the trainer that learns. Pure.

The engine's logprobs (`behavior_logprobs`, μ) and the trainer's of the same
weights (`old_logprobs`) differ by numerics, quantisation, and by age if
sampling runs ahead. w = π_old / μ multiplies the policy loss. It carries no
gradient, because neither logprob depends on the live parameters. Bounds are
inclusive: a weight that lies on a bound is inside.
"""

import jax.numpy as jnp
from jax.core import Tracer
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.rl import arrays, masks
from grpo_jax.rl.numerics import clamp, exp_or_zero


def token_weights(
  old_logprobs: Float[Array, "*shape"], behavior_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """Computes wₜ = π_old(aₜ) / μ(aₜ) of each token; 0 where it is not finite."""
  old, behavior = arrays.tokens(old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs)
  return stop_gradient(exp_or_zero(old - behavior))


def sequence_weights(
  old_logprobs: Float[Array, "B N"],
  behavior_logprobs: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  sequence_ids: Int[Array, "B N"] | None = None,
  *,
  form: str = "sum",
) -> Float[Array, "B N"]:
  """Computes one weight per completion, given to each of its tokens; 0 where not finite.

      form "sum":   wᵢ = exp( Σₜ (log π_old - log μ) )           the exact ratio of completions
      form "mean":  wᵢ = exp( 1/|oᵢ| Σₜ (log π_old - log μ) )    its geometric mean per token

  The sum is unbiased, but its spread grows with the length of the completion; the mean is
  biased, with a spread that does not. NeMo RL, TRL and verl use the sum, AReaL the mean.

  Args:
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    behavior_logprobs: Logprob log μ of each token, in nats, as the engine reported it.
    mask: True on the tokens that are learned from.
    sequence_ids: Sequence of each token within its row, 0 <= id < N; None: every row is one
      sequence.
    form: "sum" or "mean".

  Returns:
    Weight wᵢ at every token of completion i; no gradient.

  Raises:
    ValueError: The form is unknown.
  """
  reductions = {"sum": masks.sequence_totals, "mean": masks.sequence_means}
  if form not in reductions:
    raise ValueError(f"no sequence weight of form {form!r}; there are {sorted(reductions)}")
  log_weight = _log_weights(old_logprobs, behavior_logprobs, mask, sequence_ids)
  per_sequence = exp_or_zero(reductions[form](log_weight, mask, sequence_ids))
  return stop_gradient(masks.to_tokens(per_sequence, mask, sequence_ids))


def truncate(
  weights: Float[Array, "*shape"], *, low: float = 0.0, high: float
) -> Float[Array, "*shape"]:
  """Clips weights to [low, high]: truncated importance sampling (TIS).

  A weight of exactly 0 marks a weight that no float can hold. It stays 0 and is not raised
  to `low`, so that the token is not learned from.

  Args:
    weights: Weights w of any shape, not negative.
    low: Lowest weight; smaller ones are raised to it.
    high: Highest weight; larger ones are lowered to it.

  Returns:
    The weights within the bounds.

  Reference:
    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"
    (fengyao.notion.site/off-policy-rl); NeMo RL's `tis`.
  """
  weights = _checked(weights, low, high)
  return jnp.where(weights == 0, 0, clamp(weights, low, high))


def zero_outside(
  weights: Float[Array, "*shape"], *, low: float = 0.0, high: float
) -> Float[Array, "*shape"]:
  """Keeps weights within [low, high] as they are and sets the others to 0 (IcePop, MIS).

  Args:
    weights: Weights w of any shape, not negative.
    low: Lowest weight that is kept, inclusive.
    high: Highest weight that is kept, inclusive.

  Returns:
    The weights; 0 outside the bounds.

  Reference:
    Ling Team 2025, "Every Step Evolves" (Ring-1T), arXiv:2510.18855, section 2.3.2;
    NeMo RL's `icepop`; TRL's `token_mask` and, of sequence weights, `sequence_mask`.
  """
  weights = _checked(weights, low, high)
  return jnp.where(is_within(weights, low=low, high=high), weights, 0)


def is_within(
  weights: Float[Array, "*shape"], *, low: float = 0.0, high: float
) -> Bool[Array, "*shape"]:
  """Returns True where low <= weight <= high.

  Args:
    weights: Weights w of any shape.
    low: Lowest weight, inclusive.
    high: Highest weight, inclusive.

  Returns:
    One truth value for each weight; False for NaN.
  """
  weights = _checked(weights, low, high)
  return (weights >= low) & (weights <= high)


def sequence_mask(
  old_logprobs: Float[Array, "B N"],
  behavior_logprobs: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  sequence_ids: Int[Array, "B N"] | None = None,
  *,
  low: float = 0.0,
  high: float,
) -> Bool[Array, "B N"]:
  """Returns True on the tokens of completions whose mean-form weight is within [low, high].

      keep i  iff  low <= exp( 1/|oᵢ| Σₜ (log π_old - log μ) ) <= high

  Tokens that are kept keep their token weight. Log-ratios that are not finite
  count as 0 in the mean. NeMo RL's `seq-mask-tis`, with bounds such as 0.999 and 1.002.

  Args:
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    behavior_logprobs: Logprob log μ of each token, in nats, as the engine reported it.
    mask: True on the tokens that are learned from.
    sequence_ids: Sequence of each token within its row, 0 <= id < N; None: every row is one
      sequence.
    low: Lowest weight of a completion that is kept, inclusive.
    high: Highest weight of a completion that is kept, inclusive.

  Returns:
    True on the tokens that are kept.
  """
  log_weight = _log_weights(old_logprobs, behavior_logprobs, mask, sequence_ids)
  log_weight = jnp.where(jnp.isfinite(log_weight), log_weight, 0)
  per_sequence = exp_or_zero(masks.sequence_means(log_weight, mask, sequence_ids))
  return is_within(masks.to_tokens(per_sequence, mask, sequence_ids), low=low, high=high)


def off_policy_sequence_mask(
  policy_logprobs: Float[Array, "B N"],
  behavior_logprobs: Float[Array, "B N"],
  advantages: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  sequence_ids: Int[Array, "B N"] | None = None,
  *,
  threshold: float,
) -> Bool[Array, "B N"]:
  """Returns False on bad completions that are far off the live policy (OPSM).

      drop i  iff  Âᵢ < 0  and  1/|oᵢ| Σₜ (log μ - log πθ) > δ

  Args:
    policy_logprobs: Logprob log πθ of each token; not differentiated here.
    behavior_logprobs: The engine's logprob log μ of each token.
    advantages: Advantage Âₜ of each token; only the sign is used.
    mask: True on the tokens that are learned from.
    sequence_ids: Sequence of each token; see `masks`.
    threshold: Threshold δ >= 0, in nats per token.

  Reference:
    DeepSeek-V3.2, arXiv:2512.02556, equation 9; TRL's `off_policy_mask_threshold`,
    slime's `--use-opsm`.
  """
  arrays.number("threshold", threshold, low=0)
  policy, behavior, advantages = arrays.tokens(
    policy_logprobs=policy_logprobs,
    behavior_logprobs=behavior_logprobs,
    advantages=advantages,
    mask=mask,
    sequence_ids=sequence_ids,
  )
  policy = masks.fill(stop_gradient(policy), mask)
  gap = masks.sequence_means(masks.fill(behavior, mask) - policy, mask, sequence_ids)
  is_far = masks.to_tokens(gap, mask, sequence_ids) > threshold
  return ~(is_far & (advantages < 0))


def seq_logprob_errors(
  old_logprobs: Float[Array, "B N"],
  behavior_logprobs: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  sequence_ids: Int[Array, "B N"] | None = None,
) -> Float[Array, "B N"]:
  """Computes the mean of e^|log μ - log π_old| over the tokens of each completion.

      eᵢ = 1/|oᵢ| Σₜ exp |log μ - log π_old|

  Args:
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    behavior_logprobs: Logprob log μ of each token, in nats, as the engine reported it.
    mask: True on the tokens that are learned from.
    sequence_ids: Sequence of each token within its row, 0 <= id < N; None: every row is one
      sequence.

  Returns:
    Error eᵢ at every token of completion i: 1 if the logprobs are equal; infinite if one of its
    tokens differs by more than a float can hold.
  """
  distance = jnp.abs(_log_weights(old_logprobs, behavior_logprobs, mask, sequence_ids))
  means = masks.sequence_means(jnp.exp(distance), mask, sequence_ids)
  return stop_gradient(masks.to_tokens(means, mask, sequence_ids))


def seq_logprob_error_mask(
  old_logprobs: Float[Array, "B N"],
  behavior_logprobs: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  sequence_ids: Int[Array, "B N"] | None = None,
  *,
  threshold: float,
) -> Bool[Array, "B N"]:
  """Returns False on completions whose logprobs differ too much between engine and trainer.

      keep i  iff  1/|oᵢ| Σₜ exp |log μ - log π_old| <= threshold

  A completion that is dropped counts in no denominator: count `mask & keep`.

  Args:
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    behavior_logprobs: Logprob log μ of each token, in nats, as the engine reported it.
    mask: True on the tokens that are learned from.
    sequence_ids: Sequence of each token within its row, 0 <= id < N; None: every row is one
      sequence.
    threshold: Largest error that is kept; 1 keeps equal logprobs only.

  Returns:
    True on the tokens that are kept; False where `mask` is False.

  Reference:
    NeMo RL's `seq_logprob_error_threshold`.
  """
  arrays.number("threshold", threshold, low=1)
  errors = seq_logprob_errors(old_logprobs, behavior_logprobs, mask, sequence_ids)
  return arrays.mask(mask) & (errors <= threshold)


def correction_weights(
  old_logprobs: Float[Array, "B N"],
  behavior_logprobs: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  sequence_ids: Int[Array, "B N"] | None = None,
  *,
  level: str = "token",
  truncation: str | None = None,
  low: float = 0.0,
  high: float = float("inf"),
) -> tuple[Float[Array, "B N"], Bool[Array, "B N"]]:
  """Computes the weight of each token's policy loss, and whether its weight was in bounds.

  Args:
    old_logprobs: The trainer's logprob log π_old of each token.
    behavior_logprobs: The engine's logprob log μ of each token.
    mask: True on the tokens that are learned from.
    sequence_ids: Sequence of each token; see `masks`.
    level: "token", "sequence" (sum form) or "sequence_mean"; "none" still computes the
      token weights, for the metrics.
    truncation: None, "tis" (`truncate`), "icepop" (`zero_outside`) or "seq_mask"
      (`sequence_mask`; tokens keep their token weight).
    low: Inclusive lower bound.
    high: Inclusive upper bound.

  Returns:
    The weights, and True where the (token's or completion's) weight was within the bounds.
  """
  if level in ("sequence", "sequence_mean"):
    form = "sum" if level == "sequence" else "mean"
    weights = sequence_weights(old_logprobs, behavior_logprobs, mask, sequence_ids, form=form)
  else:
    weights = stop_gradient(
      exp_or_zero(_log_weights(old_logprobs, behavior_logprobs, mask, sequence_ids))
    )
  if truncation == "tis":
    return truncate(weights, low=low, high=high), is_within(weights, low=low, high=high)
  if truncation == "icepop":
    return zero_outside(weights, low=low, high=high), is_within(weights, low=low, high=high)
  if truncation == "seq_mask":
    keep = sequence_mask(old_logprobs, behavior_logprobs, mask, sequence_ids, low=low, high=high)
    return jnp.where(keep, weights, 0), keep
  return weights, jnp.ones_like(arrays.mask(mask))


def _log_weights(
  old_logprobs: arrays.Numbers,
  behavior_logprobs: arrays.Numbers,
  mask: arrays.Mask,
  sequence_ids: Int[Array, "B N"] | None,
) -> Float[Array, "B N"]:
  """Returns log π_old - log μ of each token; 0 where the mask is False."""
  old, behavior = arrays.tokens(
    old_logprobs=old_logprobs,
    behavior_logprobs=behavior_logprobs,
    mask=mask,
    sequence_ids=sequence_ids,
  )
  return masks.fill(old, mask) - masks.fill(behavior, mask)


def _checked(weights: arrays.Numbers, low: float, high: float) -> Float[Array, "*shape"]:
  """Returns weights as floats.

  Raises:
    ValueError: The bounds are negative or reversed.
  """
  arrays.number("low", low, low=0)
  arrays.number("high", high, low=None if isinstance(low, Tracer) else low)
  return arrays.floats(weights, "weights")


LEVELS = ("none", "token", "sequence", "sequence_mean")
TRUNCATIONS = ("tis", "icepop", "seq_mask")
