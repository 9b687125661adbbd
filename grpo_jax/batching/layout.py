"""Writes segments as the arrays of a `Batch`: who sees whom, who predicts whom. Pure, NumPy."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from grpo_jax.batching.packing import Shape
from grpo_jax.compilation import programs
from grpo_jax.rl import staleness
from grpo_jax.types import Batch, ExpertShape, RolloutGroup


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
  """A prompt and completions of its group, next to each other in a row."""

  group: int
  rollouts: tuple[int, ...]
  tokens: int


def batch(
  rows: Sequence[Sequence[Segment]],
  shape: Shape,
  groups: Sequence[RolloutGroup],
  advantages: Sequence[Float[np.ndarray, " _"]],
  *,
  step: int | None = None,
  has_weights: bool = False,
  experts: ExpertShape | None = None,
) -> tuple[Batch, list[list[int]]]:
  """Lays rows of segments out as the arrays that `types.Batch` describes.

  Args:
    rows: Segments of each row, at most `shape.rows` of them; the rest is padding.
    shape: Shape of the arrays.
    groups: Groups that the segments refer to.
    advantages: Advantage of each rollout.
    step: Number of the training step, for the ages of the tokens; None: the batch has no ages.
    has_weights: Whether the batch has the weights of its completions.
    experts: Shape of the records of experts; None: the batch has none. Of a prompt, which is stored
      once, the batch has the record of its group.

  Returns:
    The batch, and for each row the place at which each of its completions begins.
  """
  arrays, starts = blank(shape), []
  if step is not None:
    arrays["ages"] = np.full((shape.rows, shape.loss_tokens), staleness.UNKNOWN, np.int32)
  if has_weights:
    arrays["weights"] = np.zeros((shape.rows, shape.loss_tokens), np.float32)
  if experts is not None:
    arrays["experts"] = experts.unknown(shape.rows, shape.row_tokens)
  for b, row in enumerate(rows):
    at, row_starts = 0, []
    for number, segment in enumerate(row, start=1):
      group, own = groups[segment.group], advantages[segment.group]
      row_arrays = {name: array[b] for name, array in arrays.items()}
      first = {"number": number, "first_rollout": len(row_starts)}
      row_starts += _fill(row_arrays, at, segment, group, own, **first)
      at += segment.tokens
    places = np.flatnonzero(arrays["loss_mask"][b])
    arrays["loss_places"][b, : len(places)] = places
    if step is not None:
      arrays["ages"][b, : len(places)] = _ages(row, groups, step)
    if has_weights:
      arrays["weights"][b, : len(places)] = _weights(row, groups)
    starts.append(row_starts)
  return Batch(**arrays), starts


def blank(shape: Shape) -> dict[str, np.ndarray]:
  """Returns the arrays of a batch that holds padding only."""
  rows = (shape.rows, shape.row_tokens)
  arrays: dict[str, np.ndarray] = {
    name: np.zeros(rows, np.int32) for name in ("tokens", "segment_ids", "branch_ids", "positions")
  }
  arrays["predecessors"] = np.tile(np.arange(shape.row_tokens, dtype=np.int32), (shape.rows, 1))
  arrays["loss_mask"] = np.zeros(rows, bool)
  arrays["rollout_ids"] = np.full(rows, -1, np.int32)
  arrays["advantages"] = np.zeros(rows, np.float32)
  arrays["behavior_logprobs"] = np.zeros(rows, np.float32)
  arrays["loss_places"] = np.full((shape.rows, shape.loss_tokens), -1, np.int32)
  return arrays


def described(
  shape: Shape,
  sharding: Any = None,
  *,
  has_old: bool = False,
  has_ref: bool = False,
  has_teacher: bool = False,
  has_selected: bool = False,
  has_kept: bool = False,
  has_ages: bool = False,
  has_weights: bool = False,
  experts: ExpertShape | None = None,
  parts: int = 1,
) -> Batch:
  """Returns shapes, dtypes and shardings of a batch, in place of its arrays.

  Args:
    shape: Shape of the batch.
    sharding: Sharding of all arrays; see `sharding.of_rows`.
    has_old: Whether the batch has old logprobs.
    has_ref: Whether the batch has logprobs of the reference policy.
    has_teacher: Whether the batch has logprobs of a teacher.
    has_selected: Whether tokens of the batch are selected; see `LossTokens.selected`.
    has_kept: Whether completions of the batch may be left out; see `LossTokens.kept`.
    has_ages: Whether the batch has the ages of its tokens; see `LossTokens.ages`.
    has_weights: Whether the batch has the weights of its completions; see `LossTokens.weights`.
    experts: Shape of the records of experts; None: the batch has none.
    parts: Number of devices to which the places of a row are dealt out; 1: rows are whole.
  """
  arrays = blank(shape)
  at_places = np.zeros((shape.rows, shape.loss_tokens), np.float32)
  arrays |= {"old_logprobs": at_places} if has_old else {}
  arrays |= {"ref_logprobs": at_places} if has_ref else {}
  arrays |= {"teacher_logprobs": at_places} if has_teacher else {}
  arrays |= {"selected": at_places > 0} if has_selected else {}
  arrays |= {"kept": at_places > 0} if has_kept else {}
  arrays |= {"ages": at_places.astype(np.int32)} if has_ages else {}
  arrays |= {"weights": at_places} if has_weights else {}
  if experts is not None:
    arrays["experts"] = experts.unknown(shape.rows, shape.row_tokens)
  if parts > 1:
    arrays["order"] = arrays["tokens"]
  return programs.abstract(Batch(**arrays), sharding)


def _fill(
  row: dict[str, np.ndarray],
  at: int,
  segment: Segment,
  group: RolloutGroup,
  advantages: Float[np.ndarray, " _"],
  *,
  number: int,
  first_rollout: int,
) -> list[int]:
  """Writes a segment into a row from place `at`; returns where its completions begin."""
  prompt = group.prompt.token_ids
  last_of_prompt = at + len(prompt) - 1
  here = slice(at, at + len(prompt))
  row["tokens"][here] = prompt
  row["positions"][here] = np.arange(len(prompt))
  row["predecessors"][here] = np.maximum(np.arange(at, last_of_prompt + 1) - 1, at)
  row["segment_ids"][at : at + segment.tokens] = number
  if "experts" in row and group.prompt_experts is not None:
    row["experts"][here] = group.prompt_experts
  starts, start = [], at + len(prompt)
  for branch, r in enumerate(segment.rollouts, start=1):
    rollout = group.rollouts[r]
    length = len(rollout.completion_ids)
    here = slice(start, start + length)
    row["tokens"][here] = rollout.completion_ids
    row["branch_ids"][here] = branch
    row["positions"][here] = len(prompt) + np.arange(length)
    row["predecessors"][here] = np.arange(start - 1, start + length - 1)
    row["predecessors"][start] = last_of_prompt
    row["loss_mask"][here] = rollout.loss_mask
    row["rollout_ids"][here] = first_rollout + branch - 1
    row["advantages"][here] = advantages[r]
    row["behavior_logprobs"][here] = rollout.behavior_logprobs
    if "experts" in row and rollout.experts is not None:
      row["experts"][here] = rollout.experts
    starts.append(start)
    start += length
  return starts


def _ages(
  row: Sequence[Segment], groups: Sequence[RolloutGroup], step: int
) -> Int[np.ndarray, " n"]:
  """Returns the ages of the loss tokens of a row, in order."""
  rollouts = [groups[segment.group].rollouts[r] for segment in row for r in segment.rollouts]
  found = [staleness.ages(r.weight_versions[r.loss_mask], step) for r in rollouts]
  return np.concatenate([np.zeros(0, np.int32), *found])


def _weights(row: Sequence[Segment], groups: Sequence[RolloutGroup]) -> Float[np.ndarray, " n"]:
  """Returns the weight of the completion of each loss token of a row, in order."""
  members = [(groups[segment.group], r) for segment in row for r in segment.rollouts]
  counts = [int(group.rollouts[r].loss_mask.sum()) for group, r in members]
  return np.repeat([group.weight_of(r) for group, r in members], counts)


def spread(batch: Batch, values: np.ndarray) -> np.ndarray:
  """Returns values [B N] at their places in [B T]; NaN elsewhere."""
  places = np.asarray(batch.loss_places)
  rows, columns = np.nonzero(places >= 0)
  result = np.full(batch.tokens.shape, np.nan, np.float32)
  result[rows, places[rows, columns]] = np.asarray(values)[rows, columns]
  return result


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
  """A completion of a batch with the prompt before it."""

  row: int
  start: int  # place of its first token in the row.
  tokens: Int[np.ndarray, " _"]  # of the prompt, then of the completion.
  prompt_tokens: int


def completions(batch: Batch) -> list[Completion]:
  """Returns the completions of a batch, as sequences of tokens."""
  found = []
  tokens, segments, branches, numbers = map(
    np.asarray, (batch.tokens, batch.segment_ids, batch.branch_ids, batch.rollout_ids)
  )
  for row in range(tokens.shape[0]):
    for number in range(int(numbers[row].max()) + 1):
      own = np.flatnonzero(numbers[row] == number)
      is_prompt = (segments[row] == segments[row, own[0]]) & (branches[row] == 0)
      prompt = tokens[row, is_prompt]
      ids = np.concatenate([prompt, tokens[row, own]])
      found.append(Completion(row, int(own[0]), ids, len(prompt)))
  return found
