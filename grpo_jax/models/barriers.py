"""Writes arrays to memory before they are used, on platforms where that is faster. Pure.

On CPUs, XLA repeats the elementwise operations before a product for each product that needs their
result transposed, and writes the transposed copy one element at a time: for the gradient of a gated
MLP's kernel that took as long as three products. GPUs and TPUs read either layout; a barrier there
would only prevent a fusion.

As in `mixed_precision`, a primitive chooses by platform, since `jax.lax.platform_dependent` may
leave a conditional in a program for a mesh.
"""

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array


def materialize(x: Array) -> Array:
  """Returns x; on CPUs it is written once, since its uses are not fused with its computation.

  It has no derivative: it is for use inside custom gradients.
  """
  return _materialize.bind(x)


_materialize = Primitive("materialize")
_materialize.def_abstract_eval(lambda x: x)
_materialize.def_impl(jax.jit(_materialize.bind))
mlir.register_lowering(_materialize, mlir.lower_fun(lambda x: x, multiple_results=False))
mlir.register_lowering(
  _materialize, mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False), platform="cpu"
)
