"""The metrics of an objective, in addition to the loss. Pure; every metric merges exactly.

Definitions are NeMo RL's, with their units in docs/algorithms.md; a mean is
carried as (sum, count) over tokens or completions, so that merging microbatches,
devices and optimizer steps gives the mean over all of them.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.rl import arrays, kl, masks, staleness
from grpo_jax.rl.importance import token_weights
from grpo_jax.types import EffectiveSampleShare, Maximum, Mean, Metrics, Minimum


def token_average(x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Mean:
  """Returns the mean over unmasked tokens."""
  total = masks.masked_sum(x, mask)
  return Mean(total, arrays.mask(mask).sum(dtype=total.dtype))


def share(event: Bool[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Mean:
  """Returns the share of unmasked tokens at which `event` holds."""
  arrays.tokens(mask=mask, marks={"event": event})
  return token_average(arrays.mask(event, name="event").astype(jnp.float32), mask)


def sequence_average(
  x: Float[Array, "B N"], mask: Bool[Array, "B N"], sequence_ids: Int[Array, "B N"] | None
) -> Mean:
  """Returns the mean over completions of their token means.

  Args:
    x: A value for each token.
    mask: True on the tokens that are learned from.
    sequence_ids: Sequence of each token within its row, 0 <= id < N; None: every row is one
      sequence.

  Returns:
    Sum over completions of their token means, and the number of completions that have a token.
  """
  means = masks.sequence_means(x, mask, sequence_ids)
  return Mean(means.sum(), masks.count_sequences(mask, sequence_ids).astype(means.dtype))


def mismatch(
  old_logprobs: Float[Array, "B N"],
  behavior_logprobs: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  *,
  kl_estimator: str = "k3",
) -> Metrics:
  """Measures how far the trainer's logprobs are from the engine's for the same tokens.

  With p = log π_old, g = log μ, d = p - g:

      abs_logprob_max         max |d|          abs_logprob_mean   mean |d|
      token_mult_prob_error   mean e^|d|                   1 if equal; healthy below 1.05
      sampling_importance_ratio   mean, smallest and largest e^d
      gen_kl_error            mean k(g, p)                 k3: e^d - 1 - d
      policy_kl_error         mean k(p, g)                 k3: e^-d - 1 + d
      js_divergence_error     mean ½ [e^(p-m) - (p-m) - 1] + ½ [e^(g-m) - (g-m) - 1],
                              m = log ½ (e^p + e^g)

  The tokens were sampled from μ, so `gen_kl_error` estimates KL(μ ‖ π_old), while
  `policy_kl_error` detects spikes and is not an estimate. Nothing is clamped or truncated: a
  difference that e^d cannot hold makes a metric infinite.

  Args:
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    behavior_logprobs: Logprob log μ of each token, in nats, as the engine reported it.
    mask: True on the tokens that are learned from.
    kl_estimator: Estimator k: "k1", "k2" or "k3"; see `kl`.

  Returns:
    Metrics by name, with the prefix "mismatch/"; they merge exactly.
  """
  old, behavior = _filled(mask, old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs)
  distance, ratio = jnp.abs(old - behavior), jnp.exp(old - behavior)
  k = kl.ESTIMATORS[kl_estimator]
  middle = jnp.logaddexp(old, behavior) - jnp.log(2.0).astype(old.dtype)
  halves = kl.kl_k3(middle, old) + kl.kl_k3(middle, behavior)
  return {
    "mismatch/abs_logprob_max": Maximum(masks.masked_max(distance, mask)),
    "mismatch/abs_logprob_mean": token_average(distance, mask),
    "mismatch/token_mult_prob_error": token_average(jnp.exp(distance), mask),
    "mismatch/sampling_importance_ratio": token_average(ratio, mask),
    "mismatch/sampling_importance_ratio_max": Maximum(masks.masked_max(ratio, mask)),
    "mismatch/sampling_importance_ratio_min": Minimum(masks.masked_min(ratio, mask)),
    "mismatch/gen_kl_error": token_average(k(behavior, old), mask),
    "mismatch/policy_kl_error": token_average(k(old, behavior), mask),
    "mismatch/js_divergence_error": token_average(0.5 * halves, mask),
  }


def importance(
  weights: Float[Array, "B N"],
  is_in_bounds: Bool[Array, "B N"],
  mask: Bool[Array, "B N"],
  sequence_ids: Int[Array, "B N"] | None,
  *,
  weights_are_of_sequences: bool,
  bounds_are_of_sequences: bool,
) -> Metrics:
  """Measures the importance weights that the loss uses, after truncation.

  A weight of a completion counts once.

  Args:
    weights: Weight w of each token, which multiplies its loss.
    is_in_bounds: False where the weight before truncation was out of bounds.
    mask: True on the tokens that are learned from.
    sequence_ids: Sequence of each token; see `masks`.
    weights_are_of_sequences: Whether w is constant over each completion.
    bounds_are_of_sequences: Whether whole completions were checked against the bounds.

  Returns:
    Metrics by name; they merge exactly.
  """
  marks = {"is_in_bounds": is_in_bounds}
  (clean,) = _filled(mask, weights=weights, sequence_ids=sequence_ids, marks=marks)
  mask = arrays.mask(mask)
  outside = (~arrays.mask(is_in_bounds, name="is_in_bounds")).astype(clean.dtype)
  if weights_are_of_sequences:
    values = masks.sequence_means(clean, mask, sequence_ids)
    count = masks.count_sequences(mask, sequence_ids).astype(values.dtype)
  else:
    values, count = clean, mask.sum(dtype=clean.dtype)
  return {
    "mismatch/effective_sample_share": EffectiveSampleShare(
      values.sum(), jnp.square(values).sum(), count
    ),
    "mismatch/out_of_bounds_share": sequence_average(outside, mask, sequence_ids)
    if bounds_are_of_sequences
    else token_average(outside, mask),
  }


def by_staleness(
  old_logprobs: Float[Array, "B N"],
  behavior_logprobs: Float[Array, "B N"],
  ages: Int[Array, "B N"],
  mask: Bool[Array, "B N"],
) -> Metrics:
  """Measures the weights w = π_old/μ of the tokens of each range of ages, before truncation.

      share   tokens of these ages / all tokens, those of unknown age included
      ratio   mean w            ess   (Σw)² / (n Σw²), the effective sample share

  Args:
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    behavior_logprobs: Logprob log μ of each token, in nats, as the engine reported it.
    ages: Age of each token, in training steps; negative where it is not known.
    mask: True on the tokens that are learned from.

  Returns:
    "staleness/RANGE/{share,ratio,ess}" for each range of `staleness.RANGES`; they merge exactly.
  """
  given = {"old_logprobs": old_logprobs, "behavior_logprobs": behavior_logprobs}
  old, behavior = _filled(mask, **given, marks={"ages": ages})
  mask, ages = arrays.mask(mask), jnp.asarray(ages)
  weights = token_weights(old, behavior)
  found: Metrics = {}
  for ages_of in staleness.RANGES:
    own = mask & (ages >= ages_of.first) & (ages <= ages_of.last)
    area, clean = f"staleness/{ages_of.name}", masks.fill(weights, own)
    count = own.sum(dtype=clean.dtype)
    found[f"{area}/share"] = share(own, mask)
    found[f"{area}/ratio"] = Mean(clean.sum(), count)
    found[f"{area}/ess"] = EffectiveSampleShare(clean.sum(), jnp.square(clean).sum(), count)
  return found


def ratios(
  ratio: Float[Array, "B N"],
  clipped: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
) -> Metrics:
  """Measures the ratio in the loss and its clipped form: mean, smallest and largest over tokens.

  Args:
    ratio: Ratio ρ of each token.
    clipped: Ratio after the clip of the loss.
    mask: True on the tokens that are learned from.

  Returns:
    Metrics by name; they merge exactly.
  """
  ratio, clipped = arrays.tokens(ratio=ratio, clipped=clipped, mask=mask)
  return {
    "train/ratio_mean": token_average(ratio, mask),
    "train/ratio_min": Minimum(masks.masked_min(ratio, mask)),
    "train/ratio_max": Maximum(masks.masked_max(ratio, mask)),
    "train/clipped_ratio_mean": token_average(clipped, mask),
    "train/clipped_ratio_min": Minimum(masks.masked_min(clipped, mask)),
    "train/clipped_ratio_max": Maximum(masks.masked_max(clipped, mask)),
  }


def clip_shares(
  ratio: Float[Array, "B N"],
  advantages: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  *,
  clip_low: float,
  clip_high: float,
  dual_clip: float | None,
) -> Metrics:
  """Measures the share of tokens at which PPO's clip removed the gradient, on each side.

  low   Â < 0 and ρ < 1 - ε_low      high   Â > 0 and ρ > 1 + ε_high
  dual  Â < 0 and ρ > c              (0 without dual clip)

  Args:
    ratio: Ratio ρ of each token.
    advantages: Advantage Âₜ of each token, constant over a completion in GRPO.
    mask: True on the tokens that are learned from.
    clip_low: Bound ε_low of the clip, a distance from 1.
    clip_high: Bound ε_high of the clip, a distance from 1.
    dual_clip: Bound c of the dual clip; None: no dual clip.

  Returns:
    Shares of the unmasked tokens by name, from 0 to 1.
  """
  ratio, advantages = arrays.tokens(ratio=ratio, advantages=advantages, mask=mask)
  mask = arrays.mask(mask)
  is_bad, is_good = advantages < 0, advantages > 0
  dual = is_bad & (ratio > dual_clip) if dual_clip is not None else jnp.zeros_like(mask)
  return {
    "train/clip_low_share": share(is_bad & (ratio < 1.0 - clip_low), mask),
    "train/clip_high_share": share(is_good & (ratio > 1.0 + clip_high), mask),
    "train/clip_dual_share": share(dual, mask),
  }


def mask_shares(
  keep: Bool[Array, "B N"], advantages: Float[Array, "B N"], mask: Bool[Array, "B N"]
) -> Metrics:
  """Measures the share of tokens at which DPPO's mask removed the gradient, on each side.

  Args:
    keep: True on the tokens that the mask keeps.
    advantages: Advantage Âₜ of each token.
    mask: True on the tokens that are learned from.

  Returns:
    Shares of the unmasked tokens by name, from 0 to 1.
  """
  (advantages,) = arrays.tokens(advantages=advantages, mask=mask, marks={"keep": keep})
  keep = arrays.mask(keep, name="keep")
  return {
    "train/clip_low_share": share(~keep & (advantages < 0), mask),
    "train/clip_high_share": share(~keep & (advantages > 0), mask),
  }


def approx_entropy(
  policy_logprobs: Float[Array, "B N"],
  behavior_logprobs: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
) -> Mean:
  """Estimates the policy's entropy from sampled tokens: -mean of (πθ/μ) log πθ, in nats.

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats.
    behavior_logprobs: Logprob log μ of each token, in nats, as the engine reported it.
    mask: True on the tokens that are learned from.

  Returns:
    Sum over unmasked tokens, and their number.
  """
  policy, behavior = _filled(
    mask, policy_logprobs=policy_logprobs, behavior_logprobs=behavior_logprobs
  )
  return token_average(-jnp.exp(policy - behavior) * policy, mask)


def _filled(mask: arrays.Mask, **given: Any) -> tuple[Float[Array, "B N"], ...]:
  """Returns values of tokens with 0 where the mask is False; given as to `arrays.tokens`."""
  return tuple(masks.fill(x, mask) for x in arrays.tokens(mask=mask, **given))
