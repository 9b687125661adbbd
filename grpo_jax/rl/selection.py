"""Chooses tokens among all tokens of an optimizer step, by entropy or covariance. Pure, NumPy.

What is chosen depends on means, quantiles and counts over the whole optimizer step. The published
codes take those of the tokens that one device holds of one microbatch, so that their choice depends
on how a batch is split. Here all functions take the tokens of all microbatches and devices as flat
arrays, in any order. Equal values are chosen together, never one of them by its place.
"""

import numpy as np
from jaxtyping import Bool, Float, UInt64

from grpo_jax.rl.objective_options import ResolvedOptions


def choose(
  options: ResolvedOptions,
  logprobs: Float[np.ndarray, " n"],
  *,
  advantages: Float[np.ndarray, " n"],
  old_logprobs: Float[np.ndarray, " n"] | None = None,
  entropy: Float[np.ndarray, " n"] | None = None,
  keys: UInt64[np.ndarray, " n"] | None = None,
) -> Bool[np.ndarray, " n"]:
  """Returns the tokens that the options of an objective select: `LossTokens.selected`.

  Args:
    options: Options with a `top_entropy_share` below 1, or the loss "clip_cov" or "kl_cov".
    logprobs: Logprob log πθ of each token that is learned from, before the update.
    advantages: Advantage of each token.
    old_logprobs: Logprob log π_old of each token; None: the policy's own.
    entropy: Entropy of the distribution of each token, in nats; for `top_entropy_share`.
    keys: Random number of each token; for "clip_cov".

  Returns:
    True on the selected tokens.

  Raises:
    ValueError: The options select no tokens, or an input that they need is missing.
  """
  if options.top_entropy_share < 1:
    if entropy is None:
      raise ValueError("top_entropy_share needs the entropy of each token")
    return top_entropy(entropy, share=options.top_entropy_share)
  if options.loss == "kl_cov":
    return kl_cov(logprobs, advantages, ratio=options.kl_cov_ratio)
  if options.loss != "clip_cov":
    raise ValueError(f"loss={options.loss!r} selects no tokens")
  if keys is None:
    raise ValueError("loss='clip_cov' needs a random number for each token")
  low, high = options.clip_bounds
  log_ratio = np.zeros_like(logprobs) if old_logprobs is None else logprobs - old_logprobs
  overshoots = np.where(advantages > 0, log_ratio > np.log1p(high), log_ratio < _log1p(-low))
  return clip_cov(
    logprobs,
    advantages,
    keys,
    ratio=options.clip_cov_ratio,
    lower=options.clip_cov_lb,
    upper=options.clip_cov_ub,
    is_clipped=overshoots & (advantages != 0),
  )


def top_entropy(entropy: Float[np.ndarray, " n"], *, share: float) -> Bool[np.ndarray, " n"]:
  """Returns True on the `share` of tokens whose entropy is largest.

  The threshold is the (1 - share) quantile, linearly interpolated; tokens on it are chosen.

  Args:
    entropy: Entropy of the distribution of each token, in nats.
    share: Share of the tokens that is chosen, in (0, 1]; 0.2 in the paper.

  Returns:
    True on the chosen tokens; the same as `masks.top_entropy`.

  Reference:
    Wang et al. 2025, "Beyond the 80/20 rule", arXiv:2506.01939, equation 6; TRL's
    `top_entropy_quantile`.
  """
  if not entropy.size:
    return np.zeros(0, bool)
  values = entropy.astype(np.float64)
  return values >= np.quantile(values, 1.0 - share)


def covariances(
  logprobs: Float[np.ndarray, " n"], advantages: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
  """Returns (Âₜ - mean Â) (log πθ - mean log πθ) of each token, in float64.

  Args:
    logprobs: Logprob log πθ of each token that is learned from.
    advantages: Advantage Âₜ of each token.

  Reference:
    Cui et al. 2025, arXiv:2505.22617, equation 8.
  """
  centred = [x.astype(np.float64) - x.mean(dtype=np.float64) for x in (advantages, logprobs)]
  return centred[0] * centred[1]


def kl_cov(
  logprobs: Float[np.ndarray, " n"], advantages: Float[np.ndarray, " n"], *, ratio: float
) -> Bool[np.ndarray, " n"]:
  """Returns True on the share of tokens whose covariance is largest, at least one token.

  Args:
    logprobs: Logprob log πθ of each token that is learned from.
    advantages: Advantage of each token.
    ratio: Share k of the tokens that is chosen.

  Returns:
    True on max(1, ⌊k n⌋ ) tokens, and on tokens with the covariance of the last of them.

  Reference:
    Cui et al. 2025, arXiv:2505.22617, section 4.3; verl's `kl_cov_ratio`.
  """
  if not logprobs.size:
    return np.zeros(0, bool)
  found = covariances(logprobs, advantages)
  return found >= np.partition(found, -_count(ratio, found.size))[-_count(ratio, found.size)]


def clip_cov(
  logprobs: Float[np.ndarray, " n"],
  advantages: Float[np.ndarray, " n"],
  keys: UInt64[np.ndarray, " n"],
  *,
  ratio: float,
  lower: float,
  upper: float,
  is_clipped: Bool[np.ndarray, " n"] | None = None,
) -> Bool[np.ndarray, " n"]:
  """Returns True on random tokens among those of large covariance.

      candidates:  lower < covariance < upper, and not clipped by the ratio

  Args:
    logprobs: Logprob log πθ of each token that is learned from.
    advantages: Advantage of each token.
    keys: Random number of each token: the candidates with the smallest are chosen.
    ratio: Share r of the tokens (of all, not of the candidates) that is chosen.
    lower: Lower bound of the covariance of candidates.
    upper: Upper bound of the covariance of candidates.
    is_clipped: True on tokens without a gradient, because the clip of the ratio is active.

  Returns:
    True on max(1, ⌊r n⌋) candidates, or on all if there are fewer; tokens with equal keys are
    chosen together.

  Reference:
    Cui et al. 2025, arXiv:2505.22617, section 4.2; verl's `clip_cov_ratio`, `clip_cov_lb` and
    `clip_cov_ub`.
  """
  if not logprobs.size:
    return np.zeros(0, bool)
  found = covariances(logprobs, advantages)
  candidates = (found > lower) & (found < upper)
  if is_clipped is not None:
    candidates &= ~is_clipped
  count = _count(ratio, found.size)
  if candidates.sum() <= count:
    return candidates
  last = np.partition(keys[candidates], count - 1)[count - 1]
  return candidates & (keys <= last)


def _count(share: float, size: int) -> int:
  return min(max(int(share * size), 1), size)


def _log1p(x: float) -> float:
  """Returns log(1 + x); -inf at x = -1, where no ratio is below the bound."""
  return float(np.log1p(x)) if x > -1 else -np.inf
