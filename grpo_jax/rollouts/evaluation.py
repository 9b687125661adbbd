"""Accuracy, pass@k and mean reward on held-out prompts, by the rollout code of training."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_jax.data import Tokenizer
from grpo_jax.engines.base import Engine, OnProgress, SamplingParams
from grpo_jax.environments.base import AnyFactory
from grpo_jax.metrics import scored_groups
from grpo_jax.rollouts import rollout, work_sharing
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.rollouts.options import RolloutOptions
from grpo_jax.types import Prompt, RolloutGroup


def run(
  engine: Engine,
  environments: Mapping[str, AnyFactory],
  prompts: Sequence[Prompt],
  tokenizer: Tokenizer,
  *,
  name: str,
  group_size: int,
  pass_k: Sequence[int],
  sampling: SamplingParams,
  seed: int,
  loop: LoopThread,
  limits: rollout.AttemptLimits | None = None,
  schedule: rollout.Schedule = RolloutOptions.schedule,
  on_progress: OnProgress | None = None,
  on_groups: Callable[[Sequence[RolloutGroup]], None] | None = None,
  stop: Any = False,
) -> dict[str, float]:
  """Samples `group_size` completions of every prompt and returns their metrics.

  The seeds of the requests do not depend on the step, so two evaluations differ
  only by their weights.

  Args:
    engine: Engine; it samples with the weights that it holds.
    environments: Factories by name, as for training.
    prompts: Held-out prompts.
    tokenizer: Tokenizer of the model.
    name: Middle part of the metrics' names: eval/NAME/accuracy.
    group_size: Number of completions of a prompt.
    pass_k: Values of k for pass@k; each at most `group_size`.
    sampling: Sampling options of the evaluation, greedy or not.
    seed: Random seed of the run.
    loop: Event loop of the run.
    limits: Argument of `rollout.groups`.
    schedule: Argument of `rollout.groups`.
    on_progress: Argument of `rollout.groups`.
    on_groups: Function that is given the groups, to keep their completions.
    stop: Flag that becomes true when the evaluation is no longer wanted; see `interrupts.Flag`.

  Returns:
    Metrics eval/NAME/*.

  Raises:
    interrupts.Stopped: `stop` has become true.
    TooManyFailures: See `rollout.groups`.
    DisagreementError: The processes of the run have different prompts.
    OtherProcessError: Another process failed.
  """

  def attempted(
    own: Sequence[Prompt], limits: rollout.AttemptLimits, stop: Any
  ) -> list[RolloutGroup]:
    return rollout.collect_sync(
      engine,
      environments,
      own,
      tokenizer,
      group_size=group_size,
      sampling=sampling,
      seed=seed,
      step=0,
      limits=limits,
      schedule=schedule,
      on_progress=on_progress,
      stop=stop,
      loop=loop,
    )

  what = f"the evaluation of {name}"
  work_sharing.compare(prompts, of=what)
  limits = limits or rollout.AttemptLimits()
  groups = work_sharing.among_processes(prompts, attempted, limits=limits, stop=stop, what=what)
  if on_groups:
    on_groups(groups)
  return scored_groups.evaluation_metrics(groups, name=name, pass_k=pass_k)
