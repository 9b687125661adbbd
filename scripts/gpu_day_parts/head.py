"""The LM head at one size: every form of it, in turns, timed as in scripts/benchmark."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_day_parts import child, running

# Forms that are timed: ours, then those they are compared with. token_local is the one-sweep form.
OURS = {
  "gpu": ("mosaic_gpu", "xla_chunked", "token_local"),
  "tpu": ("pallas_tpu", "xla_chunked", "token_local"),
  "cpu": ("mosaic_gpu", "xla_chunked", "token_local"),
}
OTHERS = ("xla_materialised", "liger")
_RESERVE_S = 20.0  # part of the limit for timing the compiled forms.
_FIRST_ROUNDS = 2


def measure(
  record: child.Record,
  settings: running.Settings,
  *,
  shape: dict[str, int],
  dtype: str,
  rounds: int,
  matmul: int,
) -> None:
  """Times forward, and forward with both gradients.

  Args:
    record: Record of the samples, in the form that `head_table` reads.
    settings: Settings of the day.
    shape: Sizes "tokens", "width" and "vocabulary".
    dtype: Dtype of hidden states and head.
    rounds: Samples of each form; all take turns.
    matmul: Size of the square product that is timed in the same turns.

  Raises:
    RuntimeError: A form of ours that should run here did not, or has another result; raised
      after everything else was measured.
  """
  device = child.open_device(record, settings)
  import head_table
  import head_variants
  import linear_logprobs as benchmark

  platform = child.platform_of(device)
  options = argparse.Namespace(
    variant=[*OURS[platform], *OTHERS], device=platform, dtype=dtype, layout="vd"
  )
  record.put(shape=shape, dtype=dtype, rounds=0, measurements=[])
  liger = benchmark.Liger(settings.liger_python, platform)
  made: list[tuple[dict[str, Any], Any]] = []
  try:
    for measurement, timer in benchmark.programs(shape, options, liger):
      made.append((measurement, timer))
      print(f"compiled: {measurement['variant']} {measurement['pass']} {measurement['why'] or ''}")
      if settings.left_s() < _RESERVE_S:
        break
    known = {(x["variant"], x["pass"]) for x, _ in made}
    left_out = [
      {"shape": shape, "variant": name, "pass": which, "why": "no time was left", "samples_s": []}
      for name in options.variant
      for which in head_table.PASSES
      if (name, which) not in known
    ]
    timers: dict[Any, Any] = {i: timer for i, (_, timer) in enumerate(made) if timer is not None}
    timers["matmul"] = head_variants.make_matmul(matmul, dtype)
    samples: dict[Any, list[float]] = {key: [] for key in timers}
    for more in (_FIRST_ROUNDS, rounds - _FIRST_ROUNDS):
      for key, found in benchmark.take_turns(timers, more).items():
        samples[key] += found
      record.put(
        rounds=len(samples["matmul"]),
        matmul={"size": matmul, "samples_s": samples["matmul"]},
        measurements=[
          *({**x, "samples_s": samples.get(i, [])} for i, (x, _) in enumerate(made)),
          *left_out,
        ],
      )
  finally:
    liger.close()
  record.put(device_peak_bytes=child.peak_bytes(device))
  measured = {
    "matmul": {"size": matmul, "samples_s": samples["matmul"]},
    "measurements": [{**x, "samples_s": samples.get(i, [])} for i, (x, _) in enumerate(made)],
  }
  if found := complaints(measured, _able(OURS[platform], dtype)):
    raise RuntimeError("; ".join(found))


def _able(names: Sequence[str], dtype: str) -> list[str]:
  """Returns the forms that should run on this chip and in this dtype."""
  from grpo_kernels.linear_logprobs import choice

  chip, known = choice.current_chip(), choice.IMPLEMENTATIONS
  return [name for name in names if name not in known or not known[name].refusal(chip, dtype)]


def complaints(measured: Mapping[str, Any], able: Sequence[str]) -> list[str]:
  """Returns what is wrong with our forms, as text: one that did not run, or another result.

  Args:
    measured: Compiled and timed forms, as `head_table` reads them.
    able: Forms that have to run here.
  """
  import head_table

  rows = head_table.summarise(dict(measured))
  failed = {row["variant"]: row["why"] for row in rows if row["why"] and row["variant"] in able}
  lines = [f"{name} should run here and did not: {why}" for name, why in failed.items()]
  return lines + head_table.disagreements(rows)
