"""The sizes of the sampler's caches and of its calls, for which programs are compiled. Pure."""

import bisect
import dataclasses
import math
from collections.abc import Mapping

from grpo_jax.engines import kv_cache, prompt_pages, sampler_inputs, scheduling
from grpo_jax.engines.prompt_pages import Pool
from grpo_jax.models.config import ModelConfig

_CACHE_BYTES = 4 << 30
_MOST_BLOCKS = 1 << 31
_PIECE = 128  # more tokens mean more padding, fewer mean more reading of prompts.


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
    at_once: Pages read by one round of a loop.
    completion: Tokens of the longest planned completion; 0: none is planned.
    sampled_bytes: Bytes of each device that keys and values of sampled tokens may take; None: any
      number. Where completions are longer, the cache then has fewer rows.
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
  at_once: int = 1
  completion: int = 0
  sampled_bytes: int | None = None

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

  def rows_of(self, blocks: int, options: sampler_inputs.ProgramOptions) -> int:
    """Returns the number of rows that the cache of sampled tokens has with a number of blocks."""
    if self.sampled_bytes is None or not blocks:
      return self.rows
    return kv_cache.fitting_rows(self.sampled_bytes, self.rows, blocks * self.columns, options)

  def bytes_of(self, blocks: int, rows: int, options: sampler_inputs.ProgramOptions) -> int:
    """Returns the bytes of each device for which `rows_of` these blocks is at least `rows`."""
    own_rows = kv_cache.rows_of_device(rows, self.rows, options)
    return own_rows * kv_cache.row_bytes(blocks * self.columns, options)

  def within(self, options: sampler_inputs.ProgramOptions) -> "SamplerSizes":
    """Returns sizes with which the first cache of sampled tokens has room for all rows."""
    if self.rows_of(self.blocks, options) == self.rows:
      return self
    tile = min(self.columns, kv_cache.WINDOW_MULTIPLE)
    tiles = range(1, self.blocks * self.columns // tile + 1)
    leaves_out = lambda n: (
      dataclasses.replace(self, columns=n * tile).rows_of(1, options) < self.rows
    )
    count = max(bisect.bisect_left(tiles, True, key=leaves_out), 1)
    if self.columns == tile:
      return dataclasses.replace(self, blocks=count)
    return dataclasses.replace(self, blocks=1, columns=_dividing(count * tile, self.completion))

  def levels(self, options: sampler_inputs.ProgramOptions) -> tuple["SamplerSizes", ...]:
    """Returns the sizes that planned completions make the cache take, these first.

    Each has more columns; where all rows need more than `sampled_bytes`, it has fewer rows.
    """
    found = [self]
    while self.blocks and found[-1].blocks * self.columns < self.completion:
      longer = self.blocks_of(found[-1].blocks * self.columns + 1, options)
      if longer <= found[-1].blocks:  # the longest completions are refused.
        break
      found.append(dataclasses.replace(self, blocks=longer))
    return tuple(found)

  def loses_rows(self, options: sampler_inputs.ProgramOptions) -> bool:
    """Returns whether longer completions leave fewer rows, so that some have to wait."""
    return any(x.rows_of(x.blocks, options) < self.rows for x in self.levels(options))

  def blocks_of(self, tokens: int, options: sampler_inputs.ProgramOptions) -> int:
    """Returns the blocks for completions of that many tokens, one of a few numbers.

    It is a power of two, or what the longest planned completion needs, or the most blocks with
    which the cache has a row.
    """
    blocks = scheduling.power_of_two(-(-tokens // self.columns))
    if tokens <= self.completion:
      blocks = min(blocks, -(-self.completion // self.columns))
    return blocks if self.rows_of(blocks, options) else self._most_blocks(options)

  def longest(self, options: sampler_inputs.ProgramOptions) -> int | None:
    """Returns the tokens of the longest completion that has a row; None: any number."""
    return None if self.sampled_bytes is None else self._most_blocks(options) * self.columns

  def _most_blocks(self, options: sampler_inputs.ProgramOptions) -> int:
    rows = lambda blocks: -self.rows_of(blocks, options)
    return bisect.bisect_left(range(1, _MOST_BLOCKS), 0, key=rows)

  def applied(self, options: sampler_inputs.ProgramOptions) -> sampler_inputs.ProgramOptions:
    return dataclasses.replace(options, pages_at_once=self.at_once)


def unplanned(rows: int, *, form: str) -> SamplerSizes:
  """Returns sizes that follow the requests.

  Args:
    rows: Largest number of completions at the same time.
    form: Form of the cache. Loops over short blocks of a ring are cheap. In the other form the
      queries of a page's readers are gathered, so pages are long.
  """
  if form == "ring":
    return SamplerSizes(rows, prefill=160, page=64, columns=64)
  return SamplerSizes(rows, prefill=1024, page=256, columns=64, at_once=4)


def planned(
  rows: int,
  *,
  prompt_tokens: int,
  completion_tokens: int,
  long_prompts: int,
  token_bytes: Mapping[int | None, int],
  form: str,
  whole_caches: bool = False,
  sampled_bytes: int | None = None,
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
    sampled_bytes: Bytes that the cache of sampled tokens may take; see `SamplerSizes`.
  """
  sizes, step = unplanned(rows, form=form), 16 if form == "ring" else 64
  page = min(sizes.page, -(-max(prompt_tokens - 1, 1) // step) * step)
  table = -(-max(prompt_tokens - 1, 1) // page)
  longest, pages = completion_tokens, max(long_prompts * table, rows)
  made = dataclasses.replace(sizes, page=page, table=table, prompts=long_prompts)
  made = dataclasses.replace(made, completion=completion_tokens, sampled_bytes=sampled_bytes)
  if not whole_caches:
    longest = min(longest, max(_fitting_tokens(_CACHE_BYTES // rows, token_bytes), sizes.columns))
    pages = _fitting_pages(dataclasses.replace(made, pages=pages), token_bytes)
  columns = -(-longest // step) * step
  if form == "ring":
    columns = min(sizes.columns, columns)
  elif longest < completion_tokens:
    longest = columns = _dividing(columns, completion_tokens)
  blocks, pages = -(-longest // columns), max(pages, table)
  return dataclasses.replace(made, columns=columns, blocks=blocks, pages=pages, is_planned=True)


def _dividing(columns: int, tokens: int) -> int:
  """Returns columns that have a multiple hardly above `tokens`.

  Args:
    columns: Largest answer; the least is more than half of it.
    tokens: Tokens of the longest completion.
  """
  tile = kv_cache.WINDOW_MULTIPLE
  most, needed = max(columns // tile, 1), -(-tokens // tile)
  return tile * min(range(most, most // 2, -1), key=lambda count: -needed % count)


def _fitting_tokens(room: int, token_bytes: Mapping[int | None, int]) -> int:
  """Returns how many tokens of a row fit; a layer with a window keeps as many as it has."""
  kept = lambda count: sum(
    size * kv_cache.held(count, window, multiple=kv_cache.WINDOW_MULTIPLE)
    for window, size in token_bytes.items()
  )
  return bisect.bisect_right(range(1 << 31), room, key=kept) - 1


def _fitting_pages(wanted: SamplerSizes, token_bytes: Mapping[int | None, int]) -> int:
  """Returns how many of the wanted pages fit."""

  def taken(pages):
    sizes = dataclasses.replace(wanted, pages=pages)
    return sum(size * sizes.pool(window).count for window, size in token_bytes.items())

  counts = range(wanted.pages + 1)
  return bisect.bisect_right(counts, _CACHE_BYTES // wanted.page, key=taken) - 1
