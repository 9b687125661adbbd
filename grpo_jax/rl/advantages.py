"""Group-relative advantages. Pure: rewards [P G] and a mask in, advantages [P G] out.

The mask is False on attempts that do not exist or must not count (None: all count). A reward that
is not finite ("could not be scored") counts as masked. Masked attempts are left out of the
baseline and the spread, and their advantage is 0. A truncated completion is *not*
masked here: it counts in the baseline and is dropped from the loss (`masks.overlong_filter`).

Rewards are arrays or lists of floats, integers or booleans, [P G], or [G] for one prompt; the
result has the same shape, in float32, or in float64 if the rewards are. Masks are booleans, or 0
and 1. Equal rewards give exact zeros, and no
sum overflows or underflows, whatever the size of the rewards (1e-30, 1e38); see `moments`.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from grpo_jax.rl import arrays, masks, moments
from grpo_jax.rl.kl import kl_penalty
from grpo_jax.rl.numerics import clamp, safe_divide

Bound = float | Float[Array, ""] | None
BASELINES = ("group_mean", "leave_one_out", "length_weighted", "greedy", "none")
SCALES = ("group_std", "batch_std", "group_mean", "none")


def valid_rewards(
  rewards: arrays.Numbers, mask: arrays.Mask | None
) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]:
  """Returns the rewards, with 0 where a reward does not count, and the mask of those that count."""
  rewards = arrays.floats(rewards, "rewards")
  is_finite = jnp.isfinite(rewards)
  valid = is_finite if mask is None else arrays.mask(mask, rewards.shape) & is_finite
  return jnp.where(valid, rewards, 0), valid


def baseline_and_spread(
  rewards: arrays.Numbers,
  mask: arrays.Mask | None = None,
  *,
  baseline: str = "group_mean",
  ddof: int = 1,
  lengths: arrays.Numbers | None = None,
  greedy: arrays.Numbers | None = None,
) -> tuple[Float[Array, "P G"], Float[Array, "P G"]]:
  """Returns, for each attempt, the mean and the standard deviation of its comparison set.

  Args:
    rewards: One scalar for each of the G attempts at each of the P prompts.
    mask: True on attempts that count; see the module's docstring.
    baseline: "group_mean" compares with the whole group; "leave_one_out" with the
      other attempts, for the spread as well; "length_weighted" with the mean of the group in which
      an attempt weighs as much as it has tokens; "greedy" with another attempt at the prompt, at
      temperature 0; "none" compares with 0. The last three use the spread of the group.
    ddof: Delta degrees of freedom; see `moments.centre_and_spread`.
    lengths: Number of sampled tokens of each attempt, for "length_weighted"; of the shape of
      `rewards`.
    greedy: Reward of the greedy attempt at each prompt, for "greedy": [P]. Where it is not finite,
      the attempts are their own baseline.

  Returns:
    Baseline and standard deviation. An attempt with nothing to compare with (the
    only valid one of its group) is its own baseline, with spread 0: advantage 0.

  Raises:
    ValueError: The baseline is unknown, or lacks its input.
  """
  if baseline not in BASELINES:
    raise ValueError(f"no baseline {baseline!r}; there are {BASELINES}")
  rewards, mask, shape = arrays.groups(rewards, mask)
  rewards, mask = valid_rewards(rewards, mask)
  groups, group = rewards.shape
  if baseline == "leave_one_out":
    others = mask[:, None, :] & ~jnp.eye(group, dtype=bool)[None]
    sets = jnp.broadcast_to(rewards[:, None, :], (groups, group, group))
    centre, spread = (x[..., 0] for x in moments.centre_and_spread(sets, others, ddof=ddof))
    return jnp.where(others.any(axis=-1), centre, rewards), spread
  centre, spread = moments.centre_and_spread(rewards, mask, ddof=ddof)
  if baseline == "none":
    centre = jnp.zeros_like(centre)
  elif baseline == "length_weighted":
    centre = _length_weighted(rewards, mask, _of_attempts(lengths, "lengths", shape, rewards.shape))
  elif baseline == "greedy":
    found = _of_attempts(greedy, "greedy", (rewards.shape[0],), (rewards.shape[0], 1))
    centre = jnp.where(jnp.isfinite(found), found.astype(rewards.dtype), rewards)
  return jnp.broadcast_to(centre, rewards.shape), jnp.broadcast_to(spread, rewards.shape)


def _length_weighted(
  rewards: Float[Array, "P G"], mask: Bool[Array, "P G"], lengths: Float[Array, "P G"]
) -> Float[Array, "P 1"]:
  """Returns Σ |oⱼ| rⱼ / Σ |oⱼ|; the plain mean if no attempt has a token."""
  weights = jnp.where(mask, lengths.astype(rewards.dtype), 0)
  weights = jnp.where(weights.sum(axis=-1, keepdims=True) > 0, weights, mask)
  pivot = jnp.take_along_axis(rewards, jnp.argmax(mask, axis=-1, keepdims=True), axis=-1)
  differences = jnp.where(mask, rewards - pivot, 0)  # equal rewards are their own mean, exactly.
  total = (weights * differences).sum(axis=-1, keepdims=True)
  return pivot + safe_divide(total, weights.sum(axis=-1, keepdims=True))


def _of_attempts(
  values: arrays.Numbers | None, name: str, shape: tuple[int, ...], to: tuple[int, ...]
) -> Float[Array, "..."]:
  """Returns an input that a baseline needs, in another shape.

  Raises:
    ValueError: The input is missing, or its shape is wrong.
  """
  if values is None:
    needs = {"lengths": "length_weighted", "greedy": "greedy"}[name]
    raise ValueError(f"baseline {needs!r} needs {name}, and there are none")
  found = arrays.floats(values, name)
  if found.shape != shape and not (name == "greedy" and found.ndim == 0 and shape == (1,)):
    raise ValueError(f"{name} must have the shape {shape}, got {found.shape}")
  return found.reshape(to)


def group_relative(
  rewards: arrays.Numbers,
  mask: arrays.Mask | None = None,
  *,
  baseline: str = "group_mean",
  scale: str = "group_std",
  ddof: int = 1,
  eps: float = 1e-6,
  lengths: arrays.Numbers | None = None,
  greedy: arrays.Numbers | None = None,
) -> Float[Array, "*shape"]:
  """Computes the advantage of each attempt: how much better it did than its group.

      Âᵢ = (rᵢ - bᵢ) / (sᵢ + ε)   where sᵢ > 0,   rᵢ - bᵢ   where sᵢ = 0

  The defaults are GRPO as in the paper, TRL and verl; NeMo RL's `grpo_math_1B` has
  baseline "leave_one_out"; Dr. GRPO is scale "none"; RLOO is "leave_one_out" with "none"; MaxRL is
  scale "group_mean"; OPO is "length_weighted" with "none"; ReMax is "greedy" with "none".

  A group whose rewards are equal gets exact zeros. Under "leave_one_out", an attempt for which
  the *other* rewards are equal has no spread to divide by and keeps rᵢ - bᵢ.

  Args:
    rewards: One scalar for each of the G attempts at each of the P prompts.
    mask: True on attempts that count; see the module's docstring.
    baseline: Baseline bᵢ, one of BASELINES; see `baseline_and_spread`.
    scale: Spread sᵢ: "group_std" of the comparison set, "batch_std" of all rewards
      of the batch, "group_mean", the mean reward of the group, or "none". Where the mean is not
      above 0 by more than rounding, "group_mean" gives 0; no ε is added to it.
    ddof: Delta degrees of freedom of the variance: 1 in NeMo RL, TRL, verl, slime; 0 in lmpo.
    eps: Term ε; 1e-6 in NeMo RL, verl, slime; 1e-4 in TRL, 1e-5 in AReaL, 1e-9 in OpenRLHF.
    lengths: Number of sampled tokens of each attempt; for "length_weighted".
    greedy: Reward of the greedy attempt at each prompt; for "greedy".

  Returns:
    Advantages. They sum to 0 over a group if the baseline is "group_mean", or "leave_one_out" with
    another scale than "group_std".

  Raises:
    ValueError: The baseline or the scale is unknown, or a number is out of range.

  Reference:
    Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2; batch scale:
    Liu et al. 2025, "Tricks or Traps?", arXiv:2508.08221 (LitePPO).
  """
  if scale not in SCALES:
    raise ValueError(f"no scale {scale!r}; there are {SCALES}")
  _check_numbers(ddof, eps)
  epsilon = _epsilon(rewards)
  rewards, mask, shape = arrays.groups(rewards, mask)
  rewards, mask = valid_rewards(rewards, mask)
  flat, flat_mask = rewards.reshape(1, -1), mask.reshape(1, -1)
  by_batch = scale == "batch_std"
  largest, is_valid = rewards, mask  # of what is compared, for the units of the computation.
  if greedy is not None:
    of_prompts = _of_attempts(greedy, "greedy", rewards.shape[:1], (-1, 1)).astype(rewards.dtype)
    is_known = jnp.isfinite(of_prompts)
    largest = jnp.concatenate([rewards, jnp.where(is_known, of_prompts, 0)], axis=1)
    is_valid = jnp.concatenate([mask, is_known], axis=1)
  if by_batch:
    largest, is_valid = largest.reshape(1, -1), is_valid.reshape(1, -1)
  exponent = moments.exponents(largest, is_valid)
  scaled = moments.times_power(rewards, -exponent)
  of_baseline: dict[str, Any] = {"baseline": baseline, "ddof": ddof}
  if greedy is not None:
    of_baseline["greedy"] = moments.times_power(of_prompts, -exponent)[:, 0]
  if lengths is not None:
    of_baseline["lengths"] = _of_attempts(lengths, "lengths", shape, rewards.shape)
  centre, spread = baseline_and_spread(scaled, mask, **of_baseline)
  centred = jnp.where(mask, scaled - centre, 0)
  plain = moments.held(moments.times_power(centred, exponent))
  if by_batch:
    flat = moments.times_power(flat, -exponent)
    _, spread = moments.centre_and_spread(flat, flat_mask, ddof=ddof)
  below = spread + moments.times_power(jnp.asarray(eps, rewards.dtype), -exponent)
  if scale == "group_mean":
    below, _ = moments.centre_and_spread(scaled, mask)
    plain, spread = jnp.zeros_like(plain), jnp.where(_is_positive(scaled, mask, epsilon), below, 0)
  has_spread = jnp.broadcast_to(spread > 0, rewards.shape) & (scale != "none")
  divided = centred / jnp.where(has_spread, below, 1)
  estimate = jnp.where(has_spread, moments.held(divided), plain)
  if baseline not in ("none", "greedy"):  # rewards that differ by rounding alone carry no signal.
    estimate = jnp.where(moments.has_spread(rewards, mask)[:, None], estimate, 0)
  return estimate.reshape(shape)


def _is_positive(
  rewards: Float[Array, "P G"], mask: Bool[Array, "P G"], epsilon: float
) -> Bool[Array, "P 1"]:
  """Returns True for groups whose mean is above 0 by more than the rounding of a sum, n ε Σ |r|.

  Without negative rewards, that is every group with a reward above 0.
  """
  total = rewards.sum(axis=-1, keepdims=True)
  count = mask.sum(axis=-1, keepdims=True, dtype=rewards.dtype)
  size = jnp.abs(rewards).sum(axis=-1, keepdims=True)
  # Half precision has rounded the rewards themselves, at most by ε / 2 of each.
  rounding = jnp.maximum(count * jnp.finfo(rewards.dtype).eps, epsilon) * size
  return total > rounding


def _epsilon(rewards: arrays.Numbers) -> float:
  """Returns the ε of half-precision rewards, the spacing of the dtype at 1; 0 for other rewards."""
  dtype = getattr(rewards, "dtype", np.dtype(np.float64))
  is_half = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
  return float(jnp.finfo(dtype).eps) if is_half else 0.0


def _check_numbers(ddof: Any, eps: Any) -> None:
  """Raises ValueError for numbers that are out of range."""
  arrays.number("ddof", ddof, low=0, high=1)
  arrays.number("eps", eps, low=0)


def grpo(
  rewards: arrays.Numbers, mask: arrays.Mask | None = None, *, eps: float = 1e-6
) -> Float[Array, "*shape"]:
  """Standardises rewards within each group: Âᵢ = (rᵢ - mean(r)) / (std(r) + ε), std unbiased.

  Args:
    rewards: One reward for each attempt, P prompts by G attempts.
    mask: True for attempts that count; others enter neither mean nor deviation. None: all count.
    eps: Term ε, added to the standard deviation, in units of the reward.

  Returns:
    Advantage Â of each attempt; 0 for masked attempts and in groups with fewer than two attempts
    that count.

  Reference:
    Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2.
  """
  return group_relative(rewards, mask, eps=eps)


def dr_grpo(rewards: arrays.Numbers, mask: arrays.Mask | None = None) -> Float[Array, "*shape"]:
  """Subtracts the group mean without scaling: Âᵢ = rᵢ - mean(r).

  Together with `aggregate.constant_length` this is Dr. GRPO.

  Reference:
    Liu et al. 2025, arXiv:2503.20783, section 3.2.
  """
  return group_relative(rewards, mask, scale="none")


def rloo(rewards: arrays.Numbers, mask: arrays.Mask | None = None) -> Float[Array, "*shape"]:
  """Subtracts the mean of the others: Âᵢ = rᵢ - 1/(G-1) Σ_{j≠i} rⱼ; 0 for a single attempt.

  Reference:
    Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740, section 2.3.
  """
  return group_relative(rewards, mask, baseline="leave_one_out", scale="none")


def maxrl(rewards: arrays.Numbers, mask: arrays.Mask | None = None) -> Float[Array, "*shape"]:
  """Divides by the mean reward: Âᵢ = (rᵢ - mean(r)) / mean(r); 0 where the mean is not positive.

  With rewards of 0 and 1 the mean is the success rate p, and rare successes weigh 1/p: the gradient
  is that of log p, truncated at order G. Rewards should not be negative: with both signs the mean
  may be close to 0, and advantages are then large. A group whose mean is not above 0 by more than
  rounding has advantage 0.

  Args:
    rewards: One reward for each attempt, P prompts by G attempts.
    mask: True for attempts that count. None: all count.

  Returns:
    Advantage Â of each attempt, from -1 to G - 1 if no reward is negative; 0 for masked attempts.

  Reference:
    Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning", arXiv:2602.02710; prime-rl's
    `max_rl`.
  """
  return group_relative(rewards, mask, scale="group_mean")


def opo(
  rewards: arrays.Numbers, lengths: arrays.Numbers, mask: arrays.Mask | None = None
) -> Float[Array, "*shape"]:
  """Subtracts the length-weighted mean: Âᵢ = rᵢ - Σⱼ |oⱼ| rⱼ / Σⱼ |oⱼ|.

  This is the baseline of smallest variance if the squared gradient of a completion grows like its
  length.

  Args:
    rewards: One reward for each attempt, P prompts by G attempts.
    lengths: Number |o| of sampled tokens of each attempt.
    mask: True for attempts that count. None: all count.

  Returns:
    Advantage Â of each attempt; 0 for masked attempts and for groups of one.

  Reference:
    Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585; verl's `opo`.
  """
  return group_relative(rewards, mask, baseline="length_weighted", scale="none", lengths=lengths)


def remax(
  rewards: arrays.Numbers, greedy: arrays.Numbers, mask: arrays.Mask | None = None
) -> Float[Array, "*shape"]:
  """Subtracts the reward of the greedy completion: Âᵢ = rᵢ - r(greedy).

  Args:
    rewards: One reward for each attempt, P prompts by G attempts; one attempt is enough.
    greedy: Reward of the completion of each prompt at temperature 0, [P]. Where it is not finite,
      the advantages of the prompt are 0.
    mask: True for attempts that count. None: all count.

  Returns:
    Advantage Â of each attempt; 0 for masked attempts.

  Reference:
    Li et al. 2023, "ReMax", arXiv:2310.10505, equation 5; verl's `remax`.
  """
  return group_relative(rewards, mask, baseline="greedy", scale="none", greedy=greedy)


def pass_at_k(
  rewards: arrays.Numbers,
  mask: arrays.Mask | None = None,
  *,
  k: int,
  scale: str = "group_std",
  eps: float = 1e-6,
) -> Float[Array, "*shape"]:
  """Computes the advantage of each attempt for the best reward of k attempts, in closed form.

      R(S) = max_{j ∈ S} rⱼ,   R̄ and σ its mean and standard deviation over all S of k attempts
      Âᵢ = ( mean_{S ∋ i} R(S) - R̄ ) / (σ + ε)

  With rewards of 0 and 1, N attempts and N₋ failures this is the analytical form of "Pass@k
  Training": R̄ = 1 - C(N₋, k) / C(N, k), σ² = R̄ (1 - R̄), (1 - R̄) / σ for a success, and
  (1 - R̄ - C(N₋ - 1, k - 1) / C(N - 1, k - 1)) / σ for a failure. Here rewards may be any numbers.
  k = 1 is GRPO with the biased standard deviation.

  Args:
    rewards: One reward for each attempt, P prompts by G attempts.
    mask: True for attempts that count. None: all count.
    k: Number of attempts of a set.
    scale: "group_std", the σ of the sets, or "none", which does not divide.
    eps: Term ε, in units of the reward.

  Returns:
    Advantages, which sum to 0 over a group; 0 where fewer than k attempts count.

  Raises:
    ValueError: The number k is below 1, or the scale is unknown.

  Reference:
    Chen et al. 2025, "Pass@k Training", arXiv:2508.10751, section 2.4, and RUCAIBox/Passk_Training;
    the maximum of rewards that are not binary as in PKPO, Walder and Karkhanis 2025,
    arXiv:2505.15201.
  """
  if k < 1:
    raise ValueError(f"k must be at least 1, got {k}")
  arrays.number("eps", eps, low=0)
  if scale not in ("group_std", "none"):
    raise ValueError(f"the scale of pass_at_k is 'group_std' or 'none', got {scale!r}")
  rewards, mask, shape = arrays.groups(rewards, mask)
  rewards, mask = valid_rewards(rewards, mask)
  exponent = moments.exponents(rewards, mask)
  scaled = jnp.where(mask, moments.times_power(rewards, -exponent), -jnp.inf)
  order = jnp.argsort(scaled, axis=-1, descending=True)  # the best first, masked ones last.
  ranked = jnp.take_along_axis(scaled, order, axis=-1)
  # Differences to the best reward: those of equal rewards are exactly 0.
  below = jnp.where(jnp.isfinite(ranked), ranked - ranked[:, :1], 0)
  best, own, others = (table[mask.sum(axis=-1)] for table in _shares_of_sets(rewards.shape[1], k))
  centre = (best * below).sum(axis=-1, keepdims=True)
  # Of the sets with attempt i, the best is i itself, or one of those that rank before it.
  before = jnp.cumsum(others * below, axis=-1) - others * below
  centred = own * below + before - centre
  if scale == "none":
    estimate = moments.held(moments.times_power(centred, exponent))
  else:
    variance = (best * jnp.square(below - centre)).sum(axis=-1, keepdims=True)
    # The best rewards of all sets may differ by rounding alone although those of attempts do not.
    is_spread = variance > (2 * jnp.finfo(rewards.dtype).eps) ** 2
    sigma = jnp.sqrt(jnp.where(is_spread, variance, 1))
    added = moments.times_power(jnp.asarray(eps, rewards.dtype), -exponent)
    estimate = jnp.where(is_spread, centred / (sigma + added), 0)
  estimate = jnp.where(moments.has_spread(rewards, mask)[:, None], estimate, 0)
  home = jnp.take_along_axis(estimate, jnp.argsort(order, axis=-1), axis=-1)
  return jnp.where(mask, home, 0).reshape(shape)


def _shares_of_sets(group: int, k: int) -> tuple[Float[Array, "N G"], ...]:
  """Returns the shares of the sets of k of n attempts, for n from 0 to `group`, by rank r from 0.

  Returns:
    The share of all sets whose best is r; of the sets with r, the share whose best is r; of the
    sets with a worse attempt, the share whose best is r. 0 for n < k and for r >= n.
  """
  choose = lambda n, m: math.comb(n, m) if 0 <= m <= n else 0
  tables = np.zeros((3, group + 1, group))
  for n in range(k, group + 1):
    sets, with_one = choose(n, k), choose(n - 1, k - 1)
    for r in range(n):
      worse = n - 1 - r
      counts = (choose(worse, k - 1), choose(worse, k - 1), choose(worse - 1, k - 2))
      tables[:, n, r] = counts[0] / sets, counts[1] / with_one, counts[2] / with_one
  best, own, others = (jnp.asarray(table, jnp.result_type(float)) for table in tables)
  return best, own, others


def gdpo(
  components: arrays.Numbers,
  mask: arrays.Mask | None = None,
  *,
  weights: tuple[float, ...] | None = None,
  baseline: str = "group_mean",
  ddof: int = 1,
  eps: float = 1e-6,
) -> Float[Array, "*shape"]:
  """Normalises each reward component separately, adds them up, and whitens over the batch.

      Âᵢ = white( Σₖ wₖ Âᵢ⁽ᵏ⁾ ),   Â⁽ᵏ⁾ = group_relative(r⁽ᵏ⁾),   white(x) = (x - mean) / std

  mean and std (ddof 1, no ε) run over all valid attempts of the batch; if std is 0, only the
  mean is subtracted. If the components cancel in all attempts, advantages are 0, and not what
  rounding leaves. A component that is not finite is left out for that attempt alone;
  an attempt without any finite component is masked.

  Args:
    components: K >= 2 rewards for each attempt.
    mask: True on attempts that count; see the module's docstring.
    weights: Weight wₖ of each component; None: all 1.
    baseline: Baseline of each component; see `baseline_and_spread`.
    ddof: Delta degrees of freedom of each component's spread.
    eps: Constant added to each component's spread.

  Returns:
    Advantage Â of each attempt; 0 for masked attempts.

  Raises:
    ValueError: There are fewer than 2 components, or the number of weights differs from theirs.

  Reference:
    Liu et al. 2026, GDPO, arXiv:2601.05242, equations 4 to 7 (which add an ε to the last
    standard deviation); NeMo RL's `gdpo`.
  """
  components = arrays.floats(components, "components")
  if components.ndim not in (2, 3):
    raise ValueError(
      f"components must have the shape [K, P, G], or [K, G] for one prompt, got {components.shape}"
    )
  count = components.shape[0]
  mask = None if mask is None else arrays.mask(mask, components.shape[1:])
  if count < 2:
    raise ValueError(f"gdpo needs at least 2 reward components, got {count}; use group_relative")
  each = (1.0,) * count if weights is None else tuple(weights)
  if len(each) != count:
    raise ValueError(f"gdpo got {len(each)} weights for {count} reward components")
  total = size = jnp.zeros_like(components[0])
  for component, weight in zip(components, each, strict=True):
    part = weight * group_relative(component, mask, baseline=baseline, ddof=ddof, eps=eps)
    total, size = total + part, size + jnp.abs(part)
  # The rounding of means and deviations of G rewards, and of the sum of K advantages.
  rounding = 4 * (components.shape[-1] + count) * jnp.finfo(total.dtype).eps
  is_left = jnp.abs(total).max(initial=0) > rounding * size.max(initial=0)
  total = jnp.where(is_left, total, 0)
  is_scored = jnp.isfinite(components).any(axis=0)
  valid = (is_scored if mask is None else mask & is_scored).reshape(1, -1)
  flat = jnp.where(valid, total.reshape(1, -1), 0)
  exponent = moments.exponents(flat, valid)
  scaled = moments.times_power(flat, -exponent)
  centre, spread = moments.centre_and_spread(scaled, valid)
  centred = scaled - centre
  plain = moments.held(moments.times_power(centred, exponent))
  white = jnp.where(spread > 0, centred / jnp.where(spread > 0, spread, 1), plain)
  return jnp.where(valid, white, 0).reshape(total.shape)


def whiten(
  advantages: arrays.Numbers,
  mask: arrays.Mask,
  *,
  counts: arrays.Numbers | None = None,
  ddof: int = 0,
  floor: float = 1e-8,
  eps: float = 0.0,
) -> Float[Array, "*shape"]:
  """Whitens advantages over all tokens of the RL batch (REINFORCE++), before it is split.

      Âₜ = (Aₜ - μ) / sqrt( max(σ², floor) + ε ),   μ, σ² over the unmasked tokens

  Args:
    advantages: Advantages per token; or per attempt [P G], with the tokens of each in `counts`.
    mask: True on the tokens that are learned from. Pass the whole batch: the moments of
      a microbatch differ from those of the batch.
    counts: Number of tokens that an entry represents; None: 1 each.
    ddof: Delta degrees of freedom of the variance: 0 in NeMo RL, 1 in verl.
    floor: Lower bound of the variance; 1e-8 in NeMo RL, 0 in verl.
    eps: Constant added to the variance; 0 in NeMo RL, 1e-8 in verl.

  Returns:
    Whitened advantages, 0 on masked entries, and 0 everywhere if all are equal but for rounding.

  Reference:
    Hu et al. 2025, REINFORCE++, arXiv:2501.03262 (version 9), equation 5.
  """
  arrays.number("floor", floor, low=0)
  _check_numbers(ddof, eps)
  advantages = arrays.floats(advantages, "advantages")
  mask = arrays.mask(mask, advantages.shape)
  counts = jnp.ones_like(advantages) if counts is None else arrays.floats(counts, "counts")
  arrays.tokens(advantages=advantages, counts=counts, mask=mask)
  mask = mask & (counts > 0)
  counts = jnp.where(mask, counts, 0)
  kept, is_kept = jnp.where(mask, advantages, 0).reshape(-1), mask.reshape(-1)
  exponent = moments.exponents(kept, is_kept)[0]
  scaled = moments.times_power(jnp.where(mask, advantages, 0), -exponent)
  differences = jnp.where(mask, scaled - scaled.reshape(-1)[jnp.argmax(is_kept)], 0)
  n = counts.sum()
  offset = safe_divide((counts * differences).sum(), n)
  centred = jnp.where(mask, differences - offset, 0)
  variance = safe_divide((counts * jnp.square(centred)).sum(), n - ddof)
  # Floor and eps are compared as standard deviations: squares of the units could overflow.
  units = lambda x: moments.times_power(jnp.sqrt(jnp.asarray(x, variance.dtype)), -exponent)
  lowest, added = units(floor), units(eps)
  deviation = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1)), 0)
  below = jnp.hypot(jnp.maximum(deviation, lowest), added)
  white = centred * safe_divide(jnp.ones_like(below), below)
  return jnp.where(moments.has_spread(kept, is_kept), white, 0)


def subtract_kl(
  advantages: Float[Array, "B N"],
  old_logprobs: Float[Array, "B N"],
  ref_logprobs: Float[Array, "B N"],
  mask: Bool[Array, "B N"],
  *,
  kl_coef: float,
  estimator: str = "k3",
  input_clamp: float | None = 20.0,
  output_clamp: float | None = 10.0,
) -> Float[Array, "B N"]:
  """Subtracts β KL(π_old ‖ π_ref) of each token from its advantage: "KL in the reward".

      Aₜ ← Aₜ - β k(log π_old, log π_ref)

  NeMo RL uses only the KL of token t for token t, as here; verl and the paper
  sum it over the tokens from t on. Apply `whiten` afterwards.

  Args:
    advantages: Advantage Âₜ of each token, constant over a completion in GRPO.
    old_logprobs: Logprob log π_old of each token, in nats, by the trainer's own numerics.
    ref_logprobs: Logprob log π_ref of each token, in nats, by the frozen reference policy.
    mask: True on the tokens that are learned from.
    kl_coef: Coefficient β, in units of the reward per nat.
    estimator: Estimator k: "k1", "k2" or "k3"; see `kl`.
    input_clamp: Bound of the log-ratio on both sides, in nats; None: no clamp.
    output_clamp: Bound of the estimate on both sides, in nats; None: no clamp.

  Returns:
    The advantages minus the penalty; 0 where `mask` is False.

  Reference:
    Hu et al. 2025, REINFORCE++, arXiv:2501.03262 (version 9), equation 4, there with k1.
  """
  advantages, old, ref = arrays.tokens(
    advantages=advantages, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, mask=mask
  )
  arrays.number("kl_coef", kl_coef, low=0)
  penalty = kl_penalty(
    masks.fill(old, mask),
    masks.fill(ref, mask),
    estimator=estimator,
    input_clamp=input_clamp,
    output_clamp=output_clamp,
  )
  return masks.fill(masks.fill(advantages, mask) - kl_coef * penalty, mask)


def clip(
  advantages: arrays.Numbers, *, low: Bound = None, high: Bound = None
) -> Float[Array, "*shape"]:
  """Clips advantages to [low, high]; None leaves a side open. The last step, after scaling.

  Args:
    advantages: Advantages of any shape.
    low: Lowest advantage; None: no bound.
    high: Highest advantage; None: no bound.

  Returns:
    The advantages within the bounds.

  Raises:
    ValueError: The bounds are reversed, or one is NaN.
  """
  if low is not None and high is not None and not _is_traced(low, high) and not low <= high:
    raise ValueError(f"low must not exceed high, got {low} > {high}")
  return clamp(arrays.floats(advantages, "advantages"), low, high)


def _is_traced(*values: Any) -> bool:
  return any(isinstance(value, Tracer) for value in values)
