"""Products with weights that are split over a device mesh, with explicit collectives. Pure.

For each use a weight is rounded to the compute dtype and gathered over the mesh axis that splits
the model's width; rows stay where they are. The backward pass keeps only this device's part, so it
gathers the weight again, and scatters the gradient's sum in float32. Over the axis that splits
heads or feed-forward, weights stay split: a product whose inner axis is split, forward or backward,
ends with a sum of activations over that axis only.

Custom VJPs enclose one `shard_map` for each pass, because transposing a `shard_map` would
divide cotangents by the number of devices with equal copies.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from grpo_kernels import collectives, rounding, wanted
from grpo_kernels.collectives import Axes
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from grpo_jax.models import mixed_precision, quantized
from grpo_jax.models.placement import ROWS, MeshPlacement


@dataclasses.dataclass(frozen=True)
class _Weight:
  """The partition of one kernel [i o]; hashable.

  Attributes:
    spec: Mesh axes that split its dimensions.
    gathered: Mesh axes over which it is gathered for a product, and the dimension; or None.
    inner: Mesh axis that splits the summed dimension, also in a product; or None.
    outer: Mesh axis that splits the result's last dimension, also in a product; or None.
  """

  spec: tuple[Axes | None, Axes | None]
  gathered: tuple[Axes, int] | None
  inner: str | None
  outer: str | None

  def whole(self, part: Any, dtype: Any) -> Array:
    """Returns the weight as products need it, gathered and rounded.

    A weight that is stored in fewer bits is gathered as it is stored.
    """
    axis, dim = self.gathered or (None, 0)
    if not isinstance(part, quantized.Quantized) and part.dtype in (jnp.float32, dtype):
      return collectives.gathered(part, axis, dim=dim, dtype=dtype)

    def gathered(field: Array, spec: PartitionSpec) -> Array:
      over = axis if spec[dim] == axis else None
      return collectives.gathered(field, over, dim=dim, dtype=field.dtype)

    return quantized.of_layer(jax.tree.map(gathered, part, self.of_stored(part)), dtype)

  def of_stored(self, weight: Any) -> Any:
    """Returns the partition of a stored weight, or of each field of a quantised one."""
    return quantized.partition(weight, PartitionSpec(*self.spec))

  def own(self, gradient: Array, over: tuple[str, ...]) -> Array:
    """Returns this device's part of a gradient's sum."""
    into, dim = self.gathered or (None, 0)
    return collectives.summed(gradient, over, into=into, dim=dim)


@dataclasses.dataclass(frozen=True)
class _Static:
  """The static arguments of a product with some weights."""

  placement: MeshPlacement
  compute_dtype: Any
  weights: tuple[_Weight, ...]
  rows: tuple[str, ...] | None  # mesh axes that split the first axis of x.
  out_dtype: Any = jnp.float32

  def of_inputs(self, ndim: int) -> PartitionSpec:
    """Returns the partition of x, whose last axis is split as the weights' inner axis."""
    return PartitionSpec(self.rows, *[None] * (ndim - 2), self.weights[0].inner)

  def of_results(self, ndim: int) -> tuple[PartitionSpec, ...]:
    """Returns the partition of each product."""
    between = [None] * (ndim - 2)
    return tuple(PartitionSpec(self.rows, *between, w.outer) for w in self.weights)

  def of_weights(self, weights: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the partition of each weight as it is stored."""
    return tuple(how.of_stored(w) for how, w in zip(self.weights, weights, strict=True))

  def on_devices(self, function: Any, inputs: Any, outputs: Any) -> Any:
    """Returns `function` as every device runs it on its parts."""
    return jax.shard_map(
      function,
      mesh=self.placement.mesh,
      in_specs=inputs,
      out_specs=outputs,
      check_vma=False,
    )


def dots(
  x: Float[Array, "B ..."],
  weights: Sequence[Any],
  axes: Sequence[tuple[str | None, str | None]],
  placement: MeshPlacement,
  compute_dtype: Any,
  out_dtype: Any,
) -> tuple[Array, ...]:
  """Returns x @ w over the last axis of x for each weight.

  The gradients of the weights are float32 and have the weights' partition. Those of weights that
  are not differentiated are not computed.

  Args:
    x: Activations, whose first axis is rows.
    weights: Master weights [i o], or quantised, all with the same first logical axis.
    axes: Logical axes of each weight.
    placement: Placement on the mesh.
    compute_dtype: Dtype of the factors, here and in the gradient; sums are float32.
    out_dtype: Dtype of the results.
  """
  shapes = [w.shape for w in weights]
  static = _static(x, shapes, axes, placement, compute_dtype, out_dtype)
  return _dots(static, x, tuple(weights))


def _static(
  x: Array,
  shapes: Sequence[tuple[int, ...]],
  axes: Sequence[tuple[str | None, str | None]],
  placement: MeshPlacement,
  compute_dtype: Any,
  out_dtype: Any,
) -> _Static:
  """Returns the static arguments of products with kernels of these shapes [i o]."""
  found = tuple(_weight(placement, shape, a) for shape, a in zip(shapes, axes, strict=True))
  rows = _rows(placement, x)
  return _Static(placement, jnp.dtype(compute_dtype), found, rows, jnp.dtype(out_dtype))


def _weight(placement: MeshPlacement, shape: Sequence[int], axes: Sequence[str | None]) -> _Weight:
  """Returns a kernel's partition: gathers over mesh axes that split rows, not over other axes."""
  spec = placement.weight(axes, shape)
  splits_rows = lambda axes: not isinstance(axes, str) or axes in ROWS
  of_rows = [(axes, dim) for dim, axes in enumerate(spec) if axes and splits_rows(axes)]
  gathered = of_rows[0] if of_rows else None
  inner, outer = (None if axes is None or splits_rows(axes) else axes for axes in spec)
  return _Weight((spec[0], spec[1]), gathered, inner, outer)


def _rows(placement: MeshPlacement, x: Array) -> tuple[str, ...] | None:
  """Returns the mesh axes that split the rows of an activation."""
  return placement.split("rows", x.shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dots(static: _Static, x: Array, weights: tuple[Any, ...]) -> tuple[Array, ...]:
  def of_device(x, weights):
    x = x.astype(static.compute_dtype)
    wholes = [
      w.whole(p, static.compute_dtype) for w, p in zip(static.weights, weights, strict=True)
    ]
    return tuple(_product(static, "...i,io->...o", x, w) for w in wholes)

  inputs = static.of_inputs(x.ndim), static.of_weights(weights)
  return static.on_devices(of_device, inputs, static.of_results(x.ndim))(x, weights)


def _product(static: _Static, spec: str, x: Array, y: Array) -> Array:
  """Returns a product of one device, summed over the devices if its inner axis is split."""
  inner = static.weights[0].inner
  if inner is None:
    return mixed_precision.einsum(spec, x, y, static.out_dtype)
  sums = jax.lax.psum(mixed_precision.einsum(spec, x, y), inner)
  return rounding.written(sums, static.out_dtype)


def _forward(static: _Static, x: Any, weights: tuple[Any, ...]):
  """Returns the products, and what their gradients need: x only if that of a weight is wanted."""
  (needs_dx,), (x,) = wanted.split(x)
  needed, weights = wanted.split(*weights)
  kept = x.astype(static.compute_dtype) if any(needed) else None
  like_x = jnp.zeros(0, x.dtype) if needs_dx else None
  return _dots(static, x, weights), (kept, weights, like_x, needed)


def _backward(static: _Static, residuals, cotangents: tuple[Any, ...]):
  x, weights, like_x, needed = residuals
  results = tuple(wanted.dense(g) for g in cotangents)
  outer, before = static.weights[0].outer, tuple(range(results[0].ndim - 1))
  is_alone = len(weights) == 1 and outer is None

  def of_device(x, weights, cotangents):
    of_x, gradients = [], []
    for how, part, g, is_needed in zip(static.weights, weights, cotangents, needed, strict=True):
      g = g.astype(static.compute_dtype)
      if like_x is not None:
        # Summands of a longer sum are float32.
        dtype = like_x.dtype if is_alone else jnp.float32
        whole = how.whole(part, static.compute_dtype)
        of_x.append(mixed_precision.einsum("...o,io->...i", g, whole, dtype))
      if is_needed:
        gradient = jnp.tensordot(x, g, (before, before), preferred_element_type=jnp.float32)
        gradients.append(how.own(gradient, static.rows or ()))
    if like_x is None:
      return None, tuple(gradients)
    dx = functools.reduce(jnp.add, of_x)
    dx = dx if outer is None else jax.lax.psum(dx, outer)
    return rounding.written(dx, like_x.dtype), tuple(gradients)

  ndim = results[0].ndim
  of_inputs = static.of_inputs(ndim)
  of_weights = static.of_weights(weights)
  of_needed = tuple(spec for spec, is_needed in zip(of_weights, needed, strict=True) if is_needed)
  inputs = None if x is None else of_inputs, of_weights, static.of_results(ndim)
  outputs = None if like_x is None else of_inputs, of_needed
  dx, gradients = static.on_devices(of_device, inputs, outputs)(x, weights, results)
  left = iter(gradients)
  pairs = zip(weights, needed, strict=True)
  return dx, tuple(next(left).astype(w.dtype) if is_needed else None for w, is_needed in pairs)


_dots.defvjp(_forward, _backward, symbolic_zeros=True)


def transposed_dots(
  x: Float[Array, "B ..."],
  weights: Sequence[Array],
  axes: Sequence[tuple[str | None, str | None]],
  placement: MeshPlacement,
  compute_dtype: Any,
  out_dtype: Any,
) -> tuple[Array, ...]:
  """Returns (w xᵀ)ᵀ over the last axis of x for each weight: `dots` with transposed kernels.

  The products have no gradient.

  Args:
    x: Activations, whose first axis is rows.
    weights: Kernels [o i], all with the same inner logical axis.
    axes: Logical axes of the kernels before they were transposed.
    placement: Placement on the mesh.
    compute_dtype: Dtype of the factors.
    out_dtype: Dtype of the results.
  """
  shapes = [w.shape[::-1] for w in weights]
  static = _static(x, shapes, axes, placement, compute_dtype, out_dtype)

  def of_device(x, weights):
    x, products = x.astype(static.compute_dtype), []
    for how, part in zip(static.weights, weights, strict=True):
      axis, dim = how.gathered or (None, 0)
      whole = collectives.gathered(part, axis, dim=1 - dim, dtype=static.compute_dtype)
      products.append(_product(static, "...i,oi->...o", x, whole))
    return tuple(products)

  of_weights = tuple(PartitionSpec(*how.spec[::-1]) for how in static.weights)
  inputs = static.of_inputs(x.ndim), of_weights
  return static.on_devices(of_device, inputs, static.of_results(x.ndim))(x, tuple(weights))


def look_up(
  table: Float[Array, "V D"],
  tokens: Int[Array, "B T"],
  placement: MeshPlacement,
  compute_dtype: Any,
) -> Float[Array, "B T D"]:
  """Returns rows of an embedding table, rounded to the compute dtype, as float32.

  The table is gathered along the model's width. If the vocabulary is split, the rows of the table
  are summed over the devices. The gradient is float32, summed over tokens before it is scattered.

  Args:
    table: Embedding with the logical axes "vocab" and "embed".
    tokens: Token ids.
    placement: Placement on the mesh.
    compute_dtype: Dtype to which the table is rounded.
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
  return static.on_devices(of_device, (*static.of_weights([table]), rows), rows)(table, tokens)


def _own_tokens(how: _Weight, size: int, tokens: Array) -> tuple[Array, Array]:
  """Returns the tokens' indices in this device's part of the vocabulary, and which are in it."""
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
  (of_table,) = static.of_weights([table])
  gradient = static.on_devices(of_device, (rows, rows), of_table)(tokens, cotangent)
  return gradient.astype(table.dtype), None


_look_up.defvjp(_look_up_forward, _look_up_backward)
