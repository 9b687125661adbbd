"""A decode step of the embedded sampler, prompts shared by groups; weights are random."""

import asyncio
import statistics
import time
from typing import Any

import numpy as np

from gpu_day_parts import child, models, running, work
from grpo_plan import chips

TITLE = "a decode step of the embedded sampler, Qwen2.5-1.5B, 64, 256 and 512 rows"
LIMIT_S = 180.0
SIZES = {
  **{"model": "Qwen2.5-1.5B", "compute_dtype": "bfloat16"},
  "rows": (64, 256, 512),  # completions decoded together, measured one after the other.
  "group": 16,  # completions per prompt.
  "prompt_tokens": 512,
  "tokens": (16, 64),  # the two lengths of completions.
}
TINY = {
  **{"model": "tiny", "compute_dtype": "float32", "rows": (8,), "group": 4},
  **{"prompt_tokens": 8, "tokens": (4, 20)},
}


def measure(record: child.Record, settings: running.Settings) -> None:
  """Times completions of two lengths; the difference is the time of decode steps alone.

  Both calls prefill the same prompts and decode the same first tokens, so that the shared time
  cancels. The first call of each length compiles and is not timed.
  """
  device = child.open_device(record, settings)
  from grpo_jax.engines.jax_sampler import JaxSampler

  sizes = settings.sizes(SIZES, TINY)
  config, dtype = models.config_of(sizes.model), sizes.compute_dtype
  params = models.random_weights(config)
  itemsize = 2 if dtype == "bfloat16" else 4
  sheet = chips.of_kind(device.device_kind)
  record.put(sizes=vars(sizes))
  for count in sizes.rows:
    with JaxSampler(config, compute_dtype=dtype, max_rows=count) as sampler:
      sampler.load_weights(params, version=0)
      requests = [_requests(config.vocab_size, count, sizes, n) for n in sizes.tokens]
      started = time.perf_counter()
      for each in requests:
        _sample(sampler, each)
      first_calls_s = time.perf_counter() - started
      samples = []
      with child.alone(settings):
        for _ in range(3):
          (first, steps), (second, more) = (_sample(sampler, each) for each in requests)
          samples.append((second - first) / (more - steps))
    seconds = statistics.median(samples)
    cached = count * sum(sizes.tokens) / 2 + -(-count // sizes.group) * sizes.prompt_tokens
    needed = work.decode_bytes(config, cached=cached, itemsize=itemsize)
    record.append(
      "decode",
      {
        "rows": count,
        "samples_s": samples,
        "tokens_per_s": count / seconds,
        "needed_bytes": needed,
        "share_of_bandwidth": sheet and needed / seconds / sheet.bandwidth,
        "first_calls_s": first_calls_s,
        "peak_gib": child.peak_gib(device),
      },
    )
    record.put(headline="; ".join(map(_headline, record.result["decode"])))


def _headline(found: dict[str, Any]) -> str:
  return (
    f"{found['rows']} rows: {1e3 * statistics.median(found['samples_s']):.2f} ms,"
    f" {found['tokens_per_s']:.0f} tokens/s, of the bandwidth"
    f" {work.percent(found['share_of_bandwidth'])} (first calls {found['first_calls_s']:.0f} s)"
  )


def _requests(vocabulary: int, rows: int, sizes: Any, tokens: int) -> list:
  """Returns requests for `rows` completions of exactly `tokens` tokens."""
  from grpo_jax.engines.base import GenerationRequest, SamplingParams

  random = np.random.default_rng(0)
  shape = (-(-rows // sizes.group), sizes.prompt_tokens)
  prompts = random.integers(0, vocabulary, shape, dtype=np.int32)
  sampling = SamplingParams(max_tokens=tokens)
  return [
    GenerationRequest(
      request_id=str(i), prompt_ids=prompts[i // sizes.group], sampling=sampling, seed=i + 1
    )
    for i in range(rows)
  ]


def _sample(sampler: Any, requests: list) -> tuple[float, int]:
  """Samples all requests; returns the seconds and the decode steps that it took."""

  async def consume() -> int:
    return sum([len(x.token_ids) async for x in sampler.generate(requests)])

  before, start = sampler.stats.decode_steps, time.perf_counter()
  sampled = asyncio.run(consume())
  elapsed = time.perf_counter() - start
  wanted = sum(request.sampling.max_tokens for request in requests)
  if sampled != wanted:
    raise RuntimeError(f"{wanted} tokens were to be sampled, {sampled} were")
  return elapsed, sampler.stats.decode_steps - before
