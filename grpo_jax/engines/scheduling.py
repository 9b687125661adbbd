"""Which completions are computed side by side, in which shapes: the sampler's host side. Pure.

Every decision depends on the requests and on the tokens sampled, never on time: a run that is
resumed forms the same device batches as one that was never interrupted.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_jax.engines.base import Generation, GenerationRequest
from grpo_jax.engines.decoding import Rows
from grpo_jax.types import FinishReason

_FEWEST_ROWS = 8  # fewer rows are hardly cheaper: their step reads all weights just the same.


@dataclasses.dataclass(slots=True)
class Completion:
  """One request on its way: what was sampled, and where it is computed."""

  request: GenerationRequest
  owner: Any  # whom its generation is delivered to.
  key: bytes  # equal for equal prompts, and for these only.
  row: int = -1
  slot: int = -1
  token_ids: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  weight_versions: list[int] = dataclasses.field(default_factory=list)

  def keep(self, count: int) -> None:
    """Drops the tokens behind the first `count`."""
    del self.token_ids[count:], self.logprobs[count:], self.weight_versions[count:]

  def finished(self, reason: FinishReason, matched: int | str | None) -> Generation:
    return Generation(
      request_id=self.request.request_id,
      token_ids=np.asarray(self.token_ids, np.int32),
      logprobs=np.asarray(self.logprobs, np.float32),
      weight_versions=np.asarray(self.weight_versions, np.int32),
      finish_reason=reason,
      matched_stop=matched,
    )


def prompt_key(request: GenerationRequest) -> bytes:
  return np.asarray(request.prompt_ids, np.int64).tobytes()


def grouped_by_prompt(requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
  """Brings requests of equal prompts together, in the order in which prompts first appear.

  Their computation is then held for a short while, however many prompts a call has.
  """
  groups: dict[bytes, list[GenerationRequest]] = {}
  for request in requests:
    groups.setdefault(prompt_key(request), []).append(request)
  return [request for group in groups.values() for request in group]


def power_of_two(count: int, *, least: int = 1) -> int:
  """Returns the smallest power of two that is at least `count` and `least`."""
  return max(1 << max(count - 1, 0).bit_length(), least)


def prefill_length(length: int) -> int:
  """Returns a length of at least `length`, of few: 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, ..."""
  step = max(power_of_two(length) // 8, 4)
  return max(-(-length // step) * step, 16)


def row_counts(max_rows: int) -> tuple[int, ...]:
  """Returns the numbers of rows that are compiled for, ascending: 8, 16, 32, ... `max_rows`."""
  counts, count = [], _FEWEST_ROWS
  while count < max_rows:
    counts.append(count)
    count *= 2
  return (*counts, max_rows)


def fitting(count: int, sizes: Sequence[int]) -> int:
  """Returns the smallest of ascending sizes that is at least `count`."""
  return next(size for size in sizes if size >= count)


def leave_at(active: int, rows: int, sizes: Sequence[int], *, is_waiting: bool) -> int:
  """Returns at how many running rows a decode loop is left before its chunk is full.

  While requests wait: as soon as an eighth of the rows can be refilled. Afterwards: as soon as
  the rest fits into the next smaller number of rows. In the smallest: when all have stopped.
  """
  if is_waiting:
    return active - max(active // 8, 1)
  smaller = [size for size in sizes if size < rows]
  return smaller[-1] if smaller and active > smaller[-1] else 0


def make_rows(active: Sequence[Completion], count: int, prompt_lengths: Sequence[int]) -> Rows:
  """Lays the state of the completions out by row; rows of none are idle.

  Args:
    active: completions that have a row and a slot.
    count: rows.
    prompt_lengths: tokens in each of their slots.
  """
  widest = max((len(c.request.sampling.stop_ids) for c in active), default=0)
  rows = Rows(
    tokens=np.zeros(count, np.int32),
    slots=np.zeros(count, np.int32),
    prompt_lengths=np.zeros(count, np.int32),
    lengths=np.zeros(count, np.int32),
    remaining=np.zeros(count, np.int32),
    seeds=np.zeros((count, 2), np.uint32),
    temperature=np.ones(count, np.float32),
    top_k=np.zeros(count, np.int32),
    top_p=np.ones(count, np.float32),
    min_p=np.zeros(count, np.float32),
    stop_ids=np.full((count, power_of_two(widest, least=4)), -1, np.int32),
  )
  for completion, prompt_length in zip(active, prompt_lengths, strict=True):
    request, row, sampled = completion.request, completion.row, len(completion.token_ids)
    sampling = request.sampling
    rows.tokens[row] = completion.token_ids[-1] if sampled else request.prompt_ids[-1]
    rows.slots[row] = completion.slot
    rows.prompt_lengths[row] = prompt_length
    rows.lengths[row] = sampled
    rows.remaining[row] = sampling.max_tokens - sampled
    rows.seeds[row] = request.seed >> 32, request.seed & 0xFFFFFFFF
    rows.temperature[row] = sampling.temperature
    rows.top_k[row] = min(sampling.top_k, 2**31 - 1)
    rows.top_p[row] = sampling.top_p
    rows.min_p[row] = sampling.min_p
    rows.stop_ids[row, : len(sampling.stop_ids)] = sampling.stop_ids
  return rows
