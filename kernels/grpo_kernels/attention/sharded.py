"""Attention over a device mesh: rows over some axes, heads over another. Pure.

Each device computes its own rows and heads with any implementation; nothing is exchanged, because
no token attends to another row, and no head to another head. The compiler cannot split a kernel,
and would gather its arguments on every device.

Only where rows are dealt out in parts (`row_parts`) do tokens attend to what other devices have. A
device has the queries of its parts, gathers the keys and values of their rows, and has the tiles of
its own queries; the gradients of keys and values are summed over the devices of a row and
scattered. Keys and values of grouped queries are small, so they are gathered and do not travel in a
ring: each layer has them once, and is done with them.

Heads are split if the axis divides the key/value heads. If these are fewer than the devices of the
axis, each device takes the one key/value head that its query heads use, and the gradients of the
devices that share it are added up.

The custom VJP of `core` is outside, and the `shard_map`s inside it, one for each pass, as in
`linear_logprobs.sharded`, which says why.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from grpo_kernels.attention.core import Settings
from grpo_kernels.attention.visible import Places, Visible
from grpo_kernels.row_parts import RowParts


@dataclasses.dataclass(frozen=True)
class Partition:
  """The split of the operation's arrays over the axes of a mesh; hashable.

  Attributes:
    mesh: Mesh over which the operation runs; devices along other axes do the same work.
    row_axes: Axes that split the rows, if their number of devices divides them.
    head_axis: Axis that splits the heads; None: every device has all heads.
    place_axis: The last of `row_axes`, if it splits the places of rows that are dealt out in parts,
      each of which counts as a row; None: there are no such rows.
  """

  mesh: Mesh
  row_axes: tuple[str, ...] = ()
  head_axis: str | None = None
  place_axis: str | None = None

  @property
  def parts(self) -> RowParts | None:
    """The division of rows in parts; None: there is none."""
    if self.place_axis is None:
      return None
    others = tuple(axis for axis in self.row_axes if axis != self.place_axis)
    return RowParts(self.mesh, others, self.place_axis)

  def rows(self, count: int) -> tuple[str, ...] | None:
    """Returns the axes that split a number of rows."""
    parts = math.prod(self.mesh.shape[axis] for axis in self.row_axes)
    return self.row_axes if parts > 1 and count % parts == 0 else None

  def heads(self, heads: int, kv_heads: int) -> tuple[str | None, str | None]:
    """Returns the axes that split the query heads, and the key/value heads."""
    axis = self.head_axis
    parts = 1 if axis is None else self.mesh.shape[axis]
    if parts == 1 or heads % parts:
      return None, None
    if kv_heads % parts == 0:
      return axis, axis
    return (axis, None) if parts % kv_heads == 0 else (None, None)


@dataclasses.dataclass(frozen=True)
class Sharded:
  """An implementation that lets every device of a mesh run another one on its part.

  Attributes:
    implementation: Implementation that each device runs.
    partition: Split of the arrays over the axes of a mesh.
  """

  implementation: Any
  partition: Partition

  def prepare(self, seen: Visible, width: int) -> Any:
    """Returns the tiles of each device's rows, with one more axis for the devices."""
    seen = seen._replace(tiles=None)
    described, rows = _described(self.partition, seen)

    def of_device(seen):
      tiles = self.implementation.prepare(seen, width)
      return jax.tree.map(lambda x: x[None], tiles)

    return self._mapped(of_device, (described,), rows)(seen)

  def forward(
    self,
    settings: Settings,
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    seen: Visible,
  ) -> tuple[Array, Array]:
    """Returns output and log-sum-exp; see `core.Implementation`."""
    split = _Split.of(self.partition, q, k, seen)

    def of_device(q, k, v, seen):
      k, v = split.own(q, k, v)
      return self.implementation.forward(settings, q, k, v, _of_device(seen))

    arguments = (split.queries, split.keys, split.keys, split.seen)
    return self._mapped(of_device, arguments, (split.queries, split.numbers))(q, k, v, seen)

  def backward(
    self,
    settings: Settings,
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    seen: Visible,
    log_sum: Float[Array, "B H T"],
    delta: Float[Array, "B H T"],
    g: Float[Array, "B T H E"],
  ) -> tuple[Array, Array, Array]:
    """Returns the cotangents of queries, keys and values; see `core.Implementation`."""
    split = _Split.of(self.partition, q, k, seen)

    def of_device(q, k, v, seen, log_sum, delta, g):
      own = split.own(q, k, v)
      found = self.implementation.backward(settings, q, *own, _of_device(seen), log_sum, delta, g)
      return found[0], *split.summed(q, k, *found[1:])

    queries, keys = split.queries, split.keys
    arguments = (queries, keys, keys, split.seen, split.numbers, split.numbers, queries)
    mapped = self._mapped(of_device, arguments, (queries, keys, keys))
    return mapped(q, k, v, seen, log_sum, delta, g)

  def _mapped(self, function, arguments, results):
    # A while loop over the tiles of a device has no rule for what differs between devices.
    return jax.shard_map(
      function,
      mesh=self.partition.mesh,
      in_specs=arguments,
      out_specs=results,
      check_vma=False,
    )


@dataclasses.dataclass(frozen=True)
class _Split:
  """The partition of arrays of certain sizes."""

  seen: Visible  # of the visibility.
  queries: PartitionSpec  # of q, the output, and their cotangents.
  keys: PartitionSpec  # of k and v.
  numbers: PartitionSpec  # of one number for each query.
  shared_axis: str | None  # along which devices have different queries and the same keys.
  parts: RowParts | None  # of rows that are dealt out.

  @classmethod
  def of(cls, partition: Partition, q: Array, k: Array, seen: Visible) -> "_Split":
    described, rows = _described(partition, seen)
    heads, kv_heads = partition.heads(q.shape[2], k.shape[2])
    return cls(
      described,
      PartitionSpec(*rows, None, heads),
      PartitionSpec(*rows, None, kv_heads),
      PartitionSpec(*rows, heads),
      heads if kv_heads is None else None,
      None if seen.places is None else partition.parts,
    )

  def own(self, q: Array, *keys: Array) -> tuple[Array, ...]:
    """Returns the keys or values that a device's queries use: of whole rows, of its heads."""
    if self.shared_axis is not None:
      first = self._first(q, keys[0])
      keys = tuple(jax.lax.dynamic_slice_in_dim(x, first, 1, axis=2) for x in keys)
    return keys if self.parts is None else tuple(map(self.parts.gathered, keys))

  def summed(self, q: Array, k: Array, *found: Array) -> tuple[Array, ...]:
    """Returns the gradients of a device's keys or values from those of what its queries use."""
    if self.parts is not None:
      found = tuple(map(self.parts.summed, found))
    if self.shared_axis is None:
      return found
    first = self._first(q, k)

    def whole(x):
      zeros = jnp.zeros(k.shape, jnp.float32)
      x = jax.lax.dynamic_update_slice_in_dim(zeros, x.astype(jnp.float32), first, axis=2)
      return jax.lax.psum(x, self.shared_axis)

    return tuple(whole(x) for x in found)

  def _first(self, q: Array, k: Array) -> Array:
    """Returns the number of the one key/value head of a device."""
    assert self.shared_axis is not None
    index, parts = jax.lax.axis_index(self.shared_axis), jax.lax.axis_size(self.shared_axis)
    return index * k.shape[2] // parts


def _described(partition: Partition, seen: Visible) -> tuple[Visible, PartitionSpec]:
  """Returns the partition of a visibility, and that of the first axis of the queries."""
  parts = None if seen.places is None else partition.parts
  if parts is None:
    rows = whole = PartitionSpec(partition.rows(seen.until.shape[0]))
    places = None
  else:
    rows, whole = parts.of_parts, parts.of_rows
    places = Places(rows, whole)  # pyright: ignore[reportArgumentType]: in place of the arrays.
  of: Any = lambda x, spec: None if x is None else spec
  described = Visible(
    of(seen.until, whole), of(seen.positions, rows), of(seen.limit, whole), rows, places
  )
  return described, rows


def _of_device(seen: Visible) -> Visible:
  """Returns the visibility with the tiles of one device."""
  return seen._replace(tiles=jax.tree.map(lambda x: x[0], seen.tiles))
