"""Products of groups of rows, each with a matrix of its own: three forms of one definition. Pure.

Rows are sorted by group. Group g has the rows Σ sizes[:g] .. Σ sizes[:g + 1]; rows behind the last
group belong to none, and are 0 in every result.

* "reference" is the definition: every row times every matrix. Nothing else computes so much.
* "ragged" is `jax.lax.ragged_dot_general`, for which accelerators have kernels.
* "blocked" is for CPUs, where XLA computes a ragged product as the reference does: a loop over
  blocks of rows of one group, which reads each matrix where it is.

As in `mixed_precision`, a primitive chooses by platform when a program is lowered, even if that is
done for another platform. Sums are float32, in an order that does not change from run to run.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Float, Int

_BLOCK = 128  # largest number of rows of a block, which share the loads of a matrix.


def products(
  x: Float[Array, "M i"],
  w: Float[Array, "X _ _"],
  sizes: Int[Array, " X"],
  *,
  is_transposed: bool = False,
  form: str | None = None,
) -> Float[Array, "M o"]:
  """Returns x[m] @ w[g] for each row m of group g, in float32. It has no derivative of its own.

  Args:
    x: Rows, sorted by group.
    w: Matrices [X i o], of the dtype of x.
    sizes: Number of rows of each group; their sum is at most M.
    is_transposed: Whether the matrices are [X o i].
    form: Key of `FORMS`; None: chosen by platform.
  """
  return _bind("rows", x, w, sizes, is_transposed, form)


def gradients(
  x: Float[Array, "M i"],
  y: Float[Array, "M o"],
  sizes: Int[Array, " X"],
  *,
  form: str | None = None,
) -> Float[Array, "X i o"]:
  """Returns Σ x[m] ⊗ y[m] over the rows m of each group, in float32; see `products`."""
  return _bind("matrices", x, y, sizes, False, form)


def _bind(
  kind: str, x: Array, y: Array, sizes: Array, is_transposed: bool, form: str | None
) -> Array:
  # The precision in effect here; lowering happens elsewhere.
  precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
  given = {"is_transposed": is_transposed, "precision": precision}
  if form is not None:
    return FORMS[form](kind, x, y, sizes, **given)
  return _grouped.bind(x, y, sizes, kind=kind, **given)


def _reference(
  kind: str, x: Array, y: Array, sizes: Array, *, is_transposed: bool, precision: Any
) -> Array:
  """Returns the sums over all groups: each row counts in one of them."""
  ends = jnp.cumsum(sizes)
  group = jnp.searchsorted(ends, jnp.arange(x.shape[0]), side="right")
  is_of = jax.nn.one_hot(group, sizes.shape[0], dtype=x.dtype)
  spec = "mg,mi,mo->gio"
  if kind == "rows":
    spec = "mg,mi,goi->mo" if is_transposed else "mg,mi,gio->mo"
  settings = {"precision": precision, "preferred_element_type": jnp.float32}
  return jnp.einsum(spec, is_of, x, y, **settings)


def _ragged(
  kind: str, x: Array, y: Array, sizes: Array, *, is_transposed: bool, precision: Any
) -> Array:
  if kind == "rows":
    dims = (((1,), (2 if is_transposed else 1,)), ((), ()))
    numbers = jax.lax.RaggedDotDimensionNumbers(dims, [0], [0])
  else:
    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
  found = jax.lax.ragged_dot_general(
    x, y, sizes, numbers, precision=precision, preferred_element_type=jnp.float32
  )
  if kind == "rows":
    found = jnp.where((jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None], found, 0)
  return found


def _blocked(
  kind: str, x: Array, y: Array, sizes: Array, *, is_transposed: bool, precision: Any
) -> Array:
  """Returns the sums block by block; a group of n rows has ⌈n / block⌉ blocks."""
  rows, groups = x.shape[0], sizes.shape[0]
  size = min(_BLOCK, 1 << max(0, (rows // groups - 1).bit_length()))
  counts = -(-sizes // size)
  last, offsets = jnp.cumsum(counts), jnp.cumsum(sizes) - sizes
  is_rows = kind == "rows"
  settings = {"precision": precision, "preferred_element_type": jnp.float32}
  # A block may reach beyond its group, and beyond the rows.
  padded = lambda a: jnp.pad(a, ((0, size), (0, 0)))
  x, y = padded(x), y if is_rows else padded(y)

  def own_rows(of: Array, start: Array, end: Array) -> Array:
    own = jax.lax.dynamic_slice_in_dim(of, start, size)
    return jnp.where((start + jnp.arange(size) < end)[:, None], own, 0)

  def step(number: Array, out: Array) -> Array:
    group = jnp.searchsorted(last, number, side="right").astype(jnp.int32)
    start = offsets[group] + (number - last[group] + counts[group]) * size
    own = own_rows(x, start, offsets[group] + sizes[group])
    if is_rows:
      w = jax.lax.dynamic_index_in_dim(y, group, keepdims=False)
      found = jnp.einsum("mi,oi->mo" if is_transposed else "mi,io->mo", own, w, **settings)
      # Rows of the next group are 0 here, and overwritten by the next block.
      return jax.lax.dynamic_update_slice_in_dim(out, found, start, 0)
    other = jax.lax.dynamic_slice_in_dim(y, start, size)
    more = jnp.einsum("mi,mo->io", own, other, **settings)
    total = jax.lax.dynamic_index_in_dim(out, group, keepdims=False) + more
    return jax.lax.dynamic_update_index_in_dim(out, total, group, 0)

  width = y.shape[1 if is_transposed else 2] if is_rows else 0
  shape = (rows + size, width) if is_rows else (groups, x.shape[1], y.shape[1])
  out = jax.lax.fori_loop(0, last[-1], step, jnp.zeros(shape, jnp.float32))
  return out[:rows] if is_rows else out


# Name → function (kind of result, x, y, sizes) → float32 sums.
FORMS: Mapping[str, Callable[..., Array]] = {
  "reference": _reference,
  "ragged": _ragged,
  "blocked": _blocked,
}


def _shape(x: Any, y: Any, sizes: Any, *, kind: str, is_transposed: bool, precision: Any) -> Any:
  if kind == "rows":
    return ShapedArray((x.shape[0], y.shape[1 if is_transposed else 2]), jnp.dtype(jnp.float32))
  return ShapedArray((sizes.shape[0], x.shape[1], y.shape[1]), jnp.dtype(jnp.float32))


def _lowered(form: str) -> Callable[..., Array]:
  def function(x: Array, y: Array, sizes: Array, *, kind: str, **given: Any) -> Array:
    return FORMS[form](kind, x, y, sizes, **given)

  return function


_grouped = Primitive("grouped_products")
_grouped.def_abstract_eval(_shape)
_grouped.def_impl(jax.jit(_grouped.bind, static_argnames=("kind", "is_transposed", "precision")))
mlir.register_lowering(_grouped, mlir.lower_fun(_lowered("ragged"), multiple_results=False))
mlir.register_lowering(
  _grouped, mlir.lower_fun(_lowered("blocked"), multiple_results=False), platform="cpu"
)
