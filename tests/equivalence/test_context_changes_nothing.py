"""Rows whose places are divided over devices: loss and gradients are those of one device."""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import equivalence_case as case
import jax
import numpy as np
import pytest
import rows_in_float64
from grpo_kernels.attention import Attention

from grpo_jax import batching
from grpo_jax.batching import packing
from grpo_jax.learn import optim, sharding, token_scores, train_step
from grpo_jax.models import transformer
from grpo_jax.models.config import LayerKind
from grpo_jax.models.placement import attention_partition
from grpo_jax.rl import objective_options, objectives

# A layer that sees everything, and one with a window.
CONFIG = dataclasses.replace(case.CONFIG, layer_kinds=(LayerKind(), LayerKind(window=6)))
SEQUENCES = {"loss": "gspo", "entropy_coef": 0.05, "aggregation": "sequence_mean"}
SHAPES = (packing.Shape(4, 64, 64),)


@functools.cache
def update_on(sizes, loss):
  """Returns an update on a mesh, or on one device, and the parameters there."""
  mesh = sharding.make_mesh(**dict(sizes)) if sizes else None
  of_mesh, shardings, params = {}, None, case.params(0, CONFIG)
  if mesh is not None:
    of_mesh = {**case.placed_on(mesh), "attention": Attention(None, attention_partition(mesh))}
    axes = transformer.logical_axes(CONFIG)
    shardings = sharding.param_shardings(axes, mesh, shapes=params)
    params = jax.device_put(params, shardings)
  objective, (tx, _) = objectives.make(**({"kl_coef": 0.0} | dict(loss))), optim.make(10)
  logprobs = token_scores.make_logprobs(CONFIG, **of_mesh)
  options = {"shardings": shardings, "report_entropy": True}
  return mesh, train_step.make_update(logprobs, tx, objective, **options), params


def gradients(sizes, loss, **layout):
  """Returns loss, gradients, logprobs and metrics of a minibatch of one microbatch."""
  mesh, update, params = update_on(tuple(sizes.items()), tuple(loss.items()))
  parts = 1 if mesh is None else sharding.row_parts(mesh)
  groups, advantages = case.ragged_groups()
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


def assert_same(found, wanted):
  """Compares what two ways to compute give, in float32; gradients go up to 0.9."""
  assert abs(found[0] - wanted[0]) < 1e-6
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(found[1]), jax.tree.leaves(wanted[1]), strict=True
  ):
    name = jax.tree_util.keystr(path)
    assert np.abs(b).max() > 1e-4, f"{name} has no gradient: the test is blind"
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6, err_msg=name)
  np.testing.assert_allclose(found[2], wanted[2], rtol=0, atol=5e-6)
  assert found[3].keys() == wanted[3].keys()
  for name, value in wanted[3].items():
    np.testing.assert_allclose(found[3][name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize(
  "sizes",
  [{"data": 4, "context": 2}, {"context": 8}],
  ids=str,
)
def test_places_divided_over_devices_change_nothing(sizes):
  wanted = gradients({}, SEQUENCES)
  assert_same(gradients(sizes, SEQUENCES), wanted)
  alone = {"pack": False, "share_prefixes": False, "shapes": (packing.Shape(16, 64, 64),)}
  if sizes == {"data": 4, "context": 2}:  # a program more.
    assert_same(gradients(sizes, SEQUENCES, **alone), wanted)


@pytest.fixture(scope="module")
def distances():
  """Distances from one device in float64, of every case: see `rows_in_float64`."""
  command = [sys.executable, rows_in_float64.__file__, *rows_in_float64.CASES]
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
  done = subprocess.run(command, capture_output=True, text=True, env=environment)
  assert done.returncode == 0, done.stderr[-4000:]
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("case", rows_in_float64.CASES)
def test_every_loss_and_its_gradients_are_those_of_one_device_in_float64(case, distances):
  """So what differs in float32 is rounding."""
  found = rows_in_float64.Found(**distances[case])
  assert found.blind == []
  assert found.scores < 1e-12
  assert max(found.losses.values()) < 1e-12, found.losses
  assert max(found.gradients.values()) < 1e-12, found.gradients


def test_no_loss_is_left_out():
  names = {options.get("loss", "clipped") for options in rows_in_float64.LOSSES.values()}
  assert names == {*objective_options.LOSSES}
