"""What the packer believes an update to cost is what the update's program multiplies."""

import math

import jax
import jax.numpy as jnp
import pytest
from grpo_kernels.attention import xla_blocked
from jax.extend import core

from grpo_jax.batching import packing
from grpo_jax.learn import operations
from grpo_jax.models import transformer
from grpo_jax.models.config import ModelConfig

CONFIG = ModelConfig(
  family="qwen2",
  vocab_size=96,
  hidden_size=32,
  intermediate_size=48,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
)


def multiplied(jaxpr, rounds):
  """Returns the operations of all products in a program, those in loops as often as they run.

  Args:
    jaxpr: The program.
    rounds: How often a loop over the tiles of attention runs.
  """
  total = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      (contracted, _), _ = equation.params["dimension_numbers"]
      shape = equation.invars[0].aval.shape
      summed = math.prod(shape[axis] for axis in contracted)
      total += 2 * math.prod(equation.outvars[0].aval.shape) * summed
    times = {"scan": equation.params.get("length"), "while": rounds}.get(equation.primitive.name, 1)
    inside = core.jaxprs_in_params(equation.params)
    total += times * sum(multiplied(inner, rounds) for inner in inside)
  return total


@pytest.mark.long
@pytest.mark.parametrize(
  ("remat", "length"), [("full", 200), ("full", 5000), ("dots", 600), ("none", 5000)]
)
def test_cost_of_a_row_is_what_the_layers_multiply(remat, length):
  model = transformer.Transformer(CONFIG, remat=remat)
  params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), CONFIG))
  tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)

  def loss(params, tokens):
    return jnp.sum(jnp.asarray(model.apply({"params": params}, tokens, tokens, tokens, tokens)))

  traced = jax.make_jaxpr(jax.grad(loss))(params, tokens)
  cost = operations.update_cost(CONFIG, remat=remat)
  tiles = -(-length // max(xla_blocked.TILE, -(-length // xla_blocked.MOST_TILES)))
  rounds = tiles * (tiles + 1) // 2  # of one causal row.
  pairs = rounds * (length if tiles == 1 else -(-length // (8 * tiles)) * 8) ** 2
  expected = cost.row_cost(length, 0) + cost.pair * pairs
  # Full rematerialisation computes the last layer's output product once less.
  assert multiplied(traced.jaxpr, rounds) == pytest.approx(expected, rel=0.03)


def test_head_and_microbatches_are_counted():
  cost = operations.update_cost(CONFIG)
  # Logits, and the gradients of hidden states and head: 2 · V · D each.
  assert cost.loss_place == 3 * 2 * 96 * 32
  row = cost.row_cost(64, 64)
  shape = packing.Shape(4, 64, 64)
  assert cost.of(shape) == 4 * row + operations.MICROBATCH_PLACES * cost.place
