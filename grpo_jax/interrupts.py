"""Ctrl-C and preemption: the first asks the loop to end cleanly, the second kills at once."""

import signal
import sys
from types import FrameType

_ASKING = (signal.SIGINT, signal.SIGTERM)


class Flag:
  """Becomes true once the process is asked to stop, by SIGINT (Ctrl-C) or SIGTERM (preemption).

      with interrupts.Flag() as stop:
        for step in range(total_steps):
          ...
          if stop:
            break

  The first signal only sets the flag. It gives both signals back to the system: the next
  one ends the process at once, even from within a long computation, as SIGKILL would,
  which complete checkpoints survive. Signals reach the main thread only, and so does the
  flag: enter it there.
  """

  def __init__(self):
    self._signal: signal.Signals | None = None
    self._previous = {}

  def __enter__(self) -> "Flag":
    self._previous = {number: signal.signal(number, self._raise_flag) for number in _ASKING}
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    self._previous = {}

  def __bool__(self) -> bool:
    return self._signal is not None

  @property
  def exit_code(self) -> int:
    """0, or what a shell reports for the signal that came: 130 (SIGINT), 143 (SIGTERM)."""
    return 0 if self._signal is None else 128 + self._signal

  def _raise_flag(self, number: int, frame: FrameType | None) -> None:
    del frame
    self._signal = signal.Signals(number)
    for each in _ASKING:
      signal.signal(each, signal.SIG_DFL)
    print(
      f"\n{self._signal.name}: ending after this phase, with a checkpoint;"
      " once more ends at once, without one",
      file=sys.stderr,
      flush=True,
    )
