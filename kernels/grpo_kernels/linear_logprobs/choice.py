"""Which implementation runs where, which one is taken when none is named, and why."""

import dataclasses
import functools
import importlib
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_kernels.linear_logprobs import reference


class Chip(NamedTuple):
  """What of a device decides which kernels run on it."""

  platform: str  # "cpu", "gpu" or "tpu".
  kind: str  # as the device calls itself, e.g. "NVIDIA H100 80GB HBM3".
  compute_capability: str = ""  # of an NVIDIA GPU, e.g. "9.0".

  def __str__(self) -> str:
    return self.platform if self.platform == "cpu" else f"{self.platform} ({self.kind})"


@dataclasses.dataclass(frozen=True)
class Implementation:
  """What one implementation can take; None or 1: anything."""

  module: str  # of this package; imported when it is first taken.
  platform: str | None = None
  compute_capability: str = ""  # major version, of an NVIDIA GPU.
  generation: str = ""  # what chips of that capability are called.
  dtypes: tuple[str, ...] = ()  # of hidden.
  width_multiple: int = 1  # D must be a multiple of it.
  only_exact: bool = False  # float32 products in the highest precision only.

  def refusal(self, chip: Chip, dtype: Any) -> str | None:
    """Returns what it needs and what came, where it cannot run on a chip or in a dtype."""
    if self.platform is not None and chip.platform != self.platform:
      return f"runs on {self.generation or self.platform}; this process computes on {chip}"
    if self.compute_capability and chip.compute_capability.split(".")[0] != self.compute_capability:
      needed = f"compute capability {self.compute_capability}.x"
      return f"runs on {self.generation} ({needed}); this process computes on {chip}"
    if self.dtypes and jnp.dtype(dtype).name not in self.dtypes:
      return f"takes hidden states in {' or '.join(self.dtypes)}, got {jnp.dtype(dtype).name}"
    if self.only_exact and jnp.dtype(dtype) == jnp.float32:
      precision = reference.float32_precision()
      if precision != jax.lax.Precision.HIGHEST:
        return f"computes float32 products in the highest precision only, got {precision.name}"
    return None

  def misfit(self, chip: Chip, dtype: Any, width: int) -> str | None:
    """Returns why it is not to be taken by default; None if it may be."""
    if width % self.width_multiple:
      return f"needs a width that is a multiple of {self.width_multiple}, got {width}"
    return self.refusal(chip, dtype)


IMPLEMENTATIONS: dict[str, Implementation] = {
  "reference": Implementation("reference"),
  "xla_chunked": Implementation("xla_chunked"),
  "mosaic_gpu": Implementation(
    "mosaic_gpu",
    platform="gpu",
    compute_capability="9",
    generation="NVIDIA GPUs of the Hopper generation",
    dtypes=("bfloat16",),
    width_multiple=64,
  ),
  "pallas_tpu": Implementation(
    "pallas_tpu", platform="tpu", dtypes=("bfloat16", "float32"), only_exact=True
  ),
}

# Platform → the kernel that is taken if it fits. Everywhere else, and if not: xla_chunked.
KERNELS: dict[str, str] = {"gpu": "mosaic_gpu", "tpu": "pallas_tpu"}


def chip_of(device: Any) -> Chip:
  """Returns what of a `jax.Device` decides."""
  capability = getattr(device, "compute_capability", "")  # GPUs have it, others do not.
  return Chip(
    "gpu" if device.platform in ("cuda", "rocm") else device.platform,
    device.device_kind,
    str(capability),
  )


def current_chip() -> Chip:
  """Returns the chip that a computation of this process lands on, unless it is told otherwise."""
  default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
  if isinstance(default, str):
    return chip_of(jax.devices(default)[0])
  return chip_of(default if default is not None else jax.devices()[0])


def pick(name: str | None, chip: Chip, *, dtype: Any, width: int) -> Any:
  """Returns the module of the named implementation, or of the default one.

  Args:
    name: of `IMPLEMENTATIONS`; None picks.
    chip: what the computation will run on.
    dtype: of hidden.
    width: D.

  Raises:
    ValueError: there is none of that name.
    NotImplementedError: it does not run on this chip, in this dtype or in the precision of
      `jax.default_matmul_precision`; nothing else is taken in its place.
  """
  if name is None:
    name, reason = default(chip, dtype, width)
    _tell_once(f"linear_logprobs on {chip}: {name}{reason}")
  elif name not in IMPLEMENTATIONS:
    known = ", ".join(IMPLEMENTATIONS)
    raise ValueError(f"linear_logprobs has no implementation {name!r}; there are {known}")
  elif refusal := IMPLEMENTATIONS[name].refusal(chip, dtype):
    raise NotImplementedError(f"linear_logprobs implementation {name!r} {refusal}")
  return load(name)


def default(chip: Chip, dtype: Any, width: int) -> tuple[str, str]:
  """Returns the name of the implementation taken when none is named, and why it is no kernel."""
  kernel = KERNELS.get(chip.platform)
  if kernel is None:
    return "xla_chunked", ""
  if misfit := IMPLEMENTATIONS[kernel].misfit(chip, dtype, width):
    return "xla_chunked", f", for {kernel} {misfit}"
  return kernel, ""


def load(name: str) -> Any:
  """Imports an implementation's module; Pallas is imported by no other way."""
  return importlib.import_module(f"grpo_kernels.linear_logprobs.{IMPLEMENTATIONS[name].module}")


@functools.cache
def _tell_once(message: str) -> None:
  logging.getLogger("grpo_kernels.linear_logprobs").info(message)
