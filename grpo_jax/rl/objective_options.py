"""The options of an objective, their defaults, and which of them exclude each other. Pure.

Defaults are those of NeMo RL's `grpo_math_1B` recipe.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_jax.rl import aggregate, importance, kl

LOSSES = (
  "clipped",
  "gspo",
  "gspo_token",
  "cispo",
  "sapo",
  "reinforce",
  "gmpo",
  "luspo",
  "vespo",
)
CLIPPED = ("clipped", "gspo", "gspo_token", "cispo", "luspo")  # ρ is clipped to 1 ± ε.
OF_SEQUENCES = ("gspo", "gspo_token", "gmpo", "luspo")  # one ratio per completion.
TOKEN_LOCAL = ("clipped", "cispo", "sapo", "reinforce")  # a token's loss is its own.
KL_WEIGHTS = ("score", "none", "old")


@dataclasses.dataclass(frozen=True)
class Options:
  """What an objective is made of; checked when made."""

  loss: str = "clipped"  # one of LOSSES.
  clip_low: float = 0.2  # distance of the lower bound from 1; gmpo: of the log-ratio from 0.
  clip_high: float = 0.2  # distance of the upper bound from 1; cispo: 4.0 is TRL's 5.0.
  dual_clip: float | None = None  # > 1; bounds the ratio of bad tokens; 3 is usual.
  force_on_policy_ratio: bool = False  # old := policy; strictly one update per batch.
  sapo_temperature_positive: float = 1.0
  sapo_temperature_negative: float = 1.05
  kl_coef: float = 0.01  # β; 0 needs no reference policy.
  kl_estimator: str = "k3"  # "k1" | "k2" | "k3".
  kl_input_clamp: float | None = 20.0  # nats, of the log-ratio to the reference.
  kl_output_clamp: float | None = 10.0  # nats, of the weighted estimate per token.
  kl_weight: str = "score"  # "score" (exact gradient) | "none" (TRL, verl) | "old" (πθ/π_old).
  use_on_policy_kl_approximation: bool = False  # weighs the KL by πθ/μ instead.
  kl_in_reward: bool = False  # the KL is taken off the advantages before; the loss has none.
  entropy_coef: float = 0.0  # rewards entropy; > 0 needs the full distributions.
  importance_correction: str = "none"  # "none" | "token" | "sequence" | "sequence_mean".
  importance_truncation: str | None = None  # None | "tis" | "icepop" | "seq_mask".
  importance_low: float = 0.0  # inclusive lower bound of π_old/μ.
  importance_high: float = math.inf  # inclusive upper bound.
  off_policy_mask_threshold: float | None = None  # nats per token; drops far-off bad completions.
  aggregation: str = "token_mean"  # "token_mean" | "sequence_mean" | "constant_length".
  max_completion_tokens: int | None = None  # the length that "constant_length" divides by.

  @property
  def is_clipped(self) -> bool:
    """Whether the loss clips a ratio to [1 - clip_low, 1 + clip_high]."""
    return self.loss in CLIPPED


def nearest(name: object, valid: Iterable[str]) -> str:
  """Returns a hint for an error message: the nearest valid name and all of them."""
  names = sorted(valid)
  close = difflib.get_close_matches(str(name), names, n=1)
  return (f"did you mean {close[0]!r}? " if close else "") + f"there are: {', '.join(names)}"


def checked(options: Mapping[str, Any]) -> Options:
  """Makes `Options`.

  Raises:
    ValueError: on an unknown option or choice, a value out of range, or options
      that exclude each other; the message says all that is wrong, and why.
  """
  fields = {field.name for field in dataclasses.fields(Options)}
  unknown = [
    f"no option {name!r}: {nearest(name, fields)}" for name in options if name not in fields
  ]
  if unknown:
    raise ValueError("objective: " + "; ".join(unknown))
  made = Options(**options)
  problems = _unknown_choices(made) or [*_out_of_range(made), *_incompatible(made)]
  if problems:
    raise ValueError("objective: " + "; ".join(problems))
  return made


def _unknown_choices(o: Options) -> list[str]:
  """Returns a message for every choice that does not exist."""
  choices = {
    "loss": (o.loss, LOSSES),
    "kl_estimator": (o.kl_estimator, tuple(kl.ESTIMATORS)),
    "kl_weight": (o.kl_weight, KL_WEIGHTS),
    "importance_correction": (o.importance_correction, importance.LEVELS),
    "aggregation": (o.aggregation, tuple(aggregate.AGGREGATIONS)),
  }
  if o.importance_truncation is not None:
    choices["importance_truncation"] = (o.importance_truncation, importance.TRUNCATIONS)
  return [
    f"no {option} {chosen!r}: {nearest(chosen, valid)}"
    for option, (chosen, valid) in choices.items()
    if chosen not in valid
  ]


def _out_of_range(o: Options) -> list[str]:
  """Returns a message for every number that makes no sense by itself."""
  lower = {
    "clip_low": o.clip_low,
    "clip_high": o.clip_high,
    "kl_coef": o.kl_coef,
    "entropy_coef": o.entropy_coef,
    "importance_low": o.importance_low,
    "off_policy_mask_threshold": o.off_policy_mask_threshold,
  }
  positive = {
    "importance_high": o.importance_high,
    "kl_input_clamp": o.kl_input_clamp,
    "kl_output_clamp": o.kl_output_clamp,
    "max_completion_tokens": o.max_completion_tokens,
    "sapo_temperature_positive": o.sapo_temperature_positive,
    "sapo_temperature_negative": o.sapo_temperature_negative,
  }
  problems = [
    f"{name} must be a finite number >= 0, got {value}"
    for name, value in lower.items()
    if value is not None and not 0 <= value < math.inf
  ]
  problems += [
    f"{name} must be > 0, got {value}"
    for name, value in positive.items()
    if value is not None and not value > 0
  ]
  if o.dual_clip is not None and not 1 < o.dual_clip < math.inf:
    problems.append(f"dual_clip must be > 1, for it bounds a ratio from above, got {o.dual_clip}")
  if o.importance_low > o.importance_high:
    problems.append(
      f"importance_low must be <= importance_high, got {o.importance_low} > {o.importance_high}"
    )
  return problems


def _incompatible(o: Options) -> list[str]:
  """Returns a message for every pair of options that exclude each other."""
  has_correction = o.importance_correction != "none"
  has_bounds = o.importance_low > 0 or o.importance_high < math.inf
  of_sequence_weights = o.importance_correction in ("sequence", "sequence_mean")
  rules = {
    f"loss={o.loss!r} has one ratio per completion and needs aggregation='sequence_mean', "
    f"got {o.aggregation!r}": o.loss in OF_SEQUENCES and o.aggregation != "sequence_mean",
    f"dual_clip is a bound of PPO's clipped loss; loss={o.loss!r} does not take it": (
      o.dual_clip is not None and o.loss not in ("clipped", "gspo", "gspo_token")
    ),
    f"clip_low must be <= 1 for loss={o.loss!r}, for ratios are positive, got {o.clip_low}": (
      o.clip_low > 1 and o.loss in ("clipped", "gspo", "gspo_token", "luspo")
    ),
    "force_on_policy_ratio sets the ratio to 1, and loss='reinforce' has no ratio": (
      o.force_on_policy_ratio and o.loss == "reinforce"
    ),
    "importance_truncation needs importance_correction other than 'none'": (
      o.importance_truncation is not None and not has_correction
    ),
    "importance_low and importance_high need an importance_truncation": (
      has_bounds and o.importance_truncation is None
    ),
    "importance_truncation needs importance_high (or importance_low)": (
      o.importance_truncation is not None and not has_bounds
    ),
    "importance_truncation='seq_mask' keeps token weights, so importance_correction is 'token'": (
      o.importance_truncation == "seq_mask" and of_sequence_weights
    ),
    "kl_in_reward needs old_logprobs, which force_on_policy_ratio does not score": (
      o.kl_in_reward and o.force_on_policy_ratio
    ),
    "kl_in_reward needs kl_coef > 0": o.kl_in_reward and o.kl_coef == 0,
    "kl_in_reward leaves no KL in the loss for use_on_policy_kl_approximation to weigh": (
      o.kl_in_reward and o.use_on_policy_kl_approximation
    ),
    "use_on_policy_kl_approximation is a weight of the KL; kl_weight must stay 'score', "
    f"got {o.kl_weight!r}": o.use_on_policy_kl_approximation and o.kl_weight != "score",
    "aggregation='constant_length' needs max_completion_tokens": (
      o.aggregation == "constant_length" and o.max_completion_tokens is None
    ),
  }
  return [reason for reason, is_broken in rules.items() if is_broken]
