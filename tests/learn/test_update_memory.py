"""The memory of an update by arithmetic: closed forms, and never below what a compiler counts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from grpo_kernels.attention import Attention
from grpo_kernels.linear_logprobs import token_local

from grpo_jax.batching.packing import Shape
from grpo_jax.learn import sharding, update_memory
from grpo_jax.learn.update_memory import Replica
from grpo_jax.models import leaves, transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.options import REMATS
from grpo_jax.models.placement import attention_partition
from grpo_jax.models.products import Products

MODEL = ModelConfig("llama", 64, 32, 96, 3, 4, 2, 8)
ROWS, TOKENS = 2, 48
PLACES = ROWS * TOKENS


def weights_of(model):
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), leaves.tree(model)
  )


def replica(dtype="float32", model=MODEL, **options):
  shape = Shape(ROWS, TOKENS, TOKENS)
  attention = Attention("reference")
  return Replica(model, weights_of(model), shape, Products(dtype), attention, **options)


def by_layer(remat, dtype):
  """Returns the bytes that one more layer keeps."""
  more = ModelConfig("llama", 64, 32, 96, 4, 4, 2, 8)
  kept = lambda model: update_memory.of_update(replica(dtype, model), remat).kept
  return kept(more) - kept(MODEL)


def test_a_layer_that_is_recomputed_keeps_its_input_in_float32():
  for dtype in ("float32", "bfloat16"):
    assert by_layer("full", dtype) == 4 * PLACES * 32


def test_a_layer_that_keeps_its_products_keeps_them_as_they_are_written():
  # Its input; q, k, v, gate, up; what it attends to, and the log-sum-exp of four heads; o.
  own = lambda size: PLACES * (4 * 32 + size * (32 + 2 * 16 + 2 * 96) + size * 32 + 4 * 4 + 4 * 32)
  assert by_layer("dots", "float32") == own(4)
  assert by_layer("dots", "bfloat16") == own(2)


def test_what_is_recomputed_is_not_kept_and_more_tokens_take_more():
  memory = {remat: update_memory.of_update(replica("bfloat16"), remat) for remat in REMATS}
  assert memory["full"].kept < memory["dots"].kept < memory["none"].kept
  twice = replica("bfloat16").with_shape(Shape(2 * ROWS, TOKENS, TOKENS))
  for remat in REMATS:
    assert update_memory.of_update(twice, remat).kept > 1.6 * memory[remat].kept
    assert update_memory.of_update(twice, remat).scores == 2 * memory[remat].scores


def test_gradients_of_layers_are_arrays_of_their_own_unless_everything_is_recomputed():
  found = {r: update_memory.of_update(replica(gradients=1000), r).gradients for r in REMATS}
  assert found == {"full": 0, "dots": 1000, "none": 1000}
  frozen = update_memory.of_update(replica(trains_head=False), "full")
  assert frozen.head_gradient == 0 < update_memory.of_update(replica(), "full").head_gradient


@pytest.mark.long
@pytest.mark.parametrize("remat", REMATS)
def test_it_is_not_below_what_a_compiler_counts_for_the_layers(remat):
  """Without a head, whose chunks are measured for the devices that they are made for."""
  made = replica()
  ids = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)

  def loss(params, ids):
    settings = {"products": made.products, "remat": remat, "attention": made.attention}
    return jnp.sum(transformer.hidden_states(params, MODEL, ids, ids, ids, ids, **settings) ** 2)

  gradient: Any = jax.jit(jax.grad(loss)).lower(made.weights, ids).compile().memory_analysis()
  found = update_memory.of_update(made, remat)
  assert gradient.temp_size_in_bytes < found.kept + found.layer + found.scores


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scoring_takes_a_layer_or_a_chunk_of_logits_and_not_what_an_update_keeps(dtype):
  wide = dataclasses.replace(MODEL, vocab_size=4096)
  deep = dataclasses.replace(MODEL, num_layers=24)
  scores = lambda model: update_memory.of_scores(replica(dtype, model))
  least = lambda model: update_memory.of_update(replica(dtype, model), "full").total
  assert scores(deep) == pytest.approx(scores(MODEL), rel=0.02)
  assert scores(MODEL) < least(MODEL) < least(deep)
  size, states = jnp.dtype(dtype).itemsize, 2 * 4 * PLACES * 32
  chunk = token_local.chunk_size(PLACES, 4096, "gpu")
  head = size * 4096 * 32 + 4 * chunk * 4096 + (4 + size) * PLACES * 32
  assert scores(wide) == states + head > scores(MODEL)


@pytest.mark.long
def test_scoring_is_not_below_what_a_compiler_counts_for_the_layers():
  made = replica()
  ids = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)

  def summed(params, ids):
    settings = {"products": made.products, "remat": "none", "attention": made.attention}
    return jnp.sum(transformer.hidden_states(params, MODEL, ids, ids, ids, ids, **settings) ** 2)

  compiled: Any = jax.jit(summed).lower(made.weights, ids).compile().memory_analysis()
  print(compiled.temp_size_in_bytes, update_memory.of_scores(made))
  assert 0 < compiled.temp_size_in_bytes < update_memory.of_scores(made)


@pytest.mark.long
def test_parts_of_rows_take_what_is_gathered_of_whole_rows():
  mesh = sharding.make_mesh(data=1, context=8)
  attention = Attention("xla_blocked", attention_partition(mesh))
  products = Products("bfloat16", placement=sharding.placement(mesh))
  ids = jax.ShapeDtypeStruct((ROWS, 8 * TOKENS), jnp.int32, sharding=sharding.of_rows(mesh))
  lies = sharding.param_shardings(transformer.logical_axes(MODEL), mesh, shapes=leaves.tree(MODEL))
  placed = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=at)
  weights = jax.tree.map(placed, leaves.tree(MODEL), lies)

  def loss(params, ids, order):
    settings = {"products": products, "remat": "full", "attention": attention, "order": order}
    hidden = transformer.outputs(params, MODEL, ids, ids, ids, ids, **settings).hidden
    parts = attention.parts
    return jnp.sum(parts.taken(hidden.astype(jnp.bfloat16), parts.dealt(order, order)) ** 2)

  compiled: Any = jax.jit(jax.grad(loss)).lower(weights, ids, ids).compile().memory_analysis()
  divided = update_memory.of_update(replica("bfloat16", row_parts=8), "full")
  alone = update_memory.of_update(replica("bfloat16"), "full")
  of_row = 8 * PLACES * (2 + 4)  # rounded, and a gradient in float32.
  assert divided.head - alone.head == of_row * 32
  assert divided.kept == alone.kept and divided.layer == alone.layer
  assert divided.scores - alone.scores >= of_row * 2 * 2 * 8
  states = of_row * 32
  most = divided.kept + max(divided.layer + divided.scores, states)
  assert compiled.temp_size_in_bytes < most
