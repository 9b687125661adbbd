"""Runs programs and checks under time limits, a few at a time, from the trainer's process."""

import concurrent.futures
import contextlib
import dataclasses
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from grpo_sandbox import candidate, fork_server, judge, wire
from grpo_sandbox.launch import Launcher, SandboxError
from grpo_sandbox.slots import Ending, SandboxSlot

T = TypeVar("T")
_GRACE_S = 1.0  # time after a time-out for the judge to count unanswered tests.
_TRIAL_S = 30.0
_END_S = 1.0  # time for a program to end after its output or its judge has ended.


class BadTests(ValueError):
  """The tests of a task cannot be run, whatever the program does."""


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
  """The result of a program run."""

  ending: Ending
  text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
  """The result of testing a program."""

  ending: Ending
  passed: int = 0  # assertions or cases that held.
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
  """A few threads, each of which supervises one program at a time."""

  def __init__(self, launcher: Launcher, *, workers: int):
    """Initialises the threads without starting them.

    Args:
      launcher: Launcher of the sandboxes: one for each program, and one for its judge.
      workers: Number of programs that run at the same time.
    """
    if workers < 1:
      raise ValueError(f"workers must be at least 1, got {workers}")
    self._launcher = launcher
    self._threads = concurrent.futures.ThreadPoolExecutor(workers, "sandbox")
    self._lock = threading.Lock()
    self._all: set[SandboxSlot] = set()
    self._free: list[SandboxSlot] = []
    self._counts: Counter[str] = Counter()
    self._closed = False

  def try_out(self) -> None:
    """Runs a program of one line; raises SandboxError if its output is wrong."""
    output = self.run("print(6 * int(input()))", "7", _TRIAL_S)
    if output != Output(Ending.OK, "42\n"):
      raise SandboxError(
        f"a program of one line did not run in the sandbox {self._launcher.kind!r}: "
        f"{output.ending}, {output.text!r:.100}"
      )

  def submit(self, function: Callable[..., T], *args: Any) -> concurrent.futures.Future[T]:
    """Queues a call; when it runs, it has one of the threads to itself."""
    return self._threads.submit(function, *args)

  def counts(self) -> dict[str, float]:
    """Returns the number of sandboxes started, and how programs ended."""
    with self._lock:
      return {name: float(value) for name, value in self._counts.items()}

  def pids(self) -> list[int]:
    """Returns the process ids of the present sandboxes."""
    with self._lock:
      return sorted(slot.pid for slot in self._all)

  def close(self) -> None:
    """Ends all processes, even in the middle of a check. Later calls do nothing."""
    with self._lock:
      self._closed = True
      slots = list(self._all)
    for slot in slots:
      slot.kill()
    self._threads.shutdown(cancel_futures=True)
    for slot in self._free:
      self._leave(slot)
    self._free.clear()

  def run(self, source: str, stdin: str, timeout_s: float | None = None) -> Output:
    """Runs a program.

    Args:
      source: Code of the program.
      stdin: Input of the program.
      timeout_s: Longest time, in seconds; None: the limit of the launcher.

    Raises:
      SandboxError: The program could not be started.
    """
    limits = self._launcher.limits
    data = wire.pack(source, candidate.MAX_SOURCE) + stdin.encode(errors="surrogateescape")
    with self._slot() as slot, slot.child(fork_server.PROGRAM) as child:
      deadline = time.monotonic() + (timeout_s or limits.timeout_s)
      printed, why = child.exchange(data, limits.output_kib * 1024, deadline)
      child.close()
      code = slot.exit_code(min(deadline, time.monotonic() + _END_S)) if why is Ending.OK else None
    ending = _ending_of(code) if why is Ending.OK else why
    self._count(f"programs_{ending}")
    return Output(ending, printed.decode(errors="replace"))

  def check(self, suite: Mapping[str, Any], timeout_s: float | None = None) -> Verdict:
    """Judges a program by a suite, see `judge.verdict`.

    Args:
      suite: Program and tests.
      timeout_s: Time of program and tests together, in seconds; None: the launcher's limit.

    Raises:
      BadTests: The tests cannot be run.
      SandboxError: A process could not be started.
    """
    try:
      data = wire.pack(suite, judge.MAX_SUITE)
    except wire.TooLarge as error:
      raise BadTests(f"the tests are too large: {error}") from error
    with (
      self._slot() as program_seat,
      self._slot() as judge_seat,
      program_seat.child(fork_server.FUNCTIONS) as program,
      judge_seat.child(fork_server.JUDGE, program.feed, program.reader) as tests,
    ):
      deadline = time.monotonic() + (timeout_s or self._launcher.limits.timeout_s)
      program.close()  # the judge has the pipes now.
      output, why = tests.exchange(data, judge.MAX_VERDICT, deadline)
      if why is Ending.TIMEOUT:
        program_seat.kill()
        more, _ = tests.exchange(b"", judge.MAX_VERDICT, time.monotonic() + _GRACE_S)
        output += more
      tests.close()
      code = program_seat.exit_code(time.monotonic() + _END_S)
      judge_seat.exit_code(time.monotonic() + _END_S)
    verdict = _verdict(_message(output), code, is_late=why is Ending.TIMEOUT)
    self._count(f"programs_{verdict.ending}")
    return verdict

  @contextlib.contextmanager
  def _slot(self) -> Iterator["SandboxSlot"]:
    """Yields an idle sandbox, or a new one; it is kept if its last child has ended."""
    with self._lock:
      slot = self._free.pop() if self._free else None
    if slot is None:
      slot = SandboxSlot(self._launcher)
      self._count("sandboxes")
      with self._lock:
        self._all.add(slot)
        is_late = self._closed  # close() could not see the new sandbox.
      if is_late:
        slot.kill()
    try:
      yield slot
    finally:
      if slot.is_fresh:
        with self._lock:
          self._free.append(slot)
      else:
        self._leave(slot)

  def _leave(self, slot: "SandboxSlot") -> None:
    slot.end()
    with self._lock:
      self._all.discard(slot)

  def _count(self, what: str) -> None:
    with self._lock:
      self._counts[what] += 1


def _message(output: bytes) -> dict[str, Any]:
  """Returns the judge's verdict; {"crashed": True} if the judge died before that."""
  try:
    return json.loads(output[4:])
  except ValueError:
    return {"crashed": True}


def _verdict(answer: Mapping[str, Any], code: int | None, is_late: bool) -> Verdict:
  if "bad_tests" in answer:
    raise BadTests(answer["bad_tests"])
  passed, failed = answer.get("passed", 0), answer.get("failed", 1)
  first, gone = answer.get("first", ""), answer.get("gone", "")
  ending = Ending.OK
  if is_late or code in _CPU_CODES:
    ending = Ending.TIMEOUT
  elif answer.get("compile"):
    ending = Ending.COMPILE_ERROR
  elif failed and answer.get("over"):
    ending = Ending(answer["over"])
  elif gone or "crashed" in answer:
    ending = Ending.DIED
  return Verdict(ending, passed, max(failed, int(ending is not Ending.OK)), first or gone)


_CPU_CODES = (128 + 9, 128 + 24)  # SIGKILL, SIGXCPU: only the limit of CPU time sends them.
_ENDINGS = {
  0: Ending.OK,
  candidate.COMPILE_ERROR: Ending.COMPILE_ERROR,
  candidate.OUT_OF_MEMORY: Ending.MEMORY,
  None: Ending.TIMEOUT,  # its output is closed, but it is still running.
  **dict.fromkeys(_CPU_CODES, Ending.TIMEOUT),
}


def _ending_of(code: int | None) -> Ending:
  return _ENDINGS.get(code, Ending.DIED if (code or 0) > 128 else Ending.RAISED)
