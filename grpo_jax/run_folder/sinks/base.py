"""What a sink is: it takes what a run records, and keeps, sends or shows it."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from grpo_jax.run_folder.console import Screen
from grpo_jax.run_folder.rollout_log import Decode
from grpo_jax.types import RolloutGroup


@dataclasses.dataclass(frozen=True)
class Opening:
  """What a sink is opened for: the first argument of its `make`.

  Attributes:
    workdir: Run folder; its config.json holds the configuration.
    start_step: Step that runs next, above 0 for a run that continues. What an earlier process
      recorded for this step and later ones is recorded again, so a sink drops or replaces it.
    total_steps: Number of steps of the run; None if there is no end.
    screen: Where lines are printed.
    decode: Token ids to text, special tokens included; None if texts are not needed.
  """

  workdir: Path
  start_step: int
  total_steps: int | None
  screen: Screen
  decode: Decode | None


@dataclasses.dataclass(frozen=True)
class StepRollouts:
  """What was sampled in a step; all sequences have one element per group.

  Attributes:
    step: Updates done before the step.
    groups: Groups of the step.
    advantages: [G] for each group; NaN where a rollout has none.
    policy_logprobs: The trainer's logprobs of every rollout of each group, aligned with its
      completion, in nats; NaN for tokens that have none. None if they were not computed.
    shaped_rewards: [G] for each group, from which advantages are computed; None: the rewards.
  """

  step: int
  groups: Sequence[RolloutGroup]
  advantages: Sequence[np.ndarray]
  policy_logprobs: Sequence[Sequence[np.ndarray]] | None = None
  shaped_rewards: Sequence[np.ndarray] | None = None


@runtime_checkable
class Sink(Protocol):
  """Where a run records; only the main process opens sinks.

  A class that derives from this one inherits methods that do nothing.
  """

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Records metrics of a step; a step may be recorded in several calls with different names.

    Args:
      step: Updates done before what is measured; never lower than in the call before.
      values: Value by name of the metric; NaN and infinite values are among them.
    """

  def write_rollouts(self, rollouts: StepRollouts) -> None:
    """Records what was sampled in a step."""

  def close(self) -> None:
    """Ends the recording; no call follows."""
