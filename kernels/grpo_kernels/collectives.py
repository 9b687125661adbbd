"""Collectives for weights split over devices: gather for use, sum gradients into parts. Pure.

For use inside a `shard_map`. The collectives of ZeRO-3 are explicit here instead of left to a
partitioner, which might move activations instead.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

Axes = str | tuple[str, ...]  # one mesh axis, or several that split a dimension together.


def gathered(part: Array, axis: Axes | None, *, dim: int, dtype: Any) -> Array:
  """Returns the whole of an array that is distributed over devices, rounded before it moves.

  Args:
    part: This device's part.
    axis: Mesh axis, or axes, over which the array is split; None: it is not split.
    dim: Dimension that is split.
    dtype: Dtype of the result.
  """
  part = part.astype(dtype)
  if axis is None:
    return part
  if part.dtype != jnp.bfloat16:
    return jax.lax.all_gather(part, axis, axis=dim, tiled=True)
  # As bits: the CPU's compiler would widen a bfloat16 collective to float32.
  bits = jax.lax.bitcast_convert_type(part, jnp.uint16)
  bits = jax.lax.all_gather(bits, axis, axis=dim, tiled=True)
  return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def summed(whole: Array, over: Sequence[str], *, into: Axes | None, dim: int) -> Array:
  """Returns this device's part of a sum over devices, in float32.

  Args:
    whole: This device's summand.
    over: Mesh axes to sum over.
    into: Mesh axis, or axes, over which the sum is split: of `over`, or axes whose devices all have
      the same summand. None: every device gets the whole sum.
    dim: Dimension that is split.

  Raises:
    ValueError: Some axes of `into` are summed over, and others are not.
  """
  whole = whole.astype(jnp.float32)
  parts = (into,) if isinstance(into, str) else into or ()
  others = tuple(axis for axis in over if axis not in parts)
  if len({axis in over for axis in parts}) > 1:
    raise ValueError(f"a sum over {tuple(over)} cannot be split over {parts}")
  if into is not None and any(axis in over for axis in parts):
    whole = jax.lax.psum_scatter(whole, into, scatter_dimension=dim, tiled=True)
  elif into is not None:
    size = whole.shape[dim] // jax.lax.axis_size(into)
    first = jax.lax.axis_index(into) * size
    whole = jax.lax.dynamic_slice_in_dim(whole, first, size, dim)
  return jax.lax.psum(whole, others) if others else whole
