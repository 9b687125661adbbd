"""Compares the engine with plain HTTP calls: the same requests to the same server, in turns.

  python scripts/benchmark/sglang_client.py MODEL_FOLDER ADDRESS [--rounds 5] [--json FILE]

The server must be running (scripts/serve_sglang.py). "direct" posts the bodies with aiohttp, all at
once or with --in-flight at a time, and reads the answers; "engine" is SGLangEngine with the same
limit, from requests to checked generations. Both compute the same tokens: the seeds are the same,
and the prefix cache is emptied before each turn. The result is the ratio of the medians of tokens
per second; 1 means that the engine has no overhead.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence

import aiohttp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("", "kernels", "packages")]

from grpo_jax import engines  # noqa: E402
from grpo_jax.commands import cli  # noqa: E402
from grpo_jax.engines import sglang_messages  # noqa: E402
from grpo_jax.engines.base import GenerationRequest, SamplingParams  # noqa: E402
from grpo_jax.engines.sglang import SGLangEngine  # noqa: E402
from grpo_jax.files import local_paths  # noqa: E402
from grpo_jax.models import loading  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Turn:
  """One pass through all requests."""

  seconds: float
  tokens: int

  @property
  def tokens_per_s(self) -> float:
    return self.tokens / self.seconds


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
  """Parses the command line."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("model", type=local_paths.argument, help="Hugging Face folder that is served")
  parser.add_argument("address", help="http://host:port of the server")
  parser.add_argument("--prompts", type=int, default=16)
  parser.add_argument("--group-size", type=int, default=8)
  parser.add_argument("--prompt-tokens", type=int, default=64)
  parser.add_argument("--tokens", type=int, default=64, help="length of each completion")
  parser.add_argument("--in-flight", type=int, default=64, help="requests at a time")
  parser.add_argument("--rounds", type=int, default=5, help="turns of each, after one untimed")
  parser.add_argument("--json", type=local_paths.argument, help="file for the result")
  return parser.parse_args(arguments)


def make_requests(options: argparse.Namespace, vocab_size: int) -> list[GenerationRequest]:
  """Returns groups of requests with random prompts, and completions of a fixed length."""
  random = np.random.default_rng(0)
  sampling = SamplingParams(max_tokens=options.tokens)
  prompts = random.integers(0, vocab_size, (options.prompts, options.prompt_tokens), np.int32)
  return [
    GenerationRequest(f"{p}.{g}", ids, sampling, seed=p * options.group_size + g, group=str(p))
    for p, ids in enumerate(prompts)
    for g in range(options.group_size)
  ]


async def direct(
  session: aiohttp.ClientSession, address: str, requests: Sequence[GenerationRequest], places: int
) -> int:
  """Posts all requests, without the engine; returns the number of tokens that came."""
  free = asyncio.Semaphore(places)

  async def one(request: GenerationRequest) -> int:
    name = f"direct-{time.monotonic_ns()}-{request.request_id}"
    body = sglang_messages.generate_body(request, name, seeded=True)
    async with free, session.post(f"{address}/generate", json=body) as response:
      answer = await response.json()
    return len(answer["meta_info"]["output_token_logprobs"])

  return sum(await asyncio.gather(*map(one, requests)))


async def through_engine(engine: SGLangEngine, requests: Sequence[GenerationRequest]) -> int:
  """Generates with the engine; returns the number of tokens that came."""
  return sum([len(generation.token_ids) async for generation in engine.generate(requests)])


async def take_turns(
  engine: SGLangEngine, requests: Sequence[GenerationRequest], options: argparse.Namespace
) -> dict[str, list[Turn]]:
  """Runs all requests in both ways repeatedly; the two ways alternate in going first."""
  turns: dict[str, list[Turn]] = {"direct": [], "engine": []}
  connector = aiohttp.TCPConnector(limit=0)  # kept, as the engine keeps its connections.
  async with aiohttp.ClientSession(connector=connector) as session:
    ways: dict[str, Callable[[], Awaitable[int]]] = {
      "direct": lambda: direct(session, options.address, requests, options.in_flight),
      "engine": lambda: through_engine(engine, requests),
    }
    for number in range(options.rounds + 1):
      for name in sorted(ways, reverse=bool(number % 2)):
        empty_cache(options.address)
        began = time.perf_counter()
        tokens = await ways[name]()
        turn = Turn(time.perf_counter() - began, tokens)
        if number:  # the first turn is a warm-up.
          turns[name].append(turn)
          print(f"{name:8}{turn.seconds:8.2f} s{turn.tokens_per_s:10.1f} tokens/s", flush=True)
  return turns


def empty_cache(address: str) -> None:
  """Makes the server drop its cached prompts."""
  urllib.request.urlopen(f"{address}/flush_cache", timeout=60).close()


def compare(options: argparse.Namespace) -> dict[str, object]:
  """Runs both in turns; returns the result."""
  loaded = loading.load(options.model)
  requests = make_requests(options, loaded.config.vocab_size)
  with tempfile.TemporaryDirectory() as folder:
    engine = engines.make(
      "sglang",
      config=loaded.config,
      source_directory=options.model,
      workdir=folder,
      addresses=(options.address,),
      max_rows=options.in_flight,
    )
    assert isinstance(engine, SGLangEngine)
    with engine:
      engine.load_weights(loaded.params, version=0)
      turns = asyncio.run(take_turns(engine, requests, options))
  medians = {name: statistics.median(t.tokens_per_s for t in of) for name, of in turns.items()}
  return {
    "tokens_per_s": medians,
    "ratio": medians["engine"] / medians["direct"],
    "requests": len(requests),
    "in_flight": options.in_flight,
    "tokens": options.tokens,
    "load_average": os.getloadavg()[0],
  }


def main() -> None:
  """Prints the result as JSON."""
  options = parse()
  result = json.dumps(compare(options), indent=2)
  print(result)
  if options.json:
    options.json.write_text(result + "\n")


if __name__ == "__main__":
  sys.exit(cli.reported(lambda _: main(), []))
