"""Composes losses, weights, masks and reductions into one objective. Pure.

`make(**options)` checks the options and returns an `Objective`, a frozen,
hashable value with a pure `__call__`; `objective_options` documents each option.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Float

from grpo_jax.rl import (
  aggregate,
  arrays,
  custom_functions,
  diagnostics,
  distillation,
  importance,
  kl,
  losses,
  masks,
  objective_options,
  policy_terms,
  proximal,
  staleness,
)
from grpo_jax.rl.distillation import Distillation
from grpo_jax.rl.numerics import clamp, safe_divide
from grpo_jax.rl.objective_options import COVARIANCE, DPPO, TOKEN_LOCAL, ResolvedOptions
from grpo_jax.types import Denominators, LossTokens, Maximum, Mean, Metrics

# Fields of `LossTokens` that hold a number for each token.
_FLOATS = (
  *("advantages", "behavior_logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs"),
  "weights",
)


@dataclasses.dataclass(frozen=True)
class Objective:
  """A loss of policy logprobs, with what it needs from the trainer; made by `make`."""

  options: ResolvedOptions
  distillation: Distillation | None = None  # None: there is no teacher.

  @property
  def needs_old(self) -> bool:
    """Whether π_old is used: score it before the first of several updates on one batch.

    With a single update per batch, or before its first, π_old is the policy
    itself: leave `LossTokens.old_logprobs` None and skip the scoring pass.
    """
    o = self.options
    return self.reads_old and not (o.force_on_policy_ratio or o.interpolates)

  @property
  def reads_old(self) -> bool:
    """Whether the loss depends on π_old, wherever its logprobs come from."""
    o = self.options
    has_ratio = o.loss != "reinforce"
    if callable(o.loss):
      has_ratio = "old_logprobs" in custom_functions.names_of(o.loss)
    has_ratio = has_ratio and not o.use_behavior_logprobs
    return (
      has_ratio
      or o.importance_correction != "none"
      or o.kl_in_reward
      or o.kl_weight == "old"
      or self.needs_teacher
    )

  @property
  def needs_ages(self) -> bool:
    """Whether the ages of tokens must be in the batch: `LossTokens.ages`."""
    return self.options.interpolates

  @property
  def needs_teacher(self) -> bool:
    """Whether the teacher's logprobs must be scored."""
    return self.distillation is not None

  @property
  def drops_by_error(self) -> bool:
    """Whether completions are left out by their logprob error: score π_old in every step."""
    return self.options.seq_logprob_error_threshold is not None

  @property
  def selects(self) -> bool:
    """Whether tokens are chosen among all of the optimizer step: `LossTokens.selected`."""
    return self.options.selects

  @property
  def selects_by_entropy(self) -> bool:
    """Whether the choice of tokens needs the entropy of the full distributions."""
    return self.options.top_entropy_share < 1

  @property
  def needs_ref(self) -> bool:
    """Whether the reference policy's logprobs must be scored."""
    return self.options.kl_coef > 0

  @property
  def needs_entropy(self) -> bool:
    """Whether the entropy of the full distributions must be computed, with its gradient."""
    return self.options.entropy_coef > 0

  @property
  def is_token_local(self) -> bool:
    """Whether a token's share of the loss depends on that token alone, given the denominators."""
    o = self.options
    return (
      (custom_functions.is_token_local(o.loss) if callable(o.loss) else o.loss in TOKEN_LOCAL)
      and o.aggregation != "sequence_mean"
      and o.importance_correction in ("none", "token")
      and o.importance_truncation != "seq_mask"
      and o.off_policy_mask_threshold is None
    )

  @property
  def acts_without_advantage(self) -> bool:
    """Whether a completion of advantage 0 can change the update."""
    o = self.options
    has_own = callable(o.loss) and custom_functions.check_loss(o.loss, o.own_options)
    has_penalty = o.kl_coef or o.entropy_coef or o.dppo_kl_tau or self.needs_teacher
    return bool(has_own or has_penalty or self.selects or self.drops_by_error)

  @property
  def reduce(self) -> Callable[..., Float[Array, ""]]:
    """The reduction of `aggregate` that the options name."""
    chosen = aggregate.AGGREGATIONS[str(self.options.aggregation)]
    if self.options.aggregation != "constant_length":
      return chosen
    return functools.partial(chosen, max_completion_tokens=self.options.max_completion_tokens)

  def __call__(
    self,
    policy_logprobs: Float[Array, "B N"],
    entropy: Float[Array, "B N"] | None,
    tokens: LossTokens,
    denominators: Denominators,
    full_logprobs: Float[Array, "B N"] | None = None,
  ) -> tuple[Float[Array, ""], Metrics]:
    """Computes this part's share of the loss, to be minimised, and its metrics.

        L = reduce(w ℓ) + β reduce(KL) + c reduce(-H)

    With `LossTokens.weights` every term of a token is multiplied by the weight of its completion.

    The shares of all parts of an optimizer step add up to the step's loss, and
    so do the gradients. Values at masked places have no effect, and a token of probability 0 (a
    logprob of -inf) has no loss. With a teacher, the advantages are those of
    `distillation.mixed`.

    Args:
      policy_logprobs: Logprob log πθ, the only differentiated input apart from `entropy`.
      entropy: Entropy of the full distributions, in nats; needed if `needs_entropy`, otherwise
        only reported.
      tokens: Gathered batch; if `old_logprobs` is None, the policy's own logprobs are used.
      denominators: Counts of the whole optimizer step; see `aggregate`.
      full_logprobs: Logprob log πθ of the whole softmax, for the KL to the reference, if
        `policy_logprobs` are of a truncated distribution; None: they are of the whole softmax.

    Returns:
      The scalar loss, and metrics under "train/" and "mismatch/" (docs/algorithms.md).

    Raises:
      ValueError: An input that the options need is missing, or shapes differ.
    """
    o = self.options
    _check_shapes(policy_logprobs, entropy, tokens, denominators)
    tokens = _clean(tokens)
    _check_inputs(self, tokens)
    of_errors, tokens = _without_errors(o, tokens)
    tokens = _without_impossible(policy_logprobs, tokens)
    policy = masks.fill(arrays.floats(policy_logprobs, "policy_logprobs"), tokens.mask)
    old = _scored_old(o, policy, tokens)
    tokens, taught = _taught(self.distillation, old, tokens)
    per_token, metrics = _policy_term(o, policy, old, tokens)
    metrics |= {**of_errors, **taught}
    terms = {"train/policy_loss": (1.0, per_token)}
    if self.reports_kl:
      full = policy if full_logprobs is None else masks.fill(full_logprobs, tokens.mask)
      terms["train/kl_to_reference"] = (o.kl_coef, _kl_term(o, full, old, tokens))
    if self.needs_entropy and entropy is None:
      raise ValueError("entropy_coef > 0 needs the entropy, and none was given")
    if entropy is not None:
      bonus = losses.entropy_bonus(masks.fill(entropy, tokens.mask))
      metrics["train/entropy"] = diagnostics.token_average(-bonus, tokens.mask)
      if self.needs_entropy:
        terms["train/entropy_bonus"] = (o.entropy_coef, bonus)
    local = aggregate.local_denominators(tokens.mask, tokens.sequence_ids, tokens.weights)
    total = jnp.zeros((), policy.dtype)
    for name, (coefficient, values) in terms.items():
      values = values if tokens.weights is None else tokens.weights * values
      part = self.reduce(values, tokens.mask, Denominators(1.0, 1.0), tokens.sequence_ids)
      metrics[name] = Mean(part, _divisor(o, local))
      total = total + coefficient * part
    metrics["train/loss"] = Mean(total, _divisor(o, local))
    loss = safe_divide(total, _divisor(o, denominators))
    return loss, jax.tree.map(stop_gradient, metrics)

  @property
  def reports_kl(self) -> bool:
    """Whether "train/kl_to_reference" is among the metrics of the loss."""
    return self.needs_ref and not self.options.kl_in_reward

  def mismatch(self, policy_logprobs: Float[Array, "B N"], tokens: LossTokens) -> Metrics:
    """Measures the policy against the engine as the loss does, where nothing is learned.

    Args:
      policy_logprobs: Logprobs of the policy, log πθ, in nats.
      tokens: Gathered batch with `behavior_logprobs`.

    Returns:
      "mismatch/*", "train/approx_entropy" and, if the tokens have ages, "staleness/*".
    """
    tokens = _clean(tokens)
    policy = masks.fill(arrays.floats(policy_logprobs, "policy_logprobs"), tokens.mask)
    assert tokens.behavior_logprobs is not None
    old = _scored_old(self.options, policy, tokens)
    return _correction(self.options, policy, old, tokens.behavior_logprobs, tokens)[1]

  def kl_to_reference(self, policy_logprobs: Float[Array, "B N"], tokens: LossTokens) -> Mean:
    """Measures "train/kl_to_reference" as the loss does, whether it has a KL or not.

    Args:
      policy_logprobs: Logprobs of the policy, log πθ, in nats.
      tokens: Gathered batch with `ref_logprobs`.
    """
    tokens = _clean(tokens)
    policy = masks.fill(arrays.floats(policy_logprobs, "policy_logprobs"), tokens.mask)
    values = _kl_term(self.options, policy, policy, tokens)
    local = aggregate.local_denominators(tokens.mask, tokens.sequence_ids)
    part = self.reduce(values, tokens.mask, Denominators(1.0, 1.0), tokens.sequence_ids)
    return Mean(part, _divisor(self.options, local))


def _clean(tokens: LossTokens) -> LossTokens:
  """Sets the masked places of every input to 0."""
  mask, ids = arrays.mask(tokens.mask), tokens.sequence_ids

  def filled(name: str) -> Any:
    values = getattr(tokens, name)
    return None if values is None else masks.fill(arrays.floats(values, name), mask)

  fields: dict[str, Any] = {name: filled(name) for name in _FLOATS}
  for name, mark in {"selected": tokens.selected, "kept": tokens.kept}.items():
    fields[name] = None if mark is None else arrays.mask(mark, name=name) & mask
  return LossTokens(
    mask=mask,
    sequence_ids=None if ids is None else jnp.where(mask, jnp.asarray(ids), 0),
    **fields,
    ages=None if tokens.ages is None else jnp.where(mask, tokens.ages, staleness.UNKNOWN),
  )


def _check_shapes(policy: Any, entropy: Any, tokens: LossTokens, denominators: Any) -> None:
  """Raises ValueError if arrays of tokens have different shapes, or denominators another type."""
  aggregate.check_denominators(denominators)
  named = {"policy_logprobs": policy, "entropy": entropy}
  named |= {f"LossTokens.{name}": getattr(tokens, name) for name in _FLOATS}
  values = {name: x for name, x in named.items() if x is not None}
  arrays.tokens(mask=tokens.mask, sequence_ids=tokens.sequence_ids, **values)


def _without_errors(o: ResolvedOptions, tokens: LossTokens) -> tuple[Metrics, LossTokens]:
  """Returns the tokens without the completions that were left out, and metrics of these."""
  if o.seq_logprob_error_threshold is None:
    return {}, tokens
  mask, ids, kept = tokens.mask, tokens.sequence_ids, tokens.kept
  old, behavior = tokens.old_logprobs, tokens.behavior_logprobs
  assert kept is not None and old is not None and behavior is not None
  errors = importance.seq_logprob_errors(old, behavior, mask, ids)
  dropped = (~kept).astype(errors.dtype)
  metrics: Metrics = {
    "mismatch/seq_logprob_error_max": Maximum(masks.masked_max(errors, mask)),
    "mismatch/seq_logprob_error_masked_share": diagnostics.sequence_average(dropped, mask, ids),
  }
  return metrics, _clean(dataclasses.replace(tokens, mask=mask & kept))


def _without_impossible(policy: Float[Array, "B N"], tokens: LossTokens) -> LossTokens:
  """Returns the tokens without those that the policy gives probability 0: log 0 has no gradient.

  They still count in the denominators, which the caller gives.
  """
  is_possible = arrays.floats(policy, "policy_logprobs") != -jnp.inf
  return _clean(dataclasses.replace(tokens, mask=tokens.mask & is_possible))


def _scored_old(
  o: ResolvedOptions, policy: Float[Array, "B N"], tokens: LossTokens
) -> Float[Array, "B N"]:
  """Returns log π_old; without old logprobs in the tokens, it is the policy itself."""
  if o.interpolates:
    assert tokens.behavior_logprobs is not None and tokens.ages is not None
    return jnp.asarray(proximal.interpolated(policy, tokens.behavior_logprobs, tokens.ages))
  old = None if o.force_on_policy_ratio else tokens.old_logprobs
  return stop_gradient(policy if old is None else old)


def _anchor(
  o: ResolvedOptions, old: Float[Array, "B N"], tokens: LossTokens
) -> Float[Array, "B N"]:
  """Returns the logprobs to which the loss takes its ratio."""
  if not o.use_behavior_logprobs:
    return old
  assert tokens.behavior_logprobs is not None
  return stop_gradient(tokens.behavior_logprobs)


def _taught(
  teacher: Distillation | None, old: Float[Array, "B N"], tokens: LossTokens
) -> tuple[LossTokens, Metrics]:
  """Returns the tokens with the advantages that a teacher gives them, and its metrics."""
  if teacher is None or tokens.teacher_logprobs is None:
    return tokens, {}
  known = tokens.teacher_logprobs, old, tokens.mask, teacher
  mixed = distillation.mixed(tokens.advantages, *known)
  return dataclasses.replace(tokens, advantages=mixed), {**distillation.metrics(*known)}


def _check_inputs(objective: Objective, tokens: LossTokens) -> None:
  """Raises ValueError if the options need an input that the tokens lack."""
  o = objective.options
  if tokens.advantages is None:
    raise ValueError("LossTokens.advantages is None: every loss needs advantages")
  if tokens.ref_logprobs is None and o.kl_coef > 0 and not o.kl_in_reward:
    raise ValueError(f"kl_coef={o.kl_coef} needs ref_logprobs, and the batch has none")
  if tokens.teacher_logprobs is None and objective.needs_teacher:
    raise ValueError("distillation needs teacher_logprobs, and the batch has none")
  needs_behavior = {
    f"importance_correction={o.importance_correction!r}": o.importance_correction != "none",
    "off_policy_mask_threshold": o.off_policy_mask_threshold is not None,
    "use_on_policy_kl_approximation": o.use_on_policy_kl_approximation and o.kl_coef > 0,
    "use_behavior_logprobs": o.use_behavior_logprobs,
    "seq_logprob_error_threshold": o.seq_logprob_error_threshold is not None,
    "old_logprobs='interpolated'": o.interpolates,
  }
  reasons = [option for option, is_set in needs_behavior.items() if is_set]
  if reasons and tokens.behavior_logprobs is None:
    raise ValueError(f"{reasons[0]} needs behavior_logprobs, and LossTokens has none")
  if o.interpolates and tokens.ages is None:
    raise ValueError("old_logprobs='interpolated' needs the ages of tokens, and the batch has none")
  if o.selects and tokens.selected is None:
    what = f"loss={o.loss!r}" if o.top_entropy_share == 1 else "top_entropy_share"
    raise ValueError(f"{what} needs LossTokens.selected, which rl.selection.choose makes")
  missing = tokens.kept is None or tokens.old_logprobs is None
  if o.seq_logprob_error_threshold is not None and missing:
    raise ValueError(
      "seq_logprob_error_threshold needs old_logprobs, and LossTokens.kept, which"
      " rl.importance.seq_logprob_error_mask makes"
    )


def _policy_term(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> tuple[Float[Array, "B N"], Metrics]:
  """Returns w ℓ per token, and the metrics of ratios, clips and mismatch."""
  mask, ids, advantages = tokens.mask, tokens.sequence_ids, tokens.advantages
  term = policy_terms.own_loss if callable(o.loss) else policy_terms.POLICY_LOSSES[o.loss]
  anchor = _anchor(o, old, tokens)
  per_token, ratio = term(o, policy, anchor, tokens)
  low, high = o.clip_bounds if o.is_clipped else (0.0, 0.0)
  clipped = clamp(ratio, 1.0 - low, 1.0 + high) if o.is_clipped else ratio
  metrics = diagnostics.ratios(ratio, clipped, mask)
  if o.selects and tokens.selected is not None:
    metrics["train/selected_share"] = diagnostics.share(tokens.selected, mask)
  if o.top_entropy_share < 1 and tokens.selected is not None:
    per_token = jnp.where(tokens.selected, per_token, 0)
  if o.loss in DPPO:
    keep = policy_terms.dppo_keep(o, policy, anchor, tokens)
    metrics |= diagnostics.mask_shares(keep, advantages, mask)
  if tokens.behavior_logprobs is not None:
    weights, mismatch = _correction(o, policy, old, tokens.behavior_logprobs, tokens)
    metrics |= mismatch
    if o.importance_correction != "none":  # 0 · ∞ is not a number.
      per_token = jnp.where(weights == 0, 0, weights * per_token)
  if o.is_clipped:
    metrics |= diagnostics.clip_shares(
      ratio,
      advantages,
      mask,
      clip_low=low,
      clip_high=high,
      dual_clip=o.dual_clip,
    )
  if o.off_policy_mask_threshold is not None and tokens.behavior_logprobs is not None:
    keep = importance.off_policy_sequence_mask(
      policy, tokens.behavior_logprobs, advantages, mask, ids, threshold=o.off_policy_mask_threshold
    )
    per_token = jnp.where(keep, per_token, 0)
    dropped = (~keep).astype(policy.dtype)
    metrics["mismatch/off_policy_masked_share"] = diagnostics.sequence_average(dropped, mask, ids)
  return per_token, metrics


def _correction(
  o: ResolvedOptions,
  policy: Float[Array, "B N"],
  old: Float[Array, "B N"],
  behavior: Float[Array, "B N"],
  tokens: LossTokens,
) -> tuple[Float[Array, "B N"], Metrics]:
  """Returns the engine/trainer weight of each token, and the metrics of the mismatch."""
  mask, ids = tokens.mask, tokens.sequence_ids
  # Interpolated logprobs lie between the two that are compared, and would hide how they differ.
  measured = stop_gradient(policy) if o.interpolates else old
  by_age = {}
  if tokens.ages is not None:
    by_age = diagnostics.by_staleness(measured, behavior, tokens.ages, mask)
  weights, is_in_bounds = importance.correction_weights(
    old,
    behavior,
    mask,
    ids,
    level=o.importance_correction,
    truncation=o.importance_truncation,
    low=o.importance_low,
    high=o.importance_high,
  )
  by_sequence = o.importance_correction in ("sequence", "sequence_mean")
  return weights, {
    **diagnostics.mismatch(measured, behavior, mask, kl_estimator=o.kl_estimator),
    **by_age,
    **diagnostics.importance(
      weights,
      is_in_bounds,
      mask,
      ids,
      weights_are_of_sequences=by_sequence,
      bounds_are_of_sequences=by_sequence or o.importance_truncation == "seq_mask",
    ),
    "train/approx_entropy": diagnostics.approx_entropy(policy, behavior, mask),
  }


def _kl_term(
  o: ResolvedOptions, policy: Float[Array, "B N"], old: Float[Array, "B N"], tokens: LossTokens
) -> Float[Array, "B N"]:
  """Returns the weighted, clamped KL estimate per token, without its coefficient."""
  assert tokens.ref_logprobs is not None
  sampled_from = {"score": policy, "old": old, "none": None}[o.kl_weight]
  if o.use_on_policy_kl_approximation:
    sampled_from = tokens.behavior_logprobs
  return kl.kl_penalty(
    policy,
    tokens.ref_logprobs,
    sampled_from,
    estimator=o.kl_estimator,
    input_clamp=o.kl_input_clamp,
    output_clamp=o.kl_output_clamp,
  )


def _divisor(o: ResolvedOptions, denominators: Denominators) -> Float[Array, ""] | float:
  """Returns the count that the reduction divides by, apart from a constant length."""
  return denominators.tokens if o.aggregation == "token_mean" else denominators.sequences


def make(*, distillation: Distillation | None = None, **options: Any) -> Objective:
  """Makes an objective from options by name.

  Args:
    distillation: Options of a teacher's advantages; None: there is no teacher.
    **options: Options of the list below; those left out keep their defaults. Clip bounds and
      aggregation are then the loss's own; `.options` of the result has the numbers.

  Raises:
    ValueError: Options are unknown, out of range or incompatible; the message gives the reason.
  """
  made = objective_options.make(options)
  if distillation is not None and made.loss in COVARIANCE:
    raise ValueError(
      f"objective: loss={made.loss!r} chooses tokens by the advantages of the rewards,"
      " which a teacher changes: use another loss with a teacher"
    )
  objective = Objective(made, distillation)
  if made.interpolates and not objective.reads_old:
    raise ValueError(
      "objective: old_logprobs='interpolated' would never be read:"
      f" loss={objective_options.shown(made.loss)} takes no old logprobs, and no other option does"
    )
  return objective


# What `help(make)` shows; python -OO has no docstrings.
make.__doc__ = f"{make.__doc__}\n  Options:\n{objective_options.described()}"
