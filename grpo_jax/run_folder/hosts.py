"""What the processes of a run exchange about a step: times, memory, notices, stragglers."""

import collections
import dataclasses
import logging
import socket
import statistics
from collections.abc import Mapping, Sequence

from grpo_jax import processes
from grpo_jax.metrics import timing
from grpo_jax.run_folder import process_log

_log = logging.getLogger(__name__)

EACH = 16  # with more processes, only their largest, smallest and median values are recorded.
LEAST_S = 0.1  # a process that is behind by less than this is not a straggler.
# Phases in which all devices compute together: a process that comes early waits for the last one
# within them, so the shortest time is the work.
TOGETHER = ("score", "monitor", "learn")
WORK = {
  "sample": "sampling and scoring completions",
  "assemble": "packing rows",
  "sync": "sending weights to the engine",
}


@dataclasses.dataclass(frozen=True)
class HostStep:
  """What one process measured in a step.

  Attributes:
    host: Name of its host.
    step_s: Seconds of the step by the wall clock.
    phases: Seconds of each phase by the wall clock.
    waits: Seconds of the step, and of each phase, in which it waited to exchange something.
    memory: Peak memory in GiB: "peak_rss_gib" and, where devices report it, "device_peak_gib".
    compilations: Programs that it compiled.
    said: Warnings and errors that were logged there: (level, text).
  """

  host: str
  step_s: float
  phases: Mapping[str, float]
  waits: Mapping[str, float]
  memory: Mapping[str, float]
  compilations: float
  said: Sequence[tuple[int, str]] = ()


@dataclasses.dataclass(frozen=True)
class Work:
  """Seconds that each process worked in a step, without waiting for others.

  Attributes:
    total: Seconds of each process.
    phases: Seconds of each process, by phase.
  """

  total: Sequence[float]
  phases: Mapping[str, Sequence[float]]


def work_of(steps: Sequence[HostStep]) -> Work:
  """Returns how long each process worked. Pure.

  Waiting is what an exchange took, and in phases that all devices compute together what a process
  took longer than the fastest one, since these phases end at the same moment everywhere.
  """
  names = dict.fromkeys(name for step in steps for name in step.phases)
  phases: dict[str, list[float]] = {}
  for name in names:
    own = [max(0.0, step.phases.get(name, 0.0) - step.waits.get(name, 0.0)) for step in steps]
    phases[name] = [min(own)] * len(own) if name in TOGETHER else own
  spared = [
    sum(step.phases.get(name, 0.0) for name in names) - sum(own[i] for own in phases.values())
    for i, step in enumerate(steps)
  ]
  between = [
    max(0.0, step.waits.get("step", 0.0) - sum(step.waits.get(name, 0.0) for name in names))
    for step in steps
  ]
  total = [
    max(0.0, step.step_s - less - more)
    for step, less, more in zip(steps, spared, between, strict=True)
  ]
  return Work(total, phases)


def metrics_of(steps: Sequence[HostStep]) -> dict[str, float]:
  """Returns the metrics hosts/* of a step. Pure.

  Args:
    steps: Measurements of the processes, in their order.
  """
  work = work_of(steps)
  waited = [step.step_s - own for step, own in zip(steps, work.total, strict=True)]
  columns: dict[str, list[float]] = {
    "step_s": [step.step_s for step in steps],
    "busy_s": list(work.total),
    "wait_s": waited,
    **{
      f"{name}_s": list(work.phases[name]) if name == "sample" else _wall(steps, name)
      for name in ("sample", "learn")
      if name in work.phases
    },
  }
  for name in dict.fromkeys(name for step in steps for name in step.memory):
    columns[name] = [step.memory.get(name, float("nan")) for step in steps]
  found = {"hosts/processes": float(len(steps))}
  for name, values in columns.items():
    found[f"hosts/{name}_max"] = max(values)
    found[f"hosts/{name}_min"] = min(values)
    found[f"hosts/{name}_median"] = statistics.median(values)
  slowest = max(range(len(steps)), key=lambda number: work.total[number])
  found["hosts/slowest"] = float(slowest)
  found["hosts/slowest_excess"] = _excess(work.total, slowest)
  total = sum(step.step_s for step in steps)
  found["hosts/wait_share"] = sum(waited) / total if total > 0 else 0.0
  found["hosts/compilations"] = sum(step.compilations for step in steps)
  if len(steps) <= EACH:
    for name, values in columns.items():
      found |= {f"hosts/process/{number:03d}/{name}": value for number, value in enumerate(values)}
  return found


class Stragglers:
  """Finds processes that are slower than the others for several steps in a row.

  A process is reported once, and again only after a step in which it was not slow.
  """

  def __init__(self, *, share: float = 0.2, steps: int = 3):
    """Makes a watch.

    Args:
      share: A process is slow in a step if it works longer than the median of the other processes
        by this share.
      steps: Number of such steps in a row after which it is reported.
    """
    self._share = share
    self._steps = steps
    self._slow: collections.Counter[int] = collections.Counter()  # steps in a row, by process.

  def lines(self, step: int, steps: Sequence[HostStep]) -> list[str]:
    """Returns the lines to show after a step; at most one, however many processes are slow.

    Args:
      step: Number of the step.
      steps: Measurements of the processes, in their order.
    """
    work = work_of(steps)
    late = []
    for number in range(len(steps)):
      if not self._is_slow(work.total, number):
        self._slow.pop(number, None)
        continue
      self._slow[number] += 1
      if self._slow[number] == self._steps:
        late.append(number)
    if not late:
      return []
    late.sort(key=lambda number: -work.total[number])
    first, *others = late
    more = [f"process {number} ({steps[number].host})" for number in others[:8]]
    more += [f"{len(others) - 8} more"] if len(others) > 8 else []
    also = f"; also slow: {', '.join(more)}" if more else ""
    return [self._line(step, steps, work, first) + also]

  def _is_slow(self, total: Sequence[float], number: int) -> bool:
    behind = total[number] - _of_others(total, number)
    return behind > LEAST_S and _excess(total, number) > self._share

  def _line(self, step: int, steps: Sequence[HostStep], work: Work, number: int) -> str:
    """Returns the line about one process."""
    usual = _of_others(work.total, number)
    behind = {
      name: own[number] - _of_others(own, number)
      for name, own in work.phases.items()
      if name in WORK
    }
    phase = max(behind, key=lambda name: behind[name], default="")
    where = ""
    if phase and behind[phase] > 0:
      own, others = work.phases[phase][number], _of_others(work.phases[phase], number)
      where = f"; most of it in {WORK[phase]}: {own:.2f} s, the others {others:.2f} s"
    return (
      f"process {number} of {len(steps)} ({steps[number].host}) is slower than the others for"
      f" {self._steps} steps: in step {step} it worked {work.total[number]:.2f} s, the median of"
      f" the others {usual:.2f} s ({_excess(work.total, number):+.0%}){where}"
    )


class Hosts:
  """Exchanges measurements and notices; all processes call `record` and `show_notices` alike."""

  def __init__(self, stragglers: Stragglers | None = None):
    """Makes the exchange.

    Args:
      stragglers: Watch that finds slow processes; None: one with the usual limits.
    """
    self._stragglers = stragglers or Stragglers()
    self._host = socket.gethostname()
    self._merged = process_log.Merged()

  def record(
    self,
    step: int,
    timer: timing.Timer,
    *,
    device_gib: float | None,
    compilations: float,
  ) -> dict[str, float]:
    """Exchanges the measurements of a step, and logs notices of other processes and stragglers.

    Args:
      step: Number of the step.
      timer: Timer of this process, whose spans of the step are not yet collected.
      device_gib: Peak memory of the fullest device of this process; None: unknown.
      compilations: Programs that this process compiled since the step before.

    Returns:
      Metrics hosts/*; {} if there is one process.
    """
    if processes.count() == 1:
      return {}
    spans, waits = timer.spans(), timer.waits()
    memory = {"peak_rss_gib": timing.peak_rss_gib()}
    own = HostStep(
      self._host,
      spans.get("step", 0.0),
      {name: spans[name] for name in timing.PHASES if name in spans},
      {name: waits[name] for name in ("step", *timing.PHASES) if name in waits},
      memory if device_gib is None else {**memory, "device_peak_gib": device_gib},
      compilations,
      process_log.take(),
    )
    found = processes.exchange(dataclasses.asdict(own), what=f"the times of step {step}")
    steps = [HostStep(**each) for each in found]
    self._show(steps)
    for line in self._stragglers.lines(step, steps):
      _log.warning("%s", line)
    return metrics_of(steps)

  def show_notices(self) -> None:
    """Has the main process show what the other processes have logged since the last exchange."""
    if processes.count() == 1:
      return
    own = HostStep(self._host, 0.0, {}, {}, {}, 0.0, process_log.take())
    found = processes.exchange(dataclasses.asdict(own), what="notices")
    self._show([HostStep(**each) for each in found])

  def _show(self, steps: Sequence[HostStep]) -> None:
    """Logs the notices of the other processes on the main one."""
    if not processes.is_main():
      return
    said = [[(level, text) for level, text in step.said] for step in steps]
    for level, line in self._merged.lines([step.host for step in steps], said):
      _log.log(level, "%s", line)


def _wall(steps: Sequence[HostStep], name: str) -> list[float]:
  return [step.phases.get(name, 0.0) for step in steps]


def _of_others(values: Sequence[float], number: int) -> float:
  """Returns the median of the values of all other processes; 0 if there are none."""
  others = [value for i, value in enumerate(values) if i != number]
  return statistics.median(others) if others else 0.0


def _excess(values: Sequence[float], number: int) -> float:
  """Returns by which share a value exceeds the median of the others; 0 if that is not positive."""
  usual = _of_others(values, number)
  return values[number] / usual - 1 if usual > 0 else 0.0
