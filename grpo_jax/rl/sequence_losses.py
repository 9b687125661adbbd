"""Less common losses with one weight per completion. Pure; per token, unreduced.

GSPO, the common one, is in `losses`. Each takes (mask, sequence_ids); see `masks`.
"""

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.rl import arrays, losses, masks
from grpo_jax.rl.numerics import MAX_LOG_RATIO, clamp, exp_held


def gmpo(
  policy_logprobs: Float[Array, "B N"],
  old_logprobs: Float[Array, "B N"],
  advantages: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  sequence_ids: Int[Array, "B N"] | None = None,
  *,
  clip_low: float = 0.4,
  clip_high: float = 0.4,
) -> Float[Array, "B N"]:
  """Computes the GMPO loss, to be minimised: the geometric mean of clipped token ratios.

      dₜ = log πθ - log π_old
      d̄ₜ = min(dₜ, clip(dₜ, ±ε)) where Âᵢ > 0, max(dₜ, clip(dₜ, ±ε)) else
      ℓᵢₜ = -Âᵢ exp( 1/|oᵢ| Σₜ d̄ₜ )

  to be reduced by `aggregate.sequence_mean`. The clip applies to the *log*-ratio:
  -ε_low <= dₜ <= ε_high. The sign is that of the token's own advantage, which is
  constant over a completion.

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats; the only differentiated input.
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    advantages: Advantage Âₜ of each token, constant over a completion in GRPO.
    mask: True on the tokens that are learned from.
    sequence_ids: Sequence of each token within its row, 0 <= id < N; None: every row is one
      sequence.
    clip_low: Bound ε_low of the log-ratio, in nats.
    clip_high: Bound ε_high of the log-ratio, in nats.

  Returns:
    Loss ℓₜ of each token, before masking and before any reduction.

  Reference:
    Zhao et al. 2025, "Geometric-Mean Policy Optimization", arXiv:2507.20673, equation 4;
    verl's `geo_mean`.
  """
  policy, old, advantages = arrays.loss_inputs(
    policy_logprobs, old_logprobs, advantages, mask=mask, sequence_ids=sequence_ids
  )
  arrays.number("clip_low", clip_low, low=0)
  arrays.number("clip_high", clip_high, low=0)
  log_ratio = masks.fill(policy, mask) - masks.fill(stop_gradient(old), mask)
  clipped = clamp(log_ratio, -clip_low, clip_high)
  pessimistic = jnp.where(
    advantages > 0, jnp.minimum(log_ratio, clipped), jnp.maximum(log_ratio, clipped)
  )
  means = masks.sequence_means(pessimistic, mask, sequence_ids)
  geometric = masks.to_tokens(exp_held(means), mask, sequence_ids)
  return -masks.fill(advantages, mask) * geometric


def luspo(
  policy_logprobs: Float[Array, "B N"],
  old_logprobs: Float[Array, "B N"],
  advantages: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  sequence_ids: Int[Array, "B N"] | None = None,
  *,
  clip_low: float = 2e-3,
  clip_high: float = 2.5e-3,
) -> Float[Array, "B N"]:
  """Computes the LUSPO loss, to be minimised: GSPO's, times the length of the completion.

      ℓᵢₜ = -|oᵢ| min(sᵢ Âᵢ, clip(sᵢ, 1 - ε_low, 1 + ε_high) Âᵢ)

  to be reduced by `aggregate.sequence_mean`; it undoes GSPO's preference for
  short good and long bad completions.

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats; the only differentiated input.
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    advantages: Advantage Âₜ of each token, constant over a completion in GRPO.
    mask: True on the tokens that are learned from.
    sequence_ids: Sequence of each token within its row, 0 <= id < N; None: every row is one
      sequence.
    clip_low: Bound ε_low of the clip, a distance from 1, of the ratio of a completion.
    clip_high: Bound ε_high of the clip, a distance from 1, of the ratio of a completion.

  Returns:
    Loss ℓₜ of each token, before masking and before any reduction.

  Reference:
    Liu et al. 2026, "Length-Unbiased Sequence Policy Optimization", arXiv:2602.05261;
    TRL's `luspo`.
  """
  per_token = losses.gspo(
    policy_logprobs,
    old_logprobs,
    advantages,
    mask,
    sequence_ids,
    clip_low=clip_low,
    clip_high=clip_high,
  )
  lengths = masks.sequence_lengths(mask, sequence_ids, per_token.dtype)
  return per_token * masks.to_tokens(lengths, mask, sequence_ids)


def vespo(
  policy_logprobs: Float[Array, "B N"],
  old_logprobs: Float[Array, "B N"],
  advantages: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  sequence_ids: Int[Array, "B N"] | None = None,
  *,
  power_positive: float = 2.0,
  decay_positive: float = 3.0,
  power_negative: float = 3.0,
  decay_negative: float = 2.0,
) -> Float[Array, "B N"]:
  """Computes the VESPO loss, to be minimised: REINFORCE with a gamma-shaped sequence weight.

      wᵢ = exp( Σₜ (log πθ - log π_old) ),   φᵢ = e^λ wᵢᵏ e^(-λ wᵢ)
      ℓᵢₜ = -sg[φᵢ] Âᵢ log πθ(aₜ|sₜ)

  φ is 1 at w = 1 and decays to 0 on both sides; (k, λ) depend on the sign of the
  advantage. The gradient is -φᵢ Âᵢ ∇log πθ. Reduce it by the token mean.

  The w of the paper and of TRL is the ratio to the engine that sampled; here it is the
  ratio to `old_logprobs`, and a correction of the mismatch multiplies φ from outside.

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats; the only differentiated input.
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    advantages: Advantage Âₜ of each token, constant over a completion in GRPO.
    mask: True on the tokens that are learned from.
    sequence_ids: Sequence of each token within its row, 0 <= id < N; None: every row is one
      sequence.
    power_positive: Power k where the advantage is positive.
    decay_positive: Decay λ where the advantage is positive.
    power_negative: Power k where the advantage is not positive.
    decay_negative: Decay λ where the advantage is not positive.

  Returns:
    Loss ℓₜ of each token, before masking and before any reduction.

  Reference:
    Shen et al. 2026, VESPO, arXiv:2602.10693; TRL's `vespo`.
  """
  policy, old, advantages = arrays.loss_inputs(
    policy_logprobs, old_logprobs, advantages, mask=mask, sequence_ids=sequence_ids
  )
  policy = masks.fill(policy, mask)
  log_ratio = stop_gradient(policy) - masks.fill(stop_gradient(old), mask)
  totals = clamp(
    masks.sequence_totals(log_ratio, mask, sequence_ids), -MAX_LOG_RATIO, MAX_LOG_RATIO
  )
  log_weight = masks.to_tokens(totals, mask, sequence_ids)
  is_good = advantages > 0
  power = jnp.where(is_good, power_positive, power_negative).astype(policy.dtype)
  decay = jnp.where(is_good, decay_positive, decay_negative).astype(policy.dtype)
  phi = jnp.exp(decay + power * log_weight - decay * jnp.exp(log_weight))
  return -phi * masks.fill(advantages, mask) * policy
