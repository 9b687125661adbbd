"""The programs of the sampler, their compilation ahead of time, and the arrays that they take."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import numpy as np

from grpo_jax.compilation.programs import CompileJob, OutOfMemory, Program, abstract
from grpo_jax.engines import (
  cache_forms,
  decoding,
  kv_cache,
  ring_cache,
  sampler_inputs,
  scheduling,
)
from grpo_jax.engines.base import GenerationRequest, SamplingParams
from grpo_jax.engines.sampler_sizes import SamplerSizes
from grpo_jax.engines.scheduling import RunningCompletion, Slot

_ANY_REQUEST = GenerationRequest("", np.zeros(1, np.int32), SamplingParams(1), 0)
_REMEDY = "lower engine.max_rows, sampling.max_tokens or rollout.max_tokens"

_decode = jax.jit(decoding.decode, static_argnames="options", donate_argnames="own")
_prefill = jax.jit(decoding.prefill, static_argnames="options", donate_argnames="cache")
_read_again = jax.jit(decoding.read_again, static_argnames="options", donate_argnames="own")
other_pages = jax.jit(kv_cache.other_pages, static_argnames="options")
empty_pages = jax.jit(kv_cache.empty_pages, static_argnums=(0, 1, 2))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def empty_own(blocks: int, rows: int, length: int, options: Any) -> kv_cache.Cache:
  return cache_forms.of(options).empty(blocks, rows, length, options)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _grown(
  layer: kv_cache.LayerCache,
  places: Any,
  window: int | None,
  blocks: int,
  length: int,
  options: Any,
) -> kv_cache.LayerCache:
  return cache_forms.of(options).grown(layer, places, window, blocks, length, options)


def grow(own: kv_cache.Cache, places: Any, blocks: int, length: int, options: Any) -> None:
  """Lengthens the cache of sampled tokens in place: of one layer at a time, both are in memory.

  Args:
    own: The cache.
    places: Blocks of the old cache at each place of a longer one; see `ring_cache.grown`.
    blocks: Blocks of a layer without a window.
    length: Columns of a block.
    options: Options of the programs.
  """
  for i, kind in enumerate(options.config.kinds):
    own[i] = _grown(own[i], places, kind.window, blocks, length, options)


class Programs:
  """The programs of a sampler, with the executables that were compiled ahead."""

  def __init__(self):
    self.decode = Program(_decode, name="sampling", static=["options"], remedy=_REMEDY)
    self.prefill = Program(_prefill, name="reading prompts", static=["options"], remedy=_REMEDY)
    self.read_again = Program(
      _read_again, name="reading completions again", static=["options"], remedy=_REMEDY
    )

  def jobs(
    self,
    weights: Any,
    options: sampler_inputs.ProgramOptions,
    sizes: SamplerSizes,
    *,
    reads_again: bool = False,
    has_filters: bool = True,
  ) -> list[CompileJob]:
    """Returns the compilations that serve all requests within `sizes`.

    Args:
      weights: Shapes, dtypes and shardings of the weights.
      options: Options of the programs.
      sizes: Planned sizes.
      reads_again: Whether new weights may have to read unfinished completions.
      has_filters: Whether requests may have top-k, top-p or min-p.

    Raises:
      OutOfMemory: The longest planned completion has no row in the memory of sampled tokens.
    """
    _check_longest(options, sizes)
    own, pages = caches(options, sizes)
    options = sizes.applied(options)
    pools = sizes.pools(options.config)
    slot = Slot(pages=((0,),) * len(pools), length=1)
    prompt = [(np.zeros(1, np.int32), slot)]
    chunk = abstract(next(scheduling.make_chunks(prompt, pools=pools, tokens=sizes.prefill)))
    detail = f"{sizes.prefill} tokens"
    jobs = [self.prefill.job(weights, pages, chunk, options=options, detail=detail)]
    for count in scheduling.row_counts(sizes.rows_of(sizes.blocks, options)):
      given = weights, pages, own, count
      jobs += self._decoding(*given, f"{count} rows", options, sizes, has_filters)
    if reads_again:
      detail = f"{sizes.prefill} tokens"
      jobs.append(self._reading_again(weights, pages, own, detail, options, sizes))
    return jobs

  def later(
    self,
    weights: Any,
    options: sampler_inputs.ProgramOptions,
    sizes: SamplerSizes,
    *,
    has_filters: bool = True,
  ) -> list[tuple[tuple[Any, Any], list[CompileJob]]]:
    """Describes what planned completions make the cache of sampled tokens grow to.

    Args:
      weights: Shapes, dtypes and shardings of the weights.
      options: Options of the programs.
      sizes: Sizes of the first cache.
      has_filters: Whether requests may have top-k, top-p or min-p.

    Returns:
      For each size after the first, shapes, dtypes and shardings of the caches, and the
      compilations that take most memory with them.
    """
    return [
      (caches(options, grown), self._later(weights, options, before, grown, has_filters))
      for before, grown in itertools.pairwise(sizes.levels(options))
    ]

  def _later(
    self,
    weights: Any,
    options: sampler_inputs.ProgramOptions,
    before: SamplerSizes,
    sizes: SamplerSizes,
    has_filters: bool,
  ) -> list[CompileJob]:
    own, pages = caches(options, sizes)
    old, _ = caches(options, before)
    options = sizes.applied(options)
    count = sizes.rows_of(sizes.blocks, options)
    detail = f"{count} rows × {sizes.blocks * sizes.columns} columns"
    jobs = self._decoding(weights, pages, own, count, detail, options, sizes, has_filters)
    if count < sizes.rows:
      jobs.append(self._reading_again(weights, pages, own, detail, options, sizes))
    if count == before.rows_of(before.blocks, options):
      jobs.append(_growing(old, detail, options, before, sizes))
    return jobs

  def _decoding(
    self,
    weights: Any,
    pages: Any,
    own: Any,
    count: int,
    detail: str,
    options: sampler_inputs.ProgramOptions,
    sizes: SamplerSizes,
    has_filters: bool,
  ) -> list[CompileJob]:
    rows = scheduling.make_rows([], count, {}, **row_layout(options, sizes))
    arguments = (weights, pages, own, abstract(rows), abstract(np.int32(0)))
    return [
      self.decode.job(*arguments, options=chosen, detail=f"{detail}{kind}")
      for chosen, kind in _variants(options, has_filters)
    ]

  def _reading_again(
    self,
    weights: Any,
    pages: Any,
    own: Any,
    detail: str,
    options: sampler_inputs.ProgramOptions,
    sizes: SamplerSizes,
  ) -> CompileJob:
    slot = Slot(pages=((0,),) * len(sizes.pools(options.config)), length=1)
    begun = RunningCompletion(_ANY_REQUEST, None, b"", row=0, token_ids=[0])
    layout = piece_layout(options, sizes)
    pieces = next(scheduling.make_pieces([begun], {b"": slot}, **layout, step=1))
    arguments = (weights, pages, own, abstract(pieces))
    return self.read_again.job(*arguments, options=options, detail=detail)


def _growing(
  old: kv_cache.Cache,
  detail: str,
  options: sampler_inputs.ProgramOptions,
  before: SamplerSizes,
  sizes: SamplerSizes,
) -> CompileJob:
  """Returns the compilation that lengthens the largest layer of a described cache."""
  width = lambda i: math.prod(jax.tree.leaves(old[i])[0].shape)
  largest = max(range(len(old)), key=width)
  window = options.config.kinds[largest].window
  held = lambda x: ring_cache.held_blocks(x.blocks, window, x.columns)
  places = {held(sizes): scheduling.regrown(held(before), held(sizes), 0)}
  static = (window, sizes.blocks, sizes.columns, options)
  lower = lambda: _grown.lower(old[largest], places, *static)
  return CompileJob(f"growing keys and values {detail}", lambda: lower().compile(), _REMEDY, lower)


def _check_longest(options: sampler_inputs.ProgramOptions, sizes: SamplerSizes) -> None:
  """Raises OutOfMemory if the longest planned completion has no row; see `Programs.jobs`."""
  longest = sizes.longest(options)
  if longest is None or longest >= sizes.completion:
    return
  assert sizes.sampled_bytes is not None
  needed = kv_cache.row_bytes(-(-sizes.completion // sizes.columns) * sizes.columns, options)
  raise OutOfMemory(
    f"engine.cache_gib={sizes.sampled_bytes / 2**30:.4g} holds no completion of"
    f" {sizes.completion} tokens, whose keys and values take {needed / 2**30:.4g} GiB of a device:"
    " raise it, or lower sampling.max_tokens"
  )


def piece_layout(options: sampler_inputs.ProgramOptions, sizes: SamplerSizes) -> dict[str, Any]:
  """Returns the sizes of a call of `decoding.read_again`."""
  pools = sizes.pools(options.config)
  return {"tokens": sizes.prefill, "piece": sizes.piece, "pools": pools}


def row_layout(options: sampler_inputs.ProgramOptions, sizes: SamplerSizes) -> dict[str, Any]:
  """Returns the sizes and the form of the state of rows."""
  pools = sizes.pools(options.config)
  return {"group": options.group, "form": options.form, "pools": pools}


def _variants(
  options: sampler_inputs.ProgramOptions, has_filters: bool
) -> list[tuple[sampler_inputs.ProgramOptions, str]]:
  """Returns the options of the decode programs of a number of rows, with a name for each."""
  if options.form == "ring":
    return [(options, "")]
  plain = [(dataclasses.replace(options, has_filters=False), "")]
  filtered = dataclasses.replace(options, has_filters=True)
  return [*plain, (filtered, ", filters")] if has_filters else plain


def caches(options: sampler_inputs.ProgramOptions, sizes: SamplerSizes) -> tuple[Any, Any]:
  """Returns shapes, dtypes and shardings of the sampled tokens' cache and of the pages.

  Args:
    options: Options of the calls.
    sizes: Planned sizes.
  """
  options = sizes.applied(options)
  own = _described(empty_own, *own_shape(options, sizes), options)
  return own, _described(empty_pages, page_counts(options, sizes), sizes.page, options)


def own_shape(options: sampler_inputs.ProgramOptions, sizes: SamplerSizes) -> tuple[int, int, int]:
  """Returns blocks, rows and columns of a block of the sampled tokens' cache."""
  return sizes.blocks, sizes.rows_of(sizes.blocks, options), sizes.columns


def page_counts(options: sampler_inputs.ProgramOptions, sizes: SamplerSizes) -> tuple[int, ...]:
  """Returns the number of pages of the layers of each window."""
  return tuple(pool.count for pool in sizes.pools(options.config))


def _described(make: Any, *arguments: Any) -> Any:
  """Returns shapes, dtypes and shardings of what `make` returns for static arguments."""
  placed = make.lower(*arguments).compile().output_shardings
  shapes = jax.eval_shape(lambda: make(*arguments))
  place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  return jax.tree.map(place, shapes, placed)
