"""What the programs of the embedded sampler take, as shapes: for tests that read programs."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.compilation.programs import abstract
from grpo_jax.engines import (
  sampler_inputs,
  sampler_programs,
  sampler_weights,
  scheduling,
  weight_sync,
)
from grpo_jax.engines.sampler_sizes import SamplerSizes
from grpo_jax.engines.scheduling import Slot
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import Products


class Described(NamedTuple):
  """The arguments of both programs, without the options.

  Attributes:
    prefill: Arguments of `decoding.prefill`.
    decode: Arguments of `decoding.decode`.
    options: Static options of both.
  """

  prefill: tuple[Any, ...]
  decode: tuple[Any, ...]
  options: sampler_inputs.ProgramOptions


def described(
  config: ModelConfig, params: Any, *, rows: int, sizes: SamplerSizes, dtype="float32", form="ring"
) -> Described:
  """Returns the arguments of the programs for a number of rows.

  Args:
    config: Sizes of the model.
    params: The trainer's arrays or `jax.ShapeDtypeStruct`s with shardings.
    rows: Number of rows of the decode program.
    sizes: Sizes of the caches.
    dtype: Dtype of the products.
    form: Form of the cache.
  """
  options = sampler_inputs.ProgramOptions(config, Products(dtype), chunk=4, group=4, form=form)
  if form == "rows":
    options = dataclasses.replace(options, has_filters=False)
  options = sizes.applied(weight_sync._with_sharding(options, params))
  weights = sampler_weights.described(params, options)
  ring = sampler_programs._described(
    sampler_programs.empty_own, sizes.blocks, sizes.rows, sizes.columns, options
  )
  pages = sampler_programs._described(
    sampler_programs.empty_pages,
    sampler_programs.page_counts(options, sizes),
    sizes.page,
    options,
  )
  pools = sizes.pools(config)
  prompt = [(np.zeros(1, np.int32), Slot(pages=((0,),) * len(pools), length=1))]
  chunk = next(scheduling.make_chunks(prompt, pools=pools, tokens=sizes.prefill))
  of_rows = scheduling.make_rows([], rows, {}, **sampler_programs.row_layout(options, sizes))
  state, leave_at = jax.tree.map(np.asarray, of_rows), np.int32(0)
  return Described(
    (weights, pages, abstract(chunk)),
    (weights, pages, ring, abstract(state), abstract(leave_at)),
    options,
  )
