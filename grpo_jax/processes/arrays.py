"""Arrays that are spread over several processes: as NumPy, and as copies on one's own devices."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def fetch(tree: Any) -> Any:
  """Returns arrays as NumPy arrays, whole on every process.

  All processes must make the same calls in the same order, on their main threads, if an array is
  spread over several processes.

  Args:
    tree: Tree of arrays.
  """
  return jax.tree.map(np.asarray, jax.device_get(jax.tree.map(_addressable, tree)))


def take_part(tree: Any) -> None:
  """Does the part of this process in a `fetch` of other processes, which alone copy the arrays.

  Args:
    tree: Tree of arrays, as the others pass it to `fetch`.
  """
  jax.block_until_ready(jax.tree.map(_addressable, tree))


def _addressable(array: Any) -> Any:
  """Returns the array, or a copy of which this process has every part."""
  is_spread = isinstance(array, jax.Array) and not (
    array.is_fully_addressable or array.is_fully_replicated
  )
  if not is_spread:
    return array
  whole = _replicate(NamedSharding(array.sharding.mesh, PartitionSpec()))(array)
  return whole.addressable_data(0)


@functools.cache
def _replicate(sharding: NamedSharding) -> Any:
  return jax.jit(lambda x: x, out_shardings=sharding)


def own(tree: Any) -> Any:
  """Returns copies on this process's own devices, each of them with the whole arrays.

  All processes must make the same calls in the same order, on their main threads.

  Args:
    tree: Tree of arrays, or of `jax.ShapeDtypeStruct`s with shardings, on one mesh.

  Returns:
    The tree itself if its mesh has devices of this process only.
  """
  mesh = jax.tree.leaves(tree)[0].sharding.mesh
  if len(mesh.local_devices) == mesh.size:
    return tree
  sizes = (len(mesh.local_devices), *(1 for _ in mesh.axis_names[1:]))
  devices = np.asarray(mesh.local_devices, dtype=object).reshape(sizes)
  mine = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
  sharding = NamedSharding(mine, PartitionSpec())

  def copied(array: Any) -> Any:
    if not isinstance(array, jax.Array):
      return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    whole = _replicate(NamedSharding(mesh, PartitionSpec()))(array)
    parts = [shard.data for shard in whole.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)

  return jax.tree.map(copied, tree)
