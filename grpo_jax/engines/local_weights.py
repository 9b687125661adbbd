"""The sampler's weights if the parameters are spread over several processes.

Every process samples by itself, so each needs a whole copy on its own devices: P parameters of b
bytes on n devices of a process take P · b / n bytes of each device. The copy is made by one
program of all processes, layer by layer and in the compute dtype; that of an adapter by another.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.compilation.programs import Job, Program
from grpo_jax.engines import decoding
from grpo_jax.models import lora
from grpo_jax.models.products import Adapters, Joined, OutputMajor
from grpo_jax.processes import local_devices

_REMEDY = "split the weights over more devices of each process, or sample with servers"


def is_spread(params: Any) -> bool:
  """Returns whether parameters are on devices of several processes.

  Args:
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`s with shardings.
  """
  sharding = jax.tree.leaves(params)[0].sharding
  return isinstance(sharding, NamedSharding) and not sharding.is_fully_addressable


class Gathering:
  """Copies the parameters to every process, as the sampler reads them."""

  def __init__(self, params: Any, options: decoding.Options):
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
    self._of_weights = _Copier(
      "copying the weights to each process", self._part, self._read, self._specs
    )
    self._of_adapters = _Copier(
      "copying the adapter to each process", self._part, decoding.adapters, self._adapter_specs
    )

  def fits(self, params: Any) -> bool:
    """Returns whether these parameters are like those that the copies were described for."""
    if jax.tree.structure(params) != jax.tree.structure(self._params):
      return False
    return all(map(_is_like, jax.tree.leaves(params), jax.tree.leaves(self._params)))

  def described(self, options: decoding.Options) -> decoding.Weights:
    """Returns shapes, dtypes and shardings of this process's copy.

    Args:
      options: Options of the sampler on the devices of this process.
    """
    weights = self._tied(self._of_weights.described(self._params, options))
    return _with(weights, adapters=self._of_adapters.described(self._params, options))

  def jobs(self, options: decoding.Options) -> list[Job]:
    """Returns the compilations of the programs."""
    weights = self._of_weights.job(self._params, options)
    has_adapters = bool(self._of_adapters.described(self._params, options))
    return [weights, *([self._of_adapters.job(self._params, options)] if has_adapters else ())]

  def __call__(self, params: Any, options: decoding.Options) -> decoding.Weights:
    """Returns this process's copy. All processes must call it, on their main threads.

    Args:
      params: The trainer's parameters.
      options: Options of the sampler on the devices of this process.
    """
    weights = self._tied(self._of_weights(params, options))
    return dataclasses.replace(weights, adapters=self.adapters(params, options))

  def adapters(self, params: Any, options: decoding.Options) -> list[dict[str, Adapters]]:
    """Returns this process's copy of `decoding.adapters`, as `__call__` does that of all."""
    return self._of_adapters(params, options)

  def _as_local(self, like: Any) -> Any:
    """Describes a parameter as if it were on the devices of this process."""
    sharding = self._part.own(self._part.partition(like.sharding.spec))
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)

  def _read(self, params: Any, options: decoding.Options) -> decoding.Weights:
    """Returns the weights without adapters and without a tied head.

    Every lookup rounds the embedding as this does.
    """
    weights = decoding.split_layers(params, options)
    dtype = options.products.compute_dtype
    head = None if self._is_tied else weights.head
    return _with(weights, embed=weights.embed.astype(dtype), head=head, adapters=[])

  def _tied(self, weights: decoding.Weights) -> decoding.Weights:
    if not self._is_tied:
      return weights
    return _with(weights, head=weights.embed)

  def _specs(self, weights: decoding.Weights) -> decoding.Weights:
    """Returns the partition of each array of the weights over the devices of a process."""
    of = lora.base_of(jax.tree.map(lambda like: like.sharding.spec, self.local))

    def of_layer(name: str, value: Any) -> Any:
      if isinstance(value, Joined):  # on one device.
        return Joined(PartitionSpec(), value.widths)
      _, first, second = _axes(of["layers"][name])
      if isinstance(value, OutputMajor):
        return OutputMajor(PartitionSpec(second, first))
      return PartitionSpec(first)

    return _with(
      weights,
      embed=of["embed"],
      layers=[{name: of_layer(name, x) for name, x in each.items()} for each in weights.layers],
      final_norm=of["final_norm"],
      head=None if self._is_tied else of["head"],
      quantized={name: of["layers"][name] for name in weights.quantized},
    )

  def _adapter_specs(self, adapters: list[dict[str, Adapters]]) -> list[dict[str, Adapters]]:
    """Returns the partition of each array of the adapters over the devices of a process."""
    of = self.local["layers"]

    def partition(group: Adapters) -> Adapters:
      _, inner, _ = _axes(of[group.kernels[0]].a.sharding.spec)
      outer = [_axes(of[name].b.sharding.spec)[2] for name in group.kernels]
      specs = tuple(PartitionSpec(axis) for axis in outer)
      return dataclasses.replace(group, a=PartitionSpec(None, inner), b=specs)

    return [{name: partition(group) for name, group in each.items()} for each in adapters]


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

  def described(self, params: Any, options: decoding.Options) -> Any:
    """Returns shapes, dtypes and shardings of this process's copy."""
    shapes = self._shapes(params, options)
    place = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._part.own(spec))
    return jax.tree.map(place, shapes, self._specs(shapes))

  def job(self, params: Any, options: decoding.Options) -> Job:
    """Returns the compilation of the program."""
    return self._program_for(params, options).job(params)

  def __call__(self, params: Any, options: decoding.Options) -> Any:
    """Returns this process's copy."""
    copies = self._program_for(params, options)(params)
    return jax.tree.map(self._part.take, copies, self._specs(copies))

  def _shapes(self, params: Any, options: decoding.Options) -> Any:
    return jax.eval_shape(lambda params: self._read(params, options), params)

  def _program_for(self, params: Any, options: decoding.Options) -> Program:
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


def _with(weights: decoding.Weights, **fields: Any) -> decoding.Weights:
  """Returns weights with other fields, which need not be arrays: their descriptions, or None."""
  return decoding.unchecked(decoding.Weights, **{**vars(weights), **fields})


def _is_like(one: Any, other: Any) -> bool:
  """Returns whether two arrays have the same shape, dtype and places."""
  if (one.shape, one.dtype) != (other.shape, other.dtype):
    return False
  return one.sharding.is_equivalent_to(other.sharding, len(one.shape))


def _described(like: Any) -> Any:
  return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=like.sharding)
