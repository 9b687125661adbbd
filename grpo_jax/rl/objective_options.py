"""The options of an objective, their defaults, and which of them exclude each other. Pure.

Defaults are those of NeMo RL's `grpo_math_1B` recipe. Bounds of the clip and the aggregation are
None by default: the loss's own settings, from the signature of its function, then apply.
"""

import dataclasses
import inspect
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from grpo_jax.rl import (
  aggregate,
  covariance_losses,
  dppo,
  importance,
  kl,
  losses,
  own,
  sequence_losses,
)
from grpo_jax.values import checked, names

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

KINDS: Mapping[str, checked.Kind] = {
  "loss": checked.Kind(
    "the name of a loss, or a function", lambda x: checked.text().fits(x) or callable(x)
  ),
  "clip_low": checked.number(low=0, none=True),
  "clip_high": checked.number(low=0, none=True),
  "dual_clip": checked.number(above=1, none=True),
  "force_on_policy_ratio": checked.switch(),
  "sapo_temperature_positive": checked.number(low=1e-6, high=1e6),
  "sapo_temperature_negative": checked.number(low=1e-6, high=1e6),
  "kl_coef": checked.number(low=0),
  "kl_estimator": checked.text(),
  "kl_input_clamp": checked.number(above=0, none=True),
  "kl_output_clamp": checked.number(above=0, none=True),
  "kl_weight": checked.text(),
  "use_on_policy_kl_approximation": checked.switch(),
  "kl_in_reward": checked.switch(),
  "entropy_coef": checked.number(low=0),
  "dppo_mask_low": checked.number(low=0, none=True),
  "dppo_mask_high": checked.number(low=0, none=True),
  "dppo_ratio_cap": checked.number(above=0, none=True),
  "dppo_kl_tau": checked.number(low=0),
  "clip_cov_ratio": checked.number(above=0, high=1),
  "clip_cov_lb": checked.number(low=0),
  "clip_cov_ub": checked.number(above=0, infinite=True),
  "kl_cov_ratio": checked.number(above=0, high=1),
  "kl_cov_coef": checked.number(low=0),
  "top_entropy_share": checked.number(above=0, high=1),
  "use_behavior_logprobs": checked.switch(),
  "old_logprobs": checked.text(),
  "importance_correction": checked.text(),
  "importance_truncation": checked.text(none=True),
  "importance_low": checked.number(low=0),
  "importance_high": checked.number(above=0, infinite=True),
  "off_policy_mask_threshold": checked.number(low=0, none=True),
  "seq_logprob_error_threshold": checked.number(low=1, none=True),
  "aggregation": checked.text(none=True),
  "max_completion_tokens": checked.whole(low=1, none=True),
}


@dataclasses.dataclass(frozen=True)
class Options:
  """The choices and numbers of an objective, resolved and checked when made.

  Attributes:
    loss: Name of a loss, one of `LOSSES`, or a function: see docs/algorithms.md.
    clip_low: Distance of the lower bound from 1; gmpo: of the log-ratio. None: the loss's own.
    clip_high: Distance of the upper bound from 1; of cispo, 4.0 is TRL's 5.0. None: the loss's own.
    dual_clip: Bound above 1 of the ratio of bad tokens, usually 3; None: no bound.
    force_on_policy_ratio: Whether the ratio is to the policy itself: strictly one update per batch.
    use_behavior_logprobs: Whether the ratio is to the engine's policy.
    old_logprobs: "scored", or "interpolated": without a pass over the batch; see `proximal`.
    sapo_temperature_positive: Temperature of sapo where the advantage is positive.
    sapo_temperature_negative: Temperature of sapo elsewhere.
    kl_coef: Coefficient β of the KL; 0 needs no reference policy.
    kl_estimator: "k1", "k2" or "k3"; see `kl`.
    kl_input_clamp: Bound of the log-ratio to the reference, in nats; None: no bound.
    kl_output_clamp: Bound of the weighted estimate of a token, in nats; None: no bound.
    kl_weight: "score" (exact gradient), "none" (TRL, verl) or "old" (πθ/π_old).
    use_on_policy_kl_approximation: Whether the KL is weighed by πθ/μ instead.
    kl_in_reward: Whether the KL is subtracted from the advantages and not added to the loss.
    dppo_mask_low: Bound of a fall, as a probability or in nats; None: the loss's own.
    dppo_mask_high: Bound of a rise, as a probability or in nats; None: the loss's own.
    dppo_ratio_cap: Largest ratio, verl's clip_ratio_c; None: no bound.
    dppo_kl_tau: Coefficient of the squared log-ratio; 1e-3 in prime-rl.
    clip_cov_ratio: Share of the tokens that lose their gradient.
    clip_cov_lb: Covariance above which a token may lose it.
    clip_cov_ub: Covariance below which a token may lose it.
    kl_cov_ratio: Share of the tokens that are penalised.
    kl_cov_coef: Coefficient of that penalty.
    top_entropy_share: Share of the tokens in the policy loss; 0.2 in the paper.
    entropy_coef: Coefficient c of the entropy bonus; above 0 needs the full distributions.
    importance_correction: "none", "token", "sequence" or "sequence_mean"; see `importance`.
    importance_truncation: "tis", "icepop" or "seq_mask"; None: no truncation.
    importance_low: Inclusive lower bound of π_old/μ.
    importance_high: Inclusive upper bound of π_old/μ.
    off_policy_mask_threshold: Nats per token above which bad completions are left out; None: off.
    seq_logprob_error_threshold: Logprob error, at least 1, above which completions are left out.
    aggregation: Reduction, one of `AGGREGATIONS`; None: the loss's own.
    max_completion_tokens: Number of tokens that "constant_length" divides by.

  Raises:
    ValueError: A choice is unknown, a value is of the wrong type or out of range, an option
      is set that the loss never reads, or options exclude each other. The message lists every
      problem.
  """

  loss: str | own.Function = "clipped"
  clip_low: float | None = None
  clip_high: float | None = None
  dual_clip: float | None = None
  force_on_policy_ratio: bool = False
  use_behavior_logprobs: bool = False
  old_logprobs: str = "scored"
  sapo_temperature_positive: float = 1.0
  sapo_temperature_negative: float = 1.05
  kl_coef: float = 0.01
  kl_estimator: str = "k3"
  kl_input_clamp: float | None = 20.0
  kl_output_clamp: float | None = 10.0
  kl_weight: str = "score"
  use_on_policy_kl_approximation: bool = False
  kl_in_reward: bool = False
  dppo_mask_low: float | None = None
  dppo_mask_high: float | None = None
  dppo_ratio_cap: float | None = None
  dppo_kl_tau: float = 0.0
  clip_cov_ratio: float = 2e-4
  clip_cov_lb: float = 1.0
  clip_cov_ub: float = 5.0
  kl_cov_ratio: float = 2e-4
  kl_cov_coef: float = 1.0
  top_entropy_share: float = 1.0
  entropy_coef: float = 0.0
  importance_correction: str = "none"
  importance_truncation: str | None = None
  importance_low: float = 0.0
  importance_high: float = math.inf
  off_policy_mask_threshold: float | None = None
  seq_logprob_error_threshold: float | None = None
  aggregation: str | None = None
  max_completion_tokens: int | None = None

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
    return tuple((name, getattr(self, name)) for name in own.LOSS_OPTIONS)

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
  """Returns a line for each option: its name, its default and what it is, as `Options` says."""
  defaults = _defaults()
  named = re.findall(r"^ +(\w+): (.+)$", Options.__doc__ or "", re.MULTILINE)
  lines = [f"    {name} = {defaults[name]!r}: {is_}" for name, is_ in named if name in defaults]
  return "\n".join(lines)


def function_of(loss: str | own.Function) -> own.Function:
  """Returns the function that computes a loss."""
  return FUNCTIONS[loss] if isinstance(loss, str) else loss


def shown(loss: str | own.Function) -> str:
  """Returns the name of a loss for messages, in quotes."""
  return repr(loss if isinstance(loss, str) else own.name_of(loss))


def own_settings(loss: str | own.Function) -> dict[str, Any]:
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


def make(options: Mapping[str, Any]) -> Options:
  """Makes `Options` from a mapping.

  Raises:
    ValueError: An option is unknown, or `Options` refuses the values.
  """
  fields = {field.name for field in dataclasses.fields(Options)}
  unknown = [
    f"no option {name!r}: {nearest(name, fields)}" for name in options if name not in fields
  ]
  if unknown:
    raise ValueError("objective: " + "; ".join(unknown))
  return Options(**_resolved({**_defaults(), **options}))


def _resolved(given: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the options with the loss's own settings in place of None.

  Raises:
    ValueError: See `Options`.
  """
  problems = [*checked.problems(KINDS, given), *_unknown_choices(given)]
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
    own.check_loss(sound["loss"], tuple((name, sound[name]) for name in own.LOSS_OPTIONS))
  return sound


def _defaults() -> dict[str, Any]:
  return {field.name: field.default for field in dataclasses.fields(Options)}


def _stands_alone(name: str, value: Any) -> bool:
  """Returns whether a value has the type of its option and, if it is a choice, exists."""
  return KINDS[name].fits(value) and not _unknown_choices({name: value})


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
