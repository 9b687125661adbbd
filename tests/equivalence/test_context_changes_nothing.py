"""Rows whose places are divided over devices: loss and gradients are those of one device."""

import dataclasses
import functools

import equivalence_case as case
import jax
import numpy as np
import pytest
import test_replay_changes_nothing as replay
from grpo_kernels.attention import Attention

from grpo_jax import batching
from grpo_jax.batching import packing
from grpo_jax.learn import optim, sharding, token_scores, train_step
from grpo_jax.models import leaves, transformer
from grpo_jax.models.config import LayerKind
from grpo_jax.models.placement import attention_partition
from grpo_jax.rl import objectives

# A layer that sees everything, and one with a window.
CONFIG = dataclasses.replace(case.CONFIG, layer_kinds=(LayerKind(), LayerKind(window=6)))
SEQUENCES = {"loss": "gspo", "entropy_coef": 0.05, "aggregation": "sequence_mean"}
SHAPES = (packing.Shape(4, 64, 64),)


@functools.cache
def update_on(sizes, config, loss, one_sweep=False):
  """Returns an update on a mesh, or on one device, and the parameters there."""
  mesh = sharding.make_mesh(**dict(sizes)) if sizes else None
  of_mesh, shardings, params = {}, None, case.params(0, config)
  if mesh is not None:
    of_mesh = {**case.placed_on(mesh), "attention": Attention(None, attention_partition(mesh))}
    axes = transformer.logical_axes(config)
    shardings = sharding.param_shardings(axes, mesh, shapes=params)
    params = jax.device_put(params, shardings)
  objective, (tx, _) = objectives.make(**({"kl_coef": 0.0} | dict(loss))), optim.make(10)
  token_loss = None
  if one_sweep:
    token_loss = token_scores.make_token_loss(config, objective, **of_mesh)
  logprobs = token_scores.make_logprobs(config, **of_mesh)
  options = {"shardings": shardings, "token_loss": token_loss, "report_entropy": True}
  return mesh, train_step.make_update(logprobs, tx, objective, **options), params


def gradients(sizes, loss, *, config=CONFIG, one_sweep=False, data=None, **layout):
  """Returns loss, gradients, logprobs and metrics of a minibatch of one microbatch."""
  of_mesh = tuple(sizes.items()), config, tuple(loss.items()), one_sweep
  mesh, update, params = update_on(*of_mesh)
  parts = 1 if mesh is None else sharding.row_parts(mesh)
  groups, advantages = case.ragged_groups() if data is None else data
  options = {"shapes": SHAPES, "skip_zero_advantage": False, "parts": parts} | layout
  assembled = batching.assemble(groups, advantages, **options)
  (minibatch,) = assembled.minibatches
  if mesh is not None:
    minibatch = sharding.put(minibatch, mesh)
  (grads, value), (metrics,), logprobs = update.gradients(params, minibatch)
  fetched = jax.device_get((grads, logprobs))
  names = {name: found.value() for name, found in jax.device_get(metrics).items()}
  per_rollout = batching.per_rollout(assembled, [fetched[1]], groups)
  return float(value), fetched[0], np.concatenate([x for of in per_rollout for x in of]), names


def assert_same(found, wanted, atol=1e-6):
  """Compares what two ways to compute give, in float32; gradients go up to 0.9."""
  assert abs(found[0] - wanted[0]) < atol
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(found[1]), jax.tree.leaves(wanted[1]), strict=True
  ):
    if leaves.ROUTER not in (name := jax.tree_util.keystr(path)):  # which is frozen.
      assert np.abs(b).max() > 1e-4, f"{name} has no gradient: the test is blind"
    np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=name)
  np.testing.assert_allclose(found[2], wanted[2], rtol=0, atol=5e-6)
  assert found[3].keys() == wanted[3].keys()
  for name, value in wanted[3].items():
    np.testing.assert_allclose(found[3][name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize(
  "sizes",
  [{"data": 4, "context": 2}, {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}, {"context": 8}],
  ids=str,
)
def test_places_divided_over_devices_change_nothing(sizes):
  wanted = gradients({}, SEQUENCES)
  assert_same(gradients(sizes, SEQUENCES), wanted)
  alone = {"pack": False, "share_prefixes": False, "shapes": (packing.Shape(16, 64, 64),)}
  if sizes == {"data": 4, "context": 2}:  # a program more.
    assert_same(gradients(sizes, SEQUENCES, **alone), wanted)


@pytest.mark.long
def test_one_sweep_over_the_head_is_divided_too():
  loss = {"aggregation": "token_mean", "entropy_coef": 0.05}
  sizes = {"data": 1, "fsdp": 2, "context": 4}
  found, wanted = (gradients(each, loss, one_sweep=True) for each in (sizes, {}))
  assert_same(found, wanted, atol=4e-6)  # a mesh of fsdp and tensor differs by as much.


@pytest.mark.long
def test_experts_of_divided_rows_are_replayed():
  loss, data = {"aggregation": "token_mean"}, replay.recorded(0.8)
  settings = {"config": replay.CONFIG, "data": data, "experts": replay.SHAPE}
  wanted = gradients({}, loss, **settings)
  found = gradients({"data": 1, "expert": 2, "context": 2, "tensor": 2}, loss, **settings)
  assert 0.5 < wanted[3]["router/changed_share"] < 0.9
  assert_same(found, wanted, atol=4e-6)  # a mesh without parts differs by as much.
