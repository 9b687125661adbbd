"""Custom gradients that compute only what is wanted. Pure.

With `defvjp(forward, backward, symbolic_zeros=True)` the forward function gets each array of its
arguments together with whether it is differentiated. What a frozen weight would need for its
gradient is then neither kept nor computed, and this does not depend on a compiler that removes
unused results.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
  """Which cotangents a backward pass computes; a static part of its residuals.

  Attributes:
    arguments: Whether each argument is differentiated.
  """

  arguments: tuple[bool, ...]

  def __getitem__(self, index: int) -> bool:
    return self.arguments[index]

  def __iter__(self):
    return iter(self.arguments)


def split(*arguments: Any) -> tuple[Wanted, tuple[Any, ...]]:
  """Splits the arguments of a forward function into what is wanted of them, and their values.

  Args:
    *arguments: Trees of `jax.custom_derivatives.CustomVJPPrimal`.

  Returns:
    Whether any array of each argument is differentiated; the trees of arrays.
  """
  wanted = (any(leaf.perturbed for leaf in jax.tree.leaves(tree)) for tree in arguments)
  values = (jax.tree.map(lambda leaf: leaf.value, tree) for tree in arguments)
  return Wanted(tuple(wanted)), tuple(values)


def is_zero(cotangent: Any) -> bool:
  """Returns whether tracing already shows that the loss does not depend on a result."""
  return cotangent is None or isinstance(cotangent, SymbolicZero)


def dense(cotangent: Any) -> Array:
  """Returns a cotangent as an array."""
  if isinstance(cotangent, SymbolicZero):
    zero: Any = cotangent
    return jnp.zeros(zero.shape, zero.dtype)
  return jnp.asarray(cotangent)
