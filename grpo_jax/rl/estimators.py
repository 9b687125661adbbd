"""Advantage estimators by name: `make(**options)` for configs. Pure.

The formulas are in `advantages`, the published names are settings of them.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_jax.rl import advantages
from grpo_jax.rl.objective_options import nearest


@dataclasses.dataclass(frozen=True)
class Estimator:
  """A checked choice of advantages; made by `make`."""

  baseline: str = "group_mean"  # "group_mean" | "leave_one_out" | "none".
  scale: str = "group_std"  # "group_std" | "batch_std" | "none".
  ddof: int = 1  # 1: unbiased variance.
  eps: float = 1e-6  # added to the standard deviation.
  by_component: bool = False  # GDPO: normalise each reward component, then whiten the sum.
  weights: tuple[float, ...] | None = None  # of the components, in their order; None: 1 each.
  needs_whitening: bool = False  # REINFORCE++: apply `advantages.whiten` over the batch's tokens.
  clip_low: float | None = None  # lower bound of the advantages.
  clip_high: float | None = None  # upper bound.

  def __call__(
    self,
    rewards: Float[Array, "P G"],
    mask: Bool[Array, "P G"],
    components: Float[Array, "K P G"] | None = None,
  ) -> Float[Array, "P G"]:
    """Computes advantages; if `needs_whitening`, those that `advantages.whiten` is to be given.

    With `needs_whitening` the clip, being the last step, is left to the caller, too.

    Raises:
      ValueError: if the estimator needs reward components and there are none.
    """
    if self.by_component:
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
    else:
      estimate = advantages.group_relative(
        rewards, mask, baseline=self.baseline, scale=self.scale, ddof=self.ddof, eps=self.eps
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
}
_FIXED = {"by_component", "needs_whitening"}  # what the name says; no options.


def make(estimator: str = "grpo", **options: Any) -> Estimator:
  """Makes an estimator from its name and what differs from the name's settings.

  Args:
    estimator: one of ESTIMATORS.
    **options: fields of `Estimator`, less `by_component` and `needs_whitening`; None for
      `baseline`, `scale`, `ddof` or `eps` keeps the setting of the name.

  Raises:
    ValueError: on an unknown name, option or choice, or senseless numbers.
  """
  if estimator not in ESTIMATORS:
    raise ValueError(f"no advantage estimator {estimator!r}: {nearest(estimator, ESTIMATORS)}")
  fields = {field.name for field in dataclasses.fields(Estimator)} - _FIXED
  for name in options:
    if name not in fields:
      raise ValueError(f"advantages: no option {name!r}: {nearest(name, fields)}")
  given = {name: value for name, value in options.items() if value is not None}
  if "weights" in given:
    given["weights"] = tuple(float(weight) for weight in given["weights"])
  made = Estimator(**{**ESTIMATORS[estimator], **given})
  _check(estimator, made)
  return made


def _check(name: str, made: Estimator) -> None:
  """Raises ValueError on choices that do not exist or exclude each other."""
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
    problems.append(f"weights are of reward components, which {name!r} does not look at")
  if made.ddof not in (0, 1):
    problems.append(f"ddof must be 0 or 1, got {made.ddof}")
  if not made.eps >= 0:
    problems.append(f"eps must be >= 0, got {made.eps}")
  low = -math.inf if made.clip_low is None else made.clip_low
  high = math.inf if made.clip_high is None else made.clip_high
  if not low <= high:
    problems.append(f"clip_low must not exceed clip_high, got {low} > {high}")
  if problems:
    raise ValueError("advantages: " + "; ".join(problems))
