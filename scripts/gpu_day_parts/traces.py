"""The longest kernels of a profile that `jax.profiler.trace` wrote. Pure, except for `load`.

The file `*.trace.json.gz` is JSON in Chrome's trace event format: events of phase "X" have a name,
a start and a duration in microseconds; events of phase "M" name processes and threads. A GPU's
kernels are in threads named "Stream …" of a process named "/device:GPU:…"; other threads of that
process repeat the same time by operation and by module. On a TPU the thread is "XLA Ops". On a CPU
the threads are those of XLA's pool, and an event that is an operation names it in "hlo_op".
"""

import dataclasses
import gzip
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

# Platform → (beginning of the process's name, beginnings of the names of its threads that count).
_PLACES = {
  "gpu": ("/device:GPU", ("Stream",)),
  "tpu": ("/device:TPU", ("XLA Ops",)),
  "cpu": ("/host:CPU", ("tf_XLA",)),
}


class NoKernels(ValueError):
  """A profile does not contain any kernels of the device."""


@dataclasses.dataclass(frozen=True)
class Kernel:
  """All calls of one kernel."""

  name: str
  calls: int
  ms: float  # duration of all calls together.
  share: float  # share of the time of all kernels.


@dataclasses.dataclass(frozen=True)
class Profile:
  """The activity of a device."""

  kernels: tuple[Kernel, ...]  # the longest first.
  total_ms: float  # time of all kernels, each counted in full even if two ran at the same time.
  busy_ms: float  # time in which at least one kernel ran.
  span_ms: float  # time from the begin of the first kernel to the end of the last.


def load(folder: str | pathlib.Path) -> dict[str, Any]:
  """Reads the newest trace below a folder that was given to `jax.profiler.trace`.

  Raises:
    NoKernels: There is no trace.
  """
  files = sorted(pathlib.Path(folder).rglob("*.trace.json.gz"))
  if not files:
    raise NoKernels(f"the profiler wrote no *.trace.json.gz below {folder}")
  with gzip.open(files[-1], "rt") as stream:
    return json.load(stream)


def summarise(trace: Mapping[str, Any], platform: str, *, longest: int = 15) -> Profile:
  """Sums the kernels of a trace by name.

  Args:
    trace: Content of a trace file.
    platform: "gpu", "tpu" or "cpu".
    longest: Number of kernels to return.

  Raises:
    NoKernels: The trace has no kernel of that platform; the message lists processes and threads.
  """
  processes, threads = _names(trace["traceEvents"])
  begins, thread_names = _PLACES[platform]
  found: dict[str, list[float]] = {}
  spans = []
  for event in trace["traceEvents"]:
    if event.get("ph") != "X" or "dur" not in event:
      continue
    thread = threads.get((event["pid"], event["tid"]), "")
    if not processes.get(event["pid"], "").startswith(begins) or not thread.startswith(
      thread_names
    ):
      continue
    if platform == "cpu" and "hlo_op" not in event.get("args", {}):
      continue
    found.setdefault(event["name"], []).append(event["dur"])
    spans.append((event["ts"], event["ts"] + event["dur"]))
  if not spans:
    raise NoKernels(
      f"no kernel of a {platform} in the trace; its processes are {sorted(processes.values())},"
      f" its threads {sorted(set(threads.values()))[:20]}"
    )
  total = sum(sum(durations) for durations in found.values())
  kernels = sorted(
    (
      Kernel(name, len(durations), 1e-3 * sum(durations), sum(durations) / total if total else 0.0)
      for name, durations in found.items()
    ),
    key=lambda kernel: (-kernel.ms, kernel.name),
  )
  span = max(end for _, end in spans) - min(start for start, _ in spans)
  return Profile(tuple(kernels[:longest]), 1e-3 * total, 1e-3 * _union(spans), 1e-3 * span)


def _names(
  events: Iterable[Mapping[str, Any]],
) -> tuple[dict[Any, str], dict[tuple[Any, Any], str]]:
  """Returns the names of processes by pid, and of threads by (pid, tid)."""
  processes, threads = {}, {}
  for event in events:
    if event.get("ph") != "M":
      continue
    if event["name"] == "process_name":
      processes[event["pid"]] = event["args"]["name"]
    elif event["name"] == "thread_name":
      threads[event["pid"], event["tid"]] = event["args"]["name"]
  return processes, threads


def _union(spans: Iterable[tuple[float, float]]) -> float:
  """Returns the length of the union of intervals."""
  total, covered = 0.0, float("-inf")
  for start, end in sorted(spans):
    total += max(0.0, end - max(start, covered))
    covered = max(covered, end)
  return total
