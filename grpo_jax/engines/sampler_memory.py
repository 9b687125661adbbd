"""The memory that the embedded sampler takes, and how many rows fit. Pure.

The caches are those that `sampler_sizes.planned` plans. What a program needs besides is arithmetic,
each term at its largest: a run chooses its rows by it before anything is compiled.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from grpo_jax.engines import kv_cache, row_cache, sampler_sizes, stored_keys
from grpo_jax.engines.options import USUAL_ROWS
from grpo_jax.engines.sampler_inputs import ProgramOptions
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import Products

_FLOAT32 = 4
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
  """

  model: ModelConfig
  products: Products
  sizes: Mapping[str, Any]
  heads: int = 1
  rows: int = 1
  cache_dtype: str | None = None

  def of(self, rows: int, *, whole_caches: bool) -> Rows:
    """Returns what a number of rows takes.

    Args:
      rows: Completions decoded at the same time.
      whole_caches: Whether the caches are made for the longest completions at once.
    """
    sizes = self.sizes
    options = ProgramOptions(self.model, self.products, chunk=1, cache_dtype=self.cache_dtype)
    of_token = kv_cache.token_bytes(options)
    planned = sampler_sizes.planned(
      rows,
      prompt_tokens=sizes["prompt_tokens"],
      completion_tokens=sizes["completion_tokens"],
      long_prompts=rows if sizes["own_prompts"] else -(-rows // sizes["group_size"]),
      token_bytes=of_token,
      form="rows",
      whole_caches=whole_caches,
    )
    own_rows = rows // self.rows if rows % self.rows == 0 else rows
    columns = planned.blocks * planned.columns
    own, both = {}, {}
    for window, size in of_token.items():
      own[window] = own_rows * row_cache.held_columns(columns, window) * size // self.heads
      pages = planned.pool(window).count * planned.page
      both[window] = own[window] + pages * size // self.heads
    layers = collections.Counter(kind.window for kind in self.model.kinds)
    largest = max(both[window] // count for window, count in layers.items())
    program = _LOGITS * _FLOAT32 * own_rows * self.model.vocab_size
    program += sum(own.values())  # a GPU's compiler copies it before the loop that writes to it.
    # A layer's caches in float32.
    program += _FLOAT32 * self.model.head_dim * largest // stored_keys.head_bytes(options)
    return Rows(rows, whole_caches, sum(both.values()), program)


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
