"""Mean and spread of sets of rewards, and whether a set has any spread. Pure.

Sums run over differences to one member of the set. Equal values therefore differ by exactly
0, in any dtype, and their spread is exactly zero. (E[x²] - E[x]² in float32 leaves a residue;
dividing by it gives advantages in the thousands.)

Everything is computed in units of a power of two near the largest value, which is exact: squares
neither overflow nor underflow, whatever the size of the rewards.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.rl.numerics import safe_divide

_Numbers = Float[Array, "*sets n"] | Float[np.ndarray, "*sets n"]
_Mask = Bool[Array, "*sets n"] | Bool[np.ndarray, "*sets n"]


def has_spread(values: _Numbers, mask: _Mask) -> Bool[Array, "*sets"] | Bool[np.ndarray, "*sets"]:
  """Returns True for sets in which two unmasked values differ by more than rounding.

  This rule decides whether a group has a learning signal, for NumPy and for JAX arrays:

      max x - min x > 2 ε max |x|,   ε the spacing of the dtype at 1

  1 and 1.000001 differ in float32, 10⁶ and 10⁶ + 1 do, two neighbouring numbers do not. Numbers
  too small for a normal floating-point number count as 0, as on accelerators.
  """
  xp = jnp if isinstance(values, jax.Array) or isinstance(mask, jax.Array) else np
  limits = xp.finfo(values.dtype)
  largest = xp.max(xp.where(mask, xp.abs(values), 0), axis=-1, keepdims=True, initial=0)
  _, exponent = xp.frexp(largest)
  scaled = _times_power(xp, xp.where(mask, values, 0), -exponent)
  highest = xp.max(xp.where(mask, scaled, -1), axis=-1, initial=-1)
  lowest = xp.min(xp.where(mask, scaled, 1), axis=-1, initial=1)
  rounding = 2 * limits.eps * xp.max(xp.abs(scaled), axis=-1, initial=0)
  return xp.asarray((highest - lowest > rounding) & (largest[..., 0] >= limits.tiny))


def exponents(values: _Numbers, mask: _Mask) -> Int[Array, "*sets 1"]:
  """Returns e of each set such that its largest absolute value is in [2ᵉ⁻¹, 2ᵉ); 0 for zeros."""
  largest = jnp.max(jnp.where(mask, jnp.abs(values), 0), axis=-1, keepdims=True, initial=0)
  return jnp.frexp(stop_gradient(largest))[1]


def times_power(
  values: Float[Array, "*shape"], exponent: Int[Array, "*other"]
) -> Float[Array, "*broadcast"]:
  """Returns values · 2ᵉ, exact unless the result leaves the range of the dtype."""
  return _times_power(jnp, values, stop_gradient(exponent))


def _times_power(xp: Any, values: Any, exponent: Any) -> Any:
  one = xp.ones((), values.dtype)
  half = exponent // 2  # 2ᵉ itself may be infinite where values · 2ᵉ is not.
  return values * xp.ldexp(one, half) * xp.ldexp(one, exponent - half)


def centre_and_spread(
  values: Float[Array, "*sets n"], mask: Bool[Array, "*sets n"], *, ddof: int = 1
) -> tuple[Float[Array, "*sets 1"], Float[Array, "*sets 1"]]:
  """Returns mean and standard deviation of the unmasked values of each set, in two passes.

      m = p + 1/n Σ (xⱼ - p)      s = sqrt( Σ (xⱼ - m)² / (n - ddof) ),   p one of the xⱼ

  Args:
    values: Values, finite where unmasked.
    mask: True on the members of a set.
    ddof: Delta degrees of freedom of the variance; 1 gives the unbiased (Bessel's) one.

  Returns:
    The mean, 0 for an empty set. The standard deviation: 0 for n <= ddof, and exactly 0 if the
    set has no spread (see `has_spread`).
  """
  exponent = exponents(values, mask)
  scaled = jnp.where(mask, times_power(values, -exponent), 0)
  first = jnp.argmax(mask, axis=-1, keepdims=True)
  pivot = jnp.take_along_axis(scaled, first, axis=-1)
  differences = jnp.where(mask, scaled - pivot, 0)
  n = mask.sum(axis=-1, keepdims=True, dtype=values.dtype)
  offset = safe_divide(differences.sum(axis=-1, keepdims=True), n)
  squares = jnp.square(jnp.where(mask, differences - offset, 0)).sum(axis=-1, keepdims=True)
  variance = safe_divide(squares, n - ddof)
  is_spread = has_spread(stop_gradient(values), mask)[..., None] & (variance > 0)
  spread = jnp.where(is_spread, jnp.sqrt(jnp.where(is_spread, variance, 1)), 0)
  return times_power(pivot + offset, exponent), times_power(spread, exponent)


def held(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """Returns the values, with infinities replaced by the largest finite number of their sign."""
  largest = jnp.finfo(values.dtype).max
  return jnp.clip(values, -largest, largest)
