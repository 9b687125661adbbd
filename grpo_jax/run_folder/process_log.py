"""What processes other than the main one log: the files processes/NNN.log, and what is passed on.

Only the main process prints. What another process logs goes to its own file in the run folder;
warnings and errors are also passed to the main process, which shows them with the next step.
"""

import collections
import contextlib
import datetime
import logging
import pathlib
import socket
import threading
from collections.abc import Iterator, Sequence

from grpo_jax import processes

FOLDER = "processes"
_KEPT = 1000  # lines kept until there is a file.
_PASSED = 20  # notices that a process passes on at a time.
_CHARACTERS = 2000  # of one notice.
_SHOWN = 5  # lines about other processes that are shown at a time.

# (level of `logging`, text)
Said = Sequence[tuple[int, str]]

_lock = threading.Lock()
_pending: collections.deque[str] = collections.deque(maxlen=_KEPT)
_said: list[tuple[int, str]] = []
_left = 0  # notices that were not kept.
_file: pathlib.Path | None = None


def add(level: int, text: str) -> None:
  """Takes a line that this process logs; does nothing if there is one process.

  Args:
    level: Level of `logging`.
    text: Line, with its traceback if it has one.
  """
  global _left
  if processes.count() == 1:
    return
  with _lock:
    if level >= logging.WARNING and len(_said) < _PASSED:
      _said.append((level, text[:_CHARACTERS]))
    elif level >= logging.WARNING:
      _left += 1
    if not processes.is_main():
      label = "error: " if level >= logging.ERROR else "warning: " * (level >= logging.WARNING)
      _pending.append(f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} {label}{text}\n")
      _write()


def take() -> list[tuple[int, str]]:
  """Returns and forgets the warnings and errors of this process since the last call."""
  global _left
  with _lock:
    found = list(_said)
    if _left:
      found.append((logging.WARNING, f"{_left} more notices are only in {FOLDER}/"))
    _said.clear()
    _left = 0
  return found


@contextlib.contextmanager
def in_folder(workdir: pathlib.Path) -> Iterator[None]:
  """Writes what this process logs to its file in a run folder, within the block.

  The main process has no such file.
  """
  global _file
  if processes.is_main():
    yield
    return
  with _lock:
    _file = workdir / FOLDER / f"{processes.index():03d}.log"
    _pending.appendleft(
      f"--- {processes.named()} on {socket.gethostname()},"
      f" {datetime.datetime.now():%Y-%m-%d %H:%M:%S}\n"
    )
    _write()
  try:
    yield
  finally:
    with _lock:
      _file = None


def _write() -> None:
  """Appends what is pending to the file, if it can be written."""
  if _file is None:
    return
  with contextlib.suppress(OSError):  # a full disk ends the run at its next write that matters.
    _file.parent.mkdir(parents=True, exist_ok=True)
    with _file.open("a", encoding="utf-8", errors="backslashreplace") as stream:
      stream.writelines(_pending)
    _pending.clear()


class Merged:
  """Merges the notices of other processes for the screen of the main one; each is shown once."""

  def __init__(self):
    self._known: set[str] = set()

  def lines(self, hosts: Sequence[str], said: Sequence[Said]) -> list[tuple[int, str]]:
    """Returns what to show: (level, line). A notice of many processes is one line.

    Args:
      hosts: Host name of each process, the main one first.
      said: Notices of each process, in the same order. Those of the main one are on the screen.
    """
    self._known.update(text for _, text in said[0])
    speakers: dict[tuple[int, str], list[int]] = {}
    for number, own in enumerate(said[1:], start=1):
      for level, text in dict.fromkeys((level, text) for level, text in own):
        if text not in self._known:
          speakers.setdefault((level, text), []).append(number)
    self._known.update(text for _, text in speakers)
    shown = [
      (level, f"{_named(numbers, hosts)}: {text}") for (level, text), numbers in speakers.items()
    ]
    if len(shown) <= _SHOWN:
      return shown
    shown.sort(key=lambda line: -line[0])
    more = f"{len(shown) - _SHOWN} more notices of other processes are in {FOLDER}/*.log"
    return [*shown[:_SHOWN], (logging.WARNING, more)]


def _named(numbers: Sequence[int], hosts: Sequence[str]) -> str:
  """Returns "process 3 of 8 (h3)", "processes 1 and 3 of 8" or "13 processes of 64"."""
  if len(numbers) == 1:
    return f"process {numbers[0]} of {len(hosts)} ({hosts[numbers[0]]})"
  if len(numbers) > 4:
    return f"{len(numbers)} processes of {len(hosts)}, such as {numbers[0]} ({hosts[numbers[0]]})"
  words = [str(number) for number in numbers]
  return f"processes {', '.join(words[:-1])} and {words[-1]} of {len(hosts)}"
