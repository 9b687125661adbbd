"""Scalar functions whose value *and* gradient stay defined at the edges. Pure."""

import jax.numpy as jnp
from jaxtyping import Array, Float

MAX_LOG_RATIO = 20.0  # bound of ratios that carry a gradient; e²⁰ ≈ 4.9e8. verl uses it as well.


def wide(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """Returns floats in float32 at least: half-precision sums and counts lose or overflow."""
  return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x


def clamp(
  x: Float[Array, "*shape"],
  low: float | Float[Array, ""] | None = None,
  high: float | Float[Array, ""] | None = None,
) -> Float[Array, "*shape"]:
  """Clips `x` to [low, high] with gradient 1 on the bounds too (`jnp.clip` has ½ there).

  Args:
    x: Values of any shape.
    low: Lower bound; None: no bound.
    high: Upper bound; None: no bound.

  Returns:
    `x` within the bounds; its gradient is 0 outside them.
  """
  if low is not None:
    x = jnp.where(x < low, jnp.asarray(low, x.dtype), x)
  if high is not None:
    x = jnp.where(x > high, jnp.asarray(high, x.dtype), x)
  return x


def safe_divide(
  total: Float[Array, "*shape"], count: Float[Array, "*shape"] | float
) -> Float[Array, "*shape"]:
  """Returns total / count, and 0 where the count is 0; the gradient is finite in both cases."""
  total = wide(total)
  count = jnp.asarray(count, total.dtype)
  return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0)


def exp_held(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """Returns exp of a log-ratio clamped to ±20: never infinite; no gradient where it is clamped."""
  return jnp.exp(clamp(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def exp_or_zero(log_weight: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """Returns exp of a log-weight, and 0 (no gradient) where that is not finite.

  NeMo RL's rule for importance weights: a token whose weight cannot be
  represented is considered broken, and is not learned from.
  """
  is_finite = jnp.isfinite(jnp.exp(log_weight))
  return jnp.where(is_finite, jnp.exp(jnp.where(is_finite, log_weight, 0)), 0)
