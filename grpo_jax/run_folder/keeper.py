"""Keeps what a run has learned: saves its newest whole state, whatever ends the run."""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Mapping
from typing import Any

from grpo_jax import interrupts
from grpo_jax.interrupts import Stopped
from grpo_jax.run_folder import checkpointing
from grpo_jax.types import TrainState

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Standing:
  """Where a run begins, and where it is between two steps: all that continuing needs."""

  state: TrainState
  position: Mapping[str, Any]  # of the stream; see `GroupStream.state`. Empty: at the beginning.
  skipped: int = 0  # steps in a row that changed nothing.
  evaluated: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of this state.

  @property
  def step(self) -> int:
    """Steps done, which is the version of the weights."""
    return int(self.state.step)


class Keeper:
  """Holds a run's newest whole state, and saves it from any thread.

      with Keeper(checkpoints, standing, stop) as keeper:
        for step in ...:
          state = update(state, before=keeper.consume)  # donates the arrays of the old state
          keeper.hold(Standing(state, ...))

  A save starts at once, also while the main thread computes gradients; only between `consume` and
  `hold`, when the old arrays are gone, it waits. Leaving the block by an exception saves, too.
  """

  def __init__(self, checkpoints: checkpointing.Checkpoints, standing: Standing, stop: Any = False):
    """Begins to keep a state.

    Args:
      checkpoints: Checkpoints of the run, where states are saved.
      standing: Where the run begins or continues.
      stop: Becomes true when the run is asked to end; an `interrupts.Flag` has its thread save.
    """
    self._checkpoints = checkpoints
    self._standing: Standing | None = standing
    self._stop = stop
    self._lock = threading.Lock()
    self._update = contextlib.ExitStack()  # what `consume` begins and `hold` ends.
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
      return False  # saving is what failed.
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
    """Where the run stands; None if an update failed after it had consumed the old state."""
    return self._standing

  def consume(self) -> None:
    """Must be called before the arrays of the held state are donated.

    From here to `hold` a KeyboardInterrupt is held back, and saves wait.

    Raises:
      Stopped: the run is to end, and the update need not be made.
    """
    if self._stop:
      raise Stopped
    self._update.enter_context(interrupts.delayed())
    self._update.enter_context(self._lock)
    self._standing, self._is_updating = None, True

  def hold(self, standing: Standing) -> Standing:
    """Makes this the newest state, once its step's line of metrics.jsonl is written; returns it."""
    self._standing = standing
    self._end_update()
    return standing

  def save(self) -> int | None:
    """Starts to save the newest state; returns its step, None if there is none."""
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
    """Saves to the end, and says so. Runs in a thread of `interrupts.Flag`."""
    step = self.save()
    self._checkpoints.wait()
    if step is not None:
      _log.info("the checkpoint of step %d is complete", step)
