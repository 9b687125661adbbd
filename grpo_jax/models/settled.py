"""Arrays that stand in memory before they are used, where that pays. Pure.

On CPUs, XLA computes the elementwise operations before a product a second time, into a transposed
copy of their result, for each product that wants one. The copy is written one element at a time:
for the gradient of a gated MLP's kernel it took as long as three products. GPUs and TPUs read
either layout, and lose a fusion to a barrier.

As in `accumulated`, a primitive chooses by platform, since `jax.lax.platform_dependent` may leave
a conditional in a program for a mesh.
"""

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array


def settle(x: Array) -> Array:
  """Returns x; on CPUs it is written once, and what uses it is not fused with what makes it.

  It has no derivative: it is for the insides of custom gradients.
  """
  return _settle.bind(x)


_settle = Primitive("settle")
_settle.def_abstract_eval(lambda x: x)
_settle.def_impl(jax.jit(_settle.bind))
mlir.register_lowering(_settle, mlir.lower_fun(lambda x: x, multiple_results=False))
mlir.register_lowering(
  _settle, mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False), platform="cpu"
)
