"""Old logprobs without a scoring pass, interpolated between engine and policy. Pure.

Decoupled PPO takes ratios to a proximal policy, the one that the step begins with. Where its
logprobs are not scored, they can be approximated from numbers that are known anyway: the logprob
under the weights that sampled the token, the logprob under the policy, and how old the token is.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jaxtyping import Float, Int

from grpo_jax.rl import arrays
from grpo_jax.types import Numbers


def shares(ages: Int[Numbers, "*shape"], dtype: Any = np.float32) -> Float[Numbers, "*shape"]:
  """Computes α of each token: the part of the way from μ to πθ at which π_old is assumed.

      α = (v_old - v_μ) / (v_θ - v_μ) = d / (d + 1)      v_old = s, v_θ = s + 1, v_μ = s - d

  Args:
    ages: Age d of each token, in training steps; negative where it is not known.
    dtype: Type of the result.

  Returns:
    Share α of each token, in [0, 1): 0 for tokens of the newest weights, and where the age
    is not known.
  """
  known = _module(ages).maximum(ages, 0).astype(dtype)
  return known / (known + 1)


def interpolated(
  policy_logprobs: Float[Numbers, "*shape"],
  behavior_logprobs: Float[Numbers, "*shape"],
  ages: Int[Numbers, "*shape"],
) -> Float[Numbers, "*shape"]:
  """Approximates log π_old of each token, by log-linear interpolation between versions.

      log π_old ≈ log μ + α (sg[log πθ] - log μ)      α: see `shares`

  It would be exact if the logprob of a token moved by the same amount in every training step, and
  πθ were the policy at the end of this step. At the first optimizer step on a batch πθ is π_old
  itself, and the approximation is furthest from it: by (1 - α) (log πθ - log μ). The logprobs of
  tokens of age 0 are the engine's own, so what differs between engine and trainer is in the ratio.

  AReaL's trainer numbers the policy in training by the version that its step began with, v_θ = s
  and v_old = s - 1. Its α is (d - 1) / d for d > 0, that of tokens one step younger here.

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats; it gets no gradient.
    behavior_logprobs: Logprob log μ of each token, in nats, under the weights that sampled it.
    ages: Age of each token, in training steps; negative where it is not known.

  Returns:
    Approximate log π_old, in nats; log μ where α = 0, whatever log πθ is. Where one of the two is
    not finite, it is the other. It has no gradient. NumPy arrays give a NumPy array, on the host.

  Raises:
    ValueError: The shapes differ.

  Reference:
    Li et al. 2025, A-3PO, arXiv:2512.06547; AReaL's `compute_prox_logp_approximations`
    (areal/trainer/ppo/actor.py at 00ed924) with `prox_logp_method="loglinear"`.
  """
  xp = _module(policy_logprobs)
  if xp is np:
    wide = lambda x: np.asarray(x, np.promote_types(np.asarray(x).dtype, np.float32))
    policy, behavior = wide(policy_logprobs), wide(behavior_logprobs)
  else:
    found = arrays.tokens(policy_logprobs=policy_logprobs, behavior_logprobs=behavior_logprobs)
    policy, behavior = map(stop_gradient, found)
  if np.shape(ages) != policy.shape:
    raise ValueError(f"ages must have the shape {policy.shape} of logprobs, got {np.shape(ages)}")
  share = shares(ages, policy.dtype)
  # A token that one of the two cannot write: 0 · log 0 and log 0 - log 0 are not numbers.
  start = xp.where(xp.isfinite(behavior), behavior, policy)
  towards = xp.where((share > 0) & xp.isfinite(policy), policy, start)
  return start + share * (towards - start)


def _module(values: Numbers) -> Any:
  return jnp if isinstance(values, jax.Array) else np
