"""The order of the devices of a mesh, for machines that are not here."""

import dataclasses
import itertools
import types

import jax
import numpy as np
import pytest

from grpo_jax.learn import device_mesh


@dataclasses.dataclass(frozen=True)
class Tpu:
  id: int
  process_index: int
  coords: tuple[int, int, int]
  slice_index: int = 0
  core_on_chip: int = 0
  platform: str = "tpu"
  device_kind: str = "TPU v5 lite"


@dataclasses.dataclass(frozen=True)
class Gpu:
  id: int
  process_index: int
  slice_index: int
  platform: str = "gpu"
  device_kind: str = "NVIDIA H100 80GB HBM3"


def v5e_16(number=0):
  """Returns a slice of 4 × 4 chips, of four hosts with 2 × 2 chips each."""
  host = lambda x, y: x // 2 + 2 * (y // 2)
  places = sorted(itertools.product(range(4), range(4)), key=lambda at: (host(*at), at[::-1]))
  return [
    Tpu(16 * number + i, 4 * number + host(x, y), (x, y, 0), number)
    for i, (x, y) in enumerate(places)
  ]


def h100s(*nodes, per_process=None):
  """Returns the GPUs of nodes, of one process a node or of processes with fewer GPUs each."""
  found = []
  for node, count in enumerate(nodes):
    for _ in range(count):
      process = node if per_process is None else len(found) // per_process
      found.append(Gpu(len(found), process, node))
  return found


def grid(devices, **sizes):
  """Returns the devices in the shape of their mesh."""
  return device_mesh._grid(devices, device_mesh.mesh_sizes(devices, **({"data": 1} | sizes)))


def of(devices, name):
  return np.vectorize(lambda device: getattr(device, name))(devices)


def test_devices_of_one_host_keep_their_order():
  divided = device_mesh.make_mesh(data=1, fsdp=-1, expert=2, context=2)
  assert divided.axis_names == ("data", "fsdp", "expert", "context", "tensor")
  assert divided.devices.shape == (1, 2, 2, 2, 1)
  made = device_mesh.make_mesh(data=2, fsdp=2, tensor=2)
  assert list(made.devices.flat) == jax.devices()
  node = h100s(8)
  assert list(grid(node, fsdp=4, tensor=2).flat) == node


def test_neighbours_on_a_v5e_slice_are_linked():
  slice_ = v5e_16()
  ring = grid(slice_, fsdp=-1, tensor=1)[0, :, 0]
  coords = [device.coords for device in ring]
  steps = [
    sum(abs(a - b) for a, b in zip(one, other, strict=True))
    for one, other in zip(coords, coords[1:] + coords[:1], strict=True)
  ]
  assert steps == [1] * 16  # a ring through all hosts; in the order of the list, hosts are apart.
  hosts = [device.process_index for device in ring]
  assert [len(set(hosts[at : at + 4])) for at in range(0, 16, 4)] == [1] * 4
  both = grid(v5e_16(0) + v5e_16(1), data=2, fsdp=-1, tensor=1)
  assert [device.coords for device in both[1, :, 0]] == coords
  split = grid(slice_, fsdp=4, tensor=4)
  for row in split[0]:  # each group of tensor is a line of chips.
    assert len({device.coords[0] for device in row}) == 1 or len({d.coords[1] for d in row}) == 1


@pytest.mark.parametrize(
  "sizes",
  [{"data": 2, "fsdp": 16}, {"data": -1, "fsdp": -1}, {"data": 4, "fsdp": -1}, {"data": -1}],
)
def test_data_crosses_tpu_slices(sizes):
  both = v5e_16(0) + v5e_16(1)
  found = of(grid(both, **({"fsdp": 1, "tensor": 1} | sizes)), "slice_index")
  half = len(found) // 2
  assert (found[:half] == 0).all()
  assert (found[half:] == 1).all()


def test_the_order_of_slices_in_the_list_does_not_matter():
  both = v5e_16(0) + v5e_16(1)
  expected = grid(both, data=2, fsdp=-1, tensor=1)
  assert (grid(both[16:] + both[:16], data=2, fsdp=-1, tensor=1) == expected).all()


def test_fsdp_crosses_slices_if_data_cannot():
  found = of(grid(v5e_16(0) + v5e_16(1), fsdp=-1, tensor=4), "slice_index")
  assert found.shape == (1, 8, 4)
  assert (found[0, :4] == 0).all()
  assert (found[0, 4:] == 1).all()


@pytest.mark.parametrize("per_process", [None, 1, 4])
def test_gpus_are_ordered_by_node_however_processes_share_them(per_process):
  both = h100s(8, 8, per_process=per_process)
  dealt = sorted(both, key=lambda device: (device.id % 8, device.id))  # one of each node in turn.
  for devices in (both, dealt):
    found = grid(devices, data=-1, fsdp=-1, tensor=1)
    assert found.shape == (2, 8, 1)
    np.testing.assert_array_equal(of(found, "id").ravel(), np.arange(16))
    whole = grid(devices, fsdp=-1, tensor=2)
    np.testing.assert_array_equal(of(whole, "id").ravel(), np.arange(16))
    assert (of(whole, "slice_index")[0, :4] == 0).all()


def test_nodes_of_different_sizes_make_one_mesh():
  found = grid(h100s(8, 4), fsdp=-1, tensor=1)
  assert found.shape == (1, 12, 1)


@pytest.mark.parametrize(
  ("devices", "sizes", "message"),
  [
    (
      h100s(8, 8),
      {"data": 3, "fsdp": 4, "tensor": 1},
      r"needs 12 devices, there are 16 \(NVIDIA H100 80GB HBM3; 2 processes of 8 devices,"
      r" 2 NVLink domains\): set mesh.data=1, mesh.fsdp=-1 and mesh.tensor=1 to use all$",
    ),
    (
      h100s(8, 8, per_process=1),
      {"data": 3, "fsdp": 4, "tensor": 1},
      r"\(NVIDIA H100 80GB HBM3; 16 processes of 1 device, 2 NVLink domains\)",
    ),
    (
      h100s(8, 4),
      {"data": -1, "fsdp": -1, "tensor": 1},
      "mesh.data=-1, mesh.fsdp=-1, mesh.tensor=1 needs NVLink domains of equal size, there are 2,"
      " of 8 and 4 devices: set mesh.data to the number of replicas",
    ),
    (
      h100s(8, 8),
      {"data": -1, "fsdp": -1, "tensor": 3},
      "needs NVLink domains of equal size, a multiple of 3 devices, there are 2, of 8 and 8",
    ),
    (
      v5e_16(0) + v5e_16(1),
      {"data": 1, "fsdp": 1, "tensor": 32},
      "mesh.tensor=32 would split tensors between TPU slices, there are 2 slices of 16 devices:"
      " set mesh.data=2, or mesh.data=-1 and mesh.fsdp=-1",
    ),
    (
      v5e_16(0) + v5e_16(1)[:8],
      {"data": 1, "fsdp": -1, "tensor": 1},
      "needs TPU slices of equal size, there are slices of 16 and 8 devices",
    ),
  ],
)
def test_a_mesh_that_does_not_fit_names_what_was_found(devices, sizes, message):
  with pytest.raises(ValueError, match=message) as caught:
    device_mesh.mesh_sizes(devices, **sizes)
  assert "\n" not in str(caught.value)


def test_a_tpu_that_names_no_slice_is_of_the_only_one():
  topology = [types.SimpleNamespace(platform="tpu", process_index=i // 4) for i in range(8)]
  assert device_mesh.domains(topology) == [topology]


def test_what_crosses_hosts_is_described():
  whole, names = device_mesh.make_mesh(data=2, fsdp=4), device_mesh.AXES
  assert device_mesh.describe(whole.devices, names) == ""
  parts = "2 processes of 8 devices, 2 NVLink domains"
  for axis, made in (
    ("data", grid(h100s(8, 8), data=2, fsdp=-1, tensor=1)),
    ("fsdp", grid(h100s(8, 8), fsdp=-1, tensor=1)),
  ):
    axes = " × ".join(f"{each} {size}" for each, size in zip(names, made.shape, strict=True))
    assert device_mesh.describe(made, names) == (
      f"mesh {axes} over {parts}: {axis} between processes, {axis} between NVLink domains"
    )
  assert device_mesh.describe(grid(v5e_16(), fsdp=-1, tensor=1), names) == (
    "mesh data 1 × fsdp 16 × tensor 1 over 4 processes of 4 devices, 1 TPU slice: fsdp between"
    " processes"
  )


def test_every_process_needs_a_device_of_the_mesh(monkeypatch):
  there = h100s(4, 4)
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
  monkeypatch.setattr(jax, "devices", lambda *_: there)
  with pytest.raises(ValueError, match="none of these has one: process 1$"):
    device_mesh.make_mesh(fsdp=2, devices=there[:4])
