"""Turns a compiled program's text and a trace of it into seconds by kind of operation.

XLA's CPU backend records one event for each operation that it runs, under the operation's name in
the compiled program; a GPU's events have the names of kernels. Two operations may run at the same
time, and a product runs on all cores: time is divided evenly among the operations that run at a
moment. Pure, except for `load`.
"""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# (begin, end, name) of an operation, in nanoseconds.
Event = tuple[float, float, str]

PHASES = ("forward", "recomputed", "backward", "head", "other")
OUTSIDE = "other programs"  # operations that do not occur in the compiled text.
_WRAPPERS = ("while", "call", "conditional", "cond")
# Platform → (beginning of the name of a plane of a trace, beginning of the names of its lines that
# hold operations). Other lines of a device repeat the same time by module and by step.
_LINES = {
  "gpu": ("/device:GPU", "Stream"),
  "tpu": ("/device:TPU", "XLA Ops"),
  "cpu": ("/host:CPU", "tf_XLA"),
}
_BOOKKEEPING = ("ThunkExecutor", "end:", "Threadpool", "SlinkyThreadPool", "Parse")


@dataclasses.dataclass(frozen=True)
class Program:
  """The operations of a compiled program: definition by name, and the bodies of fusions."""

  definitions: Mapping[str, str]
  bodies: Mapping[str, str]

  def kind(self, name: str) -> str:
    """Returns what an operation does."""
    text = self.definitions.get(name)
    if text is None:
      return OUTSIDE
    called = re.search(r"calls=%?([\w.\-]+)", text)
    inside = text + " " + (self.bodies.get(called[1], "") if called else "")
    kinds = {
      "product": " dot(",
      "stacking of layers": "dynamic-update-slice(",
      "unstacking of layers": "dynamic-slice(",
      "scatter": "scatter(",
    }
    for kind, mark in kinds.items():
      if mark in inside:
        return kind
    if " copy(" in text or "copy" in name or "transpose" in name:
      return "copy, transposition"
    return "reduction" if " reduce(" in inside or "ynn" in name else "elementwise"

  def phase(self, name: str) -> str:
    """Returns the part of the update that an operation belongs to, by JAX's name for it."""
    source = re.search(r'op_name="([^"]*)"', self.definitions.get(name, ""))
    path = source[1] if source else ""
    if "/rematted_computation/" in path:
      return "recomputed"
    if "transpose(jvp(Transformer))" in path:
      return "backward"
    if "jvp(Transformer)" in path:
      return "forward"
    return "head" if "jvp()" in path else "other"


def read(text: str) -> Program:
  """Reads the text of a compiled program (`Compiled.as_text()`)."""
  definitions: dict[str, str] = {}
  bodies: dict[str, list[str]] = collections.defaultdict(list)
  inside = ""
  for line in text.splitlines():
    if begin := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
      inside = begin[1]
    elif found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", line):
      definitions[found[1]] = found[2]
      bodies[inside].append(found[2])
  return Program(definitions, {name: " ".join(lines) for name, lines in bodies.items()})


def load(folder: str | pathlib.Path, platform: str) -> Iterator[Event]:
  """Yields the operations of the newest trace below a folder of `jax.profiler.trace`."""
  import jax

  path = max(pathlib.Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
  yield from operations(jax.profiler.ProfileData.from_file(str(path)).planes, platform)


def operations(planes: Iterable[Any], platform: str) -> Iterator[Event]:
  """Yields the operations on the planes of a trace; `platform` is "gpu", "tpu" or "cpu"."""
  of_plane, of_line = _LINES[platform]
  for plane in planes:
    for line in plane.lines if plane.name.startswith(of_plane) else ():
      for event in line.events if (line.name or "").startswith(of_line) else ():
        if is_operation(event.name):
          yield event.start_ns, event.end_ns, event.name


def is_operation(name: str) -> bool:
  """Returns whether an event is an operation, and not bookkeeping or a container of others."""
  return not name.startswith(_BOOKKEEPING) and name.split(".")[0] not in _WRAPPERS


def seconds(events: Iterable[Event]) -> tuple[dict[str, float], float]:
  """Returns the seconds of each operation, and the seconds in which none was recorded."""
  events = list(events)
  ends = [(begin, False, i) for i, (begin, _, _) in enumerate(events)]
  ends += [(end, True, i) for i, (_, end, _) in enumerate(events)]
  active: set[int] = set()
  found: dict[str, float] = collections.defaultdict(float)
  nothing, last = 0.0, None
  for time, is_end, i in sorted(ends):
    if last is not None and active:
      for j in active:
        found[events[j][2]] += (time - last) / len(active) / 1e9
    elif last is not None:
      nothing += (time - last) / 1e9
    last = time
    active.discard(i) if is_end else active.add(i)
  return dict(found), nothing


def table(program: Program, of_operations: Mapping[str, float], nothing: float) -> list[str]:
  """Returns the lines of a table in milliseconds: kinds of operation by part of the update."""
  cells: dict[tuple[str, str], float] = collections.defaultdict(float)
  for name, time in of_operations.items():
    cells[program.kind(name), program.phase(name)] += 1000 * time
  total = sum(cells.values()) + 1000 * nothing
  by_kind: dict[str, float] = collections.defaultdict(float)
  for (kind, _), time in cells.items():
    by_kind[kind] += time
  line = lambda first, numbers, share: (
    f"{first:28s}" + "".join(f"{x:>12s}" for x in numbers) + f"{share:>8s}"
  )
  lines = [line("ms", [*PHASES, "sum"], "share")]
  for kind, time in sorted(by_kind.items(), key=lambda item: -item[1]):
    numbers = [f"{cells[kind, phase]:.0f}" for phase in PHASES]
    lines.append(line(kind, [*numbers, f"{time:.0f}"], f"{time / total:.0%}"))
  phase_sums = [sum(cells[kind, phase] for kind in by_kind) for phase in PHASES]
  sums = [f"{x:.0f}" for x in (*phase_sums, total)]
  rest = [*[""] * len(PHASES), f"{1000 * nothing:.0f}"]
  lines.append(line("products of another pool", rest, f"{1000 * nothing / total:.0%}"))
  return [*lines, line("sum", sums, "")]
