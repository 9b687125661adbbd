"""Keys and values as the sampler's cache stores them, in the dtype of `engine.cache_dtype`. Pure.

In a float dtype they are plain arrays. In int8 they are `Int8`: codes, and one scale for each token
and key/value head, so that a token is written without reading another one. Both are trees of arrays
that have the same axes, and what writes, moves or takes tokens maps over the tree.

The scale of a key is a factor of its scores, and that of a value a factor of its weight,

    q · (s c) = s (q · c)        Σ w (s c) = Σ (w s) c

so products read the codes, and no dequantised copy of a cache is needed. Scales are float32: 4
bytes for the 64 or 128 of a head's codes. In bfloat16 a scale would be wrong by up to 1/512, and a
code is wrong by at most half a step, 1/254 of the largest number.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from grpo_kernels import rounding
from jaxtyping import Array, Float, Int

from grpo_jax.engines.sampler_inputs import ProgramOptions, as_tree

_HIGHEST = 127  # codes are symmetric: -128 is not used.


@as_tree
@dataclasses.dataclass(frozen=True)
class Int8:
  """Vectors x ≈ scale · code of width E, on any axis of the arrays."""

  codes: Int[Array, "..."]  # int8.
  scales: Float[Array, "..."]  # float32; the axis of the width has the size 1.

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the codes."""
    return self.codes.shape


# An array, or the two of `Int8`.
Stored = Array | Int8


def dtype_of(options: ProgramOptions) -> Any:
  """Returns the dtype of keys and values, or of their codes."""
  return jnp.dtype(options.cache_dtype or options.products.compute_dtype)


def head_bytes(options: ProgramOptions) -> int:
  """Returns the bytes of one key or one value of a head."""
  scale = 4 if dtype_of(options) == jnp.int8 else 0
  return options.config.head_dim * dtype_of(options).itemsize + scale


def empty(shape: tuple[int, ...], options: ProgramOptions, *, axis: int = -1) -> Stored:
  """Returns zeros.

  Args:
    shape: Shape of the keys or the values.
    options: Options of the programs.
    axis: Axis of the width of a head.
  """
  zeros = jnp.zeros(shape, dtype_of(options))
  if dtype_of(options) != jnp.int8:
    return zeros
  scales = list(shape)
  scales[axis] = 1
  return Int8(zeros, jnp.zeros(scales, jnp.float32))


def stored(x: Float[Array, "... E"], options: ProgramOptions) -> Stored:
  """Returns keys or values as the cache stores them.

  In int8 the scale is max |x| / 127, and codes are x / scale, rounded to the nearest, half to even.
  A vector that is not finite has a scale that is not.
  """
  if options.cache_dtype is None:
    return x.astype(options.products.compute_dtype)
  if dtype_of(options) != jnp.int8:
    return rounding.written(x, dtype_of(options))
  x = x.astype(jnp.float32)
  scales = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / _HIGHEST
  codes = jnp.round(x / jnp.where(scales == 0, 1.0, scales))
  return Int8(codes.astype(jnp.int8), scales)


def read(stored: Stored, options: ProgramOptions) -> Float[Array, "... E"]:
  """Returns what `stored` stands for, in the compute dtype."""
  if isinstance(stored, Int8):
    stored = stored.codes.astype(jnp.float32) * stored.scales
  return stored.astype(options.products.compute_dtype)


Product = Callable[[str, Array, Array], Array]


def scores(product: Product, spec: str, asked: Array, keys: Stored) -> Array:
  """Returns the products of queries with keys.

  Args:
    product: Function (spec, queries, keys or codes) → products.
    spec: An einsum of both, in which "e" is the width of a head.
    asked: Queries.
    keys: Keys.
  """
  if not isinstance(keys, Int8):
    return product(spec, asked, keys)
  _, of_keys, of_scores = _terms(spec)
  return product(spec, asked, keys.codes) * _along(keys.scales, of_keys, of_scores)


def mixed(product: Product, spec: str, weights: Array, values: Stored) -> Array:
  """Returns the sums of values by weights; arguments as those of `scores`."""
  if not isinstance(values, Int8):
    return product(spec, weights, values)
  of_weights, of_values, _ = _terms(spec)
  return product(spec, weights * _along(values.scales, of_values, of_weights), values.codes)


def _terms(spec: str) -> list[str]:
  """Returns the indices of both operands and of the result of an einsum."""
  return spec.replace("->", ",").split(",")


def _along(scales: Array, axes: str, wanted: str) -> Array:
  """Returns scales with the axes of another array, of size 1 where they have none."""
  kept = [axis for axis in wanted if axis in axes]
  left = axes.replace("e", "")
  found = scales.squeeze(axes.index("e")).transpose([left.index(axis) for axis in kept])
  return jnp.expand_dims(found, [i for i, axis in enumerate(wanted) if axis not in axes])
