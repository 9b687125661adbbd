"""The requirements of each implementation, and the automatic choice with its reason."""

import importlib
from typing import Any

from grpo_kernels import implementations
from grpo_kernels.implementations import Chip, Implementation, chip_of, current_chip

__all__ = ["IMPLEMENTATIONS", "Chip", "Implementation", "chip_of", "current_chip", "pick"]

IMPLEMENTATIONS: dict[str, Implementation] = {
  "reference": Implementation("reference"),
  "xla_blocked": Implementation("xla_blocked"),
  "mosaic_gpu": Implementation(
    "mosaic_gpu",
    platform="gpu",
    compute_capability="9",
    generation="NVIDIA GPUs of the Hopper generation",
    dtypes=("bfloat16",),
    widths=(64, 128),
  ),
  "pallas_tpu": Implementation(
    "pallas_tpu",
    platform="tpu",
    dtypes=("bfloat16", "float32"),
    widths=(64, 128, 256),
    only_exact=True,
  ),
}

# Those that take rows dealt out in parts, in which queries are not in the order of their keys.
OF_PARTS = ("reference", "xla_blocked", "pallas_tpu")
_NOT_OF_PARTS = (
  f"takes whole rows, and these are divided over devices, as {', '.join(OF_PARTS)} take them"
)

# Platform → the kernel that is used there if it fits; otherwise xla_blocked is.
KERNELS: dict[str, str] = {"gpu": "mosaic_gpu", "tpu": "pallas_tpu"}


def pick(
  name: str | None,
  chip: Chip,
  *,
  dtype: Any,
  width: int | None = None,
  in_parts: bool = False,
) -> Any:
  """Returns the module of the named implementation, or of the one chosen automatically.

  Args:
    name: Key of `IMPLEMENTATIONS`; None: chosen automatically.
    chip: Chip that the computation will run on.
    dtype: Dtype of the products' factors.
    width: Width E of a head; None: not known yet.
    in_parts: Whether rows are dealt out in parts.

  Raises:
    ValueError: There is no implementation of that name.
    NotImplementedError: The implementation does not run on this chip, in this dtype, with heads of
      this width or with rows in parts; no other implementation is used instead.
  """
  if name is None:
    name, reason = default(chip, dtype, width, in_parts)
    if width is not None:  # else a head of another width may turn out not to fit.
      implementations.log_once("attention", f"attention on {chip}: {name}{reason}")
  else:
    implementations.check("attention", IMPLEMENTATIONS, name, chip, dtype, width)
    if in_parts and name not in OF_PARTS:
      raise NotImplementedError(f"attention implementation {name!r} {_NOT_OF_PARTS}")
  return importlib.import_module(f"grpo_kernels.attention.{IMPLEMENTATIONS[name].module}")


def default(chip: Chip, dtype: Any, width: int | None, in_parts: bool = False) -> tuple[str, str]:
  """Returns the implementation that is chosen automatically, and why it is not a kernel."""
  kernel = KERNELS.get(chip.platform)
  if kernel is None:
    return "xla_blocked", ""
  if refusal := IMPLEMENTATIONS[kernel].refusal(chip, dtype, width):
    return "xla_blocked", f", for {kernel} {refusal}"
  if in_parts and kernel not in OF_PARTS:
    return "xla_blocked", f", for {kernel} {_NOT_OF_PARTS}"
  return kernel, ""
