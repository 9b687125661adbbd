"""Rows to experts and back, and the products between, on one device or a mesh. Pure.

A layer's tokens are sorted by the expert that was chosen, k rows for each token; the experts'
products are `grouped_products`; their results are weighted and added up for each token. Nothing is
dropped, whatever the balance.

On a mesh, axis "expert" splits rows and experts. Each device gathers the tokens of all devices
along this axis, computes the rows of its own experts, and the sums of results are scattered back.
"fsdp" splits the width of the model: weights are gathered over it for each use, as in
`sharded_products`. "tensor" splits the width of the experts. What is between the steps (`Routed`,
rows) is of one device each: it has all mesh axes on its first axis, so that nothing is moved.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from grpo_kernels import collectives, rounding, wanted
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from grpo_jax.models import grouped_products, leaves
from grpo_jax.models.placement import EXPERT, MeshPlacement


class Routed(NamedTuple):
  """The rows of the experts: one for each choice of each token, sorted by expert.

  Attributes:
    order: Choice n k + j (token n, its j-th expert) of each row [M]. On a mesh, the tokens are
      those of a group of devices, and choices of other devices' experts come last.
    places: Row of each choice [M]; the inverse of `order`.
    sizes: Number of rows of each expert [X], or of each of a device's own.
  """

  order: Int[Array, " M"]
  places: Int[Array, " M"]
  sizes: Int[Array, " X"]


@dataclasses.dataclass(frozen=True)
class Dispatch:
  """How one layer's experts compute; hashable, static in programs.

  Attributes:
    num_experts: Number X of experts.
    k: Number of experts of a token.
    compute_dtype: Dtype of the factors.
    placement: Placement on a mesh; None: one device.
    rows: Mesh axes that split the first axis of the tokens; (): none does.
    is_split: Whether the mesh splits the experts.
    width_axis: Mesh axis that splits the width of experts; None: none does.
  """

  num_experts: int
  k: int
  compute_dtype: Any
  placement: MeshPlacement | None = None
  rows: tuple[str, ...] = ()
  is_split: bool = False
  width_axis: str | None = None

  @property
  def is_gathered(self) -> bool:
    """Whether a device computes tokens of others."""
    return self.is_split and EXPERT in self.rows

  def partition(self, what: str) -> PartitionSpec:
    """Returns the partition of "tokens" [B ...], or of what each device has for itself."""
    assert self.placement is not None
    if what == "tokens":
      return PartitionSpec(self.rows or None)
    return PartitionSpec(self.placement.mesh.axis_names)

  def on_devices(self, function: Callable[..., Any], inputs: Any, outputs: Any) -> Any:
    """Returns `function` as every device runs it; partitions are names for `partition`."""
    if self.placement is None:
      return function
    is_name = lambda x: isinstance(x, str)
    of = lambda tree: jax.tree.map(
      lambda x: self.partition(x) if is_name(x) else x, tree, is_leaf=is_name
    )
    mesh = self.placement.mesh
    return jax.shard_map(
      function, mesh=mesh, in_specs=of(inputs), out_specs=of(outputs), check_vma=False
    )

  def gathered(self, tokens: Array) -> Array:
    """Returns [n ...] of the tokens of all devices whose experts this device computes."""
    if not self.is_gathered:
      return tokens
    return collectives.gathered(tokens, EXPERT, dim=0, dtype=tokens.dtype)

  def summed(self, sums: Array) -> Array:
    """Returns this device's tokens of the sums over all experts and all of their width."""
    if self.width_axis is not None:
      sums = jax.lax.psum(sums, self.width_axis)
    if self.is_gathered:
      return jax.lax.psum_scatter(sums, EXPERT, scatter_dimension=0, tiled=True)
    return jax.lax.psum(sums, EXPERT) if self.is_split else sums


def make(
  mixture: Any, placement: MeshPlacement | None, compute_dtype: Any, *, width: int, batch: int
) -> Dispatch:
  """Returns how the experts of a layer compute.

  Args:
    mixture: Sizes of the experts, a `mixture.Mixture`.
    placement: Placement on a mesh; None: one device.
    compute_dtype: Dtype of the factors.
    width: Width D of the model.
    batch: Length B of the first axis of the tokens.
  """
  sizes = {"num_experts": mixture.num_experts, "k": mixture.experts_per_token}
  if placement is None:
    return Dispatch(**sizes, compute_dtype=jnp.dtype(compute_dtype))
  shape = mixture.num_experts, width, mixture.width
  split, _, inner = placement.weight(leaves.AXES[leaves.EXPERTS[0]], shape)
  return Dispatch(
    **sizes,
    compute_dtype=jnp.dtype(compute_dtype),
    placement=placement,
    rows=placement.split("rows", batch) or (),
    is_split=split is not None,
    width_axis=inner,
  )


def routed(dispatch: Dispatch, experts: Int[Array, "B T k"]) -> Routed:
  """Returns the rows for the experts of each token."""

  def of_device(experts: Array) -> Routed:
    chosen = dispatch.gathered(experts.reshape(-1, dispatch.k)).reshape(-1)
    count = dispatch.num_experts
    if dispatch.is_split:
      count //= jax.lax.axis_size(EXPERT)
      own = chosen - jax.lax.axis_index(EXPERT) * count
      chosen = jnp.where((own >= 0) & (own < count), own, count)
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
    numbers = jnp.arange(order.shape[0], dtype=jnp.int32)
    places = jnp.zeros_like(order).at[order].set(numbers, unique_indices=True)
    begins = jnp.searchsorted(chosen[order], jnp.arange(count + 1)).astype(jnp.int32)
    return Routed(order, places, jnp.diff(begins))

  return dispatch.on_devices(of_device, ("tokens",), "own")(experts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def to_experts(dispatch: Dispatch, x: Float[Array, "B T D"], routed: Routed) -> Float[Array, "M D"]:
  """Returns the rows of the experts, in the compute dtype; their cotangents have it, too."""

  def of_device(x: Array, routed: Routed) -> Array:
    x = rounding.written(x.reshape(-1, x.shape[-1]), dispatch.compute_dtype)
    return dispatch.gathered(x)[routed.order // dispatch.k]

  return dispatch.on_devices(of_device, ("tokens", "own"), "own")(x, routed)


def _to_experts_forward(dispatch: Dispatch, x: Array, routed: Routed):
  return to_experts(dispatch, x, routed), (routed, jnp.zeros((*x.shape[:2], 0), x.dtype))


def _to_experts_backward(dispatch: Dispatch, kept: Any, g: Array):
  routed, like = kept

  def of_device(g: Array, routed: Routed, like: Array) -> Array:
    found = jnp.sum(_by_token(dispatch, g, routed).astype(jnp.float32), axis=1)
    found = dispatch.summed(found).reshape(*like.shape[:2], -1)
    return rounding.written(found, like.dtype)

  found = dispatch.on_devices(of_device, ("own", "own", "tokens"), "tokens")(g, routed, like)
  return found, None


def _by_token(dispatch: Dispatch, rows: Array, routed: Routed) -> Array:
  """Returns [n k D] of rows [M D]: those of each token; 0 if another device computes them."""
  found = rows[routed.places]
  if dispatch.is_split:
    found = jnp.where((routed.places < jnp.sum(routed.sizes))[:, None], found, 0)
  return found.reshape(-1, dispatch.k, rows.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def from_experts(
  dispatch: Dispatch, y: Float[Array, "M D"], weights: Float[Array, "B T k"], routed: Routed
) -> Float[Array, "B T D"]:
  """Returns the weighted sums of each token's rows, float32."""

  def of_device(y: Array, weights: Array, routed: Routed) -> Array:
    of_token = dispatch.gathered(weights.reshape(-1, dispatch.k))
    sums = _weighted(of_token, _by_token(dispatch, y, routed))
    return dispatch.summed(sums).reshape(*weights.shape[:2], -1)

  return dispatch.on_devices(of_device, ("own", "tokens", "own"), "tokens")(y, weights, routed)


def _weighted(weights: Array, rows: Array) -> Array:
  """Returns Σ_j weights[n, j] rows[n, j] as a sum of vectors, exact in float32."""
  return jnp.sum(weights[..., None] * rows.astype(jnp.float32), axis=1)


def _from_experts_forward(dispatch: Dispatch, y: Array, weights: Array, routed: Routed):
  return from_experts(dispatch, y, weights, routed), (y, weights, routed)


def _from_experts_backward(dispatch: Dispatch, kept: Any, g: Array):
  def of_device(y: Array, weights: Array, routed: Routed, g: Array) -> tuple[Array, Array]:
    of_token = dispatch.gathered(weights.reshape(-1, dispatch.k))
    g = dispatch.gathered(rounding.written(g.reshape(-1, g.shape[-1]), dispatch.compute_dtype))
    dy = g[routed.order // dispatch.k].astype(jnp.float32)
    dy = dy * of_token.reshape(-1)[routed.order][:, None]
    products = g[:, None].astype(jnp.float32) * _by_token(dispatch, y, routed).astype(jnp.float32)
    of_weights = dispatch.summed(jnp.sum(products, axis=-1))
    return rounding.written(dy, y.dtype), of_weights.reshape(weights.shape)

  inputs = ("own", "tokens", "own", "tokens")
  of_y, of_weights = dispatch.on_devices(of_device, inputs, ("own", "tokens"))(*kept, g)
  return of_y, of_weights, None


to_experts.defvjp(_to_experts_forward, _to_experts_backward)
from_experts.defvjp(_from_experts_forward, _from_experts_backward)


@dataclasses.dataclass(frozen=True)
class _Kernel:
  """The partition of one kernel [X i o]; hashable.

  Attributes:
    spec: Mesh axes that split its dimensions.
    dim: Dimension of the model's width.
  """

  spec: PartitionSpec
  dim: int

  def whole(self, part: Array, dtype: Any) -> Array:
    """Returns the kernel of a device's own experts, gathered and rounded."""
    return collectives.gathered(part, self.spec[self.dim], dim=self.dim, dtype=dtype)

  def own(self, gradient: Array, over: tuple[str, ...]) -> Array:
    """Returns this device's part of a gradient's sum."""
    return collectives.summed(gradient, over, into=self.spec[self.dim], dim=self.dim)


def _kernel(dispatch: Dispatch, name: str, shape: Sequence[int]) -> _Kernel:
  axes = leaves.AXES[name]
  place = dispatch.placement
  spec = PartitionSpec(None, None, None) if place is None else place.weight(axes, shape)
  return _Kernel(spec, axes.index("embed"))


def dots(
  dispatch: Dispatch,
  x: Float[Array, "M i"],
  kernels: Sequence[Array],
  names: Sequence[str],
  sizes: Int[Array, " X"],
  out_dtype: Any = jnp.float32,
) -> tuple[Array, ...]:
  """Returns the products of rows with the matrices of their experts, for several kernels.

  The factors have the compute dtype, here and in the gradient; sums are float32. Where a mesh
  splits the summed axis, the results are summands of one device. Gradients of kernels that are not
  differentiated are not computed.

  Args:
    dispatch: Division of the work among devices.
    x: Rows of the experts.
    kernels: Kernels [X i o] with the same input, in any dtype.
    names: Names of the kernels in `leaves.EXPERTS`.
    sizes: Number of rows of each expert.
    out_dtype: Dtype of the results, float32 or the compute dtype.
  """
  placed = tuple(_kernel(dispatch, n, w.shape) for n, w in zip(names, kernels, strict=True))
  return _dots(dispatch, placed, jnp.dtype(out_dtype), x, tuple(kernels), sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _dots(
  dispatch: Dispatch,
  placed: tuple[_Kernel, ...],
  out_dtype: Any,
  x: Array,
  kernels: tuple[Array, ...],
  sizes: Array,
) -> tuple[Array, ...]:
  def of_device(x: Array, kernels: Any, sizes: Array) -> tuple[Array, ...]:
    dtype = dispatch.compute_dtype
    x = x.astype(dtype)
    wholes = (how.whole(w, dtype) for how, w in zip(placed, kernels, strict=True))
    found = (grouped_products.products(x, w, sizes) for w in wholes)
    return tuple(rounding.written(y, out_dtype) for y in found)

  inputs = ("own", tuple(how.spec for how in placed), "own")
  return dispatch.on_devices(of_device, inputs, ("own",) * len(placed))(x, kernels, sizes)


def _forward(
  dispatch: Dispatch, placed: tuple[_Kernel, ...], out_dtype: Any, x: Any, kernels: Any, sizes: Any
):
  """Returns the products, and what their gradients need: x only if that of a kernel is wanted."""
  (needs_dx,), (x,) = wanted.split(x)
  needed, kernels = wanted.split(*kernels)
  kept = x.astype(dispatch.compute_dtype) if any(needed) else None
  like_x = jnp.zeros(0, x.dtype) if needs_dx else None
  found = _dots(dispatch, placed, out_dtype, x, kernels, sizes.value)
  return found, (kept, kernels, sizes.value, like_x, needed)


def _backward(
  dispatch: Dispatch, placed: tuple[_Kernel, ...], out_dtype: Any, residuals: Any, cotangents: Any
):
  del out_dtype  # each cotangent has this dtype.
  x, kernels, sizes, like_x, needed = residuals
  over = tuple(axis for axis in dispatch.rows if not (dispatch.is_split and axis == EXPERT))

  def of_device(x: Any, kernels: Any, sizes: Array, cotangents: Any) -> tuple[Any, Any]:
    dx, gradients = None, []
    for how, w, g, is_needed in zip(placed, kernels, cotangents, needed, strict=True):
      g = g.astype(dispatch.compute_dtype)
      if like_x is not None:
        whole = how.whole(w, dispatch.compute_dtype)
        part = grouped_products.products(g, whole, sizes, is_transposed=True)
        dx = part if dx is None else dx + part
      if is_needed:
        gradients.append(how.own(grouped_products.gradients(x, g, sizes), over))
    if dx is not None and like_x is not None:
      dx = rounding.written(dx, like_x.dtype)
    return dx, tuple(gradients)

  specs = tuple(how.spec for how in placed)
  of_needed = tuple(spec for spec, is_needed in zip(specs, needed, strict=True) if is_needed)
  inputs = (None if x is None else "own", specs, "own", ("own",) * len(placed))
  outputs = (None if like_x is None else "own", of_needed)
  dense = tuple(wanted.dense(g) for g in cotangents)
  dx, gradients = dispatch.on_devices(of_device, inputs, outputs)(x, kernels, sizes, dense)
  left = iter(gradients)
  pairs = zip(kernels, needed, strict=True)
  return (
    dx,
    tuple(next(left).astype(w.dtype) if is_needed else None for w, is_needed in pairs),
    None,
  )


_dots.defvjp(_forward, _backward, symbolic_zeros=True)
