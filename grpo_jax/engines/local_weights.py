"""The sampler's weights if the parameters are spread over several processes.

Every process samples by itself, so each needs a whole copy on its own devices: P parameters of b
bytes on n devices of a process take P · b / n bytes of each device. The copy is made by one
program of all processes, layer by layer and in the compute dtype.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.compilation.programs import Job, Program
from grpo_jax.engines import decoding
from grpo_jax.models.products import Joined, OutputMajor
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
    self._program: Program | None = None

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
    shapes = jax.eval_shape(lambda params: self._read(params, options), self._params)
    place = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._part.own(spec))
    return self._tied(jax.tree.map(place, shapes, self._specs(shapes)))

  def job(self, options: decoding.Options) -> Job:
    """Returns the compilation of the program."""
    return self._program_for(options).job(self._params)

  def __call__(self, params: Any, options: decoding.Options) -> decoding.Weights:
    """Returns this process's copy. All processes must call it, on their main threads.

    Args:
      params: The trainer's parameters.
      options: Options of the sampler on the devices of this process.
    """
    copies = self._program_for(options)(params)
    return self._tied(jax.tree.map(self._part.take, copies, self._specs(copies)))

  def _as_local(self, like: Any) -> Any:
    """Describes a parameter as if it were on the devices of this process."""
    sharding = self._part.own(self._part.partition(like.sharding.spec))
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)

  def _program_for(self, options: decoding.Options) -> Program:
    if self._program is None:
      shapes = jax.eval_shape(lambda params: self._read(params, options), self._params)
      placed = jax.tree.map(self._part.copies, self._specs(shapes))
      made = jax.jit(lambda params: self._read(params, options), out_shardings=placed)
      self._program = Program(made, name="copying the weights to each process", remedy=_REMEDY)
    return self._program

  def _read(self, params: Any, options: decoding.Options) -> decoding.Weights:
    """Returns the weights without a tied head; every lookup rounds the embedding as this does."""
    weights = decoding.split_layers(params, options)
    dtype = options.products.compute_dtype
    head = None if self._is_tied else weights.head
    return _with(weights, embed=weights.embed.astype(dtype), head=head)

  def _tied(self, weights: decoding.Weights) -> decoding.Weights:
    if not self._is_tied:
      return weights
    return _with(weights, head=weights.embed)

  def _specs(self, weights: decoding.Weights) -> decoding.Weights:
    """Returns the partition of each array of the weights over the devices of a process."""
    of = jax.tree.map(lambda like: like.sharding.spec, self.local)

    def of_layer(name: str, value: Any) -> Any:
      if isinstance(value, Joined):  # on one device.
        return Joined(PartitionSpec(), value.widths)
      _, first, second = (*of["layers"][name], None, None, None)[:3]
      if isinstance(value, OutputMajor):
        return OutputMajor(PartitionSpec(second, first))
      return PartitionSpec(first)

    layers = [{name: of_layer(name, x) for name, x in each.items()} for each in weights.layers]
    head = None if self._is_tied else of["head"]
    return _with(weights, embed=of["embed"], layers=layers, final_norm=of["final_norm"], head=head)


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
