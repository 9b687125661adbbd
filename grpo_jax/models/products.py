"""Options of a model's matrix products: the dtypes of factors and results. Pure.

All functions of a layer take the same `Products`, so the trainer, the scorer and the sampler differ
only in this argument.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from grpo_kernels import rounding
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from grpo_jax.models import accumulated, leaves, settled, sharded_products
from grpo_jax.models.placement import Placement

WEIGHT_PRODUCT = "weight_product"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutputMajor:
  """A kernel that is stored transposed, for products with few rows; see `Products.dot`."""

  array: Any  # array [o i], or its shape and dtype.


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["widths"])
@dataclasses.dataclass(frozen=True)
class Joined:
  """Kernels with the same input, stored transposed as one, for one large product."""

  array: Any  # array [Σ o, i], or its shape and dtype.
  widths: tuple[int, ...]  # o of each kernel.


def joined_name(names: Sequence[str]) -> str:
  """Returns the name under which a layer holds a `Joined` of these kernels."""
  return "+".join(names)


@dataclasses.dataclass(frozen=True)
class Products:
  """Options of products; hashable, so that it can be a static argument of a jitted function.

  Attributes:
    compute_dtype: Dtype of the factors, here and in the gradient. float32 is an ordinary einsum. In
      bfloat16 both factors are rounded, and so is the cotangent in the backward pass; the sums
      are float32 everywhere, so weight gradients are not rounded.
    out_dtype: Dtype of q, k, v, gate, up and their cotangents: float32 or the compute dtype. None:
      the compute dtype. All other products are float32.
    placement: Placement of weights and activations on a mesh; None: one device, or wherever the
      compiler puts them.
  """

  compute_dtype: Any = jnp.float32
  out_dtype: Any = None
  placement: Placement | None = None

  def __post_init__(self):
    """Converts both dtypes to `jnp.dtype`, so that equal options compare equal.

    Raises:
      ValueError: `out_dtype` is neither float32 nor the compute dtype.
    """
    compute_dtype = jnp.dtype(self.compute_dtype)
    out_dtype = compute_dtype if self.out_dtype is None else jnp.dtype(self.out_dtype)
    if out_dtype not in (compute_dtype, jnp.dtype(jnp.float32)):
      raise ValueError(
        f"model.product_dtype={out_dtype.name!r} needs model.compute_dtype={out_dtype.name!r}, not"
        f" {compute_dtype.name!r}: leave it None, or set both"
      )
    object.__setattr__(self, "compute_dtype", compute_dtype)
    object.__setattr__(self, "out_dtype", out_dtype)

  def contract(self, spec: str, x: Array, y: Array, out_dtype: Any = jnp.float32) -> Array:
    """Sums products of two arrays as `einsum` does, in the compute dtype, accumulated in float32.

    Args:
      spec: An einsum of two operands in which every index appears in at least two of the three
        terms.
      x: First operand.
      y: Second operand.
      out_dtype: Dtype of the result, float32 or `self.out_dtype`.

    Returns:
      The sums, rounded once if `out_dtype` is not float32. The cotangent of an operand has the
      operand's own dtype, and is rounded once to it.
    """
    return _einsum(spec, self.compute_dtype, jnp.dtype(out_dtype), x, y)

  def dots(
    self,
    params: Mapping[str, Any],
    names: Sequence[str],
    x: Float[Array, "..."],
    out_dtype: Any = jnp.float32,
  ) -> tuple[Array, ...]:
    """Returns x @ w over the last axis of x for several kernels of a layer; see `dot`.

    Args:
      params: Parameters of one layer, by the names of `leaves.layer`; kernels may be `OutputMajor`,
        and on one device `Joined`.
      names: Names of the kernels, which have the same input.
      x: Input.
      out_dtype: Dtype of the results, float32 or `self.out_dtype`.
    """
    joined = params.get(joined_name(names)) if len(names) > 1 else None
    if joined is not None:
      ends = [sum(joined.widths[: i + 1]) for i in range(len(names) - 1)]
      product = self.dot(x, OutputMajor(joined.array), out_dtype)
      return tuple(jnp.split(product, ends, axis=-1))
    kernels = [params[name] for name in names]
    if self.placement is None:
      return tuple(self.dot(x, w, out_dtype) for w in kernels)
    axes: Any = [leaves.AXES[name] for name in names]
    settings = (self.placement, self.compute_dtype, out_dtype)
    if isinstance(kernels[0], OutputMajor):
      arrays = [w.array for w in kernels]
      return sharded_products.transposed_dots(x, arrays, axes, *settings)
    found = sharded_products.dots(x, kernels, axes, *settings)
    return tuple(checkpoint_name(y, WEIGHT_PRODUCT) for y in found)

  def look_up(self, table: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns embeddings as float32, rounded to the compute dtype as all weights are.

    The gradient is not rounded.
    """
    if self.placement is not None:
      return sharded_products.look_up(table, tokens, self.placement, self.compute_dtype)
    found = table[tokens].astype(jnp.float32)
    if self.compute_dtype == jnp.float32:
      return found
    rounded = rounding.rounded(found, self.compute_dtype)
    return found + jax.lax.stop_gradient(rounded - found)  # exact: the two are close.

  def place(self, x: Array, axes: Sequence[Any]) -> Array:
    """Constrains an activation's sharding; see `placement.ACTIVATIONS` for the logical axes."""
    return x if self.placement is None else self.placement.place(x, axes)

  def dot(
    self,
    x: Float[Array, "..."],
    w: Float[Array, "i o"] | OutputMajor,
    out_dtype: Any = jnp.float32,
  ) -> Array:
    """Returns x @ w over the last axis of x; see `contract` for the dtypes.

    The result has the checkpoint name `WEIGHT_PRODUCT`, by which a remat policy can keep it. With
    an `OutputMajor` kernel the product is computed as (wᵀ xᵀ)ᵀ: when x has few rows, as in
    decoding, CPUs are up to twice as fast with the larger factor on the left.
    """
    rest = "abcdefg"[: x.ndim - 1]
    if isinstance(w, OutputMajor):
      return jnp.moveaxis(self.contract(f"oi,{rest}i->o{rest}", w.array, x, out_dtype), 0, -1)
    return checkpoint_name(self.contract(f"{rest}i,io->{rest}o", x, w, out_dtype), WEIGHT_PRODUCT)


FLOAT32 = Products()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _einsum(spec: str, dtype: Any, out_dtype: Any, x: Array, y: Array) -> Array:
  return accumulated.einsum(spec, x.astype(dtype), y.astype(dtype), out_dtype)


def _einsum_forward(spec: str, dtype: Any, out_dtype: Any, x: Array, y: Array):
  dtypes = jnp.zeros(0, x.dtype), jnp.zeros(0, y.dtype)
  x, y = x.astype(dtype), y.astype(dtype)
  return accumulated.einsum(spec, x, y, out_dtype), (x, y, dtypes)


def _einsum_backward(spec: str, dtype: Any, out_dtype: Any, residuals, cotangent: Array):
  """Returns the cotangents of both factors: two products that read the same settled array."""
  del out_dtype  # the cotangent has this dtype.
  x, y, (like_x, like_y) = residuals
  operands, out = spec.split("->")
  left, right = operands.split(",")
  g = settled.settle(cotangent.astype(dtype))
  dx = accumulated.einsum(f"{out},{right}->{left}", g, y, like_x.dtype)
  dy = accumulated.einsum(f"{left},{out}->{right}", x, g, like_y.dtype)
  return dx, dy


_einsum.defvjp(_einsum_forward, _einsum_backward)
