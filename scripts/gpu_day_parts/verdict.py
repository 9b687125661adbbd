"""Which form of the LM head should be the default on a device, judged by its measurements. Pure."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import head_table

# Pass → the forms that may be its default, and the form that is used now wherever it can run.
# Differentiated alone, the default options take the one-sweep form if the loss allows it.
CANDIDATES = {
  "forward": ("mosaic_gpu", "pallas_tpu", "xla_chunked"),
  "forward+backward": ("mosaic_gpu", "pallas_tpu", "xla_chunked", "token_local"),
}
PRESENT = {"forward": ("mosaic_gpu", "pallas_tpu"), "forward+backward": ("token_local",)}
LEAST_GAIN = 0.03  # smallest gain that justifies a change of the default.


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The recommended default of one pass."""

  which: str  # the pass.
  choice: str | None  # None: no form ran at every size.
  present: str | None  # form that is used now; None: it did not run at every size.
  slowdowns: Mapping[str, float]  # form → geometric mean of its time ÷ the shortest of all forms.
  sentence: str


def judge(parts: Sequence[Mapping[str, Any]]) -> list[Verdict]:
  """Returns a verdict for each pass.

  Args:
    parts: Results of the head at the measured sizes, as `head_table` reads them.
  """
  rows = [row for part in parts for row in head_table.summarise(dict(part))]
  wrong = {
    row["variant"]
    for part in parts
    for row in head_table.summarise(dict(part))
    for line in head_table.disagreements(head_table.summarise(dict(part)))
    if f": {row['variant']} (" in line
  }
  return [_pass_verdict(which, rows, wrong) for which in head_table.PASSES]


def _pass_verdict(which: str, rows: Sequence[Mapping[str, Any]], wrong: set[str]) -> Verdict:
  """Returns the verdict of one pass."""
  times: dict[str, dict[str, float]] = {}  # form → size → ms.
  memory: dict[str, float] = {}
  for row in rows:
    if row["pass"] == which and row["why"] is None:
      times.setdefault(row["variant"], {})[head_table.describe(row["shape"])] = row["median_ms"]
      memory[row["variant"]] = max(memory.get(row["variant"], 0.0), row["temporary_gib"])
  sizes = {head_table.describe(row["shape"]) for row in rows if row["pass"] == which}
  whole = {name: of for name, of in times.items() if set(of) == sizes and name not in wrong}
  ours = [name for name in CANDIDATES[which] if name in whole]
  if not ours:
    reason = "no form of ours ran at every size with the result of the others"
    return Verdict(which, None, None, {}, f"{which}: undecided; {reason}")
  best = {size: min(whole[name][size] for name in ours) for size in sizes}
  slowdowns = {
    name: math.exp(math.fsum(math.log(of[size] / best[size]) for size in sizes) / len(sizes))
    for name, of in whole.items()
  }
  present = next((name for name in PRESENT[which] if name in ours), None)
  fastest = min(ours, key=lambda name: slowdowns[name])
  is_kept = present is not None and slowdowns[present] <= slowdowns[fastest] * (1 + LEAST_GAIN)
  choice = present if is_kept else fastest
  listed = ", ".join(
    f"{name} {slowdowns[name]:.2f} ({memory[name]:.2f} GiB)"
    for name in sorted(whole, key=lambda name: slowdowns[name])
  )
  if present is None:
    now = f"the present one, {' or '.join(PRESENT[which])}, did not run at every size"
  else:
    now = "as it is now" if choice == present else f"now it is {present}"
  sentence = (
    f"{which}: {choice} should be the default ({now}). Time, relative to the fastest of ours at"
    f" each of {len(sizes)} sizes, geometric mean (and temporary memory at most): {listed}"
  )
  if wrong:
    sentence += f". Another result than the others, so left out: {', '.join(sorted(wrong))}"
  return Verdict(which, choice, present, slowdowns, sentence)
