"""The protocol of sinks: a sink takes what a run records, and stores, sends or shows it."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from grpo_jax.run_folder.console import TrainingScreen
from grpo_jax.run_folder.rollout_log import Decode
from grpo_jax.types import RolloutGroup


@dataclasses.dataclass(frozen=True)
class Opening:
  """The run for which a sink is opened: the first argument of its `make`.

  Attributes:
    workdir: Run folder; its config.json holds the configuration.
    start_step: Step that runs next, above 0 for a run that continues. This step and
      later ones are recorded again, so a sink drops or replaces its earlier records of them.
    total_steps: Number of steps of the run; None if there is no end.
    screen: Screen that lines are printed on.
    decode: Function from token ids to text, special tokens included; None if not needed.
  """

  workdir: Path
  start_step: int
  total_steps: int | None
  screen: TrainingScreen
  decode: Decode | None


@dataclasses.dataclass(frozen=True)
class StepRollouts:
  """What was sampled in a step; all sequences have one element per group.

  Attributes:
    step: Number of updates done before the step.
    groups: Groups of the step.
    advantages: [G] for each group; NaN for a rollout without an advantage.
    policy_logprobs: Trainer's logprobs of every rollout of each group, aligned with its
      completion, in nats; NaN where a token has none. None if they were not computed.
    shaped_rewards: [G] for each group, the rewards that advantages are computed from; None: the
      unshaped rewards.
  """

  step: int
  groups: Sequence[RolloutGroup]
  advantages: Sequence[np.ndarray]
  policy_logprobs: Sequence[Sequence[np.ndarray]] | None = None
  shaped_rewards: Sequence[np.ndarray] | None = None


@runtime_checkable
class Sink(Protocol):
  """A destination of records; only the main process opens sinks.

  A class that derives from this one inherits methods that do nothing.
  """

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Records metrics of a step; a step may be recorded in several calls with different names.

    Args:
      step: Number of updates done before the measurement; never lower than in the previous call.
      values: Values by name of the metric; they may be NaN or infinite.
    """

  def write_rollouts(self, rollouts: StepRollouts) -> None:
    """Records what was sampled in a step."""

  def close(self) -> None:
    """Ends the recording. No call follows."""
