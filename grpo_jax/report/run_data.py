"""Reads a run folder: its config, its metrics as curves, and where its sampled groups are."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax import metrics
from grpo_jax.errors import ExpectedFailure
from grpo_jax.run_folder import evaluation_log
from grpo_jax.values import json_numbers, json_text

LEFT_BY_RUNS = ("config.json", "metrics.jsonl", "rollouts", "evaluations")


class NoRunError(ExpectedFailure, FileNotFoundError):
  """The folder is not a run folder."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunData:
  """The content of a run folder, as far as it could be read."""

  name: str
  config: Mapping[str, Any]
  rows: Sequence[Mapping[str, Any]]  # of metrics.jsonl, in the order of steps.
  rollouts: Mapping[int, Path]  # step to file.
  problems: Sequence[str] = ()  # what could not be read.
  evaluations: Sequence[tuple[str, int, Path]] = ()  # set, step, file.


def load(folder: str | Path, *, is_running: bool = False) -> RunData:
  """Reads a run folder; missing or broken parts are left out and named in `problems`.

  Args:
    folder: Run folder.
    is_running: Whether a process writes to it: then half a line at the end is not a problem.

  Raises:
    NoRunError: The folder does not exist, or no run has written to it.
  """
  folder = Path(folder)
  if not folder.is_dir():
    lacks = "is not a folder" if folder.exists() else "does not exist"
    raise NoRunError(f"a run folder is needed, but {folder} {lacks}")
  if not any((folder / name).exists() for name in LEFT_BY_RUNS):
    raise NoRunError(
      f"a run folder is needed, but {folder} has none of {', '.join(LEFT_BY_RUNS)}"
      f"{_runs_within(folder)}"
    )
  problems = []
  config: dict[str, Any] = {}
  if (folder / "config.json").exists():
    try:
      config = json_text.parsed_object((folder / "config.json").read_bytes(), is_strict=True)
    except (OSError, ValueError) as error:
      problems.append(f"config.json could not be read: {error}")
  rows: list[dict[str, Any]] = []
  if (folder / "metrics.jsonl").exists():
    try:
      text = (folder / "metrics.jsonl").read_text(errors="replace")
      rows, broken = metrics.parse_lines(text[: text.rfind("\n") + 1] if is_running else text)
    except OSError as error:
      problems.append(f"metrics.jsonl could not be read: {error}")
      broken = []
    rows = _in_order(rows)
    if broken:
      problems.append(f"metrics.jsonl: lines {broken} could not be read")
  found = ((re.fullmatch(r"step_(\d+)\.jsonl", p.name), p) for p in folder.glob("rollouts/*"))
  rollouts = {int(match[1]): path for match, path in found if match and path.is_file()}
  name, evaluations = folder.resolve().name, tuple(evaluation_log.files(folder))
  return RunData(name, config, rows, dict(sorted(rollouts.items())), problems, evaluations)


def records(path: Path) -> tuple[list[dict[str, Any]], int]:
  """Returns the records of a file of rollouts, and the number of lines that cannot be read."""
  found, broken = [], 0
  with open(path, encoding="utf-8", errors="replace") as file:
    for line in file:
      try:
        found.append(json_text.parsed_object(line, is_strict=True))
      except ValueError:
        broken += 1
  return found, broken


def curve(run: RunData, name: str) -> tuple[list[int], list[float | None]]:
  """Returns the steps at which a metric was recorded, and its values; None where not finite."""
  pairs = [(row["step"], finite(row[name])) for row in run.rows if name in row]
  return [step for step, _ in pairs], [value for _, value in pairs]


def is_offline(run: RunData) -> bool:
  """Returns whether the run learned from recorded groups."""
  return run.config.get("mode") == "offline"


def failures(run: RunData) -> dict[str, int]:
  """Counts the attempts of all recorded steps that failed, by kind; the most frequent first."""
  prefix = "rollout/errors/"
  kinds: Counter[str] = Counter()
  for row in run.rows:
    found = {name: finite(row[name]) for name in row if name.startswith(prefix)}
    kinds.update({n.removeprefix(prefix): int(count) for n, count in found.items() if count})
  return dict(kinds.most_common())


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns {dotted name: value} of a nested config."""
  flat: dict[str, Any] = {}
  for name, value in config.items():
    if isinstance(value, Mapping) and value:
      flat |= flatten(value, f"{prefix}{name}.")
    else:
      flat[prefix + name] = value
  return flat


def _runs_within(folder: Path) -> str:
  """Returns "; there are runs in it: …" for a folder such as runs/, else ""."""
  found = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
  more = ", …" if len(found) > 5 else ""
  return f"; there are runs in it: {', '.join(found[:5])}{more}" if found else ""


def _in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns one row per step, in order; if a step has several rows, later values win."""
  merged: dict[int, dict[str, Any]] = {}
  for row in rows:
    merged[row["step"]] = merged.get(row["step"], {}) | row
  return [merged[step] for step in sorted(merged)]


def finite(value: Any) -> float | None:
  """Returns a number with six significant digits; None if the value is not a finite number."""
  number = json_numbers.finite(value)
  return None if number is None else float(f"{number:.6g}")
