"""Metrics of scored groups: of a step, of its datasets, of an evaluation. Pure."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from grpo_jax.metrics.attempt_events import error_kinds
from grpo_jax.rl import moments, staleness
from grpo_jax.types import FinishReason, Rollout, RolloutGroup

TURNS_SHOWN = 10  # turns with their own metrics; later turns are only in the sums.
_OF_EVALUATION = ("reward_mean", "truncated_share", "failed_share", "completion_tokens_mean")
_OF_CONVERSATIONS = ("turns_mean", "turn_limit_share", "ended_by_environment_share")


def pass_at_k(samples: int, solved: int, k: int) -> float:
  """Returns the unbiased estimate of the probability that one of k samples solves the task.

      pass@k = 1 - C(n - c, k) / C(n, k)

  It is computed with integers, so that no product of floats is rounded.

  Args:
    samples: Number of completions of the prompt (n), at least k.
    solved: Number of completions that solve it (c).
    k: Number of attempts, at least 1.

  Raises:
    ValueError: 1 <= k <= n and 0 <= c <= n does not hold.

  Reference:
    Chen et al. 2021, arXiv:2107.03374, equation 1.
  """
  if not (1 <= k <= samples and 0 <= solved <= samples):
    raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got n={samples} c={solved} k={k}")
  ways = math.comb(samples, k)
  return (ways - math.comb(samples - solved, k)) / ways


def has_signal(group: RolloutGroup) -> bool:
  """Returns whether two scored rewards of the group differ, so that something can be learned."""
  return differs(group.rewards)


def differs(values: Float[np.ndarray, " n"]) -> bool:
  """Returns whether two finite values differ, by the rule of `moments.has_spread`."""
  return bool(values.size) and bool(moments.has_spread(values, np.isfinite(values)))


def rollout_metrics(groups: Sequence[RolloutGroup], *, step: int | None = None) -> dict[str, float]:
  """Describes the rollouts of one step: rewards, lengths, ends, staleness.

  A reward of NaN (not scored) is excluded from every mean of rewards and counted in
  `rollout/failed_share`. Standard deviations are those of the population (ddof = 0).

  Args:
    groups: Groups of one step, before any filter.
    step: Version of the weights to be updated; None omits staleness.

  Returns:
    Metrics `rollout/*` and `env/*` by name; NaN where there is nothing to describe.
  """
  rollouts = [rollout for group in groups for rollout in group.rollouts]
  rewards = np.asarray([rollout.reward for rollout in rollouts], np.float64)
  scored = rewards[np.isfinite(rewards)]
  lengths = np.asarray([len(rollout.completion_ids) for rollout in rollouts], np.float64)
  truncated = np.asarray([rollout.is_truncated for rollout in rollouts], np.float64)
  aborted = [rollout.finish_reason is FinishReason.ABORT for rollout in rollouts]
  result = {
    "rollout/prompts": float(len(groups)),
    "rollout/completions": float(len(rollouts)),
    "rollout/reward_mean": _mean(scored),
    "rollout/reward_std": _std(scored),
    "rollout/reward_min": float(scored.min()) if scored.size else math.nan,
    "rollout/reward_max": float(scored.max()) if scored.size else math.nan,
    "rollout/reward_group_std_mean": _mean([_group_std(group) for group in groups]),
    "rollout/no_signal_share": _mean([not has_signal(group) for group in groups]),
    "rollout/failed_share": _mean(~np.isfinite(rewards)),
    "rollout/truncated_share": _mean(truncated),
    "rollout/aborted_share": _mean(aborted),
    "rollout/prompt_tokens_mean": _mean([len(group.prompt.token_ids) for group in groups]),
    "rollout/completion_tokens_mean": _mean(lengths),
    "rollout/completion_tokens_min": float(lengths.min()) if lengths.size else math.nan,
    "rollout/completion_tokens_max": float(lengths.max()) if lengths.size else math.nan,
    "rollout/completion_tokens_stopped_mean": _mean(lengths[truncated == 0]),
    "rollout/unique_share": _mean([unique_share(group) for group in groups if group.rollouts]),
    "rollout/turns_mean": _mean([rollout.turns for rollout in rollouts]),
    "rollout/behavior_entropy": _behavior_entropy(rollouts),
  }
  return {
    **result,
    **_of_greedy(groups),
    **reward_by_length(groups),
    **turn_metrics(rollouts),
    **_staleness(groups, step),
    **_by_name(groups),
  }


def unique_share(group: RolloutGroup) -> float:
  """Returns the share of different completions in a group, by token ids: 1 if no two are equal."""
  different = {tuple(rollout.completion_ids.tolist()) for rollout in group.rollouts}
  return len(different) / len(group.rollouts)


def reward_by_length(groups: Sequence[RolloutGroup]) -> dict[str, float]:
  """Describes how rewards depend on the lengths of completions.

  With reward r and length l in tokens of the scored completions, and r̄, l̄ the means of their group:

      rollout/reward_length_correlation = Σ (r - r̄)(l - l̄) / √(Σ (r - r̄)² Σ (l - l̄)²)
      rollout/reward_of_length/K = mean r over q(K-1) < l <= q(K), K = 1 .. 4

  where q(K) is the K-th quartile of all lengths and q(0) = -∞.

  Returns:
    The metrics; NaN where a sum of squares is 0, and for a quarter without a completion.
  """
  length_parts, reward_parts = [np.zeros(0)], [np.zeros(0)]
  for group in groups:
    scored = np.isfinite(group.rewards)
    lengths = [len(rollout.completion_ids) for rollout in group.rollouts]
    length_parts.append(np.asarray(lengths, np.float64)[scored])
    reward_parts.append(group.rewards.astype(np.float64)[scored])
  lengths, rewards = np.concatenate(length_parts), np.concatenate(reward_parts)
  x = np.concatenate([part - _mean(part) for part in length_parts])
  y = np.concatenate([_centred(part) for part in reward_parts])
  spread = math.sqrt((x @ x) * (y @ y))
  found = {"rollout/reward_length_correlation": float(x @ y) / spread if spread else math.nan}
  bounds = np.percentile(lengths, (25, 50, 75)) if lengths.size else np.zeros(3)
  quarter = np.searchsorted(bounds, lengths, side="left")
  for number in range(4):
    found[f"rollout/reward_of_length/{number + 1}"] = _mean(rewards[quarter == number])
  return found


def turn_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
  """Describes conversations: their lengths, their ends, the rewards of every turn.

  Args:
    rollouts: Rollouts of one step. If all have a single turn, the result is {}.

  Returns:
    Metrics `rollout/turn*`, `rollout/sampled_tokens_*`, ... by name; turn 1 is the first.
  """
  if all(rollout.turns == 1 and not rollout.hit_turn_limit for rollout in rollouts):
    return {}
  turns = np.asarray([rollout.turns for rollout in rollouts], np.float64)
  sampled = [int(rollout.loss_mask.sum()) for rollout in rollouts]
  written = [len(rollout.loss_mask) - int(rollout.loss_mask.sum()) for rollout in rollouts]
  at_limit = [rollout.hit_turn_limit for rollout in rollouts]
  logs = [rollout.turn_log for rollout in rollouts if rollout.turn_log]
  in_a_turn = [turn.sampled_tokens for log in logs for turn in log]
  result = {
    "rollout/turns_total": float(turns.sum()),
    "rollout/turns_max": float(turns.max()),
    "rollout/turns_p95": float(np.percentile(turns, 95)),
    "rollout/turn_limit_share": _mean(at_limit),
    "rollout/ended_by_environment_share": _mean([_is_ended(rollout) for rollout in rollouts]),
    "rollout/sampled_tokens_mean": _mean(sampled),
    "rollout/sampled_tokens_max": float(max(sampled)),
    "rollout/environment_tokens_mean": _mean(written),
    "rollout/turn_tokens_mean": _mean(in_a_turn),
    "rollout/turn_tokens_max": float(max(in_a_turn, default=math.nan)),
  }
  for number in range(min(max(map(len, logs), default=0), TURNS_SHOWN)):
    there = [log[number] for log in logs if len(log) > number]
    rewards = np.asarray([turn.reward for turn in there], np.float64)
    area = f"rollout/turn/{number + 1:02d}"
    result[f"{area}/reached_share"] = len(there) / len(rollouts)
    result[f"{area}/reward_mean"] = _mean(rewards[np.isfinite(rewards)])
    result[f"{area}/sampled_tokens_mean"] = _mean([turn.sampled_tokens for turn in there])
  return result


def staleness_metrics(groups: Sequence[RolloutGroup], *, step: int) -> dict[str, float]:
  """Describes completions by the ages of their tokens, for runs that sample ahead.

  Args:
    groups: Groups of one step, before any filter.
    step: Number of the training step, which is the version of the weights that it begins with.

  Returns:
    "rollout/mixed_versions_share": completions with tokens of several versions, of those with a
    token whose version is known; and "staleness/RANGE/reward" for each range of
    `rl.staleness.RANGES`: the mean reward of the scored completions whose oldest token has such an
    age. NaN for a range without completions. Only tokens that are learned from count.

  Raises:
    ValueError: A token was sampled by weights that do not exist before the step.
  """
  rollouts = [rollout for group in groups for rollout in group.rollouts]
  known = [
    (rollout.reward, own[own >= 0])
    for rollout in rollouts
    for own in [staleness.ages(rollout.weight_versions[rollout.loss_mask], step)]
    if (own >= 0).any()
  ]
  rewards = np.asarray([reward for reward, _ in known], np.float64)
  oldest = np.asarray([own.max() for _, own in known])
  result = {"rollout/mixed_versions_share": _mean([own.min() < own.max() for _, own in known])}
  for ages in staleness.RANGES:
    here = (oldest >= ages.first) & (oldest <= ages.last) & np.isfinite(rewards)
    result[f"staleness/{ages.name}/reward"] = _mean(rewards[here])
  return result


def dataset_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
  """Describes the groups of each dataset separately, for curricula.

  Args:
    groups: Groups of one step, before any filter.

  Returns:
    Metrics `data/NAME/prompts`, `reward_mean`, `no_signal_share` by name and, if the environment
    reports it, `accuracy`.
  """
  parts: dict[str, list[RolloutGroup]] = {}
  for group in groups:
    parts.setdefault(group.prompt.dataset, []).append(group)
  result: dict[str, float] = {}
  for name, part in parts.items():
    rollouts = [rollout for group in part for rollout in group.rollouts]
    rewards = np.asarray([rollout.reward for rollout in rollouts], np.float64)
    solved = [r.metrics["accuracy"] for r in rollouts if "accuracy" in r.metrics]
    result[f"data/{name}/prompts"] = float(len(part))
    result[f"data/{name}/reward_mean"] = _mean(rewards[np.isfinite(rewards)])
    result[f"data/{name}/no_signal_share"] = _mean([not has_signal(group) for group in part])
    if solved:
      result[f"data/{name}/accuracy"] = _mean(solved)
  return result


def evaluation_metrics(
  groups: Sequence[RolloutGroup], *, name: str, pass_k: Sequence[int] = (1,), solved: float = 1.0
) -> dict[str, float]:
  """Describes the rollouts of an evaluation: accuracy, pass@k, mean reward, truncation.

  Accuracy and pass@k cover the environments that report "accuracy". If no environment does, both
  are missing: a reward of 1 need not mean that a task is solved.

  Args:
    groups: Groups of the set, one per prompt.
    name: Name of the evaluation set, the middle part of the metrics' names.
    pass_k: Values of k for pass@k, each at most the smallest group's size.
    solved: Smallest value of the metric "accuracy" that counts as solved. If an environment
      reports it, an attempt without it could not be scored and counts as not solved.

  Returns:
    Metrics `eval/NAME/*` by name. Accuracy is the mean over prompts of the share solved.
  """
  parts = _by_environment(groups)
  measuring = {environment for environment, own in parts.items() if _measures_accuracy(own)}
  counts = [
    (len(group.rollouts), sum(r.metrics.get("accuracy", 0.0) >= solved for r in group.rollouts))
    for group in groups
    if group.prompt.environment in measuring
  ]
  described = rollout_metrics(groups)
  result = {f"eval/{name}/prompts": float(len(groups))}
  if measuring:
    shares = [c / n for n, c in counts if n]
    result[f"eval/{name}/accuracy"] = _mean(shares)
    if len(shares) > 1:
      result[f"eval/{name}/accuracy_se"] = float(np.std(shares, ddof=1) / math.sqrt(len(shares)))
    for k in pass_k:
      result[f"eval/{name}/pass@{k}"] = _mean([pass_at_k(n, c, k) for n, c in counts])
  has_turns = "rollout/turns_total" in described
  for kept in _OF_EVALUATION + (_OF_CONVERSATIONS if has_turns else ()):
    result[f"eval/{name}/{kept}"] = described[f"rollout/{kept}"]
  for kind, count in error_kinds(groups).items():
    result[f"eval/{name}/errors/{kind}"] = float(count)
  if len(parts) > 1:
    for environment, own in parts.items():
      result |= evaluation_metrics(own, name=f"{name}/{environment}", pass_k=pass_k, solved=solved)
  return result


def _of_greedy(groups: Sequence[RolloutGroup]) -> dict[str, float]:
  """Describes the greedy attempts; no other metric of the rollouts includes them. {}: none."""
  greedy = [group.greedy for group in groups if group.greedy is not None]
  if not greedy:
    return {}
  rewards = np.asarray([rollout.reward for rollout in greedy], np.float64)
  return {
    "rollout/greedy_reward_mean": _mean(rewards[np.isfinite(rewards)]),
    "rollout/greedy_tokens_mean": _mean([len(rollout.completion_ids) for rollout in greedy]),
  }


def _mean(values: Any) -> float:
  """Returns the mean; NaN if there are no values."""
  array = np.asarray(values, np.float64)
  return float(array.mean()) if array.size else math.nan


def _behavior_entropy(rollouts: Sequence[Rollout]) -> float:
  """Returns the mean of -log μ over sampled tokens; NaN if logprobs are not known."""
  logprobs = [rollout.behavior_logprobs[rollout.loss_mask] for rollout in rollouts]
  return -_mean(np.concatenate([np.zeros(0), *logprobs]))


def _measures_accuracy(groups: Sequence[RolloutGroup]) -> bool:
  """Returns whether the environment of these groups reports which attempts are right."""
  return any("accuracy" in rollout.metrics for group in groups for rollout in group.rollouts)


def _centred(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
  """Returns values minus their mean; 0 where they are equal but for rounding."""
  return values - _mean(values) if differs(values) else np.zeros_like(values)


def _group_std(group: RolloutGroup) -> float:
  scored = group.rewards[np.isfinite(group.rewards)].astype(np.float64)
  return float(scored.std()) if has_signal(group) else 0.0


def _std(values: Float[np.ndarray, " n"]) -> float:
  """Returns the standard deviation; 0 if values are equal but for rounding, NaN without values."""
  return (float(values.std()) if differs(values) else 0.0) if values.size else math.nan


def _staleness(groups: Sequence[RolloutGroup], step: int | None) -> dict[str, float]:
  """Returns the steps between sampling and learning, over tokens sampled from this run's
  weights."""
  if step is None:
    return {}
  versions = [r.weight_versions[r.loss_mask] for group in groups for r in group.rollouts]
  every = np.concatenate(versions) if versions else np.zeros(0, np.int32)
  stale = step - every[every >= 0]
  return {
    "rollout/staleness_mean": _mean(stale),
    "rollout/staleness_max": float(stale.max()) if stale.size else math.nan,
  }


def _by_name(groups: Sequence[RolloutGroup]) -> dict[str, float]:
  """Returns the means of environments' own metrics, by environment."""
  result: dict[str, float] = {}
  for environment, own in _by_environment(groups).items():
    rollouts = [rollout for group in own for rollout in group.rollouts]
    found: dict[str, list[float]] = {"reward_mean": [], "failed_share": []}
    for rollout in rollouts:
      found["reward_mean"].append(rollout.reward)
      found["failed_share"].append(float(not math.isfinite(rollout.reward)))
      for name, value in rollout.reward_components.items():
        found.setdefault(f"reward/{name}", []).append(value)
      for name, value in rollout.metrics.items():
        found.setdefault(name, []).append(value)
    area = f"env/{environment}"
    result[f"{area}/completions"] = float(len(rollouts))
    for name, values in found.items():
      array = np.asarray(values, np.float64)
      result[f"{area}/{name}"] = _mean(array[np.isfinite(array)])
  return result


def _by_environment(groups: Sequence[RolloutGroup]) -> dict[str, list[RolloutGroup]]:
  parts: dict[str, list[RolloutGroup]] = {}
  for group in groups:
    parts.setdefault(group.prompt.environment, []).append(group)
  return parts


def _is_ended(rollout: Rollout) -> bool:
  """Returns whether the environment itself ended the attempt, not a limit or a failure."""
  is_cut = rollout.is_truncated or rollout.hit_turn_limit
  return not (is_cut or rollout.error or math.isnan(rollout.reward))
