"""Matrix products that are accumulated in float32 and written in a smaller dtype. Pure.

The best way to rounded sums depends on the platform, so `einsum` is a primitive with several
lowerings:

* GPUs and TPUs write a product in the requested dtype, straight from their float32 accumulators. A
  conversion after a float32 product may not be fused with it: with cuBLAS, XLA writes the float32
  array, and drops the conversion if another one follows.
* On NVIDIA GPUs a barrier follows the product. Without it, if Triton computes the products, XLA
  reads gate and up in three passes instead of one.
* On CPUs XLA (before jax 0.11) converts both factors to float32 for such a product, even a whole
  kernel, and drops the rounding. There the product is float32 and rounded afterwards.

`jax.lax.platform_dependent` would do the same by a conditional, which the partitioner of meshes
does not always remove.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from grpo_kernels import rounding
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array


def einsum(spec: str, x: Array, y: Array, dtype: Any = jnp.float32) -> Array:
  """Computes an einsum of two operands of one dtype, summed in float32.

  It has no derivative of its own; `products.Products.contract` gives it one.

  Args:
    spec: Subscripts as in `jnp.einsum`.
    x: First operand.
    y: Second operand.
    dtype: Dtype of the result.

  Returns:
    The sums, rounded once to `dtype`.
  """
  if dtype == jnp.float32:
    return _at_once(x, y, spec=spec, dtype=dtype)
  return _rounded.bind(x, y, spec=spec, dtype=jnp.dtype(dtype))


def _at_once(x: Array, y: Array, *, spec: str, dtype: Any) -> Array:
  return jnp.einsum(spec, x, y, preferred_element_type=dtype)


def _at_once_behind_a_barrier(x: Array, y: Array, *, spec: str, dtype: Any) -> Array:
  return jax.lax.optimization_barrier(_at_once(x, y, spec=spec, dtype=dtype))


def _apart(x: Array, y: Array, *, spec: str, dtype: Any) -> Array:
  return rounding.written(_at_once(x, y, spec=spec, dtype=jnp.float32), dtype)


def _shape(x: Any, y: Any, *, spec: str, dtype: Any) -> Any:
  found = jax.eval_shape(functools.partial(_at_once, spec=spec, dtype=dtype), x, y)
  return ShapedArray(found.shape, found.dtype)


_rounded = Primitive("rounded_einsum")
_rounded.def_abstract_eval(_shape)
_rounded.def_impl(jax.jit(_rounded.bind, static_argnames=("spec", "dtype")))
mlir.register_lowering(_rounded, mlir.lower_fun(_at_once, multiple_results=False))
for platform, lowering in (("cpu", _apart), ("cuda", _at_once_behind_a_barrier)):
  mlir.register_lowering(
    _rounded, mlir.lower_fun(lowering, multiple_results=False), platform=platform
  )
