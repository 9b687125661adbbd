"""The parts of a run that learns from recorded groups. Only such runs import it."""

import contextlib
import functools
import logging
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from grpo_jax import data, processes
from grpo_jax.building.training_mode import KeepGroups, ModeDependencies, ModeFunctions
from grpo_jax.compilation.programs import CompileJob
from grpo_jax.config import batching_options, configuration, modes, run_options
from grpo_jax.config.options import Config
from grpo_jax.data.group_options import RecordedOptions
from grpo_jax.data.groups import GroupDataset
from grpo_jax.engines.base import Engine
from grpo_jax.engines.none import NoEngine
from grpo_jax.environments.base import AnyFactory, as_factory
from grpo_jax.interrupts import Stopped
from grpo_jax.learn.group_scoring import GroupScorer
from grpo_jax.models import loading
from grpo_jax.offline import behavior, recorded_groups
from grpo_jax.rollouts import rollout
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.types import Prompt, RolloutGroup
from grpo_jax.values import options

_log = logging.getLogger(__name__)


class Offline:
  """Makes the parts of an offline run; see `training_mode.TrainingMode`."""

  def __init__(self, config: Config):
    self._config = config
    self._behavior = behavior.BehaviorLogprobs([])
    self.opener: data.Opener = _opener(config)

  def make_engine(
    self,
    tokenizer: data.Tokenizer,
    model: loading.ModelFacts,
    workdir: pathlib.Path,
    stack: contextlib.ExitStack,
  ) -> Engine:
    """Returns an engine that does not sample."""
    return NoEngine()

  def engine_jobs(self, engine: Engine, full: Any) -> list[CompileJob]:
    """Returns nothing."""
    return []

  def meet_initial_policy(
    self,
    prompts: Callable[[], data.PromptStream],
    scorer: GroupScorer,
    params: Any,
    workdir: pathlib.Path,
  ) -> None:
    """Describes the groups, and scores the responses whose logprobs are not recorded."""
    opened = prompts()
    for line in groups_lines(self._config, opened.datasets):
      _log.info(line)
    self._behavior = score_behavior(self._config, opened, scorer, params, workdir)

  def make_functions(self, dependencies: ModeDependencies) -> ModeFunctions:
    """Makes the parts from the recorded groups."""
    config = self._config
    rescore = make_rescore(
      config,
      dependencies.environments,
      dependencies.tokenizer,
      run_options.limits(config),
      dependencies.stop,
      dependencies.loop,
    )
    ranking = recorded_groups.Ranking(dependencies.scorer, config.offline.score, rescore)
    return ModeFunctions(
      recorded_groups.Recorded(self._behavior, config.offline.group_size, config.seed, rescore),
      None,
      functools.partial(_evaluate_set, ranking=ranking, dependencies=dependencies),
      ranking.step_metrics,
    )


def _evaluate_set(
  weights: Any,
  prompts: Sequence[Prompt],
  name: str,
  keep: KeepGroups,
  *,
  ranking: recorded_groups.Ranking,
  dependencies: ModeDependencies,
) -> dict[str, float]:
  """Ranks the recorded groups of one set of prompts."""
  del keep  # the file of the set has the completions.
  with dependencies.logger.progress(f"evaluating {name}", len(prompts)) as shown:
    advance = functools.partial(_advance_unless, dependencies.stop, shown)
    return ranking.evaluate(weights, prompts, name=name, advance=advance)


def _advance_unless(stop: Any, shown: Callable[[int], None], count: int) -> None:
  """Advances the progress bar by `count`; raises Stopped if any process is asked to end."""
  if processes.any_of(stop):
    raise Stopped
  shown(count)


def _opener(config: Config) -> Callable[..., GroupDataset]:
  """Returns a function that opens a dataset once; it replaces `data.open_dataset`."""
  opened: dict[str, GroupDataset] = {}
  settings = {
    "options": RecordedOptions(**options.values(config.offline)),
    "on_error": config.data.on_error,
    "max_tokens": batching_options.longest_sequence(config),
  }

  def open_groups(tokenizer: data.Tokenizer, **fields: Any) -> GroupDataset:
    key = repr(sorted(fields.items()))
    if key not in opened:
      opened[key] = recorded_groups.open_groups(tokenizer, **settings, **fields)
    return opened[key]

  return open_groups


def groups_lines(config: Config, datasets: Sequence[Any]) -> Iterator[str]:
  """Yields what a user should know about the training groups before the run learns from them."""
  estimator = run_options.estimator(config)
  for dataset in datasets:
    assert isinstance(dataset, GroupDataset)  # see `_opener`.
    groups, singles = len(dataset.members), dataset.members.singles
    line = f"{dataset.name}: {groups} recorded groups, {singles} of them with one response"
    if singles and estimator.compares:
      line += (
        f". NOTHING IS LEARNED FROM THESE {singles}: advantages.estimator="
        f"{config.advantages.estimator!r} compares the responses of a group;"
        " 'reinforce_pp' compares all responses of a step"
      )
    yield line


def score_behavior(
  config: Config,
  prompts: data.PromptStream,
  scorer: GroupScorer,
  params: Any,
  workdir: pathlib.Path,
) -> behavior.BehaviorLogprobs:
  """Has the initial policy score the responses whose logprobs are not recorded.

  Args:
    config: Config of the run.
    prompts: Training prompts, at their beginning.
    scorer: Scorer of whole groups.
    params: Weights of the initial policy, as programs take them.
    workdir: Run folder.
  """
  source, size = config.offline.behavior, config.rollout.prompts_per_step
  if source == "file":
    return behavior.BehaviorLogprobs([])
  is_foreseeable = config.data.dataloader is None and not config.dynamic_sampling.enabled
  if is_foreseeable:
    batches = recorded_groups.batches(prompts, steps=config.total_steps, prompts_per_step=size)
  else:
    batches = recorded_groups.all_batches(
      prompts.datasets, size=size, on_error=config.data.on_error
    )
  _log.info("scoring recorded responses under the policy that the run begins with")
  return behavior.score_all(
    batches,
    folder=workdir / "behavior_logprobs",
    score=lambda groups: scorer(params, groups),
    from_file=source == "auto",
    steps=config.total_steps,
  )


def make_rescore(
  config: Config,
  environments: Mapping[str, AnyFactory],
  tokenizer: data.Tokenizer,
  limits: rollout.AttemptLimits,
  stop: Any = False,
  loop: LoopThread | None = None,
) -> Callable[[Sequence[RolloutGroup]], list[RolloutGroup]] | None:
  """Makes the function that has environments score recorded responses; None if the file has the
  rewards."""
  if not modes.needs_environments(config):
    return None
  if driving := [name for name, made in environments.items() if as_factory(made).is_agent]:
    raise configuration.ConfigError(
      f"the environment {driving[0]!r} drives its own conversation, so that it cannot score"
      " recorded responses: set offline.rewards='file', or choose another environment"
    )
  common = {"limits": limits, "stop": stop, "loop": loop}
  return functools.partial(
    recorded_groups.rescored, environments=environments, tokenizer=tokenizer, **common
  )
