"""The embedded sampler on parameters that are split over eight devices."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.implementations import assumed_chip

from grpo_jax.engines import (
  decoding,
  kv_cache,
  sampler_inputs,
  sampler_programs,
  sampler_sizes,
  sampler_weights,
  weight_sync,
)
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.learn import sharding
from grpo_jax.models import leaves, transformer
from grpo_jax.models.config import LayerKind
from grpo_jax.models.products import Products
from grpo_plan import hlo_collectives
from tests.engines import described, tiny

MESHES = [
  {"data": 2, "fsdp": 2, "tensor": 2},
  {"data": 1, "fsdp": 2, "tensor": 4},  # four parts of two key/value heads: kept whole.
]


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape.values())))
@pytest.mark.parametrize("form", ["ring", "rows"])
@pytest.mark.long
def test_split_parameters_sample_the_tokens_of_one_device(form, shape):
  with_windows = tiny.config(vocab_size=64, layer_kinds=(LayerKind(5), LayerKind()))
  assert_split_samples_as_whole(with_windows, form, shape)


@pytest.mark.long
def test_split_experts_sample_the_tokens_of_one_device():
  shape = {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}
  assert_split_samples_as_whole(tiny.config("qwen2_moe", vocab_size=64), "rows", shape)


@pytest.mark.long
def test_a_split_cache_of_codes_samples_the_tokens_of_one_device():
  assert_split_samples_as_whole(
    tiny.config(vocab_size=64), "rows", MESHES[0], atol=1e-3, cache_dtype="int8"
  )


def assert_split_samples_as_whole(model_config, form, shape, *, atol=1e-5, **settings):
  tree = tiny.params(model_config)
  mesh = sharding.make_mesh(**shape)
  placement = sharding.param_shardings(transformer.logical_axes(model_config), mesh, shapes=tree)
  with assumed_chip(tiny.CHIPS[form]):
    split = JaxSampler(model_config, max_rows=8, chunk_tokens=4, **settings)
  split.load_weights(jax.device_put(tree, placement), version=1)
  whole = JaxSampler(model_config, max_rows=8, chunk_tokens=4, **settings)
  whole.load_weights(tree, version=1)
  requests = tiny.groups([[1, 2, 3], [5, 6, 7, 8]], 4, max_tokens=70)
  wanted, got = tiny.run(whole, requests), tiny.run(split, requests)
  for name, generation in wanted.items():
    assert got[name].token_ids.tolist() == generation.token_ids.tolist()
    np.testing.assert_allclose(got[name].logprobs, generation.logprobs, atol=atol)


WIDE = {"hidden_size": 80, "intermediate_size": 208, "num_heads": 8, "head_dim": 10}
TOKENS = 48  # of a prefill; no other length of the model.


def prefill_on(shape):
  """Returns the collectives of a prefill, bytes of the kernels, and the config of the model."""
  model_config = dataclasses.replace(tiny.config(vocab_size=64), **WIDE)
  mesh = sharding.make_mesh(**shape)
  tree = transformer.init(jax.random.key(0), model_config)
  lies = sharding.param_shardings(transformer.logical_axes(model_config), mesh, shapes=tree)
  tree = jax.device_put(tree, lies)
  options = weight_sync._with_sharding(
    sampler_inputs.ProgramOptions(model_config, Products(), chunk=4), tree
  )
  weights = sampler_weights.split_layers(tree, options)
  whole = np.zeros(TOKENS, np.int32)
  chunk = sampler_inputs.PrefillChunk(
    whole,
    whole + 1,
    np.arange(TOKENS, dtype=np.int32),
    (whole,),
    (sampler_inputs.Tables(whole[:4], None),),
    np.zeros((), np.int32),
  )
  cache = kv_cache.empty_pages((4,), 16, options)
  compiled = (
    jax.jit(lambda *a: decoding.prefill(*a, options)).lower(weights, cache, chunk).compile()
  )
  of_layer = {name: x[0].size * 4 for name, x in tree["layers"].items() if x.ndim == 3}
  # Of the last layer keys and values are all that is asked for.
  kernels = (model_config.num_layers - 1) * sum(of_layer.values()) + of_layer["k"] + of_layer["v"]
  found = hlo_collectives.collectives(compiled.as_text(), devices=8)
  return found, kernels, model_config


@pytest.mark.parametrize("shape", [{"data": 1, "fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
@pytest.mark.long
def test_of_a_prefill_only_what_attends_moves_over_the_axes_of_rows(shape):
  found, kernels, model_config = prefill_on(shape)
  sizes = {"data": 1, "fsdp": 1, "tensor": 1} | shape
  over_rows = [c for c in found if hlo_collectives.axes_of(c.groups, sizes) - {"tensor"}]
  gathered = sum(one.nbytes for one in over_rows if one.kind == "all-gather")
  assert gathered >= (sizes["fsdp"] - 1) / sizes["fsdp"] * kernels / sizes["tensor"]
  # Queries, as keys and values: every device attends with all tokens of the chunk.
  most = TOKENS * model_config.num_heads * model_config.head_dim
  of_places = [a for one in over_rows for a in one.arrays if TOKENS in a.shape]
  assert of_places and max(math.prod(a.shape) for a in of_places) <= most


SIZES = sampler_sizes.SamplerSizes(
  16, prefill=TOKENS, page=16, columns=16, blocks=2, table=3, pages=12, is_planned=True
)


def decode_on(shape, form, **sizes):
  """Returns the collectives of a decode step, and the config of the model."""
  model_config = dataclasses.replace(tiny.config(vocab_size=1000), **WIDE, **sizes)
  mesh = sharding.make_mesh(**shape)
  shapes = leaves.tree(model_config)
  axes = transformer.logical_axes(model_config)
  lies = sharding.param_shardings(axes, mesh, shapes=shapes)
  place = lambda x, at: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=at)
  tree = jax.tree.map(place, shapes, lies)
  given = described.described(model_config, tree, rows=16, sizes=SIZES, form=form)
  program = sampler_programs._decode.lower(*given.decode, options=given.options).compile()
  return hlo_collectives.collectives(program.as_text(), devices=8), model_config


OF_DECODE = [
  {"data": 1, "fsdp": 8},
  {"data": 2, "fsdp": 4},
  {"data": 1, "fsdp": 4, "tensor": 2},
  {"data": 1, "fsdp": 1, "tensor": 8},
]


def is_of_rows(shape, model_config):
  """Says whether an array holds numbers of the rows, or one row of the cache, and no more."""
  if math.prod(shape) == 1 or (len(shape) == 5 and shape[1] == 1):
    return True
  if len(shape) == 4 and shape[0] == 1:
    return True
  rows = max((n for n in shape if n in (16, 8, 4, 2)), default=0)  # no width of the model.
  return rows > 0 and math.prod(shape) <= rows * max(model_config.intermediate_size, *shape)


@pytest.mark.long
@pytest.mark.parametrize("shape", OF_DECODE, ids=lambda shape: "x".join(map(str, shape.values())))
@pytest.mark.parametrize("form", ["ring", "rows"])
def test_in_a_decode_step_rows_move_and_neither_weights_nor_caches(form, shape):
  found, model_config = decode_on(shape, form)
  # As they are made for a layer: partial sums of all rows, over the axis that splits the weight.
  sums = [one for one in found if one.kind == "all-reduce" and "dot_general" in one.source]
  assert len(sums) >= 2 * model_config.num_layers
  moved = {array.shape for one in found for array in one.arrays}
  assert [shape for shape in moved if not is_of_rows(shape, model_config)] == []
