"""DPPO: masks tokens whose probability moved too far, instead of clipping ratios. Pure; per token.

A ratio says little about how far the policy moved: of a token of probability 1e-5 it may be 3
without any effect on the distribution, of a token of probability 0.99 it never exceeds 1.01. DPPO
measures the divergence between the two policies, each reduced to "this token" and "any other".
"""

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

from grpo_jax.rl import arrays
from grpo_jax.rl.numerics import MAX_LOG_RATIO, clamp, exp_held

_TINY = 1e-8  # of probabilities in a logarithm, as in verl.


def within_tv(
  policy_logprobs: Float[Array, "*shape"],
  old_logprobs: Float[Array, "*shape"],
  advantages: Float[Array, "*shape"],
  *,
  mask_low: float = 0.2,
  mask_high: float = 0.2,
) -> Bool[Array, "*shape"]:
  """Returns True on the tokens that are learned from, by the binary total variation.

      keep t  iff  πθ - π_old <= δ_high   where Âₜ > 0,   πθ - π_old >= -δ_low   else

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats.
    old_logprobs: Logprob log π_old of each token, in nats.
    advantages: Advantage Âₜ of each token; only the sign is used.
    mask_low: Bound δ_low of the fall of a probability.
    mask_high: Bound δ_high of its rise.

  Returns:
    One truth value for each token.

  Reference:
    Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv:2602.04879.
  """
  policy, old, advantages = arrays.loss_inputs(policy_logprobs, old_logprobs, advantages)
  arrays.number("mask_low", mask_low, low=0)
  arrays.number("mask_high", mask_high, low=0)
  moved = stop_gradient(jnp.exp(policy) - jnp.exp(old))
  return jnp.where(advantages > 0, moved <= mask_high, moved >= -mask_low)


def within_kl(
  policy_logprobs: Float[Array, "*shape"],
  old_logprobs: Float[Array, "*shape"],
  advantages: Float[Array, "*shape"],
  *,
  mask_low: float = 0.05,
  mask_high: float = 0.05,
) -> Bool[Array, "*shape"]:
  """Returns True on the tokens that are learned from, by the binary KL divergence.

      k = π_old log(π_old / πθ) + (1 - π_old) log((1 - π_old) / (1 - πθ))
      keep t  iff  k <= δ_high or πθ <= π_old   where Âₜ > 0,   k <= δ_low or πθ >= π_old   else

  1e-8 is added to both probabilities of "any other" token.

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats.
    old_logprobs: Logprob log π_old of each token, in nats.
    advantages: Advantage Âₜ of each token; only the sign is used.
    mask_low: Bound δ_low, in nats, of tokens whose probability fell.
    mask_high: Bound δ_high, in nats, of tokens whose probability rose.

  Returns:
    One truth value for each token.

  Reference:
    Qi et al. 2026, arXiv:2602.04879; verl's `dppo_kl`.
  """
  policy, old, advantages = map(
    stop_gradient, arrays.loss_inputs(policy_logprobs, old_logprobs, advantages)
  )
  arrays.number("mask_low", mask_low, low=0)
  arrays.number("mask_high", mask_high, low=0)
  others, old_others = -jnp.expm1(policy), -jnp.expm1(old)
  of_others = old_others * (jnp.log(old_others + _TINY) - jnp.log(others + _TINY))
  divergence = jnp.exp(old) * (old - policy) + of_others
  rose = (divergence <= mask_high) | (policy <= old)
  fell = (divergence <= mask_low) | (policy >= old)
  return jnp.where(advantages > 0, rose, fell)


def dppo_tv(
  policy_logprobs: Float[Array, "*shape"],
  old_logprobs: Float[Array, "*shape"],
  advantages: Float[Array, "*shape"],
  *,
  mask_low: float = 0.2,
  mask_high: float = 0.2,
  ratio_cap: float | None = None,
  kl_tau: float = 0.0,
) -> Float[Array, "*shape"]:
  """Computes the loss of DPPO-Binary-TV, to be minimised; see `masked_loss` and `within_tv`.

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats; the only differentiated input.
    old_logprobs: Logprob log π_old of each token, in nats, of the policy that the trust region is
      around; the engine's in prime-rl and in the paper.
    advantages: Advantage Âₜ of each token, constant over a completion in GRPO.
    mask_low: Bound of the fall of a probability: 0.2 in prime-rl, 0.15 in verl's recipe.
    mask_high: Bound of its rise: 0.2 in prime-rl, 0.15 in verl's recipe.
    ratio_cap: Bound c of the ratio; None: no bound.
    kl_tau: Coefficient τ of the squared log-ratio; 1e-3 in prime-rl.

  Returns:
    Loss ℓₜ of each token, before masking and before any reduction.

  Reference:
    Qi et al. 2026, arXiv:2602.04879; prime-rl's default loss; verl's `dppo_tv`.
  """
  keep = within_tv(
    policy_logprobs, old_logprobs, advantages, mask_low=mask_low, mask_high=mask_high
  )
  return masked_loss(
    policy_logprobs, old_logprobs, advantages, keep, ratio_cap=ratio_cap, kl_tau=kl_tau
  )


def dppo_kl(
  policy_logprobs: Float[Array, "*shape"],
  old_logprobs: Float[Array, "*shape"],
  advantages: Float[Array, "*shape"],
  *,
  mask_low: float = 0.05,
  mask_high: float = 0.05,
  ratio_cap: float | None = None,
  kl_tau: float = 0.0,
) -> Float[Array, "*shape"]:
  """Computes the loss of DPPO-Binary-KL, to be minimised; see `masked_loss` and `within_kl`.

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats; the only differentiated input.
    old_logprobs: Logprob log π_old of each token, in nats, of the policy that the trust region is
      around; the engine's in the paper.
    advantages: Advantage Âₜ of each token, constant over a completion in GRPO.
    mask_low: Bound of the divergence of tokens whose probability fell, in nats.
    mask_high: Bound of the divergence of tokens whose probability rose, in nats.
    ratio_cap: Bound c of the ratio; None: no bound.
    kl_tau: Coefficient τ of the squared log-ratio.

  Returns:
    Loss ℓₜ of each token, before masking and before any reduction.

  Reference:
    Qi et al. 2026, arXiv:2602.04879; verl's `dppo_kl`, with 0.05 in its recipe.
  """
  keep = within_kl(
    policy_logprobs, old_logprobs, advantages, mask_low=mask_low, mask_high=mask_high
  )
  return masked_loss(
    policy_logprobs, old_logprobs, advantages, keep, ratio_cap=ratio_cap, kl_tau=kl_tau
  )


def masked_loss(
  policy_logprobs: Float[Array, "*shape"],
  old_logprobs: Float[Array, "*shape"],
  advantages: Float[Array, "*shape"],
  keep: Bool[Array, "*shape"],
  *,
  ratio_cap: float | None = None,
  kl_tau: float = 0.0,
) -> Float[Array, "*shape"]:
  """Computes the surrogate of the tokens that are kept, and a penalty of all tokens.

      ℓₜ = -keepₜ ρₜ Âₜ + τ (log ρₜ)²                        without a cap, as prime-rl
      ℓₜ = -keepₜ sg[min(ρₜ, c)] Âₜ log πθ + τ (log ρₜ)²     with the cap c, as verl

  The gradient is (-keepₜ min(ρₜ, c) Âₜ + 2 τ log ρₜ) ∇log πθ in both: tokens above the cap keep
  theirs, which is why the capped form is that of REINFORCE.

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats; the only differentiated input.
    old_logprobs: Logprob log π_old of each token, in nats.
    advantages: Advantage Âₜ of each token.
    keep: True on the tokens whose surrogate is learned from.
    ratio_cap: Bound c of the ratio; None: no bound.
    kl_tau: Coefficient τ of the squared log-ratio ("Kimi-K2.5 KL").

  Returns:
    Loss ℓₜ of each token, before masking and before any reduction.

  Reference:
    The squared log-ratio: Kimi K2.5, arXiv:2602.02276.
  """
  policy, old, advantages = arrays.loss_inputs(policy_logprobs, old_logprobs, advantages)
  arrays.number("ratio_cap", ratio_cap, above=0)
  arrays.number("kl_tau", kl_tau, low=0)
  log_ratio = policy - stop_gradient(old)
  ratio = exp_held(log_ratio)
  if ratio_cap is None:
    surrogate = ratio * advantages
  else:
    weight = stop_gradient(jnp.minimum(ratio, jnp.asarray(ratio_cap, ratio.dtype)))
    surrogate = weight * advantages * policy
  loss = -jnp.where(arrays.mask(keep, surrogate.shape, "keep"), surrogate, 0)
  if not kl_tau:
    return loss
  return loss + kl_tau * jnp.square(clamp(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
