"""The figures of a report: which metrics each one draws, and their curves."""

import dataclasses
import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax import metrics
from grpo_jax.report.run_data import RunData, curve, finite, is_offline

MAX_POINTS = 1500  # points of a curve; longer curves are averaged.


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
  low = [None if y is None or s is None else finite(y - s) for y, s in pairs]
  high = [None if y is None or s is None else finite(y + s) for y, s in pairs]
  return {"lo": low, "hi": high, "std": [s for _, s in pairs]}


def _rest(run: RunData, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns the time of a step that no part accounts for."""
  steps, totals = _thinned(*curve(run, "time/step_s"))
  known = [dict(zip(part["x"], part["y"], strict=True)) for part in parts]
  rest = [
    finite(max(0.0, (total or 0.0) - sum(part.get(step) or 0.0 for part in known)))
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
  return steps[::every], [finite(float(np.mean(block))) if block else None for block in kept]


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
