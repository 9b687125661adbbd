"""Signals that end a run: the first asks it to save and end, the second kills it at once.

docs/stopping.md describes what a run does about them, and how long that takes.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

_log = logging.getLogger(__name__)

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_ALL_S = 3.0  # longest time to reach the other processes after a second signal.
GRACE_S = 5.0  # time for the main thread to end the run by itself after the save.


class Stopped(Exception):
  """Work was abandoned because the run was asked to stop; none of it is kept."""


class Flag:
  """Becomes true once the process is asked to stop: SIGINT, SIGTERM or SIGHUP.

      with interrupts.Flag() as stop:
        stop.on_signal(save)
        for step in range(total_steps):
          ...
          if stop:
            break

  A separate thread waits for the signals, so that the flag is raised and `save` runs while the
  main thread computes: Python runs signal handlers in the main thread only, and only after a
  compilation or a long computation has returned. If the main thread has not ended the process
  `GRACE_S` after `save` is done, that thread does. A second signal ends the process at once, as
  SIGKILL would; complete checkpoints survive. A signal that was ignored when the process began
  (SIGHUP under `nohup`) stays ignored. Enter the context in the main thread.
  """

  def __init__(self):
    self._signal: signal.Signals | None = None
    self._previous: dict[signal.Signals, Any] = {}
    self._save: Callable[[], None] | None = None
    self._finish: Callable[[], None] | None = None
    self._publish: Callable[[int], None] | None = None
    self._end_all: Callable[[int], None] | None = None
    self._ended = threading.Event()
    self._previous_descriptor = -1
    self._reader, self._writer = socket.socketpair()

  def __enter__(self) -> "Flag":
    self._writer.setblocking(False)
    for number in ASKING:
      if signal.getsignal(number) != signal.SIG_IGN:
        self._previous[number] = signal.signal(number, self._raise_flag)
    self._previous_descriptor = signal.set_wakeup_fd(self._writer.fileno())
    ours = frozenset(self._previous)
    threading.Thread(target=self._watch, args=(ours,), name="signals", daemon=True).start()
    return self

  def __exit__(self, *_: object) -> None:
    self._ended.set()
    signal.set_wakeup_fd(self._previous_descriptor)
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    self._previous = {}
    self._writer.close()  # ends the watcher.

  def __bool__(self) -> bool:
    return self._signal is not None

  @property
  def exit_code(self) -> int:
    """Exit code: 0, or what a shell reports for the received signal: 130, 143 or 129."""
    return 0 if self._signal is None else 128 + self._signal

  @property
  def number(self) -> int:
    """The signal that raised the flag; 0 if it is not raised."""
    return int(self._signal or 0)

  def on_signal(self, save: Callable[[], None] | None) -> None:
    """Sets the function that a thread calls at the first signal; None: there is nothing to save."""
    self._save = save

  def on_end(self, finish: Callable[[], None] | None) -> None:
    """Sets what must return before the process may be ended; see `GRACE_S`."""
    self._finish = finish

  def share(self, publish: Callable[[int], None], end_all: Callable[[int], None]) -> None:
    """Makes this the flag of one of several processes; they stop and save together.

    A signal then neither saves nor ends this process while the others still need it.

    Args:
      publish: Called in a thread with the number of the first signal, to reach the others.
      end_all: Called in a thread with the number of a second signal; ends all processes at once.
    """
    self._publish, self._end_all = publish, end_all

  def raise_for(self, number: int) -> None:
    """Raises the flag because another process got a signal."""
    self._raise_flag(number)

  def _raise_flag(self, number: int, frame: FrameType | None = None) -> None:
    """Raises the flag. Runs in the watcher's thread and, once it is free, in the main thread."""
    del frame
    self._signal = self._signal or signal.Signals(number)

  def _watch(self, ours: frozenset[signal.Signals]) -> None:
    """Runs in a thread: the system's handler writes one byte per signal."""
    was_asked = False
    while received := self._reader.recv(1):
      number = received[0]
      if number not in ours:
        continue  # belongs to another handler.
      if was_asked:
        self._end_now(number)
      was_asked = True
      self._raise_flag(number)
      work = self._save_and_end if self._publish is None else self._share
      threading.Thread(target=work, args=(number,), name="save", daemon=True).start()
    self._reader.close()

  def _end_now(self, number: int) -> None:
    """Ends the process, and the other ones of its run if it can reach them."""
    if self._end_all is not None:
      thread = threading.Thread(target=self._end_all, args=(number,), daemon=True)
      thread.start()
      thread.join(END_ALL_S)
    os._exit(128 + number)

  def _share(self, number: int) -> None:
    """Runs in a thread: reports the first signal to the other processes."""
    name = signal.Signals(number).name
    _log.info(
      "%s: all processes stop at the same step and save a checkpoint; a second signal ends them at"
      " once, without a checkpoint",
      name,
    )
    if self._publish is not None:
      self._publish(number)

  def _save_and_end(self, number: int) -> None:
    """Runs in a thread: saves, gives the main thread time to end the run, and then ends it.

    What `on_end` was given comes in between: what was saved may have to be uploaded.
    """
    name = signal.Signals(number).name
    if self._save is None:
      _log.info("%s: ending; a second signal ends at once", name)
    else:
      _log.info(
        "%s: saving a checkpoint and ending; a second signal ends at once, without a checkpoint",
        name,
      )
    try:
      if self._save is not None:
        self._save()
    except Exception as error:
      _log.error("%s", error)
    if self._finish is not None and not self._ended.wait(GRACE_S):
      try:
        self._finish()
      except Exception as error:
        _log.error("%s", error)
    if not self._ended.wait(GRACE_S) and self._publish is None:
      _log.info("ending although a computation is still running")
      os._exit(self.exit_code)


def leave(code: int) -> NoReturn:
  """Ends the process; after a signal it does not wait for abandoned work."""
  if code <= 128:
    sys.exit(code)
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError, AttributeError):
      stream.flush()
  os._exit(code)


@contextlib.contextmanager
def delayed() -> Iterator[None]:
  """Delays a KeyboardInterrupt until the block has ended; a second one raises at once.

  For work that must not be interrupted, such as an update that consumes the old state. Does nothing
  outside the main thread, or if Ctrl-C has a handler other than Python's own.
  """
  is_main = threading.current_thread() is threading.main_thread()
  if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
    yield
    return
  arrived: list[int] = []

  def remember(number: int, frame: FrameType | None) -> None:
    if arrived:
      signal.default_int_handler(number, frame)
    arrived.append(number)

  signal.signal(signal.SIGINT, remember)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, signal.default_int_handler)
  if arrived:
    raise KeyboardInterrupt
