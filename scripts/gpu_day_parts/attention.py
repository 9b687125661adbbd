"""Attention in packed rows: every implementation that runs here, in several layouts of the rows."""

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpu_day_parts import child, running, work

LARGEST_ERROR = 1e-2  # of outputs and gradients, by norms; bfloat16 rounds to 2⁻⁹.

TITLE = "attention in every implementation, packed rows of 1024, 4096 and 16384 tokens"
LIMIT_S = 180.0
# Row length → shortest and longest completions. Prompts have 160 tokens and 8 completions each.
_LENGTHS = {
  **{("short", tokens): (60, 340) for tokens in (1024, 4096, 16384)},
  **{("long", 1024): (400, 860), ("long", 4096): (400, 1300), ("long", 16384): (1600, 5200)},
}
SIZES = {
  "dtype": "bfloat16",
  "heads": (12, 2, 128),  # query heads, key heads, width of a head.
  "layouts": {
    f"{name} completions, T = {tokens}": work.Rows(16384 // tokens, tokens, 160, 8, *lengths)
    for (name, tokens), lengths in sorted(_LENGTHS.items(), key=lambda item: item[0][1])
  },
  "rounds": 5,
  "matmul": 8192,  # size of the square product that is timed in the same turns.
}
TINY = {"dtype": "float32", "heads": (4, 2, 8), "layouts": {"tiny": work.TINY_ROWS}, "rounds": 2}
TINY["matmul"] = 64


def measure(record: child.Record, settings: running.Settings) -> None:
  """Times forward, and forward with all gradients; compares with float32 and with a repetition.

  Raises:
    RuntimeError: An implementation that should run here did not, is wrong, or has other bits when
      it is repeated; raised after everything else was measured.
  """
  child.open_device(record, settings)
  sizes = settings.sizes(SIZES, TINY)
  dtype, heads = sizes.dtype, sizes.heads
  import attention_variants as variants
  import head_variants
  import linear_logprobs as benchmark
  from grpo_kernels.attention import IMPLEMENTATIONS, choice

  refused = {name: x.refusal(choice.current_chip(), dtype) for name, x in IMPLEMENTATIONS.items()}
  record.put(dtype=dtype, heads=heads, refused=refused)
  names = [name for name, why in refused.items() if not why and name != variants.REFERENCE]
  compiled = functools.cache(
    lambda shape: variants.compile_programs([*names, variants.CUDNN], inputs, dtype)
  )
  complaints: list[str] = []
  for layout, of_rows in sizes.layouts.items():
    batch = work.minibatch(of_rows, vocabulary=256).microbatches[0]
    inputs = variants.make_inputs(batch, heads, dtype)
    found = compiled(batch.segment_ids.shape)  # of these inputs, or of others of this shape.
    exact = found[variants.REFERENCE, variants.BOTH](*variants.first_head(inputs))
    rows = {
      key: {"name": key[0], "pass": key[1], "why": run if isinstance(run, str) else None}
      for key, run in found.items()
      if key[0] != variants.REFERENCE
    }
    ran = {key: found[key] for key, row in rows.items() if row["why"] is None}
    for key, run in ran.items():
      if key[0] in names and key[1] == variants.BOTH:
        rows[key] |= variants.checked(run, inputs, exact)
    timers: dict[Any, Callable[[int], float]] = {
      key: lambda calls, run=run, given=inputs: head_variants.seconds_per_call(
        lambda: run(*given), calls
      )
      for key, run in ran.items()
    }
    timers["matmul"] = head_variants.make_matmul(sizes.matmul, dtype)
    with child.alone(settings):
      samples = benchmark.take_turns(timers, sizes.rounds)
    rate = 2 * sizes.matmul**3 / statistics.median(samples["matmul"])
    pairs = work.attended_pairs(batch.segment_ids, batch.branch_ids)
    count, tokens = batch.segment_ids.shape
    causal = count * tokens * (tokens + 1) // 2
    for key in ran:
      seconds = statistics.median(samples[key])
      needed = (
        variants.PASSES[key[1]]
        * (causal if key[0] == variants.CUDNN else pairs)
        * heads[0]
        * heads[2]
      )
      share = needed / seconds / rate
      rows[key] |= {"samples_s": samples[key], "ms": 1e3 * seconds, "share": share}
    listed = list(rows.values())
    record.append("layouts", {"layout": layout, "pairs": pairs, "causal": causal, "rows": listed})
    record.put(headline=f"{layout}, {work.times(listed)}")
    ours = [row for row in listed if row["name"] in names]
    complaints += [f"{layout}: {text}" for text in judge(ours)]
  if complaints:
    raise RuntimeError("; ".join(complaints))


def judge(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns what is wrong with the implementations that should run here, as text."""
  found = []
  for row in rows:
    errors = row.get("errors", ())
    if row["why"]:
      found.append(f"{row['name']} ({row['pass']}) should run here and did not: {row['why']}")
    elif not all(error <= LARGEST_ERROR for error in errors):  # so that NaN is an error too.
      found.append(f"{row['name']} differs from float32 by {', '.join(f'{x:.1e}' for x in errors)}")
    elif not row.get("same_bits", True):
      found.append(f"{row['name']} has other bits when it is repeated")
  return found
