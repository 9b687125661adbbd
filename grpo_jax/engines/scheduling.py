"""The sampler's host side: which completions are computed together, in which shapes. Pure.

Every decision depends on the requests and on the tokens sampled, never on time: a run that is
resumed forms the same device batches as one that was never interrupted.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from grpo_jax.engines import kv_cache, prompt_pages, sampler_inputs, sharing
from grpo_jax.engines.base import Generation, GenerationRequest
from grpo_jax.engines.prompt_pages import Pool
from grpo_jax.engines.sampler_inputs import Pieces, PrefillChunk, RowPrompts, RowStates, Tables
from grpo_jax.models.config import ModelConfig
from grpo_jax.types import ExpertShape, FinishReason

_FEWEST_ROWS = 8  # fewer rows are hardly cheaper: their step reads all weights just the same.
_CACHE_BYTES = 4 << 30
_PIECE = 128  # more tokens mean more padding, fewer mean more reading of prompts.
_STOP_IDS = 16  # stop ids of a request checked in every step; others at the end of a chunk.


@dataclasses.dataclass(slots=True)
class PromptExperts:
  """Experts of a prompt's tokens, as one reading of the prompt chose them.

  Attributes:
    shape: Shape of the record.
    read: Experts of the tokens in the pages, all but the last; None: not fetched yet.
    whole: Experts of all tokens, once a row has decoded the last; its rows share this array.
  """

  shape: ExpertShape
  read: Int[np.ndarray, "prompt-1 L k"] | None = None
  whole: Int[np.ndarray, "prompt L k"] | None = None

  def with_last(self, last: Int[np.ndarray, "1 L k"]) -> Int[np.ndarray, "prompt L k"]:
    """Returns the experts of the whole prompt; those of its last token are the first row's."""
    if self.whole is None:
      assert self.read is not None  # fetched with the first chunk of decode steps.
      self.whole = np.concatenate([self.read, last])
    return self.whole


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
      **self._experts(),
    )

  def _experts(self) -> dict[str, Any]:
    """Returns the fields of a generation that have experts; none if they are not recorded.

    Those of a token are the ones that it went through first: weights that came later and read it
    again have not sampled the token after it.
    """
    if self.prompt_experts is None:
      return {}
    fed = np.concatenate(self.experts)[: len(self.token_ids)]
    sampled = np.concatenate([fed[1:], self.prompt_experts.shape.unknown(1)])
    return {"prompt_experts": self.prompt_experts.with_last(fed[:1]), "experts": sampled}


@dataclasses.dataclass(frozen=True)
class SamplerSizes:
  """The sizes of the caches and of a call, for which programs are compiled.

  Attributes:
    rows: Rows of the ring: the largest number of completions at the same time.
    prefill: Tokens of prompts that are computed at once.
    page: Tokens of a page.
    columns: Columns of a block of the ring.
    blocks: Blocks of the ring; 0: as many as the requests need.
    table: Pages of the longest prompt; 0: as many as the requests need.
    pages: Pages of all prompts, in layers without a window; 0: as many as the requests need.
    prompts: Prompts of the largest length that find room at the same time; 0: one for each row.
    is_planned: Whether prompts wait for pages instead of more pages being made.
    at_once: Pages read by one round of a loop; None: all pages of a prompt.
  """

  rows: int
  prefill: int
  page: int
  columns: int
  blocks: int = 0
  table: int = 0
  pages: int = 0
  prompts: int = 0
  is_planned: bool = False
  at_once: int | None = 1

  @property
  def piece(self) -> int:
    """Tokens of a piece of a completion that is read again; see `sampler_inputs.Pieces`."""
    return math.gcd(self.prefill, _PIECE)

  def pools(self, config: ModelConfig) -> tuple[Pool, ...]:
    """Returns the pages of the layers of each window.

    Of a window there are as many as its layers keep of `prompts` prompts, and one for each row.
    """
    return tuple(self.pool(window) for window in kv_cache.windows(config))

  def pool(self, window: int | None) -> Pool:
    """Returns the pages of the layers of a window; see `pools`."""
    if window is None:
      return Pool(None, self.table, self.page, self.pages)
    table = prompt_pages.table_of(window, self.table, self.page)
    count = max((self.prompts or self.rows) * table, self.rows)
    return Pool(window, table, self.page, min(count, self.pages))

  def applied(self, options: sampler_inputs.ProgramOptions) -> sampler_inputs.ProgramOptions:
    return dataclasses.replace(options, pages_at_once=self.at_once or self.table)


def unplanned(rows: int, *, form: str) -> SamplerSizes:
  """Returns sizes that follow the requests.

  Args:
    rows: Largest number of completions at the same time.
    form: Form of the cache. Loops over short blocks of a ring are cheap. In the other form the
      queries of a page's readers are gathered, so pages are long.
  """
  if form == "ring":
    return SamplerSizes(rows, prefill=160, page=64, columns=64)
  return SamplerSizes(rows, prefill=1024, page=256, columns=64, at_once=None)


def planned(
  rows: int,
  *,
  prompt_tokens: int,
  completion_tokens: int,
  long_prompts: int,
  token_bytes: Mapping[int | None, int],
  form: str,
  whole_caches: bool = False,
) -> SamplerSizes:
  """Returns sizes for all requests within the limits, with caches of at most 4 GiB each.

  A ring that needs more starts with 4 GiB and grows when completions need it. If pages need more,
  there are fewer of them and more prompts wait.

  Args:
    rows: Largest number of completions at the same time.
    prompt_tokens: Tokens of the longest prompt.
    completion_tokens: Tokens of the longest completion.
    long_prompts: Number of prompts of the largest length that find room at the same time; others
      wait. There is at least one page for each row.
    token_bytes: Bytes of the keys and values of a token, by the window of the layers.
    form: Form of the cache; see `unplanned`.
    whole_caches: Whether caches may be larger than that, because their memory was counted before.
  """
  sizes, step = unplanned(rows, form=form), 16 if form == "ring" else 64
  page = min(sizes.page, -(-max(prompt_tokens - 1, 1) // step) * step)
  table = -(-max(prompt_tokens - 1, 1) // page)
  longest, pages = completion_tokens, max(long_prompts * table, rows)
  made = dataclasses.replace(sizes, page=page, table=table, prompts=long_prompts)
  if not whole_caches:
    longest = min(longest, max(_fitting_tokens(_CACHE_BYTES // rows, token_bytes), sizes.columns))
    pages = _fitting_pages(dataclasses.replace(made, pages=pages), token_bytes)
  columns = -(-longest // step) * step
  columns = min(sizes.columns, columns) if form == "ring" else columns
  blocks, pages = -(-longest // columns), max(pages, table)
  return dataclasses.replace(made, columns=columns, blocks=blocks, pages=pages, is_planned=True)


def _fitting_tokens(room: int, token_bytes: Mapping[int | None, int]) -> int:
  """Returns how many tokens of a row fit; a layer with a window keeps as many as it has."""
  kept = lambda count: sum(
    size * min(count, window or count) for window, size in token_bytes.items()
  )
  return bisect.bisect_right(range(1 << 31), room, key=kept) - 1


def _fitting_pages(wanted: SamplerSizes, token_bytes: Mapping[int | None, int]) -> int:
  """Returns how many of the wanted pages fit."""

  def taken(pages):
    sizes = dataclasses.replace(wanted, pages=pages)
    return sum(size * sizes.pool(window).count for window, size in token_bytes.items())

  counts = range(wanted.pages + 1)
  return bisect.bisect_right(counts, _CACHE_BYTES // wanted.page, key=taken) - 1


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
