"""What all implementations share: static settings, the statistics of a row, and the one gradient.

An implementation is any hashable object with two pure functions (`Implementation`): `statistics`
passes over the vocabulary once and keeps four numbers per token; `gradients` makes a second pass.
This file puts the custom VJP around the two, so that no implementation needs its own, and a head
that is split over devices (`sharded`) is treated like a whole one.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_kernels import rounding, wanted

# `Statistics.largest` of a row without columns. Far enough from the limits of float32 that
# differences divided by a temperature stay finite.
LOWEST = -(2.0**100)


@dataclasses.dataclass(frozen=True)
class Settings:
  """Static settings."""

  head_layout: str = "vd"  # "vd": head is [V D]; "dv": [D V].
  temperature: float = 1.0  # τ > 0: logits are z = (h · W) / τ.
  with_entropy: bool = False
  interpret: bool = False  # run a Pallas kernel in its platform's interpreter, on a CPU: for tests.
  vocab_chunk: int | None = None  # columns of a chunk; None: chosen automatically.
  gradient_dtype: str | None = None  # of the head's gradient; None: the head's.
  head_is_frozen: bool = False  # its gradient is not computed.

  @property
  def vocab_axis(self) -> int:
    """The axis of the head that is V."""
    return self.head_layout.index("v")

  @property
  def width_axis(self) -> int:
    """The axis of the head that is D."""
    return self.head_layout.index("d")

  def dtype_of_gradient(self, head: Array) -> Any:
    """Returns the dtype of a head's gradient."""
    return head.dtype if self.gradient_dtype is None else jnp.dtype(self.gradient_dtype)


class Statistics(NamedTuple):
  """The result of one pass over the columns of a head, for each token; float32.

  Uses logits before the temperature, a = h · W: their differences are divided by it, so that large
  logits keep their precision.
  """

  largest: Float[Array, " N"]  # max a; LOWEST if there is no column.
  total: Float[Array, " N"]  # Σ exp(x), x = (a - largest) / τ.
  moment: Float[Array, " N"] | None  # Σ x exp(x); None without entropy.
  target: Float[Array, " N"]  # a of the target; 0 if the target is not among the columns.


class Implementation(Protocol):
  """The two passes over the vocabulary; a module, or any hashable object."""

  @property
  def statistics(self) -> Callable[..., Statistics]:
    """(settings, hidden [N D], head, targets [N], columns) → Statistics.

    `columns` is the number of leading columns of the vocabulary that are real, an int32 scalar;
    the rest have probability 0. None: all are real.
    """
    ...

  @property
  def gradients(self) -> Callable[..., tuple[Array, Array | None]]:
    """Returns the cotangents of hidden, in float32, and of head.

    The latter is in the dtype of the head, or that of the settings; None if the head is frozen.

        S = [g (onehot_t - p) - gₑ p (log p + H)] / τ      dW = Sᵀh      dh = S W

    (settings, hidden, head, targets, columns, (largest, log total), entropy, g, gₑ): the pair is
    of the whole vocabulary, log p = (a - largest) / τ - log total. `entropy` and gₑ are None
    without `settings.with_entropy`.
    """
    ...


def linear_logprobs(
  implementation: Any,
  settings: Settings,
  hidden: Float[Array, "N D"],
  head: Float[Array, "_ _"],
  targets: Int[Array, " N"],
) -> tuple[Float[Array, " N"], Float[Array, " N"] | None]:
  """Returns the log-probability of each target, at most 0, and the entropy, by an implementation.

  Platform and dtype are not checked: lowering fails if it is not possible, and otherwise works
  also for a device that is not present.

  Args:
    implementation: Implementation to use.
    settings: Static settings.
    hidden: Hidden states, as in `reference`; N may be 0.
    head: Head in the layout `settings.head_layout`.
    targets: Token ids in [0, V); any other gives NaN.

  Returns:
    Logprobs in nats; entropies in nats, or None without `settings.with_entropy`. Both float32.
  """
  if hidden.shape[0] == 0:  # so that implementations need not handle empty grids.
    nothing = jnp.zeros(0, jnp.float32)
    return nothing, nothing if settings.with_entropy else None
  targets = targets.astype(jnp.int32)
  found: Any = _logprobs(implementation, settings, hidden, head, targets)
  logprobs, entropy = found
  in_range = (targets >= 0) & (targets < head.shape[settings.vocab_axis])
  return jnp.where(in_range, logprobs, jnp.nan), entropy


def check(
  hidden: Float[Array, "N D"], head: Float[Array, "_ _"], *, head_layout: str, temperature: float
) -> None:
  """Raises ValueError for invalid shapes, layout or temperature."""
  if head_layout not in ("vd", "dv"):
    raise ValueError(f"head_layout must be 'vd' or 'dv', got {head_layout!r}")
  if not temperature > 0:
    raise ValueError(f"temperature must be above 0, got {temperature}")
  width = head.shape[head_layout.index("d")]
  if width != hidden.shape[1]:
    raise ValueError(
      f"hidden has width {hidden.shape[1]}, the head of shape {head.shape} in layout"
      f" {head_layout!r} has width {width}"
    )


def entry(implementation: Any) -> Callable[..., Any]:
  """Makes a function with the reference's name and signature from an implementation.

  Returns:
    The function (hidden, head, targets, *, head_layout, temperature, return_entropy) → logprobs,
    or the pair (logprobs, entropy). Further keywords are those of `Settings`.
  """

  def linear_logprobs_of(
    hidden: Float[Array, "N D"],
    head: Float[Array, "_ _"],
    targets: Int[Array, " N"],
    *,
    head_layout: str = "vd",
    temperature: float = 1.0,
    return_entropy: bool = False,
    **further: Any,
  ) -> Float[Array, " N"] | tuple[Float[Array, " N"], Float[Array, " N"]]:
    """See `reference.linear_logprobs`."""
    settings = Settings(head_layout, float(temperature), return_entropy, **further)
    logprobs, entropy = linear_logprobs(implementation, settings, hidden, head, targets)
    return logprobs if entropy is None else (logprobs, entropy)

  return linear_logprobs_of


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _logprobs(implementation, settings, hidden, head, targets) -> tuple[Array, Array | None]:
  """Returns (logprobs, entropy or None); where differentiation enters."""
  return outputs(settings, implementation.statistics(settings, hidden, head, targets, None))


def outputs(settings: Settings, found: Statistics) -> tuple[Array, Array | None]:
  """Returns logprobs and entropy from the statistics of whole rows.

      log p(t) = (a_t - largest) / τ - log total      H = log total - moment / total

  Differences of close numbers are taken first, so that large logits keep their precision.
  """
  log_total = jnp.log(found.total)
  # At most 0 except for rounding, if an implementation computes the target's logit separately.
  logprobs = jnp.minimum(tempered(settings, found.target - found.largest) - log_total, 0.0)
  if not settings.with_entropy:
    return logprobs, None
  assert found.moment is not None, "an implementation must return the moment for entropies"
  return logprobs, log_total - found.moment / found.total


def tempered(settings: Settings, difference: Array) -> Array:
  """Returns a difference of logits, divided by the temperature."""
  return difference if settings.temperature == 1.0 else difference / settings.temperature


def _forward(implementation, settings, hidden, head, targets):
  """Returns the outputs and what the backward pass needs; arguments come as symbolic primals."""
  needed, (hidden, head, targets) = wanted.split(hidden, head, targets)
  found = implementation.statistics(settings, hidden, head, targets, None)
  logprobs, entropy = outputs(settings, found)
  normaliser = found.largest, jnp.log(found.total)
  return (logprobs, entropy), (hidden, head, targets, normaliser, entropy, needed)


def _backward(implementation, settings, residuals, cotangents):
  """Returns the cotangents of hidden and head, each in the dtype of its input."""
  hidden, head, targets, normaliser, entropy, needed = residuals
  of_logprobs, of_entropy = cotangents
  settings = dataclasses.replace(settings, head_is_frozen=not needed[1])
  if wanted.is_zero(of_entropy):
    # An entropy that is only reported has no gradient.
    settings = dataclasses.replace(settings, with_entropy=False)
    entropy = of_entropy = None
  if wanted.is_zero(of_logprobs):
    of_logprobs = jnp.zeros(hidden.shape[:1], jnp.float32)
  d_hidden, d_head = implementation.gradients(
    settings, hidden, head, targets, None, normaliser, entropy, of_logprobs, of_entropy
  )
  return rounding.written(d_hidden, hidden.dtype), d_head, None


_logprobs.defvjp(_forward, _backward, symbolic_zeros=True)
