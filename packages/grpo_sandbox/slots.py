"""Sandboxes as the trainer sees them: one child at a time, and the pipes to it."""

import contextlib
import enum
import os
import selectors
import socket
import tempfile
import time
from collections.abc import Iterator

from grpo_sandbox import fork_server
from grpo_sandbox.launch import Launcher, SandboxError

_START_S = 30.0
_USES = 200  # number of children after which a sandbox is replaced.
_NOWHERE = os.open(os.devnull, os.O_RDONLY)


class Ending(enum.StrEnum):
  """How a program ended."""

  OK = "ok"  # by itself; its answers may still be wrong.
  COMPILE_ERROR = "compile_error"  # it is not Python.
  RAISED = "raised"  # an exception, or an exit code other than 0.
  TIMEOUT = "timeout"  # wall time or CPU time was used up.
  MEMORY = "memory"
  OUTPUT = "output"  # it printed or returned more than allowed.
  DIED = "died"  # a signal, or an exit in the middle of a check.


class SandboxSlot:
  """A sandbox with one child at a time."""

  def __init__(self, launcher: Launcher, *, uses: int = _USES, start_s: float = _START_S):
    """Starts a sandbox and waits until it is ready.

    Args:
      launcher: Launcher of the sandbox.
      uses: Number of children after which the sandbox is replaced.
      start_s: Longest time that the start may take, in seconds.

    Raises:
      SandboxError: The sandbox did not start; the message says why.
    """
    self._channel, theirs = socket.socketpair()
    self._is_busy = False
    self._uses, self._most_uses = 0, uses
    with tempfile.TemporaryFile() as errors:
      with theirs:
        self._sandbox = launcher.start(theirs.fileno(), errors.fileno())
      if self._byte(time.monotonic() + start_s) != fork_server.READY:
        self.end()
        errors.seek(0)
        reason = errors.read().decode(errors="replace").strip().rpartition("\n")[2][:1000]
        raise SandboxError(f"a sandbox did not start: {reason or 'it printed no reason'}")

  @property
  def pid(self) -> int:
    return self._sandbox.pid

  @property
  def is_fresh(self) -> bool:
    """Whether the sandbox can have another child."""
    return not self._is_busy and self._uses < self._most_uses

  @contextlib.contextmanager
  def child(self, role: bytes, *more: int) -> Iterator["Pipes"]:
    """Requests a child; the pipes to it are closed at the end of the block.

    Args:
      role: Role of the child; see `fork_server`.
      *more: Further file descriptors for it.

    Raises:
      SandboxError: The sandbox has died.
    """
    to_child, from_child = os.pipe(), os.pipe()
    pipes = Pipes(to_child[1], from_child[0])
    self._is_busy = True
    self._uses += 1
    try:
      socket.send_fds(self._channel, [role], [to_child[0], from_child[1], *more])
    except OSError as error:
      pipes.close()
      raise SandboxError(f"a sandbox has died: {error}") from error
    finally:
      os.close(to_child[0])
      os.close(from_child[1])
    try:
      yield pipes
    finally:
      pipes.close()

  def exit_code(self, deadline: float) -> int | None:
    """Waits until the child ends; returns None if it still runs or the sandbox is lost."""
    byte = self._byte(deadline)
    if not byte:
      return None
    self._is_busy = False
    return byte[0]

  def kill(self) -> None:
    """Kills the sandbox and everything in it. Callable from any thread."""
    self._sandbox.kill()

  def end(self) -> None:
    """Kills the sandbox, waits for its end and frees its resources."""
    self._channel.close()
    self._sandbox.end()

  def _byte(self, deadline: float) -> bytes:
    self._channel.settimeout(max(0.001, deadline - time.monotonic()))
    try:
      return self._channel.recv(1)
    except OSError:  # includes TimeoutError.
      return b""


class Pipes:
  """The pipes to and from a child."""

  def __init__(self, feed: int, reader: int):
    """Takes our two ends."""
    self.feed, self.reader = feed, reader
    self._is_open = True

  def close(self) -> None:
    """Closes our ends; later calls do nothing."""
    if self._is_open:
      self._is_open = False
      os.close(self.feed)
      os.close(self.reader)

  def exchange(self, data: bytes, most: int, deadline: float) -> tuple[bytes, Ending]:
    """Writes and reads at the same time; the input ends after the data.

    Args:
      data: Bytes that the child reads.
      most: Largest number of bytes to read.
      deadline: Time on the monotonic clock, in seconds.

    Returns:
      The output of the child, and why reading ended: OK (the output was closed), TIMEOUT, OUTPUT.
    """
    heard, left = bytearray(), memoryview(data)
    os.set_blocking(self.feed, False)
    with selectors.DefaultSelector() as selector:
      selector.register(self.reader, selectors.EVENT_READ)
      if left:
        selector.register(self.feed, selectors.EVENT_WRITE)
      while len(heard) <= most:
        ready = selector.select(max(0.0, deadline - time.monotonic()))
        if not ready:
          return bytes(heard), Ending.TIMEOUT
        for key, _ in ready:
          if key.fd == self.feed:
            left = _fed(self.feed, left)
            if not left:
              selector.unregister(self.feed)
              os.dup2(_NOWHERE, self.feed)  # the end of the input.
          elif piece := os.read(self.reader, 1 << 16):
            heard += piece
          else:
            return bytes(heard), Ending.OK
    return bytes(heard[:most]), Ending.OUTPUT


def _fed(feed: int, left: memoryview) -> memoryview:
  """Writes as much as fits, and returns the rest; it is empty if nobody reads."""
  try:
    return left[os.write(feed, left) :]
  except BrokenPipeError:
    return left[:0]
