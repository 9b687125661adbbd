"""The numbers of a result, derived from the measurements, and its table for the terminal. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import head_table

from gpu_day_parts import arithmetic, running, verdict

GIB = 2**30
Entry = Mapping[str, Any]  # entry of one part, as `running` writes it.


def failures(result: Mapping[str, Any]) -> list[str]:
  """Returns the names of the parts that failed, or for which no time was left."""
  bad = (*running.FAILURES, running.NOT_RUN)
  return [name for name, x in result["parts"].items() if x["status"] in bad]


def product_rate(result: Mapping[str, Any]) -> float | None:
  """Returns the rate of the first, large bfloat16 product in TFLOP/s; None: not measured."""
  products = _measured(result, "device").get("products", [])
  return next((x["tflops"] for x in products if x["name"] == "bfloat16"), None)


def update_numbers(result: Mapping[str, Any], name: str) -> dict[str, Any] | None:
  """Returns the numbers of an update; None if no update was timed.

  Returns:
    "seconds" (median), "least_s", "most_s", "differentiate_s", "apply_s", "tokens_per_s" without
    padding, "tflops" of useful operations, "mfu" (share of the data sheet's rate), "share" of the
    measured rate of a product, "padding" as a share of the places, "peak_gib"; None if a number
    cannot be known.
  """
  measured = _measured(result, name)
  samples = measured.get("samples")
  if not samples:
    return None
  total = [x["differentiate_s"] + x["apply_s"] for x in samples]
  seconds = statistics.median(total)
  sheet = arithmetic.data_sheet(result["parts"][name]["device"]["kind"])
  rate, peak = product_rate(result), measured.get("peak_bytes")
  share = lambda of: of and arithmetic.share_of_peak(measured["operations"], seconds, of)
  return {
    "seconds": seconds,
    "least_s": min(total),
    "most_s": max(total),
    "differentiate_s": statistics.median(x["differentiate_s"] for x in samples),
    "apply_s": statistics.median(x["apply_s"] for x in samples),
    "tokens_per_s": measured["tokens"] / seconds,
    "tflops": 1e-12 * measured["operations"] / seconds,
    "mfu": share(sheet and sheet.bf16_tflops),
    "share": share(rate),
    "padding": 1 - measured["tokens"] / measured["places"],
    "peak_gib": peak and peak / GIB,
  }


def decode_numbers(result: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns the numbers of a decode step, for each number of rows.

  Returns:
    "rows", "ms" (median), "tokens_per_s", "gb_per_s" of the bytes to be read, "sheet_share" and
    "copy_share": that rate as a share of the data sheet's and of the measured bandwidth.
  """
  found = []
  copy = _measured(result, "device").get("copy_gb_per_s")
  for run in _measured(result, "decode").get("decode", []):
    sheet = arithmetic.data_sheet(result["parts"]["decode"]["device"]["kind"])
    seconds = statistics.median(run["samples_s"])
    rate = 1e-9 * run["needed_bytes"] / seconds
    found.append(
      {
        "rows": run["rows"],
        "ms": 1e3 * seconds,
        "tokens_per_s": run["rows"] / seconds,
        "gb_per_s": rate,
        "sheet_share": sheet and rate / sheet.memory_gb_per_s,
        "copy_share": copy and rate / copy,
      }
    )
  return found


def quickstart_numbers(result: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns the numbers of each run of the quickstart.

  Returns:
    "precision", "steps", "step_s" (median without the first step), and the mismatch of engine and
    trainer over all steps: "mean" and "max" of |Δ logprob| in nats, and "kl", the mean of
    mismatch/gen_kl_error.
  """
  found = []
  for name in ("quickstart_float32", "quickstart_bfloat16"):
    for run in _measured(result, name).get("runs", []):
      steps = run["steps"]
      of = lambda metric, steps=steps: [step[metric] for step in steps if metric in step]
      precision = run["matmul_precision"]
      found.append(
        {
          "precision": run["compute_dtype"] + (f', "{precision}"' if precision else ""),
          "steps": len(steps),
          "step_s": statistics.median(of("time/step_s")[1:] or of("time/step_s")),
          "mean": statistics.mean(of("mismatch/abs_logprob_mean")),
          "max": max(of("mismatch/abs_logprob_max")),
          "kl": statistics.mean(of("mismatch/gen_kl_error")),
        }
      )
  return found


def checkpoint_numbers(result: Mapping[str, Any]) -> dict[str, Any] | None:
  """Returns size in GB, and rates of writing and reading in GB/s, None where not measured."""
  measured = _measured(result, "checkpoint")
  if "written_s" not in measured:
    return None
  gb = 1e-9 * measured["bytes"]
  return {
    "gb": gb,
    "save_returns_s": measured["save_returns_s"],
    "write": gb / measured["written_s"],
    "read": measured.get("read_s") and gb / measured["read_s"],
  }


def heads(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
  """Returns the measurements of the head, for each size that has any."""
  names = [name for name in result["parts"] if name.startswith("head_")]
  return [found for name in names if (found := _measured(result, name)).get("matmul")]


def verdicts(result: Mapping[str, Any]) -> list[str]:
  """Returns the sentences on which form of the head should be the default."""
  measured = heads(result)
  return [found.sentence for found in verdict.judge(measured)] if measured else []


def headline(result: Mapping[str, Any], name: str) -> str:
  """Returns the most important numbers of a part; "" if it has none."""
  found = _measured(result, name)
  if name == "device":
    return _device_numbers(result)
  if name == "tests" and found:
    kinds = ("passed", "failed", "skipped")
    return ", ".join(f"{len(found.get(kind, ()))} {kind}" for kind in kinds)
  if name.startswith("head_") and found.get("matmul"):
    rows = [
      row
      for row in head_table.summarise(dict(found))
      if row["pass"] == "forward+backward" and row["why"] is None
    ]
    listed = ", ".join(f"{row['variant']} {row['median_ms']:.2f} ms" for row in rows)
    return f"with gradients: {listed}"
  if name.startswith("update_") and (numbers := update_numbers(result, name)):
    return (
      f"{numbers['seconds']:.3g} s, MFU {percent(numbers['mfu'])}, of the measured product"
      f" {percent(numbers['share'])}, peak {gib(numbers['peak_gib'])}"
    )
  if name == "decode":
    return "; ".join(
      f"{x['rows']} rows: {x['ms']:.2f} ms, {x['tokens_per_s']:.0f} tokens/s, of the bandwidth"
      f" {percent(x['sheet_share'])}"
      for x in decode_numbers(result)
    )
  if name.startswith("quickstart_"):
    kind = name.removeprefix("quickstart_")
    return "; ".join(
      f"{x['precision']}: |Δ| mean {x['mean']:.1e}, max {x['max']:.1e} nats"
      for x in quickstart_numbers(result)
      if x["precision"].startswith(kind)
    )
  if name == "checkpoint" and (numbers := checkpoint_numbers(result)):
    read = f"{numbers['read']:.2f}" if numbers["read"] else "not"
    return f"{numbers['gb']:.3g} GB written at {numbers['write']:.2f} GB/s, read at {read}"
  return ""


def _device_numbers(result: Mapping[str, Any]) -> str:
  """Returns the device and its rates."""
  entry = result["parts"]["device"]
  rate, copy = product_rate(result), _measured(result, "device").get("copy_gb_per_s")
  numbers = f"bf16 product {rate:.3g} TFLOP/s" if rate else "no product was timed"
  if copy:
    numbers += f", memory {copy:.4g} GB/s"
  return f"{entry['device']['kind']}: {numbers}" if entry["device"] else ""


def text(result: Mapping[str, Any]) -> str:
  """Returns the table at the end of a run: parts, verdicts, failures."""
  lines = ["", f"{'part':<22}{'status':<15}{'seconds':>8}  "]
  for name, entry in result["parts"].items():
    seconds = f"{entry['seconds']:.1f}" if "seconds" in entry else "-"
    found = headline(result, name) if entry.get("result") else ""
    lines.append(
      f"{name:<22}{entry['status']:<15}{seconds:>8}  {found or entry['reason']}".rstrip()
    )
  lines += ["", *verdicts(result)] if verdicts(result) else []
  if result["tiny"]:
    lines += [
      "",
      "Tiny sizes: these numbers show that the script runs, and nothing about a device.",
    ]
  failed = failures(result)
  lines += ["", f"NOT DONE: {', '.join(failed)}" if failed else "no part failed"]
  for name in failed:
    entry = result["parts"][name]
    lines.append(f"  {name}: {entry['status']}: {entry['reason']}")
  return "\n".join(lines)


def percent(share: float | None) -> str:
  """Returns a share as 12.3 %, or "unknown"."""
  return "unknown" if share is None else f"{100 * share:.1f} %"


def gib(size: float | None) -> str:
  """Returns a number of GiB, or "unknown"."""
  return "unknown" if size is None else f"{size:.2f} GiB"


def _measured(result: Mapping[str, Any], name: str) -> Mapping[str, Any]:
  """Returns the measurements of a part, even if it failed later; {} if there are none."""
  return result["parts"].get(name, {}).get("result") or {}


def devices(result: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
  """Returns (platform, kind) of the devices on which something was measured, each once."""
  found = [entry["device"] for entry in result["parts"].values() if entry.get("device")]
  return sorted({(x["platform"], x["kind"]) for x in found})
