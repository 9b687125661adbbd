"""The interface of online and offline training: the parts that each makes in its own way."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from grpo_jax import data, environments
from grpo_jax.compilation.programs import CompileJob
from grpo_jax.engines.base import Engine
from grpo_jax.learn.group_scoring import GroupScorer
from grpo_jax.models import loading
from grpo_jax.rollouts import group_source
from grpo_jax.rollouts.background_attempts import Attempts
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.run_folder.loggers import Logger
from grpo_jax.run_folder.steps import GroupLogprobs
from grpo_jax.types import Prompt, RolloutGroup

# (groups of an evaluation) → None: keeps their completions.
KeepGroups = Callable[[Sequence[RolloutGroup]], None]
# (weights of the policy, prompts, name of the evaluation set, what keeps completions) → eval/NAME/*
EvaluateSet = Callable[[Any, Sequence[Prompt], str, KeepGroups], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class ModeDependencies:
  """The objects from which both modes make their parts.

  Attributes:
    engine: Engine made by the mode.
    environments: Environments by name.
    tokenizer: Tokenizer of the model.
    model: Model of the run.
    scorer: Scorer of whole groups.
    logger: Logger that shows the progress of a phase.
    loop: Thread in which rollouts are collected.
    stop: Flag that becomes true when the run is asked to end; see `interrupts.Flag`.
  """

  engine: Engine
  environments: environments.Environments
  tokenizer: data.Tokenizer
  model: loading.ModelFacts
  scorer: GroupScorer
  logger: Logger
  loop: LoopThread
  stop: Any


@dataclasses.dataclass(frozen=True)
class ModeFunctions:
  """The source of groups, and the evaluation of a policy.

  Attributes:
    sample: Function (prompts, step) → their groups.
    attempts: Function (whether one block is sampled after the other) → attempts in the background;
      None: this mode samples nothing.
    evaluate_set: Function that evaluates the policy's weights on the prompts of one evaluation set.
    rank: Function (groups, logprobs) → metrics that only recorded groups have; None if there are
      no such metrics.
  """

  sample: group_source.Sample
  attempts: Callable[[bool], Attempts] | None
  evaluate_set: EvaluateSet
  rank: Callable[[Sequence[RolloutGroup], GroupLogprobs], dict[str, float]] | None


@runtime_checkable
class TrainingMode(Protocol):
  """One of the two ways to train: `online.Online` or `offline.Offline`."""

  @property
  def opener(self) -> data.Opener:
    """Function that opens a dataset."""
    ...

  def make_engine(
    self,
    tokenizer: data.Tokenizer,
    model: loading.ModelFacts,
    workdir: pathlib.Path,
    stack: contextlib.ExitStack,
  ) -> Engine:
    """Makes the engine, which `stack` closes.

    Args:
      tokenizer: Tokenizer of the model.
      model: Model of the run.
      workdir: Run folder.
      stack: Stack that closes what is opened here.

    Raises:
      ConfigError: The settings of the engine cannot work.
    """
    ...

  def engine_jobs(self, engine: Engine, full: Any) -> list[CompileJob]:
    """Returns what the engine compiles, given shapes and shardings of the full weights."""
    ...

  def meet_initial_policy(
    self,
    prompts: Callable[[], data.PromptStream],
    scorer: GroupScorer,
    params: Any,
    workdir: pathlib.Path,
  ) -> None:
    """Does what needs the full weights of the initial policy.

    Args:
      prompts: Function that opens the training prompts at their beginning.
      scorer: Scorer of whole groups.
      params: Weights of the initial policy, as programs take them.
      workdir: Run folder.
    """
    ...

  def make_functions(self, dependencies: ModeDependencies) -> ModeFunctions:
    """Makes the parts. This method is called last."""
    ...
