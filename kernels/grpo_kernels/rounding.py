"""Rounding that no compiler may leave out. Pure.

XLA may simplify float32 → bfloat16 → float32 to nothing, since that is more precise. Where the
rounding is part of the result (sampler and trainer are to compute the same numbers, a gradient is
said to be rounded) it is a `reduce_precision`, which XLA keeps.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rounded(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
  """Rounds float32 numbers to what another dtype holds; the result is still float32.

  Args:
    x: float32, or of that dtype already. The cotangent is rounded as x is.
    dtype: float32, which changes nothing, or bfloat16.
  """
  if jnp.dtype(dtype) in (jnp.float32, x.dtype):
    return x
  bits = jnp.finfo(dtype)
  return jax.lax.reduce_precision(x, bits.nexp, bits.nmant)


def written(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
  """Returns float32 numbers in another dtype, rounded also where float32 follows.

  Args:
    x: float32, or of that dtype already.
    dtype: Of the result, float32 or bfloat16.
  """
  return rounded(x, dtype).astype(dtype)
