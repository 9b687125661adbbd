"""The programs of the sampler, their compilation ahead of time, and the arrays that they take."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from grpo_jax.compilation.programs import CompileJob, Program, abstract
from grpo_jax.engines import (
  cache_forms,
  decoding,
  kv_cache,
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
    """
    own, pages = caches(options, sizes)
    options = sizes.applied(options)
    pools = sizes.pools(options.config)
    slot = Slot(pages=((0,),) * len(pools), length=1)
    prompt = [(np.zeros(1, np.int32), slot)]
    chunk = abstract(next(scheduling.make_chunks(prompt, pools=pools, tokens=sizes.prefill)))
    detail = f"{sizes.prefill} tokens"
    jobs = [self.prefill.job(weights, pages, chunk, options=options, detail=detail)]
    for count in scheduling.row_counts(sizes.rows_of(sizes.blocks, options)):
      rows = scheduling.make_rows([], count, {}, **row_layout(options, sizes))
      arguments = (weights, pages, own, abstract(rows), abstract(np.int32(0)))
      for chosen, kind in _variants(options, has_filters):
        detail = f"{count} rows{kind}"
        jobs.append(self.decode.job(*arguments, options=chosen, detail=detail))
    if reads_again:
      begun = RunningCompletion(_ANY_REQUEST, None, b"", row=0, token_ids=[0])
      layout = piece_layout(options, sizes)
      pieces = next(scheduling.make_pieces([begun], {b"": slot}, **layout, step=1))
      arguments = (weights, pages, own, abstract(pieces))
      detail = f"{sizes.prefill} tokens"
      jobs.append(self.read_again.job(*arguments, options=options, detail=detail))
    return jobs


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
