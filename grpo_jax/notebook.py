"""Displays for notebooks: a live curve, the report, completions, memory.

Everything is HTML with text beside it, for front ends that show no HTML; IPython is imported only
where something is displayed, and no plotting library is needed. What a model wrote is escaped.
"""

import html
import itertools
import math
import pathlib
import re
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_jax.run_folder import console
from grpo_jax.run_folder.screen import printable

REWARD = "rollout/reward_mean"
MAX_POINTS = 300  # of a curve; longer ones are averaged.
MAX_CHARACTERS = 600  # of a prompt or a completion in a table.
LARGEST_PAGE = 16_000_000  # bytes; a larger report is linked instead of shown.
# Colours with a contrast of at least 3:1 on white and on the dark backgrounds of notebooks.
BLUE, ORANGE, GREY = "#3b82f6", "#d97706", "#808080"
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 360.0, 200.0, 44.0, 30.0, 28.0  # of one panel, in pixels.


class Html:
  """HTML that a notebook shows, and the text in its place elsewhere."""

  def __init__(self, markup: str, text: str):
    """Holds both.

    Args:
      markup: HTML, in which all text is escaped already.
      text: Text that is shown where there is no HTML.
    """
    self._markup = markup
    self._text = text

  def _repr_html_(self) -> str:
    return self._markup

  def __repr__(self) -> str:
    return self._text


_PATH: Any = type(pathlib.Path())


class Page(_PATH):
  """The path of a report. A notebook shows the report if it is the last line of a cell.

  It is shown in a frame of its own: the report's style and scripts do not reach the notebook, and
  the notebook's do not reach the report.
  """

  def _repr_html_(self) -> str:
    path = pathlib.Path(self)
    if path.stat().st_size > LARGEST_PAGE:
      return f"<p>{html.escape(str(path))} is too large to be shown here; open it in a browser</p>"
    source = html.escape(path.read_text(encoding="utf-8"), quote=True)
    return (
      f'<iframe srcdoc="{source}" title="report" sandbox="allow-scripts"'
      ' style="width:100%;height:720px;border:1px solid #8888;resize:vertical"></iframe>'
    )


class LiveCurve:
  """Shows reward and evaluations while a run trains: one display that is updated.

      grpo_jax.train("quickstart", "runs/first", on_step=grpo_jax.notebook.LiveCurve())

  Outside of a notebook it prints a line for each step.
  """

  def __init__(self, total_steps: int | None = None):
    """Makes a curve. It is displayed with the first step.

    Args:
      total_steps: Number of steps of the run, for the width; None: as many as there are.
    """
    self._total_steps = total_steps
    self._rows: list[dict[str, float]] = []
    self._display: Any = None  # handle of the display; None before the first step.

  def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
    """Adds a step."""
    self._rows = [row for row in self._rows if row["step"] != step]
    self._rows.append({"step": step, **metrics})
    self._show()

  def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
    """Adds an evaluation."""
    self._rows.append({"step": step, **metrics})
    self._show()

  def _show(self) -> None:
    shown = curve(self._rows, total_steps=self._total_steps)
    if not _is_interactive():
      print(shown)
    elif self._display is None:
      from IPython.display import display

      self._display = display(shown, display_id=True)
    else:
      self._display.update(shown)


def curve(rows: Sequence[Mapping[str, Any]], *, total_steps: int | None = None) -> Html:
  """Returns the curves of the mean reward and of the evaluations.

  Args:
    rows: Metrics, each with its `step`, in the order of steps.
    total_steps: Number of steps of the run, for the width; None: as many as there are.
  """
  last = max([total_steps or 0, *(int(row["step"]) for row in rows)])
  rewards = {"reward": _points(rows, REWARD)}
  panels = [_panel("Mean reward of a step", rewards, last, (BLUE,))]
  evaluated = _evaluations(rows)
  if evaluated:
    panels.append(_panel("Evaluation", evaluated, last, (ORANGE, BLUE, GREY)))
  lines = {**rewards, **evaluated}
  text = "\n".join(_sparkline(name, points) for name, points in lines.items() if points)
  style = "display:flex;flex-wrap:wrap;gap:12px;font-family:system-ui,sans-serif"
  return Html(f'<div style="{style}">{"".join(panels)}</div>', text or "no step is done yet")


def completions(records: Iterable[Mapping[str, Any]], *, title: str = "", limit: int = 20) -> Html:
  """Returns a table of completions with their rewards and advantages.

  Args:
    records: Records of rollouts/step_NNNNNN.jsonl.
    title: Heading of the table.
    limit: Largest number of completions; the rest is counted.
  """
  found = list(records)
  shown = found[:limit]
  parts = list(dict.fromkeys(name for each in shown for name in each["reward_components"]))
  names = ["prompt", "completion", "reward", *parts, "advantage", "ended by"]
  body, lines, before = [], [], None
  for each in shown:
    prompt = "" if each["prompt_id"] == before else _cut(each["prompt"]) + console.cut_mark(each)
    before = each["prompt_id"]
    numbers = [each["reward"], *(each["reward_components"].get(name) for name in parts)]
    ended = each.get("error") or each["finish_reason"]
    cells = [prompt, _cut(each["completion"]), *map(_number, [*numbers, each["advantage"]]), ended]
    body.append(_row(cells))
    lines.append(" | ".join(" ".join(cell.split()) for cell in cells))
  left = f"{len(found) - len(shown)} more" if len(found) > len(shown) else ""
  head = "".join(f'<th style="text-align:left">{_safe(name)}</th>' for name in names)
  markup = (
    '<table style="font-size:12px">'
    f'<caption style="text-align:left">{_safe(", ".join(filter(None, (title, left))))}</caption>'
    f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
  )
  return Html(markup, "\n".join([title, " | ".join(names), *lines, left]).strip())


def run_html(name: str, facts: Sequence[str], curves: Html) -> str:
  """Returns what a notebook shows of a run."""
  said = " · ".join(map(_safe, facts))
  return f"<p><b>{_safe(name)}</b> {said}</p>{curves._repr_html_()}"


def memory() -> Html:
  """Returns the memory of this process and of each device, now and at its peak, in GiB."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)  # KiB on Linux.
  lines = [f"this process: {_resident():.1f} GiB, at its peak {peak:.1f} GiB"]
  jax: Any = sys.modules.get("jax")  # not started only to be asked.
  for device in jax.local_devices() if jax else ():
    stats = device.memory_stats() or {}
    if "bytes_in_use" in stats:
      used, most, limit = (
        stats.get(name, 0) / (1 << 30)
        for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
      )
      lines.append(f"{device}: {used:.1f} of {limit:.1f} GiB, at its peak {most:.1f} GiB")
  text = "\n".join(lines)
  return Html(f"<pre>{_safe(text)}</pre>", text)


def _resident() -> float:
  """Returns the memory of this process in GiB; NaN where the system does not say."""
  try:
    status = pathlib.Path("/proc/self/status").read_text()
  except OSError:
    return math.nan
  found = re.search(r"VmRSS:\s+(\d+) kB", status)
  return int(found[1]) / (1 << 20) if found else math.nan


def _is_interactive() -> bool:
  """Returns whether this runs in IPython, without importing it."""
  ipython: Any = sys.modules.get("IPython")
  return ipython is not None and ipython.get_ipython() is not None


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
  """Returns (step, value) of a metric where it is a finite number, averaged to MAX_POINTS."""
  known = [(float(row["step"]), row.get(name)) for row in rows]
  found = [(s, float(v)) for s, v in known if isinstance(v, int | float) and math.isfinite(v)]
  every = math.ceil(len(found) / MAX_POINTS) or 1
  blocks = [found[i : i + every] for i in range(0, len(found), every)]
  return [(b[-1][0], sum(v for _, v in b) / len(b)) for b in blocks]


def _evaluations(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
  """Returns the accuracy of every evaluation set, or its mean reward where there is none."""
  names = dict.fromkeys(name for row in rows for name in row)
  found: dict[str, list[tuple[float, float]]] = {}
  for kind in ("accuracy", "reward_mean"):
    for name in names:
      match = re.fullmatch(rf"eval/(.+)/{kind}", name)
      points = _points(rows, name) if match else []
      if match and points and not any(each.startswith(f"{match[1]} ") for each in found):
        found[f"{match[1]} {kind.replace('_', ' ')}"] = points
  return found


def _panel(
  title: str,
  lines: Mapping[str, Sequence[tuple[float, float]]],
  last: int,
  colours: Sequence[str],
) -> str:
  """Returns an SVG of curves over the steps."""
  values = [value for points in lines.values() for _, value in points]
  low, high = _range(values)
  right, bottom = _WIDTH - 12, _HEIGHT - _BOTTOM
  x = lambda step: _LEFT + (right - _LEFT) * step / max(last, 1)
  y = lambda value: bottom - (bottom - _TOP) * (value - low) / (high - low)
  parts = [_text(_LEFT, 14.0, title, weight="bold")]
  for value in (low, (low + high) / 2, high):
    parts.append(f'<path d="M{_LEFT} {y(value):.1f}H{right}" stroke="{GREY}" opacity=".35"/>')
    parts.append(_text(_LEFT - 5, y(value) + 4, f"{value:.3g}", anchor="end"))
  for step, anchor in ((0, "start"), (last, "end")):
    parts.append(_text(x(step), _HEIGHT - 9, f"step {step}" if step else "0", anchor=anchor))
  coloured = list(zip(lines.items(), itertools.cycle(colours), strict=False))
  for (_, points), colour in coloured:
    placed = [(x(step), y(value)) for step, value in points]
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in placed)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    if len(placed) <= 40:
      parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}"/>' for a, b in placed]
  described = "; ".join(_sparkline(name, points) for name, points in lines.items())
  legend = "".join(
    f'<div style="font-size:11px"><span style="color:{colour}">●</span>'
    f" {_safe(_latest(*line))}</div>"
    for line, colour in coloured
  )
  return (
    f'<div style="width:{_WIDTH:g}px;max-width:100%">'
    f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img"'
    f' aria-label="{_safe(described)}" style="width:100%">{"".join(parts)}</svg>{legend}</div>'
  )


def _range(values: Sequence[float]) -> tuple[float, float]:
  """Returns the ends of an axis: around the values, and never of no height."""
  if not values:
    return 0.0, 1.0
  low, high = min(values), max(values)
  if 0 <= low and high <= 1:  # shares, and most rewards.
    return 0.0, 1.0
  margin = 0.05 * (high - low) or 0.5
  return low - margin, high + margin


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
  return (
    f'<text x="{x:.1f}" y="{y:.1f}" font-size="11" font-weight="{weight}" text-anchor="{anchor}"'
    f' fill="currentColor">{_safe(text)}</text>'
  )


def _latest(name: str, points: Sequence[tuple[float, float]]) -> str:
  """Returns the first and the last value of a curve."""
  if not points:
    return name
  first, last = points[0][1], points[-1][1]
  change = f"{console.number(first)} → " if len(points) > 1 else ""
  return f"{name} {change}{console.number(last)}"


def _sparkline(name: str, points: Sequence[tuple[float, float]]) -> str:
  """Returns a curve as one line of text."""
  values = [value for _, value in points][-60:]
  if not values:
    return name
  low, high = min(values), max(values)
  top = len(_BLOCKS) - 1
  blocks = "".join(_BLOCKS[round(top * (v - low) / ((high - low) or 1))] for v in values)
  return f"{_latest(name, points)} {blocks}"


def _row(cells: Sequence[str]) -> str:
  style = "text-align:left;vertical-align:top;white-space:pre-wrap;overflow-wrap:anywhere"
  return "<tr>" + "".join(f'<td style="{style}">{_safe(each)}</td>' for each in cells) + "</tr>"


def _number(value: Any) -> str:
  """Returns a number as text; what was not measured is a dash."""
  return console.number(float(value)) if isinstance(value, int | float) else console.DASH


def _cut(text: str) -> str:
  """Returns text in at most MAX_CHARACTERS characters."""
  left = len(text) - MAX_CHARACTERS
  return text if left <= 0 else f"{text[:MAX_CHARACTERS]} … [{left} more characters]"


def _safe(text: str) -> str:
  """Returns text for HTML: escaped, and without characters that turn its direction."""
  return html.escape(printable(text), quote=True)
