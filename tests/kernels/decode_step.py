"""The sampler's decode program at the sizes of a real model, described for a machine not here."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from grpo_kernels.implementations import assumed_chip, chip_of

from grpo_jax.compilation.programs import abstract
from grpo_jax.engines import (
  jax_sampler,
  kv_cache,
  sampler_inputs,
  sampler_programs,
  sampler_sizes,
  sampler_weights,
  scheduling,
  weight_sync,
)
from grpo_jax.learn import sharding
from grpo_jax.models import leaves, transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import Products
from grpo_plan import topologies

PROMPT, COMPLETION, GROUP = 512, 512, 16  # tokens; completions of a prompt.
LAYERS = 28


def config_of(layers: int) -> ModelConfig:
  """Returns Qwen2.5-1.5B with some of its layers."""
  sizes = {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960}
  heads = {"num_heads": 12, "num_kv_heads": 2, "head_dim": 128}
  switches = {"tie_embeddings": True, "qkv_bias": True, "max_position_embeddings": 4096}
  return ModelConfig(family="qwen2", num_layers=layers, **sizes, **heads, **switches)


def needed_bytes(rows: int, *, live: int) -> tuple[int, int]:
  """Returns the bytes that a step has to read, in bfloat16: of weights, of keys and values.

  Args:
    rows: Rows, in whole groups.
    live: Tokens that each row has sampled.
  """
  config = config_of(LAYERS)
  width, heads = config.hidden_size, config.num_heads + 2 * config.num_kv_heads
  of_layer = width * config.head_dim * (heads + config.num_heads)
  of_layer += 3 * width * config.intermediate_size
  of_token = 2 * LAYERS * config.num_kv_heads * config.head_dim
  tokens = rows * live + rows // GROUP * PROMPT
  return 2 * (LAYERS * of_layer + config.vocab_size * width), 2 * of_token * tokens


class Compiled(NamedTuple):
  """A decode program; shapes of the caches of a layer, and bytes of a token's keys and values."""

  hlo: str
  temporary_bytes: int
  caches: frozenset[tuple[int, ...]]
  token_bytes: int


def compiled(
  machine: str,
  rows: int,
  layers: int,
  dtype: str = "bfloat16",
  *,
  whole_caches: bool = False,
  **changed: Any,
):
  """Compiles the decode program of a number of rows; returns a `Compiled`.

  Args:
    machine: Name of a machine, as `grpo-jax plan` takes it. Of several devices each has a part of
      the weights and of the rows.
    rows: Number of rows.
    layers: Number of layers.
    dtype: Dtype of products, kernels and caches.
    whole_caches: Whether the cache has room for the longest completions at once.
    **changed: Options of the program that differ from those of a sampler without filters.
  """
  devices = topologies.devices(topologies.parse(machine))
  with assumed_chip(chip_of(devices[0])), jax.default_device(devices[0]):
    config, settings = config_of(layers), {"form": "rows", "has_filters": False, **changed}
    options = sampler_inputs.ProgramOptions(config, Products(dtype), 16, group=GROUP, **settings)
    params = _params(config, devices, dtype)
    options = weight_sync._with_sharding(options, params)
    sizes = sampler_sizes.planned(
      rows,
      prompt_tokens=PROMPT + 1,
      completion_tokens=COMPLETION,
      long_prompts=-(-rows // GROUP),
      token_bytes=kv_cache.token_bytes(dataclasses.replace(options, config=config_of(LAYERS))),
      form=options.form,
      whole_caches=whole_caches,
    )
    options = sizes.applied(options)
    weights = sampler_weights.described(params, options)
    own, pages = (
      sampler_programs._described(make, *arguments, options)
      for make, arguments in (
        (sampler_programs.empty_own, (sizes.blocks, sizes.rows, sizes.columns)),
        (sampler_programs.empty_pages, ((sizes.pages,), sizes.page)),
      )
    )
    state = scheduling.make_rows([], rows, {}, **sampler_programs.row_layout(options, sizes))
    given = weights, pages, own, abstract(state), abstract(np.int32(0))
    made = sampler_programs._decode.lower(*given, options=options).compile()
  caches = frozenset(x.shape for x in jax.tree.leaves([own, pages]))
  temporary = made.memory_analysis().temp_size_in_bytes
  return Compiled(
    made.as_text() or "", temporary, caches, sum(kv_cache.token_bytes(options).values())
  )


def _params(config: ModelConfig, devices: Sequence[Any], dtype: str) -> Any:
  """Returns the shapes of the model's weights, split over the devices."""
  shapes = leaves.tree(config)
  if len(devices) == 1:
    places = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(devices[0]), shapes)
  else:
    mesh = jax.sharding.Mesh(np.reshape(devices, (1, -1, 1)), ("data", "fsdp", "tensor"))
    places = sharding.param_shardings(transformer.logical_axes(config), mesh, shapes=shapes)
  of_leaf = lambda x, at: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype), sharding=at)
  return jax.tree.map(of_leaf, shapes, places)


def long_programs(
  machine: str, tokens: int, sampled_bytes: int | None
) -> dict[str, tuple[int, int]]:
  """Compiles what takes most memory when 64 rows have sampled many tokens, for one layer.

  Args:
    machine: Name of a machine of one device.
    tokens: Tokens of the longest completion.
    sampled_bytes: Bytes that the keys and values of sampled tokens may take.

  Returns:
    Bytes of these keys and values, and of the program besides its arguments, by its name.
  """
  (device,) = topologies.devices(topologies.parse(machine))
  first = mock.patch.object(sampler_sizes, "_CACHE_BYTES", sampler_sizes._CACHE_BYTES // LAYERS)
  with first, assumed_chip(chip_of(device)), jax.default_device(device):
    sizes = {"prompt_tokens": PROMPT, "completion_tokens": tokens, "group_size": GROUP}
    settings = {"compute_dtype": "bfloat16", "max_rows": 64, "has_filters": False}
    config = config_of(1)
    with jax_sampler.JaxSampler(
      config, **sizes, **settings, sampled_bytes=sampled_bytes
    ) as sampler:
      found = {}
      for (own, _), jobs in sampler.later(_params(config, [device], "float32")):
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(own))
        for job in jobs:
          assert job.lower is not None
          memory = job.lower().compile().memory_analysis()
          outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
          found[job.name] = held, memory.temp_size_in_bytes + outputs
  return found
