"""Named spans of wall-clock time, collected once per step, and the peak memory of the process."""

import contextlib
import contextvars
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

try:
  import resource
except ImportError:  # Windows has no such module.
  resource = None


class Timer:
  """Adds up the time of named pieces of work; safe to use from threads and coroutines.

      timer = Timer()
      with timer.span("step"):
        with timer.span("sample"):
          ...
      timer.collect()  # {"time/step_s": 3.1, "time/sample_s": 2.0}

  A span includes the spans inside it. A span opened within one of the same name adds nothing, so
  recursion is not counted twice. Parallel spans of one name (threads, coroutines) add up and may
  exceed the wall clock. A span that is left by an exception also counts.
  """

  def __init__(
    self,
    clock: Callable[[], float] = time.perf_counter,
    waited: Callable[[], float] = lambda: 0.0,
  ):
    """Makes a timer.

    Args:
      clock: Function that returns monotonic seconds.
      waited: Function that returns the seconds that were spent waiting for other processes so far.
    """
    self._clock = clock
    self._waited = waited
    self._seconds: dict[str, float] = {}
    self._waits: dict[str, float] = {}
    self._lock = threading.Lock()
    self._open: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
      "open_spans", default=()
    )

  @contextlib.contextmanager
  def span(self, name: str) -> Iterator[None]:
    """Measures the block of a `with` statement under a name.

    Args:
      name: Name without a slash; the metric is `time/NAME_s`.

    Raises:
      ValueError: The name is empty or contains a slash.
    """
    if not name or "/" in name:
      raise ValueError(f"the name of a span needs letters and no slash, got {name!r}")
    outer = self._open.get()
    self._open.set((*outer, name))
    start, waited = self._clock(), self._waited()
    try:
      yield
    finally:
      elapsed, waits = self._clock() - start, self._waited() - waited
      self._open.set(outer)
      if name not in outer:
        with self._lock:
          self._seconds[name] = self._seconds.get(name, 0.0) + elapsed
          self._waits[name] = self._waits.get(name, 0.0) + waits

  @property
  def open_spans(self) -> tuple[str, ...]:
    """Returns the names of the spans that are open here, outermost first."""
    return self._open.get()

  def collect(self) -> dict[str, float]:
    """Returns and forgets {`time/NAME_s`: seconds} of the spans closed since the last call.

    A span that is still open is reported by the first call after it is closed.
    """
    with self._lock:
      seconds, self._seconds, self._waits = self._seconds, {}, {}
    return {f"time/{name}_s": value for name, value in seconds.items()}

  def waits(self) -> dict[str, float]:
    """Returns {name: seconds of waiting} of the spans that `collect` would return now."""
    with self._lock:
      return dict(self._waits)

  def spans(self) -> dict[str, float]:
    """Returns {name: seconds} of the spans that `collect` would return now."""
    with self._lock:
      return dict(self._seconds)


PHASES = (
  "sample",
  "assemble",
  "score",
  "monitor",
  "learn",
  "sync",
)  # of a step, one after another.


def phase_shares(times: Mapping[str, float]) -> dict[str, float]:
  """Returns time/PHASE_share: what each phase of a step takes of it.

      time/PHASE_share = time/PHASE_s / time/step_s        time/other_share = 1 - their sum

  Args:
    times: Seconds by name, as `Timer.collect` returns them; a phase that did not run has no share.
  """
  step = times.get("time/step_s", 0.0)
  ran = [name for name in PHASES if f"time/{name}_s" in times]
  if not step > 0:
    return {}
  shares = {f"time/{name}_share": times[f"time/{name}_s"] / step for name in ran}
  return {**shares, "time/other_share": max(0.0, 1.0 - sum(shares.values()))}


def peak_rss_gib() -> float:
  """Returns the largest resident memory of this process so far, in GiB; NaN if unknown."""
  if resource is None:
    return float("nan")
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes there, KiB here.
