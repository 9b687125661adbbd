"""Rows whose places are divided over the devices of a mesh axis: context parallelism. Pure.

A row of T places is dealt out in n parts of T / n places, in an order that is part of the data. The
slots of a row are the places of its parts behind each other, part 0 first. An array [B T ...]
becomes [B n, T / n ...], as if there were n times as many rows: whatever treats tokens alone
computes its parts without knowing of them. Part p of a row is on device p of the axis. First come
the parts 0 of the rows that a group of devices has, then their parts 1, and so on, so that the mesh
axes of the rows and then this one split the first axis.

Functions of what is not differentiated are plain; those that are have both passes written as
`shard_map`s, as in `collectives`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from grpo_kernels import collectives

# Bytes of the float32 vectors of whole rows that are in memory at once, as far as widths allow.
MOST_BYTES = 1 << 28


def slices_of(places: int, width: int) -> int:
  """Returns in how many slices of their width vectors of whole rows are gathered.

  Args:
    places: Number of places of a device's whole rows.
    width: Width of a vector.
  """
  wanted = -(-4 * places * width // MOST_BYTES)
  return next(count for count in range(min(wanted, width), width + 1) if width % count == 0)


@dataclasses.dataclass(frozen=True)
class RowParts:
  """The division of rows over a mesh; hashable.

  Attributes:
    mesh: Mesh over which rows are divided.
    row_axes: Axes that split the rows.
    axis: Axis that splits the places of a row.
  """

  mesh: Mesh
  row_axes: tuple[str, ...]
  axis: str

  @property
  def count(self) -> int:
    """Number n of parts of a row."""
    return self.mesh.shape[self.axis]

  @property
  def groups(self) -> int:
    """Number of groups of devices, each of which has rows of its own."""
    return math.prod(self.mesh.shape[axis] for axis in self.row_axes)

  @property
  def of_rows(self) -> PartitionSpec:
    """Partition of arrays [B ...] of whole rows."""
    return PartitionSpec(self.row_axes or None)

  @property
  def of_parts(self) -> PartitionSpec:
    """Partition of arrays [B n ...] of parts."""
    return PartitionSpec((*self.row_axes, self.axis))

  def dealt(
    self, x: Shaped[Array, "B T ..."], order: Int[Array, "B T"]
  ) -> Shaped[Array, "Bn t ..."]:
    """Returns what belongs to the places of each part; without a gradient.

    Args:
      x: Values at the places of rows.
      order: Place of each slot.

    Raises:
      ValueError: T is not a multiple of the number of parts.
    """
    if order.shape[1] % self.count:
      raise ValueError(
        f"rows of {order.shape[1]} places cannot be divided over {self.count} devices"
      )

    def of_device(x: Array, order: Array) -> Array:
      size = order.shape[1] // self.count
      first = jax.lax.axis_index(self.axis) * size
      own = jax.lax.dynamic_slice_in_dim(order, first, size, axis=1)
      return jnp.take_along_axis(x, _broad(own, x.ndim), axis=1)

    inputs = self.of_rows, self.of_rows
    return self.on_devices(of_device, inputs, self.of_parts)(jax.lax.stop_gradient(x), order)

  def slots(self, order: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the slot of each place: the inverse of an order."""
    numbers = jnp.broadcast_to(jnp.arange(order.shape[1], dtype=order.dtype), order.shape)
    return jnp.put_along_axis(jnp.zeros_like(order), order, numbers, axis=1, inplace=False)

  def collected(self, x: Float[Array, "Bn t"], slots: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns the values of parts at the places of rows; differentiable.

    Args:
      x: Values at the slots of each part; others than floating-point numbers have no gradient.
      slots: Slot of each place.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return jnp.asarray(_collected(self, x.astype(jnp.float32), slots)).astype(x.dtype)
    return _collected(self, x, slots)

  def taken(self, x: Float[Array, "Bn t D"], slots: Int[Array, "Bn u"]) -> Float[Array, "Bn u D"]:
    """Returns the vectors of some slots of the same row, of any of its parts; differentiable.

    Args:
      x: Vectors at the slots of each part.
      slots: Slots in the whole row, for each part.
    """
    return _taken(self, x, slots)

  def on_devices(self, function: Callable[..., Any], inputs: Any, outputs: Any) -> Any:
    """Returns `function` as every device runs it on its rows or parts."""
    return jax.shard_map(
      function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False
    )

  def gathered(self, part: Array) -> Array:
    """Returns [b T ...] of this device's [b t ...], in the order of the slots; in a `shard_map`."""
    return collectives.gathered(part, self.axis, dim=1, dtype=part.dtype)

  def summed(self, whole: Array) -> Array:
    """Returns this device's [b t ...] of the sum of all devices' [b T ...], in float32."""
    return collectives.summed(whole, (self.axis,), into=self.axis, dim=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _collected(parts: RowParts, x: Array, slots: Array) -> Array:
  def of_device(x: Array, slots: Array) -> Array:
    return jnp.take_along_axis(parts.gathered(x), slots, axis=1)

  inputs = parts.of_parts, parts.of_rows
  return parts.on_devices(of_device, inputs, parts.of_rows)(x, slots)


def _collected_forward(parts: RowParts, x: Array, slots: Array):
  return _collected(parts, x, slots), slots


def _collected_backward(parts: RowParts, slots: Array, g: Array):
  # A place has one slot, so the inverse of `slots` is the order.
  return parts.dealt(g, parts.slots(slots)), None


_collected.defvjp(_collected_forward, _collected_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _taken(parts: RowParts, x: Array, slots: Array) -> Array:
  def of_device(x: Array, slots: Array) -> Array:
    take = lambda x: jnp.take_along_axis(parts.gathered(x), slots[..., None], axis=1)
    return _by_slices(take, x, parts.count)

  return parts.on_devices(of_device, (parts.of_parts, parts.of_parts), parts.of_parts)(x, slots)


def _taken_forward(parts: RowParts, x: Array, slots: Array):
  return _taken(parts, x, slots), (slots, jnp.zeros((*x.shape[:2], 0), x.dtype))


def _taken_backward(parts: RowParts, kept: tuple[Array, Array], g: Array):
  slots, like = kept

  def of_device(slots: Array, like: Array, g: Array) -> Array:
    rows, size = like.shape[:2]

    def sums(g: Array) -> Array:
      zeros = jnp.zeros((rows, size * parts.count, g.shape[-1]), jnp.float32)
      whole = zeros.at[jnp.arange(rows)[:, None], slots].add(g.astype(jnp.float32))
      return parts.summed(whole).astype(like.dtype)

    return _by_slices(sums, g, parts.count)

  every = parts.of_parts
  return parts.on_devices(of_device, (every, every, every), every)(slots, like, g), None


_taken.defvjp(_taken_forward, _taken_backward)


def _by_slices(function: Callable[[Array], Array], x: Array, parts: int) -> Array:
  """Returns a function of vectors [b t D], computed for slices of D one after another."""
  rows, size, width = x.shape
  count = slices_of(rows * size * parts, width)
  if count == 1:
    return function(x)
  found = jax.lax.map(function, jnp.moveaxis(x.reshape(rows, size, count, -1), 2, 0))
  return jnp.moveaxis(found, 0, 2).reshape(rows, -1, width)


def _broad(indices: Array, ndim: int) -> Array:
  """Returns indices [b t] with further axes of length 1."""
  return indices.reshape(*indices.shape, *[1] * (ndim - 2))
