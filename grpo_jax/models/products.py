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
import numpy as np
from grpo_kernels import rounding, wanted
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from grpo_jax.models import barriers, leaves, mixed_precision, quantized, sharded_products
from grpo_jax.models.placement import MeshPlacement

WEIGHT_PRODUCT = "weight_product"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutputMajor:
  """A kernel that is stored transposed, for products with few rows; see `Products.dot`."""

  array: Any  # array [o i], or its shape and dtype.


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["widths"])
@dataclasses.dataclass(frozen=True)
class FusedKernels:
  """Kernels with the same input, stored transposed as one, for one large product."""

  array: Any  # array [Σ o, i], or its shape and dtype.
  widths: tuple[int, ...]  # o of each kernel.


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["scale"]
)
@dataclasses.dataclass(frozen=True)
class LowRank:
  """A kernel W + s A B of a frozen base and an adapter: x W + s (x A) B.

  Stacked kernels have the layers as a first axis of every part.

  Reference:
    Hu et al. 2021, "LoRA", arXiv:2106.09685, equation 3.
  """

  base: Any  # W: array [i o], or a kernel of `quantized`.
  a: Any  # array [i r].
  b: Any  # array [r o].
  scale: float  # s.

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the kernel."""
    return self.base.shape

  @property
  def sharding(self) -> Any:
    """Sharding of the base."""
    return self.base.sharding


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["a", "b"], meta_fields=["kernels", "scale"]
)
@dataclasses.dataclass(frozen=True)
class Adapters:
  """The adapters of kernels with the same input, beside any form of these kernels.

  Stored transposed, for products with few rows. The A of all of them are one array, for one product
  with the input.
  """

  a: Any  # array [n r, i] of n kernels.
  b: tuple[Any, ...]  # array [o r] of each.
  kernels: tuple[str, ...]  # names of the n kernels.
  scale: float  # s.


def joined_name(names: Sequence[str]) -> str:
  """Returns the name under which a layer holds a `FusedKernels` of these kernels."""
  return "+".join(names)


def adapters_name(names: Sequence[str]) -> str:
  """Returns the name under which a layer holds the `Adapters` of these kernels."""
  return f"adapters of {joined_name(names)}"


@dataclasses.dataclass(frozen=True)
class Products:
  """Options of products; hashable, so that it can be a static argument of a jitted function.

  Products with a factor that is not differentiated keep nothing for its gradient and do not compute
  it: a frozen kernel costs one product in the backward pass, and is kept as it is stored.

  Attributes:
    compute_dtype: Dtype of the factors, here and in the gradient. float32 is an ordinary einsum. In
      bfloat16 both factors are rounded, and so is the cotangent in the backward pass; the sums
      are float32 everywhere, so weight gradients are not rounded.
    out_dtype: Dtype of q, k, v, gate, up and their cotangents: float32 or the compute dtype. None:
      the compute dtype. All other products are float32.
    placement: Placement of weights and activations on a mesh; None: one device, or wherever the
      compiler puts them.
    every_expert: Whether every expert of a mixture computes every token: for few tokens on a mesh.
  """

  compute_dtype: Any = jnp.float32
  out_dtype: Any = None
  placement: MeshPlacement | None = None
  every_expert: bool = False

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
    found: Any = _einsums(spec, self.compute_dtype, jnp.dtype(out_dtype), False, x, (y,))
    return found[0]

  def dots(
    self,
    params: Mapping[str, Any],
    names: Sequence[str],
    x: Float[Array, "..."],
    out_dtype: Any = jnp.float32,
  ) -> tuple[Array, ...]:
    """Returns x @ w over the last axis of x for several kernels of a layer; see `dot`.

    Args:
      params: Parameters of one layer, by the names of `leaves.layer`; kernels may be `LowRank`,
        quantised, `OutputMajor`, and on one device `FusedKernels`; some may have `Adapters`.
      names: Names of the kernels, which have the same input.
      x: Input.
      out_dtype: Dtype of the results, float32 or `self.out_dtype`.
    """
    name = adapters_name(names)
    if name in params:
      bases = {key: kernel for key, kernel in params.items() if key != name}
      return self._adapted(params[name], names, self.dots(bases, names, x), x, out_dtype)
    joined = params.get(joined_name(names)) if len(names) > 1 else None
    if joined is not None:
      ends = [sum(joined.widths[: i + 1]) for i in range(len(names) - 1)]
      product = self.dot(x, OutputMajor(joined.array), out_dtype)
      return tuple(jnp.split(product, ends, axis=-1))
    kernels = [params[name] for name in names]
    if any(isinstance(w, LowRank) for w in kernels):
      return self._low_rank_dots(names, kernels, x, out_dtype)
    found = self._plain_dots(names, kernels, x, out_dtype)
    if isinstance(kernels[0], OutputMajor):
      return found
    return tuple(checkpoint_name(y, WEIGHT_PRODUCT) for y in found)

  def _adapted(
    self,
    adapters: Adapters,
    names: Sequence[str],
    found: Sequence[Array],
    x: Array,
    out_dtype: Any,
  ) -> tuple[Array, ...]:
    """Returns x W + s (x A) B, or x W without an adapter; the sum of float32 is rounded once.

    Args:
      adapters: Adapters of some of the kernels.
      names: Names of the kernels.
      found: Products x W of each kernel, float32.
      x: Input.
      out_dtype: Dtype of the results.
    """
    inner, _ = leaves.AXES[names[0]]
    sums = dict(zip(names, found, strict=True))
    low = self._transposed_dot(adapters.a, (inner, None), x)
    parts = jnp.split(low, len(adapters.kernels), axis=-1)
    for name, b, part in zip(adapters.kernels, adapters.b, parts, strict=True):
      _, outer = leaves.AXES[name]
      sums[name] += adapters.scale * self._transposed_dot(b, (None, outer), part)
    return tuple(rounding.written(sums[name], jnp.dtype(out_dtype)) for name in names)

  def _transposed_dot(self, array: Array, axes: tuple[str | None, str | None], x: Array) -> Array:
    """Returns the float32 product with an array [o i] of these logical axes of [i o]."""
    if self.placement is None:
      return self.dot(x, OutputMajor(array))
    settings = (self.placement, self.compute_dtype, jnp.float32)
    (found,) = sharded_products.transposed_dots(x, [array], [axes], *settings)
    return found

  def _low_rank_dots(
    self, names: Sequence[str], kernels: Sequence[Any], x: Array, out_dtype: Any
  ) -> tuple[Array, ...]:
    """Returns `dots` where some kernels have adapters.

    The summands x W and s (x A) B are float32, and their sum is rounded once. One product gives
    x A of all adapters.
    """
    bases = [w.base if isinstance(w, LowRank) else w for w in kernels]
    sums = list(self._plain_dots(names, bases, x, jnp.float32))
    adapted = [i for i, w in enumerate(kernels) if isinstance(w, LowRank)]
    inner = leaves.AXES[names[0]][0]
    joined = jnp.concatenate([kernels[i].a for i in adapted], axis=-1)
    ends = np.cumsum([kernels[i].a.shape[-1] for i in adapted])[:-1]
    (low,) = self._array_dots([joined], [(inner, None)], x)
    low = checkpoint_name(low, WEIGHT_PRODUCT)
    for i, part in zip(adapted, jnp.split(low, ends, axis=-1), strict=True):
      outer = leaves.AXES[names[i]][1]
      (more,) = self._array_dots([kernels[i].b], [(None, outer)], part)
      sums[i] = sums[i] + kernels[i].scale * more
    written = (rounding.written(y, jnp.dtype(out_dtype)) for y in sums)
    return tuple(checkpoint_name(y, WEIGHT_PRODUCT) for y in written)

  def _plain_dots(
    self, names: Sequence[str], kernels: Sequence[Any], x: Array, out_dtype: Any
  ) -> tuple[Array, ...]:
    """Returns `dots` of kernels without adapters, without checkpoint names."""
    axes: Any = [leaves.AXES[name] for name in names]
    if isinstance(kernels[0], OutputMajor) and self.placement is not None:
      arrays = [w.array for w in kernels]
      settings = (self.placement, self.compute_dtype, out_dtype)
      return sharded_products.transposed_dots(x, arrays, axes, *settings)
    return self._array_dots(kernels, axes, x, out_dtype)

  def _array_dots(
    self, kernels: Sequence[Any], axes: Any, x: Array, out_dtype: Any = jnp.float32
  ) -> tuple[Array, ...]:
    """Returns the products with kernels of these logical axes, without checkpoint names."""
    if self.placement is not None:
      return sharded_products.dots(x, kernels, axes, self.placement, self.compute_dtype, out_dtype)
    if any(isinstance(w, OutputMajor) for w in kernels):
      return tuple(self._dot(x, w, out_dtype) for w in kernels)
    return self._kernel_dots(x, kernels, out_dtype)

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
    w: Float[Array, "i o"] | OutputMajor | quantized.Quantized,
    out_dtype: Any = jnp.float32,
  ) -> Array:
    """Returns x @ w over the last axis of x; see `contract` for the dtypes.

    The result has the checkpoint name `WEIGHT_PRODUCT`, by which a remat policy can keep it. With
    an `OutputMajor` kernel the product is computed as (wᵀ xᵀ)ᵀ: when x has few rows, as in
    decoding, CPUs are up to twice as fast with the larger factor on the left. A quantised kernel is
    dequantised to the compute dtype, in the backward pass again.
    """
    y = self._dot(x, w, out_dtype)
    return y if isinstance(w, OutputMajor) else checkpoint_name(y, WEIGHT_PRODUCT)

  def _dot(self, x: Array, w: Any, out_dtype: Any) -> Array:
    """Returns `dot` without a checkpoint name."""
    if isinstance(w, OutputMajor):
      rest = "abcdefg"[: x.ndim - 1]
      return jnp.moveaxis(self.contract(f"oi,{rest}i->o{rest}", w.array, x, out_dtype), 0, -1)
    (y,) = self._kernel_dots(x, [w], out_dtype)
    return y

  def _kernel_dots(self, x: Array, kernels: Sequence[Any], out_dtype: Any) -> tuple[Array, ...]:
    """Returns the products with kernels [i o], for whose gradients x is kept once."""
    rest = "abcdefg"[: x.ndim - 1]
    spec = f"{rest}i,io->{rest}o"
    return _einsums(spec, self.compute_dtype, jnp.dtype(out_dtype), True, x, tuple(kernels))


FLOAT32 = Products()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _einsums(
  spec: str, dtype: Any, out_dtype: Any, has_kernels: bool, x: Any, ys: tuple[Any, ...]
) -> tuple[Array, ...]:
  """Returns one product of x with each of the second factors."""
  x = x.astype(dtype)
  return tuple(mixed_precision.einsum(spec, x, _read(y, dtype, has_kernels), out_dtype) for y in ys)


def _read(y: Any, dtype: Any, is_kernel: bool) -> Array:
  """Returns the second factor in the compute dtype."""
  return quantized.of_layer(y, dtype) if is_kernel else y.astype(dtype)


def _einsums_forward(
  spec: str, dtype: Any, out_dtype: Any, has_kernels: bool, x: Any, ys: tuple[Any, ...]
):
  """Returns the products, and each factor that the gradient of the other needs.

  Factors are kept in the compute dtype, and x once for all products; but a kernel that is not
  differentiated is kept as it is stored, which a scan over layers need not copy, and read again.
  """
  (needs_dx,), (x,) = wanted.split(x)
  needed, ys = wanted.split(*ys)
  rounded_x, rounded_ys = x.astype(dtype), [_read(y, dtype, has_kernels) for y in ys]
  kept_ys, like_ys = [], []
  for needs_dy, y, rounded_y in zip(needed, ys, rounded_ys, strict=True):
    kept_y = rounded_y if needs_dy or not has_kernels else y
    kept_ys.append(kept_y if needs_dx else None)
    like_ys.append(jnp.zeros(0, y.dtype) if needs_dy else None)
  kept_x = rounded_x if any(needed) else None
  like_x = jnp.zeros(0, x.dtype) if needs_dx else None
  found = tuple(mixed_precision.einsum(spec, rounded_x, y, out_dtype) for y in rounded_ys)
  return found, (kept_x, kept_ys, like_x, like_ys)


def _einsums_backward(
  spec: str, dtype: Any, out_dtype: Any, has_kernels: bool, kept, cotangents: tuple[Any, ...]
):
  """Returns the cotangents of all factors: those of one product read the same settled array."""
  del out_dtype  # each cotangent has this dtype.
  x, ys, like_x, like_ys = kept
  operands, out = spec.split("->")
  left, right = operands.split(",")
  dx, dys = None, []
  # The last product first, as JAX would add up the cotangents of a shared factor.
  for y, like_y, cotangent in reversed(list(zip(ys, like_ys, cotangents, strict=True))):
    dy = None
    if not wanted.is_zero(cotangent):
      g = barriers.materialize(cotangent.astype(dtype))
      if like_x is not None:
        other = _read(y, dtype, has_kernels and like_y is None)
        part = mixed_precision.einsum(f"{out},{right}->{left}", g, other, like_x.dtype)
        dx = part if dx is None else dx + part
      if like_y is not None:
        dy = mixed_precision.einsum(f"{left},{out}->{right}", x, g, like_y.dtype)
    dys.append(dy)
  return dx, tuple(reversed(dys))


_einsums.defvjp(_einsums_forward, _einsums_backward, symbolic_zeros=True)
