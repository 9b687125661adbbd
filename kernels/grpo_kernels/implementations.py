"""Checks which implementations run on which chip; shared by all operations."""

import contextlib
import contextvars
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_kernels import precision


class Chip(NamedTuple):
  """The properties of a device that decide which kernels run on it."""

  platform: str  # "cpu", "gpu" or "tpu".
  kind: str  # name reported by the device, e.g. "NVIDIA H100 80GB HBM3".
  compute_capability: str = ""  # of an NVIDIA GPU, e.g. "9.0".

  def __str__(self) -> str:
    return self.platform if self.platform == "cpu" else f"{self.platform} ({self.kind})"


@dataclasses.dataclass(frozen=True)
class Implementation:
  """The requirements of an implementation; None, "", () or 1 means no requirement."""

  module: str  # module in the operation's package; imported when it is first used.
  platform: str | None = None
  compute_capability: str = ""  # major version, of an NVIDIA GPU.
  generation: str = ""  # name of the chips of that capability.
  dtypes: tuple[str, ...] = ()  # dtypes of the products' factors.
  width_multiple: int = 1  # number that the width must be a multiple of.
  widths: tuple[int, ...] = ()  # widths for which it is written.
  only_exact: bool = False  # whether it has float32 products of the highest precision only.

  def refusal(self, chip: Chip, dtype: Any, width: int | None = None) -> str | None:
    """Returns why it cannot run on a chip, in a dtype or with a width; None if it can."""
    if self.platform is not None and chip.platform != self.platform:
      return f"runs on {self.generation or self.platform}; this process computes on {chip}"
    if self.compute_capability and chip.compute_capability.split(".")[0] != self.compute_capability:
      needed = f"compute capability {self.compute_capability}.x"
      return f"runs on {self.generation} ({needed}); this process computes on {chip}"
    if self.dtypes and jnp.dtype(dtype).name not in self.dtypes:
      return f"computes in {' or '.join(self.dtypes)}, got {jnp.dtype(dtype).name}"
    if self.only_exact and jnp.dtype(dtype) == jnp.float32:
      found = precision.float32_precision()
      if found != jax.lax.Precision.HIGHEST:
        return f"computes float32 products in the highest precision only, got {found.name}"
    if self.widths and width is not None and width not in self.widths:
      return f"needs a width of {' or '.join(map(str, self.widths))}, got {width}"
    return None

  def misfit(self, chip: Chip, dtype: Any, width: int) -> str | None:
    """Returns why it is not chosen automatically; None if it may be."""
    if width % self.width_multiple:
      return f"needs a width that is a multiple of {self.width_multiple}, got {width}"
    return self.refusal(chip, dtype)


def check(
  operation: str,
  known: Mapping[str, Implementation],
  name: str,
  chip: Chip,
  dtype: Any,
  width: int | None = None,
) -> None:
  """Raises an error unless the named implementation exists and can run.

  Args:
    operation: Name of the operation, for errors.
    known: All implementations of the operation, by name.
    name: Name of the implementation.
    chip: Chip that the computation will run on.
    dtype: Dtype of the products' factors.
    width: Width of the factors; None: not known yet.

  Raises:
    ValueError: There is no implementation of that name.
    NotImplementedError: The implementation does not run on this chip, in this dtype, with this
      width or in the precision of `jax.default_matmul_precision`; no other one is used instead.
  """
  if name not in known:
    raise ValueError(f"{operation} has no implementation {name!r}; there are {', '.join(known)}")
  if refusal := known[name].refusal(chip, dtype, width):
    raise NotImplementedError(f"{operation} implementation {name!r} {refusal}")


def chip_of(device: Any) -> Chip:
  """Returns the chip of a `jax.Device`."""
  capability = getattr(device, "compute_capability", "")  # only GPUs have it.
  return Chip(
    "gpu" if device.platform in ("cuda", "rocm") else device.platform,
    device.device_kind,
    str(capability),
  )


_assumed_chip: contextvars.ContextVar[Chip | None] = contextvars.ContextVar(
  "assumed_chip", default=None
)


@contextlib.contextmanager
def assumed_chip(chip: Chip) -> Iterator[None]:
  """Makes `current_chip` return another chip, to trace and compile for one that is not present.

  Args:
    chip: The chip, such as `chip_of` of a device of `jax.experimental.topologies`.
  """
  token = _assumed_chip.set(chip)
  try:
    yield
  finally:
    _assumed_chip.reset(token)


def current_chip() -> Chip:
  """Returns the chip on which this process computes unless a device is named.

  Within `assumed_chip` it is that chip.
  """
  if (assumed := _assumed_chip.get()) is not None:
    return assumed
  default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
  if isinstance(default, str):
    return chip_of(jax.devices(default)[0])
  return chip_of(default if default is not None else jax.devices()[0])


@functools.cache
def log_once(operation: str, message: str) -> None:
  """Logs an automatic choice at INFO, the first time that it is made."""
  logging.getLogger(f"grpo_kernels.{operation}").info(message)
