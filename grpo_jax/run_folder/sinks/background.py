"""Calls code of others in a thread of its own, so that it can neither stop nor slow a run."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from grpo_jax.run_folder.options import LoggingOptions
from grpo_jax.run_folder.sinks.base import Sink, StepRollouts
from grpo_jax.run_folder.sinks.masking import shown_error

_log = logging.getLogger(__name__)

_ROOM = 32  # records that wait for a user's own sink; they hold whole rollouts.


class Worker:
  """Calls functions one after another, in the order of `submit`, in one thread.

  A call that raises, or lasts longer than the time limit, ends the work: one warning, and nothing
  more is called. Calls that find no room in the queue are left out, with one warning.
  """

  def __init__(self, name: str, *, room: int, timeout_s: float):
    """Starts the thread.

    Args:
      name: Name of the sink, for messages.
      room: Number of calls that may wait.
      timeout_s: Time limit in seconds of one call, and of all that are left when the run ends.
    """
    self._name = name
    self._room = room
    self._timeout_s = timeout_s
    self._changed = threading.Condition()
    self._waiting: deque[tuple[str, Callable[[], object]]] = deque()
    self._running: tuple[str, float] | None = None  # what runs, and since when.
    self._is_over = False  # nothing more is called.
    self._is_closing = False
    self._left_out = 0
    self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
    self._thread.start()

  def submit(self, what: str, call: Callable[[], object]) -> None:
    """Has a function called; never waits.

    Args:
      what: Description of the call, for messages.
      call: Function whose result is not used.
    """
    with self._changed:
      if self._is_over or self._is_closing:
        return
      if self._running and time.monotonic() - self._running[1] > self._timeout_s:
        self._give_up(self._no_answer())
      elif len(self._waiting) >= self._room:
        self._leave_out()
      else:
        self._waiting.append((what, call))
        self._changed.notify()

  def close(self, what: str, call: Callable[[], object]) -> None:
    """Has a last function called, and waits for everything until the time limit has passed."""
    with self._changed:
      if self._is_over or self._is_closing:
        return
      self._waiting.append((what, call))
      self._is_closing = True
      self._changed.notify()
      spent = time.monotonic() - self._running[1] if self._running else 0.0
    self._thread.join(max(0.0, self._timeout_s - spent))
    with self._changed:
      if self._thread.is_alive() and not self._is_over:
        self._give_up(f"{self._no_answer()}; records that it still had to take are lost")

  def _run(self) -> None:
    while call := self._next():
      try:
        call()
      except BaseException as error:  # whatever code of others raises: the run is worth more.
        with self._changed:
          if not self._is_over:
            what = self._running[0] if self._running else "a call"
            self._give_up(f"failed in {what}: {shown_error(error).rstrip('.')}")
        return
      with self._changed:
        self._running = None

  def _next(self) -> Callable[[], object] | None:
    """Waits for the next call; None if there will be none."""
    with self._changed:
      self._changed.wait_for(lambda: self._waiting or self._is_over or self._is_closing)
      if self._is_over or not self._waiting:
        return None
      what, call = self._waiting.popleft()
      self._running = what, time.monotonic()
      return call

  def _no_answer(self) -> str:
    what = self._running[0] if self._running else "its last records"
    return f"did not finish {what} within {self._timeout_s:g} s"

  def _give_up(self, reason: str) -> None:
    self._is_over = True
    self._waiting.clear()
    _log.warning("sink %r %s; it is not used again in this run", self._name, reason)

  def _leave_out(self) -> None:
    self._left_out += 1
    if self._left_out == 1:
      _log.warning(
        "sink %r is slower than the run: %d records wait for it, and records are left out until"
        " it has caught up",
        *(self._name, self._room),
      )


class Guarded(Sink):
  """A user's own sink, whose methods are called in a thread of its own."""

  def __init__(self, name: str, sink: Sink, *, timeout_s: float = LoggingOptions.timeout_s):
    """Guards an open sink; see `Worker`."""
    self._sink = sink
    self._worker = Worker(name, room=_ROOM, timeout_s=timeout_s)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    self._worker.submit("write", partial(self._sink.write, step, values))

  def write_rollouts(self, rollouts: StepRollouts) -> None:
    self._worker.submit("write_rollouts", partial(self._sink.write_rollouts, rollouts))

  def close(self) -> None:
    self._worker.close("close", self._sink.close)
