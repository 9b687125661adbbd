"""Adds gradients in place to those of earlier microbatches. Pure.

Ordinary differentiation gives a stack of scanned layers a gradient in separate arrays, which are
added to the sum afterwards: twice the memory of the weights, and three more passes over it. Here
the sum goes through the backward pass and each layer adds its gradient to its part of the sum, in
place if the sum is donated.

The sum is an argument on which the loss does not depend; its cotangent is the sum with the gradient
added:

    def loss(sums):
      return model(gradient_sums.attach(params, sums), batch)

    sums = jax.grad(loss)(sums)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array

# Name of the stacked layers among the parameters; `run` reads the layers one by one.
LAYERS = "layers"

# Scopes in the names of operations, by which a profile distinguishes the parts of an update: the
# same that flax and `jax.checkpoint` give to `Transformer`.
_MODEL, _RECOMPUTED = "Transformer", "rematted_computation"

# (parameters of a layer, residual stream, input of all layers, input of this layer) →
# residual stream, what the layer returns beside it.
Block = Callable[[Any, Array, Any, Any], tuple[Array, Any]]


@struct.dataclass
class Stack:
  """The parameters of all layers together with the sum of their gradients.

  Attributes:
    weights: Tree of arrays [L ...].
    sums: Tree of the same shapes.
  """

  weights: Any
  sums: Any


def attach(params: dict[str, Any], sums: dict[str, Any]) -> dict[str, Any]:
  """Returns parameters whose gradients are added to `sums`.

  Args:
    params: Parameters of a model. Those named `LAYERS` become a `Stack`.
    sums: Tree of the same shapes: gradients so far.
  """
  return {
    name: Stack(params[name], sums[name]) if name == LAYERS else joined(params[name], sums[name])
    for name in params
  }


@jax.custom_vjp
def joined(params: Any, sums: Any) -> Any:
  """Returns `params`; the cotangent of `sums` is `sums` with the gradient of `params` added."""
  del sums
  return params


def run(block: Block, stack: Stack, x: Array, given: Any, kinds: Any = None) -> tuple[Array, Any]:
  """Applies all layers, and keeps the input of each for the backward pass.

  The backward pass recomputes the rest of a layer, as with `jax.checkpoint`.

  Args:
    block: Function of one layer.
    stack: Parameters of all layers; the cotangent of `stack.sums` is explained above.
    x: Input of the first layer.
    given: Tree of arrays that every layer receives, without gradient.
    kinds: Tree of arrays [L ...], without gradient. Each layer receives its part.

  Returns:
    The output of the last layer; what the layers return beside it, [L ...].
  """
  return _run(block, stack.weights, stack.sums, x, given, kinds)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(
  block: Block, weights: Any, sums: Any, x: Array, given: Any, kinds: Any
) -> tuple[Array, Any]:
  del sums
  output, (_, extras) = _forward(block, weights, x, given, kinds)
  return output, extras


def _forward(block: Block, weights: Any, x: Array, given: Any, kinds: Any) -> tuple[Array, Any]:
  """Returns the output of the last layer, and the inputs and extras of all [L ...]."""

  def step(x: Array, of_layer: Any) -> tuple[Array, Any]:
    params, kind = of_layer
    output, extras = block(params, x, given, kind)
    return output, (x, extras)

  with jax.named_scope(_MODEL):
    return jax.lax.scan(step, x, (weights, kinds))


def _run_fwd(
  block: Block, weights: Any, sums: Any, x: Array, given: Any, kinds: Any
) -> tuple[tuple[Array, Any], Any]:
  output, (inputs, extras) = _forward(block, weights, x, given, kinds)
  return (output, extras), (weights, sums, inputs, given, kinds)


def _run_bwd(block: Block, kept: Any, cotangents: tuple[Array, Any]) -> tuple[Any, ...]:
  weights, sums, inputs, given, kinds = kept
  dx, of_extras = cotangents

  def step(carry: tuple[Array, Any], number: Array) -> tuple[tuple[Array, Any], None]:
    dx, sums = carry
    stacked = (weights, inputs, kinds)
    params, x, kind = jax.tree.map(lambda stacked: _at(stacked, number), stacked)
    dextras = jax.tree.map(lambda g: _cotangent_at(g, number), of_extras)
    with jax.named_scope(_RECOMPUTED):
      _, pull = jax.vjp(lambda params, x: block(params, x, given, kind), params, x)
    more, dx = pull((dx, dextras))
    return (dx, jax.tree.map(lambda total, part: _add_at(total, number, part), sums, more)), None

  numbers = jnp.arange(inputs.shape[0])
  with jax.named_scope(_MODEL):
    (dx, sums), _ = jax.lax.scan(step, (dx, sums), numbers, reverse=True)
  return None, sums, dx, None, None


def _at(stacked: Array, number: Array) -> Array:
  return jax.lax.dynamic_index_in_dim(stacked, number, keepdims=False)


def _cotangent_at(stacked: Any, number: Array) -> Any:
  """Returns a layer's part of a cotangent, which integers have only in form."""
  if stacked.dtype == jax.dtypes.float0:
    return np.zeros(stacked.shape[1:], jax.dtypes.float0)
  return _at(stacked, number)


def _add_at(total: Array, number: Array, part: Array) -> Array:
  return jax.lax.dynamic_update_index_in_dim(total, _at(total, number) + part, number, 0)


def _joined_fwd(params: Any, sums: Any) -> tuple[Any, Any]:
  return params, sums


def _joined_bwd(sums: Any, of_params: Any) -> tuple[None, Any]:
  return None, jax.tree.map(jnp.add, sums, of_params)


joined.defvjp(_joined_fwd, _joined_bwd)
_run.defvjp(_run_fwd, _run_bwd)
