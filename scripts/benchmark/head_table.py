"""The measurements of `linear_logprobs.py` as medians, rates, ratios and a printed table. Pure."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

OURS = ("mosaic_gpu", "pallas_tpu", "xla_chunked")  # the first one that ran is compared.
PASSES = ("forward", "forward+backward")
# Products with N·D·V multiply-adds that the result needs; recomputed ones count once.
PRODUCTS = {"forward": 1, "forward+backward": 3}
GIB = 2**30


def operations(shape: dict[str, Any], which: str) -> float:
  """Returns the operations that a pass needs: 2·N·D·V forward, 6·N·D·V with the gradients.

  A multiplication and an addition are two. Recomputed logits are not counted
  again, so that rates of different variants are ratios of their times.
  """
  return 2.0 * PRODUCTS[which] * shape["tokens"] * shape["width"] * shape["vocabulary"]


def matmul_rate(result: dict[str, Any]) -> float:
  """Returns the median rate of the large matrix product, in TFLOP/s."""
  size = result["matmul"]["size"]
  return 2e-12 * size**3 / statistics.median(result["matmul"]["samples_s"])


def summarise(result: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns one row per measurement: median and spread in ms, TFLOP/s, share of the matmul, memory.

  A measurement without samples has a `why` and no numbers.
  """
  rate = matmul_rate(result)
  rows = []
  for measured in result["measurements"]:
    row = {key: measured[key] for key in ("shape", "variant", "pass", "why")}
    if measured["why"] is None:
      median = statistics.median(measured["samples_s"])
      tflops = 1e-12 * operations(measured["shape"], measured["pass"]) / median
      row |= {
        "median_ms": 1e3 * median,
        "least_ms": 1e3 * min(measured["samples_s"]),
        "most_ms": 1e3 * max(measured["samples_s"]),
        "tflops": tflops,
        "share_of_matmul": tflops / rate,
        "temporary_gib": measured["temporary_bytes"] / GIB,
        "peak_gib": measured["peak_bytes"] / GIB,
        "loss": measured["loss"],
      }
    rows.append(row)
  return rows


def ours(rows: Sequence[dict[str, Any]]) -> str | None:
  """Returns the name of our fastest form that ran, or None."""
  ran = {row["variant"] for row in rows if row["why"] is None}
  return next((name for name in OURS if name in ran), None)


def speedups(rows: Sequence[dict[str, Any]], *, of: str | None) -> list[dict[str, Any]]:
  """Returns how many times as fast `of` is as each other variant, per shape and pass."""
  timed = [row for row in rows if row["why"] is None]
  mine = {
    (_key(row["shape"]), row["pass"]): row["median_ms"] for row in timed if row["variant"] == of
  }
  return [
    {
      "shape": row["shape"],
      "pass": row["pass"],
      "variant": row["variant"],
      "times": row["median_ms"] / mine[_key(row["shape"]), row["pass"]],
    }
    for row in timed
    if row["variant"] != of and (_key(row["shape"]), row["pass"]) in mine
  ]


def disagreements(rows: Sequence[dict[str, Any]]) -> list[str]:
  """Returns a line for each variant whose mean loss differs from that of the other variants.

  Inputs are random, and those of torch come from another generator: with logits of standard
  deviation 3, the mean over N tokens is known to 3/√N.
  """
  lines = []
  timed = [row for row in rows if row["why"] is None]
  for row in timed:
    others = [x["loss"] for x in timed if _key(x["shape"]) == _key(row["shape"])]
    finite = [loss for loss in others if math.isfinite(loss)]  # NaN cannot be ordered.
    median = statistics.median(finite) if finite else math.nan
    allowed = 0.05 + 20.0 / row["shape"]["tokens"] ** 0.5
    if not abs(row["loss"] - median) <= allowed:
      lines.append(
        f"NOT THE SAME RESULT: {row['variant']} ({row['pass']}, {describe(row['shape'])}) has"
        f" mean loss {row['loss']:.4f}, the median of all is {median:.4f}"
      )
  return lines


def describe(shape: dict[str, Any]) -> str:
  """Returns a shape as text."""
  return f"N={shape['tokens']} D={shape['width']} V={shape['vocabulary']}"


def text(result: dict[str, Any]) -> str:
  """Returns the printed form of a result."""
  rows = summarise(result)
  lines = [
    f"{result['date']}  {result['device']}  {result['versions']}",
    f"command: {result['command']}",
    f"{result['dtype']}, head layout {result['layout']}, medians of {result['rounds']} rounds,"
    " variants in turns; TFLOP/s of the"
    " 2·N·D·V (forward) or 6·N·D·V (with gradients) operations that the result needs",
    f"large matmul ({result['matmul']['size']}³): {matmul_rate(result):.3g} TFLOP/s",
  ]
  shapes = {_key(row["shape"]): row["shape"] for row in rows}
  for key, shape in shapes.items():
    for which in PASSES:
      chosen = [row for row in rows if _key(row["shape"]) == key and row["pass"] == which]
      if chosen:
        lines += ["", f"{describe(shape)}  {which}", _HEADING, *map(_line, chosen)]
  ratios = [
    f"  {describe(x['shape'])}  {x['pass']}: {x['times']:.2f}× as fast as {x['variant']}"
    for x in speedups(rows, of=ours(rows))
  ]
  if ratios:
    lines += ["", f"{ours(rows)} is", *ratios]
  return "\n".join([*lines, *disagreements(rows)])


_HEADING = (
  f"{'variant':<24}{'median ms':>11}{'min–max':>19}{'TFLOP/s':>10}{'of matmul':>11}"
  f"{'temporary GiB':>15}{'peak GiB':>10}"
)


def _line(row: dict[str, Any]) -> str:
  """Returns the printed form of one row."""
  if row["why"] is not None:
    return f"{row['variant']:<24}  not run: {row['why']}"
  return (
    f"{row['variant']:<24}{row['median_ms']:>11.3f}"
    f"{format(row['least_ms'], '.3f') + '–' + format(row['most_ms'], '.3f'):>19}"
    f"{row['tflops']:>10.3g}{row['share_of_matmul']:>11.1%}"
    f"{row['temporary_gib']:>15.3f}{row['peak_gib']:>10.2f}"
  )


def _key(shape: dict[str, Any]) -> tuple[int, int, int]:
  """Returns the key of a shape."""
  return shape["tokens"], shape["width"], shape["vocabulary"]
