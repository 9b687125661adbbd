"""The device mesh, in the order of the links between the devices. Pure.

Devices that a fast network joins are a domain: a TPU slice, or the GPUs that NVLink joins, which
are those of a node unless the machine joins nodes. Between domains data cross the slower network of
a data centre. The mesh does not depend on how the devices are divided among processes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
from jaxtyping import Shaped

from grpo_jax.learn.options import MeshOptions
from grpo_jax.models.placement import ALL_AXES, AXES

# Coordinates of the chips of a 4 × 4 slice, such as a v5e-16: a ring along the links in which the
# 2 × 2 chips of a host follow each other. In the ring of `mesh_utils` they do not, so that a host
# could not split its copy of the sampler's weights.
_RING = [
  *((1, 0), (0, 0), (0, 1), (1, 1)),
  *((1, 2), (0, 2), (0, 3), (1, 3)),
  *((2, 3), (3, 3), (3, 2), (2, 2)),
  *((2, 1), (3, 1), (3, 0), (2, 0)),
]
_DOMAINS = {"tpu": "TPU slice", "cpu": "process"}  # of other platforms: "NVLink domain".


def make_mesh(
  *,
  data: int = MeshOptions.data,
  fsdp: int = MeshOptions.fsdp,
  tensor: int = MeshOptions.tensor,
  expert: int = MeshOptions.expert,
  context: int = MeshOptions.context,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """Makes the mesh ("data", "fsdp", "tensor"), with "expert" or "context" before "tensor".

  "tensor" joins the nearest devices and "data" the farthest: domains are crossed by "data" as far
  as the sizes allow, then by "fsdp". Within a TPU slice the axes follow its links.

  Args:
    data: Number of replicas. At least 1; one of the three sizes may be -1: the remaining devices.
      If `data` and `fsdp` are both -1, `data` is the number of domains.
    fsdp: Number of parts of weights and rows.
    tensor: Number of parts of heads, feed-forward and vocabulary.
    expert: Number of parts of experts and rows; 1: the mesh has no such axis.
    context: Number of parts of the places of each row; 1: the mesh has no such axis.
    devices: Devices to use; None: all.

  Raises:
    ValueError: The sizes do not match the devices, see `mesh_sizes`; or a process of the run has
      none of the devices.
  """
  _check_processes(devices)
  devices = list(jax.devices() if devices is None else devices)
  given = {"data": data, "fsdp": fsdp, "expert": expert, "context": context, "tensor": tensor}
  sizes = mesh_sizes(devices, **given)
  axes = _axes(given)
  return Mesh(_grid(devices, sizes), axes, axis_types=(AxisType.Auto,) * len(axes))


def _axes(given: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the names of the axes of a mesh for which these sizes are given."""
  return tuple(axis for axis in ALL_AXES if axis in AXES or given[axis] != 1)


def mesh_sizes(
  devices: Sequence[Any],
  *,
  data: int,
  fsdp: int,
  tensor: int,
  expert: int = MeshOptions.expert,
  context: int = MeshOptions.context,
) -> tuple[int, ...]:
  """Returns the sizes of the axes of `make_mesh`, in order, with -1 filled in.

  Args:
    devices: Devices of the mesh; all of them are used.
    data: Number of replicas, as in `make_mesh`.
    fsdp: Number of parts of weights and rows, as in `make_mesh`.
    tensor: Number of parts of heads, feed-forward and vocabulary, as in `make_mesh`.
    expert: Number of parts of experts and rows, as in `make_mesh`.
    context: Number of parts of the places of each row, as in `make_mesh`.

  Raises:
    ValueError: The sizes do not match the number of devices, or cannot be divided among TPU slices.
      The message names the devices, and what to set.
  """
  asked = {"data": data, "fsdp": fsdp, "expert": expert, "context": context, "tensor": tensor}
  axes = _axes(asked)
  sizes = [asked[axis] for axis in axes]
  named = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
  if any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
    raise ValueError(f"mesh sizes must be whole numbers, got {named}")
  by_domain = data == fsdp == -1
  if sizes.count(-1) > 1 + by_domain or any(size < 1 and size != -1 for size in sizes):
    raise ValueError(
      "mesh sizes must be at least 1, except that one may be -1, or mesh.data and mesh.fsdp both;"
      f" got {named}"
    )
  if by_domain:
    sizes[0] = _equal_domains(named, devices, math.prod(sizes[2:]))
  given = math.prod(size for size in sizes if size != -1)
  if -1 in sizes and len(devices) % given == 0:
    sizes[sizes.index(-1)] = len(devices) // given
  if math.prod(sizes) != len(devices):
    raise ValueError(_misfit(named, axes, given, devices, is_open=-1 in sizes))
  if _platform(devices) == "tpu":
    _check_slices(named, sizes, devices)
  return tuple(sizes)


def domains(devices: Sequence[Any]) -> list[list[Any]]:
  """Returns the devices by domain, in the order of the domains.

  Args:
    devices: Devices, of one platform.
  """
  found: dict[int, list[Any]] = {}
  for device in devices:
    found.setdefault(_domain(device), []).append(device)
  if len(found) > 1 and _platform(devices) not in _DOMAINS:
    # The numbers of GPUs follow the machine; their order in the list follows the processes.
    found = {number: sorted(each, key=lambda device: device.id) for number, each in found.items()}
  return [found[number] for number in sorted(found)]


def describe(grid: Shaped[np.ndarray, "..."], names: Sequence[str]) -> str:
  """Returns in one line which axes of a mesh cross processes and domains; "" if none does.

  Args:
    grid: Devices in the shape of the mesh, as in `Mesh.devices`.
    names: Names of the axes, as in `Mesh.axis_names`.
  """
  devices = list(grid.flat)
  sizes = zip(names, grid.shape, strict=True)
  axes = " × ".join(f"{axis} {size}" for axis, size in sizes)
  noun, count = domain_noun(devices), len(domains(devices))
  crossing = {
    "processes": _crossing(grid, names, lambda device: device.process_index),
    f"{noun}s": _crossing(grid, names, _domain) if noun != "process" else [],
  }
  found = [f"{' and '.join(those)} between {what}" for what, those in crossing.items() if those]
  if not found:
    return ""
  return f"mesh {axes} over {_parts(devices, count, noun)}: {', '.join(found)}"


def domain_noun(devices: Sequence[Any]) -> str:
  """Returns what a domain of these devices is called in messages."""
  return _DOMAINS.get(_platform(devices), "NVLink domain")


def _grid(devices: Sequence[Any], sizes: Sequence[int]) -> np.ndarray:
  """Returns the devices in the shape of the mesh."""
  of_domains = domains(devices)
  if _platform(devices) != "tpu":
    ordered = [device for each in of_domains for device in each]
    return np.asarray(ordered, dtype=object).reshape(tuple(sizes))
  across = _across(sizes, len(of_domains))
  inside = [size // parts for size, parts in zip(sizes, across, strict=True)]
  slices = np.empty(across, dtype=object)
  try:
    for at, each in zip(np.ndindex(*across), of_domains, strict=True):
      slices[at] = _of_slice(each, inside)
  except AssertionError:  # chips that are no cuboid, as a part of a slice may be: no order is best.
    return np.asarray(devices, dtype=object).reshape(tuple(sizes))
  return np.block(slices.tolist())


def _of_slice(devices: Sequence[Any], sizes: Sequence[int]) -> np.ndarray:
  """Returns the chips of a TPU slice in the shape of its part of the mesh."""
  chips = {tuple(device.coords): device for device in devices}
  if max(sizes) == len(_RING) == len(devices) and chips.keys() == {(*at, 0) for at in _RING}:
    return np.asarray([chips[*at, 0] for at in _RING], dtype=object).reshape(tuple(sizes))
  return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def _across(sizes: Sequence[int], count: int) -> list[int]:
  """Returns by how much each axis is divided among domains: "data" first."""
  found = []
  for size in sizes:
    found.append(math.gcd(size, count))
    count //= found[-1]
  return found


def _check_slices(named: str, sizes: Sequence[int], devices: Sequence[Any]) -> None:
  """Raises ValueError if the sizes cannot be divided among TPU slices."""
  of_domains = domains(devices)
  count = len(of_domains)
  if len({len(each) for each in of_domains}) > 1:
    each = " and ".join(str(len(part)) for part in of_domains)
    raise ValueError(f"{named} needs TPU slices of equal size, there are slices of {each} devices")
  across = _across(sizes, count)
  if math.prod(across) != count or max(across[2:]) > 1:
    raise ValueError(
      f"{named} would split tensors between TPU slices, there are {count} slices of"
      f" {len(of_domains[0])} devices: set mesh.data={count}, or mesh.data=-1 and mesh.fsdp=-1"
    )


def _check_processes(devices: Sequence[Any] | None) -> None:
  """Raises ValueError if a process of the run has none of the devices."""
  if devices is None or not jax.distributed.is_initialized():
    return
  numbers = lambda found: {device.process_index for device in found}
  if absent := sorted(numbers(jax.devices()) - numbers(devices)):
    raise ValueError(
      "every process of a run needs a device of the mesh; none of these has one: process "
      + ", ".join(map(str, absent))
    )


def _equal_domains(named: str, devices: Sequence[Any], tensor: int) -> int:
  """Returns the number of domains, among which `tensor` and equal numbers of devices must fit."""
  sizes, noun = [len(each) for each in domains(devices)], domain_noun(devices)
  if len(set(sizes)) > 1 or sizes[0] % tensor:
    multiple = f", a multiple of {tensor} devices" if tensor > 1 else ""
    found = " and ".join(map(str, sizes))
    raise ValueError(
      f"{named} needs {noun}s of equal size{multiple}, there {'are' if len(sizes) > 1 else 'is'}"
      f" {len(sizes)}, of {found} devices: set mesh.data to the number of replicas"
    )
  return len(sizes)


def _misfit(
  named: str, axes: Sequence[str], given: int, devices: Sequence[Any], *, is_open: bool
) -> str:
  """Returns in one line why a mesh does not fit the devices, and which fields to set."""
  count, platform = len(devices), _platform(devices)
  found = _parts(devices, len(domains(devices)), domain_noun(devices))
  several = f"; {found}" if found else ""
  there = f"there {'is' if count == 1 else 'are'} {count} ({devices[0].device_kind}{several})"
  needed = f"a multiple of {given} devices" if is_open else f"{given} device{'s' * (given > 1)}"
  *others, last = (f"mesh.{axis}={-1 if axis == 'fsdp' else 1}" for axis in axes)
  remedies = [f"set {', '.join(others)} and {last} to use all"]
  fewer = count // given * given if is_open else given
  if platform in ("gpu", "cuda", "rocm") and 0 < fewer < count and not several:
    numbers = ",".join(map(str, range(fewer)))
    remedies.append(f"the environment variable CUDA_VISIBLE_DEVICES={numbers} to use fewer")
  return f"{named} needs {needed}, {there}: {', or '.join(remedies)}"


def _parts(devices: Sequence[Any], count: int, noun: str) -> str:
  """Returns how devices are divided among processes and domains; "" if both are one."""
  local: dict[int, int] = {}
  for device in devices:
    number = getattr(device, "process_index", 0)
    local[number] = local.get(number, 0) + 1
  if len(local) == 1 and count == 1:
    return ""
  sizes = " or ".join(map(str, sorted(set(local.values()))))
  several = "es" if len(local) > 1 else ""
  parts = f"{len(local)} process{several} of {sizes} device{'s' * (sizes != '1')}"
  return parts if noun == "process" else f"{parts}, {count} {noun}{'s' * (count > 1)}"


def _crossing(grid: np.ndarray, names: Sequence[str], part: Callable[[Any], int]) -> list[str]:
  """Returns the axes along which the part of a device, such as its process, changes."""
  parts = np.vectorize(part, otypes=[np.int64])(grid)
  return [axis for i, axis in enumerate(names) if (np.diff(parts, axis=i) != 0).any()]


def _domain(device: Any) -> int:
  """Returns the number of a device's domain; a TPU that names no slice is of the only one."""
  is_tpu = getattr(device, "platform", "cpu") == "tpu"
  for name in ("slice_index", "partition_index", *(() if is_tpu else ("process_index",))):
    if (found := getattr(device, name, None)) is not None:
      return int(found)
  return 0


def _platform(devices: Sequence[Any]) -> str:
  return getattr(devices[0], "platform", "cpu")
