"""Runs programs and checks under time limits, a few at a time, from the trainer's process."""

import concurrent.futures
import contextlib
import dataclasses
import enum
import os
import selectors
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from grpo_jax.sandbox import candidate, judge, wire
from grpo_jax.sandbox.launch import Launcher, Process, SandboxError

T = TypeVar("T")
_GRACE_S = 1.0  # after a time-out, in which the judge counts what was not answered.
_END_S = 1.0  # in which a program that has closed its output must end.


class BadTests(ValueError):
  """The tests of a task cannot be run, whatever the program is."""


class Ending(enum.StrEnum):
  """How a program ended."""

  OK = "ok"  # by itself; whether its answers are right is another matter.
  COMPILE_ERROR = "compile_error"  # it is no Python.
  RAISED = "raised"  # an exception, or an exit code other than 0.
  TIMEOUT = "timeout"  # of wall time or of CPU time.
  MEMORY = "memory"
  OUTPUT = "output"  # it printed, or returned, more than allowed.
  DIED = "died"  # a signal, or an exit in the middle of a check.


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
  """What a program did with its input."""

  ending: Ending
  text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
  """What the tests say of a program."""

  ending: Ending
  passed: int = 0  # assertions, or cases.
  failed: int = 0
  first_failure: str = ""  # for people; it may quote the tests: never show it to the model.

  @property
  def is_correct(self) -> bool:
    return self.ending is Ending.OK and not self.failed

  @property
  def passed_share(self) -> float:
    """Share of the assertions that held; 1 only if the program is right."""
    if self.is_correct:
      return 1.0
    return self.passed / max(1, self.passed + max(1, self.failed))


class Supervisor:
  """A few threads, each of which looks after one program at a time."""

  def __init__(self, launcher: Launcher, *, workers: int):
    """Starts nothing yet.

    Args:
      launcher: makes the sandboxes.
      workers: programs that run at the same time.
    """
    if workers < 1:
      raise ValueError(f"workers must be at least 1, got {workers}")
    self._launcher = launcher
    self._threads = concurrent.futures.ThreadPoolExecutor(workers, "sandbox")
    self._lock = threading.Lock()
    self._running: set[Process] = set()
    self._judges: list[_Judge] = []  # those without work.
    self._counts: Counter[str] = Counter()
    self._closed = False

  def submit(self, function: Callable[..., T], *args: Any) -> concurrent.futures.Future[T]:
    """Queues a call, which then has one of the threads for itself."""
    return self._threads.submit(function, *args)

  def counts(self) -> dict[str, float]:
    """Returns how many programs and judges were started, and how programs ended."""
    with self._lock:
      return {name: float(value) for name, value in self._counts.items()}

  def close(self) -> None:
    """Ends all processes, also those in the middle of a check. Later calls do nothing."""
    with self._lock:
      self._closed = True
      running = list(self._running)
    for process in running:
      process.kill()
    self._threads.shutdown(cancel_futures=True)
    while self._judges:
      self._judges.pop().end()

  def run(self, source: str, stdin: str, timeout_s: float | None = None) -> Output:
    """Runs a program.

    Args:
      source: its text.
      stdin: what it reads.
      timeout_s: None: that of the limits.

    Raises:
      SandboxError: its process could not be started.
    """
    deadline = time.monotonic() + (timeout_s or self._launcher.limits.timeout_s)
    to_program, from_program = os.pipe(), os.pipe()
    feed, reader = to_program[1], from_program[0]
    data = wire.pack(source, candidate.MAX_SOURCE) + stdin.encode(errors="surrogateescape")
    most = self._launcher.limits.output_kib * 1024 + len(candidate.STARTED)
    with _open(feed, reader):
      with self._process("program", to_program[0], from_program[1]) as process:
        heard, why = _exchange(feed, reader, data, most, deadline)
        code = process.wait(_END_S) if why is Ending.OK else None
    if not heard.startswith(candidate.STARTED) and why is Ending.OK:
      raise SandboxError(f"a sandboxed program did not start, exit code {code}")
    ending = why if why is not Ending.OK else _ending_of(code)
    self._count(f"programs_{ending}")
    return Output(ending, heard[1:].decode(errors="replace"))

  def check(self, suite: Mapping[str, Any], timeout_s: float | None = None) -> Verdict:
    """Judges a program by a suite, see `judge.verdict`.

    Args:
      suite: program and tests.
      timeout_s: of program and tests together; None: that of the limits.

    Raises:
      BadTests: the tests cannot be run.
      SandboxError: a process could not be started.
    """
    deadline = time.monotonic() + (timeout_s or self._launcher.limits.timeout_s)
    to_program, from_program = os.pipe(), os.pipe()
    with _open(to_program[1], from_program[0]):
      with self._process("functions", to_program[0], from_program[1]) as process:
        seat = self._seat()
        seat.ask(suite, to_program[1], from_program[0])
        answer = seat.answer(deadline)
        is_late = answer is None
        if is_late:
          process.kill()
          answer = seat.answer(time.monotonic() + _GRACE_S)
        code = process.wait(0.2 if answer and answer.get("gone") else 0.0)
    self._free(seat, is_usable=answer is not None and "crashed" not in answer)
    verdict = _verdict(answer or {}, code, is_late)
    self._count(f"programs_{verdict.ending}")
    return verdict

  @contextlib.contextmanager
  def _process(self, role: str, stdin: int, stdout: int) -> Iterator[Process]:
    """A process that is dead at the end of the block. Closes both descriptors."""
    try:
      process = self._launcher.start(role, stdin, stdout, subprocess.DEVNULL)
    finally:
      os.close(stdin)
      os.close(stdout)
    self._add(process)
    try:
      yield process
    finally:
      self._end(process)

  def _add(self, process: Process) -> None:
    with self._lock:
      self._running.add(process)
      is_late = self._closed  # close() did not see it.
    if is_late:
      process.kill()

  def _end(self, process: Process) -> None:
    process.end()
    with self._lock:
      self._running.discard(process)

  def _seat(self) -> "_Judge":
    """A judge without work, or a new one."""
    with self._lock:
      if self._judges:
        return self._judges.pop()
    mine, theirs = socket.socketpair()
    process = self._launcher.start("judge", theirs.fileno(), theirs.fileno(), subprocess.DEVNULL)
    theirs.close()
    self._add(process)
    self._count("judges")
    return _Judge(process, mine, self._end)

  def _free(self, seat: "_Judge", *, is_usable: bool) -> None:
    if not is_usable:
      seat.end()
    else:
      with self._lock:
        self._judges.append(seat)

  def _count(self, what: str) -> None:
    with self._lock:
      self._counts[what] += 1


class _Judge:
  """A judge's process and the socket to it."""

  def __init__(self, process: Process, channel: socket.socket, end: Callable[[Process], None]):
    self._process, self._channel, self._end = process, channel, end

  def ask(self, suite: Mapping[str, Any], requests: int, replies: int) -> None:
    """Hands over a suite and the two pipes of a program."""
    try:
      socket.send_fds(self._channel, [b"?"], [requests, replies])
      wire.send(self._channel.fileno(), suite, judge.MAX_SUITE)
    except (OSError, wire.Closed) as error:
      self.end()
      raise SandboxError(f"a judge did not start, or has died: {error}") from error
    except wire.TooLarge as error:
      self.end()
      raise BadTests(f"the tests are too large: {error}") from error

  def answer(self, deadline: float) -> dict[str, Any] | None:
    """Waits for the verdict; None: it did not come in time. {"crashed": …}: it died."""
    with selectors.DefaultSelector() as selector:
      selector.register(self._channel, selectors.EVENT_READ)
      if not selector.select(max(0.0, deadline - time.monotonic())):
        return None
    try:
      return wire.receive(self._channel.fileno(), judge.MAX_VERDICT)
    except (wire.Closed, OSError):
      return {"crashed": -1}

  def end(self) -> None:
    """Ends the process."""
    self._channel.close()
    self._end(self._process)


def _verdict(answer: Mapping[str, Any], code: int | None, is_late: bool) -> Verdict:
  if "bad_tests" in answer:
    raise BadTests(answer["bad_tests"])
  if "not_started" in answer:
    raise SandboxError(f"a sandboxed program did not start, exit code {code}")
  passed, failed = answer.get("passed", 0), answer.get("failed", 1)
  first, gone = answer.get("first", ""), answer.get("gone", "")
  ending = Ending.OK
  if is_late or code in _CPU_CODES:
    ending = Ending.TIMEOUT
  elif answer.get("compile"):
    ending = Ending.COMPILE_ERROR
  elif first.startswith("MemoryError"):
    ending = Ending.MEMORY
  elif "bytes, more than" in gone or "bytes, more than" in first:
    ending = Ending.OUTPUT
  elif gone or "crashed" in answer:
    ending = Ending.DIED
  return Verdict(ending, passed, max(failed, int(ending is not Ending.OK)), first or gone)


_NOWHERE = os.open(os.devnull, os.O_RDONLY)
_CPU_CODES = (128 + 9, 128 + 24)  # SIGKILL, SIGXCPU: nobody else sends them.
_ENDINGS = {
  0: Ending.OK,
  candidate.COMPILE_ERROR: Ending.COMPILE_ERROR,
  candidate.OUT_OF_MEMORY: Ending.MEMORY,
  None: Ending.TIMEOUT,  # its output is closed, and it runs on.
  **dict.fromkeys(_CPU_CODES, Ending.TIMEOUT),
}


def _ending_of(code: int | None) -> Ending:
  return _ENDINGS.get(code, Ending.DIED if (code or 0) > 128 else Ending.RAISED)


@contextlib.contextmanager
def _open(*fds: int) -> Iterator[None]:
  """Closes file descriptors at the end of the block."""
  try:
    yield
  finally:
    for fd in fds:
      os.close(fd)


def _exchange(
  feed: int, reader: int, data: bytes, most: int, deadline: float
) -> tuple[bytes, Ending]:
  """Writes to a program and reads from it at the same time.

  Returns:
    What it printed, and why reading ended: OK (it closed its output), TIMEOUT, OUTPUT.
  """
  heard, left = bytearray(), memoryview(data)
  os.set_blocking(feed, False)
  with selectors.DefaultSelector() as selector:
    selector.register(reader, selectors.EVENT_READ)
    selector.register(feed, selectors.EVENT_WRITE)
    while len(heard) <= most:
      ready = selector.select(max(0.0, deadline - time.monotonic()))
      if not ready:
        return bytes(heard), Ending.TIMEOUT
      for key, _ in ready:
        if key.fd == feed:
          left = _fed(feed, left)
          if not left:
            selector.unregister(feed)
            os.dup2(_NOWHERE, feed)  # the end of the input.
        elif piece := os.read(reader, 1 << 16):
          heard += piece
        else:
          return bytes(heard), Ending.OK
  return bytes(heard), Ending.OUTPUT


def _fed(feed: int, left: memoryview) -> memoryview:
  """Writes what fits; returns what is left: nothing, if nobody reads."""
  try:
    return left[os.write(feed, left) :]
  except BrokenPipeError:
    return left[:0]
