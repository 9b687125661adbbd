"""Logprobs of given tokens under a linear head, without the logits of a whole batch.

`linear_logprobs` is the entry; `reference` says what is computed. An
implementation is a module with a function of the reference's name and
arguments, entered in `IMPLEMENTATIONS`.
"""

import functools
import logging
from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from grpo_kernels.linear_logprobs import reference, xla_chunked


def linear_logprobs(
  hidden: Float[Array, "N D"],
  head: Float[Array, "_ _"],
  targets: Int[Array, " N"],
  *,
  head_layout: str = "vd",
  temperature: float = 1.0,
  return_entropy: bool = False,
  implementation: str | None = None,
) -> Float[Array, " N"] | tuple[Float[Array, " N"], Float[Array, " N"]]:
  """Returns the log-probability of each target under softmax(hidden · head / τ), at most 0.

      zᵥ = (h · Wᵥ) / τ      log p(t) = z_t - log Σᵥ exp zᵥ      H = -Σᵥ pᵥ log pᵥ

  Differentiable in `hidden` and `head`, through logprobs and entropy. Dots run
  in the dtype of `hidden` and accumulate in float32.

  Args:
    hidden: what the final norm gave for the token *before* each target; N may be 0.
    head: [V D] or [D V], as `head_layout` says; any V. Its gradient has its dtype.
    targets: token ids in [0, V); any other gives NaN.
    head_layout: "vd" for [V D] (a tied embedding), "dv" for [D V].
    temperature: τ > 0, divides the logits.
    return_entropy: also return H of the tempered distribution.
    implementation: a name of `IMPLEMENTATIONS`; None picks by platform.

  Returns:
    Logprobs in nats, float32; with `return_entropy`, the pair (logprobs, entropy), both in nats.

  Raises:
    ValueError: shapes, layout or temperature make no sense, or there is no such implementation.
    NotImplementedError: the named implementation cannot run on this platform.
  """
  if head_layout not in reference.HEAD_AXIS_OF_WIDTH:
    raise ValueError(f"head_layout must be 'vd' or 'dv', got {head_layout!r}")
  if not temperature > 0:
    raise ValueError(f"temperature must be above 0, got {temperature}")
  width = head.shape[reference.HEAD_AXIS_OF_WIDTH[head_layout]]
  if width != hidden.shape[1]:
    raise ValueError(
      f"hidden has width {hidden.shape[1]}, the head of shape {head.shape} in layout"
      f" {head_layout!r} has width {width}"
    )
  platform = jax.default_backend()
  name = implementation or default_implementation(platform)
  return resolve(name, platform)(
    hidden,
    head,
    targets,
    head_layout=head_layout,
    temperature=float(temperature),
    return_entropy=return_entropy,
  )


def resolve(name: str, platform: str) -> Callable:
  """Returns the named implementation.

  Raises:
    ValueError: there is none of that name.
    NotImplementedError: it does not run on `platform`; nothing else is taken in its place.
  """
  if name not in IMPLEMENTATIONS:
    raise ValueError(
      f"linear_logprobs has no implementation {name!r}; there are {', '.join(IMPLEMENTATIONS)}"
    )
  function, platforms = IMPLEMENTATIONS[name]
  if platforms is not None and platform not in platforms:
    raise NotImplementedError(
      f"linear_logprobs implementation {name!r} runs on {', '.join(platforms)};"
      f" this process computes on {platform}"
    )
  return function


@functools.cache
def default_implementation(platform: str) -> str:
  """Returns the implementation taken on `platform` when none is named; logs it once."""
  name = DEFAULTS.get(platform, "xla_chunked")
  logging.getLogger(__name__).info("linear_logprobs on %s: %s", platform, name)
  return name


# Name → (function, platforms on which it runs; None: all).
IMPLEMENTATIONS: dict[str, tuple[Callable, tuple[str, ...] | None]] = {
  "reference": (reference.linear_logprobs, None),
  "xla_chunked": (xla_chunked.linear_logprobs, None),
}

# Platform → name; "xla_chunked" where a platform is not listed.
DEFAULTS: dict[str, str] = {}
