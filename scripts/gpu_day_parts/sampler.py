"""A decode step of the embedded sampler, prompts shared by groups; weights are random."""

import asyncio
import time

import numpy as np

from gpu_day_parts import arithmetic, child, models, running


def measure(
  record: child.Record,
  settings: running.Settings,
  *,
  model: str,
  compute_dtype: str,
  rows: list[int],
  group: int,
  prompt_tokens: int,
  tokens: list[int],
) -> None:
  """Times completions of two lengths; the difference is the time of decode steps alone.

  Both calls prefill the same prompts and decode the same first tokens, so that the shared time
  cancels. The first call of each length compiles and is not timed.

  Args:
    record: Record of the measurements.
    settings: Settings of the day.
    model: Name in `models`.
    compute_dtype: Dtype of products and caches.
    rows: Numbers of completions decoded together, measured one after the other.
    group: Number of completions per prompt.
    prompt_tokens: Length of every prompt.
    tokens: The two lengths of completions, the shorter one first.
  """
  device = child.open_device(record, settings)
  from grpo_jax.engines.jax_sampler import JaxSampler

  config = models.config_of(model)
  shorter, longer = tokens
  params = models.random_weights(config)
  record.put(model=model, compute_dtype=compute_dtype, prompt_tokens=prompt_tokens, group=group)
  for count in rows:
    with JaxSampler(config, compute_dtype=compute_dtype, max_rows=count) as sampler:
      sampler.load_weights(params, version=0)
      requests = {
        length: _requests(config.vocab_size, count, group, prompt_tokens, length)
        for length in tokens
      }
      started = time.perf_counter()
      for length in tokens:
        _sample(sampler, requests[length])
      compile_s = time.perf_counter() - started
      samples = []
      for _ in range(3):
        (first, steps), (second, more) = (_sample(sampler, requests[x]) for x in tokens)
        samples.append((second - first) / (more - steps))
      needed = arithmetic.decode_bytes(
        config,
        rows=count,
        own_tokens=(shorter + longer) / 2,
        prompts=-(-count // group),
        prompt_tokens=prompt_tokens,
        itemsize=np.dtype("float32").itemsize if compute_dtype == "float32" else 2,
      )
      record.append(
        "decode",
        {
          "rows": count,
          "steps": longer - shorter,
          "samples_s": samples,
          "first_calls_s": compile_s,
          "needed_bytes": needed,
          "peak_bytes": child.peak_bytes(device),
        },
      )


def _requests(vocabulary: int, rows: int, group: int, prompt_tokens: int, tokens: int) -> list:
  """Returns requests for `rows` completions of exactly `tokens` tokens."""
  from grpo_jax.engines.base import GenerationRequest, SamplingParams

  random = np.random.default_rng(0)
  prompts = random.integers(0, vocabulary, (-(-rows // group), prompt_tokens), dtype=np.int32)
  sampling = SamplingParams(max_tokens=tokens)
  return [
    GenerationRequest(
      request_id=str(i), prompt_ids=prompts[i // group], sampling=sampling, seed=i + 1
    )
    for i in range(rows)
  ]


def _sample(sampler, requests: list) -> tuple[float, int]:
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
