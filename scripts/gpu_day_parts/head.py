"""The LM head at the size of a model: our forms of it, by scripts/benchmark/linear_logprobs.py."""

from typing import Any

from gpu_day_parts import child, running, work

TITLE = "linear_logprobs at the size of Qwen2.5-1.5B, in every form"
LIMIT_S = 90.0
SIZES = {
  "shapes": [{"tokens": 16384, "width": 1536, "vocabulary": 151936}],
  **{"dtype": "bfloat16", "layout": "vd", "rounds": 5, "liger_python": None},
}
TINY = {"shapes": [{"tokens": 32, "width": 24, "vocabulary": 296}], "dtype": "float32", "rounds": 2}


def measure(record: child.Record, settings: running.Settings) -> None:
  """Times forward, and forward with both gradients.

  Raises:
    RuntimeError: A form of ours that should run here did not, or has another result; raised
      after everything else was measured.
  """
  device = child.open_device(record, settings)
  import head_table
  import head_variants
  import linear_logprobs as benchmark
  from grpo_kernels.linear_logprobs import choice

  options: Any = settings.sizes(SIZES, TINY)
  chip, known = choice.current_chip(), choice.IMPLEMENTATIONS
  able = [name for name in known if name in head_variants.VARIANTS]
  able = [name for name in able if not known[name].refusal(chip, options.dtype)]
  # The sweep with a kernel where it has one, and without.
  able += ["token_local", "token_local_xla"]
  options.variant, options.device = able, child.platform_of(device)
  result = benchmark.measure(options, alone=lambda: child.alone(settings))
  rows = head_table.summarise(result)
  times = [
    {"name": x["variant"], "ms": x["median_ms"], "share": x["share_of_matmul"]}
    for x in rows
    if x["why"] is None
  ]
  record.put(**result, headline=work.times(times))
  if found := complaints(rows):
    raise RuntimeError("; ".join(found))


def complaints(rows: list[dict[str, Any]]) -> list[str]:
  """Returns what is wrong with the forms, as text: one that did not run, or another result."""
  import head_table

  failed = [f"{x['variant']} should run here and did not: {x['why']}" for x in rows if x["why"]]
  return failed + head_table.disagreements(rows)
