"""Accuracy, pass@k and mean reward on held-out prompts, by the rollout code of training."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax import metrics
from grpo_jax.data import Tokenizer
from grpo_jax.engines.base import Engine, OnProgress, SamplingParams
from grpo_jax.environments.base import EnvironmentFactory
from grpo_jax.rollouts import collecting as rollout
from grpo_jax.types import Prompt


def run(
  engine: Engine,
  environments: Mapping[str, EnvironmentFactory],
  prompts: Sequence[Prompt],
  tokenizer: Tokenizer,
  *,
  name: str,
  group_size: int,
  pass_k: Sequence[int],
  sampling: SamplingParams,
  seed: int,
  limits: rollout.Limits | None = None,
  on_progress: OnProgress | None = None,
  stop: Any = False,
) -> dict[str, float]:
  """Samples `group_size` completions of every prompt and describes them.

  The seeds of the requests do not depend on the step, so two evaluations differ
  by their weights only.

  Args:
    engine: samples with the weights it holds.
    environments: by name, as for training.
    prompts: the held-out prompts.
    tokenizer: of the model.
    name: middle part of the metrics' names: eval/NAME/accuracy.
    group_size: completions of a prompt.
    pass_k: k of every pass@k; each at most `group_size`.
    sampling: its own settings; greedy or not.
    seed: of the requests.
    limits: see `rollout.collect`.
    on_progress: see `rollout.collect`.
    stop: see `rollout.run_sync`.

  Returns:
    Metrics eval/NAME/*.

  Raises:
    interrupts.Stopped: `stop` has become true.
  """
  groups = rollout.collect_sync(
    engine,
    environments,
    prompts,
    tokenizer,
    group_size=group_size,
    sampling=sampling,
    seed=seed,
    step=0,
    limits=limits,
    on_progress=on_progress,
    stop=stop,
  )
  return metrics.of_evaluation(groups, name=name, pass_k=pass_k)
