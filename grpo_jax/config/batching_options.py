"""Limits of packed rows that a config sets, and the shapes of the update to compile."""

import math
from collections.abc import Iterator

from grpo_jax.batching import dealing, packing
from grpo_jax.config import data_options
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import Config

# Responses of a recorded group if no option bounds them; larger groups need more microbatches.
RECORDED_GROUP = 16


def longest_row(config: Config) -> int | None:
  """Returns the largest row length that the config allows; None if there is no limit."""
  row_tokens, buckets = config.batching.row_tokens, config.batching.row_buckets
  given = [max(buckets)] if buckets else []
  given += [] if row_tokens is None else [row_tokens]
  return min(given, default=None)


def longest_sequence(config: Config) -> int:
  """Returns the largest number of tokens in a prompt with one completion."""
  row = longest_row(config)
  return config.rollout.max_tokens if row is None else min(config.rollout.max_tokens, row)


def problems(config: Config) -> Iterator[str]:
  """Yields a message for each contradiction among the options of `batching`."""
  buckets, row_tokens = config.batching.row_buckets or (), config.batching.row_tokens
  if len(set(buckets)) > packing.MOST_SHAPES:
    yield (
      f"batching.row_buckets={tuple(buckets)} names {len(set(buckets))} row lengths: a run compiles"
      f" at most {packing.MOST_SHAPES} shapes of the update, so give at most {packing.MOST_SHAPES}"
    )
  if buckets and row_tokens is not None and max(buckets) > row_tokens:
    yield (
      f"batching.row_buckets={tuple(buckets)} has rows longer than batching.row_tokens={row_tokens}"
    )


def has_conversations(config: Config) -> bool:
  """Returns whether completions may have several turns: those of one turn are shorter."""
  return config.rollout.max_turns > 1 or bool(config.rollout.conversations)


def load(config: Config) -> packing.Load:
  """Returns the largest load of an optimizer step of the run."""
  longest = longest_sequence(config)
  prompt = max(one["max_prompt_tokens"] for one in data_options.training(config).values())
  completion, group = longest - 1, config.rollout.group_size
  if config.mode == "offline":
    group = config.offline.group_size or RECORDED_GROUP
  elif not has_conversations(config):
    completion = min(config.sampling.max_tokens, completion)
    longest = min(longest, prompt + completion)
  return packing.Load(
    prompt=min(prompt, longest - 1),
    completion=completion,
    longest=longest,
    group=group,
    groups=-(-config.rollout.prompts_per_step // config.learn.minibatches),
  )


def plan(
  config: Config, *, cost: packing.Cost, replicas: int, parts: int = 1
) -> tuple[packing.Shape, ...]:
  """Returns the shapes of the update, at most three.

  Args:
    config: Valid config of the run.
    cost: Function that returns the cost of a microbatch; see `learn.operations`.
    replicas: Number of replicas over which the rows of a microbatch are split.
    parts: Number of devices of a replica, to which the places of each row are dealt out.

  Raises:
    ConfigError: The length of a row is not a multiple of the parts.
  """
  options, limit = config.batching, config.batching.microbatch_tokens
  shapes = packing.plan(
    load(config),
    cost=cost,
    row_tokens=options.row_tokens,
    row_buckets=options.row_buckets,
    microbatch_tokens=None if limit is None else limit * parts,
    rows_multiple=replicas,
    share_prefixes=options.share_prefixes,
    pack=options.pack,
  )
  for shape in shapes:
    if dealing.chunks_of(shape.row_tokens, parts) is None:
      raise ConfigError(
        f"mesh.context={parts} divides the places of each row, and the run plans rows of"
        f" {shape.row_tokens} tokens, which is not a multiple of {parts}: set batching.row_tokens"
        f" (and batching.row_buckets) to multiples of it, such as {_next(shape.row_tokens, parts)},"
        f" or mesh.context={math.gcd(shape.row_tokens, parts)}"
      )
  return shapes


def _next(length: int, parts: int) -> int:
  """Returns the first multiple of the parts from a length on."""
  return -(-length // parts) * parts
