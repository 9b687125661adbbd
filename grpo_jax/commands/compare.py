"""`grpo-jax compare RUN RUN …`: runs side by side, and their curves on one page."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from grpo_jax import report
from grpo_jax.commands.arguments import Parser, WrongUse
from grpo_jax.files import local_paths
from grpo_jax.metrics import definition
from grpo_jax.report import run_data
from grpo_jax.report.run_data import RunData
from grpo_jax.run_folder import console

USAGE = """\
Prints the metrics of runs side by side, start → end, and the config fields that differ.

  grpo-jax compare RUN RUN [RUN ...] [--html=FILE] [--all]

  RUN      folder of a run, finished or not.
  --html   file to which a page with the curves of all runs is written.
  --all    every metric; without it, those that are looked at first.
"""
MAIN = (  # shown without --all; eval/*/accuracy comes before them.
  "rollout/reward_mean",
  "rollout/no_signal_share",
  "rollout/truncated_share",
  "rollout/completion_tokens_mean",
  "train/entropy",
  "train/kl_to_reference",
  "train/grad_norm",
  "mismatch/abs_logprob_max",
  "mismatch/token_mult_prob_error",
  "time/step_s",
  "time/sample_s",
  "time/learn_s",
  "perf/tokens_per_s",
  "perf/peak_rss_gib",
)


def cell(run: RunData, name: str) -> str:
  """Returns first → last for an evaluation, otherwise means over the first and the last tenth."""
  values = [value for value in run_data.curve(run, name)[1] if value is not None]
  if not values:
    return console.DASH
  tenth = 1 if name.startswith("eval/") else max(1, len(values) // 10)
  known = definition(name)
  form = console.share if known and known.unit == "share" else console.number
  first, last = (form(float(np.mean(part))) for part in (values[:tenth], values[-tenth:]))
  return f"{first} → {last}" if len(values) > 1 else last


def compare(runs: Sequence[RunData], *, every_metric: bool) -> list[Table]:
  """Returns the tables of metrics and of the config fields that differ."""
  recorded = sorted({name for run in runs for row in run.rows for name in row} - {"step"})
  chosen = [n for n in recorded if n.startswith("eval/") and ("accuracy" in n or "pass@" in n)]
  chosen += [name for name in MAIN if name in recorded]
  table = Table("metric", "unit", *(run.name for run in runs), box=box.SIMPLE, title="start → end")
  table.add_row("steps", "count", *(str(sum(MAIN[0] in row for row in run.rows)) for run in runs))
  for name in recorded if every_metric else chosen:
    known = definition(name)
    table.add_row(name, known.unit if known else "", *(cell(run, name) for run in runs))
  configs = [run_data.flatten(run.config) for run in runs]
  fields = Table("config field", *(run.name for run in runs), box=box.SIMPLE, title="what differs")
  for name in sorted({name for config in configs for name in config}):
    values = [str(config.get(name, console.DASH)) for config in configs]
    if len(set(values)) > 1:
      fields.add_row(name, *values)
  return [table, fields]


def main(arguments: Sequence[str]) -> int:
  """Prints the comparison; returns the exit code.

  Args:
    arguments: Words after `grpo-jax compare`.

  Raises:
    WrongUse: The arguments cannot be understood, or name no run.
  """
  parser = Parser(USAGE)
  parser.add_argument("runs", nargs="+", type=local_paths.argument, metavar="RUN")
  parser.add_argument("--html", type=local_paths.argument, metavar="FILE")
  parser.add_argument("--all", action="store_true")
  options = parser.read(arguments)
  if len(options.runs) < 2:
    raise WrongUse("name at least two run folders")
  try:
    runs = distinct([run_data.load(folder) for folder in options.runs], options.runs)
  except FileNotFoundError as error:
    raise WrongUse(str(error)) from error
  width = None if sys.stdout.isatty() else 40 + 24 * len(runs) + 40
  screen = Console(width=width, highlight=False, markup=False)
  for table in compare(runs, every_metric=options.all):
    screen.print(table)
  if options.html:
    options.html.write_text(report.render_comparison(runs), encoding="utf-8")
    screen.print(f"curves: {options.html}")
  return 0


def distinct(runs: Sequence[RunData], folders: Sequence[Path]) -> list[RunData]:
  """Returns the runs; folders with the same name are distinguished by their paths."""
  names = [run.name for run in runs]
  return [
    RunData(str(folder), run.config, run.rows, run.rollouts, run.problems, run.evaluations)
    if names.count(run.name) > 1
    else run
    for run, folder in zip(runs, folders, strict=True)
  ]
