"""A microbatch of packed rows as in a run, with random tokens. Pure, NumPy."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Lengths:
  """How long prompts and completions are, in tokens."""

  prompt: int
  completions: int  # number of completions per prompt.
  shortest: int
  longest: int  # longest completion; all lengths up to it are equally likely.


@dataclasses.dataclass(frozen=True)
class Counted:
  """The sizes of the work in a microbatch."""

  places: int  # padding included.
  tokens: int
  predicted: int  # tokens that are learned from.
  loss_places: int  # places of the head, padding included.


def make(
  rows: int, row_tokens: int, lengths: Lengths, vocabulary: int, seed: int = 0
) -> tuple[dict[str, Any], Counted]:
  """Makes the arrays of a `grpo_jax.types.Batch`.

  A row holds segments, a prompt and its completions, until no further completion fits.

  Args:
    rows: Number of rows B.
    row_tokens: Row length T.
    lengths: Lengths of prompts and completions.
    vocabulary: Number of token ids.
    seed: Random seed of lengths and tokens.

  Returns:
    The arrays by name, and the sizes of the work in them.
  """
  random = np.random.default_rng(seed)
  shape = (rows, row_tokens)
  names = ("segment_ids", "branch_ids", "positions", "predecessors")
  arrays: dict[str, Any] = {name: np.zeros(shape, np.int32) for name in names}
  arrays["tokens"] = random.integers(0, vocabulary, shape, dtype=np.int32)
  arrays["rollout_ids"] = np.full(shape, -1, np.int32)
  for row in range(rows):
    _fill({name: array[row] for name, array in arrays.items()}, lengths, random)
  mask = arrays["rollout_ids"] >= 0
  predicted = mask.sum(axis=1)
  # As in a run, the head is computed for as many places as a row has.
  loss_places = np.full(shape, -1, np.int32)
  for row in range(rows):
    loss_places[row, : predicted[row]] = np.flatnonzero(mask[row])
  arrays |= {"loss_mask": mask, "loss_places": loss_places}
  arrays["advantages"] = np.where(mask, random.standard_normal(shape), 0).astype(np.float32)
  # Near the logprob of a random token under random weights, so that ratios are near 1.
  arrays["behavior_logprobs"] = np.where(mask, -np.log(vocabulary), 0).astype(np.float32)
  used = int((arrays["segment_ids"] > 0).sum())
  return arrays, Counted(rows * row_tokens, used, int(mask.sum()), loss_places.size)


def _fill(row: dict[str, np.ndarray], lengths: Lengths, random: np.random.Generator) -> None:
  """Fills one row; its arrays are views."""
  size, at, segment, rollout = len(row["segment_ids"]), 0, 0, 0
  while at + lengths.prompt + lengths.longest <= size:
    segment += 1
    prompt = at
    _place(row, slice(at, at + lengths.prompt), segment=segment, branch=0, position=0)
    row["predecessors"][prompt] = prompt
    at += lengths.prompt
    for branch in range(1, lengths.completions + 1):
      length = int(random.integers(lengths.shortest, lengths.longest + 1))
      if at + length > size:
        break
      completion = slice(at, at + length)
      _place(row, completion, segment=segment, branch=branch, position=lengths.prompt)
      row["predecessors"][at] = prompt + lengths.prompt - 1
      row["rollout_ids"][completion] = rollout
      rollout += 1
      at += length


def _place(row: dict[str, np.ndarray], where: slice, *, segment: int, branch: int, position: int):
  """Writes a prompt or a completion into a row; `position` is that of its first token."""
  length = where.stop - where.start
  row["segment_ids"][where] = segment
  row["branch_ids"][where] = branch
  row["positions"][where] = np.arange(position, position + length)
  row["predecessors"][where] = np.arange(where.start - 1, where.stop - 1)
