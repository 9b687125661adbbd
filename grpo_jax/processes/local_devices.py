"""The part of a mesh that this process has, and arrays that every process holds a copy of.

A copy is split over the devices of its process like the original over the mesh, along the parts of
the mesh axes that lie within a process: weights that are split over 16 devices of 4 processes are
copied to each process in 4 parts.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class LocalPart:
  """The devices of this process in a mesh of several processes; made by `part_of`.

  Attributes:
    mesh: Mesh of this process's devices, with the axes of the whole mesh.
    spread: Mesh of all devices, in the order of the whole mesh; its axes are factors of the axes of
      the whole mesh, each of them either within the processes or between them.
    within: For each axis of the whole mesh, the axes of `spread` that lie within a process.
  """

  mesh: Mesh
  spread: Mesh
  within: Mapping[str, tuple[str, ...]]

  def partition(self, spec: PartitionSpec) -> PartitionSpec:
    """Returns the partition of a copy over `mesh`, of an array that `spec` splits over all."""
    kept = [tuple(axis for axis in _names(axes) if self.within[axis]) for axes in spec]
    return PartitionSpec(*(_entry(axes) for axes in kept))

  def copies(self, spec: PartitionSpec) -> NamedSharding:
    """Returns the sharding of copies, one for each process, as one array on all devices.

    Args:
      spec: Partition of each copy over `mesh`.
    """
    axes = [tuple(name for axis in _names(axes) for name in self.within[axis]) for axes in spec]
    return NamedSharding(self.spread, PartitionSpec(*map(_entry, axes)))

  def own(self, spec: PartitionSpec) -> NamedSharding:
    """Returns the sharding of this process's copy, as an array on `mesh`."""
    return NamedSharding(self.mesh, spec)

  def take(self, copies: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Returns this process's copy of an array whose sharding is `copies(spec)`."""
    parts = [shard.data for shard in copies.addressable_shards]
    return jax.make_array_from_single_device_arrays(copies.shape, self.own(spec), parts)


_assumed_host: contextvars.ContextVar[Sequence[Any] | None] = contextvars.ContextVar(
  "assumed_host", default=None
)


@contextlib.contextmanager
def assumed_host(devices: Sequence[Any]) -> Iterator[None]:
  """Makes `part_of` return the part of a process of a machine that is not present.

  The mesh of that part has these devices. They need not be among those of the whole mesh, because
  the compiler for a TPU slice accepts only programs for all of its devices.

  Args:
    devices: Devices of one host, or of a machine like one host, in their order.
  """
  token = _assumed_host.set(devices)
  try:
    yield
  finally:
    _assumed_host.reset(token)


def part_of(mesh: Any) -> LocalPart | None:
  """Returns this process's part of a mesh; None if the mesh has devices of this process only.

  If the devices of the processes do not form equal blocks of the mesh, nothing is split over the
  devices of a process: each of them holds whole copies.

  Args:
    mesh: Mesh of devices.
  """
  host = _assumed_host.get()
  local_devices = mesh.local_devices if host is None else host
  if len(local_devices) >= mesh.size:
    return None
  part = _part_of(mesh, local_devices)
  if host is None:
    return part
  own = np.asarray(host, dtype=object).reshape(part.mesh.devices.shape)
  return dataclasses.replace(part, mesh=_like(mesh, own))


def _part_of(mesh: Any, local_devices: Sequence[Any]) -> LocalPart:
  """Returns the part of the process with these devices; the mesh has more of them."""
  owner = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
  me = local_devices[0].process_index
  for factors in itertools.product(*map(_orderings, mesh.devices.shape)):
    sizes = [size for own in factors for size in own]
    is_within = [_is_constant(owner.reshape(sizes), axis) for axis in range(len(sizes))]
    local = math.prod(size for size, within in zip(sizes, is_within, strict=True) if within)
    if local == len(local_devices):
      return _part(mesh, factors, is_within, owner, me)
  devices = np.asarray(local_devices, dtype=object)
  alone = devices.reshape(-1, *(1 for _ in mesh.axis_names[1:]))
  return LocalPart(_like(mesh, alone), mesh, {axis: () for axis in mesh.axis_names})


def _part(
  mesh: Mesh,
  factors: Sequence[Sequence[int]],
  is_within: Sequence[bool],
  owner: np.ndarray,
  me: int,
) -> LocalPart:
  """Returns the part of process `me`, whose devices are a block of the factors of the axes."""
  numbered = [(axis, i) for axis, own in zip(mesh.axis_names, factors, strict=True) for i in own]
  names = [f"{axis}.{at}" for at, (axis, _) in enumerate(numbered)]
  sizes = [size for _, size in numbered]
  within: dict[str, tuple[str, ...]] = dict.fromkeys(mesh.axis_names, ())
  lengths = dict.fromkeys(mesh.axis_names, 1)
  for name, (axis, size), inside in zip(names, numbered, is_within, strict=True):
    if inside:
      within[axis] = (*within[axis], name)
      lengths[axis] *= size
  first = np.argwhere(owner.reshape(sizes) == me)[0]
  block = tuple(slice(None) if inside else i for i, inside in zip(first, is_within, strict=True))
  own = np.asarray(mesh.devices.reshape(sizes)[block], dtype=object)
  own = own.reshape([lengths[axis] for axis in mesh.axis_names])
  kinds = (mesh.axis_types[0],) * len(names)
  spread = Mesh(mesh.devices.reshape(sizes), tuple(names), axis_types=kinds)
  return LocalPart(_like(mesh, own), spread, within)


def _like(mesh: Mesh, devices: np.ndarray) -> Mesh:
  return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _is_constant(array: np.ndarray, axis: int) -> bool:
  """Returns whether an array does not change along an axis."""
  return bool((array == array.take([0], axis)).all())


def _orderings(size: int) -> Iterator[tuple[int, ...]]:
  """Yields the prime factors of a number in every order."""
  if size == 1:
    yield ()
  for prime in range(2, size + 1):
    if size % prime == 0 and all(prime % smaller for smaller in range(2, prime)):
      yield from ((prime, *rest) for rest in _orderings(size // prime))


def _names(axes: Any) -> tuple[str, ...]:
  """Returns the mesh axes of one entry of a partition."""
  return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _entry(axes: tuple[str, ...]) -> Any:
  """Returns mesh axes as an entry of a partition."""
  return axes[0] if len(axes) == 1 else axes or None
