"""Policy losses, KL estimates and the entropy bonus. Pure; per token, unreduced.

Conventions of this file:

* every loss is to be *minimised*;
* logprobs are natural logarithms at the sampling temperature; `policy_logprobs`
  is the only differentiated input, all others are constants;
* `clip_low` and `clip_high` are distances from 1: the bounds are 1 - clip_low and
  1 + clip_high, and a ratio that lies on a bound is not clipped;
* log-ratios are clamped to ±20 before they are exponentiated (as in verl), so that
  no float32 ratio is infinite; beyond that the token has no gradient;
* losses with one ratio per completion take (mask, sequence_ids); see `masks`.

Functions without a mask do not skip padding: pass finite values there
(`masks.fill`), because the gradient of a NaN survives a mask on the output.
"""

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.rl import arrays, masks
from grpo_jax.rl.kl import kl_k1, kl_k2, kl_k3, kl_penalty
from grpo_jax.rl.numerics import clamp, exp_held

__all__ = [
  "cispo",
  "clipped_ratio_loss",
  "clipped_surrogate",
  "entropy_bonus",
  "gspo",
  "kl_k1",  # for the KL estimators and their gradients see kl.py.
  "kl_k2",
  "kl_k3",
  "kl_penalty",
  "on_policy_ratio",
  "ratio",
  "reinforce",
  "sapo",
  "sequence_ratio",
  "sequence_ratio_token_form",
]


def ratio(
  policy_logprobs: Float[Array, "*shape"], old_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """Computes the importance ratio of each token, ρₜ = exp(log πθ - log π_old)."""
  policy, old = arrays.tokens(policy_logprobs=policy_logprobs, old_logprobs=old_logprobs)
  return exp_held(policy - stop_gradient(old))


def on_policy_ratio(policy_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """Returns exactly 1, with the gradient ∇log πθ: the ratio to the policy itself.

  It makes one update per batch strictly on-policy, even if the numerics of two
  passes differ (NeMo RL's `force_on_policy_ratio`).
  """
  policy = arrays.floats(policy_logprobs, "policy_logprobs")
  return jnp.exp(policy - stop_gradient(policy))


def sequence_ratio(
  policy_logprobs: Float[Array, "B N"],
  old_logprobs: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  sequence_ids: Int[Array, "B N"] | None = None,
) -> Float[Array, "B N"]:
  """Computes GSPO's ratio of each completion, at each of its tokens, in its sequence form.

      sᵢ = exp( 1/|oᵢ| Σₜ (log πθ - log π_old) )

  Each sᵢ carries the gradient of *all* tokens of the completion, divided by
  |oᵢ|; `sequence_ratio_token_form` has the same values.

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats; the only differentiated input.
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    mask: True on the tokens that are learned from.
    sequence_ids: Sequence of each token within its row, 0 <= id < N; None: every row is one
      sequence.

  Returns:
    Ratio sᵢ at every token of completion i.

  Reference:
    Zheng et al. 2025, GSPO, arXiv:2507.18071, equation 7.
  """
  given = {"mask": mask, "sequence_ids": sequence_ids}
  policy, old = arrays.tokens(policy_logprobs=policy_logprobs, old_logprobs=old_logprobs, **given)
  log_ratio = masks.fill(policy, mask) - masks.fill(stop_gradient(old), mask)
  means = masks.sequence_means(log_ratio, mask, sequence_ids)
  return masks.to_tokens(exp_held(means), mask, sequence_ids)


def sequence_ratio_token_form(
  policy_logprobs: Float[Array, "B N"],
  old_logprobs: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  sequence_ids: Int[Array, "B N"] | None = None,
) -> Float[Array, "B N"]:
  """Computes GSPO's ratio in its token form: the value sᵢ, the gradient of token t alone.

      sᵢₜ = sg[sᵢ] · πθ(aₜ) / sg[πθ(aₜ)]

  Reduced by the sequence mean, with one advantage and one weight per completion,
  its gradient equals that of the sequence form. The two differ if
  advantages or weights differ between the tokens of a completion: here each token
  then keeps its own.

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats; the only differentiated input.
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    mask: True on the tokens that are learned from.
    sequence_ids: Sequence of each token within its row, 0 <= id < N; None: every row is one
      sequence.

  Returns:
    Ratio sᵢₜ of each token.

  Reference:
    Zheng et al. 2025, GSPO, arXiv:2507.18071, equation 14 (GSPO-token).
  """
  value = sequence_ratio(stop_gradient(policy_logprobs), old_logprobs, mask, sequence_ids)
  return value * on_policy_ratio(masks.fill(policy_logprobs, mask))


def clipped_ratio_loss(
  ratio: Float[Array, "*shape"],
  advantages: Float[Array, "*shape"],
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
) -> Float[Array, "*shape"]:
  """Computes PPO's clipped loss from a ratio of any kind; see `clipped_surrogate`.

  Args:
    ratio: Ratio ρ of each token, differentiated.
    advantages: Advantage Âₜ of each token, constant over a completion in GRPO.
    clip_low: Bound ε_low of the clip, a distance from 1: 0.2 lets the ratio fall to 0.8 before it
      is clipped.
    clip_high: Bound ε_high of the clip, a distance from 1; larger than `clip_low` in DAPO's
      "clip-higher".
    dual_clip: Bound c > 1 for the loss of bad tokens that became much likelier; None: no bound.

  Returns:
    Loss ℓₜ of each token, before masking and before any reduction.
  """
  ratio, advantages = arrays.tokens(ratio=ratio, advantages=advantages)
  arrays.number("clip_low", clip_low, low=0, high=1)
  arrays.number("clip_high", clip_high, low=0)
  arrays.number("dual_clip", dual_clip, above=1)
  clipped = clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
  loss = -jnp.minimum(ratio * advantages, clipped * advantages)
  if dual_clip is None:
    return loss
  return jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)


def clipped_surrogate(
  policy_logprobs: Float[Array, "*shape"],
  old_logprobs: Float[Array, "*shape"],
  advantages: Float[Array, "*shape"],
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
) -> Float[Array, "*shape"]:
  """Computes the clipped surrogate loss of PPO and GRPO, to be minimised, per token.

      ρₜ = exp(log πθ(aₜ|sₜ) - log π_old(aₜ|sₜ))
      ℓₜ = -min(ρₜ Âₜ, clip(ρₜ, 1 - ε_low, 1 + ε_high) Âₜ)
      with dual clip, where Âₜ < 0:  ℓₜ = min(ℓₜ, -c Âₜ)

  The gradient is -ρₜ Âₜ ∇log πθ, and 0 where the clip is active: Âₜ > 0 and ρₜ > 1 +
  ε_high; Âₜ < 0 and ρₜ < 1 - ε_low; with dual clip also Âₜ < 0 and ρₜ > c.

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats; the only differentiated input.
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    advantages: Advantage Âₜ, constant over a completion in GRPO.
    clip_low: Bound ε_low of the clip, a distance from 1: 0.2 lets ρ fall to 0.8.
    clip_high: Bound ε_high of the clip; larger than `clip_low` in DAPO's "clip-higher".
    dual_clip: Bound c > 1 for the loss of bad tokens that became much likelier; TRL's
      `delta`, which caps ρ instead, gives the same numbers. None: off.

  Returns:
    Loss ℓₜ, before masking and before any reduction.

  Reference:
    Schulman et al. 2017, arXiv:1707.06347, equation 7; DAPO, arXiv:2503.14476,
    equation 10; dual clip: Ye et al. 2020, arXiv:1912.09729, equation 5.
  """
  policy, old, advantages = arrays.loss_inputs(policy_logprobs, old_logprobs, advantages)
  return clipped_ratio_loss(
    ratio(policy, old),
    advantages,
    clip_low=clip_low,
    clip_high=clip_high,
    dual_clip=dual_clip,
  )


def gspo(
  policy_logprobs: Float[Array, "B N"],
  old_logprobs: Float[Array, "B N"],
  advantages: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  sequence_ids: Int[Array, "B N"] | None = None,
  *,
  clip_low: float = 3e-4,
  clip_high: float = 4e-4,
  dual_clip: float | None = None,
  token_form: bool = False,
) -> Float[Array, "B N"]:
  """Computes the GSPO loss, to be minimised: the clipped loss of a completion's ratio.

      ℓᵢₜ = -min(sᵢ Âᵢ, clip(sᵢ, 1 - ε_low, 1 + ε_high) Âᵢ)

  to be reduced by `aggregate.sequence_mean`. `token_form` chooses between the two
  gradients; see `sequence_ratio` and `sequence_ratio_token_form`. verl computes the
  token form, TRL and NeMo RL the sequence form.

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats; the only differentiated input.
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    advantages: Advantage Âₜ of each token, constant over a completion in GRPO.
    mask: True on the tokens that are learned from.
    sequence_ids: Sequence of each token within its row, 0 <= id < N; None: every row is one
      sequence.
    clip_low: Bound ε_low of the clip, a distance from 1. Ratios of completions stay much closer to
      1 than those of tokens.
    clip_high: Bound ε_high of the clip, a distance from 1.
    dual_clip: Bound c > 1 for the loss of bad tokens that became much likelier; None: no bound.
    token_form: Whether to use the gradient of the token form.

  Returns:
    Loss ℓₜ of each token, before masking and before any reduction.

  Reference:
    Zheng et al. 2025, GSPO, arXiv:2507.18071, equations 5, 7 and 14.
  """
  policy, old, advantages = arrays.loss_inputs(
    policy_logprobs, old_logprobs, advantages, mask=mask, sequence_ids=sequence_ids
  )
  ratio_of = sequence_ratio_token_form if token_form else sequence_ratio
  return clipped_ratio_loss(
    ratio_of(policy, old, mask, sequence_ids),
    masks.fill(advantages, mask),
    clip_low=clip_low,
    clip_high=clip_high,
    dual_clip=dual_clip,
  )


def cispo(
  policy_logprobs: Float[Array, "*shape"],
  old_logprobs: Float[Array, "*shape"],
  advantages: Float[Array, "*shape"],
  *,
  clip_low: float = 1.0,
  clip_high: float = 4.0,
) -> Float[Array, "*shape"]:
  """Computes the CISPO loss, to be minimised: REINFORCE with a clipped, detached ratio.

      ℓₜ = -sg[clip(ρₜ, 1 - ε_low, 1 + ε_high)] Âₜ log πθ(aₜ|sₜ)

  No token loses its gradient, which is -clip(ρₜ) Âₜ ∇log πθ.

  Two conventions are published: here, in verl, slime and NeMo RL the clips are
  distances from 1; TRL's `epsilon_high` is the bound itself. TRL's
  5.0 is therefore clip_high = 4.0 with clip_low = 1.0 (no lower bound).

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats; the only differentiated input.
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    advantages: Advantage Âₜ of each token, constant over a completion in GRPO.
    clip_low: Bound ε_low of the clip, a distance from 1; 1 means no lower bound.
    clip_high: Bound ε_high of the clip, a distance from 1.

  Returns:
    Loss ℓₜ of each token, before masking and before any reduction.

  Reference:
    MiniMax-M1, arXiv:2506.13585, equations 4 and 5.
  """
  policy, old, advantages = arrays.loss_inputs(policy_logprobs, old_logprobs, advantages)
  arrays.number("clip_low", clip_low, low=0)
  arrays.number("clip_high", clip_high, low=0)
  clipped = clamp(ratio(policy, old), 1.0 - clip_low, 1.0 + clip_high)
  weight = stop_gradient(clipped)
  return -weight * advantages * policy


def sapo(
  policy_logprobs: Float[Array, "*shape"],
  old_logprobs: Float[Array, "*shape"],
  advantages: Float[Array, "*shape"],
  *,
  temperature_positive: float = 1.0,
  temperature_negative: float = 1.05,
) -> Float[Array, "*shape"]:
  """Computes the SAPO loss, to be minimised: a sigmoid gate instead of a hard clip.

      ℓₜ = -(4/τ) σ(τ (ρₜ - 1)) Âₜ,   τ = τ₊ where Âₜ > 0, else τ₋

  At ρ = 1 the gradient is that of the surrogate, -Âₜ ∇log πθ; away from 1 it
  decays with the factor 4 σ (1 - σ).

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats; the only differentiated input.
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    advantages: Advantage Âₜ of each token, constant over a completion in GRPO.
    temperature_positive: Temperature τ₊ of good tokens; the gradient decays faster if it is larger.
    temperature_negative: Temperature τ₋ of bad tokens; the gradient decays faster if it is larger.

  Returns:
    Loss ℓₜ of each token, before masking and before any reduction.

  Reference:
    Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv:2511.20347, equations 5 and 6.
  """
  policy, old, advantages = arrays.loss_inputs(policy_logprobs, old_logprobs, advantages)
  arrays.number("temperature_positive", temperature_positive, above=0)
  arrays.number("temperature_negative", temperature_negative, above=0)
  dtype = policy.dtype
  high, low = jnp.asarray(temperature_positive, dtype), jnp.asarray(temperature_negative, dtype)
  tau = jnp.where(advantages > 0, high, low)
  gate = jax.nn.sigmoid(tau * (ratio(policy, old) - 1.0))
  return -(4.0 / tau) * gate * advantages


def reinforce(
  policy_logprobs: Float[Array, "*shape"], advantages: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """Computes the REINFORCE loss, to be minimised, per token: ℓₜ = -Âₜ log πθ(aₜ|sₜ).

  There is no ratio and no clip: the gradient is always -Âₜ ∇log πθ. verl's
  `gpg` and NeMo RL's `disable_ppo_ratio` are the same.

  Reference:
    Williams 1992; Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740, equation 6.
  """
  policy, advantages = arrays.tokens(policy_logprobs=policy_logprobs, advantages=advantages)
  return -advantages * policy


def entropy_bonus(entropy: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """Returns -H per token: a loss, to be minimised, that rewards spread-out distributions.

  Its gradient needs the entropy of the full distribution as a function of the
  parameters (`token_logprobs(..., return_entropy=True)`), not a sampled estimate.
  """
  return -arrays.floats(entropy, "entropy")
