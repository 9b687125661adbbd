"""Writes the measurements into docs/gpu.md, and one sentence into README.md."""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import head_table

from gpu_day_parts import running, schedule, summary

PAGE, README = running.ROOT / "docs" / "gpu.md", running.ROOT / "README.md"
# Only `write` changes the text between these marks.
BEGIN, END = "<!-- gpu-day: begin -->", "<!-- gpu-day: end -->"
PENDING = (
  "**Nothing was measured on an accelerator yet.** When a GPU or TPU is at hand, the commands below"
  " write the\nnumbers here, with date and device."
)
PENDING_README = (
  "Nothing was measured on an accelerator yet; where there is one, `make gpu-day` does so in 25"
  " minutes\n([docs/gpu.md](docs/gpu.md))."
)
CPU_NOTICE = (
  "**THESE NUMBERS ARE OF A CPU, or of tiny sizes. They say that the script runs, and nothing about"
  " an accelerator.**"
)


class Refused(ValueError):
  """A result cannot be documented; the message says why."""


def read(path: pathlib.Path) -> dict[str, Any]:
  """Reads a result.

  Raises:
    Refused: The file is not one.
  """
  try:
    result = json.loads(path.read_text())
  except (OSError, ValueError) as error:
    raise Refused(f"{path}: {error}") from error
  if not isinstance(result, dict) or result.get("format") != running.FORMAT:
    raise Refused(f"{path} is not a result of scripts/gpu_day.py in format {running.FORMAT}")
  return result


def refusal(result: Mapping[str, Any]) -> str | None:
  """Returns why a result must not be presented as an accelerator's; None if it may."""
  devices = summary.devices(result)
  if not devices:
    return "no part says on which device it ran"
  if result["tiny"]:
    return "its sizes are tiny (--tiny), which says nothing about an accelerator"
  if any(platform == "cpu" for platform, _ in devices):
    return "parts of it ran on a CPU"
  if len(devices) > 1:
    return f"its parts ran on different devices: {', '.join(kind for _, kind in devices)}"
  return None


def write(
  source: pathlib.Path, page: pathlib.Path | None = None, *, allow_cpu: bool = False
) -> list[pathlib.Path]:
  """Writes the pages for a result.

  Args:
    source: File with the result.
    page: Page in place of docs/gpu.md; README.md is then left unchanged.
    allow_cpu: Whether to accept a result that does not come from an accelerator, marked as such.
      Needs `page`.

  Returns:
    The files that were written.

  Raises:
    Refused: The result is not an accelerator's, or a page has no place for it.
  """
  result = read(source)
  reason = refusal(result)
  if reason and not (allow_cpu and page):
    hint = "" if allow_cpu is False else "; --allow-cpu needs --docs, another page than docs/gpu.md"
    raise Refused(f"{source}: {reason}{hint}")
  if page and page.resolve() == PAGE.resolve() and reason:
    raise Refused(f"{source}: {reason}")
  if page and not page.exists():
    page.write_text(f"{BEGIN}\n{END}\n")
  text = measured(result)
  targets = [(page or PAGE, f"{CPU_NOTICE}\n\n{text}" if reason else text)]
  if page is None:
    targets.append((README, sentence(result)))
  contents = [(path, replaced(path, text)) for path, text in targets]
  for path, content in contents:
    path.write_text(content)
  return [path for path, _ in contents]


def replaced(path: pathlib.Path, text: str) -> str:
  """Returns the content of a file with `text` between its marks.

  Raises:
    Refused: The file does not have both marks, once each.
  """
  content = path.read_text()
  if content.count(BEGIN) != 1 or content.count(END) != 1:
    raise Refused(f"{path} needs the lines {BEGIN} and {END}, once each")
  before, _, rest = content.partition(BEGIN)
  _, _, after = rest.partition(END)
  return f"{before}{BEGIN}\n{text}\n{END}{after}"


def sentence(result: Mapping[str, Any]) -> str:
  """Returns the sentence about a result for the top of the README."""
  (_, kind), *_ = summary.devices(result)
  text = f"Measured on one {kind}, {result['date']}, by `make gpu-day`"
  names = [name for name in result["parts"] if name.startswith("update_")]
  updates = [numbers for name in names if (numbers := summary.update_numbers(result, name))]
  if updates:
    best = min(updates, key=lambda numbers: numbers["seconds"])
    text += (
      f": an update of Qwen2.5-1.5B with\n16384 places takes {best['seconds']:.2f} s"
      f" (MFU {summary.percent(best['mfu'])}, padding excluded)"
    )
  return f"{text}. All numbers: [docs/gpu.md](docs/gpu.md)."


def measured(result: Mapping[str, Any]) -> str:
  """Returns everything that was measured, as Markdown."""
  sections = [
    _begin(result),
    _device(result),
    _tests(result),
    _heads(result),
    _updates(result),
    *(_profile(result, name) for name in result["parts"] if name.startswith("update_")),
    _decode(result),
    _quickstart(result),
    _checkpoint(result),
  ]
  return "\n\n".join(section for section in sections if section)


def _begin(result: Mapping[str, Any]) -> str:
  kinds = ", ".join(kind for _, kind in summary.devices(result))
  rows = [
    (
      f"`{name}`",
      entry["status"],
      f"{entry['seconds']:.0f}" if "seconds" in entry else "",
      entry["reason"].replace("|", "\\|"),
    )
    for name, entry in result["parts"].items()
  ]
  missing = [part.name for part in schedule.PARTS if part.name not in result["parts"]]
  lines = [
    "## Measured",
    "",
    f"{result['date']}, {kinds}, Python {result['python']}, commit {result['commit'] or 'unknown'}:"
    f" `{result['command']}`",
    "",
    table(("part", "status", "seconds", "reason"), rows),
  ]
  if missing:
    lines += ["", f"Not run: {', '.join(missing)}."]
  return "\n".join(lines)


def _device(result: Mapping[str, Any]) -> str:
  found = _result(result, "device")
  if not found:
    return ""
  lines = ["### Device"]
  if isinstance(found.get("nvidia_smi"), dict):
    smi = ", ".join(f"{key} {value}" for key, value in found["nvidia_smi"].items())
    lines += ["", f"`nvidia-smi` before the products: {smi}."]
  lines += ["", ", ".join(f"{name} {v}" for name, v in found.get("versions", {}).items()) + "."]
  if found.get("products"):
    rows = [
      (" × ".join(map(str, x["shape"])), x["name"], f"{x['tflops']:.1f}") for x in found["products"]
    ]
    lines += ["", table(("product", "factors, precision", "TFLOP/s"), rows)]
  if found.get("copy_gb_per_s"):
    lines += ["", f"Memory, bytes read and written: {found['copy_gb_per_s']:.0f} GB/s."]
  return "\n".join(lines)


def _tests(result: Mapping[str, Any]) -> str:
  found = _result(result, "tests")
  if not found:
    return ""
  lines = ["### Tests of `make test-gpu`", "", f"{summary.headline(result, 'tests')}."]
  lines += [f"* `{name}`: {reason}" for name, reason in found.get("failed", {}).items()]
  return "\n".join(lines)


def _heads(result: Mapping[str, Any]) -> str:
  parts = summary.heads(result)
  if not parts:
    return ""
  lines = ["### The LM head", "", *(f"* {text}" for text in summary.verdicts(result))]
  for part in parts:
    rows = [
      (row["variant"], row["pass"], f"not run: {row['why']}".replace("|", "\\|"), "", "", "")
      if row["why"] is not None
      else (
        row["variant"],
        row["pass"],
        f"{row['median_ms']:.2f} ({row['least_ms']:.2f}–{row['most_ms']:.2f})",
        f"{row['tflops']:.1f}",
        f"{row['temporary_gib']:.2f}",
        f"{row['peak_gib']:.2f}",
      )
      for row in head_table.summarise(dict(part))
    ]
    columns = ("form", "pass", "ms (least–most)", "TFLOP/s", "temporary GiB", "peak GiB")
    lines += [
      "",
      f"{head_table.describe(part['shape'])}, {part['dtype']}:",
      "",
      table(columns, rows),
    ]
    lines += head_table.disagreements(head_table.summarise(dict(part)))
  return "\n".join(lines)


def _updates(result: Mapping[str, Any]) -> str:
  rows = []
  for name in result["parts"]:
    numbers = summary.update_numbers(result, name) if name.startswith("update_") else None
    if numbers is None:
      continue
    found = _result(result, name)
    rows.append(
      (
        found["model"],
        f"{found['microbatch'][0]} × {found['microbatch'][1]}",
        f"{numbers['seconds']:.3f} ({numbers['least_s']:.3f}–{numbers['most_s']:.3f})",
        f"{numbers['differentiate_s']:.3f} + {numbers['apply_s']:.3f}",
        f"{numbers['tokens_per_s']:.0f}",
        summary.percent(numbers["padding"]),
        f"{numbers['tflops']:.1f}",
        summary.percent(numbers["mfu"]),
        summary.percent(numbers["share"]),
        summary.gib(numbers["peak_gib"]),
      )
    )
  if not rows:
    return ""
  columns = (
    *(
      "model",
      "rows × tokens",
      "seconds (least–most)",
      "gradients + optimizer",
      "tokens/s",
      "padding",
    ),
    *("useful TFLOP/s", "MFU", "of the measured product", "peak memory"),
  )
  return f"### The update\n\n{table(columns, rows)}"


def _profile(result: Mapping[str, Any], name: str) -> str:
  profile = _result(result, name).get("profile")
  if not profile:
    return ""
  rows = [
    (f"`{x['name'][:90]}`", str(x["calls"]), f"{x['ms']:.2f}", summary.percent(x["share"]))
    for x in profile["kernels"]
  ]
  return (
    f"#### The longest kernels of `{name}`\n\nOne update: {profile['total_ms']:.1f} ms of kernels;"
    f" at least one ran for {profile['busy_ms']:.1f} of {profile['span_ms']:.1f} ms.\n\n"
    + table(("kernel", "calls", "ms", "share"), rows)
  )


def _decode(result: Mapping[str, Any]) -> str:
  rows = [
    (
      str(x["rows"]),
      f"{x['ms']:.2f}",
      f"{x['tokens_per_s']:.0f}",
      f"{x['gb_per_s']:.0f}",
      summary.percent(x["sheet_share"]),
      summary.percent(x["copy_share"]),
    )
    for x in summary.decode_numbers(result)
  ]
  if not rows:
    return ""
  columns = ("rows", "ms a step", "tokens/s", "needed GB/s", "of the data sheet", "of the copy")
  return f"### A decode step of {_result(result, 'decode')['model']}\n\n{table(columns, rows)}"


def _quickstart(result: Mapping[str, Any]) -> str:
  rows = [
    (x["precision"], str(x["steps"]), f"{x['step_s']:.2f}", *(f"{x[k]:.2e}" for k in _MISMATCH))
    for x in summary.quickstart_numbers(result)
  ]
  if not rows:
    return ""
  names = ("quickstart_float32", "quickstart_bfloat16")
  used = {found["model"] for name in names if "model" in (found := _result(result, name))}
  columns = ("products", "steps", "s a step", "mean nats", "max nats", "KL, nats")
  return (
    f"### The quickstart: engine against trainer\n\nModel: {'; '.join(sorted(used))}.\n\n"
    + table(columns, rows)
  )


_MISMATCH = ("mean", "max", "kl")


def _checkpoint(result: Mapping[str, Any]) -> str:
  numbers = summary.checkpoint_numbers(result)
  if numbers is None:
    return ""
  read = f"read back at once at {numbers['read']:.2f} GB/s" if numbers["read"] else "not read"
  model = _result(result, "checkpoint")["model"]
  return (
    f"### A checkpoint of {model}\n\n{numbers['gb']:.2f} GB: written at"
    f" {numbers['write']:.2f} GB/s (a run continues after {numbers['save_returns_s']:.1f} s),"
    f" {read}."
  )


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
  """Returns a Markdown table."""
  columns = list(columns)
  lines = [columns, ["---"] * len(columns), *rows]
  return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _result(result: Mapping[str, Any], name: str) -> Mapping[str, Any]:
  return result["parts"].get(name, {}).get("result") or {}
