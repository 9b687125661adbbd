"""The mesh and the rules by which arrays are laid on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels import collectives
from jax.sharding import PartitionSpec

from grpo_jax.learn import optim, sharding


def spec(names, shape, **sizes):
  mesh = sharding.make_mesh(**sizes)
  like = jax.ShapeDtypeStruct(shape, jnp.float32)
  return sharding.param_shardings({"w": names}, mesh, shapes={"w": like})["w"].spec


@pytest.mark.parametrize(
  ("given", "expected"),
  [
    ({}, (8, 1, 1)),
    ({"fsdp": 4}, (2, 4, 1)),
    ({"data": 1, "fsdp": -1, "tensor": 2}, (1, 4, 2)),
    ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 2)),
    ({"data": -1, "fsdp": -1}, (1, 8, 1)),
    ({"data": -1, "fsdp": -1, "tensor": 2}, (1, 4, 2)),
  ],
)
def test_make_mesh_fills_in_the_rest(given, expected):
  mesh = sharding.make_mesh(**given)
  assert mesh.axis_names == ("data", "fsdp", "tensor")
  assert mesh.devices.shape == expected
  assert sharding.replicas(mesh) == expected[0] * expected[1]


def test_context_splits_weights_with_fsdp_and_rows_with_neither():
  mesh = sharding.make_mesh(data=1, fsdp=2, context=2, tensor=2)
  assert sharding.replicas(mesh) == 2 and sharding.row_parts(mesh) == 2
  like = {"q": np.zeros((8, 6)), "odd": np.zeros((6, 6))}
  axes = dict.fromkeys(like, ("embed", "heads"))
  found = sharding.param_shardings(axes, mesh, shapes=like)
  assert found["q"].spec == PartitionSpec(("fsdp", "context"), "tensor")
  assert found["odd"].spec == PartitionSpec(None, "tensor")
  assert sharding.unsplit(axes, mesh, shapes=like) == {"fsdp": {"embed": 6}}
  rows = sharding.put({"x": np.zeros((4, 8))}, mesh)["x"]
  assert {shard.data.shape for shard in rows.addressable_shards} == {(2, 8)}
  with pytest.raises(ValueError, match=r"sum over \('fsdp',\) cannot be split over .*context"):
    collectives.summed(rows, ("fsdp",), into=("fsdp", "context"), dim=0)


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"fsdp": 3}, "needs a multiple of 3 devices, there are 8 "),
    ({"data": 2, "fsdp": 2}, "needs 4 devices, there are 8 "),
    ({"data": 1}, "mesh.data=1, mesh.fsdp=1, mesh.tensor=1 needs 1 device, there are 8 .*fsdp=-1"),
    ({"data": 16}, "needs 16 devices, there are 8 "),
    ({"data": True}, "whole numbers, got mesh.data=True"),
    ({"data": -1, "fsdp": -1, "tensor": -1}, "one may be -1, or mesh.data and mesh.fsdp both"),
    ({"data": -1, "tensor": -1}, "except that one may be -1"),
    ({"tensor": 0}, "at least 1"),
  ],
)
def test_make_mesh_says_what_does_not_fit(given, message):
  with pytest.raises(ValueError, match=message):
    sharding.make_mesh(**given)


class Gpu:
  platform, device_kind = "gpu", "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
  ("count", "given", "remedy"),
  [
    (8, {"data": 1, "fsdp": 1, "tensor": 1}, "CUDA_VISIBLE_DEVICES=0 to use fewer"),
    (8, {"data": 1, "fsdp": -1, "tensor": 3}, "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 to use fewer"),
    (1, {"data": 1, "fsdp": 8, "tensor": 1}, r"there is 1 \(NVIDIA H100.*\): set .* to use all$"),
    (2, {"data": -1, "fsdp": 1, "tensor": 3}, "set .* to use all$"),
  ],
)
def test_a_mesh_that_does_not_fit_gpus_says_how_to_use_all_or_fewer(count, given, remedy):
  with pytest.raises(ValueError, match=remedy) as caught:
    sharding.mesh_sizes([Gpu()] * count, **given)
  assert "set mesh.data=1, mesh.fsdp=-1 and mesh.tensor=1 to use all" in str(caught.value)
  assert "\n" not in str(caught.value)


def test_the_remedy_of_a_mesh_that_does_not_fit_names_every_axis_that_was_set():
  remedy = (
    "set mesh.data=1, mesh.fsdp=-1, mesh.expert=1, mesh.context=1 and mesh.tensor=1 to use all"
  )
  with pytest.raises(ValueError, match=remedy):
    sharding.mesh_sizes([Gpu()] * 2, data=-1, fsdp=1, tensor=1, expert=2, context=2)


def test_what_a_mesh_cannot_split_is_found():
  mesh = sharding.make_mesh(data=1, fsdp=2, tensor=4)
  axes = {"embed": ("vocab", "embed"), "up": ("embed", "mlp"), "norm": ("embed",)}
  shapes = {"embed": jnp.ones((98, 6)), "up": jnp.ones((6, 8)), "norm": jnp.ones(6)}
  assert sharding.unsplit(axes, mesh, shapes=shapes) == {"tensor": {"vocab": 98}}
  shapes = {"embed": jnp.ones((96, 5)), "up": jnp.ones((5, 6)), "norm": jnp.ones(5)}
  found = sharding.unsplit(axes, mesh, shapes=shapes)
  assert found == {"tensor": {"mlp": 6}, "fsdp": {"embed": 5}}


def test_make_mesh_takes_a_part_of_the_devices():
  mesh = sharding.make_mesh(fsdp=2, devices=jax.devices()[:2])
  assert mesh.devices.shape == (1, 2, 1)


@pytest.mark.parametrize(
  ("names", "shape", "expected"),
  [
    (("vocab", "embed"), (96, 32), ("tensor", "fsdp")),
    (("layers", "embed", "mlp"), (2, 32, 48), (None, "fsdp", "tensor")),
    (("layers", "heads", "embed"), (2, 32, 32), (None, "tensor", "fsdp")),
    (("vocab", "embed"), (97, 32), (None, "fsdp")),  # 97 does not divide: kept whole.
    (("embed",), (33,), (None,)),
    ((None,), (8,), (None,)),
  ],
)
def test_param_shardings_follow_the_rules(names, shape, expected):
  assert spec(names, shape, data=2, fsdp=2, tensor=2) == PartitionSpec(*expected)


def test_param_shardings_refuse_a_wrong_number_of_names():
  with pytest.raises(ValueError, match=r"\('embed',\) do not name the axes .* \(4, 4\)"):
    spec(("embed",), (4, 4))


def test_opt_state_lies_with_its_parameters_and_counts_lie_everywhere():
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  params = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
  axes = {"w": ("mlp", "embed"), "b": ("embed",)}
  of_params = sharding.param_shardings(axes, mesh, shapes=params)
  tx, _ = optim.make(10)
  of_state = sharding.opt_state_shardings(tx, params, of_params, mesh)
  state = jax.jit(tx.init, out_shardings=of_state)(params)
  specs = {leaf.shape: leaf.sharding.spec for leaf in jax.tree.leaves(state)}
  assert specs == {
    (): PartitionSpec(),
    (4,): PartitionSpec("fsdp"),
    (8, 4): PartitionSpec("tensor", "fsdp"),
  }


def test_put_splits_rows_and_leaves_scalars_alone():
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  rows, one = sharding.put((jnp.arange(16).reshape(8, 2), 3.0), mesh)
  assert one == 3.0
  assert {shard.data.shape for shard in rows.addressable_shards} == {(2, 2)}
  np.testing.assert_array_equal(rows, np.arange(16).reshape(8, 2))
  with pytest.raises(ValueError, match="6 rows cannot be split evenly over 4 replicas"):
    sharding.put(jnp.zeros((6, 2)), mesh)
