"""The table of all metrics, and what turns groups and sums into one number each. Pure.

A metric is named `area/name`. On the device it is a pair of sums (`types.Mean`, ...), so that
merging over microbatches and devices is exact; on the host it is a float. A name that stands in
no row of `METRICS` (metric_table.py) is a fault: `unknown` finds it, and `loggers` warns of it.
"""

import fnmatch
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from grpo_jax.metric_table import METRICS, Definition
from grpo_jax.types import FinishReason, Metrics, RolloutGroup


def merge(parts: Iterable[Metrics]) -> Metrics:
  """Returns the metrics of all parts (microbatches, updates) together, exactly.

  Args:
    parts: sums of each part; a name may be missing from some of them.

  Raises:
    TypeError: if one name is a Mean in one part and, say, a Maximum in another.
  """
  merged: Metrics = {}
  for part in parts:
    for name, value in part.items():
      if name not in merged:
        merged[name] = value
      elif isinstance(value, type(merged[name])):
        merged[name] = merged[name].merge(value)  # pyright: ignore[reportArgumentType]
      else:
        raise TypeError(
          f"metric {name!r} is a {type(merged[name]).__name__} in one part"
          f" and a {type(value).__name__} in another"
        )
  return merged


def to_floats(metrics: Metrics) -> dict[str, float]:
  """Returns {name: value}, fetched from the device in one transfer; NaN where nothing counted."""
  leaves, tree = jax.tree.flatten(metrics)
  host = tree.unflatten([float(leaf) for leaf in jax.device_get(leaves)])
  return {name: value.value() for name, value in host.items()}


def of_rounds(earlier: Mapping[str, float], latest: Mapping[str, float]) -> dict[str, float]:
  """Joins what two rounds of one step told: counts are added up, of the rest the latest stays."""
  added = {
    name: earlier[name] + value
    for name, value in latest.items()
    if name in earlier and (found := definition(name)) and found.unit == "count"
  }
  return {**earlier, **latest, **added}


def pass_at_k(samples: int, solved: int, k: int) -> float:
  """Returns the unbiased estimate of the chance that one of k samples solves the task.

      pass@k = 1 - C(n - c, k) / C(n, k)

  Computed with integers, hence without the loss of digits of a product of floats.

  Args:
    samples: n, completions drawn for the prompt, at least k.
    solved: c, how many of them solve it.
    k: how many attempts are granted, at least 1.

  Raises:
    ValueError: unless 1 <= k <= n and 0 <= c <= n.

  Reference:
    Chen et al. 2021, arXiv:2107.03374, equation 1.
  """
  if not (1 <= k <= samples and 0 <= solved <= samples):
    raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got n={samples} c={solved} k={k}")
  ways = math.comb(samples, k)
  return (ways - math.comb(samples - solved, k)) / ways


def of_rollouts(groups: Sequence[RolloutGroup], *, step: int | None = None) -> dict[str, float]:
  """Describes the rollouts of one step: rewards, lengths, how they ended, how stale they are.

  A reward of NaN (could not be scored) is left out of every mean of rewards and counted in
  `rollout/failed_share`. Standard deviations are those of the population (ddof = 0).

  Args:
    groups: of one step, before any filter.
    step: version of the weights to be updated; None leaves staleness out.

  Returns:
    {name: value} of `rollout/*` and `env/*`; NaN where there is nothing to describe.
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
    "rollout/reward_std": float(scored.std()) if scored.size else math.nan,
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
    "rollout/turns_mean": _mean([rollout.turns for rollout in rollouts]),
  }
  return result | _staleness(groups, step) | _by_name(groups)


def of_datasets(groups: Sequence[RolloutGroup]) -> dict[str, float]:
  """Describes the groups of each dataset apart: what a curriculum needs to know.

  Args:
    groups: of one step, before any filter.

  Returns:
    {name: value} of `data/NAME/prompts`, `reward_mean`, `no_signal_share` and, where the
    environment reports it, `accuracy`.
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


def of_evaluation(
  groups: Sequence[RolloutGroup], *, name: str, pass_k: Sequence[int] = (1,), solved: float = 1.0
) -> dict[str, float]:
  """Describes the rollouts of an evaluation: accuracy, pass@k, mean reward, truncation.

  Args:
    groups: one a prompt.
    name: of the evaluation set, the middle part of the metrics' names.
    pass_k: the k of every pass@k, each at most the smallest group's size.
    solved: the least value that counts as solved, of the metric "accuracy" where the environment
      reports one, else of the reward. What could not be scored (NaN) is not solved.

  Returns:
    {name: value} of `eval/NAME/*`. Accuracy is the mean over prompts of the share solved.
  """
  counts = [
    (
      len(group.rollouts),
      sum(r.metrics.get("accuracy", r.reward) >= solved for r in group.rollouts),
    )
    for group in groups
  ]
  described = of_rollouts(groups)
  result = {
    f"eval/{name}/prompts": float(len(groups)),
    f"eval/{name}/accuracy": _mean([c / n for n, c in counts if n]),
  }
  for k in pass_k:
    result[f"eval/{name}/pass@{k}"] = _mean([pass_at_k(n, c, k) for n, c in counts])
  for kept in ("reward_mean", "truncated_share", "failed_share", "completion_tokens_mean"):
    result[f"eval/{name}/{kept}"] = described[f"rollout/{kept}"]
  return result


def has_signal(group: RolloutGroup) -> bool:
  """Returns whether two scored rewards of the group differ, so that something can be learned."""
  scored = group.rewards[np.isfinite(group.rewards)]
  return bool(scored.size) and bool((scored != scored[0]).any())


def definition(name: str) -> Definition | None:
  """Returns the row of `METRICS` that describes a name; None if there is none."""
  if name in METRICS:
    return METRICS[name]
  return next((d for pattern, d in METRICS.items() if fnmatch.fnmatchcase(name, pattern)), None)


def unknown(names: Iterable[str]) -> list[str]:
  """Returns the names that no row of `METRICS` describes, sorted."""
  return sorted(name for name in set(names) if definition(name) is None)


def reproducible(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values without those of clock and machine: what a resumed run repeats exactly."""
  return {k: v for k, v in values.items() if not k.startswith(("time/", "perf/"))}


def parse_lines(text: str) -> tuple[list[dict[str, Any]], list[int]]:
  """Reads the text of a `metrics.jsonl`.

  Returns:
    The objects with an integer `step`, in order, and the numbers (from 1) of the lines that are
    none: a killed process may leave half a line at the end.
  """
  rows, broken = [], []
  for number, line in enumerate(text.split("\n"), start=1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
    except ValueError:
      row = None
    if isinstance(row, dict) and isinstance(row.get("step"), int):
      rows.append(row)
    else:
      broken.append(number)
  return rows, broken


def markdown_table() -> str:
  """Returns `METRICS` as the table of docs/metrics.md."""
  rows = [f"| `{name}` | {d.unit} | {d.meaning} | {d.healthy} |" for name, d in METRICS.items()]
  return "\n".join(["| Name | Unit | Meaning | Healthy |", "|---|---|---|---|", *rows])


def _mean(values: Any) -> float:
  """The mean; NaN of nothing."""
  array = np.asarray(values, np.float64)
  return float(array.mean()) if array.size else math.nan


def _group_std(group: RolloutGroup) -> float:
  scored = group.rewards[np.isfinite(group.rewards)].astype(np.float64)
  return float(scored.std()) if has_signal(group) else 0.0


def _staleness(groups: Sequence[RolloutGroup], step: int | None) -> dict[str, float]:
  """Steps between sampling and learning, over sampled tokens; of weights of this run only."""
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
  """Means of what environments report under names of their own."""
  found: dict[str, list[float]] = {}
  for group in groups:
    area = f"env/{group.prompt.environment}"
    for rollout in group.rollouts:
      found.setdefault(f"{area}/reward_mean", []).append(rollout.reward)
      for name, value in rollout.reward_components.items():
        found.setdefault(f"{area}/reward/{name}", []).append(value)
      for name, value in rollout.metrics.items():
        found.setdefault(f"{area}/{name}", []).append(value)
  arrays = {name: np.asarray(values, np.float64) for name, values in found.items()}
  return {name: _mean(values[np.isfinite(values)]) for name, values in arrays.items()}
