"""The part of a mesh that a process has, for meshes of machines that are not here."""

import dataclasses
import types

import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from grpo_jax.processes import local_devices

AXES = ("data", "fsdp", "tensor")


@dataclasses.dataclass(frozen=True)
class Device:
  """A device as a mesh sees it; process 1 is this one."""

  id: int
  process_index: int
  platform: str = "tpu"

  @property
  def client(self):
    return types.SimpleNamespace(process_index=lambda: 1)


def mesh(shape, owners):
  """Returns a mesh whose devices belong to these processes, in its order."""
  devices = [Device(i, owner) for i, owner in enumerate(owners)]
  grid = np.asarray(devices, dtype=object).reshape(shape)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def blocks(processes, devices):
  return [process for process in range(processes) for _ in range(devices)]


# Sizes of the mesh, the process of each device → sizes of the part of a process.
MESHES = {
  "fsdp over processes": ((1, 16, 1), blocks(4, 4), (1, 4, 1)),
  "data over processes": ((4, 4, 1), blocks(4, 4), (1, 4, 1)),
  "tensor within": ((1, 4, 4), blocks(4, 4), (1, 1, 4)),
  "tensor over processes": ((1, 2, 8), blocks(4, 4), (1, 1, 4)),
  "tensor over half a process": ((2, 4, 2), blocks(2, 8), (1, 4, 2)),
  "three processes": ((1, 6, 2), blocks(3, 4), (1, 2, 2)),
  "six within": ((2, 6, 1), blocks(2, 6), (1, 6, 1)),
  "two by two by two": ((1, 12, 1), blocks(2, 6), (1, 6, 1)),
  # Four hosts of 2 × 2 chips in the row-major order of a slice of 4 × 4.
  "a slice in rows": ((1, 16, 1), [0, 0, 1, 1] * 2 + [2, 2, 3, 3] * 2, (1, 4, 1)),
  "a slice in a ring": ((1, 16, 1), [0] * 4 + [2] * 4 + [3] * 4 + [1] * 4, (1, 4, 1)),
  "one device each": ((1, 2, 2), blocks(4, 1), (1, 1, 1)),
  # A snake: no factor of the axis lies within the processes, so nothing is split.
  "a snake": ((1, 8, 1), [0, 1, 1, 1, 1, 0, 0, 0], (4, 1, 1)),
}


@pytest.mark.parametrize("name", MESHES)
def test_the_part_of_a_process_has_its_devices_and_the_splits_within_it(name):
  shape, owners, wanted = MESHES[name]
  whole = mesh(shape, owners)
  part = local_devices.part_of(whole)
  assert part.mesh.devices.shape == wanted and part.mesh.axis_names == AXES
  assert {each.process_index for each in part.mesh.devices.flat} == {1}
  assert list(part.spread.devices.flat) == list(whole.devices.flat)
  # What a device has of a process's copy, as the mesh of all and that of the process say.
  spec = P(None, "fsdp", "tensor")
  length = (1, 48, 64)
  of_all = part.copies(spec).devices_indices_map(length)
  of_own = part.own(part.partition(spec)).devices_indices_map(length)
  spans = lambda index: [each.indices(n) for each, n in zip(index, length, strict=True)]
  for device in part.mesh.devices.flat:
    assert spans(of_all[device]) == spans(of_own[device])


def test_a_mesh_of_one_process_has_no_part():
  assert local_devices.part_of(mesh((1, 2, 2), [1] * 4)) is None


def test_the_part_of_an_assumed_host_has_its_devices_in_the_splits_of_one_host():
  whole = mesh((1, 8, 1), blocks(2, 4))
  host = [Device(100 + i, 0) for i in range(4)]
  with local_devices.assumed_host(host):
    part = local_devices.part_of(whole)
    assert part is not None
    assert list(part.mesh.devices.flat) == host and part.mesh.devices.shape == (1, 4, 1)
    assert list(part.spread.devices.flat) == list(whole.devices.flat)
    assert local_devices.part_of(mesh((1, 4, 1), [0] * 4)) is None
  with local_devices.assumed_host(list(whole.devices.flat)):
    assert local_devices.part_of(whole) is None
  after = local_devices.part_of(whole)
  assert after is not None and {each.process_index for each in after.mesh.devices.flat} == {1}
