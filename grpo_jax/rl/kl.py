"""Estimates of the KL divergence to the reference policy. Pure; per token, unreduced.

With d = log πθ(aₜ|sₜ) - log π_ref(aₜ|sₜ), for tokens that πθ sampled, each `kl_*` is an
estimate of KL(πθ ‖ π_ref). Used as a *loss*, they differ in their gradients, because
the sampling distribution depends on θ as well and differentiating the estimate
alone misses that half:

  estimator  value         plain gradient        with the weight exp(u - sg u), u = log πθ
  k1         d             ∇u          (mean 0)  (d + 1) ∇u        = ∇KL in the mean
  k2         ½ d²          d ∇u = ∇KL  in mean   (½ d² + d) ∇u
  k3         e⁻ᵈ - 1 + d   (1 - e⁻ᵈ) ∇u          d ∇u              = ∇KL in the mean

So k1's plain gradient does nothing on average, k3's is that of the *forward* KL,
and the weighted k3 (NeMo RL's, the default here) has the exact reverse-KL gradient.

Reference:
  Schulman 2020, http://joschu.net/blog/kl-approx.html (the estimators);
  Tang and Munos 2025, arXiv:2506.09477 (their gradients).
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Float

from grpo_jax.rl import arrays
from grpo_jax.rl.numerics import clamp, exp_or_zero


def kl_k1(
  policy_logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """Estimates KL(πθ ‖ π_ref) per token by k₁ = d: unbiased, of either sign.

  Gradient: ∇log πθ, whose mean is 0. Useful in the reward, not as a loss.
  """
  return _k1(_difference(policy_logprobs, ref_logprobs))


def kl_k2(
  policy_logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """Estimates KL(πθ ‖ π_ref) per token by k₂ = ½ d²: biased, never negative.

  Gradient: d ∇log πθ, whose mean is ∇KL(πθ ‖ π_ref).
  """
  return _k2(_difference(policy_logprobs, ref_logprobs))


def kl_k3(
  policy_logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """Estimates KL(πθ ‖ π_ref) per token by k₃ = e⁻ᵈ - 1 + d: unbiased, never negative.

  Gradient: (1 - π_ref/πθ) ∇log πθ, whose mean is that of the forward KL(π_ref ‖ πθ).
  """
  difference = _difference(policy_logprobs, ref_logprobs)
  return _k3(clamp(difference, -float(jnp.finfo(difference.dtype).max)))  # ∞ - ∞ is not a number.


def kl_penalty(
  policy_logprobs: Float[Array, "*shape"],
  ref_logprobs: Float[Array, "*shape"],
  sampled_from: Float[Array, "*shape"] | None = None,
  *,
  estimator: str = "k3",
  input_clamp: float | None = None,
  output_clamp: float | None = None,
) -> Float[Array, "*shape"]:
  """Computes a KL estimate as a loss, to be minimised, per token, weighted and clamped.

      d̂ = clip(log πθ - log π_ref, ±C_in)
      w = exp(log πθ - sampled_from)        (1 without `sampled_from`)
      ℓ = clip(w · k(d̂), ±C_out)

  The weight is differentiated, except where the input clamp is active; a weight
  that is not finite counts as 0. Where a clamp is active the gradient is 0, even if the estimate
  is not finite.

  Args:
    policy_logprobs: Logprob log πθ of each token; the only differentiated input.
    ref_logprobs: Logprob log π_ref of each token.
    sampled_from: Logprobs of the distribution that the tokens are assumed to come
      from. The policy's own (its value is detached): w is 1 and carries the
      score-function gradient of the table above. The engine's: NeMo RL's
      `use_on_policy_kl_approximation`. The old policy's: TRL's
      `use_bias_correction_kl`. None: no weight, as in TRL, verl, NeMo RL <= 0.6.
    estimator: "k1", "k2" or "k3".
    input_clamp: C_in, in nats; NeMo RL and verl 20 (verl for k3 only), TRL None.
    output_clamp: C_out, in nats; NeMo RL, verl, slime, OpenRLHF 10, TRL None.

  Returns:
    Loss ℓ, without the coefficient β, before masking and before any reduction.

  Raises:
    ValueError: The estimator is unknown.
  """
  if estimator not in ESTIMATORS:
    raise ValueError(f"no KL estimator {estimator!r}; there are {sorted(ESTIMATORS)}")
  arrays.number("input_clamp", input_clamp, above=0)
  arrays.number("output_clamp", output_clamp, above=0)
  given: dict[str, Any] = {"policy_logprobs": policy_logprobs, "ref_logprobs": ref_logprobs}
  given |= {} if sampled_from is None else {"sampled_from": sampled_from}
  policy, ref, *source = arrays.tokens(**given)
  difference = policy - stop_gradient(ref)
  log_weight = policy - stop_gradient(source[0]) if source else None
  weighted = functools.partial(_weighted, estimator=estimator, input_clamp=input_clamp)
  if output_clamp is None:
    return weighted(difference, log_weight)
  raw = stop_gradient(weighted(difference, log_weight))
  # Clamped values are replaced before the formula: through a clamp, an overflow becomes NaN.
  is_kept = jnp.abs(raw) <= output_clamp
  difference = jnp.where(is_kept, difference, 0)
  log_weight = None if log_weight is None else jnp.where(is_kept, log_weight, 0)
  return jnp.where(
    is_kept, weighted(difference, log_weight), clamp(raw, -output_clamp, output_clamp)
  )


def _difference(policy_logprobs: Any, ref_logprobs: Any) -> Float[Array, "*shape"]:
  policy, ref = arrays.tokens(policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs)
  return policy - ref


def _weighted(
  difference: Float[Array, "*shape"],
  log_weight: Float[Array, "*shape"] | None,
  *,
  estimator: str,
  input_clamp: float | None,
) -> Float[Array, "*shape"]:
  """Returns w k(d̂), before the output clamp."""
  largest = float(jnp.finfo(difference.dtype).max) if input_clamp is None else input_clamp
  penalty = _BY_DIFFERENCE[estimator](clamp(difference, -largest, largest))
  if log_weight is None:
    return penalty
  weight = exp_or_zero(log_weight)
  weight = jnp.where(jnp.abs(difference) > largest, stop_gradient(weight), weight)
  return jnp.where(weight > 0, weight * jnp.where(weight > 0, penalty, 0), 0)


def _k1(difference: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  return difference


def _k2(difference: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  return 0.5 * jnp.square(difference)


def _k3(difference: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  # expm1 keeps more digits near 0 than exp(x) - 1, yet its sum with d cancels: in float32 the
  # relative error at d = 1e-3 is about 3e-4.
  return jnp.expm1(-difference) + difference


_BY_DIFFERENCE = {"k1": _k1, "k2": _k2, "k3": _k3}
ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
