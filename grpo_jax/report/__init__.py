"""The page of a run: one self-contained HTML file with curves and sampled groups.

`run_data.load` reads a run folder, `render` makes the page (pure), `write` does both and stores
report.html in the folder. Text that models wrote is embedded as JSON with every "<" escaped, and
shown as plain text; a content security policy allows only the page's own scripts.

    python -m grpo_jax.report RUN_DIR
"""

import base64
import hashlib
import html
import json
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax import processes
from grpo_jax.files import local_paths
from grpo_jax.files.atomic import replace_file
from grpo_jax.groups import learning_signal
from grpo_jax.report import figures, run_data, sampled_groups
from grpo_jax.report.run_data import RunData
from grpo_jax.run_folder import console


class Live(NamedTuple):
  """What a page that renews itself says of its run."""

  sentence: str
  is_running: bool


USAGE = "usage: python -m grpo_jax.report RUN_DIR   writes RUN_DIR/report.html"


def write(folder: str | Path) -> Path:
  """Writes report.html of a run folder, finished or not, and returns its path.

  If a run has several processes, only the main one writes it.

  Raises:
    run_data.NoRunError: The folder does not exist, or no run has written to it.
  """
  path = Path(folder) / "report.html"
  if processes.is_main():
    replace_file(path, [render(run_data.load(folder))])
  return path


def render(run: RunData, *, live: Live | None = None) -> str:
  """Returns the page of one run.

  Args:
    run: Content of the run folder.
    live: State of the run, on a page that renews itself; None: the page does not.
  """
  groups, note = sampled_groups.samples(run)
  return page(
    title=run.name,
    facts=facts(run),
    tiles=tiles(run),
    notes=[*run.problems, *learning_signal.at_the_beginning(run.rows), *warnings_of(run)],
    config=run_data.flatten(run.config),
    data={
      "panels": figures.panels([run]),
      "quiet": figures.quiet_panels([run]),
      "others": figures.other_panels([run]),
      "samples": groups,
      "samples_note": note,
      "samples_of": "behavior policy" if run_data.is_offline(run) else "engine",
    },
    live=live,
  )


def render_comparison(runs: Sequence[RunData]) -> str:
  """Returns a page with the curves of several runs, one colour per run.

  Raises:
    ValueError: There are fewer than two runs.
  """
  if len(runs) < 2:
    raise ValueError(f"a comparison needs at least 2 runs, got {len(runs)}")
  configs = [run_data.flatten(run.config) for run in runs]
  names = sorted({name for config in configs for name in config})
  differing = {
    name: " | ".join(str(config.get(name, "(none)")) for config in configs)
    for name in names
    if len({str(config.get(name)) for config in configs}) > 1
  }
  return page(
    title=" | ".join(run.name for run in runs),
    facts=[("runs", str(len(runs))), ("config fields that differ", str(len(differing)))],
    tiles=[],
    notes=[f"{run.name}: {problem}" for run in runs for problem in run.problems],
    config=differing,
    data={
      "panels": figures.panels(runs),
      "quiet": figures.quiet_panels(runs),
      "others": figures.other_panels(runs),
      "samples": None,
      "samples_note": "",
      "samples_of": "engine",
    },
  )


def page(
  *,
  title: str,
  facts: Sequence[tuple[str, str]],
  tiles: Sequence[tuple[str, str, str, str]],
  notes: Sequence[str],
  config: Mapping[str, Any],
  data: Mapping[str, Any],
  live: Live | None = None,
) -> str:
  """Returns the HTML page; every text is escaped here.

  Args:
    title: Title of the page.
    facts: Pairs (name, value), shown below the title.
    tiles: Tuples (name, value before or "", value, remark).
    notes: Sentences that the reader should not miss.
    config: Values by dotted name.
    data: Data that the page's scripts draw; see `figures` and `sampled_groups`.
    live: State of the run, on a page that renews itself; None: the page does not.
  """
  charts, browser, watch = (_script(f"{name}.html") for name in ("charts", "browser", "watch"))
  scripts = (charts, browser, watch) if live else (charts, browser)
  esc = html.escape
  shown = {n: json.dumps(v, default=str, ensure_ascii=False) for n, v in config.items()}
  fields = "".join(f"<div><span>{esc(n)}</span> = {esc(v)}</div>" for n, v in shown.items())
  parts = {
    "SCRIPT_HASHES": " ".join(map(_script_hash, scripts)),
    "CONNECT": "; connect-src 'self'" if live else "",
    "LIVE": _live(live) if live else "",
    "TITLE": esc(title),
    "FACTS": "".join(f"<span>{esc(name)} <b>{esc(value)}</b></span>" for name, value in facts),
    "TILES": f'<div class="tiles">{"".join(_tile(*tile) for tile in tiles)}</div>' if tiles else "",
    "NOTES": f'<ul class="notes">{"".join(f"<li>{esc(n)}</li>" for n in notes)}</ul>'
    if notes
    else "",
    "CONFIG": f'<details class="card"><summary>Configuration</summary><div class="config">{fields}'
    "</div></details>"
    if config
    else "",
    "FOOTER": "Written by grpo_jax from the files of the run folder. Metrics: docs/metrics.md.",
    "DATA": to_script_json(data),
    "CHARTS": charts,
    "BROWSER": browser,
    "WATCH": f"<script>{watch}</script>\n" if live else "",
  }
  return re.sub(r"\{\{([A-Z_]+)\}\}", lambda found: parts[found[1]], _resource("page.html"))


def to_script_json(data: Any) -> str:
  """Returns strict JSON that is safe inside a <script> element, whatever strings it contains."""
  text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII: also escapes U+2028.
  return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def facts(run: RunData) -> list[tuple[str, str]]:
  """Returns (name, value) of the most important settings that are set."""
  flat = run_data.flatten(run.config)
  left_out = OF_SAMPLING if run_data.is_offline(run) else ()
  names = [name for name in FACTS if name not in left_out and flat.get(name) not in (None, "")]
  found = [(FACTS[name], flat[name]) for name in names]
  return [(label, str(value)) for label, value in found]


def tiles(run: RunData) -> list[tuple[str, str, str, str]]:
  """Returns the outcome: (name, value before, value after, remark)."""
  found = []
  names = sorted({name for row in run.rows for name in row})
  for name in names:
    if re.fullmatch(r"eval/.+/accuracy", name):
      steps, values = _known(run, name)
      if values:
        gain = f"{100 * (values[-1] - values[0]):+.1f} points"
        before = console.share(values[0]) if len(values) > 1 else ""
        remark = f"{gain}, step {steps[0]} to {steps[-1]}" if before else f"step {steps[-1]}"
        title = name.removeprefix("eval/").removesuffix("/accuracy")
        found.append((f"Accuracy, {title}", before, console.share(values[-1]), remark))
  _, rewards = _known(run, "rollout/reward_mean")
  if rewards:
    tenth = max(1, len(rewards) // 10)
    ends = [f"{np.mean(part):.3f}" for part in (rewards[:tenth], rewards[-tenth:])]
    remark = f"means of the first and last {tenth} steps" if tenth > 1 else "first and last step"
    if len(rewards) == 1:
      ends[0], remark = "", "of the only step"
    found.append(("Reward in training", ends[0], ends[1], remark))
  total = run_data.flatten(run.config).get("total_steps")
  done = len(rewards)
  found.append(("Steps", "", str(done), f"of {total}" if total is not None else "recorded"))
  _, seconds = _known(run, "time/step_s")
  if seconds:
    remark = f"{console.seconds(float(np.median(seconds)))} s per step (median)"
    found.append(("Time of the steps", "", _duration(sum(seconds)), remark))
  _, speeds = _known(run, "perf/tokens_per_s")
  if speeds:
    found.append(("Tokens/s", "", console.number(float(np.median(speeds))), "median over steps"))
  _, peaks = _known(run, "perf/device_peak_gib")
  if peaks:
    found.append(("Device memory", "", f"{peaks[-1]:.1f} GiB", "peak of the fullest device"))
  return found


def warnings_of(run: RunData) -> list[str]:
  """Returns sentences about what looks unhealthy in the last tenth of the run's steps, and about
  the attempts that failed in the whole run."""
  found = []
  is_offline = run_data.is_offline(run)
  for name, limit, sentence in ALARMS:
    if is_offline and name.startswith("mismatch/"):
      continue  # offline, training moves the policy away from the behavior policy.
    _, values = _known(run, name)
    if values and (level := float(np.mean(values[-max(1, len(values) // 10) :]))) > limit:
      shown = console.share(level) if name.endswith("_share") else console.number(level)
      found.append(sentence.format(shown))
  kinds = run_data.failures(run)
  if kinds:
    by_kind = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
    found.append(f"Attempts that failed in the whole run, by kind: {by_kind}.")
  return found


def main(arguments: Sequence[str]) -> int:
  """Writes the report of the run folder named on the command line; returns the exit status."""
  if len(arguments) != 1:
    print(USAGE, file=sys.stderr)
    return 2
  if arguments[0] in ("-h", "--help"):
    print(USAGE)
    return 0
  try:
    path = write(local_paths.checked("RUN_DIR", arguments[0]))
  except (run_data.NoRunError, local_paths.NotLocal) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except OSError as error:
    print(f"error: cannot write the report: {error}", file=sys.stderr)
    return 1
  print(path)
  return 0


def _known(run: RunData, name: str) -> tuple[list[int], list[float]]:
  """Returns the steps at which a metric is finite, and its values."""
  pairs = [(s, v) for s, v in zip(*run_data.curve(run, name), strict=True) if v is not None]
  return [s for s, _ in pairs], [v for _, v in pairs]


def _duration(seconds: float) -> str:
  minutes = seconds / 60
  return (
    f"{seconds:.0f} s"
    if minutes < 2
    else f"{minutes:.1f} min"
    if minutes < 120
    else f"{minutes / 60:.1f} h"
  )


def _tile(name: str, before: str, after: str, remark: str) -> str:
  old = f'<span class="from">{html.escape(before)} → </span>' if before else ""
  return (
    f'<div class="tile"><div class="name">{html.escape(name)}</div>'
    f'<div class="value">{old}{html.escape(after)}</div>'
    f'<div class="more">{html.escape(remark)}</div></div>'
  )


def _live(live: Live) -> str:
  shown = "running" if live.is_running else ""
  return f'<p id="live" class="{shown}" role="status">{html.escape(live.sentence)}</p>'


def _resource(name: str) -> str:
  return resources.files("grpo_jax").joinpath("report", "page", name).read_text(encoding="utf-8")


def _script(name: str) -> str:
  """Returns the content of the only <script> element of a file."""
  return _resource(name).split("<script>", 1)[1].rsplit("</script>", 1)[0]


def _script_hash(script: str) -> str:
  digest = hashlib.sha256(script.encode()).digest()
  return f"'sha256-{base64.b64encode(digest).decode()}'"


# Fields that have no meaning if the groups are recorded.
OF_SAMPLING = ("engine.name", "rollout.group_size", "sampling.max_tokens")
FACTS = {  # config field: its name on the page.
  "mode": "mode",
  "model.path": "model",
  "model.fallback_taken.taken": "trained instead",
  "model.fallback_taken.reason": "because",
  "data.task": "task",
  "data.path": "data",
  "engine.name": "engine",
  "rollout.prompts_per_step": "prompts per step",
  "rollout.group_size": "completions per prompt",
  "sampling.max_tokens": "max tokens",
  "sampling.temperature": "temperature",
  "optim.learning_rate": "learning rate",
  "loss.kl_coef": "KL coefficient",
  "model.compute_dtype": "compute",
  "seed": "seed",
}
ALARMS = (  # metric, limit, sentence.
  (
    learning_signal.LOST_SHARE,
    0.7,
    "{} of the completions give nothing to learn from (signal/lost/* says why).",
  ),
  ("rollout/truncated_share", 0.2, "{} of the completions are cut at the token limit."),
  ("train/skipped_share", 0.0, "{} of the updates were skipped: gradients were not finite."),
  ("rollout/failed_share", 0.05, "{} of the completions could not be scored."),
  (
    "mismatch/token_mult_prob_error",
    1.05,
    "Engine and trainer disagree: token_mult_prob_error {}.",
  ),
)
