"""A few worker processes that are killed from outside when they take too long.

Threads, not an event loop, own the processes: a pool serves any loop, of any thread.
"""

import concurrent.futures
import contextlib
import json
import os
import pickle
import queue
import selectors
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).with_name("worker.py")


class GraderTimeout(Exception):
  """A call took longer than allowed; its process was killed."""


class GraderCrash(Exception):
  """The process of a call died, twice: the call was repeated on a fresh one."""


class GraderError(Exception):
  """The grader raised."""


class GraderStartError(RuntimeError):
  """A worker could not start: its libraries are missing or the machine is out of memory."""


class WorkerPool:
  """Calls functions of a grader file in worker processes, which start when first needed."""

  def __init__(
    self,
    grader: str | Path,
    *,
    workers: int = 2,
    timeout_s: float = 5.0,
    memory_gib: float = 4.0,
    start_timeout_s: float = 120.0,
  ):
    """Describes the pool; no process is started.

    Args:
      grader: Python file with the functions; imported on its own in every worker.
      workers: number of processes.
      timeout_s: longest time of one call in its worker, waiting not counted, in seconds.
      memory_gib: limit of each worker's address space; 0: none.
      start_timeout_s: longest time that a worker may take to start, in seconds.
    """
    if workers < 1 or timeout_s <= 0:
      raise ValueError(f"need workers >= 1, timeout_s > 0, got {workers}, {timeout_s}")
    self._command = [sys.executable, "-P", str(_WORKER), str(grader), str(int(memory_gib * 2**30))]
    self._workers = workers
    self._timeout_s = timeout_s
    self._start_timeout_s = start_timeout_s
    self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
    self._lock = threading.Lock()
    self._threads: list[threading.Thread] = []
    self._processes: set[_Process] = set()
    self._counts = {"calls": 0, "timeouts": 0, "crashes": 0, "errors": 0, "starts": 0}
    self._modules: list[str] = []
    self._closed = False

  def submit(self, function: str, *arguments: Any) -> concurrent.futures.Future[Any]:
    """Queues a call.

    Args:
      function: its name in the grader file.
      *arguments: anything that can be pickled.

    Returns:
      A future of the result, which is plain JSON. It raises GraderTimeout, GraderCrash,
      GraderError or GraderStartError.
    """
    job = _Job(function, arguments)
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
    """Returns how many calls, time-outs, crashes, errors and starts there were."""
    with self._lock:
      return {name: float(value) for name, value in self._counts.items()}

  def pids(self) -> list[int]:
    """Returns the ids of the processes that run now."""
    with self._lock:
      return sorted(p.pid for p in self._processes)

  def loaded_modules(self) -> list[str]:
    """Returns the names of the modules that the last started worker has imported."""
    return list(self._modules)

  def close(self) -> None:
    """Ends all processes, also those in the middle of a call."""
    with self._lock:
      if self._closed:
        return
      self._closed = True
      for _ in self._threads:
        self._jobs.put(None)
      running = list(self._processes)
    for process in running:
      process.kill()
    for thread in self._threads:
      thread.join()

  def _serve(self) -> None:
    """A thread: takes jobs, one at a time, to a process of its own."""
    seat = _Seat(self)
    while job := self._jobs.get():
      if not job.future.set_running_or_notify_cancel():
        continue
      try:
        job.future.set_result(seat.run(job))
      except (GraderTimeout, GraderCrash, GraderError, GraderStartError) as error:
        job.future.set_exception(error)
        seat.warm()
    seat.leave()

  def start_process(self) -> "_Process":
    """Starts a worker and waits until it is ready."""
    process = _Process(self._command)
    with self._lock:
      self._processes.add(process)
      self._counts["starts"] += 1
      if self._closed:  # close() did not see it.
        process.kill()
    try:
      self._modules = process.receive(self._start_timeout_s)
    except (GraderTimeout, GraderError, EOFError) as error:
      self.end_process(process)
      reason = str(error) or "it died"
      raise GraderStartError(f"a grading worker did not start: {reason}") from error
    return process

  def end_process(self, process: "_Process") -> None:
    """Kills a worker and forgets it."""
    process.kill()
    process.release()
    with self._lock:
      self._processes.discard(process)

  def count(self, what: str) -> None:
    """Adds one to a count."""
    with self._lock:
      self._counts[what] += 1

  @property
  def timeout_s(self) -> float:
    """Longest time of one call, in seconds."""
    return self._timeout_s


class _Job:
  """One call."""

  def __init__(self, function: str, arguments: tuple[Any, ...]):
    self.function = function
    self.arguments = arguments
    self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()


class _Seat:
  """Where a thread keeps its process: replaced when killed or dead."""

  def __init__(self, pool: WorkerPool):
    self._pool = pool
    self._process: _Process | None = None

  def run(self, job: _Job) -> Any:
    """Runs a job; a process that dies is replaced and the job repeated once."""
    self._pool.count("calls")
    for _ in range(2):
      try:
        return self._attempt(job)
      except (EOFError, BrokenPipeError):
        self.leave()
        self._pool.count("crashes")
    raise GraderCrash(f"the worker died twice in {job.function}")

  def warm(self) -> None:
    """Replaces a lost process before the next job asks for it."""
    if self._process is None:
      with contextlib.suppress(GraderStartError):  # the next job will see it.
        self._process = self._pool.start_process()

  def leave(self) -> None:
    """Ends the process, if there is one."""
    if self._process is not None:
      self._pool.end_process(self._process)
      self._process = None

  def _attempt(self, job: _Job) -> Any:
    if self._process is None:
      self._process = self._pool.start_process()
    self._process.send((self._pool.timeout_s, job.function, job.arguments))
    try:
      return self._process.receive(self._pool.timeout_s)
    except GraderTimeout:
      self.leave()
      self._pool.count("timeouts")
      raise
    except GraderError:
      self._pool.count("errors")
      raise


class _Process:
  """A worker process and the two pipes to it."""

  def __init__(self, command: list[str]):
    self._popen = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      bufsize=0,
      start_new_session=True,  # Ctrl-C is for the trainer alone.
      env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )

  @property
  def pid(self) -> int:
    return self._popen.pid

  def send(self, request: tuple[Any, ...]) -> None:
    """Writes a request. Raises BrokenPipeError if the process has died."""
    body = pickle.dumps(request)
    data = memoryview(struct.pack("<I", len(body)) + body)
    assert self._popen.stdin is not None
    while data:
      data = data[self._popen.stdin.write(data) :]

  def receive(self, timeout_s: float) -> Any:
    """Reads an answer.

    Raises:
      GraderTimeout: there is none in time.
      GraderError: the function raised.
      EOFError: the process has died.
    """
    deadline = time.monotonic() + timeout_s
    (length,) = struct.unpack("<I", self._read(4, deadline, timeout_s))
    answer = json.loads(self._read(length, deadline, timeout_s))
    if "error" in answer:
      raise GraderError(answer["error"])
    return answer["value"]

  def kill(self) -> None:
    """Kills the process; of no effect on a dead one. May be called from any thread."""
    self._popen.kill()

  def release(self) -> None:
    """Reaps the killed process and closes its pipes."""
    self._popen.wait()
    for pipe in (self._popen.stdin, self._popen.stdout):
      if pipe is not None:
        with contextlib.suppress(BrokenPipeError):
          pipe.close()

  def _read(self, size: int, deadline: float, timeout_s: float) -> bytes:
    assert self._popen.stdout is not None
    data = b""
    with selectors.DefaultSelector() as selector:
      selector.register(self._popen.stdout, selectors.EVENT_READ)
      while len(data) < size:
        if not selector.select(max(0.0, deadline - time.monotonic())):
          raise GraderTimeout(f"no answer within {timeout_s:g} s")
        piece = self._popen.stdout.read(size - len(data))
        if not piece:
          raise EOFError
        data += piece
    return data
