"""Saves the newest complete state of a run, whatever ends it."""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Mapping
from typing import Any

from grpo_jax import interrupts, processes
from grpo_jax.interrupts import Stopped
from grpo_jax.run_folder import checkpointing
from grpo_jax.types import TrainState

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Standing:
  """The state of a run between two steps: all that is needed to continue."""

  state: TrainState
  position: Mapping[str, Any]  # of the stream, see `GroupStream.state`; empty at the start.
  skipped: int = 0  # consecutive steps that changed nothing.
  evaluated: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of this state.

  @property
  def step(self) -> int:
    """Number of steps done, which is the version of the weights."""
    return int(self.state.step)


class Keeper:
  """Holds a run's newest complete state, and saves it from any thread.

      with Keeper(checkpoints, standing, stop) as keeper:
        for step in ...:
          state = update(state, before=keeper.consume)  # donates the arrays of the old state
          keeper.hold(Standing(state, ...))

  A save starts at once, even while the main thread computes gradients. It waits only between
  `consume` and `hold`, when the old arrays are gone. Leaving the block by an exception also saves.
  """

  def __init__(self, checkpoints: checkpointing.Checkpoints, standing: Standing, stop: Any = False):
    """Makes a keeper of the given state.

    Args:
      checkpoints: Checkpoints of the run.
      standing: State in which the run begins or continues.
      stop: Flag that becomes true when the run is asked to end; the thread of an
        `interrupts.Flag` saves.
    """
    self._checkpoints = checkpoints
    self._standing: Standing | None = standing
    self._stop = stop
    self._lock = threading.Lock()
    self._update = contextlib.ExitStack()  # entered by `consume`, left by `hold`.
    self._is_updating = False

  def __enter__(self) -> "Keeper":
    if isinstance(self._stop, interrupts.Flag):
      self._stop.on_signal(self._save_for_signal)
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
    self._end_update()
    if kind is None:
      self.save()
      return False
    if issubclass(kind, checkpointing.CheckpointError):
      return False  # the save itself failed.
    if kind is KeyboardInterrupt:
      _log.info("interrupted: saving a checkpoint; a second Ctrl-C ends at once, without one")
    try:
      if self._standing is not None and (self._standing.step or issubclass(kind, Stopped)):
        self.save()
        self._checkpoints.wait()
    except checkpointing.CheckpointError as error:
      if issubclass(kind, Stopped):
        raise
      _log.error("and no checkpoint could be written: %s", error)
    except KeyboardInterrupt:
      self._checkpoints.abandon()
      raise
    return issubclass(kind, Stopped)

  @property
  def standing(self) -> Standing | None:
    """The newest state; None if an update failed after it had consumed the old one."""
    return self._standing

  def consume(self) -> None:
    """Must be called before the arrays of the held state are donated.

    Until `hold`, a KeyboardInterrupt is delayed and saves wait.

    Raises:
      Stopped: The run is asked to end; the update need not be made.
    """
    processes.stop_together(self._stop)  # all processes make the update, or none does.
    self._update.enter_context(interrupts.delayed())
    self._update.enter_context(self._lock)
    self._standing, self._is_updating = None, True

  def hold(self, standing: Standing) -> Standing:
    """Makes this the newest state and returns it. Call it once the step's metrics are written."""
    self._standing = standing
    self._end_update()
    return standing

  def save(self) -> int | None:
    """Starts saving the newest state; returns its step, or None if there is no state."""
    with self._lock:
      standing = self._standing
      if standing is None:
        return None
      extra = {
        "stream": standing.position,
        "skipped": standing.skipped,
        "evaluated": dict(standing.evaluated),
      }
      state = dict(vars(standing.state))
      self._checkpoints.save(standing.step, state, extra, metrics=standing.evaluated)
    return standing.step

  def _end_update(self) -> None:
    if self._is_updating:
      self._is_updating = False
      self._update.close()

  def _save_for_signal(self) -> None:
    """Saves, waits for completion and logs it. Runs in a thread of `interrupts.Flag`."""
    step = self.save()
    self._checkpoints.wait()
    if step is not None:
      _log.info("the checkpoint of step %d is complete", step)
