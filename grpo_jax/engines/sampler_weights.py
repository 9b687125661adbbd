"""The weights as the sampler reads them: arrays of each layer, made from the trainer's. Pure.

Layers are unrolled over per-layer arrays: a scan would copy every layer's weights and cache out
of the stacked arrays at every token.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_jax.engines.sampler_inputs import ProgramOptions, as_tree, unchecked
from grpo_jax.models import layers, leaves, lora, transformer
from grpo_jax.models.products import (
  Adapters,
  FusedKernels,
  LowRank,
  OutputMajor,
  adapters_name,
  joined_name,
)
from grpo_jax.models.quantized import Quantized

# The kernels of a layer that have the same input, as `layers` asks for their products.
_WITH_SAME_INPUT = (
  *(("q", "k", "v"), ("o",), ("gate", "up"), ("down",)),
  *(leaves.SHARED[:2], leaves.SHARED[2:]),
)


@as_tree
@dataclasses.dataclass(frozen=True)
class SamplerWeights:
  """The parameters as the sampler reads them.

  Attributes:
    embed: Embedding; the trainer's own array, or a copy in the compute dtype.
    layers: Parameters of each layer; kernels are transposed and in the compute dtype, but those of
      experts are not transposed, and a router is in float32.
    final_norm: Final norm; the trainer's own array, or a copy.
    head: Head in the compute dtype; the trainer's own array if it has this dtype.
    quantized: Quantised kernels of all layers, [L ...]; the trainer's own arrays. They are read
      and dequantised a layer at a time.
    adapters: Parts of each layer that change with its adapter, in the compute dtype: `Adapters`,
      and merged kernels of experts. Empty if there are none, or if all kernels are merged.
  """

  embed: Float[Array, "V D"]
  layers: list[layers.LayerParams]
  final_norm: Float[Array, " D"]
  head: Array
  quantized: dict[str, Any] = dataclasses.field(default_factory=dict)
  adapters: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def split_layers(params: transformer.Params, options: ProgramOptions) -> SamplerWeights:
  """Makes the per-layer arrays from the stacked ones, once for every change of weights.

  Kernels are rounded to the compute dtype here and not at every token. The embedding, the final
  norm, a head in the compute dtype and quantised kernels are the trainer's own arrays and not
  copies. A `LowRank` kernel is merged with its adapter, or with `options.unmerged` kept apart;
  those of experts are always merged.
  """
  dtype = options.products.compute_dtype
  head, _ = transformer.head(params, options.config)
  copied, quantized = _kernels(params, options)
  return SamplerWeights(
    embed=params["embed"],
    layers=_unstack(copied, options.config.num_layers, dtype, options.mesh is None),
    final_norm=params["final_norm"],
    head=head if head.dtype == dtype else head.astype(dtype),
    quantized=quantized,
    adapters=adapters(params, options),
  )


def one_layer(
  params: transformer.Params, number: Any, options: ProgramOptions
) -> layers.LayerParams:
  """Returns one of the layers that `split_layers` makes; called inside of programs.

  Args:
    params: Parameters, as in `split_layers`.
    number: Number of the layer.
    options: Options of the programs.
  """
  copied, _ = _kernels(params, options)
  one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, number, 1), copied)
  return _unstack(one, 1, options.products.compute_dtype, options.mesh is None)[0]


def adapters(params: transformer.Params, options: ProgramOptions) -> list[dict[str, Any]]:
  """Returns what changes with the adapter of each layer; empty unless `options.unmerged`.

  Args:
    params: Parameters, some of whose kernels may be `LowRank`.
    options: Options of the programs.
  """
  found = _adapter_arrays(params, options)
  if not found:
    return []
  return _unstack_adapters(found, options.config.num_layers, options.products.compute_dtype)


def adapters_of_layer(
  params: transformer.Params, number: Any, options: ProgramOptions
) -> dict[str, Any]:
  """Returns one of the layers that `adapters` makes; called inside of programs.

  Args:
    params: Parameters, as in `adapters`.
    number: Number of the layer.
    options: Options of the programs; `unmerged`.
  """
  found = _adapter_arrays(params, options)
  one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, number, 1), found)
  return _unstack_adapters(one, 1, options.products.compute_dtype)[0]


def described(params: Any, options: ProgramOptions) -> SamplerWeights:
  """Returns shapes, dtypes and shardings of what `split_layers` returns.

  Args:
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`s with shardings.
    options: Options of the programs.
  """
  shapes = jax.eval_shape(lambda params: split_layers(params, options), params)
  num_layers, dtype = options.config.num_layers, options.products.compute_dtype
  copied, quantized = _kernels(params, options)
  found = _adapter_arrays(params, options)
  unstack = _unstack.lower(copied, num_layers, dtype, options.mesh is None)
  parts = [_unstack_adapters.lower(found, num_layers, dtype)] if found else []
  placed = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
  shardings = unchecked(
    SamplerWeights,
    embed=params["embed"].sharding,
    layers=unstack.compile().output_shardings,
    final_norm=params["final_norm"].sharding,
    head=params["embed" if options.config.tie_embeddings else "head"].sharding,
    quantized=placed(quantized),
    adapters=parts[0].compile().output_shardings if parts else [],
  )
  place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  return jax.tree.map(place, shapes, shardings)


def layer_params(weights: SamplerWeights, i: int, x: Array) -> layers.LayerParams:
  """Returns the parameters of a layer.

  Where quantised kernels are read depends on the layer's input, in form only: no number is above
  infinity. Otherwise the compiler may dequantise the kernels of all layers at once, even before the
  loop of the decode steps, which would be a copy of the model in full precision. XLA for CPUs drops
  a barrier before it orders the computation.
  """
  layer = dict(weights.layers[i])
  if weights.adapters:
    layer |= weights.adapters[i]
  if weights.quantized:
    place = i + (x.reshape(-1)[0] > jnp.inf).astype(jnp.int32)
    of_layer = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False)
    layer |= jax.tree.map(of_layer, weights.quantized)
  return layer


def _kernels(
  params: transformer.Params, options: ProgramOptions
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns the stacked leaves of layers that are copied, and quantised kernels."""
  stack = params["layers"]
  if options.unmerged:
    merged = lora.merged_always(stack)
    stack = {name: x for name, x in lora.base_of(params)["layers"].items() if name not in merged}
  quantized = {name: x for name, x in stack.items() if isinstance(x, Quantized)}
  return {name: x for name, x in stack.items() if name not in quantized}, quantized


def _adapter_arrays(params: transformer.Params, options: ProgramOptions) -> dict[str, LowRank]:
  """Returns the stacked adapters that stay apart from their kernels, without the kernels.

  Kernels of experts have their base, as they are merged.
  """
  if not options.unmerged:
    return {}
  kernels = {name: x for name, x in params["layers"].items() if isinstance(x, LowRank)}
  merged = lora.merged_always(kernels)
  return {name: dataclasses.replace(x, base=None) for name, x in kernels.items()} | merged


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _unstack(
  stacked: dict[str, Any], num_layers: int, dtype: Any, is_joined: bool
) -> list[layers.LayerParams]:
  """Splits the stacked arrays.

  Args:
    stacked: Leaves of all layers; kernels may be `LowRank`, which are merged.
    num_layers: Number of layers.
    dtype: Dtype of the kernels.
    is_joined: Whether the kernels of q, k and v become one array, and those of gate and up another,
      for fewer and larger products. On a mesh each kernel is split by itself.
  """

  def converted(name, x, i):
    if isinstance(x, LowRank):
      x = lora.merged(jax.tree.map(lambda x: x[i], x))[None]
      i = 0
    if x.ndim == 4:
      return x[i].astype(dtype)
    # Norms and biases, [L n], stay float32: they are not factors of a product.
    own = jnp.float32 if x.ndim == 2 or name == leaves.ROUTER else dtype
    return OutputMajor(x[i].T.astype(own)) if x.ndim == 3 else x[i].astype(own)

  def layer(i):
    made: dict[str, Any] = {name: converted(name, x, i) for name, x in stacked.items()}
    for names in _WITH_SAME_INPUT if is_joined else ():
      if len(names) == 1 or not made.keys() >= set(names):
        continue
      kernels = [made.pop(name).array for name in names]
      widths = tuple(kernel.shape[0] for kernel in kernels)
      made[joined_name(names)] = FusedKernels(jnp.concatenate(kernels), widths)
    return made

  return [layer(i) for i in range(num_layers)]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _unstack_adapters(
  stacked: dict[str, LowRank], num_layers: int, dtype: Any
) -> list[dict[str, Any]]:
  """Splits stacked adapters, and joins the A that have the same input; experts are merged."""
  merged = lora.merged_always(stacked)

  def experts(i: int) -> dict[str, Array]:
    own = {name: jax.tree.map(lambda x: x[i], kernel) for name, kernel in merged.items()}
    return {name: lora.merged(kernel).astype(dtype) for name, kernel in own.items()}

  def of_layer(names: Sequence[str], i: int) -> Adapters:
    found = [stacked[name] for name in names]
    # Transposed, as kernels are.
    a = jnp.concatenate([x.a[i].T.astype(dtype) for x in found])
    return Adapters(a, tuple(x.b[i].T.astype(dtype) for x in found), tuple(names), found[0].scale)

  groups = {names: [name for name in names if name in stacked] for names in _WITH_SAME_INPUT}
  return [
    {adapters_name(names): of_layer(own, i) for names, own in groups.items() if own} | experts(i)
    for i in range(num_layers)
  ]
