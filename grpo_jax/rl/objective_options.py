"""The options of an objective, their defaults, and which of them exclude each other. Pure.

They are declared in `options`. Bounds of the clip and the aggregation are
None by default: the loss's own settings, from the signature of its function, then apply.
"""

import dataclasses
import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from grpo_jax.rl import (
  aggregate,
  covariance_losses,
  custom_functions,
  dppo,
  importance,
  kl,
  losses,
  sequence_losses,
)
from grpo_jax.rl.options import ObjectiveOptions
from grpo_jax.values import checked, names
from grpo_jax.values.options import Option, declared, kinds

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
  "clipped": losses.clipped_surrogate,
  "gspo": losses.gspo,
  "gspo_token": losses.gspo,
  "cispo": losses.cispo,
  "sapo": losses.sapo,
  "reinforce": losses.reinforce,
  "gmpo": sequence_losses.gmpo,
  "luspo": sequence_losses.luspo,
  "vespo": sequence_losses.vespo,
  "dppo_tv": dppo.dppo_tv,
  "dppo_kl": dppo.dppo_kl,
  "clip_cov": covariance_losses.clip_cov,
  "kl_cov": covariance_losses.kl_cov,
}
LOSSES = tuple(FUNCTIONS)
CLIPPED = ("clipped", "gspo", "gspo_token", "cispo", "luspo", "clip_cov")  # ρ is clipped to 1 ± ε.
SEQUENCE_LOSSES = ("gspo", "gspo_token", "gmpo", "luspo")  # one ratio per completion.
DPPO = ("dppo_tv", "dppo_kl")
COVARIANCE = ("clip_cov", "kl_cov")  # choose tokens by their covariance; see `selection`.
# A token's loss is its own, once tokens are selected.
TOKEN_LOCAL = ("clipped", "cispo", "sapo", "reinforce", *DPPO, *COVARIANCE)
KL_WEIGHTS = ("score", "none", "old")
OLD_LOGPROBS = ("scored", "interpolated")
BOUNDS = ("clip_low", "clip_high", "dppo_mask_low", "dppo_mask_high")  # None: the loss's own.
# Options that only some losses read.
READ_BY: Mapping[str, tuple[str, ...]] = {
  **dict.fromkeys(("sapo_temperature_positive", "sapo_temperature_negative"), ("sapo",)),
  **dict.fromkeys(("dppo_mask_low", "dppo_mask_high", "dppo_ratio_cap", "dppo_kl_tau"), DPPO),
  **dict.fromkeys(("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"), ("clip_cov",)),
  **dict.fromkeys(("kl_cov_ratio", "kl_cov_coef"), ("kl_cov",)),
}

# Names used by papers and other libraries, and the options that they correspond to here.
OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
  "loss": {
    "grpo": "'clipped', the clipped surrogate of GRPO",
    "ppo": "'clipped', the clipped surrogate of PPO",
    "clip": "'clipped'",
    "vanilla": "'clipped'",
    "dapo": "'clipped' with clip_high=0.28",
    "bnpo": "'clipped' with aggregation='token_mean'",
    "dr_grpo": "'clipped' with aggregation='constant_length', and advantages 'dr_grpo'",
    "drgrpo": "'clipped' with aggregation='constant_length', and advantages 'dr_grpo'",
    "rloo": "'reinforce', with advantages 'rloo'",
    "reinforce_pp": "'clipped', with advantages 'reinforce_pp'",
    "reinforce++": "'clipped', with advantages 'reinforce_pp'",
    "gpg": "'reinforce'",
    "pg": "'reinforce'",
    "policy_gradient": "'reinforce'",
    "geo_mean": "'gmpo'",
    "dppo": "'dppo_tv' or 'dppo_kl'",
    "maxrl": "'clipped', with advantages 'maxrl'",
    "opo": "'reinforce', with advantages 'opo'",
    "remax": "'reinforce', with advantages 'remax'",
  },
  "old_logprobs": {
    "recompute": "'scored'",
    "loglinear": "'interpolated'",
  },
  "kl_estimator": {
    "kl": "'k1'",
    "mse": "'k2'",
    "low_var_kl": "'k3'",
  },
  "aggregation": {
    "token-mean": "'token_mean'",
    "seq-mean-token-mean": "'sequence_mean'",
    "seq-mean-token-sum-norm": "'constant_length'",
    "grpo": "'sequence_mean'",
    "bnpo": "'token_mean'",
    "dapo": "'token_mean'",
    "dr_grpo": "'constant_length'",
  },
}

CHOICES: Mapping[str, tuple[str, ...]] = {
  "loss": LOSSES,
  "kl_estimator": tuple(kl.ESTIMATORS),
  "kl_weight": KL_WEIGHTS,
  "old_logprobs": OLD_LOGPROBS,
  "importance_correction": importance.LEVELS,
  "importance_truncation": importance.TRUNCATIONS,
  "aggregation": tuple(aggregate.AGGREGATIONS),
}

_KINDS: Mapping[str, checked.Kind] = {
  **kinds(ObjectiveOptions),
  "loss": checked.Kind(
    "the name of a loss, or a function", lambda x: checked.text().fits(x) or callable(x)
  ),
}


@dataclasses.dataclass(frozen=True)
class ResolvedOptions(ObjectiveOptions):
  """The choices and numbers of an objective, resolved and checked when made.

  None of `BOUNDS`, and as `aggregation`, becomes the loss's own setting.

  Raises:
    ValueError: A choice is unknown, a value is of the wrong type or out of range, an option
      is set that the loss never reads, or options exclude each other. The message lists every
      problem.
  """

  def __post_init__(self):
    for name, value in _resolved(checked.fields_of(self)).items():
      object.__setattr__(self, name, value)

  @property
  def is_clipped(self) -> bool:
    """Whether the loss clips a ratio to [1 - clip_low, 1 + clip_high]."""
    return self.loss in CLIPPED

  @property
  def dppo_bounds(self) -> dict[str, float]:
    """The resolved bounds of DPPO, as its functions name them.

    Raises:
      ValueError: The loss is not one of DPPO's.
    """
    if self.dppo_mask_low is None or self.dppo_mask_high is None:
      raise ValueError(f"loss={shown(self.loss)} has no mask of DPPO")
    return {"mask_low": self.dppo_mask_low, "mask_high": self.dppo_mask_high}

  @property
  def interpolates(self) -> bool:
    """Whether old logprobs are approximated from the ages of tokens; see `proximal`."""
    return self.old_logprobs == "interpolated"

  @property
  def selects(self) -> bool:
    """Whether tokens are chosen among all of the optimizer step; see `selection.choose`."""
    return self.loss in COVARIANCE or self.top_entropy_share < 1

  @property
  def own_options(self) -> tuple[tuple[str, Any], ...]:
    """The options that a user's loss may name."""
    return tuple((name, getattr(self, name)) for name in custom_functions.LOSS_OPTIONS)

  @property
  def clip_bounds(self) -> tuple[float, float]:
    """The resolved `clip_low` and `clip_high`.

    Raises:
      ValueError: The loss has no clip.
    """
    if self.clip_low is None or self.clip_high is None:
      raise ValueError(f"loss={shown(self.loss)} has no clip")
    return self.clip_low, self.clip_high


def described() -> str:
  """Returns a line for each option: its name, its default and its meaning."""
  lines = [
    f"    {name} = {each.default!r}: {each.meaning}"
    for name, each in declared(ResolvedOptions).items()
    if isinstance(each, Option)
  ]
  return "\n".join(lines)


def function_of(loss: str | custom_functions.Function) -> custom_functions.Function:
  """Returns the function that computes a loss."""
  return FUNCTIONS[loss] if isinstance(loss, str) else loss


def shown(loss: str | custom_functions.Function) -> str:
  """Returns the name of a loss for messages, in quotes."""
  return repr(loss if isinstance(loss, str) else custom_functions.name_of(loss))


def own_settings(loss: str | custom_functions.Function) -> dict[str, Any]:
  """Returns the settings that None stands for: the bounds of a loss, its aggregation."""
  parameters = inspect.signature(function_of(loss)).parameters
  names = {"clip_low": "clip_low", "clip_high": "clip_high"}
  if loss in DPPO:
    names |= {"dppo_mask_low": "mask_low", "dppo_mask_high": "mask_high"}
  bounds = {
    name: None if parameters[own].default is inspect.Parameter.empty else parameters[own].default
    for name, own in names.items()
    if own in parameters
  }
  return {**bounds, "aggregation": "sequence_mean" if loss in SEQUENCE_LOSSES else "token_mean"}


def nearest(name: object, valid: Iterable[str]) -> str:
  """Returns a hint for an error message: the nearest valid name and all of them."""
  known = sorted(valid)
  near = names.nearest(str(name), known, cutoff=0.6)
  return (f"did you mean {near[0]!r}? " if near else "") + f"there are: {', '.join(known)}"


def meant(name: str, valid: Iterable[str], others: Mapping[str, str]) -> str:
  """Returns a hint as `nearest` does; for a name from another library, its equivalent here.

  Args:
    name: Name that was given.
    valid: Names that exist here.
    others: Names used by other libraries, in lower case, and their equivalents here.
  """
  known = others.get(name.lower())
  return f"here it is {known}; there are: {', '.join(valid)}" if known else nearest(name, valid)


def make(options: Mapping[str, Any]) -> ResolvedOptions:
  """Makes `ResolvedOptions` from a mapping.

  Raises:
    ValueError: An option is unknown, or `ResolvedOptions` refuses the values.
  """
  fields = {field.name for field in dataclasses.fields(ResolvedOptions)}
  unknown = [
    f"no option {name!r}: {nearest(name, fields)}" for name in options if name not in fields
  ]
  if unknown:
    raise ValueError("objective: " + "; ".join(unknown))
  return ResolvedOptions(**_resolved({**_defaults(), **options}))


def _resolved(given: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the options with the loss's own settings in place of None.

  Raises:
    ValueError: See `ResolvedOptions`.
  """
  problems = [*checked.problems(_KINDS, given), *_unknown_choices(given)]
  defaults = _defaults()
  # A value that is wrong by itself is left out of the rules about several options.
  sound = {
    name: value if _stands_alone(name, value) else defaults[name] for name, value in given.items()
  }
  problems += _unread(sound, defaults)
  bounds = dict.fromkeys(BOUNDS)
  settings = {**bounds, **own_settings(sound["loss"])}
  for name, value in settings.items():
    if sound[name] is None or value is None:
      sound[name] = value
  problems += _incompatible(types.SimpleNamespace(**sound))
  if problems:
    raise ValueError("objective: " + "; ".join(problems))
  if callable(sound["loss"]):
    custom_functions.check_loss(
      sound["loss"], tuple((name, sound[name]) for name in custom_functions.LOSS_OPTIONS)
    )
  return sound


def _defaults() -> dict[str, Any]:
  return {field.name: field.default for field in dataclasses.fields(ResolvedOptions)}


def _stands_alone(name: str, value: Any) -> bool:
  """Returns whether a value has the type of its option and, if it is a choice, exists."""
  return _KINDS[name].fits(value) and not _unknown_choices({name: value})


def _unknown_choices(given: Mapping[str, Any]) -> list[str]:
  """Returns a message for every choice that is unknown."""
  return [
    f"no {option} {chosen!r}: {meant(chosen, CHOICES[option], OTHER_NAMES.get(option, {}))}"
    for option, chosen in given.items()
    if option in CHOICES and isinstance(chosen, str) and chosen not in CHOICES[option]
  ]


def _unread(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
  """Returns a message for every option that is set and that the loss would never read.

  With kl_coef=0 the other options of the KL are allowed: they apply once it is switched on.
  """
  read, loss = inspect.signature(function_of(given["loss"])).parameters, shown(given["loss"])
  reasons = {}
  for name in ("clip_low", "clip_high"):
    # The number of the clipped loss means the same as None.
    if name not in read and given[name] != own_settings("clipped")[name]:
      reasons[name] = f"loss={loss} has no clip"
  if callable(given["loss"]) and "dual_clip" not in read:
    reasons["dual_clip"] = f"loss={loss} does not take it"
  for name, readers in READ_BY.items():
    if given["loss"] not in readers:
      reasons[name] = f"loss={loss} is not {' or '.join(map(repr, readers))}"
  if given["kl_in_reward"]:
    for name in ("kl_weight", "use_on_policy_kl_approximation"):
      reasons[name] = "kl_in_reward takes the KL out of the loss"
  if given["aggregation"] != "constant_length":
    reasons["max_completion_tokens"] = "only aggregation='constant_length' divides by it"
  return [
    f"{name}={given[name]!r} would never be read: {reason}"
    for name, reason in reasons.items()
    if given[name] != defaults[name]
  ]


def _incompatible(o: Any) -> list[str]:
  """Returns a message for every pair of options that exclude each other."""
  has_correction = o.importance_correction != "none"
  has_bounds = o.importance_low > 0 or o.importance_high < math.inf
  has_sequence_weights = o.importance_correction in ("sequence", "sequence_mean")
  low, high = o.importance_low, o.importance_high
  clip_low = o.clip_low or 0.0
  loss = shown(o.loss)
  has_dual_clip = callable(o.loss) or o.loss in ("clipped", "gspo", "gspo_token")
  is_interpolated = o.old_logprobs == "interpolated"
  takes_old = "old_logprobs" in inspect.signature(function_of(o.loss)).parameters
  rules = {
    f"importance_low must be <= importance_high, got {low} > {high}": low > high,
    f"loss={loss} has one ratio per completion and needs aggregation='sequence_mean', "
    f"got {o.aggregation!r}": o.loss in SEQUENCE_LOSSES and o.aggregation != "sequence_mean",
    f"dual_clip is a bound of PPO's clipped loss; loss={loss} does not take it": (
      o.dual_clip is not None and not has_dual_clip
    ),
    f"clip_low must be <= 1 for loss={loss}, because ratios are positive, got {clip_low}": (
      clip_low > 1 and o.loss in ("clipped", "gspo", "gspo_token", "luspo", "clip_cov")
    ),
    "force_on_policy_ratio sets the ratio to 1, and loss='reinforce' has no ratio": (
      o.force_on_policy_ratio and o.loss == "reinforce"
    ),
    f"force_on_policy_ratio sets old_logprobs, which loss={loss} does not take": (
      o.force_on_policy_ratio and callable(o.loss) and not takes_old
    ),
    f"use_behavior_logprobs sets old_logprobs, which loss={loss} does not take": (
      o.use_behavior_logprobs and not takes_old
    ),
    "use_behavior_logprobs and force_on_policy_ratio both set old_logprobs": (
      o.use_behavior_logprobs and o.force_on_policy_ratio
    ),
    "use_behavior_logprobs takes ratios to the engine's policy: importance_correction would count "
    "the mismatch twice": o.use_behavior_logprobs and has_correction,
    "use_behavior_logprobs leaves no old policy for kl_weight='old'; "
    "use_on_policy_kl_approximation is the weight by the engine's policy": (
      o.use_behavior_logprobs and o.kl_weight == "old" and o.kl_coef > 0
    ),
    "force_on_policy_ratio takes the policy's own logprobs for old ones, which "
    "old_logprobs='interpolated' approximates: set one of the two": (
      is_interpolated and o.force_on_policy_ratio
    ),
    "use_behavior_logprobs takes the engine's logprobs for old ones, which "
    "old_logprobs='interpolated' approximates: set one of the two": (
      is_interpolated and o.use_behavior_logprobs
    ),
    "kl_in_reward needs old logprobs before the update, and old_logprobs='interpolated' "
    "makes them during it": is_interpolated and o.kl_in_reward,
    "seq_logprob_error_threshold needs old_logprobs='scored': interpolated ones are not what the "
    "trainer computes, and lie close to the engine's": (
      is_interpolated and o.seq_logprob_error_threshold is not None
    ),
    f"clip_cov_lb must be < clip_cov_ub, got {o.clip_cov_lb} and {o.clip_cov_ub}": (
      o.loss == "clip_cov" and not o.clip_cov_lb < o.clip_cov_ub
    ),
    f"loss={loss} and top_entropy_share both choose tokens; set one of the two": (
      o.loss in COVARIANCE and o.top_entropy_share < 1
    ),
    f"loss={loss} has one ratio per completion, and top_entropy_share chooses tokens of it": (
      o.loss in ("gspo", "gmpo", "luspo") and o.top_entropy_share < 1
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
      o.importance_truncation == "seq_mask" and has_sequence_weights
    ),
    "kl_in_reward needs old_logprobs, which force_on_policy_ratio does not score": (
      o.kl_in_reward and o.force_on_policy_ratio
    ),
    "kl_in_reward needs kl_coef > 0": o.kl_in_reward and o.kl_coef == 0,
    "use_on_policy_kl_approximation is a weight of the KL; kl_weight must stay 'score', "
    f"got {o.kl_weight!r}": o.use_on_policy_kl_approximation and o.kl_weight != "score",
    "aggregation='constant_length' needs max_completion_tokens": (
      o.aggregation == "constant_length" and o.max_completion_tokens is None
    ),
  }
  return [reason for reason, is_broken in rules.items() if is_broken]
