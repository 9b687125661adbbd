"""What all implementations of attention share: the seam, the one custom VJP, and the checks.

An implementation is any hashable object with the three functions of `Implementation`, such as a
module. This file puts the custom VJP around them, so that no implementation needs its own.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from grpo_kernels import precision, rounding
from grpo_kernels.attention import visible
from grpo_kernels.attention.visible import Visible
from grpo_kernels.implementations import current_chip

# Checkpoint name of the output and the log-sum-exp, by which a remat policy can keep them.
ATTENDED = "attended"

# Log-sum-exp of a query that sees no key: finite, so that nothing becomes NaN.
NOTHING = -5e29


@runtime_checkable
class Products(Protocol):
  """Options of the two products of attention; hashable."""

  @property
  def compute_dtype(self) -> Any:
    """Dtype to which the factors are rounded; sums are float32."""
    ...

  @property
  def contract(self) -> Callable[[str, Array, Array], Array]:
    """(einsum of two operands, x, y) → sums of products, float32."""
    ...


@dataclasses.dataclass(frozen=True)
class Plain:
  """Products in the precision of `precision.precision_of`.

  Attributes:
    compute_dtype: Dtype of the factors.
  """

  compute_dtype: Any = jnp.float32

  def contract(self, spec: str, x: Array, y: Array) -> Array:
    """Returns an einsum of two operands, summed in float32."""
    x, y = x.astype(self.compute_dtype), y.astype(self.compute_dtype)
    exact = precision.precision_of(x.dtype)
    return jnp.einsum(spec, x, y, precision=exact, preferred_element_type=jnp.float32)


FLOAT32 = Plain()


@dataclasses.dataclass(frozen=True)
class Settings:
  """Static settings.

  Attributes:
    products: Options of the products. Kernels read the dtype only.
    interpret: Whether a Pallas kernel runs in its platform's interpreter, on a CPU: for tests.
  """

  products: Products = FLOAT32
  interpret: bool = False


class Implementation(Protocol):
  """The three functions of an implementation; a module, or any hashable object.

      S[q, k] = q · k  where q sees k      L[q] = log Σ_k exp(S[q, k])      P = exp(S - L)
      out = P v      dV = Pᵀ g      dS = P (g vᵀ - delta)      dQ = dS k      dK = dSᵀ q

  Queries come scaled. q, k, v and g are in the compute dtype. Weights P are rounded to it before
  they are multiplied with values; `parts.softmax_shift` says what is subtracted from scores.
  """

  @property
  def prepare(self) -> Callable[[Visible, int], Any]:
    """(visibility, width E of a head) → `Visible.tiles`, any tree of arrays."""
    ...

  @property
  def forward(self) -> Callable[..., tuple[Array, Array]]:
    """(settings, q [B T H E], k, v [B T K E], Visible) → (out [B T H E], L [B H T] in float32).

    `out` is 0 and L is `NOTHING` where a query sees no key.
    """
    ...

  @property
  def backward(self) -> Callable[..., tuple[Array, Array, Array]]:
    """(settings, q, k, v, Visible, L, delta [B H T], g [B T H E]) → (dQ, dK, dV).

    Each in float32 or in the dtype of its operand.
    """
    ...


def attend(
  implementation: Any,
  settings: Settings,
  q: Float[Array, "B T H E"],
  k: Float[Array, "B S K E"],
  v: Float[Array, "B S K E"],
  seen: Visible,
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
  """Returns softmax(q kᵀ / √E) v and the log-sum-exp of the scores, by an implementation.

  Platform and dtype are not checked: lowering fails if it is not possible, and otherwise works
  also for a device that is not present. Differentiable in q, k and v.

  Args:
    implementation: Implementation to use.
    settings: Static settings.
    q: Query heads; head h uses key/value head h // (H / K).
    k: Key heads; S = T, unless rows are dealt out in parts.
    v: Value heads.
    seen: Visibility of the rows. Tiles that are not there are made.

  Returns:
    The weighted values, rounded once to the compute dtype, and the log-sum-exp, both float32.
  """
  found: Any = _attend(implementation, settings, q, k, v, _prepared(implementation, seen, q))
  return found


def unrounded(
  implementation: Any, settings: Settings, q: Array, k: Array, v: Array, seen: Visible
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
  """Returns what `attend` does, as the implementation writes it; not differentiable."""
  seen = _prepared(implementation, seen, q)
  out, log_sum = _run(implementation, settings, *_operands(settings, q, k, v), seen)
  return out.astype(jnp.float32), log_sum


def _run(implementation, settings, q, k, v, seen) -> tuple[Array, Array]:
  """Returns output and log-sum-exp of operands."""
  return _run_on(current_chip(), implementation, settings, q, k, v, seen)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run_on(chip, implementation, settings, q, k, v, seen) -> tuple[Array, Array]:
  """Returns what `_run` does; what was traced for one chip is not used for another.

  A function of its own in the program, so that layers which are written out lower a kernel once.
  """
  del chip
  return implementation.forward(settings, q, k, v, seen)


def _prepared(implementation: Any, seen: Visible, q: Array) -> Visible:
  """Returns the visibility with the tiles of an implementation."""
  if seen.tiles is not None:
    return seen
  return seen._replace(tiles=implementation.prepare(seen, q.shape[-1]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(implementation, settings, q, k, v, seen) -> tuple[Array, Array]:
  """Returns the output, rounded to the compute dtype, and the log-sum-exp; both float32."""
  out, log_sum = _run(implementation, settings, *_operands(settings, q, k, v), seen)
  return rounding.written(out, settings.products.compute_dtype).astype(jnp.float32), log_sum


def _operands(settings: Settings, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
  """Returns scaled queries, keys and values in the compute dtype, rounded once."""
  dtype = settings.products.compute_dtype
  q = q.astype(jnp.float32) * (q.shape[-1] ** -0.5)
  return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def _forward(implementation, settings, q, k, v, seen):
  """Returns the outputs, and what the backward pass needs."""
  operands = _operands(settings, q, k, v)
  out, log_sum = _run(implementation, settings, *operands, seen)
  # The product with weights that reads the output rounds it to this dtype, too.
  out = checkpoint_name(rounding.written(out, settings.products.compute_dtype), ATTENDED)
  log_sum = checkpoint_name(log_sum, ATTENDED)
  likes = tuple(jnp.zeros(0, x.dtype) for x in (q, k, v))
  # float32, so that the cotangent comes unrounded.
  return (out.astype(jnp.float32), log_sum), (operands, seen, out, log_sum, likes)


def _backward(implementation, settings, residuals, cotangents):
  """Returns the cotangents of queries, keys and values, each in the dtype of its input."""
  (q, k, v), seen, out, log_sum, likes = residuals
  of_out, of_log_sum = cotangents
  g = rounding.written(of_out, settings.products.compute_dtype)
  # dS = P (dP - Σ_e g out + dL): the log-sum-exp takes part in the number that is subtracted.
  delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1).swapaxes(1, 2)
  found = implementation.backward(settings, q, k, v, seen, log_sum, delta - of_log_sum, g)
  dq, dk, dv = (x.astype(jnp.float32) for x in found)
  dq = dq * (q.shape[-1] ** -0.5)
  return *(x.astype(like.dtype) for x, like in zip((dq, dk, dv), likes, strict=True)), None


_attend.defvjp(_forward, _backward)


def padded(
  size: int, seen: Visible, queries: Sequence[Array], keys: Sequence[Array]
) -> tuple[Visible, list[Array], list[Array]]:
  """Returns rows with padding on the right, up to whole tiles.

  Args:
    size: Number of tokens of a tile.
    seen: Visibility of the rows.
    queries: Arrays [B T ...].
    keys: Arrays [B S ...].
  """

  def pad(x: Array) -> Array:
    missing = -x.shape[1] % size
    return jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2)) if missing else x

  of_queries, of_keys = [*map(pad, queries)], [*map(pad, keys)]
  seen = visible.padded(seen, of_keys[0].shape[1], of_queries[0].shape[1])
  return seen, of_queries, of_keys


def check_heads(q: Array, k: Array, v: Array) -> None:
  """Raises ValueError for queries, keys and values that do not fit each other."""
  if k.shape != v.shape:
    raise ValueError(f"keys and values need the same shape, got {k.shape} and {v.shape}")
  if (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]) or q.shape[2] % k.shape[2]:
    raise ValueError(
      "queries [B T H E] and keys [B T K E] need the same B, T and E, and H a multiple of K, got"
      f" {q.shape} and {k.shape}"
    )


def check_rows(
  shape: tuple[int, ...],
  segment_ids: Array,
  branch_ids: Array | None,
  positions: Array | None,
  window: int | Array | None,
) -> None:
  """Raises ValueError for information about tokens that does not have their shape [B T]."""
  for name, ids in (("segment_ids", segment_ids), ("branch_ids", branch_ids)):
    if ids is not None and ids.shape != shape:
      raise ValueError(f"{name} needs the shape {shape} of the tokens, got {ids.shape}")
  if window is None:
    return
  if positions is None or positions.shape != shape:
    came = None if positions is None else positions.shape
    raise ValueError(f"a window needs positions of the shape {shape}, got {came}")
  if not isinstance(window, jax.Array) and window < 1:
    raise ValueError(f"window must be at least 1 token, got {window}")
