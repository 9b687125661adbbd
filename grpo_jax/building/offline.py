"""From a config with mode = "offline" to the parts that are not those of online training."""

import functools
import logging
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from grpo_jax import data
from grpo_jax.batching import packing
from grpo_jax.config import batching_options, modes
from grpo_jax.data.group_options import Options
from grpo_jax.data.groups import GroupDataset
from grpo_jax.environments.base import EnvironmentFactory
from grpo_jax.learn import group_scorer as scoring
from grpo_jax.learn import train_step
from grpo_jax.offline import behavior
from grpo_jax.offline import recorded as offline
from grpo_jax.rl import estimators
from grpo_jax.rollouts import collecting as rollout
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.types import RolloutGroup

_log = logging.getLogger(__name__)

# An ml_collections.ConfigDict, whose fields a type checker cannot know.
Config = Any


def opener(config: Config) -> Callable[..., GroupDataset]:
  """Returns what opens a dataset, in place of `data.open_dataset`; the same one only once."""
  opened: dict[str, GroupDataset] = {}
  settings = {
    "options": Options(**config.offline),
    "on_error": config.data.on_error,
    "max_tokens": batching_options.longest_sequence(config),
  }

  def open_groups(tokenizer: data.Tokenizer, **fields: Any) -> GroupDataset:
    key = repr(sorted(fields.items()))
    if key not in opened:
      opened[key] = offline.open_groups(tokenizer, **settings, **fields)
    return opened[key]

  return open_groups


def groups_lines(config: Config, datasets: Sequence[Any]) -> Iterator[str]:
  """Yields what is to be said of the groups of training before anything is learned from them."""
  estimator = estimators.make(**config.advantages)
  for dataset in datasets:
    assert isinstance(dataset, GroupDataset)  # see `opener`.
    groups, singles = len(dataset.members), dataset.members.singles
    told = f"{dataset.name}: {groups} recorded groups, {singles} of them of one response"
    if singles and estimator.baseline != "none":
      told += (
        f". NOTHING IS LEARNED FROM THESE {singles}: advantages.estimator="
        f"{config.advantages.estimator!r} compares the responses of a group;"
        " 'reinforce_pp' compares all responses of a step"
      )
    yield told


def make_scorer(
  config: Config,
  score: train_step.Scorer,
  mesh: Mesh,
  shapes: tuple[packing.Shape, ...],
  cost: packing.Cost,
) -> scoring.GroupScorer:
  """Makes what gives logprobs of whole groups, in rows as the update has them."""
  at_once = config.rollout.prompts_per_step
  return scoring.GroupScorer(score, mesh, groups_at_once=at_once, shapes=shapes, cost=cost)


def score_behavior(
  config: Config,
  prompts: data.PromptStream,
  scorer: scoring.GroupScorer,
  params: Any,
  workdir: pathlib.Path,
) -> behavior.BehaviorLogprobs:
  """Has the initial policy score the responses whose logprobs are not recorded.

  Args:
    config: of the run.
    prompts: of training, at their beginning.
    scorer: see `make_scorer`.
    params: of the initial policy.
    workdir: the run folder.
  """
  source, size = config.offline.behavior, config.rollout.prompts_per_step
  if source == "file":
    return behavior.BehaviorLogprobs([])
  is_foreseeable = config.data.dataloader is None and not config.dynamic_sampling.enabled
  if is_foreseeable:
    batches = offline.batches(prompts, steps=config.total_steps, prompts_per_step=size)
  else:
    batches = offline.all_batches(prompts.datasets, size=size, on_error=config.data.on_error)
  _log.info("scoring recorded responses under the initial policy")
  return behavior.score_all(
    batches,
    folder=workdir / "behavior_logprobs",
    score=lambda groups: scorer(params, groups),
    from_file=source == "auto",
    steps=config.total_steps,
  )


def make_rescore(
  config: Config,
  environments: Mapping[str, EnvironmentFactory],
  tokenizer: data.Tokenizer,
  limits: rollout.Limits,
  stop: Any = False,
  loop: LoopThread | None = None,
) -> Callable[[Sequence[RolloutGroup]], list[RolloutGroup]] | None:
  """Makes what has environments score recorded responses; None if the file has the rewards."""
  if not modes.needs_environments(config):
    return None
  common = {"limits": limits, "stop": stop, "loop": loop}
  return functools.partial(
    offline.rescored, environments=environments, tokenizer=tokenizer, **common
  )
