"""Measures how well a policy ranks the responses of a group, compared with their rewards. Pure.

The policy ranks responses by its scores, here their logprobs. Responses of equal reward may be in
any order.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from grpo_jax.data.options import SCORES, OfflineOptions
from grpo_jax.types import RolloutGroup


@dataclasses.dataclass(frozen=True, slots=True)
class Ranked:
  """A group whose responses were scored by a policy."""

  scores: Float[np.ndarray, " G"]  # NaN: not scored; such responses are left out.
  rewards: Float[np.ndarray, " G"]
  group_type: str | None = None


def response_scores(
  group: RolloutGroup,
  logprobs: Sequence[Float[np.ndarray, " _"]],
  *,
  score: str = OfflineOptions.score,
) -> Float[np.ndarray, " G"]:
  """Returns one score for each response: the mean (or sum) of the logprobs of its sampled tokens.

  The sum is the logarithm of the response's probability, and prefers short ones; the mean does
  not. NaN where a sampled token has no logprob, or nothing was sampled.

  Raises:
    ValueError: There is no such score.
  """
  if score not in SCORES:
    raise ValueError(f"responses are scored by one of {SCORES}, got {score!r}")
  scores = []
  for rollout, values in zip(group.rollouts, logprobs, strict=True):
    sampled = np.asarray(values, np.float64)[rollout.loss_mask]
    total = float(sampled.sum()) if sampled.size else math.nan
    scores.append(total / sampled.size if sampled.size and score == "mean" else total)
  return np.asarray(scores, np.float64)


def pairs(ranked: Ranked) -> Float[np.ndarray, " pairs"]:
  """Returns, for each pair of different rewards, 1 if the policy orders it in the same way, 0 if
  not, and 0.5 if its scores are equal."""
  scores, rewards = _valid(ranked)
  better, worse = np.nonzero(rewards[:, None] > rewards[None, :])
  gap = scores[better] - scores[worse]
  return np.where(gap > 0, 1.0, np.where(gap == 0, 0.5, 0.0))


def is_exact(ranked: Ranked) -> bool:
  """Returns whether every pair of different rewards is in the right order."""
  return bool((pairs(ranked) == 1.0).all())


def places_right(ranked: Ranked) -> Float[np.ndarray, " G"]:
  """Returns, for each response, whether it is at its true place or at that of an equal response.
  This "ranking accuracy" compares two orders place by place."""
  scores, rewards = _valid(ranked)
  place = np.empty(len(scores), int)
  place[np.argsort(-scores, kind="stable")] = np.arange(len(scores))
  first = (rewards[None, :] > rewards[:, None]).sum(axis=1)
  equal = (rewards[None, :] == rewards[:, None]).sum(axis=1)
  return ((place >= first) & (place < first + equal)).astype(np.float64)


def has_order(ranked: Ranked) -> bool:
  """Returns whether there is something to rank: two scored responses of different rewards."""
  return bool(len(pairs(ranked)))


def group_metrics(groups: Sequence[Ranked], *, name: str) -> dict[str, float]:
  """Describes how well a policy ranks the groups of an evaluation set, in total and by type.

  Means are over groups, each of the same weight; groups without an order (all rewards equal)
  are counted and left out.

  Args:
    groups: Scored groups.
    name: Name of the evaluation set, the middle part of the metrics' names.

  Returns:
    Metrics eval/NAME/accuracy (pairs), exact_accuracy, place_accuracy, best_accuracy,
    chosen_reward_mean, margin, groups, no_order_share. Groups with a type also have their
    accuracies as eval/NAME/TYPE/… and, if there are several types, consistency: 1 - (highest -
    lowest accuracy of a type).
  """
  result = {
    **_described(groups, f"eval/{name}"),
    f"eval/{name}/no_order_share": _mean([not has_order(group) for group in groups]),
  }
  types = sorted({group.group_type for group in groups if group.group_type is not None})
  accuracies = []
  for kind in types:
    members = [group for group in groups if group.group_type == kind]
    area = f"eval/{name}/{kind.replace('/', '_')}"
    result |= _described(members, area)
    accuracies.append(result[f"{area}/accuracy"])
  known = [accuracy for accuracy in accuracies if math.isfinite(accuracy)]
  if len(known) > 1:
    result[f"eval/{name}/consistency"] = 1.0 - (max(known) - min(known))
  return result


def step_metrics(groups: Sequence[Ranked]) -> dict[str, float]:
  """Returns train/rank_accuracy of the groups of a training step, before the update."""
  return {"train/rank_accuracy": _mean([pairs(g).mean() for g in groups if has_order(g)])}


def group_values(groups: Sequence[Ranked]) -> dict[str, Float[np.ndarray, " ordered"]]:
  """Returns what `group_metrics` averages: by name, a value of each group that has an order."""
  ordered = [group for group in groups if has_order(group)]
  best = [_best(group) for group in ordered]
  values = {
    "accuracy": [pairs(group).mean() for group in ordered],
    "exact_accuracy": [is_exact(group) for group in ordered],
    "place_accuracy": [places_right(group).mean() for group in ordered],
    "best_accuracy": [is_best for is_best, _, _ in best],
    "chosen_reward_mean": [reward for _, reward, _ in best],
    "margin": [margin for _, _, margin in best],
  }
  return {name: np.asarray(each, np.float64) for name, each in values.items()}


def _described(groups: Sequence[Ranked], area: str) -> dict[str, float]:
  return {
    f"{area}/groups": float(len(groups)),
    **{f"{area}/{name}": _mean(values) for name, values in group_values(groups).items()},
  }


def _best(ranked: Ranked) -> tuple[bool, float, float]:
  """Returns whether the response with the highest score has the highest reward; its reward; and the
  mean score of the best responses minus that of the others."""
  scores, rewards = _valid(ranked)
  chosen = rewards[int(np.argmax(scores))]
  is_top = rewards == rewards.max()
  return (
    bool(chosen == rewards.max()),
    float(chosen),
    float(scores[is_top].mean() - scores[~is_top].mean()),
  )


def _valid(ranked: Ranked) -> tuple[np.ndarray, np.ndarray]:
  """Returns scores and rewards of the responses that have both."""
  scores, rewards = np.asarray(ranked.scores), np.asarray(ranked.rewards, np.float64)
  kept = np.isfinite(scores) & np.isfinite(rewards)
  return scores[kept], rewards[kept]


def _mean(values: Sequence[float] | Sequence[bool] | np.ndarray) -> float:
  """Returns the mean; NaN if there are no values."""
  return float(np.mean(np.asarray(values, np.float64))) if len(values) else math.nan
