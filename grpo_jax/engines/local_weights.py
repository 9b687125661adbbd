"""The sampler's weights if the parameters are on other devices than those that sample.

* `Gathering`: the parameters are spread over several processes. Every process samples by itself, so
  each needs a whole copy on its own devices: P parameters of b bytes on n devices of a process take
  P · b / n bytes of each device. The copy is made by one program of all processes, layer by layer
  and in the compute dtype; that of an adapter by another.
* `Moving`: the sampler has devices of its own in the only process. A layer at a time is made in the
  compute dtype on all devices of the parameters, and copied from there: one layer is all that the
  trainer's devices need beside their parameters, and the sampler's hold nothing but its weights.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grpo_jax.compilation.programs import CompileJob, Program, abstract
from grpo_jax.engines import sampler_inputs, sampler_weights
from grpo_jax.models import leaves, lora, placement
from grpo_jax.models.products import Adapters, FusedKernels, LowRank, OutputMajor
from grpo_jax.processes import local_devices

_REMEDY_MOVING = "split the weights over more devices"
_MOVING = {
  sampler_weights.one_layer: "copying a layer to the sampler",
  sampler_weights.adapters_of_layer: "copying the adapter of a layer to the sampler",
}
_REMEDY = "split the weights over more devices of each process, or sample with servers"


def is_spread(params: Any) -> bool:
  """Returns whether parameters are on devices of several processes.

  Args:
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`s with shardings.
  """
  sharding = jax.tree.leaves(params)[0].sharding
  return isinstance(sharding, NamedSharding) and not sharding.is_fully_addressable


@runtime_checkable
class Copies(Protocol):
  """Copies parameters to the devices that sample.

  Attributes:
    local: Shapes, dtypes and shardings of the parameters as if they were on these devices.
  """

  local: Any

  def fits(self, params: Any) -> bool:
    """Returns whether these parameters are like those that the copies were described for."""
    ...

  def described(self, options: sampler_inputs.ProgramOptions) -> sampler_weights.SamplerWeights:
    """Returns shapes, dtypes and shardings of the copy."""
    ...

  def jobs(self, options: sampler_inputs.ProgramOptions) -> list[CompileJob]:
    """Returns the compilations of the programs."""
    ...

  def __call__(
    self, params: Any, options: sampler_inputs.ProgramOptions
  ) -> sampler_weights.SamplerWeights:
    """Returns the copy; none of its arrays is one of the parameters."""
    ...

  def adapters(self, params: Any, options: sampler_inputs.ProgramOptions) -> list[dict[str, Any]]:
    """Returns a copy of `sampler_weights.adapters`."""
    ...


class Gathering:
  """Copies the parameters to every process, as the sampler reads them."""

  def __init__(self, params: Any, options: sampler_inputs.ProgramOptions):
    """Describes the copies.

    Args:
      params: The trainer's parameters: arrays, or `jax.ShapeDtypeStruct`s with shardings.
      options: Options of the sampler on one device; the mesh is set by `local`.

    Raises:
      ValueError: All parameters are on devices of this process.
    """
    part = local_devices.part_of(jax.tree.leaves(params)[0].sharding.mesh)
    if part is None:
      raise ValueError("all devices of these parameters are of this process")
    self._part = part
    self._params = jax.tree.map(_described, params)
    self.local = jax.tree.map(self._as_local, params)
    self._is_tied = options.config.tie_embeddings
    self._layout = _Layout(self.local, is_tied=self._is_tied)
    self._of_weights = _Copier(
      "copying the weights to each process", self._part, _read, self._layout.weights
    )
    self._of_adapters = _Copier(
      "copying the adapter to each process",
      self._part,
      sampler_weights.adapters,
      self._layout.adapters,
    )

  def fits(self, params: Any) -> bool:
    """Returns whether these parameters are like those that the copies were described for."""
    return _are_like(params, self._params)

  def described(self, options: sampler_inputs.ProgramOptions) -> sampler_weights.SamplerWeights:
    """Returns shapes, dtypes and shardings of this process's copy.

    Args:
      options: Options of the sampler on the devices of this process.
    """
    weights = self._tied(self._of_weights.described(self._params, options))
    return _with(weights, adapters=self._of_adapters.described(self._params, options))

  def jobs(self, options: sampler_inputs.ProgramOptions) -> list[CompileJob]:
    """Returns the compilations of the programs."""
    weights = self._of_weights.job(self._params, options)
    has_adapters = bool(self._of_adapters.described(self._params, options))
    return [weights, *([self._of_adapters.job(self._params, options)] if has_adapters else ())]

  def __call__(
    self, params: Any, options: sampler_inputs.ProgramOptions
  ) -> sampler_weights.SamplerWeights:
    """Returns this process's copy. All processes must call it, on their main threads.

    Args:
      params: The trainer's parameters.
      options: Options of the sampler on the devices of this process.
    """
    weights = self._tied(self._of_weights(params, options))
    return dataclasses.replace(weights, adapters=self.adapters(params, options))

  def adapters(self, params: Any, options: sampler_inputs.ProgramOptions) -> list[dict[str, Any]]:
    """Returns this process's copy of `sampler_weights.adapters`, as `__call__` does that of all."""
    return self._of_adapters(params, options)

  def _as_local(self, like: Any) -> Any:
    """Describes a parameter as if it were on the devices of this process."""
    sharding = self._part.own(self._part.partition(like.sharding.spec))
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)

  def _tied(self, weights: sampler_weights.SamplerWeights) -> sampler_weights.SamplerWeights:
    if not self._is_tied:
      return weights
    return _with(weights, head=weights.embed)


class Moving:
  """Copies the parameters to other devices of this process, as the sampler reads them."""

  def __init__(self, params: Any, options: sampler_inputs.ProgramOptions, devices: Sequence[Any]):
    """Describes the copies.

    Args:
      params: The trainer's parameters: arrays, or `jax.ShapeDtypeStruct`s with shardings.
      options: Options of the sampler on one device; the mesh is set by `local`.
      devices: Devices that sample. Heads, feed-forward and vocabulary are split over them where
        their number divides these.

    Raises:
      ValueError: Some of the parameters are on one of the devices.
    """
    shared = jax.tree.leaves(params)[0].sharding.device_set & set(devices)
    if shared:
      raise ValueError(f"these devices have parameters: {sorted(shared, key=lambda x: x.id)}")
    grid = np.asarray(devices, dtype=object).reshape(1, 1, -1)
    self._mesh = Mesh(grid, placement.AXES, axis_types=(AxisType.Auto,) * len(placement.AXES))
    self._config = options.config
    self._params = jax.tree.map(_described, params)
    self.local = self._as_local(self._params)
    self._layout = _Layout(self.local, is_tied=options.config.tie_embeddings)
    self._programs: dict[Any, Program] = {}
    # described for options.
    self._copy: tuple[sampler_inputs.ProgramOptions, sampler_weights.SamplerWeights] | None = None

  def fits(self, params: Any) -> bool:
    """Returns whether these parameters are like those that the copies were described for."""
    return _are_like(params, self._params)

  def described(self, options: sampler_inputs.ProgramOptions) -> sampler_weights.SamplerWeights:
    """Returns shapes, dtypes and shardings of the copy.

    Args:
      options: Options of the sampler on its devices.
    """
    if self._copy is None or self._copy[0] != options:
      self._copy = options, self._describe(options)
    return self._copy[1]

  def _describe(self, options: sampler_inputs.ProgramOptions) -> sampler_weights.SamplerWeights:
    shapes = jax.eval_shape(lambda params: _read(params, options), self._params)
    weights = self._placed(shapes, self._layout.weights(shapes))
    found = jax.eval_shape(lambda params: sampler_weights.adapters(params, options), self._params)
    head = weights.embed if self._config.tie_embeddings else weights.head
    adapters = self._placed(found, self._layout.adapters(found))
    return _with(weights, head=head, adapters=adapters)

  def jobs(self, options: sampler_inputs.ProgramOptions) -> list[CompileJob]:
    """Returns the compilations of the programs that make a layer, and its adapter."""
    programs = [self._program_for(options, sampler_weights.one_layer)]
    if self.described(options).adapters:
      programs.append(self._program_for(options, sampler_weights.adapters_of_layer))
    return [program.job(self._params, abstract(np.int32(0))) for program in programs]

  def __call__(
    self, params: Any, options: sampler_inputs.ProgramOptions
  ) -> sampler_weights.SamplerWeights:
    """Returns the copy.

    Args:
      params: The trainer's parameters.
      options: Options of the sampler on its devices.
    """
    like = self.described(options)
    make = self._program_for(options, sampler_weights.one_layer)
    dtype = options.products.compute_dtype
    layers = []
    for number, of_layer in enumerate(like.layers):
      layers.append(self._moved(make(params, np.int32(number)), of_layer))
      jax.block_until_ready(layers[-1])  # the next one is made when this one has left.
    rounded = lambda x, of: self._moved(_whole(x.astype(dtype)), of)
    embed = rounded(params["embed"], like.embed)
    base = lora.base_of(params)["layers"]
    return sampler_weights.SamplerWeights(
      embed=embed,
      layers=layers,
      final_norm=self._moved(_whole(params["final_norm"]), like.final_norm),
      head=embed if self._config.tie_embeddings else rounded(params["head"], like.head),
      quantized={
        name: jax.tree.map(lambda x, of: self._moved(_whole(x), of), base[name], of_name)
        for name, of_name in like.quantized.items()
      },
      adapters=self.adapters(params, options),
    )

  def adapters(self, params: Any, options: sampler_inputs.ProgramOptions) -> list[dict[str, Any]]:
    """Returns the copy of `sampler_weights.adapters`, as `__call__` does that of all."""
    make, moved = self._program_for(options, sampler_weights.adapters_of_layer), []
    for number, of_layer in enumerate(self.described(options).adapters):
      moved.append(self._moved(make(params, np.int32(number)), of_layer))
      jax.block_until_ready(moved[-1])  # experts are merged, and as large as those of the base.
    return moved

  def _as_local(self, params: Any) -> Any:
    """Describes the parameters as if they were on the devices that sample."""
    rules = placement.MeshPlacement(self._mesh)

    def of(value: Any, axes: Sequence[str | None]) -> Any:
      def described(like: Any) -> Any:
        sharding = NamedSharding(self._mesh, rules.weight(axes, like.shape))
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)

      return jax.tree.map(described, value)

    def of_leaf(leaf: leaves.Leaf, value: Any) -> Any:
      if not isinstance(value, LowRank):
        return of(value, leaf.axes)
      *before, inner, outer = leaf.axes
      return dataclasses.replace(
        value,
        base=of(value.base, leaf.axes),
        a=of(value.a, (*before, inner, None)),
        b=of(value.b, (*before, None, outer)),
      )

    return jax.tree.map(of_leaf, leaves.tree(self._config), params)

  def _placed(self, shapes: Any, specs: Any) -> Any:
    """Returns descriptions of arrays on the devices that sample."""
    own = lambda spec: NamedSharding(self._mesh, spec)
    place = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own(spec))
    return jax.tree.map(place, shapes, specs)

  def _moved(self, tree: Any, like: Any) -> Any:
    """Copies arrays that every device of the trainer has whole to the places of `like`."""

    def move(x: jax.Array, of: Any) -> jax.Array:
      copies = [shard.data for shard in x.addressable_shards]
      where = of.sharding.addressable_devices_indices_map(x.shape)
      parts = [
        jax.device_put(_part(copies[i % len(copies)], index), device)
        for i, (device, index) in enumerate(where.items())
      ]
      return jax.make_array_from_single_device_arrays(x.shape, of.sharding, parts)

    return jax.tree.map(move, tree, like)

  def _program_for(self, options: sampler_inputs.ProgramOptions, of_layer: Any) -> Program:
    """Returns the program of a function (params, number, options) → arrays of a layer."""
    if of_layer not in self._programs:
      made = jax.jit(
        lambda params, number: of_layer(params, number, options),
        out_shardings=_everywhere(self._params["embed"]),
      )
      self._programs[of_layer] = Program(made, name=_MOVING[of_layer], remedy=_REMEDY_MOVING)
    return self._programs[of_layer]


def _everywhere(like: Any) -> NamedSharding | None:
  """Returns the sharding of whole copies on the devices of an array; None: it has one device."""
  sharding = like.sharding
  if len(sharding.device_set) == 1:
    return None
  return NamedSharding(sharding.mesh, PartitionSpec())


def _whole(x: jax.Array) -> jax.Array:
  """Returns the array with a whole copy on each of its devices."""
  sharding = _everywhere(x)
  return x if sharding is None else jax.device_put(x, sharding)


def _part(x: jax.Array, index: tuple[slice, ...]) -> jax.Array:
  """Returns a part of an array on one device; the array itself if it is all of it."""
  sizes = [len(range(*cut.indices(size))) for cut, size in zip(index, x.shape, strict=True)]
  return x if tuple(sizes) == x.shape else x[index]


class _Layout:
  """The partition of the sampler's weights over the devices that hold them."""

  def __init__(self, local: Any, *, is_tied: bool):
    """Makes it.

    Args:
      local: Parameters as they would be on these devices, as `Copies.local`.
      is_tied: Whether the head is the embedding.
    """
    self._local = local
    self._is_tied = is_tied

  def weights(self, weights: sampler_weights.SamplerWeights) -> sampler_weights.SamplerWeights:
    """Returns the partition of each array of weights without adapters."""
    of = lora.base_of(jax.tree.map(lambda like: like.sharding.spec, self._local))

    def of_layer(name: str, value: Any) -> Any:
      if isinstance(value, FusedKernels):  # on one device.
        return FusedKernels(PartitionSpec(), value.widths)
      _, first, second = _axes(of["layers"][name])
      if isinstance(value, OutputMajor):
        return OutputMajor(PartitionSpec(second, first))
      return PartitionSpec(*of["layers"][name][1:])

    return _with(
      weights,
      embed=of["embed"],
      layers=[{name: of_layer(name, x) for name, x in each.items()} for each in weights.layers],
      final_norm=of["final_norm"],
      head=None if self._is_tied else of["head"],
      quantized={name: of["layers"][name] for name in weights.quantized},
    )

  def adapters(self, adapters: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the partition of each array of what changes with the adapters."""
    of = self._local["layers"]

    def partition(name: str, group: Any) -> Any:
      if not isinstance(group, Adapters):  # merged experts.
        return PartitionSpec(*of[name].base.sharding.spec[1:])
      _, inner, _ = _axes(of[group.kernels[0]].a.sharding.spec)
      outer = [_axes(of[name].b.sharding.spec)[2] for name in group.kernels]
      specs = tuple(PartitionSpec(axis) for axis in outer)
      return dataclasses.replace(group, a=PartitionSpec(None, inner), b=specs)

    return [{name: partition(name, group) for name, group in each.items()} for each in adapters]


def _read(params: Any, options: sampler_inputs.ProgramOptions) -> sampler_weights.SamplerWeights:
  """Returns the weights without adapters and without a tied head.

  Every lookup rounds the embedding as this does.
  """
  weights = sampler_weights.split_layers(params, options)
  dtype = options.products.compute_dtype
  head = None if options.config.tie_embeddings else weights.head
  return _with(weights, embed=weights.embed.astype(dtype), head=head, adapters=[])


class _Copier:
  """A program that copies something of the parameters to each process."""

  def __init__(self, name: str, part: Any, read: Any, specs: Any):
    """Describes the program.

    Args:
      name: Name of the program, shown to the user.
      part: Devices of this process.
      read: Function (params, options) → what is copied.
      specs: Function (shapes of what is copied) → its partition over the devices of a process.
    """
    self._name = name
    self._part = part
    self._read = read
    self._specs = specs
    self._program: Program | None = None

  def described(self, params: Any, options: sampler_inputs.ProgramOptions) -> Any:
    """Returns shapes, dtypes and shardings of this process's copy."""
    shapes = self._shapes(params, options)
    place = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._part.own(spec))
    return jax.tree.map(place, shapes, self._specs(shapes))

  def job(self, params: Any, options: sampler_inputs.ProgramOptions) -> CompileJob:
    """Returns the compilation of the program."""
    return self._program_for(params, options).job(params)

  def __call__(self, params: Any, options: sampler_inputs.ProgramOptions) -> Any:
    """Returns this process's copy."""
    copies = self._program_for(params, options)(params)
    return jax.tree.map(self._part.take, copies, self._specs(copies))

  def _shapes(self, params: Any, options: sampler_inputs.ProgramOptions) -> Any:
    return jax.eval_shape(lambda params: self._read(params, options), params)

  def _program_for(self, params: Any, options: sampler_inputs.ProgramOptions) -> Program:
    if self._program is None:
      shapes = self._shapes(params, options)
      placed = jax.tree.map(self._part.copies, self._specs(shapes))
      made = jax.jit(lambda params: self._read(params, options), out_shardings=placed)
      self._program = Program(made, name=self._name, remedy=_REMEDY)
    return self._program


def _axes(spec: PartitionSpec) -> tuple[Any, Any, Any]:
  """Returns the mesh axes of the three dimensions of a stacked array."""
  first, second, third = (*spec, None, None, None)[:3]
  return first, second, third


def _with(weights: sampler_weights.SamplerWeights, **fields: Any) -> sampler_weights.SamplerWeights:
  """Returns weights with other fields: arrays, their descriptions, or None."""
  return sampler_inputs.unchecked(sampler_weights.SamplerWeights, **{**vars(weights), **fields})


def _are_like(one: Any, other: Any) -> bool:
  """Returns whether two trees have the same structure, and arrays alike."""
  if jax.tree.structure(one) != jax.tree.structure(other):
    return False
  return all(map(_is_like, jax.tree.leaves(one), jax.tree.leaves(other)))


def _is_like(one: Any, other: Any) -> bool:
  """Returns whether two arrays have the same shape, dtype and places."""
  if (one.shape, one.dtype) != (other.shape, other.dtype):
    return False
  return one.sharding.is_equivalent_to(other.sharding, len(one.shape))


def _described(like: Any) -> Any:
  return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=like.sharding)
