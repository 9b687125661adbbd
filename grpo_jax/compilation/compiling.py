"""Compiles programs ahead of time in threads, and watches what XLA compiles and when.

A run makes no progress while it compiles. It therefore compiles what it will need before its first
step, several programs at a time, and logs anything that is compiled later.
"""

import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from grpo_jax.compilation import host_memory, native_lines
from grpo_jax.compilation.programs import CompileJob
from grpo_jax.interrupts import Stopped

_log = logging.getLogger(__name__)

# JAX sends this name as a scalar when a compilation begins, and as a duration when it ends. In
# between it sends HIT, in the same thread, if the program was read from the cache on disk.
EVENT = "/jax/core/compile/backend_compile_duration"
HIT = "/jax/compilation_cache/cache_hits"
SLOW_S = 1.0  # a compilation that takes longer is shown in the progress bar.
PATIENCE_S = 5.0  # a compilation that takes longer is explained by a printed line.
POLL_S = 0.2  # between two checks of whether the run is asked to end.
MEMORY_OF_ONE = 2 << 30  # bytes of host memory that the compilation of a large program may take.

# (description, total) → a context that yields advance(count=1); see
# `console.TrainingScreen.progress`.
Progress = Callable[[str, int], AbstractContextManager[Callable[..., None]]]


@dataclasses.dataclass(frozen=True)
class Compilation:
  """One compilation by XLA, or one program read from the cache.

  Attributes:
    name: Name of the function.
    seconds: Seconds that it took.
    is_kept: Whether the program was read from the cache on disk instead of compiled.
    job: Name of the job that requested it; "": an ordinary call.
  """

  name: str
  seconds: float
  is_kept: bool
  job: str = ""


class CompilationMonitor:
  """Observes the compilations of this process while `listening`."""

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    """Makes a monitor.

    Args:
      clock: Function that returns monotonic seconds.
    """
    self._clock = clock
    self._lock = threading.Lock()
    self._began: dict[int, float] = {}  # thread -> start of its compilation.
    self._named: dict[int, str] = {}  # thread -> name of its job.
    self._hits: set[int] = set()  # threads whose program was found in the cache.
    self._done: list[Compilation] = []
    self._patience: dict[int, threading.Timer] = {}
    self._explains = False  # whether a long compilation has not been explained yet.
    self._is_new = False  # whether the folder of compiled programs was empty.

  @contextlib.contextmanager
  def listening(self) -> Iterator[None]:
    """Watches what JAX compiles within the block.

    The first compilation that takes longer than PATIENCE_S is explained in the log.
    """
    self._explains = True
    folder = _kept_in()
    self._is_new = os.path.isdir(folder) and not os.listdir(folder)
    jax.monitoring.register_scalar_listener(self._begin)
    jax.monitoring.register_event_listener(self._hit)
    jax.monitoring.register_event_duration_secs_listener(self._end)
    try:
      yield
    finally:
      jax.monitoring.unregister_scalar_listener(self._begin)
      jax.monitoring.unregister_event_listener(self._hit)
      jax.monitoring.unregister_event_duration_listener(self._end)
      self._explains = False
      with self._lock:
        for timer in self._patience.values():
          timer.cancel()
        self._patience.clear()
        self._began.clear()
        self._hits.clear()

  def note(self) -> str:
    """Returns "a program, 12 s" if a compilation has been running for a second, else "".

    If a job runs it, its name is used instead of "a program", and the jobs done are counted:
    "9 cached, 3 compiled; update 8 × 1024, 12 s". Only at the end JAX says whether it
    compiled the program or read it from the cache.
    """
    with self._lock:
      if not self._began:
        return ""
      thread, began = min(self._began.items(), key=lambda item: item[1])
      name = self._named.get(thread, "")
      done = counts([one for one in self._done if one.job]) if name else ""
    longest = self._clock() - began
    if longest < SLOW_S:
      return ""
    return f"{done + '; ' if done else ''}{name or 'a program'}, {longest:.0f} s"

  def so_far(self) -> list[Compilation]:
    """Returns what was compiled, or read from the cache, since the last `take`."""
    with self._lock:
      return list(self._done)

  def take(self) -> list[Compilation]:
    """Returns and forgets what was compiled, or read from the cache, since the last call."""
    with self._lock:
      done, self._done = self._done, []
    return done

  @contextlib.contextmanager
  def naming(self, name: str) -> Iterator[None]:
    """Names, for `note`, what this thread compiles within the block."""
    thread = threading.get_ident()
    with self._lock:
      self._named[thread] = name
    try:
      yield
    finally:
      with self._lock:
        self._named.pop(thread, None)

  def _begin(self, event: str, value: float | int, **_: Any) -> None:
    if event != EVENT:
      return
    thread = threading.get_ident()
    with self._lock:
      self._began.setdefault(thread, self._clock())
      self._hits.discard(thread)
      if self._explains and thread not in self._patience:
        timer = self._patience[thread] = threading.Timer(PATIENCE_S, self._explain)
        timer.daemon = True
        timer.start()

  def _hit(self, event: str, **_: Any) -> None:
    if event == HIT:
      with self._lock:
        self._hits.add(threading.get_ident())

  def _end(self, event: str, duration_secs: float, **named: Any) -> None:
    if event != EVENT:
      return
    thread = threading.get_ident()
    name = str(named.get("fun_name", "a program")).removeprefix("jit(").removesuffix(")")
    with self._lock:
      job = self._named.get(thread, "")
      self._done.append(Compilation(name, duration_secs, thread in self._hits, job))
      self._hits.discard(thread)
      self._began.pop(thread, None)
      timer = self._patience.pop(thread, None)
    if timer is not None:
      timer.cancel()

  def _explain(self) -> None:
    """Says why the run waits. Only its end says whether a program is compiled or read."""
    least = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    with self._lock:
      explains, self._explains = self._explains, False
      compiles = any(not one.is_kept and one.seconds >= least for one in self._done)
    folder = _kept_in()
    if not explains:
      return
    if not folder:
      _log.info("compiling; the run waits until it is done, at every start: no programs are kept")
    elif self._is_new or compiles:
      _log.info(
        "compiling; the run waits until it is done. The programs are kept in %s: later runs with"
        " the same sizes and packages read them there",
        folder,
      )
    else:
      _log.info("programs are read from %s, or compiled; the run waits until it is done", folder)


def counts(done: Sequence[Compilation]) -> str:
  """Returns "9 cached, 3 compiled", without what did not happen; "" if nothing was done."""
  kept = sum(one.is_kept for one in done)
  parts = ((kept, "cached"), (len(done) - kept, "compiled"))
  return ", ".join(f"{count} {how}" for count, how in parts if count)


def _kept_in() -> str:
  """Returns the folder that keeps compiled programs; "" if they are not kept."""
  of_jax = jax.config.values
  is_kept = of_jax["jax_enable_compilation_cache"]
  is_kept = is_kept and math.isfinite(of_jax["jax_persistent_cache_min_compile_time_secs"])
  return is_kept and of_jax["jax_compilation_cache_dir"] or ""


def metrics(done: Sequence[Compilation]) -> dict[str, float]:
  """Returns perf/compilations and perf/compile_s; programs read from the cache do not count."""
  compiled = [one.seconds for one in done if not one.is_kept]
  return {"perf/compilations": float(len(compiled)), "perf/compile_s": sum(compiled)}


def late_line(when: str, done: Sequence[Compilation]) -> str:
  """Returns the report of compilations after the first step; "" if there were none.

  Args:
    when: Time of the compilations, such as "step 3".
    done: Programs that were compiled or read from the cache.
  """
  compiled = [one for one in done if not one.is_kept]
  if not compiled:
    return ""
  names = ", ".join(dict.fromkeys(one.name for one in compiled))
  took = sum(one.seconds for one in compiled)
  return (
    f"{when} compiled {len(compiled)} program{'s' * (len(compiled) > 1)} in {took:.1f} s,"
    f" which should have been compiled before the first step: {names}"
  )


class BackgroundCompiler:
  """Compiles jobs in threads while the caller does something else.

  with Ahead(jobs, watch) as ahead:
    model = load()
    ahead.wait(screen.progress, stop=stop)
  """

  def __init__(
    self, jobs: Sequence[CompileJob], watch: CompilationMonitor, *, threads: int | None = None
  ):
    """Starts compiling.

    Args:
      jobs: Compilations, the longest first.
      watch: Watch that receives the names of the running jobs.
      threads: Number of threads that compile at the same time; None: see `threads_for`.
    """
    self._count = len(jobs)
    self._watch = watch
    self._began = time.monotonic()
    self._quiet = contextlib.ExitStack()
    self.threads = threads or threads_for(len(jobs))
    self._pool = concurrent.futures.ThreadPoolExecutor(self.threads, thread_name_prefix="compile")
    self._pending = {self._pool.submit(_named, watch, job) for job in jobs}

  def __enter__(self) -> "BackgroundCompiler":
    if jax.default_backend() == "gpu":
      self._quiet.enter_context(native_lines.without())
    return self

  def __exit__(self, *_: object) -> None:
    """Cancels jobs that have not started; does not wait for the rest."""
    self._pool.shutdown(wait=False, cancel_futures=True)
    self._quiet.close()

  def wait(self, progress: Progress, *, stop: Any = False) -> None:
    """Waits with a progress bar until everything is compiled, then logs how long it took.

    Args:
      progress: Function that shows the progress bar.
      stop: Flag that becomes true when the run is asked to end.

    Raises:
      Stopped: The run is asked to end.
      CompilationError: A program cannot be compiled; jobs that have not started are cancelled.
    """
    if not self._count:
      return
    with progress("programs", self._count) as advance:
      while self._pending:
        done, self._pending = concurrent.futures.wait(
          self._pending, POLL_S, concurrent.futures.FIRST_COMPLETED
        )
        for future in done:
          future.result()
        if stop:
          raise Stopped
        advance(len(done))
    of_jobs = [one for one in self._watch.so_far() if one.job]
    kept = sum(one.is_kept for one in of_jobs)
    took = time.monotonic() - self._began
    compiled = len(of_jobs) - kept
    _log.info(
      "programs: %d of %d read from the cache, %d compiled, in %.1f s",
      *(kept, len(of_jobs), compiled, took),
    )


def threads_for(jobs: int) -> int:
  """Returns how many programs to compile at the same time, by cores and free memory.

  Args:
    jobs: Number of programs to compile.
  """
  free = host_memory.available_bytes()
  by_memory = jobs if free is None else free // MEMORY_OF_ONE
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  return max(1, min(jobs, cores or 1, by_memory))


def _named(watch: CompilationMonitor, job: CompileJob) -> None:
  with watch.naming(job.name):
    job()
