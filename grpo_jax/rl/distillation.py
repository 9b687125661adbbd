"""On-policy distillation: what a teacher thinks of the sampled tokens, as their advantages. Pure.

The policy π samples tokens oₜ, and a teacher π_T reads them:

    dₜ = log π_T(oₜ) - log π_old(oₜ),   Aₜ = c_r Âₜ + c clip(dₜ, ±δ)

A takes the place of the advantage Âₜ of the rewards in any policy loss. The mean of -dₜ over tokens
that the policy samples is the reverse KL(π ‖ π_T), and for π_old = π the mean gradient of -dₜ log π
is its exact gradient at every token (what a token does to later tokens is left out: a discount of
0). A teacher that equals the policy gives A = 0 and no gradient.

Reference:
  Lu and Thinking Machines 2025, "On-Policy Distillation",
  https://thinkingmachines.ai/blog/on-policy-distillation (c_r = 0, no clip);
  MiMo-V2-Flash, technical report of 2026, arXiv:2601.02780, equations 8 and 9 (several teachers,
  both terms); NeMo RL's `OPDAdvantageEstimator`, whose weights are c and c_r.
  Before them: Agarwal et al. 2023, GKD, arXiv:2306.13649; Gu et al. 2023, MiniLLM,
  arXiv:2306.08543.
"""

import dataclasses

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

from grpo_jax.rl import arrays, diagnostics, masks
from grpo_jax.rl.numerics import clamp as clamped
from grpo_jax.rl.options import DistillationOptions
from grpo_jax.types import Mean
from grpo_jax.values.options import require


@dataclasses.dataclass(frozen=True)
class Distillation(DistillationOptions):
  """How a teacher's logprobs become advantages, checked when made.

  `coef` is the coefficient c of the teacher's term, in units of the advantage per nat,
  `reward_coef` the coefficient c_r of the advantages from rewards, and `clamp` the bound δ of the
  log-ratio on both sides, in nats.
  """

  def __post_init__(self):
    require(self, of="teacher")


def token_advantages(
  teacher_logprobs: Float[Array, "B N"],
  old_logprobs: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  *,
  clamp: float | None = None,
) -> Float[Array, "B N"]:
  """Computes dₜ = clip(log π_T(oₜ) - log π_old(oₜ), ±δ), a constant for the gradient.

  Args:
    teacher_logprobs: Logprob log π_T of each token, in nats.
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    mask: True on the tokens that are learned from.
    clamp: Bound δ on both sides, in nats; None: no bound, and 0 where the difference is not finite.

  Returns:
    Advantage of each token; 0 where `mask` is False.
  """
  teacher, old = arrays.tokens(
    teacher_logprobs=teacher_logprobs, old_logprobs=old_logprobs, mask=mask
  )
  arrays.number("clamp", clamp, above=0)
  difference = masks.fill(teacher, mask) - masks.fill(old, mask)
  if clamp is None:  # a token that the teacher never writes is not learned from.
    bounded = jnp.where(jnp.isfinite(difference), difference, 0)
  else:
    bounded = clamped(difference, -clamp, clamp)
  return stop_gradient(bounded)


def mixed(
  advantages: Float[Array, "B N"],
  teacher_logprobs: Float[Array, "B N"],
  old_logprobs: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  options: Distillation,
) -> Float[Array, "B N"]:
  """Computes Aₜ = c_r Âₜ + c dₜ.

  Args:
    advantages: Advantage Âₜ of the rewards, on each token.
    teacher_logprobs: Logprob log π_T of each token, in nats.
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    mask: True on the tokens that are learned from.
    options: Coefficients and bound.

  Returns:
    Advantage of each token; 0 where `mask` is False.
  """
  arrays.tokens(advantages=advantages, mask=mask)
  taught = token_advantages(teacher_logprobs, old_logprobs, mask, clamp=options.clamp)
  rewarded = options.reward_coef * masks.fill(advantages, mask)
  return rewarded + options.coef * taught


def metrics(
  teacher_logprobs: Float[Array, "B N"],
  old_logprobs: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  options: Distillation,
) -> dict[str, Mean]:
  """Measures how far the policy is from the teacher.

  Args:
    teacher_logprobs: Logprob of each token under the teacher, log π_T, in nats.
    old_logprobs: Logprob of each token under the policy that sampled or scored it, log π_old.
    mask: True on the tokens that are learned from.
    options: Options of the distillation; only its bound is read.

  Returns:
    "teacher/kl", the mean of log π_old - log π_T over tokens, in nats: the unbiased estimate k1 of
    KL(π ‖ π_T) on tokens that the policy sampled; with a bound also "teacher/clamped_share".
  """
  teacher, old = arrays.tokens(
    teacher_logprobs=teacher_logprobs, old_logprobs=old_logprobs, mask=mask
  )
  distance = masks.fill(old, mask) - masks.fill(teacher, mask)
  found = {"teacher/kl": diagnostics.token_average(distance, mask)}
  if options.clamp is not None:
    beyond = (jnp.abs(distance) > options.clamp).astype(distance.dtype)
    found["teacher/clamped_share"] = diagnostics.token_average(beyond, mask)
  return found
