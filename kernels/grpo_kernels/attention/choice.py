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

# Platform → the kernel that is used there if it fits; otherwise xla_blocked is.
KERNELS: dict[str, str] = {"gpu": "mosaic_gpu", "tpu": "pallas_tpu"}


def pick(
  name: str | None,
  chip: Chip,
  *,
  dtype: Any,
  width: int | None = None,
) -> Any:
  """Returns the module of the named implementation, or of the one chosen automatically.

  Args:
    name: Key of `IMPLEMENTATIONS`; None: chosen automatically.
    chip: Chip that the computation will run on.
    dtype: Dtype of the products' factors.
    width: Width E of a head; None: not known yet.

  Raises:
    ValueError: There is no implementation of that name.
    NotImplementedError: The implementation does not run on this chip, in this dtype or with heads
      of this width; no other implementation is used instead.
  """
  if name is None:
    name, reason = default(chip, dtype, width)
    if width is not None:  # else a head of another width may turn out not to fit.
      implementations.log_once("attention", f"attention on {chip}: {name}{reason}")
  else:
    implementations.check("attention", IMPLEMENTATIONS, name, chip, dtype, width)
  return importlib.import_module(f"grpo_kernels.attention.{IMPLEMENTATIONS[name].module}")


def default(chip: Chip, dtype: Any, width: int | None) -> tuple[str, str]:
  """Returns the implementation that is chosen automatically, and why it is not a kernel."""
  kernel = KERNELS.get(chip.platform)
  if kernel is None:
    return "xla_blocked", ""
  if refusal := IMPLEMENTATIONS[kernel].refusal(chip, dtype, width):
    return "xla_blocked", f", for {kernel} {refusal}"
  return kernel, ""
