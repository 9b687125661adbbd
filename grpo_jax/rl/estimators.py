"""Advantage estimators by name: `make(**options)` for configs. Pure.

The formulas are in `advantages`; the published names are settings of them.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_jax.rl import advantages, custom_functions
from grpo_jax.rl.objective_options import meant, nearest
from grpo_jax.rl.options import AdvantageOptions
from grpo_jax.values import checked
from grpo_jax.values.options import kinds

_KINDS: Mapping[str, checked.Kind] = {
  **kinds(AdvantageOptions),
  "estimator": checked.Kind(
    "the name of an estimator, or a function", lambda x: checked.text().fits(x) or callable(x)
  ),
  **{name: checked.optional(kinds(AdvantageOptions)[name]) for name in ("ddof", "eps")},
}
# Names used by papers and other libraries, and their equivalents here.
OTHER_NAMES: Mapping[str, str] = {
  "reinforce++": "'reinforce_pp'",
  "reinforce_plus_plus": "'reinforce_pp'",
  "reinforce_plus_plus_baseline": "'reinforce_pp_baseline'",
  "reinforce++-baseline": "'reinforce_pp_baseline'",
  "loo": "'rloo'",
  "drgrpo": "'dr_grpo'",
  "dapo": "'grpo', whose advantages DAPO has",
  "gspo": "'grpo', with loss.loss='gspo'",
  "liteppo": "'lite_ppo'",
  "max_rl": "'maxrl'",
  "passk": "'pass_at_k' (verl's grpo_passk, where only the best attempt learns, is another one)",
  "grpo_passk": "'pass_at_k', in which all attempts learn",
  "gpg": "'dr_grpo', with loss.loss='reinforce'",
}


@dataclasses.dataclass(frozen=True)
class Estimator:
  """A checked choice of advantages; made by `make`."""

  baseline: str = "group_mean"  # one of advantages.BASELINES.
  scale: str = "group_std"  # one of advantages.SCALES.
  ddof: int = AdvantageOptions.ddof  # 1: unbiased variance.
  eps: float = AdvantageOptions.eps  # added to the standard deviation.
  by_component: bool = False  # GDPO: normalise each reward component, then whiten the sum.
  weights: tuple[float, ...] | None = None  # weights of the components, in order; None: 1 each.
  needs_whitening: bool = False  # REINFORCE++: apply `advantages.whiten` over the batch's tokens.
  of_sets: bool = False  # pass@k: the best reward of `pass_k` attempts, in place of each alone.
  pass_k: int | None = None  # number of attempts of such a set.
  clip_low: float | None = None  # lower bound of the advantages.
  clip_high: float | None = None  # upper bound.
  # function of a user that replaces the formulas here.
  function: custom_functions.Function | None = None

  @property
  def needs_lengths(self) -> bool:
    """Whether the number of sampled tokens of each attempt is needed."""
    return self.baseline == "length_weighted"

  @property
  def needs_greedy(self) -> bool:
    """Whether each prompt needs one more attempt, at temperature 0, as baseline."""
    return self.baseline == "greedy"

  @property
  def joins_groups(self) -> bool:
    """Whether the advantages of a group may depend on the rewards of other groups."""
    return self.scale == "batch_std" or self.by_component or self.function is not None

  @property
  def compares(self) -> bool:
    """Whether a prompt needs several attempts to learn from, because they are compared."""
    return self.baseline not in ("none", "greedy")

  def __call__(
    self,
    rewards: Float[Array, "P G"],
    mask: Bool[Array, "P G"],
    components: Float[Array, "K P G"] | None = None,
    *,
    lengths: Float[Array, "P G"] | None = None,
    greedy: Float[Array, " P"] | None = None,
  ) -> Float[Array, "P G"]:
    """Computes advantages; with `needs_whitening`, the input of `advantages.whiten`.

    With `needs_whitening` the caller also applies the clip, as the last step.

    Args:
      rewards: One reward for each attempt.
      mask: True on attempts that count.
      components: Reward components, or None if there are none.
      lengths: Number of sampled tokens of each attempt; read if `needs_lengths`.
      greedy: Reward of the greedy attempt at each prompt; read if `needs_greedy`.

    Raises:
      ValueError: The estimator needs an input, and it is None.
    """
    if (function := self.function) is not None:
      valid = mask & jnp.isfinite(rewards)
      call = lambda: custom_functions.call_advantages(function, rewards, valid, components)
      estimate = custom_functions.on_data("advantages", function, rewards, call)
    elif self.by_component:
      if components is None:
        raise ValueError("gdpo needs reward components, and the rollouts have none")
      valid = mask & jnp.isfinite(rewards)
      estimate = advantages.gdpo(
        components,
        valid,
        weights=self.weights,
        baseline=self.baseline,
        ddof=self.ddof,
        eps=self.eps,
      )
    elif self.of_sets:
      k = self.pass_k or 1
      estimate = advantages.pass_at_k(rewards, mask, k=k, scale=self.scale, eps=self.eps)
    else:
      estimate = advantages.group_relative(
        rewards,
        mask,
        baseline=self.baseline,
        scale=self.scale,
        ddof=self.ddof,
        eps=self.eps,
        lengths=lengths if self.needs_lengths else None,
        greedy=greedy if self.needs_greedy else None,
      )
    if self.needs_whitening:
      return estimate
    return advantages.clip(estimate, low=self.clip_low, high=self.clip_high)


ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
  "grpo": {},
  "lite_ppo": {"scale": "batch_std"},
  "dr_grpo": {"scale": "none"},
  "rloo": {"baseline": "leave_one_out", "scale": "none"},
  "reinforce_pp": {"baseline": "none", "scale": "none", "needs_whitening": True},
  "reinforce_pp_baseline": {"scale": "none", "needs_whitening": True},
  "gdpo": {"by_component": True},
  "maxrl": {"scale": "group_mean"},
  "opo": {"baseline": "length_weighted", "scale": "none"},
  "remax": {"baseline": "greedy", "scale": "none"},
  "pass_at_k": {"of_sets": True},
}
_FIXED = {"by_component", "needs_whitening", "of_sets", "function"}  # follow from the name.


def make(
  estimator: str | custom_functions.Function = AdvantageOptions.estimator, **options: Any
) -> Estimator:
  """Makes an estimator from its name, and from options that differ from the name's settings.

  Args:
    estimator: Name in `ESTIMATORS`, or a function of your own: see docs/algorithms.md.
    **options: Fields of `Estimator` except `by_component`, `needs_whitening`, `of_sets` and
      `function`; None for `baseline`, `scale`, `ddof` or `eps` keeps the setting of the name.

  Raises:
    ValueError: A name, option or choice is unknown, a number is out of range, or a function
      breaks a rule.
  """
  fields = {field.name for field in dataclasses.fields(Estimator)} - _FIXED
  unknown = [name for name in options if name not in fields]
  problems = [f"no option {name!r}: {nearest(name, fields)}" for name in unknown]
  problems += checked.problems(_KINDS, {"estimator": estimator, **options})
  if isinstance(estimator, str) and estimator not in ESTIMATORS:
    problems.append(f"no estimator {estimator!r}: {meant(estimator, ESTIMATORS, OTHER_NAMES)}")
  if problems:
    raise ValueError("advantages: " + "; ".join(problems))
  given = {name: value for name, value in options.items() if value is not None}
  if "weights" in given:
    given["weights"] = tuple(float(weight) for weight in given["weights"])
  if not isinstance(estimator, str):
    return _own(estimator, given)
  made = Estimator(**{**ESTIMATORS[estimator], **given})
  _check(estimator, made)
  return made


def _own(function: custom_functions.Function, given: Mapping[str, Any]) -> Estimator:
  """Makes an estimator that calls a user's function with the options that it names.

  Raises:
    ValueError: The function breaks a rule, or an option is set that it does not take.
  """
  names = custom_functions.names_of(function)
  usual = {field.name: field.default for field in dataclasses.fields(Estimator)}
  usual |= {"baseline": None, "scale": None}
  unread = [
    f"{name}={value!r} would never be read: {custom_functions.name_of(function)} does not take it"
    for name, value in given.items()
    if name in (*custom_functions.ADVANTAGE_OPTIONS, "pass_k")
    and name not in names
    and value != usual[name]
  ]
  if unread:
    raise ValueError("advantages: " + "; ".join(unread))
  passed = {
    name: given[name]
    for name in custom_functions.ADVANTAGE_OPTIONS
    if name in names and name in given
  }
  bound = functools.partial(function, **passed) if passed else function
  weights = given.get("weights")
  custom_functions.check_advantages(bound, len(weights or (1.0, 1.0)))
  made = Estimator(
    baseline="none",  # whether groups are compared is not known.
    by_component="components" in names,
    weights=weights,
    clip_low=given.get("clip_low"),
    clip_high=given.get("clip_high"),
    function=bound,
  )
  _check(custom_functions.name_of(function), made)
  return made


def _check(name: str, made: Estimator) -> None:
  """Raises ValueError for unknown choices and for choices that exclude each other."""
  problems = []
  if made.baseline not in advantages.BASELINES:
    problems.append(
      f"no baseline {made.baseline!r}: {nearest(made.baseline, advantages.BASELINES)}"
    )
  if made.scale not in advantages.SCALES:
    problems.append(f"no scale {made.scale!r}: {nearest(made.scale, advantages.SCALES)}")
  if made.by_component and made.scale != "group_std":
    problems.append(f"gdpo scales each component by its group's std, got scale={made.scale!r}")
  if made.weights is not None and not made.by_component:
    problems.append(f"weights apply to reward components, but {name!r} does not use them")
  problems += _problems_of_sets(name, made)
  if made.by_component and made.baseline in ("length_weighted", "greedy"):
    problems.append(f"gdpo compares each component within its group, got {made.baseline!r}")
  if made.needs_whitening and made.scale == "group_mean":
    problems.append(f"{name!r} whitens over the batch, got scale={made.scale!r}")
  if made.scale in ("none", "group_mean"):
    why = "has no divisor" if made.scale == "none" else "divides by the mean reward alone"
    problems += [
      f"{field}={getattr(made, field)} would never be read: scale={made.scale!r} {why}"
      for field in ("ddof", "eps")
      if getattr(made, field) != getattr(Estimator, field)
    ]
  if made.weights is not None and not any(made.weights):
    problems.append("weights must not all be 0")
  low = -math.inf if made.clip_low is None else made.clip_low
  high = math.inf if made.clip_high is None else made.clip_high
  if not low <= high:
    problems.append(f"clip_low must not exceed clip_high, got {low} > {high}")
  if problems:
    raise ValueError("advantages: " + "; ".join(problems))


def _problems_of_sets(name: str, made: Estimator) -> list[str]:
  """Returns a message for every option that pass@k advantages lack or do not read."""
  if not made.of_sets:
    unread = made.pass_k is not None
    return [f"pass_k={made.pass_k} is for 'pass_at_k', not for {name!r}"] * unread
  problems = []
  if made.pass_k is None:
    problems.append("'pass_at_k' needs pass_k, the number of attempts whose best reward counts")
  if made.baseline != "group_mean":
    problems.append(f"'pass_at_k' has its own baseline, got baseline={made.baseline!r}")
  if made.scale not in ("group_std", "none"):
    problems.append(f"'pass_at_k' has scale 'group_std' or 'none', got {made.scale!r}")
  if made.ddof != Estimator.ddof and made.scale != "none":
    problems.append(f"ddof={made.ddof} would never be read: the σ of 'pass_at_k' is of all sets")
  return problems
