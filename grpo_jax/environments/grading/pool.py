"""A few sandboxes with a warm grader, in which every call has its own process.

Threads own the sandboxes, not an event loop: a pool serves any loop in any thread. A call runs in
a fork that is killed if it takes too long. The fork sees no files of the user, no network and none
of the trainer's environment variables, and leaves nothing behind. See docs/environments.md.
"""

import concurrent.futures
import contextlib
import json
import math
import pickle
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_jax.environments.grading import confinement, libraries
from grpo_sandbox import fork_server
from grpo_sandbox import grader as inner
from grpo_sandbox.launch import Grader, Launcher, ProcessLimits, SandboxError
from grpo_sandbox.slots import Ending, SandboxSlot

_GRACE_S = 0.5  # a call ends itself at its time-out; its sandbox is killed this much later.
_END_S = 1.0  # time for a process to end after its reply.
_USES = 1 << 62  # calls per sandbox: unlimited, because a call leaves nothing behind.
_COUNTS = ("calls", "timeouts", "crashes", "errors", "starts")
_ALARM = 128 + 14  # exit code of a process that reached its own time-out.


class GraderTimeout(Exception):
  """A call took longer than allowed; its process was killed."""


class GraderCrash(Exception):
  """The sandbox of a call died, twice: the call was repeated in a fresh one."""


class GraderError(Exception):
  """The grader raised, or its process died while handling the request."""


class GraderStartError(RuntimeError):
  """A sandbox could not start: its libraries are missing or the machine is out of memory."""


class WorkerPool:
  """Calls functions of a grader file in sandboxes, which start when first needed."""

  def __init__(
    self,
    grader: str | Path,
    *,
    packages: Sequence[str] = (),
    sandbox: str = confinement.BEST,
    workers: int = 2,
    timeout_s: float = 5.0,
    memory_gib: float = 4.0,
    start_timeout_s: float = 120.0,
  ):
    """Describes the pool; starts nothing, but checks once which sandboxes work here.

    Args:
      grader: Python file with the functions, loaded separately in every sandbox. Its function
        `prepare`, if it has one, is called afterwards.
      packages: Distributions that the grader imports. They and their requirements can be read in
        the sandbox, and no other installed package.
      sandbox: Name of the sandbox; see `confinement.find`.
      workers: Number of sandboxes, and of simultaneous calls.
      timeout_s: Longest time of one call, not counting the wait, in seconds.
      memory_gib: Limit of the address space of a call, in GiB; 0: no limit.
      start_timeout_s: Longest time that a sandbox may take to start, in seconds.

    Raises:
      ValueError: An option is out of range, or the sandbox does not work on this machine.
    """
    if workers < 1 or not timeout_s > 0:
      raise ValueError(f"need workers >= 1, timeout_s > 0, got {workers}, {timeout_s}")
    self.confinement = confinement.find(sandbox)
    self._grader = str(Path(grader).resolve())
    self._packages = tuple(packages)
    self._limits = ProcessLimits(
      timeout_s=max(0.1, timeout_s + _GRACE_S),
      memory_mib=math.ceil(memory_gib * 1024) or 1 << 30,
    )
    self._launcher: Launcher | None = None
    self._workers = workers
    self._timeout_s = timeout_s
    self._start_timeout_s = start_timeout_s
    self._jobs: queue.SimpleQueue[_GraderCall | None] = queue.SimpleQueue()
    self._lock = threading.Lock()
    self._threads: list[threading.Thread] = []
    self._slots: set[SandboxSlot] = set()
    self._counts: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))
    self._closed = False

  def submit(self, function: str, *arguments: Any) -> concurrent.futures.Future[Any]:
    """Queues a call.

    Args:
      function: Name of the function in the grader file.
      *arguments: Arguments that can be pickled.

    Returns:
      A future of the result, which is JSON. It raises GraderTimeout, GraderCrash,
      GraderError or GraderStartError.
    """
    job = _GraderCall(function, pickle.dumps((self._timeout_s, function, arguments)))
    with self._lock:
      if self._closed:
        raise RuntimeError("the pool is closed")
      if len(self._threads) < self._workers:
        thread = threading.Thread(target=self._serve, daemon=True, name="grader")
        self._threads.append(thread)
        thread.start()
      self._jobs.put(job)
    return job.future

  def counts(self) -> dict[str, float]:
    """Returns the number of calls, time-outs, crashes, errors and starts."""
    with self._lock:
      return {name: float(value) for name, value in self._counts.items()}

  def pids(self) -> list[int]:
    """Returns the process ids of the present sandboxes."""
    with self._lock:
      return sorted(slot.pid for slot in self._slots)

  def close(self) -> None:
    """Ends all processes, even in the middle of a call."""
    with self._lock:
      if self._closed:
        return
      self._closed = True
      for _ in self._threads:
        self._jobs.put(None)
      running = list(self._slots)
    for slot in running:
      slot.kill()
    for thread in self._threads:
      thread.join()

  def _serve(self) -> None:
    """Runs jobs one at a time in a sandbox; the body of a thread."""
    place = _Place(self)
    while job := self._jobs.get():
      if not job.future.set_running_or_notify_cancel():
        continue
      try:
        job.future.set_result(place.run(job))
      except (GraderTimeout, GraderCrash, GraderError, GraderStartError) as error:
        job.future.set_exception(error)
        place.warm()
    place.leave()

  def start_slot(self) -> SandboxSlot:
    """Starts a sandbox and waits until its grader is loaded.

    Raises:
      GraderStartError: The sandbox does not start; the message says why.
    """
    self.count("starts")
    try:
      slot = SandboxSlot(self._make_launcher(), uses=_USES, start_s=self._start_timeout_s)
    except (SandboxError, ImportError) as error:
      raise GraderStartError(f"a grader did not start: {error}") from error
    with self._lock:
      self._slots.add(slot)
      if self._closed:  # close() could not see the new slot.
        slot.kill()
    return slot

  def end_slot(self, slot: SandboxSlot) -> None:
    """Kills a sandbox and forgets it."""
    slot.end()
    with self._lock:
      self._slots.discard(slot)

  def count(self, what: str) -> None:
    """Adds one to a count."""
    with self._lock:
      self._counts[what] += 1

  @property
  def timeout_s(self) -> float:
    """Longest time of one call, in seconds."""
    return self._timeout_s

  def _make_launcher(self) -> Launcher:
    with self._lock:
      if self._launcher is None:
        roots, readable = libraries.needed(*self._packages)
        self._launcher = Launcher(
          self.confinement.kind, self._limits, grader=Grader(self._grader, roots, readable)
        )
      return self._launcher


class _GraderCall:
  """One call."""

  def __init__(self, function: str, request: bytes):
    self.function = function
    self.request = request
    self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()


class _SandboxDied(Exception):
  """A sandbox was killed from outside before the call in it ended."""


class _Place:
  """A thread's sandbox. It is replaced when it was killed or has died."""

  def __init__(self, pool: WorkerPool):
    self._pool = pool
    self._slot: SandboxSlot | None = None

  def run(self, job: _GraderCall) -> Any:
    """Runs a job; a sandbox that dies is replaced and the job repeated once."""
    self._pool.count("calls")
    for _ in range(2):
      try:
        return self._value(*self._attempt(job))
      except (_SandboxDied, SandboxError):
        self.leave()
        self._pool.count("crashes")
    raise GraderCrash(f"the sandbox died twice in {job.function}")

  def warm(self) -> None:
    """Replaces a lost sandbox before the next job asks for it."""
    if self._slot is None:
      with contextlib.suppress(GraderStartError):  # the next job will report it.
        self._slot = self._pool.start_slot()

  def leave(self) -> None:
    """Ends the sandbox, if one is running."""
    if self._slot is not None:
      self._pool.end_slot(self._slot)
      self._slot = None

  def _attempt(self, job: _GraderCall) -> tuple[bytes, int]:
    """Makes a call; returns the output of its process and its exit code."""
    if self._slot is None:
      self._slot = self._pool.start_slot()
    with self._slot.child(fork_server.GRADER) as pipes:
      deadline = time.monotonic() + self._pool.timeout_s + _GRACE_S
      output, why = pipes.exchange(job.request, inner.MAX_REPLY, deadline)
    deadline = time.monotonic() + _END_S
    code = self._slot.exit_code(deadline) if why is Ending.OK else None
    if code is None:
      if why is Ending.OK and time.monotonic() < deadline:
        raise _SandboxDied
      self.leave()
    return output, _ALARM if code is None else code

  def _value(self, output: bytes, code: int) -> Any:
    """Reads a reply; anything else is blamed on the graded text."""
    if code == _ALARM:
      self._pool.count("timeouts")
      raise GraderTimeout(f"no answer within {self._pool.timeout_s:g} s")
    try:
      reply = json.loads(output[4:]) if code == 0 else None
    except (ValueError, RecursionError):
      reply = None
    if not isinstance(reply, dict):
      self._pool.count("crashes")
      raise GraderError(f"its process died with exit code {code}")
    if "value" not in reply:
      self._pool.count("errors")
      raise GraderError(str(reply.get("error"))[:1000])
    return reply["value"]
