"""Saves the newest complete state of a run, whatever ends it."""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Mapping
from typing import Any

from grpo_jax import interrupts, processes
from grpo_jax.interrupts import Stopped
from grpo_jax.run_folder import checkpoint_errors, checkpointing
from grpo_jax.types import TrainState

REACH_S = 10.0  # seconds that a process waits for the others before it saves what a failure left.

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RunState:
  """The state of a run between two steps: all that is needed to continue."""

  state: TrainState
  position: Mapping[str, Any]  # of the stream, see `GroupStream.state`; empty at the start.
  skipped: int = 0  # consecutive steps that changed nothing.
  evaluated: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of this state.

  @property
  def step(self) -> int:
    """Number of steps done: the version of the weights."""
    return int(self.state.step)


class Keeper:
  """Holds a run's newest complete state, and saves it from any thread.

      with Keeper(checkpoints, run_state, stop) as keeper:
        for step in ...:
          state = update(state, before=keeper.consume)  # donates the arrays of the old state
          keeper.hold(RunState(state, ...))

  A save starts at once, even while the main thread computes gradients. It waits only between
  `consume` and `hold`, when the old arrays are gone. Leaving the block by an exception also saves.

  Several processes can only save together, from their main threads. A signal starts no save then;
  leaving the block does. After a failure that only some processes know of, nothing is saved.
  """

  def __init__(
    self, checkpoints: checkpointing.Checkpoints, run_state: RunState, stop: Any = False
  ):
    """Makes a keeper of the given state.

    Args:
      checkpoints: Checkpoints of the run.
      run_state: State in which the run begins or continues.
      stop: Flag that becomes true when the run is asked to end; the thread of an
        `interrupts.Flag` saves.
    """
    self._checkpoints = checkpoints
    self._run_state: RunState | None = run_state
    self._stop = stop
    self._lock = threading.Lock()
    self._update = contextlib.ExitStack()  # entered by `consume`, left by `hold`.
    self._is_updating = False

  def __enter__(self) -> "Keeper":
    if isinstance(self._stop, interrupts.Flag) and processes.count() == 1:
      self._stop.on_signal(self._save_for_signal)
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
    self._end_update()
    if kind is None:
      self.save()
      return False
    if issubclass(kind, checkpoint_errors.CheckpointError):
      return False  # the save itself failed.
    if kind is KeyboardInterrupt:
      _log.info("interrupted: saving a checkpoint; a second Ctrl-C ends at once, without one")
    try:
      is_worth_saving = self._is_worth_saving(kind)
      if self._others_are_here(is_worth_saving) and is_worth_saving:
        self.save()
        self._checkpoints.wait()
    except checkpoint_errors.CheckpointError as error:
      if issubclass(kind, Stopped):
        raise
      _log.error("and no checkpoint could be written: %s", error)
    except KeyboardInterrupt:
      self._checkpoints.abandon()
      raise
    return issubclass(kind, Stopped)

  def _others_are_here(self, is_worth_saving: bool) -> bool:
    """Returns whether all processes leave the block now, with the same state; logs it if not."""
    step = self._run_state.step if self._run_state else None
    if processes.all_reach("save", timeout_s=REACH_S, value=[step, is_worth_saving]):
      return True
    saved = self._checkpoints.newest()
    _log.error(
      "no checkpoint could be written, since the other processes have not come to the same point;"
      " the run continues %s",
      "at step 0" if saved is None else f"from the checkpoint of step {saved}",
    )
    return False

  def _is_worth_saving(self, kind: type[BaseException]) -> bool:
    return self._run_state is not None and bool(self._run_state.step or issubclass(kind, Stopped))

  @property
  def run_state(self) -> RunState | None:
    """The newest state; None if an update failed after it had consumed the old one."""
    return self._run_state

  def consume(self) -> None:
    """Must be called before the arrays of the held state are donated.

    Until `hold`, a KeyboardInterrupt is delayed and saves wait.

    Raises:
      Stopped: The run is asked to end; the update need not be made.
    """
    processes.stop_together(self._stop)  # all processes make the update, or none does.
    self._update.enter_context(interrupts.delayed())
    self._update.enter_context(self._lock)
    self._run_state, self._is_updating = None, True

  def hold(self, run_state: RunState) -> RunState:
    """Makes this the newest state and returns it. Call it once the step's metrics are written."""
    self._run_state = run_state
    self._end_update()
    return run_state

  def save(self) -> int | None:
    """Starts saving the newest state; returns its step, or None if there is no state."""
    with self._lock:
      run_state = self._run_state
      if run_state is None:
        return None
      extra = {
        "stream": run_state.position,
        "skipped": run_state.skipped,
        "evaluated": dict(run_state.evaluated),
      }
      state = dict(vars(run_state.state))
      self._checkpoints.save(run_state.step, state, extra, metrics=run_state.evaluated)
    return run_state.step

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
