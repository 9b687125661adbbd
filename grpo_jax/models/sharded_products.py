"""Products with weights that are split over a device mesh: what moves is written out. Pure.

For each use a weight is rounded to the compute dtype and gathered over the mesh axis that splits
the model's width; rows stay where they are. In the backward pass it is gathered again, since what
is kept is this device's part, and the gradient's sum is scattered in float32. Over the axis that
splits heads or feed-forward, weights stay split: a product whose inner axis is split, forward or
backward, ends with a sum of activations over that axis, and over no other.

The custom VJPs stand outside, a `shard_map` for each pass inside: its own transposition would
divide cotangents by the number of devices that hold them alike.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from grpo_kernels import collectives, rounding
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from grpo_jax.models import accumulated
from grpo_jax.models.placement import ROWS, Placement


@dataclasses.dataclass(frozen=True)
class _Weight:
  """How one kernel [i o] lies; hashable.

  Attributes:
    spec: Where it lies.
    gathered: The mesh axis over which it is gathered for a product, and the dimension; or None.
    inner: The mesh axis that stays and splits the summed dimension, or None.
    outer: The one that stays and splits the result's last dimension, or None.
  """

  spec: tuple[str | None, str | None]
  gathered: tuple[str, int] | None
  inner: str | None
  outer: str | None

  def whole(self, part: Array, dtype: Any) -> Array:
    """Returns the weight as a product takes it."""
    axis, dim = self.gathered or (None, 0)
    return collectives.gathered(part, axis, dim=dim, dtype=dtype)

  def own(self, gradient: Array, over: tuple[str, ...]) -> Array:
    """Returns this device's part of a gradient's sum."""
    into, dim = self.gathered or (None, 0)
    return collectives.summed(gradient, over, into=into, dim=dim)


@dataclasses.dataclass(frozen=True)
class _Static:
  """What is static of a product with some weights."""

  placement: Placement
  compute_dtype: Any
  weights: tuple[_Weight, ...]
  rows: tuple[str, ...] | None  # the mesh axes that split the first axis of x.
  out_dtype: Any = jnp.float32

  def of_inputs(self, ndim: int) -> PartitionSpec:
    """Returns where x lies: its last axis as the weights' inner one."""
    return PartitionSpec(self.rows, *[None] * (ndim - 2), self.weights[0].inner)

  def of_results(self, ndim: int) -> tuple[PartitionSpec, ...]:
    """Returns where each product lies."""
    between = [None] * (ndim - 2)
    return tuple(PartitionSpec(self.rows, *between, w.outer) for w in self.weights)

  @property
  def of_weights(self) -> tuple[PartitionSpec, ...]:
    return tuple(PartitionSpec(*w.spec) for w in self.weights)

  def on_devices(self, function: Any, inputs: Any, outputs: Any) -> Any:
    """Returns a function that every device runs on its parts."""
    return jax.shard_map(
      function,
      mesh=self.placement.mesh,
      in_specs=inputs,
      out_specs=outputs,
      check_vma=False,
    )


def dots(
  x: Float[Array, "B ..."],
  weights: Sequence[Array],
  axes: Sequence[tuple[str, str]],
  placement: Placement,
  compute_dtype: Any,
  out_dtype: Any,
) -> tuple[Array, ...]:
  """Returns x @ w over the last axis of x, for each weight; rows split as they can be.

  The gradients of the weights are float32 and lie as the weights do.

  Args:
    x: Rows first.
    weights: Master weights [i o], all with the same first logical axis.
    axes: Their logical axes.
    placement: Where everything lies.
    compute_dtype: Of the factors, here and in the gradient; sums are float32.
    out_dtype: Of the results.
  """
  found = tuple(_weight(placement, w.shape, a) for w, a in zip(weights, axes, strict=True))
  dtypes = jnp.dtype(compute_dtype), jnp.dtype(out_dtype)
  static = _Static(placement, dtypes[0], found, _rows(placement, x), dtypes[1])
  return _dots(static, x, tuple(weights))


def _weight(placement: Placement, shape: Sequence[int], axes: Sequence[str]) -> _Weight:
  """Returns how a kernel lies; what splits activations stays, what splits rows is gathered."""
  spec = placement.weight(axes, shape)
  gathered = next(((axis, dim) for dim, axis in enumerate(spec) if axis in ROWS), None)
  inner, outer = (None if axis in ROWS else axis for axis in spec)
  return _Weight((spec[0], spec[1]), gathered, inner, outer)


def _rows(placement: Placement, x: Array) -> tuple[str, ...] | None:
  """Returns the mesh axes that split the rows of an activation."""
  return placement.split("rows", x.shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dots(static: _Static, x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
  def of_device(x, weights):
    x = x.astype(static.compute_dtype)
    wholes = [
      w.whole(p, static.compute_dtype) for w, p in zip(static.weights, weights, strict=True)
    ]
    return tuple(_product(static, "...i,io->...o", x, w) for w in wholes)

  inputs = static.of_inputs(x.ndim), static.of_weights
  return static.on_devices(of_device, inputs, static.of_results(x.ndim))(x, weights)


def _product(static: _Static, spec: str, x: Array, y: Array) -> Array:
  """Returns a product on one device, summed over the devices that have parts of it."""
  inner = static.weights[0].inner
  if inner is None:
    return accumulated.einsum(spec, x, y, static.out_dtype)
  sums = jax.lax.psum(accumulated.einsum(spec, x, y), inner)
  return rounding.written(sums, static.out_dtype)


def _forward(static: _Static, x: Array, weights: tuple[Array, ...]):
  residuals = x.astype(static.compute_dtype), weights, jnp.zeros(0, x.dtype)
  return _dots(static, x, weights), residuals


def _backward(static: _Static, residuals, cotangents: tuple[Array, ...]):
  x, weights, like_x = residuals
  outer, before = static.weights[0].outer, tuple(range(x.ndim - 1))
  is_alone = len(weights) == 1 and outer is None
  dtype = like_x.dtype if is_alone else jnp.float32  # of a summand: float32 where there are more.

  def of_device(x, weights, cotangents):
    of_x, gradients = [], []
    for how, part, g in zip(static.weights, weights, cotangents, strict=True):
      g = g.astype(static.compute_dtype)
      whole = how.whole(part, static.compute_dtype)
      of_x.append(accumulated.einsum("...o,io->...i", g, whole, dtype))
      gradient = jnp.tensordot(x, g, (before, before), preferred_element_type=jnp.float32)
      gradients.append(how.own(gradient, static.rows or ()))
    dx = functools.reduce(jnp.add, of_x)
    dx = dx if outer is None else jax.lax.psum(dx, outer)
    return rounding.written(dx, like_x.dtype), tuple(gradients)

  inputs = static.of_inputs(x.ndim), static.of_weights, static.of_results(x.ndim)
  outputs = static.of_inputs(x.ndim), static.of_weights
  dx, gradients = static.on_devices(of_device, inputs, outputs)(x, weights, cotangents)
  pairs = zip(gradients, weights, strict=True)
  return dx, tuple(gradient.astype(w.dtype) for gradient, w in pairs)


_dots.defvjp(_forward, _backward)


def transposed_dots(
  x: Float[Array, "B ..."],
  weights: Sequence[Array],
  axes: Sequence[tuple[str, str]],
  placement: Placement,
  compute_dtype: Any,
  out_dtype: Any,
) -> tuple[Array, ...]:
  """Returns (w xᵀ)ᵀ over the last axis of x, for each weight: `dots` of transposed kernels.

  They have no gradient.

  Args:
    x: Rows first.
    weights: Kernels [o i], all with the same inner logical axis.
    axes: Logical axes of the kernels before they were transposed.
    placement: Where everything lies.
    compute_dtype: Of the factors.
    out_dtype: Of the results.
  """
  found = tuple(_weight(placement, w.shape[::-1], a) for w, a in zip(weights, axes, strict=True))
  dtypes = jnp.dtype(compute_dtype), jnp.dtype(out_dtype)
  static = _Static(placement, dtypes[0], found, _rows(placement, x), dtypes[1])

  def of_device(x, weights):
    x, products = x.astype(static.compute_dtype), []
    for how, part in zip(static.weights, weights, strict=True):
      axis, dim = how.gathered or (None, 0)
      whole = collectives.gathered(part, axis, dim=1 - dim, dtype=static.compute_dtype)
      products.append(_product(static, "...i,oi->...o", x, whole))
    return tuple(products)

  of_weights = tuple(PartitionSpec(*how.spec[::-1]) for how in found)
  inputs = static.of_inputs(x.ndim), of_weights
  return static.on_devices(of_device, inputs, static.of_results(x.ndim))(x, tuple(weights))


def look_up(
  table: Float[Array, "V D"],
  tokens: Int[Array, "B T"],
  placement: Placement,
  compute_dtype: Any,
) -> Float[Array, "B T D"]:
  """Returns rows of an embedding table, rounded to the compute dtype, as float32.

  The table is gathered along the model's width; where the vocabulary is split, the devices add
  up what each has. The gradient is float32, summed over tokens before it is scattered.

  Args:
    table: With the logical axes "vocab" and "embed".
    tokens: Ids; of rows that lie split.
    placement: Where everything lies.
    compute_dtype: That the table is rounded to.
  """
  how = _weight(placement, table.shape, ("vocab", "embed"))
  static = _Static(placement, jnp.dtype(compute_dtype), (how,), _rows(placement, tokens))
  return _look_up(static, table, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _look_up(static: _Static, table: Array, tokens: Array) -> Array:
  (how,) = static.weights

  def of_device(table, tokens):
    table = how.whole(table, static.compute_dtype)
    own, is_own = _own_tokens(how, table.shape[0], tokens)
    found = jnp.where(is_own[..., None], table[own], 0).astype(jnp.float32)
    found = rounding.rounded(found, static.compute_dtype)
    return found if how.inner is None else jax.lax.psum(found, how.inner)

  rows = PartitionSpec(static.rows)
  return static.on_devices(of_device, (*static.of_weights, rows), rows)(table, tokens)


def _own_tokens(how: _Weight, size: int, tokens: Array) -> tuple[Array, Array]:
  """Returns the places of tokens in this device's part of the vocabulary, and whether they are."""
  if how.inner is None:
    return tokens, jnp.ones(tokens.shape, bool)
  own = tokens - jax.lax.axis_index(how.inner) * size
  is_own = (own >= 0) & (own < size)
  return jnp.where(is_own, own, 0), is_own


def _look_up_forward(static: _Static, table: Array, tokens: Array):
  return _look_up(static, table, tokens), (tokens, table)


def _look_up_backward(static: _Static, residuals, cotangent: Array):
  tokens, table = residuals
  (how,) = static.weights
  parts = 1 if how.inner is None else static.placement.parts((how.inner,))
  shape = table.shape[0] // parts, table.shape[1]

  def of_device(tokens, g):
    own, is_own = _own_tokens(how, shape[0], tokens)
    gradient = jnp.zeros(shape, jnp.float32).at[own].add(jnp.where(is_own[..., None], g, 0))
    return how.own(gradient, static.rows or ())

  rows = PartitionSpec(static.rows)
  (of_table,) = static.of_weights
  gradient = static.on_devices(of_device, (rows, rows), of_table)(tokens, cotangent)
  return gradient.astype(table.dtype), None


_look_up.defvjp(_look_up_forward, _look_up_backward)
