"""The roundings that the sampler and the trainer share are not left to the compiler."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels import rounding

from grpo_jax.engines import decoding, sampler_sizes
from grpo_jax.learn import sharding, token_scores
from grpo_jax.models import transformer
from grpo_jax.models.products import Products
from grpo_jax.rl import objectives
from grpo_jax.types import Batch, Denominators
from tests.engines import described
from tests.engines import tiny as of_engines
from tests.learn import test_placement as placed
from tests.models import roundings

IDS = ["one device", "mesh"]


def random(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_numbers_are_rounded_where_two_conversions_would_cancel():
  x = random(1000)
  wanted = np.asarray(x, jnp.bfloat16).astype(np.float32)
  for again in (
    lambda x: rounding.rounded(x, jnp.bfloat16),
    lambda x: rounding.written(x, jnp.bfloat16).astype(jnp.float32),
  ):
    np.testing.assert_array_equal(jax.jit(again)(x), wanted)
    assert roundings.lost(again, x) == []
  assert rounding.rounded(x, jnp.float32) is x
  assert rounding.rounded(x.astype(jnp.bfloat16), jnp.bfloat16).dtype == jnp.bfloat16


def test_roundings_that_may_be_left_out_are_found_everywhere():
  there_and_back = lambda x: x.astype(jnp.bfloat16).reshape(6).T.astype(jnp.float32) * 2
  assert roundings.lost(there_and_back, random(2, 3)) == ["mul of float32[6]"]
  assert roundings.lost(jax.jit(there_and_back), random(2, 3))
  assert roundings.lost(jax.checkpoint(there_and_back), random(2, 3))
  in_loop = lambda x: jax.lax.fori_loop(0, 3, lambda _, x: there_and_back(x), x)
  assert roundings.lost(in_loop, random(6))
  across = lambda x: jax.jit(lambda y: y.astype(jnp.float32) + 1)(x.astype(jnp.bfloat16))
  assert roundings.lost(across, random(6))
  assert roundings.lost(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), random(6))
  assert roundings.lost(lambda x: x.astype(jnp.bfloat16) * 2, random(6)) == []


@pytest.mark.parametrize("on_mesh", [False, True], ids=IDS)
def test_embeddings_are_rounded_and_their_gradients_are_not(on_mesh):
  table, tokens, cotangent = random(16, 8), jnp.arange(12).reshape(4, 3), random(4, 3, 8, seed=1)
  mesh = sharding.make_mesh(data=1, fsdp=4, tensor=2)
  products = Products("bfloat16", placement=sharding.placement(mesh) if on_mesh else None)
  found, pull = jax.vjp(jax.jit(lambda table: products.look_up(table, tokens)), table)
  np.testing.assert_array_equal(found, np.asarray(table[tokens], jnp.bfloat16).astype(np.float32))
  np.testing.assert_array_equal(pull(cotangent)[0][:12], cotangent.reshape(12, 8))
  lowered = jax.jit(lambda table: products.look_up(table, tokens)).lower(table)
  assert "reduce_precision" in lowered.as_text()


def programs(sizes):
  """Yields the name of each program of a bfloat16 run, the function and what it takes."""
  config = dataclasses.replace(placed.CONFIG, num_layers=1)
  mesh = sharding.make_mesh(**dict(zip(sharding.AXES, sizes, strict=True)))
  placement = sharding.placement(mesh) if mesh.size > 1 else None
  policy = {"products": Products("bfloat16", placement=placement), "remat": "full"}
  policy["partition"] = sharding.head_partition(mesh) if mesh.size > 1 else None
  params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
  fields = placed.batch(2 * sharding.replicas(mesh))
  batch = Batch(**jax.tree.map(jnp.asarray, fields))
  logprobs = token_scores.make_logprobs(config, **policy)
  loss = token_scores.make_token_loss(config, objectives.make(kl_coef=0.1), **policy)
  of = Denominators(jnp.float32(9.0), jnp.float32(9.0))
  yield "scorer", lambda p: logprobs(p, batch, True), params
  yield "update", jax.grad(lambda p: loss(p, batch, of, True)[0]), params
  yield "two passes", jax.grad(lambda p: logprobs(p, batch, False)[0].sum()), params


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)], ids=IDS)
def test_no_rounding_of_a_training_program_can_be_left_out(sizes, monkeypatch):
  if sizes == (1, 1, 1):
    monkeypatch.setattr(jax, "devices", lambda *_: jax.local_devices()[:1])
  for name, function, params in programs(sizes):
    assert roundings.lost(function, params) == [], name


@pytest.mark.long
@pytest.mark.parametrize("shape", [None, {"data": 2, "fsdp": 2, "tensor": 2}], ids=IDS)
def test_no_rounding_of_a_sampling_program_can_be_left_out(shape):
  config = of_engines.config(num_layers=1)
  mesh = sharding.make_mesh(**(shape or {"devices": jax.devices()[:1]}))
  params = transformer.init(jax.random.key(0), config)
  axes = transformer.logical_axes(config)
  params = jax.device_put(params, sharding.param_shardings(axes, mesh, shapes=params))
  sizes = sampler_sizes.SamplerSizes(8, prefill=16, page=8, columns=8, blocks=2, table=2, pages=4)
  given = described.described(config, params, rows=8, sizes=sizes, dtype="bfloat16")
  for program in ("prefill", "decode"):
    function = functools.partial(getattr(decoding, program), options=given.options)
    assert roundings.lost(function, *getattr(given, program)) == [], program


# What may read or write bfloat16: products, what makes their factors, and what moves numbers.
IN_BFLOAT16 = {
  *("select_n", "dynamic_slice"),
  *("dot_general", "rounded_einsum", "materialize", "convert_element_type", "name", "reshape"),
  *(
    "transpose",
    "broadcast_in_dim",
    "squeeze",
    "slice",
    "concatenate",
    "pad",
    "gather",
    "select_n",
  ),
}


def dtypes_of(eqn):
  """Returns the dtypes of the arrays that an equation takes and gives."""
  every = (x.aval for x in (*eqn.invars, *eqn.outvars))
  return {aval.dtype for aval in every if getattr(aval, "ndim", 0)}


@pytest.mark.long
def test_residual_stream_norms_softmax_and_logits_stay_float32(monkeypatch):
  monkeypatch.setattr(jax, "devices", lambda *_: jax.local_devices()[:1])
  for name, function, params in programs((1, 1, 1)):
    eqns = list(roundings.equations(jax.make_jaxpr(function)(params).jaxpr))
    names = {str(eqn.primitive) for eqn in eqns if np.dtype("bfloat16") in dtypes_of(eqn)}
    assert {"exp", "rsqrt", "reduce_sum", "reduce_max"} <= {str(eqn.primitive) for eqn in eqns}
    assert names <= IN_BFLOAT16, name
    # Embeddings once, the gradients of the last hidden states, and what heads attend to with its
    # cotangent, of which a float32 sum is made: no other float32 is rounded.
    rounded = [e.outvars[0].aval.shape for e in eqns if str(e.primitive) == "reduce_precision"]
    rows, places = placed.ROWS, placed.LOSS_PLACES
    assert rounded.count((rows, placed.PLACES, 160)) == 1
    heads = (rows, placed.PLACES, placed.CONFIG.num_heads, placed.CONFIG.head_dim)
    assert set(rounded[1:]) <= {(rows * places, 160), heads}, name
