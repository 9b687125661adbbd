"""Experts that are divided over eight devices compute, and learn, what those of one device do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.learn import sharding
from grpo_jax.models import gradient_sums, transformer
from grpo_jax.models.mixture import Mixture
from grpo_jax.models.products import Products
from tests.models import tiny

CONFIG = tiny.config(
  family="qwen2_moe",
  num_heads=4,
  num_layers=2,
  qkv_bias=True,
  mixture=Mixture(8, 3, 6, normalised=True, shared_width=8),
)
# Sizes of data, fsdp, tensor, expert; rows.
MESHES = {
  "expert": ({"data": 1, "fsdp": 1, "tensor": 1, "expert": 8}, 8),
  "data-and-fsdp": ({"data": 2, "fsdp": 2, "tensor": 1, "expert": 2}, 8),
  "rows-that-are-whole": ({"data": 1, "fsdp": 2, "tensor": 2, "expert": 2}, 3),
}


def inputs(rows):
  """Returns packed rows with shared prefixes: prompts with two completions each, and padding."""
  tokens = tiny.tokens((rows, 9), seed=rows)
  positions = np.tile([0, 1, 2, 3, 4, 3, 4, 5, 0], (rows, 1))
  segments, branches = (
    np.tile([1] * 8 + [0], (rows, 1)),
    np.tile([0] * 3 + [1] * 2 + [2] * 4, (rows, 1)),
  )
  return tuple(jnp.asarray(x) for x in (tokens, positions, segments, branches))


def compute(given, mesh, remat="full"):
  """Returns the hidden states of tokens, and gradients of all weights that are added to ones."""
  params = tiny.random_params(CONFIG)
  products = Products(placement=None if mesh is None else sharding.placement(mesh))
  lies = None
  if mesh is not None:
    lies = sharding.param_shardings(transformer.logical_axes(CONFIG), mesh, shapes=params)
    params = jax.device_put(params, lies)
  is_token = (given[2] > 0)[..., None]

  def loss(sums):
    attached = gradient_sums.attach(params, sums)
    found = transformer.outputs(attached, CONFIG, *given, products=products, remat=remat)
    hidden = jnp.where(is_token, found.hidden, 0)
    return jnp.sum(jnp.sin(hidden)), (hidden, found.extras["experts"])

  zeros = jax.tree.map(jnp.ones_like, params)
  of = (lies, None) if lies is not None else None
  graded = jax.jit(jax.grad(loss, has_aux=True), out_shardings=of)
  return graded(zeros)


@functools.cache
def on_one_device(rows):
  return jax.device_get(compute(inputs(rows), None))


@pytest.mark.long
@pytest.mark.parametrize("case", MESHES)
def test_a_mesh_changes_neither_results_nor_gradients(case):
  sizes, rows = MESHES[case]
  wanted, (hidden, experts) = on_one_device(rows)
  mesh = sharding.make_mesh(**sizes)
  gradients, (found, chosen) = compute(inputs(rows), mesh)
  np.testing.assert_array_equal(chosen, experts)
  np.testing.assert_allclose(found, hidden, atol=2e-5)
  for got, of in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(got, of, atol=2e-5 * np.abs(of).max())
  parts = sizes.get("expert", 1) * sizes["fsdp"] * sizes["tensor"]
  gate = gradients["layers"]["expert_gate"]
  assert gate.addressable_shards[0].data.size == gate.size // parts
