"""Standard output and standard error of a run that may outlive their reader.

If the reader of a pipe exits (`| head`), a terminal is closed, or the disk behind `>` is full, the
run continues and its output is appended to a file in the run folder instead.
"""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

NAME = "output.log"
_STANDARD = ((1, "stdout"), (2, "stderr"))


class FallbackStream:
  """A stream that never fails: text that its descriptor does not accept goes to a file."""

  def __init__(self, stream: Any, descriptor: int):
    self._stream = stream
    self._descriptor = descriptor
    self._is_lost = False
    self.file: pathlib.Path | None = None  # None: what cannot be written is dropped.

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    """Writes; never raises OSError."""
    try:
      return self._stream.write(text)
    except OSError as error:
      self._redirect(error)
    with contextlib.suppress(OSError):
      self._stream.write(text)
    return len(text)

  def flush(self) -> None:
    """Flushes; never raises OSError."""
    try:
      self._stream.flush()
    except OSError as error:
      self._redirect(error)
      with contextlib.suppress(OSError):
        self._stream.flush()  # buffered text goes to the file.

  def writelines(self, lines: Iterable[str]) -> None:
    """Writes several strings."""
    for line in lines:
      self.write(line)

  def isatty(self) -> bool:
    return not self._is_lost and self._stream.isatty()

  def _redirect(self, error: OSError) -> None:
    """Replaces the descriptor by a file, also for libraries and child processes."""
    target = self.file if not self._is_lost and self.file else pathlib.Path(os.devnull)
    self._is_lost = True
    try:
      replacement = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:
      replacement = os.open(os.devnull, os.O_WRONLY)
    os.dup2(replacement, self._descriptor)
    os.close(replacement)
    name = dict(_STANDARD)[self._descriptor]
    with contextlib.suppress(OSError):
      os.write(
        self._descriptor, f"[{name} was lost ({error.strerror}); output continues here]\n".encode()
      )


@contextlib.contextmanager
def lasting() -> Iterator[list[FallbackStream]]:
  """Makes standard output and standard error outlive their readers, within the block.

  Yields:
    The two streams; set their `file` once there is a run folder.
  """
  _occupy()
  streams = []
  before = sys.stdout, sys.stderr
  for descriptor, name in _STANDARD:
    stream = getattr(sys, name)
    if stream is not None and _descriptor_of(stream) == descriptor:
      streams.append(FallbackStream(stream, descriptor))
      setattr(sys, name, streams[-1])
  try:
    yield streams
  finally:
    for stream in streams:
      stream.flush()  # else Python would only notice at exit that there is no reader.
    sys.stdout, sys.stderr = before


def _occupy() -> None:
  """Opens descriptors 0, 1 and 2 if they are closed; otherwise the next open file gets one."""
  for descriptor in range(3):
    try:
      os.fstat(descriptor)
    except OSError:
      os.open(os.devnull, os.O_RDWR)


def _descriptor_of(stream: Any) -> int | None:
  """Returns the file descriptor of a stream; None if it has none, as in a notebook."""
  try:
    return stream.fileno()
  except (OSError, ValueError, AttributeError):
    return None
