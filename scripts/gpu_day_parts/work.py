"""The work that is measured: packed rows, their operations and bytes, the rates of a device.

A multiplication and an addition are two operations. What does not count: padding, masked pairs,
recomputation, the optimizer, norms and other elementwise operations.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int


class Rows(NamedTuple):
  """Packed rows of groups; all lengths of completions are equally likely."""

  rows: int
  row_tokens: int
  prompt: int  # tokens of a prompt.
  completions: int  # number of completions of a prompt.
  shortest: int
  longest: int


TINY_ROWS = Rows(2, 32, 6, 3, 2, 8)


def minibatch(sizes: Rows, vocabulary: int) -> Any:
  """Packs groups of random tokens, as a run packs its completions.

  Args:
    sizes: Sizes of rows and groups.
    vocabulary: Number of token ids.

  Returns:
    A `grpo_jax.types.Minibatch` of one microbatch, whose arrays are NumPy's.
  """
  from grpo_jax import batching
  from grpo_jax.batching import packing
  from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup

  random = np.random.default_rng(0)
  # Near the logprob of a random token under random weights, so that ratios are near 1.
  usual = -float(np.log(vocabulary))

  def rollout() -> Rollout:
    size = int(random.integers(sizes.shortest, sizes.longest + 1))
    ids = random.integers(0, vocabulary, size).astype(np.int32)
    logprobs = np.full(size, usual, np.float32)
    versions = np.zeros(size, np.int32)
    return Rollout(ids, np.ones(size, bool), logprobs, versions, FinishReason.STOP, 0.0)

  def group(number: int) -> RolloutGroup:
    ids = random.integers(0, vocabulary, sizes.prompt).astype(np.int32)
    prompt = Prompt(str(number), ids, "random")
    return RolloutGroup(prompt, tuple(rollout() for _ in range(sizes.completions)))

  # More than fit; the first microbatch is full.
  of_group = sizes.prompt + sizes.completions * (sizes.shortest + sizes.longest) / 2
  count = 1 + int(1.5 * sizes.rows * sizes.row_tokens / of_group)
  groups = [group(number) for number in range(count)]
  advantages = [random.standard_normal(len(g.rollouts)).astype(np.float32) for g in groups]
  shape = packing.Shape(sizes.rows, sizes.row_tokens, sizes.row_tokens)
  made = batching.assemble(groups, advantages, shapes=(shape,), skip_zero_advantage=False)
  return made.minibatches[0]


def attended_pairs(segment_ids: Int[np.ndarray, "B T"], branch_ids: Int[np.ndarray, "B T"]) -> int:
  """Counts the pairs of query and key that the mask of packed rows allows.

  Token q attends to token k if both are in one segment (0 is padding), k is not after q,
  and k belongs to the prompt (branch 0) or to the branch of q.

  Args:
    segment_ids: Segment of every place.
    branch_ids: Branch of every place.
  """
  total = 0
  for segments, branches in zip(segment_ids, branch_ids, strict=True):
    for segment in np.unique(segments[segments != 0]):
      sizes = np.bincount(branches[segments == segment])
      total += int((sizes * (sizes + 1) // 2).sum() + sizes[0] * sizes[1:].sum())
  return total


def update_operations(config: Any, batch: Any) -> int:
  """Returns the operations that forward and backward pass of a microbatch need.

  Args:
    config: Sizes of the model, a `ModelConfig`.
    batch: The microbatch, a `grpo_jax.types.Batch`.
  """
  from grpo_plan import workload

  cost = workload.forward_cost(config)
  pairs = attended_pairs(batch.segment_ids, batch.branch_ids)
  places = int((batch.segment_ids > 0).sum())
  head = cost.loss_place * int(batch.loss_mask.sum())
  return 3 * round(cost.place * places + cost.pair * pairs + head)


def decode_bytes(config: Any, *, cached: float, itemsize: int) -> int:
  """Returns the bytes that one decode step must read: weights once, each cache once.

  Args:
    config: Sizes of the model, a `ModelConfig`.
    cached: Tokens in all caches; a prompt that several rows share counts once.
    itemsize: Bytes of each number in weights and caches.
  """
  from grpo_jax.learn import operations

  weights = operations.update_cost(config, remat="none").place / 6
  weights += config.vocab_size * config.hidden_size
  token_numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
  return round(itemsize * (weights + token_numbers * cached))


def percent(share: float | None) -> str:
  """Returns a share as 12.3 %, or "unknown"."""
  return "unknown" if share is None else f"{100 * share:.1f} %"


def times(rows: Iterable[Mapping[str, Any]]) -> str:
  """Returns times as text, those of one "name" together; rows without "ms" are left out."""
  by_name: dict[str, list[str]] = {}
  for row in rows:
    if "ms" in row:
      by_name.setdefault(row["name"], []).append(f"{row['ms']:.2f} ms ({percent(row['share'])})")
  listed = "; ".join(f"{name} {' / '.join(texts)}" for name, texts in by_name.items())
  return f"forward / with gradients (of the product's rate): {listed}"
