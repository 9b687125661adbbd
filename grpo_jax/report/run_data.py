"""Reads from a run folder what a report shows: curves, outcome, sampled groups."""

import dataclasses
import fnmatch
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax import metrics
from grpo_jax.errors import ExpectedFailure
from grpo_jax.run_folder import console, evaluation_log
from grpo_jax.values import json_numbers, json_text

MAX_POINTS = 1500  # points of a curve; longer curves are averaged.
MAX_BYTES = 3_000_000  # size of all sampled groups together.
MAX_EVALUATION_BYTES = 1_000_000  # size of the groups of evaluations, where there are others.
MAX_STEPS = 24  # number of steps whose groups are shown.
MAX_GROUPS = 6  # per step.
MAX_ROLLOUTS = 8  # per group.
MAX_TOKENS = 500  # per completion.
MAX_PROMPT = 4000  # characters.
MAX_LABEL = 200  # characters of an identifier, of the name of a reward, ...
MAX_COMPONENTS = 30  # of a reward.
MAX_SCAN = 8_000_000  # characters of a file that are read to find groups to show.


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


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
  """One figure. Each curve has a label and the name or pattern of a metric."""

  title: str
  curves: Mapping[str, str]  # a pattern gives one curve per metric, labelled by its name.
  scale: str = "linear"  # or "log".
  kind: str = "line"  # or "stack".
  band: str = ""  # metric of the standard deviation of the only curve.
  usual: float | None = None  # the panel is not drawn if all values are equal to this.
  tolerance: float = 0.0  # largest distance from `usual`.
  # Sentence that replaces such a panel; {} is the number of steps that it is about.
  quiet: str = ""
  quiet_from: int = 0  # first step that the sentence is about.
  quiet_of: str = "*"  # pattern of the metrics that the sentence is about.


def load(folder: str | Path) -> RunData:
  """Reads a run folder; missing or broken parts are left out and named in `problems`.

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
      rows, broken = metrics.parse_lines((folder / "metrics.jsonl").read_text(errors="replace"))
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
  pairs = [(row["step"], _finite(row[name])) for row in run.rows if name in row]
  return [step for step, _ in pairs], [value for _, value in pairs]


def is_offline(run: RunData) -> bool:
  """Returns whether the run learned from recorded groups."""
  return run.config.get("mode") == "offline"


def failures(run: RunData) -> dict[str, int]:
  """Counts the attempts of all recorded steps that failed, by kind; the most frequent first."""
  prefix = "rollout/errors/"
  kinds: Counter[str] = Counter()
  for row in run.rows:
    found = {name: _finite(row[name]) for name in row if name.startswith(prefix)}
    kinds.update({n.removeprefix(prefix): int(count) for n, count in found.items() if count})
  return dict(kinds.most_common())


def panels(runs: Sequence[RunData]) -> list[dict[str, Any]]:
  """Returns the main figures, except those for which no run has a finite, unusual value.

  With several runs each curve is drawn once per run, and times are shown as a sum.
  """
  chosen = PANELS if len(runs) == 1 else [*(p for p in PANELS if p.kind == "line"), STEP_TIME]
  if all(map(is_offline, runs)):
    chosen = [OFFLINE_PANELS.get(one.title, one) for one in chosen]
  figures = (_figure(runs, one) for one in chosen if not _is_usual(runs, one))
  return [figure for figure in figures if figure["series"]]


def quiet_panels(runs: Sequence[RunData]) -> list[str]:
  """Returns a sentence for each figure that is not drawn since its curves are flat.

  There is none for what was not measured in any step that the sentence is about.
  """
  flat = [one for one in PANELS if one.quiet and _is_usual(runs, one)]
  counts = [len(_measured(runs, one)) for one in flat]
  steps = ["1 step" if count == 1 else f"{count} steps" for count in counts]
  return [one.quiet.format(of) for one, count, of in zip(flat, counts, steps, strict=True) if count]


def other_panels(runs: Sequence[RunData]) -> list[dict[str, Any]]:
  """Returns one figure for each metric that is not in a main figure, by name."""
  shown = [pattern for one in PANELS for pattern in (*one.curves.values(), one.band)]
  names = sorted({name for run in runs for row in run.rows for name in row} - {"step"})
  left = [n for n in names if not any(fnmatch.fnmatchcase(n, pattern) for pattern in shown)]
  figures = (_figure(runs, Panel(name, {name: name})) for name in left)
  return [figure for figure in figures if figure["series"]]


def samples(run: RunData) -> tuple[list[dict[str, Any]], str]:
  """Returns the groups that the page shows, by step, and a note on what was left out.

  Steps are spread over the run, and a file is read only as far as it is shown. If the size
  limit is exceeded, steps in between are left out first. Evaluations follow the steps; they have
  the name of their set and a size limit of their own.
  """
  steps = [({"step": step}, path) for step, path in run.rollouts.items()]
  evaluated = [({"step": step, "set": name}, path) for name, step, path in run.evaluations]
  if steps and evaluated:
    limits = (MAX_BYTES - MAX_EVALUATION_BYTES, MAX_EVALUATION_BYTES)
  else:
    limits = (MAX_BYTES, MAX_BYTES)
  found, unreadable = _shown_groups(steps, limits[0])
  of_evaluations, more_unreadable = _shown_groups(evaluated, limits[1])
  unreadable += more_unreadable
  if not found and not of_evaluations:
    return [], "No sampled groups were recorded." if not unreadable else "No group was readable."
  parts = [f"{len(found)} of {len(steps)} recorded steps"] if steps else []
  parts += [f"{len(of_evaluations)} of {len(evaluated)} evaluations"] if evaluated else []
  names = ["rollouts/"] * bool(steps) + ["evaluations/"] * bool(evaluated)
  folders = f"the folder{'s' * (len(names) > 1)} {' and '.join(names)}"
  note = (
    f"{', '.join(parts)}, at most {MAX_GROUPS} groups per step,"
    f" {MAX_ROLLOUTS} completions per group, {MAX_TOKENS} tokens per completion;"
    f" all of them are in {folders} of the run."
  )
  return [*found, *of_evaluations], note + (
    f" {unreadable} lines could not be read." if unreadable else ""
  )


def _shown_groups(
  files: Sequence[tuple[dict[str, Any], Path]], max_bytes: int
) -> tuple[list[dict[str, Any]], int]:
  """Returns what is shown of some files, in their order, and how many lines are broken."""
  found: dict[int, dict[str, Any]] = {}
  size = unreadable = 0
  for place in _spread(list(range(len(files))), MAX_STEPS):
    facts, path = files[place]
    groups, broken = _read_groups(path)
    unreadable += broken
    sizes = size + np.cumsum([len(json.dumps(group)) for group in groups])
    fitting = [group for group, total in zip(groups, sizes, strict=True) if total <= max_bytes]
    if fitting:
      found[place] = {**facts, "groups": fitting}
      size = int(sizes[len(fitting) - 1])
    if len(fitting) < len(groups):
      break
  return [found[place] for place in sorted(found)], unreadable


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


def _finite(value: Any) -> float | None:
  number = json_numbers.finite(value)
  return None if number is None else float(f"{number:.6g}")


def _figure(runs: Sequence[RunData], spec: Panel) -> dict[str, Any]:
  """Returns the figure in the form that the page's script expects."""
  series, described = [], None
  for run in runs:
    for label, name in _resolved(run, spec):
      described = described or metrics.definition(name)
      steps, values = _thinned(*curve(run, name))
      if all(value is None for value in values):
        continue
      one: dict[str, Any] = {"label": label, "x": steps, "y": values}
      if len(runs) > 1:
        one["label"] = run.name if len(spec.curves) == 1 else f"{run.name}: {label}"
      elif spec.band:
        one |= _band(*_thinned(*curve(run, spec.band)), one)
      series.append(one)
    if spec.kind == "stack" and series:
      series.append(_rest(run, series))
  alone = len(spec.curves) == 1 and described is not None
  return {
    "title": spec.title,
    "unit": described.unit if described else "",
    "note": described.meaning if described and alone else "",
    "scale": spec.scale,
    "kind": spec.kind,
    "named": not alone or any("*" in pattern for pattern in spec.curves.values()),
    "series": series,
  }


def _is_usual(runs: Sequence[RunData], spec: Panel) -> bool:
  """Returns whether all values of all curves are the usual, uninteresting one.

  A value that is not finite is not usual.
  """
  if spec.usual is None:
    return False
  values = (value for *_, value in _points(runs, spec))
  return all(v is not None and abs(v - spec.usual) <= spec.tolerance for v in values)


def _measured(runs: Sequence[RunData], spec: Panel) -> set[tuple[int, int]]:
  """Returns (number of the run, step) of all values that the sentence of a panel is about."""
  return {
    (number, step)
    for number, name, step, _ in _points(runs, spec)
    if step >= spec.quiet_from and fnmatch.fnmatchcase(name, spec.quiet_of)
  }


def _points(runs: Sequence[RunData], spec: Panel) -> Iterator[tuple[int, str, int, float | None]]:
  """Yields (number of the run, metric, step, value) of all curves; None: it is not finite."""
  for number, run in enumerate(runs):
    for _, name in _resolved(run, spec):
      for step, value in zip(*curve(run, name), strict=True):
        yield number, name, step, value


def _resolved(run: RunData, spec: Panel) -> Iterator[tuple[str, str]]:
  """Yields (label, metric) of the curves of a panel that a run has."""
  names = sorted({name for row in run.rows for name in row})
  for label, pattern in spec.curves.items():
    for name in names:
      if name == pattern:
        yield label, name
      elif "*" in pattern and fnmatch.fnmatchcase(name, pattern):
        yield name.partition("/")[2], name


def _band(steps: list[int], stds: list[float | None], one: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a band of one standard deviation around a curve; empty where either is unknown."""
  std = dict(zip(steps, stds, strict=True))
  pairs = [(y, std.get(x)) for x, y in zip(one["x"], one["y"], strict=True)]
  low = [None if y is None or s is None else _finite(y - s) for y, s in pairs]
  high = [None if y is None or s is None else _finite(y + s) for y, s in pairs]
  return {"lo": low, "hi": high, "std": [s for _, s in pairs]}


def _rest(run: RunData, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns the time of a step that no part accounts for."""
  steps, totals = _thinned(*curve(run, "time/step_s"))
  known = [dict(zip(part["x"], part["y"], strict=True)) for part in parts]
  rest = [
    _finite(max(0.0, (total or 0.0) - sum(part.get(step) or 0.0 for part in known)))
    for step, total in zip(steps, totals, strict=True)
  ]
  return {"label": "other", "x": steps, "y": rest}


def _thinned(steps: list[int], values: list[float | None]) -> tuple[list[int], list[float | None]]:
  """Returns at most MAX_POINTS points: means over neighbours, at the step of the first."""
  every = math.ceil(len(steps) / MAX_POINTS)
  if every <= 1:
    return steps, values
  blocks = [values[i : i + every] for i in range(0, len(values), every)]
  kept = [[v for v in block if v is not None] for block in blocks]
  return steps[::every], [_finite(float(np.mean(block))) if block else None for block in kept]


def _spread(steps: Sequence[int], count: int) -> list[int]:
  """Returns at most `count` of the steps: last, first, then ever finer in between."""
  places = np.unique(np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int))
  order, parts = [], 1
  while len(order) < len(places):
    for i in range(parts, -1, -1):
      place = int(places[round(i * (len(places) - 1) / parts)])
      if place not in order:
        order.append(place)
    parts *= 2
  return [steps[place] for place in order]


def _read_groups(path: Path) -> tuple[list[dict[str, Any]], int]:
  """Returns some groups of a rollout file as the page shows them, and the number of broken lines.

  Groups with logprobs of the trainer come first, since those were learned from.
  """
  groups: dict[int, dict[str, Any]] = {}
  broken = size = 0
  with open(path, encoding="utf-8", errors="replace") as file:
    for line in file:
      size += len(line)
      try:
        record = json_text.parsed_object(line, is_strict=True)
        number = record["group"]
        if number not in groups and _are_enough(groups.values(), size):
          break
        group = groups.setdefault(number, _group(record))
        group["size"] += 1
        if len(group["rollouts"]) < MAX_ROLLOUTS:
          group["rollouts"].append(_rollout(record))
      except json_text.UNEXPECTED:
        broken += 1
  shown = [group for group in groups.values() if group["rollouts"]]
  return sorted(shown, key=lambda group: not _is_compared(group))[:MAX_GROUPS], broken


def _are_enough(groups: Collection[dict[str, Any]], size: int) -> bool:
  """Returns whether reading stops after these groups and `size` characters of a file."""
  compared = sum(map(_is_compared, groups))
  return compared >= MAX_GROUPS or (len(groups) >= MAX_GROUPS and size > MAX_SCAN)


def _is_compared(group: Mapping[str, Any]) -> bool:
  """Returns whether a token of the group has a logprob of the trainer as well as the engine's."""
  return any(rollout["delta"] is not None for rollout in group["rollouts"])


def _group(record: Mapping[str, Any]) -> dict[str, Any]:
  expected = record.get("expected_answer")  # missing in older files.
  return {
    "id": console.shorten(record["prompt_id"], MAX_LABEL),
    "environment": console.shorten(record["environment"], MAX_LABEL),
    "prompt": console.shorten(record["prompt"], MAX_PROMPT) + console.cut_mark(record),
    "expected": None if expected is None else console.shorten(str(expected), MAX_PROMPT),
    "size": 0,
    "rollouts": [],
  }


def _rollout(record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns one completion, cut to MAX_TOKENS; in one piece if token texts are missing."""
  texts = record["token_texts"]
  length = len(record["completion_ids"])
  versions = [
    v for v, kept in zip(record["weight_versions"], record["loss_mask"], strict=True) if kept
  ]
  shown: dict[str, Any] = {
    "index": record["rollout"],
    "reward": record["reward"],
    "advantage": record["advantage"],
    "finish": record["finish_reason"],
    "turns": record["turns"],
    "error": console.shorten(record.get("error") or "", 5 * MAX_LABEL),
    "components": _components(record["reward_components"]),
    "length": length,
    "omitted": 0,
    "sampled": console.sampled_from(versions),
    "texts": [console.shorten(record["completion"], 5 * MAX_TOKENS)],
    "engine": None,
    "delta": None,
    "mask": None,
  }
  if texts is None:
    return shown
  engine, policy = record["behavior_logprobs"][:MAX_TOKENS], record["policy_logprobs"]
  mask = record["loss_mask"][:MAX_TOKENS]
  shown |= {
    "texts": [console.shorten(text, MAX_LABEL) for text in texts[:MAX_TOKENS]],
    "omitted": max(0, length - MAX_TOKENS),
    "engine": [None if v is None else round(v, 4) for v in engine],
    "mask": None if all(mask) else mask,
  }
  if policy is not None:
    delta = [
      None if p is None or e is None or not kept else float(f"{p - e:.3g}")
      for p, e, kept in zip(policy, engine, mask, strict=False)
    ]
    shown["delta"] = None if all(d is None for d in delta) else delta
  return shown


def _components(rewards: Mapping[str, Any]) -> dict[str, Any]:
  first = list(rewards.items())[:MAX_COMPONENTS]
  return {console.shorten(name, MAX_LABEL): value for name, value in first}


PANELS: tuple[Panel, ...] = (
  Panel("Reward, mean ± std", {"reward": "rollout/reward_mean"}, band="rollout/reward_std"),
  Panel(
    "Evaluation",
    {"accuracy": "eval/*/accuracy", "pass@K": "eval/*/pass@[!1]*", "pass@1x": "eval/*/pass@1?*"},
  ),
  Panel(
    "Groups and completions without signal",
    {
      "nothing to learn": "signal/lost_share",
      "groups of equal rewards": "rollout/no_signal_share",
      "truncated": "rollout/truncated_share",
      "not scored": "rollout/failed_share",
    },
  ),
  Panel(
    "Completion length",
    {
      "mean": "rollout/completion_tokens_mean",
      "mean of those that ended": "rollout/completion_tokens_stopped_mean",
      "longest": "rollout/completion_tokens_max",
    },
  ),
  Panel(
    "Turns of a conversation",
    {
      "mean": "rollout/turns_mean",
      "95th percentile": "rollout/turns_p95",
      "maximum": "rollout/turns_max",
    },
    usual=1.0,
  ),
  Panel(
    "Staleness",
    {"mean": "rollout/staleness_mean", "oldest token": "rollout/staleness_max"},
    usual=0.0,
  ),
  Panel("Attempts that failed, by kind", {"kind": "rollout/errors/*"}),
  Panel("Completions with nothing to learn from, by reason", {"reason": "signal/lost/*"}),
  Panel(
    "Entropy",
    {
      "of learned tokens": "train/entropy",
      "of all completions": "all/entropy",
      "of all completions, by their own logprobs": "rollout/behavior_entropy",
    },
  ),
  Panel(
    "Distance from the initial weights",
    {
      "KL to the initial weights, all completions": "all/kl_to_initial",
      "KL to the reference policy": "train/kl_to_reference",
    },
    usual=0.0,
    quiet="The policy has not moved from the initial weights: the distance is 0 wherever it was"
    " measured after the first update ({}).",
    quiet_from=1,
    quiet_of="all/kl_to_initial",  # a reference policy that is updated is near the policy.
  ),
  Panel(
    "Mismatch of engine and trainer",
    {
      "largest |Δ logprob|": "mismatch/abs_logprob_max",
      "mean |Δ logprob|": "mismatch/abs_logprob_mean",
      "KL(engine ‖ trainer)": "mismatch/gen_kl_error",
      "largest, all completions": "all/abs_logprob_max",
    },
    scale="log",
  ),
  Panel(
    "Multiplicative probability error",
    {"error": "mismatch/token_mult_prob_error"},
    usual=1.0,
    tolerance=1e-3,
    quiet="Engine and trainer agree: mismatch/token_mult_prob_error is within 0.001 of 1 wherever"
    " it was measured ({}).",
  ),
  Panel("Gradient norm", {"gradient norm": "train/grad_norm"}, scale="log"),
  Panel(
    "Tokens clipped",
    {
      "low": "train/clip_low_share",
      "high": "train/clip_high_share",
      "dual": "train/clip_dual_share",
    },
    usual=0.0,
    quiet="No token was clipped wherever something was learned ({}; with one update per step, every"
    " ratio is 1).",
  ),
  Panel(
    "Time of a step",
    {
      "sample": "time/sample_s",
      "assemble": "time/assemble_s",
      "score": "time/score_s",
      "monitor": "time/monitor_s",
      "learn": "time/learn_s",
      "sync": "time/sync_s",
    },
    kind="stack",
  ),
  Panel(
    "Work of the processes in a step, without waiting",
    {
      "slowest": "hosts/busy_s_max",
      "median": "hosts/busy_s_median",
      "fastest": "hosts/busy_s_min",
    },
  ),
  Panel("Speed", {"tokens/s": "perf/tokens_per_s"}),
  Panel(
    "Memory",
    {
      "fullest device": "perf/device_peak_gib",
      "host process": "perf/peak_rss_gib",
      "largest host process": "hosts/peak_rss_gib_max",
    },
  ),
)
STEP_TIME = Panel("Time of a step", {"step": "time/step_s"})
# Replacements of panels, by title, for runs that do not sample.
OFFLINE_PANELS = {
  "Evaluation": Panel(
    "Ranking of held-out groups",
    {
      "pairs": "eval/*/accuracy",
      "exact": "eval/*/exact_accuracy",
      "best": "eval/*/best_accuracy",
      "consistency": "eval/*/consistency",
    },
  ),
  "Mismatch of engine and trainer": Panel(
    "Policy against the behavior policy",
    {
      "largest |Δ logprob|": "mismatch/abs_logprob_max",
      "mean |Δ logprob|": "mismatch/abs_logprob_mean",
      "KL(behavior ‖ policy)": "mismatch/gen_kl_error",
    },
    scale="log",
  ),
}
