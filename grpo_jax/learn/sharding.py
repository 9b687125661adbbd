"""The device mesh, and the sharding of a run's state and batches over it. Pure.

`models.placement` defines the axes of the mesh and the tables of shardings.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from grpo_kernels.linear_logprobs.sharded import Partition
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grpo_jax.models.placement import AXES, ROWS, RULES, Placement


def make_mesh(
  *,
  data: int = -1,
  fsdp: int = 1,
  tensor: int = 1,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """Makes the mesh ("data", "fsdp", "tensor").

  Args:
    data: Number of replicas. At least 1; one of the three sizes may be -1: the remaining devices.
    fsdp: Number of parts of weights and rows.
    tensor: Number of parts of heads, feed-forward and vocabulary.
    devices: Devices to use; None: all.

  Raises:
    ValueError: The sizes do not match the number of devices; see `mesh_sizes`.
  """
  devices = jax.devices() if devices is None else devices
  sizes = mesh_sizes(devices, data=data, fsdp=fsdp, tensor=tensor)
  grid = np.asarray(devices, dtype=object).reshape(sizes)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_sizes(devices: Sequence[Any], *, data: int, fsdp: int, tensor: int) -> tuple[int, ...]:
  """Returns the sizes of ("data", "fsdp", "tensor") with -1 filled in.

  Args:
    devices: Devices of the mesh; all of them are used.
    data: Number of replicas, as in `make_mesh`.
    fsdp: Number of parts of weights and rows, as in `make_mesh`.
    tensor: Number of parts of heads, feed-forward and vocabulary, as in `make_mesh`.

  Raises:
    ValueError: The sizes do not match the number of devices. The message names the devices, and
      what to set.
  """
  sizes = [data, fsdp, tensor]
  named = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
  if any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
    raise ValueError(f"mesh sizes must be whole numbers, got {named}")
  if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
    raise ValueError(f"mesh sizes must be at least 1, except that one may be -1; got {named}")
  given = math.prod(size for size in sizes if size != -1)
  if -1 in sizes and len(devices) % given == 0:
    sizes[sizes.index(-1)] = len(devices) // given
  if math.prod(sizes) != len(devices):
    raise ValueError(_misfit(named, given, devices, is_open=-1 in sizes))
  return tuple(sizes)


def _misfit(named: str, given: int, devices: Sequence[Any], *, is_open: bool) -> str:
  """Returns in one line why a mesh does not fit the devices, and which fields to set."""
  count, platform = len(devices), devices[0].platform
  there = f"there {'is' if count == 1 else 'are'} {count} ({devices[0].device_kind})"
  needed = f"a multiple of {given} devices" if is_open else f"{given} device{'s' * (given > 1)}"
  remedies = ["set mesh.data=1, mesh.fsdp=-1 and mesh.tensor=1 to use all"]
  fewer = count // given * given if is_open else given
  if platform in ("gpu", "cuda", "rocm") and 0 < fewer < count:
    numbers = ",".join(map(str, range(fewer)))
    remedies.append(f"the environment variable CUDA_VISIBLE_DEVICES={numbers} to use fewer")
  return f"{named} needs {needed}, {there}: {', or '.join(remedies)}"


def unsplit(logical_axes: Any, mesh: Mesh, *, shapes: Any) -> dict[str, dict[str, int]]:
  """Returns the axes that are not split, because a mesh axis does not divide their length.

  Args:
    logical_axes: Logical axis names, as in `param_shardings`.
    mesh: Mesh made by `make_mesh`.
    shapes: Shapes of the parameters, as in `param_shardings`.

  Returns:
    The lengths, by mesh axis and logical axis.
  """
  found: dict[str, dict[str, int]] = {}
  is_names = lambda node: isinstance(node, tuple)
  for names, like in zip(
    jax.tree.leaves(logical_axes, is_leaf=is_names), jax.tree.leaves(shapes), strict=True
  ):
    for name, length in zip(names, like.shape, strict=True):
      axis = RULES.get(name)
      if axis is not None and length % mesh.shape[axis]:
        found.setdefault(axis, {})[name] = length
  return found


def replicas(mesh: Mesh) -> int:
  """Returns the number of devices over which rows are split; B must be a multiple of it."""
  return int(np.prod([mesh.shape[axis] for axis in ROWS]))


def param_shardings(logical_axes: Any, mesh: Mesh, *, shapes: Any) -> Any:
  """Returns the sharding of each parameter, by `RULES`.

  Args:
    logical_axes: Tree of tuples with one logical name, or None, for each axis of a parameter.
    mesh: Mesh made by `make_mesh`.
    shapes: Tree of the same structure, of arrays or other objects with a `shape`.

  Raises:
    ValueError: A parameter has more or fewer axes than names.
  """
  return jax.tree.map(
    lambda names, like: NamedSharding(mesh, Placement(mesh).weight(names, like.shape)),
    logical_axes,
    shapes,
    is_leaf=lambda node: isinstance(node, tuple),
  )


def opt_state_shardings(
  tx: optax.GradientTransformation, params: Any, shardings: Any, mesh: Mesh
) -> Any:
  """Returns the sharding of the optimizer's state: arrays shaped like a parameter follow it.

  Args:
    tx: Optimizer.
    params: Tree of arrays or shapes.
    shardings: Shardings of the parameters.
    mesh: Mesh of devices; everything else (step counts) is copied to all of them.
  """
  everywhere = whole(mesh)
  return optax.tree_utils.tree_map_params(
    tx,
    lambda _, sharding: sharding,
    jax.eval_shape(tx.init, params),
    shardings,
    transform_non_params=lambda _: everywhere,
  )


def whole(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of arrays that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def mesh_of(shardings: Any) -> Mesh:
  """Returns the mesh of a tree of shardings."""
  return jax.tree.leaves(shardings)[0].mesh


def of_rows(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of arrays whose first axis is rows."""
  return NamedSharding(mesh, PartitionSpec(ROWS))


def placement(mesh: Mesh) -> Placement | None:
  """Returns the placement of weights and activations; None on a mesh of one device."""
  return None if mesh.size == 1 else Placement(mesh)


def head_partition(mesh: Mesh) -> Partition | None:
  """Returns how the LM head and its tokens are split: V by "tensor", D and tokens like rows.

  None on a mesh of one device.
  """
  if mesh.size == 1:
    return None
  vocab_axis = RULES["vocab"]
  return Partition(
    mesh,
    vocab_axis=vocab_axis if mesh.shape[vocab_axis] > 1 else None,
    token_axes=tuple(axis for axis in ROWS if mesh.shape[axis] > 1),
    width_axis=RULES["embed"] if mesh.shape[RULES["embed"]] > 1 else None,
  )


def put(tree: Any, mesh: Mesh) -> Any:
  """Puts batches (trees of arrays [B ...]) on the mesh with rows split; scalars stay unchanged.

  Raises:
    ValueError: B is not a multiple of `replicas(mesh)`.
  """
  parts = replicas(mesh)
  is_local = len(mesh.local_devices) == mesh.size

  def put_one(x):
    if np.ndim(x) == 0:
      return x
    if x.shape[0] % parts:
      raise ValueError(
        f"{x.shape[0]} rows cannot be split evenly over {parts} replicas of {dict(mesh.shape)}"
      )
    if is_local:
      return jax.device_put(x, of_rows(mesh))
    host = np.asarray(x)  # `device_put` would compare the arrays of all processes.
    return jax.make_array_from_callback(host.shape, of_rows(mesh), lambda index: host[index])

  return jax.tree.map(put_one, tree)
