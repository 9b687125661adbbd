"""One device and eight train alike, in several meshes; parameters and moments are split."""

import functools
import re

import equivalence_case as case
import jax
import numpy as np
import pytest

from grpo_jax.learn import sharding

# tests/learn/test_placement.py has fsdp alone and the other pairs of axes.
MESHES = [(8, 1, 1), (2, 2, 2), (1, 1, 8)]


@functools.cache
def on_one_device():
  state, metrics = case.trained(None)
  state = state.params, state.opt_state
  return jax.device_get(state), {name: m.value() for name, m in metrics.items()}


@functools.cache
def on_mesh(sizes):
  data, fsdp, tensor = sizes
  return case.trained(sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor))


@pytest.mark.long
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_mesh_changes_neither_parameters_nor_optimizer_state_nor_metrics(sizes):
  state, metrics = on_mesh(sizes)
  (params, opt_state), expected_metrics = on_one_device()
  moments = lambda tree: [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim]
  # Learning moved the weights by far more than the tolerance.
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, case.params())
  assert min(jax.tree.leaves(moved)) > 5e-3
  for got, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)
  for got, wanted in zip(moments(state.opt_state), moments(opt_state), strict=True):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
  for name, wanted in expected_metrics.items():
    np.testing.assert_allclose(metrics[name].value(), wanted, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 1, 8)], ids=str)
@pytest.mark.long
def test_mesh_changes_nothing_of_one_sweep_over_the_head(sizes):
  # Plain gradient descent: Adam makes much of entries whose gradient is rounding.
  data, fsdp, tensor = sizes
  mesh = sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor)
  options = {"optimizer": "sgd", "aggregation": "token_mean"}
  state, metrics = case.trained(mesh, one_sweep=True, **options)
  expected, expected_metrics = case.trained(None, **options)
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), expected.params, case.params())
  assert max(jax.tree.leaves(moved)) > 5e-4
  pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True)
  for got, wanted in pairs:
    np.testing.assert_allclose(got, wanted, rtol=2.4e-7, atol=1e-6)
  for name, wanted in expected_metrics.items():
    got = metrics[name].value()
    np.testing.assert_allclose(got, wanted.value(), rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("one_sweep", [False, True], ids=["two-passes", "one-sweep"])
@pytest.mark.parametrize("sizes", [(1, 1, 8), (2, 1, 4), (2, 2, 2)], ids=str)
@pytest.mark.long
def test_vocabulary_is_split_over_tensor_and_never_gathered(sizes, one_sweep):
  compiled, vocabulary, expected = case.compiled_on_mesh(sizes, one_sweep=one_sweep)
  text = compiled.as_text()
  shapes = {tuple(map(int, s.split(","))) for s in re.findall(r"\w\d+\[([\d,]+)\]", text)}
  of_part = vocabulary // sizes[2]
  assert [shape for shape in shapes if of_part in shape]  # so the search would find the whole.
  assert not [shape for shape in shapes if vocabulary in shape]
  for got, wanted in zip(*expected, strict=True):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.long
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_bytes_per_device_fall_with_fsdp_and_tensor(sizes):
  state, _ = on_mesh(sizes)
  _, fsdp, tensor = sizes
  for tree in (state.params, state.opt_state):
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim]
    total = sum(leaf.nbytes for leaf in leaves)
    of_device = [sum(leaf.addressable_shards[d].data.nbytes for leaf in leaves) for d in range(8)]
    # Norms and biases have one axis and are split over one mesh axis at most.
    assert max(of_device) <= total / (fsdp * tensor) * 1.12
    assert min(of_device) == max(of_device)


@pytest.mark.long
def test_state_stays_where_it_was_put():
  state, _ = on_mesh((2, 2, 2))
  embed = state.params["embed"]
  assert embed.sharding.spec == jax.sharding.PartitionSpec("tensor", "fsdp")
  assert embed.addressable_shards[0].data.shape == (48, 16)
  moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == embed.shape]
  assert len(moments) == 2
  assert all(m.sharding.is_equivalent_to(embed.sharding, 2) for m in moments)
