"""Groups of the next prompts: sampled when they are asked for, or ahead of that.

`OnlineStream` draws from either, and fills its steps alike.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from grpo_jax import processes
from grpo_jax.rollouts import failures, work_sharing
from grpo_jax.types import Prompt, RolloutGroup

# (prompts, the step that they are for) -> their groups, in order; such as a `RolloutSampler`.
Sample = Callable[[Sequence[Prompt], int], list[RolloutGroup]]


@runtime_checkable
class PromptSource(Protocol):
  """The part of the data that the online stream uses; see `data.prompts.PromptStream`."""

  def take(self, n: int) -> list[Prompt]:
    """Takes the next n prompts; fewer, and finally none, when the data ends."""
    ...

  def state(self) -> dict[str, Any]:
    """Returns the position in the data, as JSON."""
    ...

  def metrics(self) -> dict[str, float]:
    """Returns the metrics of the last `take`."""
    ...


@runtime_checkable
class RecordsMetrics(Protocol):
  """A source of prompts whose order depends on past steps: a curriculum."""

  def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """Records the metrics of a step."""
    ...


@runtime_checkable
class GroupSource(Protocol):
  """A source of groups. All processes of a run make the same calls."""

  def begin(self, step: int, held: Sequence[RolloutGroup]) -> None:
    """Begins a step: what may be sampled ahead is begun.

    Args:
      step: Step that begins; the engine has weights of this version.
      held: Groups that the step already has.
    """
    ...

  def draw(self, count: int, step: int, held: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Returns the groups of the next prompts; none if no prompts are left.

    Args:
      count: Number of groups; fewer when the data ends.
      step: Step that they are for.
      held: Groups that the step already has.
    """
    ...

  def ordered(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Returns groups in the order in which they are learned from."""
    ...

  def metrics(self) -> dict[str, float]:
    """Returns the metrics of the last `draw`."""
    ...

  def step_metrics(self) -> dict[str, float]:
    """Returns metrics of all that happened since the last call."""
    ...

  def settle(self, *, has_learned: bool = True) -> None:
    """Prepares for the weights that the engine gets next; see `stream.GroupStream`."""
    ...

  def state(self) -> dict[str, Any]:
    """Returns the position, as strict JSON."""
    ...

  def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """Passes the metrics of a step to the source of prompts, if it uses them."""
    ...

  def close(self) -> None:
    """Ends what is still sampled."""
    ...


class SynchronousSource:
  """Samples groups when they are drawn, with the engine's current weights; see `GroupSource`."""

  def __init__(self, prompts: PromptSource, sample: Sample):
    """Makes a source that continues at the position of `prompts`.

    Args:
      prompts: Prompts in training order.
      sample: Function that attempts prompts and scores the attempts.
    """
    self._prompts = prompts
    self._sample = sample
    self._metrics: dict[str, float] = {}

  def begin(self, step: int, held: Sequence[RolloutGroup]) -> None:
    """Does nothing."""

  def draw(self, count: int, step: int, held: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Attempts the next prompts; see `GroupSource.draw`.

    Raises:
      TooManyFailures: See `rollout.groups`.
      DisagreementError: The processes of the run have different prompts.
      OtherProcessError: Reading, sampling or scoring failed on another process.
    """
    prompts = read(self._prompts, count, of=f"step {step}")
    groups = self._sample(prompts, step) if prompts else []
    self._metrics = {**self._prompts.metrics(), **failures.error_counts(groups)}
    return groups

  def ordered(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Returns the groups as they are."""
    return list(groups)

  def metrics(self) -> dict[str, float]:
    """Returns the metrics of reading the prompts, and the failures by kind."""
    return dict(self._metrics)

  def step_metrics(self) -> dict[str, float]:
    """Returns nothing."""
    return {}

  def settle(self, *, has_learned: bool = True) -> None:
    """Does nothing: nothing is in flight between steps."""

  def state(self) -> dict[str, Any]:
    """Returns the position in the data."""
    return {"prompts": self._prompts.state()}

  def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """Passes the metrics of a step to the source of prompts, if it uses them."""
    pass_on(metrics, step, to=self._prompts)

  def close(self) -> None:
    """Does nothing."""


def read(prompts: PromptSource, count: int, *, of: str) -> list[Prompt]:
  """Takes prompts, the same on all processes.

  Args:
    prompts: Source of the prompts.
    count: Number of prompts.
    of: Use of the prompts, for messages: "step 3".

  Raises:
    DisagreementError: The processes of the run have different prompts.
    OtherProcessError: Reading failed on another process.
  """
  found = processes.together(lambda: prompts.take(count), what=f"reading the prompts of {of}")
  work_sharing.compare(found, of=of)
  return found


def pass_on(metrics: Mapping[str, float], step: int, *, to: PromptSource) -> None:
  """Passes the metrics of a step to a source of prompts, if it uses them.

  Those of the main process: metrics of engines differ between processes.
  """
  if isinstance(to, RecordsMetrics):
    numbers = {name: float(value) for name, value in metrics.items()}
    known = processes.exchange(numbers, what=f"the metrics of step {step}")[0]
    to.record_metrics(step, known)
