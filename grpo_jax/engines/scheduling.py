"""Which completions are computed side by side, in which shapes: the sampler's host side. Pure.

Every decision depends on the requests and on the tokens sampled, never on time: a run that is
resumed forms the same device batches as one that was never interrupted.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from grpo_jax.engines import decoding
from grpo_jax.engines.base import Generation, GenerationRequest
from grpo_jax.engines.decoding import Chunk, Rows
from grpo_jax.types import FinishReason

_FEWEST_ROWS = 8  # fewer rows are hardly cheaper: their step reads all weights just the same.
_CACHE_BYTES = 4 << 30
_STOP_IDS = 16  # of a request, looked for in every step; further ones at the end of a chunk.


@dataclasses.dataclass(slots=True)
class Slot:
  """A prompt that was prefilled: where, and how many rows continue it."""

  pages: tuple[int, ...]
  length: int  # tokens, without the last of the prompt.
  users: int = 0


@dataclasses.dataclass(slots=True)
class Completion:
  """One request on its way: what was sampled, and where it is computed."""

  request: GenerationRequest
  owner: Any  # whom its generation is delivered to.
  key: bytes  # equal for equal prompts, and for these only.
  row: int = -1
  slot: Any = None  # key of its `Slot`.
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


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The sizes of the caches and of what is computed at once: what programs are compiled for."""

  rows: int  # of the ring: completions side by side, at most.
  prefill: int  # tokens of prompts computed at once.
  page: int  # tokens of a page.
  columns: int  # of a block of the ring.
  blocks: int = 0  # of the ring; 0: as the requests need.
  table: int = 0  # pages of the longest prompt; likewise.
  pages: int = 0  # of all prompts; likewise.
  is_planned: bool = False  # prompts wait for pages, in place of more being made.
  at_once: int | None = 1  # pages read by one round; None: all of a prompt.

  def applied(self, options: decoding.Options) -> decoding.Options:
    return dataclasses.replace(options, pages_at_once=self.at_once or self.table)


def unplanned(rows: int, *, is_cpu: bool) -> Sizes:
  """Returns sizes that follow the requests.

  Args:
    rows: completions side by side, at most.
    is_cpu: loops over short blocks are free; an accelerator waits for the host in each round, and
      reads a whole cache in less time.
  """
  if is_cpu:
    return Sizes(rows, prefill=160, page=64, columns=64)
  return Sizes(rows, prefill=1024, page=64, columns=64, at_once=None)


def planned(
  rows: int,
  *,
  prompt_tokens: int,
  completion_tokens: int,
  long_prompts: int,
  token_bytes: int,
  is_cpu: bool,
) -> Sizes:
  """Returns sizes for all requests within limits, of caches of at most 4 GiB each.

  A ring that would be larger begins with that and grows when completions need it; pages that would
  be more are fewer, and more prompts wait.

  Args:
    rows: completions side by side, at most.
    prompt_tokens: of the longest prompt.
    completion_tokens: of the longest completion.
    long_prompts: how many of the longest prompts find room at the same time. There is at least
      one page for each row; prompts that find no room wait.
    token_bytes: of the keys and values of a token.
    is_cpu: see `unplanned`.
  """
  sizes = unplanned(rows, is_cpu=is_cpu)
  page = min(sizes.page, -(-max(prompt_tokens - 1, 1) // 16) * 16)
  table = -(-max(prompt_tokens - 1, 1) // page)
  longest = min(completion_tokens, max(_CACHE_BYTES // (rows * token_bytes), sizes.columns))
  columns = -(-longest // 16) * 16
  columns = min(sizes.columns, columns) if is_cpu else columns
  pages = min(max(long_prompts * table, rows), _CACHE_BYTES // (page * token_bytes))
  return dataclasses.replace(
    sizes,
    page=page,
    columns=columns,
    blocks=-(-longest // columns),
    table=table,
    pages=max(pages, table),
    is_planned=True,
  )


def regrown(before: int, after: int, newest: int) -> Int[np.ndarray, " after"]:
  """Returns which block of a ring stands where in a ring of more blocks.

  Args:
    before: blocks of the ring.
    after: of the longer one.
    newest: number of the block that was written last, counted from the first step.
  """
  places = np.zeros(after, np.int32)
  for number in range(max(newest - before + 1, 0), newest + 1):
    places[number % after] = number % before
  return places


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


def row_counts(max_rows: int) -> tuple[int, ...]:
  """Returns the numbers of rows that are compiled for, ascending: 8, one between, `max_rows`.

  The one between is their geometric mean, in whole eights: a step costs a constant and a share
  for each row, so each count should save about the same part of the next.
  """
  if max_rows <= _FEWEST_ROWS:
    return (max_rows,)
  between = round((max_rows * _FEWEST_ROWS) ** 0.5 / 8) * 8
  return tuple(sorted({_FEWEST_ROWS, between, max_rows}))


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


def make_rows(
  active: Sequence[Completion],
  count: int,
  prompts: Mapping[Any, Slot],
  *,
  group: int,
  table: int,
  moves: Sequence[tuple[int, int]] = (),
  step: int = 0,
) -> Rows:
  """Lays the state of the completions out by row; rows of none are idle.

  Args:
    active: completions that have a row, and a prompt in the pages.
    count: rows.
    prompts: where they stand, by the key of a completion.
    group: rows of a tile.
    table: pages of the longest prompt.
    moves: rows to be moved in the ring first, from and to.
    step: number of the next decode step.
  """
  tiles = decoding.max_tiles(count, group)
  rows = Rows(
    tokens=np.zeros(count, np.int32),
    prompt_lengths=np.zeros(count, np.int32),
    pages=np.zeros((count, table), np.int32),
    places=np.full(count, -1, np.int32),
    tile_rows=np.zeros((tiles, group), np.int32),
    tile_pages=np.zeros((tiles, table), np.int32),
    tile_lengths=np.zeros(tiles, np.int32),
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
    stop_ids=np.full((count, _STOP_IDS), -1, np.int32),
  )
  rows.moves[: len(moves)] = np.asarray(moves, np.int32).reshape(-1, 2)
  for completion in active:
    request, row, sampled = completion.request, completion.row, len(completion.token_ids)
    sampling, slot = request.sampling, prompts[completion.slot]
    rows.tokens[row] = completion.token_ids[-1] if sampled else request.prompt_ids[-1]
    rows.prompt_lengths[row] = slot.length
    rows.pages[row, : len(slot.pages)] = slot.pages
    rows.lengths[row] = sampled
    rows.remaining[row] = sampling.max_tokens - sampled
    rows.seeds[row] = request.seed >> 32, request.seed & 0xFFFFFFFF
    rows.temperature[row] = sampling.temperature
    rows.top_k[row] = min(sampling.top_k, 2**31 - 1)
    rows.top_p[row] = sampling.top_p
    rows.min_p[row] = sampling.min_p
    stop_ids = sampling.stop_ids[:_STOP_IDS]
    rows.stop_ids[row, : len(stop_ids)] = stop_ids
  for tile, members in enumerate(tiles_of(active, group)):
    slot = prompts[members[0].slot]
    rows.tile_pages[tile, : len(slot.pages)] = slot.pages
    rows.tile_lengths[tile] = slot.length
    for number, completion in enumerate(members):
      rows.places[completion.row] = tile * group + number
      rows.tile_rows[tile, number] = completion.row
  return rows


def tiles_of(active: Sequence[Completion], group: int) -> list[list[Completion]]:
  """Returns the completions that share their prompts, at most `group` in a tile, at least two."""
  if group == 1:
    return []
  sharing: dict[Any, list[Completion]] = {}
  for completion in active:
    sharing.setdefault(completion.slot, []).append(completion)
  tiles = [
    members[start : start + group]
    for members in sharing.values()
    for start in range(0, len(members), group)
  ]
  return [tile for tile in tiles if len(tile) > 1]


def make_chunks(
  prompts: Sequence[tuple[Int[np.ndarray, " _"], Slot]],
  *,
  tokens: int,
  page: int,
  pages: int,
  table: int,
) -> Iterator[Chunk]:
  """Cuts prompts, one behind the other, into chunks of equally many tokens; pads the last.

  Args:
    prompts: ids less the last, each with where they go.
    tokens: of a chunk.
    page: tokens of a page.
    pages: how many there are.
    table: pages of the longest prompt.
  """
  ids = np.concatenate([of_prompt for of_prompt, _ in prompts])
  number = np.repeat(np.arange(len(prompts)), [len(of_prompt) for of_prompt, _ in prompts])
  position = np.concatenate([np.arange(len(of_prompt)) for of_prompt, _ in prompts])
  place = np.concatenate(
    [
      np.asarray(slot.pages, np.int32)[np.arange(len(of_prompt)) // page]
      for of_prompt, slot in prompts
    ]
  )
  for start in range(0, len(ids), tokens):
    part = slice(start, start + tokens)
    room = (0, tokens - len(ids[part]))
    first = prompts[number[start]][1]
    past_pages = np.zeros(table, np.int32)
    past_pages[: len(first.pages)] = first.pages
    yield Chunk(
      tokens=np.pad(ids[part], room).astype(np.int32),
      segment_ids=np.pad(number[part] - number[start] + 1, room).astype(np.int32),
      positions=np.pad(position[part], room).astype(np.int32),
      pages=np.pad(place[part], room, constant_values=pages).astype(np.int32),
      past_pages=past_pages,
      past=np.asarray(position[start], np.int32),
    )
