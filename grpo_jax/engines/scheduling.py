"""The sampler's host side: which completions are computed together, in which shapes. Pure.

Every decision depends on the requests and on the tokens sampled, never on time: a run that is
resumed forms the same device batches as one that was never interrupted.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from grpo_jax.engines import sampled_experts, sampler_inputs, sharing
from grpo_jax.engines.base import Generation, GenerationRequest
from grpo_jax.engines.prompt_pages import Pool
from grpo_jax.engines.sampled_experts import PromptExperts
from grpo_jax.engines.sampler_inputs import Pieces, PrefillChunk, RowPrompts, RowStates, Tables
from grpo_jax.types import FinishReason

_FEWEST_ROWS = 8  # fewer rows are hardly cheaper: their step reads all weights just the same.
_STOP_IDS = 16  # stop ids of a request checked in every step; others at the end of a chunk.


@dataclasses.dataclass(slots=True)
class Slot:
  """The pages of a prefilled prompt."""

  pages: tuple[tuple[int, ...], ...]  # in the layers of each window.
  length: int  # number of tokens of the prompt, without its last.
  users: int = 0  # number of rows that continue the prompt.
  prompt: bytes = b""  # key of the prompt; the slot's own differs if it holds a further copy.
  experts: PromptExperts | None = None  # of the newest reading; None: they are not recorded.


@dataclasses.dataclass(slots=True)
class RunningCompletion:
  """The state of one request: its sampled tokens, its row and its prompt's pages."""

  request: GenerationRequest
  owner: Any  # receiver of its generation.
  key: bytes  # equal if and only if prompts are equal.
  row: int = -1
  token_ids: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  weight_versions: list[int] = dataclasses.field(default_factory=list)
  # Experts of the prompt, as it was first read for this completion; None: they are not recorded.
  prompt_experts: PromptExperts | None = None
  # Those of the tokens that decode steps were fed: the prompt's last, then the sampled ones.
  experts: list[Int[np.ndarray, "_ L k"]] = dataclasses.field(default_factory=list)

  def keep(self, count: int) -> None:
    """Drops the tokens after the first `count`."""
    del self.token_ids[count:], self.logprobs[count:], self.weight_versions[count:]

  def finished(self, reason: FinishReason, matched: int | str | None) -> Generation:
    return Generation(
      request_id=self.request.request_id,
      token_ids=np.asarray(self.token_ids, np.int32),
      logprobs=np.asarray(self.logprobs, np.float32),
      weight_versions=np.asarray(self.weight_versions, np.int32),
      finish_reason=reason,
      matched_stop=matched,
      **sampled_experts.of_completion(self.prompt_experts, self.experts, len(self.token_ids)),
    )


def regrown(before: int, after: int, newest: int) -> Int[np.ndarray, " after"]:
  """Returns, for each block of a longer ring, the block of the old ring to copy there.

  Args:
    before: Blocks of the old ring.
    after: Blocks of the longer ring.
    newest: Number of the block that was written last, counted from the first step.
  """
  places = np.zeros(after, np.int32)
  for number in range(max(newest - before + 1, 0), newest + 1):
    places[number % after] = number % before
  return places


def prompt_key(request: GenerationRequest, *, copy: int = 0) -> bytes:
  """Returns what identifies a prompt's pages.

  Args:
    request: Any request with the prompt.
    copy: Number of the copy of the prompt; there are several where pages have few readers.
  """
  ids = np.asarray(request.prompt_ids, np.int64)
  # -1 is not a token id.
  return np.concatenate([ids, np.full(copy, -1)]).tobytes() if copy else ids.tobytes()


def free_pages(
  slots: Mapping[bytes, Slot], pools: Sequence[Pool], length: int
) -> tuple[tuple[int, ...], ...] | None:
  """Returns pages for a prompt; None if too few of the layers of a window are free."""
  found = []
  for i, pool in enumerate(pools):
    used = {page for slot in slots.values() for page in slot.pages[i]}
    free = [page for page in range(pool.count) if page not in used]
    found.append(tuple(free[: pool.needed(length)]))
  is_enough = all(len(f) == pool.needed(length) for f, pool in zip(found, pools, strict=True))
  return tuple(found) if is_enough else None


def longest(completions: Sequence[RunningCompletion], chunk: int) -> int:
  """Returns the tokens of the longest completion at the end of the next chunk of decode steps."""
  lengths = (min(len(c.token_ids) + chunk, c.request.sampling.max_tokens) for c in completions)
  return max(lengths, default=0)


def youngest(active: Sequence[RunningCompletion], count: int) -> list[RunningCompletion]:
  """Returns the completions with the fewest sampled tokens, the first to be preempted first.

  What they have costs least to be read again, and those that stay are nearest to their ends. Of
  equally long ones the last to be admitted come first, so groups stay together.
  """
  by_length = sorted(reversed(active), key=lambda c: len(c.token_ids))
  return by_length[: max(count, 0)]


def options_for(
  active: Sequence[RunningCompletion], options: sampler_inputs.ProgramOptions
) -> sampler_inputs.ProgramOptions:
  """Returns the options of the decode program for these completions.

  On an accelerator the host decides whether filters are computed; see `ProgramOptions.has_filters`.
  """
  if options.form == "ring":
    return options
  return dataclasses.replace(options, has_filters=any(_is_truncated(c.request) for c in active))


def _is_truncated(request: GenerationRequest) -> bool:
  sampling = request.sampling
  has_filters = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
  return has_filters and sampling.temperature > 0


def grouped_by_prompt(requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
  """Sorts requests by prompt, in the order in which prompts first appear.

  The pages of a prompt are then needed only for a short time, however many prompts a call has.
  """
  groups: dict[bytes, list[GenerationRequest]] = {}
  for request in requests:
    groups.setdefault(prompt_key(request), []).append(request)
  return [request for group in groups.values() for request in group]


def power_of_two(count: int, *, least: int = 1) -> int:
  """Returns the smallest power of two that is at least `count` and `least`."""
  return max(1 << max(count - 1, 0).bit_length(), least)


def row_counts(max_rows: int) -> tuple[int, ...]:
  """Returns the numbers of rows to compile for, ascending: 8, one in between, `max_rows`.

  The one in between is their geometric mean, a multiple of 8: a step costs a constant plus a share
  for each row, so each number should save about the same part of the next.
  """
  if max_rows <= _FEWEST_ROWS:
    return (max_rows,)
  between = round((max_rows * _FEWEST_ROWS) ** 0.5 / 8) * 8
  return tuple(sorted({_FEWEST_ROWS, between, max_rows}))


def fitting(count: int, sizes: Sequence[int]) -> int:
  """Returns the smallest of ascending sizes that is at least `count`."""
  return next(size for size in sizes if size >= count)


def leave_at(active: int, rows: int, sizes: Sequence[int], *, is_waiting: bool) -> int:
  """Returns the number of running rows at which a decode loop ends before its chunk is full.

  While requests wait, it ends as soon as an eighth of the rows can be refilled. Afterwards it ends
  as soon as the rest fits into the next smaller number of rows, or when all have stopped.
  """
  if is_waiting:
    return active - max(active // 8, 1)
  smaller = [size for size in sizes if size < rows]
  return smaller[-1] if smaller and active > smaller[-1] else 0


def make_rows(
  active: Sequence[RunningCompletion],
  count: int,
  prompts: Mapping[bytes, Slot],
  *,
  group: int,
  pools: Sequence[Pool],
  form: str = "ring",
  moves: Sequence[tuple[int, int]] = (),
  step: int = 0,
) -> RowStates:
  """Returns the state of the completions by row; rows without a completion are idle.

  Args:
    active: Completions that have a row, and a prompt in the pages.
    count: Number of rows.
    prompts: Pages of the prompts, by `RunningCompletion.key`.
    group: Rows that share a prompt.
    pools: Pages of the layers of each window.
    form: Form of the cache.
    moves: Rows to move first, as (from, to).
    step: Number of the next decode step.
  """
  of_windows = [
    _row_prompts(
      active,
      {key: (slot.pages[i], slot.length) for key, slot in prompts.items()},
      pool,
      count=count,
      group=group,
      form=form,
    )
    for i, pool in enumerate(pools)
  ]
  rows = RowStates(
    tokens=np.zeros(count, np.int32),
    prompt_lengths=np.zeros(count, np.int32),
    prompts=tuple(of_windows),
    moves=np.zeros((count, 2), np.int32),
    num_moves=np.asarray(len(moves), np.int32),
    step=np.asarray(step, np.int32),
    lengths=np.zeros(count, np.int32),
    remaining=np.zeros(count, np.int32),
    seeds=np.zeros((count, 2), np.uint32),
    temperature=np.ones(count, np.float32),
    top_k=np.zeros(count, np.int32),
    top_p=np.ones(count, np.float32),
    min_p=np.zeros(count, np.float32),
    reports_truncated=np.zeros(count, bool),
    stop_ids=np.full((count, _STOP_IDS), -1, np.int32),
  )
  rows.moves[: len(moves)] = np.asarray(moves, np.int32).reshape(-1, 2)
  for completion in active:
    request, row, sampled = completion.request, completion.row, len(completion.token_ids)
    sampling, slot = request.sampling, prompts[completion.key]
    rows.tokens[row] = completion.token_ids[-1] if sampled else request.prompt_ids[-1]
    rows.prompt_lengths[row] = slot.length
    rows.lengths[row] = sampled
    rows.remaining[row] = sampling.max_tokens - sampled
    rows.seeds[row] = request.seed >> 32, request.seed & 0xFFFFFFFF
    rows.temperature[row] = sampling.temperature
    rows.top_k[row] = min(sampling.top_k, 2**31 - 1)
    rows.top_p[row] = sampling.top_p
    rows.min_p[row] = sampling.min_p
    rows.reports_truncated[row] = sampling.reports_truncated
    stop_ids = sampling.stop_ids[:_STOP_IDS]
    rows.stop_ids[row, : len(stop_ids)] = stop_ids
  return rows


def _row_prompts(
  active: Sequence[RunningCompletion],
  prompts: Mapping[bytes, tuple[Sequence[int], int]],
  pool: Pool,
  *,
  count: int,
  group: int,
  form: str,
) -> RowPrompts:
  """Returns the prompts of rows in a pool, given its pages of each prompt and their lengths."""
  held = {}
  for key, (pages, length) in prompts.items():
    listed, start = pool.listed(pages, length)
    held[key] = listed, length - start, start
  of_rows = [(completion.key, completion.row) for completion in active]
  tables = _tables([(row, *held[key][::2]) for key, row in of_rows], (count,), pool)
  sizes = {"count": count, "group": group}
  sizes |= {"table": pool.table, "page": pool.page, "pages": pool.count}
  return RowPrompts(tables, sharing.of_rows(form, of_rows, held, **sizes))


def _tables(
  listed: Sequence[tuple[Any, Sequence[int], int]], shape: tuple[int, ...], pool: Pool
) -> Tables:
  """Returns tables of a shape, given of some (place, pages, position of their first token)."""
  pages, starts = np.zeros((*shape, pool.table), np.int32), np.zeros(shape, np.int32)
  for place, numbers, start in listed:
    pages[place][: len(numbers)] = numbers
    starts[place] = start
  return Tables(pages, None if pool.window is None else starts)


def make_chunks(
  prompts: Sequence[tuple[Int[np.ndarray, " _"], Slot]], *, tokens: int, pools: Sequence[Pool]
) -> Iterator[PrefillChunk]:
  """Cuts the concatenated prompts into chunks of equal length; the last one is padded.

  Args:
    prompts: Token ids of each prompt without the last, with its pages.
    tokens: Tokens of a chunk.
    pools: Pages of the layers of each window.
  """
  ids = np.concatenate([prompt_ids for prompt_ids, _ in prompts])
  number = np.repeat(np.arange(len(prompts)), [len(prompt_ids) for prompt_ids, _ in prompts])
  position = np.concatenate([np.arange(len(prompt_ids)) for prompt_ids, _ in prompts])
  places = [
    np.concatenate([pool.places(slot.pages[i], np.arange(len(ids))) for ids, slot in prompts])
    for i, pool in enumerate(pools)
  ]
  for start in range(0, len(ids), tokens):
    part = slice(start, start + tokens)
    room = (0, tokens - len(ids[part]))
    first, past = prompts[number[start]][1], int(position[start])
    last = position[part][np.searchsorted(number[part], number[part], side="right") - 1]
    pages = [
      np.where(pool.stays(position[part], last), place[part], pool.count)
      for pool, place in zip(pools, places, strict=True)
    ]
    held = [pool.listed(first.pages[i], past) for i, pool in enumerate(pools)]
    yield PrefillChunk(
      tokens=np.pad(ids[part], room).astype(np.int32),
      segment_ids=np.pad(number[part] - number[start] + 1, room).astype(np.int32),
      positions=np.pad(position[part], room).astype(np.int32),
      pages=tuple(
        np.pad(place, room, constant_values=pool.count).astype(np.int32)
        for pool, place in zip(pools, pages, strict=True)
      ),
      past_pages=tuple(
        _tables([((), *of_pool)], (), pool) for pool, of_pool in zip(pools, held, strict=True)
      ),
      past=np.asarray(past, np.int32),
    )


def make_pieces(
  active: Sequence[RunningCompletion],
  prompts: Mapping[bytes, Slot],
  *,
  tokens: int,
  piece: int,
  pools: Sequence[Pool],
  step: int,
) -> Iterator[Pieces]:
  """Cuts the tokens of completions that are in the ring into calls of equal length.

  Args:
    active: Completions that have a row, and a prompt in the pages.
    prompts: Pages of the prompts, by `RunningCompletion.key`.
    tokens: Tokens of a call.
    piece: Tokens of a piece, a divisor of `tokens`.
    pools: Pages of the layers of each window.
    step: Number of the next decode step.
  """
  cut = [
    (completion, start)
    for completion in active
    for start in range(0, len(completion.token_ids), piece)
  ]
  count = tokens // piece
  for begin in range(0, len(cut), count):
    yield _pieces(cut[begin : begin + count], prompts, (count, piece), pools, step=step)


def _pieces(
  cut: Sequence[tuple[RunningCompletion, int]],
  prompts: Mapping[bytes, Slot],
  shape: tuple[int, int],
  pools: Sequence[Pool],
  *,
  step: int,
) -> Pieces:
  """Returns some pieces, each a completion and the number of its first token."""
  count, piece = shape
  of_tokens = lambda value: np.full(shape, value, np.int32)
  of_pieces = lambda: np.zeros(count, np.int32)
  tokens, segments, positions, steps = (of_tokens(value) for value in (0, 0, 0, -1))
  rows, prompt_lengths, lengths, past = (of_pieces() for _ in range(4))
  begun: dict[int, int] = {}  # number of the first token of a row.
  for at, (completion, start) in enumerate(cut):
    slot, length = prompts[completion.key], len(completion.token_ids)
    ids = [completion.request.prompt_ids[-1], *completion.token_ids[:-1]][start : start + piece]
    numbers = np.arange(start, start + len(ids))
    tokens[at, : len(ids)] = ids
    segments[at, : len(ids)] = 1 + completion.row
    positions[at, : len(ids)] = slot.length + numbers
    steps[at, : len(ids)] = step - length + numbers
    rows[at], lengths[at], prompt_lengths[at] = completion.row, length, slot.length
    past[at] = begun.setdefault(completion.row, start)
  slots = [prompts[completion.key] for completion, _ in cut]
  pages = [
    _tables(
      [(at, *pool.listed(s.pages[i], s.length)) for at, s in enumerate(slots)], (count,), pool
    )
    for i, pool in enumerate(pools)
  ]
  flat = lambda x: x.reshape(-1)
  return Pieces(
    tokens=flat(tokens),
    segment_ids=flat(segments),
    positions=flat(positions),
    steps=flat(steps),
    rows=rows,
    pages=tuple(pages),
    prompt_lengths=prompt_lengths,
    lengths=lengths,
    past=past,
    step=np.asarray(step, np.int32),
  )
