"""The table of a result, for the terminal and for docs/gpu.md. Pure, except for `write`."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_day_parts import running, schedule

PAGE = running.ROOT / "docs" / "gpu.md"
# Only `write` changes the text between these marks.
BEGIN, END = "<!-- gpu-day: begin -->", "<!-- gpu-day: end -->"


class Refused(ValueError):
  """A result cannot be documented; the message says why."""


def failures(result: Mapping[str, Any]) -> list[str]:
  """Returns the names of the parts that failed, or for which no time was left."""
  return [name for name, entry in result["parts"].items() if entry["status"] in running.FAILURES]


def rows(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
  """Returns (part, status, seconds, what it says) of the parts, in the order of the schedule."""
  found = []
  for name in sorted(result["parts"], key=schedule.NAMES.index):
    entry = result["parts"][name]
    seconds = f"{entry['seconds']:.0f}" if "seconds" in entry else "-"
    said = filter(None, (entry.get("result", {}).get("headline"), entry["reason"]))
    found.append((name, entry["status"], seconds, "; ".join(said)))
  return found


def text(result: Mapping[str, Any]) -> str:
  """Returns the table at the end of a run."""
  lines = ["", f"{'part':<12}{'status':<15}{'seconds':>8}  "]
  lines += [
    f"{name:<12}{status:<15}{s:>8}  {said}".rstrip() for name, status, s, said in rows(result)
  ]
  if result["tiny"]:
    lines += ["", "Tiny sizes: these numbers show that the script runs, nothing about a device."]
  failed = failures(result)
  return "\n".join([*lines, "", f"NOT DONE: {', '.join(failed)}" if failed else "no part failed"])


def refusal(result: Mapping[str, Any]) -> str | None:
  """Returns why a result must not be presented as an accelerator's; None if it may."""
  found = devices(result)
  if not found:
    return "no part says on which device it ran"
  if result["tiny"]:
    return "its sizes are tiny (--tiny), which says nothing about an accelerator"
  if any(platform == "cpu" for platform, _ in found):
    return "parts of it ran on a CPU"
  if len(found) > 1:
    return f"its parts ran on different devices: {', '.join(kind for _, kind in found)}"
  return None


def devices(result: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
  """Returns (platform, kind) of the devices on which something was measured, each once."""
  found = [entry["device"] for entry in result["parts"].values() if entry.get("device")]
  return sorted({(x["platform"], x["kind"]) for x in found})


def write(source: pathlib.Path) -> pathlib.Path:
  """Writes the table of a result between the marks of docs/gpu.md; returns that page.

  Raises:
    Refused: The result is not an accelerator's, or the page has no place for it.
  """
  result = running.read(source)
  if reason := refusal(result):
    raise Refused(f"{source}: {reason}")
  content = PAGE.read_text()
  if content.count(BEGIN) != 1 or content.count(END) != 1:
    raise Refused(f"{PAGE} needs the lines {BEGIN} and {END}, once each")
  before, _, rest = content.partition(BEGIN)
  PAGE.write_text(f"{before}{BEGIN}\n{markdown(result)}\n{END}{rest.partition(END)[2]}")
  return PAGE


def markdown(result: Mapping[str, Any]) -> str:
  """Returns the table of a result of one device as Markdown."""
  (_, kind), *_ = devices(result)
  cells = [("part", "status", "seconds", "measured"), ("---",) * 4, *rows(result)]
  table = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]
  begin = (
    f"{result['date']}, {kind}, Python {result['python']}, commit {result['commit'] or 'unknown'}:"
    f" `{result['command']}`"
  )
  return "\n".join([begin, "", *table])
