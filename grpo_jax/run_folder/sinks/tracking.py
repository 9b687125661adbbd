"""What all experiment trackers share: a record of each step, one run, also if it is resumed.

A tracker has a file in this folder with a class that derives from `Tracker`; `Tracked` calls it,
always in the same thread.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import logging
import math
import secrets
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from grpo_jax.files.atomic import replace_file
from grpo_jax.run_folder.options import LoggingOptions
from grpo_jax.run_folder.sinks.background import Worker
from grpo_jax.run_folder.sinks.base import Opening, Sink, StepRollouts
from grpo_jax.run_folder.sinks.masking import Masked, read_config
from grpo_jax.values import json_text
from grpo_jax.values.json_numbers import finite

_log = logging.getLogger(__name__)

TRACKERS = ("wandb", "mlflow", "trackio", "swanlab")  # also the names of packages and of extras.
_ROOM = 1000  # records that wait; each holds numbers, and now and then a table.
_ROWS = 64  # completions of a table.
FOLDER = "trackers"  # of a run: what it remembers of each tracker.


@dataclasses.dataclass(frozen=True)
class Table:
  """Sampled completions of a step."""

  columns: tuple[str, ...]
  rows: list[list[Any]]


@dataclasses.dataclass(frozen=True)
class Start:
  """What a tracker is opened for.

  Attributes:
    run: Name of the tracker's run that is continued, as `Tracker.open` returned it; None: a new
      one.
    name: A name for the run if the user gave none.
    workdir: Run folder.
    config: Configuration of the run, without secrets.
  """

  run: str | None
  name: str
  workdir: Path
  config: Mapping[str, Any]


class Tracker:
  """The client of one tracker; all methods are called in one thread, and may be slow."""

  def open(self, start: Start) -> str:
    """Begins or continues a run, with its configuration; returns the name by which it resumes."""
    raise NotImplementedError

  def log(self, step: int, values: Mapping[str, float], table: Table | None) -> None:
    """Records a step: finite values by name, and sampled completions where they are due."""
    raise NotImplementedError

  def save(self, report: Path) -> None:
    """Stores the report of the run as an artifact."""
    raise NotImplementedError

  def close(self) -> None:
    """Ends the recording; everything is sent when this returns."""
    raise NotImplementedError


class Tracked(Sink):
  """Hands each step to a tracker in one record, in a thread of its own.

  What the run folder remembers (trackers/NAME.json) has a resumed run continue the same run of the
  tracker, and leave out what that has already: a tracker cannot take a record back.
  """

  def __init__(
    self,
    name: str,
    opening: Opening,
    tracker: Tracker,
    *,
    place: Mapping[str, Any],
    samples_every_steps: int = LoggingOptions.samples_every_steps,
    timeout_s: float = LoggingOptions.timeout_s,
  ):
    """Opens the tracker in its thread; this returns at once.

    Args:
      name: Name of the sink.
      opening: Run for which the sink is opened.
      tracker: Client of the tracker.
      place: Options that decide where the run is: project, server, .... With others, a resumed run
        begins a new run of the tracker.
      samples_every_steps: Steps between two tables of sampled completions; 0: never.
      timeout_s: Seconds after which a call counts as hanging.
    """
    self._tracker = tracker
    self._workdir = opening.workdir
    self._every = samples_every_steps
    self._memory = _Memory(opening.workdir / FOLDER / f"{name}.json", place, opening.start_step)
    self._step: int | None = None
    self._values: dict[str, float] = {}
    self._table: Table | None = None
    self._has_rollouts = False
    self._masked = Masked({})
    self._worker = Worker(name, room=_ROOM, timeout_s=timeout_s)
    self._worker.submit("opening its run", self._open)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    self._begin(step)
    self._values |= {name: value for name, value in values.items() if math.isfinite(value)}
    self._flush_if_whole()

  def write_rollouts(self, rollouts: StepRollouts) -> None:
    self._begin(rollouts.step)
    self._has_rollouts = True
    if self._every and rollouts.step % self._every == 0:
      self._table = table_of(rollouts)
    self._flush_if_whole()

  def close(self) -> None:
    self._flush()
    self._worker.close("its last records", self._close)

  def _begin(self, step: int) -> None:
    if step != self._step:
      self._flush()
      self._step = step

  def _flush_if_whole(self) -> None:
    """Hands over a step whose update and rollouts are known: nothing of it follows."""
    if self._has_rollouts and "weight_version" in self._values:
      self._flush()

  def _flush(self) -> None:
    step, values, table = self._step, self._values, self._table
    self._step, self._values, self._table, self._has_rollouts = None, {}, None, False
    if step is not None and (values or table):
      self._worker.submit(f"the record of step {step}", partial(self._log, step, values, table))

  def _open(self) -> None:
    self._masked = read_config(self._workdir)
    name = self._workdir.resolve().name
    start = Start(self._memory.run, name, self._workdir, self._masked.config)
    self._memory.begin(self._tracker.open(start))

  def _log(self, step: int, values: Mapping[str, float], table: Table | None) -> None:
    new = self._memory.unknown(step, values)
    if not new:
      return
    self._tracker.log(step, {name: values[name] for name in new}, table)
    self._memory.note(step, values)

  def _close(self) -> None:
    report = self._workdir / "report.html"
    if report.is_file():
      copy = self._workdir / FOLDER / "report.html"
      replace_file(copy, [self._masked.text(report.read_text(errors="replace"))])
      self._tracker.save(copy)
    self._tracker.close()


class _Memory:
  """What a run folder remembers of a tracker: its run, and the last step that it was given."""

  def __init__(self, path: Path, place: Mapping[str, Any], start_step: int):
    """Reads the file, unless the run begins at step 0 or the tracker's run is elsewhere."""
    self._path = path
    self._place = json.loads(json.dumps(dict(place)))
    self.run: str | None = None
    self._step = -1
    self._names: set[str] = set()  # of the values of that step.
    with contextlib.suppress(OSError, *json_text.UNEXPECTED):
      found = json_text.parsed(path.read_bytes()) if start_step else {}
      if found.get("place") == self._place:
        self._names = {str(name) for name in found["names"]}
        self.run, self._step = str(found["run"]), int(found["step"])

  def begin(self, run: str) -> None:
    """Notes the run of the tracker."""
    self.run = run
    self._write()

  def unknown(self, step: int, values: Mapping[str, float]) -> list[str]:
    """Returns the names of the values that the tracker does not have yet."""
    if step < self._step:
      return []
    known = self._names if step == self._step else set()
    return [name for name in values if name not in known]

  def note(self, step: int, values: Mapping[str, float]) -> None:
    """Notes that the tracker has values of a step."""
    self._names = set(values) | (self._names if step == self._step else set())
    self._step = step
    self._write()

  def _write(self) -> None:
    self._path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"run": self.run, "place": self._place, "step": self._step, "names": sorted(self._names)}
    replace_file(self._path, [json.dumps(kept)])


def table_of(rollouts: StepRollouts) -> Table | None:
  """Returns sampled completions of a step, whole groups from the first on; None if there are none.

  Numbers that are not finite are None.
  """
  columns = ("step", "prompt_id", "environment", "prompt", "expected_answer", "completion")
  rows: list[list[Any]] = []
  for group, advantages in zip(rollouts.groups, rollouts.advantages, strict=True):
    if rows and len(rows) + len(group.rollouts) > _ROWS:
      break
    prompt = group.prompt
    for rollout, advantage in zip(group.rollouts, advantages, strict=True):
      numbers = (finite(rollout.reward), finite(float(advantage)), len(rollout.completion_ids))
      rows.append(
        [
          *(rollouts.step, prompt.prompt_id, prompt.environment, prompt.text),
          *(prompt.expected_answer, rollout.text, *numbers, rollout.finish_reason.value),
        ]
      )
  names = (*columns, "reward", "advantage", "tokens", "finish_reason")
  return Table(names, rows[:_ROWS]) if rows else None


def missing_package(name: str) -> Iterator[str]:
  """Yields why a tracker cannot be used: its package is not installed. Imports nothing of it."""
  if name in TRACKERS and importlib.util.find_spec(name) is None:
    yield (
      f"logging.sinks: {name!r} needs the package {name}, which is not installed:"
      f" pip install {name}"
    )


def package(name: str) -> Any:
  """Imports the package of a tracker."""
  return importlib.import_module(name)


def new_name(base: str) -> str:
  """Returns a name for a run that no other run has."""
  return f"{base}-{secrets.token_hex(4)}"


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns the values of a nested configuration by dotted name."""
  found: dict[str, Any] = {}
  for name, value in config.items():
    full = f"{prefix}{name}"
    found |= flat(value, f"{full}.") if isinstance(value, Mapping) else {full: value}
  return found
