"""Conversion of the arrays that `rl` accepts: lists, NumPy and JAX arrays. Pure.

Notebooks pass 0/1 rewards as integers or booleans, lists of lists, and masks of floats. They
are converted to arrays here; other input is rejected with a message. Tracers pass through.

Everything is computed in float32 at least, and in float64 where that is given: half-precision
arrays are converted first, and results are never in half precision.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from grpo_jax.rl.numerics import wide
from grpo_jax.values import checked

# Anything that `jnp.asarray` can convert: nested lists, NumPy arrays, JAX arrays, tracers.
Numbers = Any
Mask = Any


def floats(values: Numbers, name: str) -> Float[Array, "..."]:
  """Returns values as an array of floats, float32 at least; others get the default float type.

  Args:
    values: Anything that is array-like; see `Numbers`.
    name: Name of the values, for the error message.

  Raises:
    ValueError: The values are not real numbers, or the lengths of the inner lists differ.
  """
  array = _array(values, name)
  if jnp.issubdtype(array.dtype, jnp.floating):
    return wide(array)
  if jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == jnp.bool_:
    return array.astype(jnp.result_type(float))
  raise ValueError(f"{name} must be real numbers, got an array of {array.dtype}")


def mask(
  values: Mask, shape: tuple[int, ...] | None = None, name: str = "mask"
) -> Bool[Array, "..."]:
  """Returns a mask as booleans; of numbers, 1 is True and 0 is False.

  Args:
    values: Anything that is array-like; see `Numbers`.
    shape: Shape that the mask must have; None: any.
    name: Name of the mask, for the error message.

  Raises:
    ValueError: The shape differs, or a number is neither 0 nor 1 (which tracers cannot show).
  """
  array = _array(values, name)
  if shape is not None and array.shape != shape:
    raise ValueError(f"{name} must have the shape {shape} of what it masks, got {array.shape}")
  if array.dtype == jnp.bool_:
    return array
  if not isinstance(array, Tracer) and not bool(((array == 0) | (array == 1)).all()):
    raise ValueError(f"{name} must be booleans, or 0 and 1, got other numbers")
  return array != 0


def tokens(
  *,
  mask: Mask | None = None,
  sequence_ids: Any = None,
  marks: Mapping[str, Any] | None = None,
  **values: Numbers,
) -> tuple[Float[Array, "..."], ...]:
  """Returns values of tokens as arrays of floats, in the order given; checks that shapes agree.

  Args:
    mask: Mask of the same tokens; None: there is none.
    sequence_ids: Sequence of each token within its row, [B N]; None: every row is one.
    marks: Other arrays by the name of the argument; only their shape is checked.
    **values: Values of each token, by the name of the argument. A single number, or an axis of
      length 1, is the value of several tokens.

  Raises:
    ValueError: The shapes differ, or `floats` or `mask` rejects an argument.
  """
  made = {name: floats(x, name) for name, x in values.items()}
  marked = {**(marks or {}), "mask": mask, "sequence_ids": sequence_ids}
  whole = {name: _array(x, name).shape for name, x in marked.items() if x is not None}
  shapes = {**{name: x.shape for name, x in made.items()}, **whole}
  target = max(shapes.values(), key=lambda shape: (len(shape), math.prod(shape)))
  is_alike = all(_repeats(shape, target) for shape in shapes.values())
  if not is_alike or any(shape != target for shape in whole.values()):
    found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    raise ValueError(f"arrays of the same tokens must have one shape, got {found}")
  if sequence_ids is not None and len(target) != 2:
    raise ValueError(f"sequence_ids need arrays of the shape [B, N], got {target}")
  return tuple(made.values())


def loss_inputs(
  policy_logprobs: Numbers, old_logprobs: Numbers, advantages: Numbers, **others: Any
) -> tuple[Float[Array, "..."], ...]:
  """Returns the three inputs of a policy loss as `tokens` does.

  Args:
    policy_logprobs: Logprob log πθ of each token, in nats.
    old_logprobs: Logprob log π_old of each token, in nats.
    advantages: Advantage of each token.
    **others: Other arguments of `tokens`.
  """
  given = {"policy_logprobs": policy_logprobs, "old_logprobs": old_logprobs}
  return tokens(**given, advantages=advantages, **others)


def _repeats(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
  """Returns whether an array is one number, or has the shape `target` except for axes of 1."""
  pairs = zip(shape, target, strict=False)
  return shape == () or (len(shape) == len(target) and all(a in (1, b) for a, b in pairs))


def number(
  name: str,
  value: Any,
  *,
  low: checked.Bound = None,
  above: checked.Bound = None,
  high: checked.Bound = None,
) -> Any:
  """Returns a number that a function is given, if it is in range; None and tracers pass.

  Args:
    name: Name of the argument, for the error message.
    value: Number given by the caller.
    low: Smallest allowed value.
    above: Bound that the value must exceed.
    high: Largest allowed value.

  Raises:
    ValueError: The value is not a number, or out of range.
  """
  if value is None or isinstance(value, Tracer):
    return value
  kind = checked.number(low=low, above=above, high=high, infinite=True)
  is_scalar = isinstance(value, jax.Array) and value.ndim == 0
  if problem := kind.problem(name, value.item() if is_scalar else value):
    raise ValueError(problem)
  return value


def groups(
  rewards: Numbers, given: Mask | None, name: str = "rewards"
) -> tuple[Float[Array, "P G"], Bool[Array, "P G"] | None, tuple[int, ...]]:
  """Returns rewards and mask as [P G], and the shape that was given; [G] is one group.

  Args:
    rewards: Rewards of P prompts with G attempts each, [P G], or of one prompt, [G].
    given: Mask of the same shape, or None.
    name: Name of the argument, for errors.

  Raises:
    ValueError: The rewards have neither shape, or `floats` or `mask` rejects them.
  """
  array = floats(rewards, name)
  if array.ndim not in (1, 2):
    raise ValueError(
      f"{name} must have the shape [P, G], P prompts with G attempts each, or [G] for one "
      f"prompt, got {array.shape}"
    )
  masked = None if given is None else mask(given, array.shape)
  as_groups = (1, -1) if array.ndim == 1 else array.shape
  return (
    array.reshape(as_groups),
    None if masked is None else masked.reshape(as_groups),
    array.shape,
  )


def _array(values: Any, name: str) -> Array:
  if isinstance(values, jax.Array):
    return values
  try:
    as_numpy = np.asarray(values) if not _has_tracers(values) else None
    if as_numpy is not None and as_numpy.dtype.kind not in "biufV":
      raise ValueError(f"they are of type {as_numpy.dtype}")
    return jnp.asarray(values if as_numpy is None else as_numpy)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"{name} must be an array of numbers, or lists of one length: {error}"
    ) from None


def _has_tracers(values: Any) -> bool:
  """Returns whether a list holds JAX arrays; NumPy may not be able to read them."""
  return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(values))
