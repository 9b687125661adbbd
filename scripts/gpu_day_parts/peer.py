"""A peer of the update: transformers with sdpa, on the completions of our microbatches, padded.

Gradient checkpointing and fused AdamW; scripts/benchmark/peer_transformers.py has the update. torch
and transformers are the machine's own.
"""

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

from gpu_day_parts import child, models, running, update, work

TITLE = "transformers with sdpa: the update of the same completions, padded"
LIMIT_S = 120.0
SIZES = {
  **{"model": update.SIZES["model"], "microbatches": update.SIZES["microbatches"][:2]},
  "completions": (16, 32),  # in a microbatch of the peer.
  "steps": 3,  # timed updates, after one that is not.
}
TINY = {"model": "tiny", "microbatches": (work.TINY_ROWS,), "completions": (4,), "steps": 1}


def measure(record: child.Record, settings: running.Settings) -> None:
  """Measures seconds and memory of an update, with several sizes of the peer's microbatch.

  Raises:
    Skipped: One of torch and transformers is missing, or torch sees no GPU.
  """
  sizes = settings.sizes(SIZES, TINY)
  try:
    import peer_transformers as peer
    import torch
    import transformers
  except ImportError as error:
    raise child.Skipped(str(error)) from error
  if not (torch.cuda.is_available() or settings.tiny):
    raise child.Skipped("torch computes on a CPU here")
  place = "cuda" if torch.cuda.is_available() else "cpu"
  kind = torch.cuda.get_device_name() if place == "cuda" else "cpu"
  record.set_device({"platform": "gpu" if place == "cuda" else "cpu", "kind": kind})
  config = transformers.AutoConfig.for_model(**models.huggingface(sizes.model))
  config._attn_implementation = "sdpa"
  record.put(versions={"torch": torch.__version__, "transformers": transformers.__version__})
  with child.alone(settings):
    with torch.device(place):
      policy = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy.gradient_checkpointing_enable()
    policy.train()
    tx = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.01, fused=True)
    for of_rows in sizes.microbatches:
      batch = work.minibatch(of_rows, config.vocab_size).microbatches[0]
      whole = peer.unpacked(batch)
      for count in sizes.completions:
        seconds = []
        for _ in range(1 + sizes.steps):
          start = time.perf_counter()
          loss = peer.step(policy, tx, whole, count)
          seconds.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() / 2**30 if place == "cuda" else None
        record.append(
          "updates",
          {
            "microbatch": of_rows[:2],
            "completions": len(whole),
            "learned": sum(len(each[1]) for each in whole),
            "in_a_microbatch": count,
            "seconds": statistics.median(seconds[1:]),
            "samples_s": seconds[1:],
            "peak_gib": peak,
            "loss": loss,
          },
        )
        if place == "cuda":
          torch.cuda.reset_peak_memory_stats()
      record.put(headline=headline(record.result["updates"]))


def headline(updates: Sequence[dict[str, Any]]) -> str:
  """Returns the best time for each of our microbatches."""
  found = []
  for shape, each in itertools.groupby(updates, key=lambda update: update["microbatch"]):
    best = min(each, key=lambda update: update["seconds"])
    found.append(
      f"completions of {shape[0]} × {shape[1]}, best with {best['in_a_microbatch']} at a time:"
      f" {best['seconds']:.3g} s"
    )
  return "; ".join(found)
