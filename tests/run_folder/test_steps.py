"""A step is recorded by all processes, whichever of them fails at it."""

import dataclasses
from unittest import mock

import pytest

from grpo_jax import batching, processes
from grpo_jax.compilation import compiling
from grpo_jax.groups import filters, learning_signal, shaping
from grpo_jax.metrics import timing
from grpo_jax.rl import estimators
from grpo_jax.run_folder import loggers, steps
from tests import side_by_side


class FullError(OSError):
  """The disk of one process is full."""


@dataclasses.dataclass(frozen=True)
class OfNothing(steps.StepRecorder):
  """Records steps without groups."""

  def _signal(self, record):
    return learning_signal.Signal(completions=1, lost={})

  def _described(self, record, logprobs):
    return {name: value for source in self.sources for name, value in source().items()}


RECORD = steps.StepRecord(
  3, [], [], filters.Filtered((), {}, ()), [], mock.Mock(spec=batching.Assembled), {}, {}, []
)


def recorder(fails, index):
  """Returns the recorder of a process; a part of it may fail."""

  def failing(*_):
    raise FullError("no space")

  logger = mock.Mock(spec=loggers.Logger)
  if fails == ("write", index):
    logger.write.side_effect = failing
  return OfNothing(
    logger=logger,
    timer=timing.Timer(),
    compilations=compiling.CompilationMonitor(),
    signal_watch=learning_signal.Watch(has_learned=True),
    first_step=0,
    shaping=mock.Mock(spec=shaping.Shaping),
    estimator=mock.Mock(spec=estimators.Estimator),
    sources=(failing if fails == ("measure", index) else lambda: {"of": float(index)},),
    rank=None,
    by_dataset=False,
    devices=(),
  )


def recorded(fails=None):
  """Returns what each of two processes returns or raises, and its recorder."""
  made = [recorder(fails, index) for index in range(2)]
  with (
    mock.patch.object(side_by_side, "WAIT_S", 1.0),
    mock.patch.object(batching, "per_rollout", lambda *_: []),
    mock.patch.object(steps, "_computed_share", lambda *_: {}),
    mock.patch.object(steps.StepRecorder, "_write_rollouts", lambda *_: None),
  ):
    return side_by_side.run(2, lambda index: made[index].record(RECORD)), made


def test_all_processes_have_the_metrics_of_the_main_one():
  found, made = recorded()
  assert [values["of"] for values in found] == [0.0, 0.0], found
  for values, of_process in zip(found, made, strict=True):
    of_process.logger.write.assert_called_once_with(3, values)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("part", ["measure", "write"])
def test_a_failure_of_one_process_is_one_of_all_and_holds_up_nobody(part, index):
  found, _ = recorded((part, index))
  assert isinstance(found[index], FullError), found
  assert isinstance(found[1 - index], processes.OtherProcessError), found
  assert "FullError: no space" in str(found[1 - index])
  assert all(error.is_of_all_processes for error in found)  # a checkpoint can follow.
