"""The memory of an update besides its arguments, by what its backward pass recomputes. Pure.

What the forward pass keeps for the backward pass is not a formula: the functions of the model are
traced with shapes in place of arrays, which takes a second, and what differentiation keeps is
counted. A new attention or another layer changes the number by itself. The rest is arithmetic, each
term at its largest, so that the sum is above what a compiler needs: 3 to 20 % above in what was
compiled (BUILD_NOTES.md).
"""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from grpo_kernels import row_parts
from grpo_kernels.attention import AUTOMATIC, Attention
from grpo_kernels.attention.xla_blocked import MOST_OF_PART, MOST_TILES, TILE
from grpo_kernels.linear_logprobs import token_local

from grpo_jax.batching.packing import Shape
from grpo_jax.learn.policy import attach, full_weights, trainable_of
from grpo_jax.models import leaves, lora, transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import Products

_FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class UpdateMemory:
  """Bytes of one device that the update of a microbatch takes besides its arguments.

  Attributes:
    kept: Results of all layers that the forward pass keeps for the backward pass.
    gradients: Gradients of the layers, where they are not added to their sum in place.
    layer: The backward pass of one layer: what it recomputes, its cotangents, its weights and
      their gradient.
    scores: Attention of one layer: the scores of a tile, and float32 sums of all queries.
    head: A chunk of logits, with the head's weights and its gradient.
    head_gradient: The part of `head` that stays until the layers are done.
  """

  kept: int
  gradients: int
  layer: int
  scores: int
  head: int
  head_gradient: int

  @property
  def total(self) -> int:
    """Bytes at the worst moment: at the head, or in the backward pass of a layer."""
    of_layers = self.gradients + self.head_gradient + self.layer + self.scores
    return self.kept + max(self.head, of_layers)


@dataclasses.dataclass(frozen=True)
class Replica:
  """The part of an update that one device computes.

  Attributes:
    model: Sizes of the model; heads, feed-forward and vocabulary as the device has them.
    weights: Shapes and dtypes of the policy's weights in these sizes, as the update takes them.
    shape: Rows of a microbatch on the device, or its parts of rows.
    products: Options of matrix products, without a placement.
    attention: Choice of attention.
    platform: Platform of the device: "cpu", "gpu" or "tpu".
    gradients: Bytes of the gradients of what is trained of the layers, as the device has them.
    expert_parts: Number of parts into which the mesh splits experts. The model has all of them, and
      as many for each token as the device computes for one of its own.
    trains_head: Whether the head is trained.
    row_parts: Number of parts of a row; the device has one of them.
  """

  model: ModelConfig
  weights: Any
  shape: Shape
  products: Products
  attention: Attention = AUTOMATIC
  platform: str = "gpu"
  gradients: int = 0
  trains_head: bool = True
  expert_parts: int = 1
  row_parts: int = 1

  def with_shape(self, shape: Shape) -> "Replica":
    """Returns the same part of an update of other microbatches."""
    return self if shape == self.shape else dataclasses.replace(self, shape=shape)

  @functools.cached_property
  def kept_of_layer(self) -> int:
    """Bytes that a layer keeps if nothing is recomputed."""
    return _kept(self, "none") // self.model.num_layers


def of_update(replica: Replica, remat: str) -> UpdateMemory:
  """Returns the memory of an update; nothing is compiled.

  Args:
    replica: Part of the update that a device computes.
    remat: Activations that the backward pass recomputes; see `transformer.Transformer`.
  """
  model, shape, width = replica.model, replica.shape, replica.model.hidden_size
  size = replica.products.compute_dtype.itemsize
  adds_in_place = remat == "full" and trainable_of(replica.weights) is replica.weights
  of_head = model.vocab_size * width
  head_gradient = _FLOAT32 * of_head if replica.trains_head else 0
  loss_places = shape.rows * shape.loss_tokens
  chunk = token_local.chunk_size(loss_places, model.vocab_size, replica.platform)
  logits = 2 * _FLOAT32 * chunk * model.vocab_size
  return UpdateMemory(
    kept=replica.kept_of_layer * model.num_layers if remat == "none" else _kept(replica, remat),
    gradients=0 if adds_in_place else replica.gradients,
    layer=_layer(replica, remat),
    scores=_scores(replica),
    head=head_gradient
    + size * of_head
    + logits
    + (2 * _FLOAT32 + size) * loss_places * width
    + _of_whole_rows(replica, width // _slices(replica, width)),
    head_gradient=head_gradient,
  )


def of_scores(replica: Replica) -> int:
  """Returns the bytes of a program that scores a microbatch, besides its arguments.

  It is at its largest in a layer or at the head; what a layer makes is at most what it would keep
  for a backward pass.

  Args:
    replica: Part of an update that a device computes; its microbatches are scored.
  """
  model, shape, width = replica.model, replica.shape, replica.model.hidden_size
  size = replica.products.compute_dtype.itemsize
  loss_places = shape.rows * shape.loss_tokens
  chunk = token_local.chunk_size(loss_places, model.vocab_size, replica.platform)
  states = 2 * _FLOAT32 * shape.places * width
  weights, experts = _weights_of_layer(replica)
  layer = replica.kept_of_layer + 2 * size * weights + _FLOAT32 * experts + _scores(replica)
  head = size * model.vocab_size * width + _FLOAT32 * chunk * model.vocab_size
  head += (_FLOAT32 + size) * loss_places * width
  return states + max(layer, head + _of_whole_rows(replica, width // _slices(replica, width)))


def _slices(replica: Replica, width: int) -> int:
  """Returns in how many slices the hidden states of whole rows are gathered."""
  return row_parts.slices_of(replica.shape.places * replica.row_parts, width)


def _of_whole_rows(replica: Replica, numbers: int) -> int:
  """Returns the bytes of numbers for each place of whole rows, where a device has parts of them.

  They are gathered in the compute dtype, and their gradients are added up in float32.
  """
  if replica.row_parts == 1:
    return 0
  size = replica.products.compute_dtype.itemsize
  return (size + _FLOAT32) * replica.shape.places * replica.row_parts * numbers


def _layer(replica: Replica, remat: str) -> int:
  """Returns the bytes of the backward pass of one layer, besides what was kept."""
  size, width = replica.products.compute_dtype.itemsize, replica.model.hidden_size
  recomputed = 0 if remat == "none" else replica.kept_of_layer
  cotangents = replica.kept_of_layer // 2 + 2 * _FLOAT32 * replica.shape.places * width
  weights, experts = _weights_of_layer(replica)
  # The weights of this layer and of the next one, and the gradient of this layer's.
  return recomputed + cotangents + (2 * size + _FLOAT32) * weights + _FLOAT32 * experts


def _weights_of_layer(replica: Replica) -> tuple[int, int]:
  """Returns the numbers of the weights of a layer, and of its experts that are merged first."""
  parts = lambda leaf: replica.expert_parts if leaf.kind == "experts" else 1
  of_layer = leaves.layer(replica.model).values()
  weights = sum(math.prod(leaf.shape) // parts(leaf) for leaf in of_layer)
  merged = lora.merged_always(full_weights(replica.weights)["layers"])  # in float32.
  experts = sum(math.prod(x.shape[1:]) // replica.expert_parts for x in merged.values())
  return weights, experts


def _kept(replica: Replica, remat: str) -> int:
  """Returns the bytes that differentiation keeps of the forward pass, the arguments left out."""
  weights, shape = replica.weights, replica.shape
  settings = {"products": replica.products, "remat": remat}
  ids = jax.ShapeDtypeStruct((shape.rows, shape.row_tokens), jnp.int32)

  def differentiated(weights: Any, sums: Any, ids: Any) -> Any:
    def hidden_states(sums: Any) -> Any:
      params = full_weights(attach(weights, sums))
      inputs = replica.model, ids, ids, ids, ids
      return transformer.hidden_states(params, *inputs, attention=replica.attention, **settings)

    return jax.vjp(hidden_states, sums)[1]

  sums = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), trainable_of(weights))
  found = jax.eval_shape(differentiated, weights, sums, ids)
  kinds = lambda tree: collections.Counter((x.shape, x.dtype) for x in jax.tree.leaves(tree))
  made = kinds(found) - kinds((weights, sums))
  return sum(count * math.prod(shape) * dtype.itemsize for (shape, dtype), count in made.items())


def _scores(replica: Replica) -> int:
  """Returns the bytes of a tile's scores, weights and their cotangent, and of two sums of queries.

  This is the attention of `grpo_kernels.attention.xla_blocked`; a kernel takes less. Of parts of
  rows, the keys and values of the whole rows come to it.
  """
  model, shape = replica.model, replica.shape
  most = MOST_TILES if replica.row_parts == 1 else MOST_OF_PART
  tile = max(TILE, -(-shape.row_tokens // most))
  keys = min(tile, shape.row_tokens * replica.row_parts)
  of_tile = 3 * shape.rows * model.num_heads * min(tile, shape.row_tokens) * keys
  own = _FLOAT32 * (of_tile + 2 * shape.places * model.num_heads * model.head_dim)
  return own + _of_whole_rows(replica, 2 * model.num_kv_heads * model.head_dim)
