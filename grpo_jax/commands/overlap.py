"""`grpo-jax overlap RUN`: what asynchronous training would make of a synchronous run."""

import contextlib
import dataclasses
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from grpo_jax.commands.arguments import Parser, WrongUse
from grpo_jax.errors import ExpectedFailure
from grpo_jax.files import local_paths
from grpo_jax.planning import overlap
from grpo_jax.report import data as report_data
from grpo_jax.report.data import Run
from grpo_jax.values import json_text

USAGE = f"""\
Says how long a step would take if sampling and learning overlapped (docs/async.md), from the times
of a synchronous run and the lengths of its completions. It computes and measures nothing.

  grpo-jax overlap RUN [--sampler-share=X]
  grpo-jax overlap --sample-s=S --learn-s=S --tokens=N [...]

  RUN         folder of a synchronous run, finished or not: its metrics.jsonl has the times, medians
              of all but its first two steps, and its rollouts/ the lengths of its completions.
  --sampler-share=X   share of the devices that the sampler is to get, above 0 and below 1, if the
              run used the same devices for sampling and learning. Times are divided by the shares.
  --sample-s=S, --learn-s=S, --sync-s=S   seconds of a step for sampling and scoring, for learning
              (everything else), and for new weights; default: those of the run, without one
              --sync-s=0.
  --rows=N    completions sampled at a time; default: engine.max_rows of all servers of the run.
  --row-cost=C   time that one more completion adds to a decoding step, relative to its fixed time;
              default {overlap.ROW_COST}: 250 completions double the time of a token.
  --tokens=N  mean length of completions in tokens, instead of the recorded lengths. Lengths are
              lognormal then; --sigma=S is the standard deviation of their logarithm, default 0.9.
  --max-tokens=N   limit of their lengths; default: 4 times the mean.
  --prompts=P, --group=G   prompts of a step and completions of each, with --tokens; default: those
              of the run, without one 32 and 16.
"""
_SKIPPED = 2  # first steps, which compile.
_SIGMA = 0.9  # of the logarithm of a length.
_STEPS = 16  # last steps whose lengths are read.


class NoTimes(ExpectedFailure, ValueError):
  """A run does not have what the forecast needs."""


_LARGEST = 1e15  # of the numbers in options.


def main(arguments: Sequence[str]) -> int:
  """Prints a forecast for each form of asynchronous training; returns the exit code.

  Args:
    arguments: Words after `grpo-jax overlap`.

  Raises:
    WrongUse: The arguments cannot be understood, or name no run.
    NoTimes: The run is not synchronous, or has too few steps.
  """
  options = _read(arguments)
  run = None
  if options.run is not None:
    try:
      run = report_data.load(options.run)
    except FileNotFoundError as error:
      raise WrongUse(str(error)) from error
  measured = _times(run, options)
  lengths = _lengths(run, options)
  rows = options.rows or rows_of(run.config if run else {}) or sum(map(len, lengths[0]))
  split = divided(measured, options.sampler_share)
  found = [
    (form, overlap.forecast(split, lengths, form, rows=rows, row_cost=options.row_cost))
    for form in overlap.FORMS
  ]
  screen = Console(width=None if sys.stdout.isatty() else 110, highlight=False, markup=False)
  tokens = [length for step in lengths for group in step for length in group]
  screen.print(
    f"synchronous: sample {measured.sample:.3g} s + learn {measured.learn:.3g} s"
    f" + new weights {measured.sync:.3g} s = {measured.synchronous:.3g} s a step;"
    f" completions of {statistics.fmean(tokens):.0f} tokens, at most {max(tokens)};"
    f" {rows} at a time"
  )
  if options.sampler_share is not None:
    screen.print(
      f"the sampler on {options.sampler_share:.0%} of the devices, the trainer on the others:"
      f" sample {split.sample:.3g} s, learn {split.learn:.3g} s"
    )
  screen.print(table(found, measured))
  return 0


def table(found: Sequence[tuple[overlap.Form, overlap.Forecast]], measured: overlap.Times) -> Table:
  """Returns the forecasts, a line for each form."""
  options = ("max_staleness", "order", "in_flight_updates")
  names = ("s a step", "times as fast", "engine idle", "trainer idle")
  shown = Table(*options, *names, box=box.SIMPLE)
  for form, each in found:
    shown.add_row(
      *(str(getattr(form, name)) for name in options),
      f"{each.step_s:.3g}",
      f"{measured.synchronous / each.step_s:.2f}",
      f"{each.engine_idle_share:.0%}",
      f"{each.trainer_idle_share:.0%}",
    )
  return shown


def times_of(run: Run) -> overlap.Times:
  """Returns the medians of what the parts of a step took, in seconds.

  Raises:
    NoTimes: The run is not synchronous, samples nothing, or has too few steps.
  """
  if run.config.get("mode") == "offline":
    raise NoTimes(f"{run.name}: a run of mode='offline' samples nothing that could overlap")
  k = report_data.flatten(run.config).get("rollout.max_staleness", 0)
  if k:
    raise NoTimes(
      f"{run.name}: the times of a synchronous run are needed, and this one has"
      f" rollout.max_staleness={k}: its perf/overlap_share says how much overlaps"
    )
  names = ("time/step_s", "time/sample_s")
  rows = [row for row in run.rows if all(_is_number(row.get(name)) for name in names)]
  rows = rows[_SKIPPED:]
  if not rows:
    raise NoTimes(
      f"{run.name}: more than {_SKIPPED} steps with {' and '.join(names)} are needed in"
      " metrics.jsonl, since the first ones compile"
    )
  synced = [row.get("time/sync_s") or 0.0 for row in rows]
  learned = [
    max(row["time/step_s"] - row["time/sample_s"] - sync, 0.0)
    for row, sync in zip(rows, synced, strict=True)
  ]
  return overlap.Times(
    sample=statistics.median(row["time/sample_s"] for row in rows),
    learn=statistics.median(learned),
    sync=statistics.median(synced),
  )


def lengths_of(run: Run) -> list[list[list[int]]]:
  """Returns the numbers of sampled tokens of the recorded completions, by step and group.

  Steps with fewer groups than the others, such as the last one of the data, are left out.
  """
  found = []
  for step in list(run.rollouts)[-_STEPS:]:
    groups: dict[int, list[int]] = {}
    for record in report_data.records(run.rollouts[step])[0]:
      with contextlib.suppress(*json_text.UNEXPECTED):
        mask = [int(each) for each in record["loss_mask"]]
        groups.setdefault(int(record["group"]), []).append(sum(mask))
    found.append(list(groups.values()))
  most = max(map(len, found), default=0)
  return [step for step in found if len(step) == most and most > 0]


def rows_of(config: Mapping[str, Any]) -> int | None:
  """Returns how many completions the engines of a run sample at a time; None: it is not known."""
  fields = report_data.flatten(config)
  rows = _whole(fields.get("engine.max_rows"))
  if rows is None or fields.get("engine.name") != "sglang":
    return rows
  addresses = fields.get("engine.sglang.addresses")
  given = len(addresses) if isinstance(addresses, list) else 0
  return rows * max(given, _whole(fields.get("engine.sglang.servers")) or 1)


def divided(times: overlap.Times, sampler_share: float | None) -> overlap.Times:
  """Returns the times with the devices divided between sampler and trainer; None: as they are."""
  if sampler_share is None:
    return times
  return dataclasses.replace(
    times, sample=times.sample / sampler_share, learn=times.learn / (1 - sampler_share)
  )


def _read(arguments: Sequence[str]) -> Any:
  """Returns the arguments, checked."""
  parser = Parser(USAGE)
  parser.add_argument("run", nargs="?", type=local_paths.argument, metavar="RUN")
  for name in ("--sampler-share", "--sample-s", "--learn-s", "--sync-s", "--tokens"):
    parser.add_argument(name, type=float)
  parser.add_argument("--sigma", type=float)
  parser.add_argument("--row-cost", type=float, default=overlap.ROW_COST)
  for name in ("--rows", "--max-tokens", "--prompts", "--group"):
    parser.add_argument(name, type=int)
  options = parser.read(arguments)
  above = ("sample_s", "tokens", "rows", "max_tokens", "prompts", "group")
  for name in (*above, "learn_s", "sync_s", "sigma", "row_cost"):
    value = getattr(options, name)
    bound = "above 0" if name in above else "at least 0"
    if value is not None and not (value > 0 if name in above else value >= 0):
      raise WrongUse(f"{_flag(name)}={value} must be {bound}")
    if value is not None and value > _LARGEST:
      bound = "finite" if value == math.inf else f"at most {_LARGEST:g}"
      raise WrongUse(f"{_flag(name)}={value} must be {bound}")
  share = options.sampler_share
  if share is not None and not 0 < share < 1:
    raise WrongUse(f"--sampler-share={share} must be above 0 and below 1")
  unused = [
    name
    for name in ("sigma", "max_tokens", "prompts", "group")
    if getattr(options, name) is not None
  ]
  if options.tokens is None and unused:
    raise WrongUse(f"{_flag(unused[0])} needs --tokens: recorded lengths are used")
  if options.run is None:
    wanted = ("sample_s", "learn_s", "tokens")
    missing = [_flag(name) for name in wanted if getattr(options, name) is None]
    if missing:
      raise WrongUse(f"name the folder of a run, or add {', '.join(missing)} (--help explains)")
  return options


def _times(run: Run | None, options: Any) -> overlap.Times:
  """Returns the times of the run, or those that were given."""
  given = {name: getattr(options, f"{name}_s") for name in ("sample", "learn", "sync")}
  given = {name: value for name, value in given.items() if value is not None}
  if run is None:
    return overlap.Times(**{"sync": 0.0, **given})
  return dataclasses.replace(times_of(run), **given)


def _lengths(run: Run | None, options: Any) -> overlap.StepLengths:
  """Returns recorded lengths, or lognormal ones of the given mean."""
  if options.tokens is None:
    assert run is not None  # checked above.
    if found := lengths_of(run):
      return found
    raise NoTimes(
      f"{run.name}: has no rollouts/step_*.jsonl with the lengths of completions: add --tokens=N,"
      " their mean length"
    )
  sampled = report_data.flatten(run.config) if run else {}
  return overlap.lognormal_lengths(
    steps=_STEPS,
    groups=options.prompts or _whole(sampled.get("rollout.prompts_per_step")) or 32,
    group_size=options.group or _whole(sampled.get("rollout.group_size")) or 16,
    mean=options.tokens,
    sigma=_SIGMA if options.sigma is None else options.sigma,
    longest=options.max_tokens or math.ceil(4 * options.tokens),
    seed=0,
  )


def _flag(name: str) -> str:
  return f"--{name.replace('_', '-')}"


def _whole(value: Any) -> int | None:
  """Returns a stored number of at least 1; None if the value is something else."""
  return value if type(value) is int and value >= 1 else None


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and math.isfinite(value)
