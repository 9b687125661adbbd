"""The mesh and the rules by which arrays are laid on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
  ],
)
def test_make_mesh_fills_in_the_rest(given, expected):
  mesh = sharding.make_mesh(**given)
  assert mesh.axis_names == ("data", "fsdp", "tensor")
  assert mesh.devices.shape == expected
  assert sharding.replicas(mesh) == expected[0] * expected[1]


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"fsdp": 3}, "does not make up 8 devices"),
    ({"data": 2, "fsdp": 2}, "does not make up 8 devices"),
    ({"data": -1, "fsdp": -1}, "one of them may be -1"),
    ({"tensor": 0}, "at least 1"),
  ],
)
def test_make_mesh_says_what_does_not_fit(given, message):
  with pytest.raises(ValueError, match=message):
    sharding.make_mesh(**given)


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
  with pytest.raises(ValueError, match="6 rows do not divide over 4 replicas"):
    sharding.put(jnp.zeros((6, 2)), mesh)
