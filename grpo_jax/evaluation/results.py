"""What an evaluation found, as values, as text and as a file."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax.environments import Environments
from grpo_jax.evaluation import statistics
from grpo_jax.evaluation.statistics import Estimate, Paired
from grpo_jax.files import atomic
from grpo_jax.types import RolloutGroup
from grpo_jax.values import json_numbers

FILE = "metrics.json"


@dataclasses.dataclass(frozen=True)
class SetResult:
  """What one model did on one set.

  Attributes:
    name: Name of the set.
    prompt_ids: Prompts, in the order of the set.
    estimates: "accuracy", "pass@k" and "maj@k" by name, or "reward_mean" where the environment
      does not say which attempts are right; means over prompts. For recorded groups those of
      `ranked.describe`.
    counts: Prompts and attempts, or groups and responses, and how many of them had what happen to
      them.
    values: Value of each prompt, by the names of `estimates` that have a standard error.
  """

  name: str
  prompt_ids: tuple[str, ...]
  estimates: Mapping[str, Estimate]
  counts: Mapping[str, float]
  values: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class ModelResult:
  """What one model did on all sets.

  Attributes:
    model: Name of the model in messages: "runs/first:20", or a folder.
    folder: Folder of its completions; report.html shows them.
    sets: Results by the name of the set.
  """

  model: str
  folder: pathlib.Path
  sets: Mapping[str, SetResult]


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What `evaluation.run` returns.

  Attributes:
    folder: Folder that was written: metrics.json, and completions by model and set.
    models: Results of each model, in the order in which they were named.
    comparisons: For two models, by the name of the set: the second minus the first, on the same
      prompts, by the name of the number.
  """

  folder: pathlib.Path
  models: tuple[ModelResult, ...]
  comparisons: Mapping[str, Mapping[str, Paired]]

  @property
  def metrics(self) -> dict[str, float]:
    """Returns the numbers of the first model: SET/accuracy, SET/accuracy_se, SET/pass@4, …"""
    return flat(self.models[0])

  def summary(self) -> str:
    """Returns the numbers as text, a line each, such as "accuracy 57.0 % ± 5.0"."""
    lines = []
    for model in self.models:
      lines.append(model.model)
      lines += [line for result in model.sets.values() for line in _set_lines(result)]
    if self.comparisons:
      lines.append(f"{self.models[1].model} minus {self.models[0].model}, on the same prompts")
    for name, pairs in self.comparisons.items():
      lines += [_paired_line(name, number, paired) for number, paired in pairs.items()]
    return "\n".join(lines)

  def __repr__(self) -> str:
    return self.summary()


def describe(
  name: str,
  groups: Sequence[RolloutGroup],
  environments: Environments,
  *,
  pass_k: Sequence[int],
  seed: int,
) -> SetResult:
  """Computes the numbers of one set.

  An attempt that could not be scored is not right. maj@k is missing where an environment does not
  say which answer a completion gives, or where conversations have several turns.

  Args:
    name: Name of the set.
    groups: Attempts at each prompt, all with equally many.
    environments: Environments that scored them.
    pass_k: Values of k; those beyond the number of attempts are left out.
    seed: Random seed of the bootstrap.
  """
  rollouts = [rollout for group in groups for rollout in group.rollouts]
  values: dict[str, np.ndarray] = {}
  if any("accuracy" in rollout.metrics for rollout in rollouts):
    attempts = [len(group.rollouts) for group in groups]
    solved = [sum(map(_is_right, group.rollouts)) for group in groups]
    values["accuracy"] = np.asarray(solved, np.float64) / attempts
    ks = sorted({k for k in pass_k if 1 < k <= min(attempts)})
    values |= {f"pass@{k}": statistics.pass_values(solved, attempts, k) for k in ks}
    votes = [_votes(group, environments) for group in groups]
    known = [each for each in votes if each is not None]
    if len(known) == len(groups):
      for k in ks:
        values[f"maj@{k}"] = np.asarray([statistics.majority_at_k(*each, k) for each in known])
  else:
    rewards = [_mean([r.reward for r in group.rollouts]) for group in groups]
    values["reward_mean"] = np.asarray([r for r in rewards if math.isfinite(r)], np.float64)
    votes = []
  counts = {
    "prompts": float(len(groups)),
    "attempts": float(len(rollouts)),
    "prompts_cut": float(sum(group.prompt.is_cut for group in groups)),
    "truncated": float(sum(rollout.is_truncated for rollout in rollouts)),
    "not_scored": float(sum(not math.isfinite(rollout.reward) for rollout in rollouts)),
    "completion_tokens_mean": _mean([float(len(r.completion_ids)) for r in rollouts]),
  }
  if votes and None not in votes:
    counts["unanswered"] = float(sum(each[2] for each in votes if each))
  return SetResult(
    name=name,
    prompt_ids=tuple(group.prompt.prompt_id for group in groups),
    estimates={key: statistics.estimate(x, seed=seed) for key, x in values.items()},
    counts=counts,
    values=values,
  )


def compare(first: ModelResult, second: ModelResult, *, seed: int) -> dict[str, dict[str, Paired]]:
  """Compares two models on the sets and prompts that both attempted."""
  found = {}
  for name in first.sets.keys() & second.sets.keys():
    one, other = first.sets[name], second.sets[name]
    if one.prompt_ids == other.prompt_ids:
      found[name] = {
        key: statistics.compare(values, other.values[key], seed=seed)
        for key, values in one.values.items()
        if key in other.values and len(values) == len(other.values[key])
      }
  return {name: found[name] for name in first.sets if name in found}


def flat(model: ModelResult) -> dict[str, float]:
  """Returns the numbers of a model by SET/NUMBER; _se, _low and _high say how certain they are."""
  found: dict[str, float] = {}
  for name, result in model.sets.items():
    for key, estimate in result.estimates.items():
      found[f"{name}/{key}"] = estimate.value
      found[f"{name}/{key}_se"] = estimate.error
      found[f"{name}/{key}_low"], found[f"{name}/{key}_high"] = estimate.low, estimate.high
    found |= {f"{name}/{key}": count for key, count in result.counts.items()}
  return found


def write(evaluation: Evaluation, facts: Mapping[str, Any]) -> pathlib.Path:
  """Writes metrics.json: everything but the completions.

  Args:
    evaluation: Results so far.
    facts: Further fields of the file, such as the seed.
  """
  content = {
    **facts,
    "models": [
      {"model": model.model, "folder": str(model.folder), "metrics": _finite(flat(model))}
      for model in evaluation.models
    ],
    "comparisons": {
      name: {key: _finite(_flat_pair(paired)) for key, paired in pairs.items()}
      for name, pairs in evaluation.comparisons.items()
    },
  }
  path = evaluation.folder / FILE
  atomic.replace_file(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
  return path


def _flat_pair(paired: Paired) -> dict[str, float]:
  one = paired.difference
  return {
    "difference": one.value,
    "difference_se": one.error,
    "difference_low": one.low,
    "difference_high": one.high,
    "better": float(paired.better),
    "worse": float(paired.worse),
    "p_value": paired.p_value,
  }


def _set_lines(result: SetResult) -> list[str]:
  counts = result.counts
  facts = [f"{counts[key]:.0f} {text}" for key, text in _NOTED.items() if counts.get(key)]
  lines = [f"  {result.name}: {', '.join(facts)}"]
  width = max([10, *map(len, result.estimates)])
  for key, one in result.estimates.items():
    interval = f"   95 %: {_interval(key, one)}" if math.isfinite(one.low) else ""
    lines.append(f"    {key:<{width}} {shown(key, one)}{interval}")
  return lines


def shown(name: str, estimate: Estimate) -> str:
  """Returns a number with its standard error: "57.0 % ± 5.0", and for rewards "0.412 ± 0.013"."""
  is_plain = name in _PLAIN
  scale, digits, unit = (1.0, 3, "") if is_plain else (100.0, 1, " %")
  error = f" ± {scale * estimate.error:.{digits}f}" if math.isfinite(estimate.error) else ""
  return f"{scale * estimate.value:.{digits}f}{unit}{error}"


def _interval(name: str, one: Estimate) -> str:
  if name in _PLAIN:
    return f"{one.low:.3f} to {one.high:.3f}"
  return f"{100 * one.low:.1f} to {100 * one.high:.1f}"


def _paired_line(name: str, number: str, paired: Paired) -> str:
  one = paired.difference
  scale, unit = (1.0, "") if number in _PLAIN else (100.0, " points")
  digits = 3 if number in _PLAIN else 1
  return (
    f"  {name} {number}: {scale * one.value:+.{digits}f} ± {scale * one.error:.{digits}f}{unit}"
    f" (95 %: {scale * one.low:+.{digits}f} to {scale * one.high:+.{digits}f});"
    f" better on {paired.better} prompts, worse on {paired.worse}, p = {paired.p_value:.2g}"
  )


def _votes(
  group: RolloutGroup, environments: Environments
) -> tuple[list[int], list[float], int] | None:
  """Returns votes, share of right ones and number of attempts without an answer; None: unknown."""
  factory = environments[group.prompt.environment]
  found: dict[str, list[bool]] = {}
  unanswered = 0
  for rollout in group.rollouts:
    if rollout.turns > 1:
      return None
    try:
      answer = factory.answer(group.prompt, rollout.text)
    except NotImplementedError:
      return None
    if answer is None:
      unanswered += 1
    else:
      found.setdefault(answer, []).append(_is_right(rollout))
  votes = [len(each) for each in found.values()]
  return votes, [sum(each) / len(each) for each in found.values()], unanswered


def _is_right(rollout: Any) -> bool:
  return rollout.metrics.get("accuracy", 0.0) >= 1.0


def _mean(values: Sequence[float]) -> float:
  known = [value for value in values if math.isfinite(value)]
  return sum(known) / len(known) if known else math.nan


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
  return {name: json_numbers.finite(value) for name, value in values.items()}


# Numbers that are not shares; the others are printed in percent.
_PLAIN = {
  *("reward_mean", "chosen_reward_mean", "margin", "logprob", "consistency", "rank_correlation")
}
_NOTED = {
  "prompts": "prompts",
  "attempts": "attempts",
  "groups": "groups",
  "responses": "responses",
  "without_order": "groups without an order",
  "unanswered": "without an answer",
  "truncated": "cut at the token limit",
  "not_scored": "not scored",
  "prompts_cut": "prompts cut",
}
