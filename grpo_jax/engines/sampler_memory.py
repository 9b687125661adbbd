"""The memory that the embedded sampler takes, and how many rows fit. Pure.

The caches are those that `sampler_sizes.planned` plans. What a program needs besides is arithmetic,
each term at its largest: a run chooses its rows by it before anything is compiled.
"""

import bisect
import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from grpo_kernels.implementations import Chip

from grpo_jax.engines import kv_cache, row_cache, sampler_sizes, stored_keys
from grpo_jax.engines.options import USUAL_ROWS
from grpo_jax.engines.sampler_inputs import ProgramOptions
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import Products

GIB = 1 << 30
_SIXTEENTH = GIB // 16
_TILE = kv_cache.WINDOW_MULTIPLE
_FLOAT32 = 4
_WITH_BFLOAT16 = 8  # major compute capability of NVIDIA's first GPUs that multiply bfloat16.
_LOGITS = 6  # arrays [rows V] at once: logits, probabilities, noise and what sorts them.


@dataclasses.dataclass(frozen=True)
class Rows:
  """A number of rows and what it takes, in bytes of one device.

  Attributes:
    count: Completions decoded at the same time.
    whole_caches: Whether the caches are made for the longest completions at once, however large.
    caches: Bytes of keys and values.
    program: Bytes of a decode step besides its arguments.
  """

  count: int
  whole_caches: bool
  caches: int
  program: int


@dataclasses.dataclass(frozen=True)
class SamplerPart:
  """The part of the sampler that one device has.

  Attributes:
    model: Sizes of the model.
    products: Options of matrix products.
    sizes: Planned sizes without those of rows: prompt_tokens, completion_tokens, group_size, and
      whether every row has its own prompt, as "own_prompts".
    heads: Devices over which heads are split.
    rows: Devices over which rows are split.
    cache_dtype: Dtype of stored keys and values; see `ProgramOptions`.
    copies_cache: Whether a decode step copies the cache of sampled tokens before its loop; see
      `copies_cache`.
  """

  model: ModelConfig
  products: Products
  sizes: Mapping[str, Any]
  heads: int = 1
  rows: int = 1
  cache_dtype: str | None = None
  copies_cache: bool = True

  def of(self, rows: int, *, whole_caches: bool) -> Rows:
    """Returns what a number of rows takes.

    Args:
      rows: Completions decoded at the same time.
      whole_caches: Whether the caches are made for the longest completions at once.
    """
    planned = self._planned(rows, whole_caches=whole_caches)
    columns = planned.blocks * planned.columns
    taken = self._taken(self._own(rows), columns, planned, has_reserve=True)
    return Rows(rows, whole_caches, *taken)

  def most_sampled(self, rows: int, room: int, *, whole_caches: bool, others: int = 0) -> float:
    """Returns the GiB that keys and values of sampled tokens may take as completions grow.

    They and the programs fit into the room, with all rows and with the longest completions. The
    limit is never above what all rows need, and never below one row of each device. Where a step
    writes in place, nothing is reserved: a device that runs out reads its completions again.

    Args:
      rows: Completions decoded at the same time.
      room: Bytes of a device for caches and programs.
      whole_caches: Whether the caches are made for the longest completions at once.
      others: Bytes of the largest program that runs between decode steps, beside the caches.
    """
    planned, own_rows = self._planned(rows, whole_caches=whole_caches), self._own(rows)
    longest = planned.columns * -(-self.sizes["completion_tokens"] // planned.columns)
    of_row = lambda columns: kv_cache.row_bytes(columns, self._options) // self.heads

    def is_too_large(units):
      limit = units * _SIXTEENTH
      columns = range(_TILE, longest + 1, _TILE)
      fitting = bisect.bisect_right(columns, limit // own_rows, key=of_row)
      shapes = [(own_rows, columns[fitting - 1])] if fitting else []
      shapes.append((min(limit // of_row(longest), own_rows), longest))
      taken = (self._taken(*shape, planned, has_reserve=self.copies_cache) for shape in shapes)
      return any(caches + max(program, others) > room for caches, program in taken)

    least, most = (-(-count * of_row(longest) // _SIXTEENTH) for count in (1, own_rows))
    fitting = bisect.bisect_left(range(least, most + 1), True, key=is_too_large)
    return (least + max(fitting - 1, 0)) * _SIXTEENTH / GIB

  @property
  def _options(self) -> ProgramOptions:
    return ProgramOptions(self.model, self.products, chunk=1, cache_dtype=self.cache_dtype)

  def _own(self, rows: int) -> int:
    """Returns how many of the rows are on one device."""
    return rows // self.rows if rows % self.rows == 0 else rows

  def _planned(self, rows: int, *, whole_caches: bool) -> sampler_sizes.SamplerSizes:
    sizes = self.sizes
    return sampler_sizes.planned(
      rows,
      prompt_tokens=sizes["prompt_tokens"],
      completion_tokens=sizes["completion_tokens"],
      long_prompts=rows if sizes["own_prompts"] else -(-rows // sizes["group_size"]),
      token_bytes=kv_cache.token_bytes(self._options),
      form="rows",
      whole_caches=whole_caches,
    )

  def _taken(
    self, own_rows: int, columns: int, planned: sampler_sizes.SamplerSizes, *, has_reserve: bool
  ) -> tuple[int, int]:
    """Returns the bytes of caches and of a program for a number of rows of one device.

    Args:
      own_rows: Rows of the device.
      columns: Columns of a row.
      planned: Sizes of the pages.
      has_reserve: Whether a layer's caches in float32 are counted, which no program of a GPU that
        writes in place has shown.
    """
    options = self._options
    of_token = kv_cache.token_bytes(options)
    own, both = {}, {}
    for window, size in of_token.items():
      own[window] = own_rows * row_cache.held_columns(columns, window) * size // self.heads
      pages = planned.pool(window).count * planned.page
      both[window] = own[window] + pages * size // self.heads
    layers = collections.Counter(kind.window for kind in self.model.kinds)
    largest = max(both[window] // count for window, count in layers.items())
    program = _LOGITS * _FLOAT32 * own_rows * self.model.vocab_size
    # Rows move to other places before the loop: of each layer one at a time is apart.
    program += sum(own.values()) // (1 if self.copies_cache else max(own_rows, 1))
    if has_reserve:
      program += _FLOAT32 * self.model.head_dim * largest // stored_keys.head_bytes(options)
    return sum(both.values()), program


def copies_cache(chip: Chip) -> bool:
  """Returns whether a chip's compiler copies the cache before the loop that writes to it.

  A TPU's does, into tiles of another shape. GPUs with bfloat16 units write in place; of older ones
  the temporaries vary with the number of layers, so the copy stays in their arithmetic.
  """
  major = int(chip.compute_capability.partition(".")[0] or 0)
  return chip.platform != "gpu" or major < _WITH_BFLOAT16


def most_rows(part: SamplerPart, wanted: int, room: int) -> Rows:
  """Returns the largest number of rows that fits: all that are wanted, or a power of two.

  More than 64 rows have whole caches. Up to 64 begin with caches of at most 4 GiB, which grow when
  completions need it, as they do where memory is not known.

  Args:
    part: Part of the sampler that a device has.
    wanted: Completions that a step samples at the same time.
    room: Bytes of a device for caches and programs.
  """
  powers = [1 << n for n in range(wanted.bit_length() - 1, 2, -1)]
  counts = [wanted, *(count for count in powers if count < wanted)]
  tried = [part.of(count, whole_caches=count > USUAL_ROWS) for count in counts]
  fitting = (rows for rows in tried if rows.caches + rows.program <= room)
  return next(fitting, tried[-1])


def sizes_for(
  max_rows: int,
  options: ProgramOptions,
  prompt_tokens: int | None,
  completion_tokens: int | None,
  *,
  long_prompts: int | None,
  whole_caches: bool,
  sampled_bytes: int | None = None,
) -> sampler_sizes.SamplerSizes:
  """Returns the sizes of the caches: fixed if the longest prompt and completion are planned."""
  if prompt_tokens is None or completion_tokens is None:
    sizes = sampler_sizes.unplanned(max_rows, form=options.form)
    return dataclasses.replace(sizes, sampled_bytes=sampled_bytes)
  return sampler_sizes.planned(
    max_rows,
    prompt_tokens=prompt_tokens,
    completion_tokens=completion_tokens,
    long_prompts=long_prompts or -(-max_rows // options.group),
    token_bytes=kv_cache.token_bytes(options),
    form=options.form,
    whole_caches=whole_caches,
    sampled_bytes=sampled_bytes,
  )


def check_sizes(
  config: ModelConfig, max_rows: int, chunk_tokens: int, num_valid_tokens: int | None
) -> None:
  """Refuses sizes of a sampler that are not positive, or ids that the model lacks.

  Raises:
    ValueError: A size is wrong.
  """
  if max_rows < 1 or chunk_tokens < 1:
    raise ValueError(f"max_rows and chunk_tokens must be positive: {max_rows}, {chunk_tokens}")
  if num_valid_tokens is not None and not 1 <= num_valid_tokens <= config.vocab_size:
    raise ValueError(
      f"num_valid_tokens must be in [1, vocab_size = {config.vocab_size}], got {num_valid_tokens}"
    )
