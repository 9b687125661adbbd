"""Turns recorded runs into medians, ratios and a table. Pure; standard library only.

A result is the output of compare.py: `rounds`, a list of {program: run}, and `cold`, the runs that
compiled before them, {program: run}. A run is the record of record.py with `process`, the usage
from processes.py.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

OURS = "ours"  # with the defaults: completions whose advantage is 0 are not computed.
OURS_ALL = "ours-all"  # every completion is computed, as in the peers.
Run = Mapping[str, Any]


def steady(run: Run) -> Sequence[Mapping[str, float]]:
  """Returns the steps after the first, which compiles; the first if there is no other."""
  return run["steps"][1:] or run["steps"]


def median_of_steps(run: Run, name: str) -> float:
  """Returns the median of a quantity over the steady steps of one run."""
  return statistics.median(step[name] for step in steady(run))


def seconds_per_token(run: Run) -> float:
  """Returns seconds of the whole step per completion token, over the steady steps."""
  steps = steady(run)
  return sum(step["wall_s"] for step in steps) / sum(step["completion_tokens"] for step in steps)


def outside_steps(run: Run) -> float:
  """Returns the seconds of the process outside of steps: imports, loading, saving."""
  return run["process"]["wall_s"] - sum(step["wall_s"] for step in run["steps"])


@dataclasses.dataclass(frozen=True)
class Spread:
  """Smallest, median and largest of one number per round."""

  low: float
  median: float
  high: float


def spread(values: Sequence[float]) -> Spread:
  """Returns the spread of at least one value."""
  return Spread(min(values), statistics.median(values), max(values))


def ratios(
  rounds: Sequence[Mapping[str, Run]],
  quantity: Callable[[Run], float],
  peer: str,
  ours: str = OURS,
) -> Spread:
  """Returns peer ÷ ours of a quantity: one ratio per round, of runs close in time."""
  return spread([quantity(turn[peer]) / quantity(turn[ours]) for turn in rounds])


@dataclasses.dataclass(frozen=True)
class Work:
  """Floating point operations that a step needs at least, in 1e9."""

  sampling: float
  update: float


def useful_work(step: Mapping[str, float], run: Run, model: Mapping[str, Any]) -> Work:
  """Counts the operations that a step needs, whatever program runs it.

  Each prompt goes through the layers once for its whole group, each completion
  token once, padding never; the head sees completion tokens only; backward costs
  twice forward; nothing is recomputed. With W weights in the layers' matrices,
  V·D in the head's, n tokens, c completion tokens and s keys attended to in all:

      forward = 2 W n + 2 V D c + 4 L H K s,   sampling = forward,   update = 3 forward

  where H heads of size K attend; s assumes that all prompts of the step have the same length,
  and all completions as well.

  Args:
    step: Step of `run`.
    run: Run with the number of prompts and the group size.
    model: Content of a Hugging Face `config.json`.
  """
  prompts, group = run["workload"]["prompts"], run["workload"]["group"]
  prompt_tokens, completion_tokens = step["prompt_tokens"], step["completion_tokens"]
  prompt_length = prompt_tokens / prompts
  completion_length = completion_tokens / (prompts * group)
  attended = prompt_tokens * prompt_length / 2
  attended += completion_tokens * (prompt_length + completion_length / 2)

  width, heads = model["hidden_size"], model["num_attention_heads"]
  head_size = model.get("head_dim") or width // heads
  kv_heads = model.get("num_key_value_heads") or heads
  attention_weights = 2 * width * head_size * (heads + kv_heads)  # query, output; key, value.
  layers = model["num_hidden_layers"]
  weights = layers * (attention_weights + 3 * width * model["intermediate_size"])
  forward = 2 * weights * (prompt_tokens + completion_tokens)
  forward += 2 * model["vocab_size"] * width * completion_tokens
  forward += 4 * layers * heads * head_size * attended
  return Work(sampling=forward / 1e9, update=3 * forward / 1e9)


def rates(run: Run, model: Mapping[str, Any]) -> Work:
  """Returns the GFLOP/s of useful work that a run reached in its steady steps."""
  steps = steady(run)
  works = [useful_work(step, run, model) for step in steps]
  return Work(
    sampling=sum(w.sampling for w in works) / sum(step["generate_s"] for step in steps),
    update=sum(w.update for w in works) / sum(step["train_s"] for step in steps),
  )


def ceiling_of(result: Mapping[str, Any], dtype: str) -> float:
  """Returns the best GFLOP/s measured for a type, by any library, at any time."""
  return max(
    rate
    for measured in result["ceilings"]
    for name, rate in measured.items()
    if name.endswith(f"_{dtype}")
  )


def over_rounds(values: Sequence[float], form: Callable[[float], str]) -> str:
  """Returns the median of a value for each round, then smallest and largest: "2 (1 to 4)"."""
  found = spread(values)
  low, median, high = map(form, (found.low, found.median, found.high))
  return median if low == high else f"{median} ({low} to {high})"


def program_row(result: Mapping[str, Any], program: str, runs: Sequence[Run]) -> list[str]:
  """Returns the cells of a program's row, each over its runs; see `over_rounds`.

  Args:
    result: Result of the benchmark, for the model and the ceiling.
    program: Name of the row.
    runs: Runs of the program.
  """
  dtype = runs[0]["workload"]["dtype"]
  ceiling = ceiling_of(result, dtype)
  reached = [rates(run, result["model"]) for run in runs]
  medians = lambda name: [median_of_steps(run, name) for run in runs]
  seconds, whole, share = "{:.2f}".format, "{:.0f}".format, "{:.0%}".format
  return [
    program,
    dtype,
    over_rounds(medians("wall_s"), seconds),
    over_rounds(medians("generate_s"), seconds),
    over_rounds(medians("train_s"), seconds),
    over_rounds([run["steps"][0]["wall_s"] for run in runs], seconds),
    over_rounds([outside_steps(run) for run in runs], seconds),
    over_rounds(medians("completion_tokens"), whole),
    over_rounds(medians("trained_tokens"), whole),
    over_rounds([run["process"]["peak_mib"] for run in runs], whole),
    over_rounds([work.sampling for work in reached], whole),
    over_rounds([work.sampling / ceiling for work in reached], share),
    over_rounds([work.update for work in reached], whole),
    over_rounds([work.update / ceiling for work in reached], share),
  ]


def program_table(result: Mapping[str, Any], rounds: Sequence[Mapping[str, Run]]) -> str:
  """Lays out a row for each program that ran in these rounds."""
  rows = [program_row(result, name, [turn[name] for turn in rounds]) for name in rounds[0]]
  return table(PROGRAM_COLUMNS, rows)


PROGRAM_COLUMNS = [
  "program",
  "dtype",
  "step s",
  "sample s",
  "update s",
  "first step s",
  "outside steps s",
  "completion tokens",
  "trained tokens",
  "peak MiB",
  "sample GFLOP/s",
  "sample of ceiling",
  "update GFLOP/s",
  "update of ceiling",
]

RATIO_COLUMNS = ["peer", "ours", "peer ÷ ours", "lowest round", "median", "highest round"]

# Ratios are peer ÷ ours, so that more than 1 means that we are better; for memory as well.
RATIOS: dict[str, Callable[[Run], float]] = {
  "step": lambda run: median_of_steps(run, "wall_s"),
  "sample": lambda run: median_of_steps(run, "generate_s"),
  "update": lambda run: median_of_steps(run, "train_s"),
  "step, per completion token": seconds_per_token,
  "whole process": lambda run: run["process"]["wall_s"],
  "peak memory": lambda run: run["process"]["peak_mib"],
}


def ratio_rows(result: Mapping[str, Any]) -> list[list[str]]:
  """Returns, for each peer, form of ours and quantity: smallest, median, largest round."""
  programs = list(result["rounds"][0])
  forms = [program for program in programs if program in (OURS, OURS_ALL)]
  pairs = [(peer, ours) for peer in programs if peer not in forms for ours in forms]
  rows = []
  for peer, ours in pairs:
    for name, quantity in RATIOS.items():
      found = ratios(result["rounds"], quantity, peer, ours)
      numbers = [f"{x:.2f}" for x in (found.low, found.median, found.high)]
      rows.append([peer, ours, name, *numbers])
  return rows


def differences(result: Mapping[str, Any]) -> list[str]:
  """Lists what makes the programs' work unequal: other prompts, another number of steps."""
  found = []
  for number, turn in enumerate(result["rounds"]):
    first, *others = turn
    expected = [step["prompt_tokens"] for step in turn[first]["steps"]]
    for program in others:
      prompts = [step["prompt_tokens"] for step in turn[program]["steps"]]
      if prompts != expected:
        found.append(
          f"round {number}: tokens of the prompts, step by step: {program} {prompts}, "
          f"{first} {expected}"
        )
  return found


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Lays out a table in Markdown, columns padded to equal width."""
  lines = [list(columns), *map(list, rows)]
  widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
  padded = [
    "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
    for line in lines
  ]
  rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
  return "\n".join([padded[0], rule, *padded[1:]])


def counted(count: int, what: str) -> str:
  """Returns a number with its noun: "1 round", "2 rounds"."""
  return f"{count} {what}" if count == 1 else f"{count} {what}s"


def text(result: Mapping[str, Any]) -> str:
  """Returns the whole summary of a result."""
  ceilings = [
    f"{name}: " + ", ".join(f"{measured[name]:.0f}" for measured in result["ceilings"])
    for name in result["ceilings"][0]
  ]
  parts = [
    f"{result['machine']['processor']}, {result['machine']['cores']} cores; "
    f"{counted(len(result['rounds']), 'round')}; medians over the steps after the first, then over"
    " rounds (smallest to largest round).",
    "Matrix products of this machine, GFLOP/s, before and after: " + "; ".join(ceilings),
  ]
  if cold := result.get("cold"):  # results from before 2026-11-22 have none.
    parts.append("Nothing compiled before, not counted below:\n\n" + program_table(result, [cold]))
    parts.append("Compiled before:")
  parts.append(program_table(result, result["rounds"]))
  compared = ratio_rows(result)
  if compared:
    parts.append(table(RATIO_COLUMNS, compared))
  parts += [f"NOT EQUAL WORK: {line}" for line in differences(result)]
  return "\n\n".join(parts)
