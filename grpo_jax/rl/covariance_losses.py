"""Clip-Cov and KL-Cov: losses that treat the tokens of largest covariance apart. Pure; per token.

The entropy of a policy falls fastest where log πθ and the advantage are large together. Which
tokens these are depends on all tokens of the optimizer step; `selection` finds them.
"""

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

from grpo_jax.rl import arrays, losses
from grpo_jax.rl.numerics import MAX_LOG_RATIO, clamp


def clip_cov(
  policy_logprobs: Float[Array, "*shape"],
  old_logprobs: Float[Array, "*shape"],
  advantages: Float[Array, "*shape"],
  selected: Bool[Array, "*shape"],
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
) -> Float[Array, "*shape"]:
  """Computes the Clip-Cov loss, to be minimised: the clipped surrogate, 0 on selected tokens.

      ℓₜ = 0 on the selected tokens,   -min(ρₜ Âₜ, clip(ρₜ, 1 - ε_low, 1 + ε_high) Âₜ) on others

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats; the only differentiated input.
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    advantages: Advantage Âₜ of each token, constant over a completion in GRPO.
    selected: True on the tokens that lose their gradient; see `selection.clip_cov`.
    clip_low: Bound ε_low of the clip, a distance from 1.
    clip_high: Bound ε_high of the clip, a distance from 1.

  Returns:
    Loss ℓₜ of each token, before masking and before any reduction.

  Reference:
    Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language
    Models", arXiv:2505.22617, section 4.2; verl's `clip_cov`.
  """
  surrogate = losses.clipped_surrogate(
    policy_logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high
  )
  return jnp.where(arrays.mask(selected, surrogate.shape, "selected"), 0, surrogate)


def kl_cov(
  policy_logprobs: Float[Array, "*shape"],
  old_logprobs: Float[Array, "*shape"],
  advantages: Float[Array, "*shape"],
  selected: Bool[Array, "*shape"],
  *,
  kl_cov_coef: float = 1.0,
) -> Float[Array, "*shape"]:
  """Computes the KL-Cov loss, to be minimised: a penalty on the selected tokens, and no clip.

      ℓₜ = -ρₜ Âₜ + β |log ρₜ| on the selected tokens,   -ρₜ Âₜ on others

  The gradient is (-ρₜ Âₜ + β sign(log ρₜ)) ∇log πθ on selected tokens; where ρ = 1, as in the
  first update on a batch, the penalty has none.

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats; the only differentiated input.
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    advantages: Advantage Âₜ of each token, constant over a completion in GRPO.
    selected: True on the tokens that are penalised; see `selection.kl_cov`.
    kl_cov_coef: Coefficient β of the penalty.

  Returns:
    Loss ℓₜ of each token, before masking and before any reduction.

  Reference:
    Cui et al. 2025, arXiv:2505.22617, section 4.3; verl's `kl_cov`.
  """
  policy, old, advantages = arrays.loss_inputs(
    policy_logprobs, old_logprobs, advantages, marks={"selected": selected}
  )
  arrays.number("kl_cov_coef", kl_cov_coef, low=0)
  log_ratio = policy - stop_gradient(old)
  held = clamp(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  # The gradient of `jnp.abs` at 0 is 1.
  penalty = kl_cov_coef * jnp.where(held > 0, held, jnp.where(held < 0, -held, 0))
  surrogate = -losses.ratio(policy, old) * advantages
  return surrogate + jnp.where(arrays.mask(selected, name="selected"), penalty, 0)
