"""The policy losses by name, with one signature: what `objectives` chooses from. Pure.

Each takes the options, log πθ, log π_old and the tokens, with masked places
cleaned, and returns the loss per token and the ratio to be reported.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Bool, Float

from grpo_jax.rl import covariance_losses, custom_functions, dppo, losses, sequence_losses
from grpo_jax.rl.objective_options import ResolvedOptions
from grpo_jax.types import LossTokens

PolicyTerm = tuple[Float[Array, "B N"], Float[Array, "B N"]]


def _clipped(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> PolicyTerm:
  ratio = losses.ratio(policy, old)
  return _clipped_loss(o, ratio, tokens), ratio


def _gspo(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> PolicyTerm:
  ratio = losses.sequence_ratio(policy, old, tokens.mask, tokens.sequence_ids)
  return _clipped_loss(o, ratio, tokens), ratio


def _gspo_token(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> PolicyTerm:
  ratio = losses.sequence_ratio_token_form(policy, old, tokens.mask, tokens.sequence_ids)
  return _clipped_loss(o, ratio, tokens), ratio


def _clipped_loss(
  o: ResolvedOptions, ratio: Float[Array, "B N"], tokens: LossTokens
) -> Float[Array, "B N"]:
  low, high = o.clip_bounds
  return losses.clipped_ratio_loss(
    ratio,
    tokens.advantages,
    clip_low=low,
    clip_high=high,
    dual_clip=o.dual_clip,
  )


def _cispo(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> PolicyTerm:
  low, high = o.clip_bounds
  per_token = losses.cispo(policy, old, tokens.advantages, clip_low=low, clip_high=high)
  return per_token, losses.ratio(policy, old)


def _sapo(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> PolicyTerm:
  per_token = losses.sapo(
    policy,
    old,
    tokens.advantages,
    temperature_positive=o.sapo_temperature_positive,
    temperature_negative=o.sapo_temperature_negative,
  )
  return per_token, losses.ratio(policy, old)


def _reinforce(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> PolicyTerm:
  del o
  return losses.reinforce(policy, tokens.advantages), losses.ratio(policy, old)


def _gmpo(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> PolicyTerm:
  low, high = o.clip_bounds
  per_token = sequence_losses.gmpo(
    policy,
    old,
    tokens.advantages,
    tokens.mask,
    tokens.sequence_ids,
    clip_low=low,
    clip_high=high,
  )
  return per_token, losses.sequence_ratio(policy, old, tokens.mask, tokens.sequence_ids)


def _luspo(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> PolicyTerm:
  low, high = o.clip_bounds
  per_token = sequence_losses.luspo(
    policy,
    old,
    tokens.advantages,
    tokens.mask,
    tokens.sequence_ids,
    clip_low=low,
    clip_high=high,
  )
  return per_token, losses.sequence_ratio(policy, old, tokens.mask, tokens.sequence_ids)


def _vespo(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> PolicyTerm:
  del o
  per_token = sequence_losses.vespo(
    policy, old, tokens.advantages, tokens.mask, tokens.sequence_ids
  )
  return per_token, losses.ratio(policy, old)


def _dppo_tv(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> PolicyTerm:
  return dppo.dppo_tv(policy, old, tokens.advantages, **_dppo_options(o)), losses.ratio(policy, old)


def _dppo_kl(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> PolicyTerm:
  return dppo.dppo_kl(policy, old, tokens.advantages, **_dppo_options(o)), losses.ratio(policy, old)


def _dppo_options(o: ResolvedOptions) -> dict[str, Any]:
  return {**o.dppo_bounds, "ratio_cap": o.dppo_ratio_cap, "kl_tau": o.dppo_kl_tau}


def dppo_keep(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> Bool[Array, "B N"]:
  """Returns the tokens whose surrogate DPPO learns from.

  Args:
    o: Options of the objective, whose loss is one of DPPO's.
    policy: Logprob log πθ of each token.
    old: Logprob log π_old of each token.
    tokens: Gathered batch, zero where its mask is False.
  """
  within = {"dppo_tv": dppo.within_tv, "dppo_kl": dppo.within_kl}[str(o.loss)]
  return within(policy, old, tokens.advantages, **o.dppo_bounds)


def _clip_cov(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> PolicyTerm:
  low, high = o.clip_bounds
  assert tokens.selected is not None
  per_token = covariance_losses.clip_cov(
    policy, old, tokens.advantages, tokens.selected, clip_low=low, clip_high=high
  )
  return per_token, losses.ratio(policy, old)


def _kl_cov(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> PolicyTerm:
  assert tokens.selected is not None
  per_token = covariance_losses.kl_cov(
    policy, old, tokens.advantages, tokens.selected, kl_cov_coef=o.kl_cov_coef
  )
  return per_token, losses.ratio(policy, old)


def own_loss(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> PolicyTerm:
  """Computes the loss by the user's function `o.loss`.

  Args:
    o: Options of the objective.
    policy: Logprob log πθ of each token.
    old: Logprob log π_old of each token.
    tokens: Gathered batch, zero where its mask is False.

  Returns:
    The loss of each token and the ratio πθ/π_old.
  """
  loss, options = o.loss, dict(o.own_options)
  assert callable(loss)
  call = lambda: custom_functions.call_loss(loss, policy, old, tokens, options)
  per_token = custom_functions.on_data("loss", loss, policy, call)
  return per_token, losses.ratio(policy, old)


POLICY_LOSSES: dict[str, Callable[..., PolicyTerm]] = {
  "clipped": _clipped,
  "gspo": _gspo,
  "gspo_token": _gspo_token,
  "cispo": _cispo,
  "sapo": _sapo,
  "reinforce": _reinforce,
  "gmpo": _gmpo,
  "luspo": _luspo,
  "vespo": _vespo,
  "dppo_tv": _dppo_tv,
  "dppo_kl": _dppo_kl,
  "clip_cov": _clip_cov,
  "kl_cov": _kl_cov,
}
