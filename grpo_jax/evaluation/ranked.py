"""Measures how well stored weights rank recorded groups; nothing is sampled.

Only evaluations with `mode="offline"` import this module.
"""

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from grpo_jax import data
from grpo_jax.building import computation, groups, offline, stored, stored_engine
from grpo_jax.config import configuration, run_options
from grpo_jax.config.options import Config
from grpo_jax.evaluation import statistics
from grpo_jax.evaluation.results import SetResult
from grpo_jax.evaluation.statistics import Estimate
from grpo_jax.interrupts import Stopped
from grpo_jax.learn.group_scoring import GroupScorer
from grpo_jax.offline import ranking, recorded_groups
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.run_folder import console, evaluation_log
from grpo_jax.types import Prompt


@dataclasses.dataclass(frozen=True)
class Ranks:
  """Scores the groups of a set: ranks(name, prompts) → what was found; made by `start`.

  Attributes:
    held_out: Prompts of each set, each with its recorded group.
    params: Weights that are measured.
    measure: Function that scores recorded groups.
    seed: Random seed of the bootstrap.
  """

  held_out: Mapping[str, Sequence[Prompt]]
  params: Any
  measure: recorded_groups.Ranking
  seed: int
  screen: console.TrainingScreen
  log: evaluation_log.EvaluationLog
  step: int
  stop: Any

  def __call__(self, name: str, prompts: Sequence[Prompt]) -> SetResult:
    """Every group is on the disk when it is scored.

    Raises:
      Stopped: The evaluation is asked to end.
    """
    found: list[recorded_groups.Scored] = []
    with (
      self.screen.progress(f"evaluating {name}", len(prompts)) as shown,
      self.log.appending(self.step, name) as append,
    ):
      for scored in self.measure.scored(self.params, prompts):
        for each in scored:
          append(len(found), each.group, each.logprobs)
          found.append(each)
        if self.stop:
          raise Stopped
        shown(len(scored))
    return describe(name, found, seed=self.seed)


def start(
  config: Config,
  weights: stored.StoredWeights,
  stack: contextlib.ExitStack,
  *,
  read: Callable[..., Mapping[str, Sequence[Prompt]]],
  folder: pathlib.Path,
  stop: Any,
) -> Ranks:
  """Reads tokenizer, groups and weights.

  Args:
    config: Config of the evaluation, with mode="offline".
    weights: Weights to measure.
    stack: Ends what is opened here.
    read: Function (config, tokenizer, opener) → the prompts of all sets.
    folder: Folder of the results.
    stop: Flag that becomes true when the evaluation is to end.

  Raises:
    ConfigError, ModelError: An option, a set or the model cannot be used.
  """
  opened = stored_engine.open_weights(config, weights, stack)
  tokenizer, mesh = opened.tokenizer, opened.mesh
  factories = stack.enter_context(groups.make_environments(config))
  held_out = read(config, tokenizer, offline.Offline(config).opener)
  data.check_vocabulary(tokenizer, weights.config.vocab_size)
  whole = configuration.replaced(config, {"model.lora.rank": None})  # `params` has the adapter.
  made = computation.make(whole, weights.config, mesh, run_options.objective(config))
  scorer = GroupScorer(
    made.score,
    mesh,
    groups_at_once=config.rollout.prompts_per_step,
    shapes=made.shapes,
    cost=made.cost,
  )
  rescore = offline.make_rescore(
    config,
    factories,
    tokenizer,
    run_options.limits(config),
    stop,
    stack.enter_context(LoopThread()),
  )
  return Ranks(
    held_out=held_out,
    params=stored.load(weights, like=stored_engine.described(weights, mesh)).params,
    measure=recorded_groups.Ranking(scorer, config.offline.score, rescore),
    seed=config.seed,
    screen=opened.screen,
    log=evaluation_log.EvaluationLog(folder, lambda ids: tokenizer.decode(ids, skip_special=False)),
    step=weights.step or 0,
    stop=stop,
  )


def describe(name: str, scored: Sequence[recorded_groups.Scored], *, seed: int) -> SetResult:
  """Computes the numbers of one set.

  Numbers of `ranking.group_values` are means over the groups that have an order, in total and by
  group_type; `logprob` and `reward_mean` are means over all groups. `consistency` and
  `rank_correlation` describe the set as a whole and have no standard error.

  Args:
    name: Name of the set.
    scored: Groups of the set.
    seed: Random seed of the bootstrap.
  """
  all_ranked = [each.ranked for each in scored]
  values = ranking.group_values(all_ranked)
  for kind in sorted({each.group_type for each in all_ranked if each.group_type is not None}):
    members = [each for each in all_ranked if each.group_type == kind]
    values[f"{kind}/accuracy"] = ranking.group_values(members)["accuracy"]
  values["logprob"] = _finite([_mean_logprob(each) for each in scored])
  values["reward_mean"] = _finite([_mean(each.ranked.rewards) for each in scored])
  estimates = {key: statistics.estimate(x, seed=seed) for key, x in values.items() if len(x)}
  whole = {
    "consistency": ranking.group_metrics(all_ranked, name="").get("eval//consistency", math.nan),
    "rank_correlation": _correlation(all_ranked),
  }
  for key, value in whole.items():
    if math.isfinite(value):
      estimates[key] = Estimate(value, math.nan, math.nan, math.nan)
  return SetResult(
    name=name,
    prompt_ids=tuple(each.group.prompt.prompt_id for each in scored),
    estimates=estimates,
    counts={
      "groups": float(len(scored)),
      "responses": float(sum(len(each.group.rollouts) for each in scored)),
      "without_order": float(sum(not ranking.has_order(each) for each in all_ranked)),
      "not_scored": float(sum((~np.isfinite(each.scores)).sum() for each in all_ranked)),
      "prompts_cut": float(sum(each.group.prompt.is_cut for each in scored)),
    },
    # The rewards are in the file: two models have the same.
    values={key: each for key, each in values.items() if key != "reward_mean"},
  )


def _mean_logprob(scored: recorded_groups.Scored) -> float:
  """Returns the mean logprob of a token of the group's responses, in nats."""
  sampled = [
    values[rollout.loss_mask]
    for rollout, values in zip(scored.group.rollouts, scored.logprobs, strict=True)
  ]
  return _mean(np.concatenate(sampled))


def _correlation(groups: Sequence[ranking.Ranked]) -> float:
  """Returns Kendall's τ_b between the scores and the rewards of the responses of all groups.

  It also describes groups of one response, which have no order of their own. NaN if all rewards are
  equal. Source: Kendall 1945, "The treatment of ties in ranking problems".
  """
  if not groups:
    return math.nan
  scores = np.concatenate([group.scores for group in groups])
  rewards = np.concatenate([np.asarray(group.rewards, np.float64) for group in groups])
  known = np.isfinite(scores) & np.isfinite(rewards)
  if len(set(rewards[known].tolist())) < 2:
    return math.nan
  result: Any = stats.kendalltau(scores[known], rewards[known])
  return float(result.statistic)


def _mean(values: np.ndarray) -> float:
  known = np.asarray(values, np.float64)[np.isfinite(values)]
  return float(known.mean()) if known.size else math.nan


def _finite(values: Sequence[float]) -> np.ndarray:
  return np.asarray([value for value in values if math.isfinite(value)], np.float64)
