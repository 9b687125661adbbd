"""Metrics: sums and how they are merged, rows of the table by name, lines of a file. Pure.

A metric is named `area/name`. On the device it is a pair of sums (`types.Mean`, ...), so that
merging over microbatches and devices is exact; on the host it is a float. A name without
a row in `METRICS` (table.py) is a fault: `unknown` finds it, and `loggers` warns about it.
"""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from grpo_jax.metrics.table import METRICS, Definition
from grpo_jax.types import Metrics
from grpo_jax.values import json_text


def merge(parts: Iterable[Metrics]) -> Metrics:
  """Merges the metrics of several parts (microbatches, updates); the result is exact.

  Args:
    parts: Metrics of each part; a name may be missing from some parts.

  Raises:
    TypeError: One name is a Mean in one part and, say, a Maximum in another.
  """
  merged: Metrics = {}
  for part in parts:
    for name, value in part.items():
      if name not in merged:
        merged[name] = value
      elif isinstance(value, type(merged[name])):
        merged[name] = merged[name].merge(value)  # pyright: ignore[reportArgumentType]
      else:
        raise TypeError(
          f"metric {name!r} is a {type(merged[name]).__name__} in one part"
          f" and a {type(value).__name__} in another"
        )
  return merged


def to_floats(metrics: Metrics) -> dict[str, float]:
  """Returns {name: value}, fetched from the device in one transfer; NaN where nothing was
  counted."""
  leaves, tree = jax.tree.flatten(metrics)
  host = tree.unflatten([float(leaf) for leaf in jax.device_get(leaves)])
  return {name: value.value() for name, value in host.items()}


def joined_rounds(earlier: Mapping[str, float], latest: Mapping[str, float]) -> dict[str, float]:
  """Joins the metrics of two rounds of one step: adds counts, keeps the latest of other values."""
  added = {
    name: earlier[name] + value
    for name, value in latest.items()
    if name in earlier and (found := definition(name)) and found.unit == "count"
  }
  return {**earlier, **latest, **added}


def definition(name: str) -> Definition | None:
  """Returns the row of `METRICS` that describes a name; None if there is none."""
  if name in METRICS:
    return METRICS[name]
  return next((d for pattern, d in METRICS.items() if fnmatch.fnmatchcase(name, pattern)), None)


def unknown(names: Iterable[str]) -> list[str]:
  """Returns the names that no row of `METRICS` describes, sorted."""
  return sorted(name for name in set(names) if definition(name) is None)


def reproducible(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values that a resumed run repeats exactly: those not of clock and machine.

  Which steps have a proof of new weights (mismatch/sync_*) depends on what the last one cost.
  """
  patterns = ("time/*", "perf/*", "hosts/*", "mismatch/sync_*")
  is_of_clock = lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
  return {name: value for name, value in values.items() if not is_of_clock(name)}


def parse_lines(text: str) -> tuple[list[dict[str, Any]], list[int]]:
  """Reads the text of a `metrics.jsonl`.

  Returns:
    The objects of numbers and nulls with an integer `step`, in order, and the numbers (from 1) of
    the other lines: a killed process may leave half a line at the end.
  """
  rows, broken = [], []
  for number, line in enumerate(text.split("\n"), start=1):
    if not line.strip():
      continue
    try:
      row = json_text.parsed_object(line, is_strict=True)
      if type(row.get("step")) is not int or not all(map(_is_number_or_null, row.values())):
        raise ValueError
      rows.append(row)
    except ValueError:
      broken.append(number)
  return rows, broken


def _is_number_or_null(value: object) -> bool:
  return value is None or isinstance(value, int | float)


def markdown_table() -> str:
  """Returns `METRICS` as the table of docs/metrics.md."""
  rows = [f"| `{name}` | {d.unit} | {d.meaning} | {d.healthy} |" for name, d in METRICS.items()]
  return "\n".join(["| Name | Unit | Meaning | Healthy |", "|---|---|---|---|", *rows])
