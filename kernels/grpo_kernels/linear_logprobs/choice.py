"""The requirements of each implementation, and the automatic choice with its reason."""

import importlib
from typing import Any

from grpo_kernels import implementations
from grpo_kernels.implementations import Chip, Implementation, chip_of, current_chip

__all__ = ["IMPLEMENTATIONS", "Chip", "Implementation", "chip_of", "current_chip", "pick"]

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

# Platform → the kernel that is used there if it fits; otherwise xla_chunked is.
KERNELS: dict[str, str] = {"gpu": "mosaic_gpu", "tpu": "pallas_tpu"}
# Platform → the kernel that computes the numerators of `token_local`.
SWEEPS: dict[str, str] = {"gpu": "mosaic_gpu", "tpu": "pallas_tpu"}


def pick(name: str | None, chip: Chip, *, dtype: Any, width: int) -> Any:
  """Returns the module of the named implementation, or of the one chosen automatically.

  Args:
    name: Key of `IMPLEMENTATIONS`; None: chosen automatically.
    chip: Chip that the computation will run on.
    dtype: Dtype of the hidden states.
    width: Width D of the hidden states.

  Raises:
    ValueError: There is no implementation of that name.
    NotImplementedError: The implementation does not run on this chip, in this dtype or in the
      precision of `jax.default_matmul_precision`; no other implementation is used instead.
  """
  if name is None:
    name, reason = default(chip, dtype, width)
    implementations.log_once("linear_logprobs", f"linear_logprobs on {chip}: {name}{reason}")
  else:
    implementations.check("linear_logprobs", IMPLEMENTATIONS, name, chip, dtype)
  return load(name)


def default(chip: Chip, dtype: Any, width: int) -> tuple[str, str]:
  """Returns the implementation that is chosen automatically, and why it is not a kernel."""
  kernel = KERNELS.get(chip.platform)
  if kernel is None:
    return "xla_chunked", ""
  if misfit := IMPLEMENTATIONS[kernel].misfit(chip, dtype, width):
    return "xla_chunked", f", for {kernel} {misfit}"
  return kernel, ""


def pick_sweep(
  name: str | None,
  chip: Chip,
  *,
  dtype: Any,
  width: int,
  columns: int,
  head_layout: str,
) -> Any:
  """Returns the module whose `numerators` a sweep of `token_local` uses; None: plain XLA.

  Args:
    name: Value of `SWEEPS`, or "xla_chunked" for plain XLA; None: chosen automatically.
    chip: Chip that the computation will run on.
    dtype: Dtype of the hidden states.
    width: Width D of the hidden states.
    columns: Columns of the head on each device.
    head_layout: Layout of the head.

  Raises:
    ValueError: No sweep has that name.
    NotImplementedError: The named kernel does not run on this chip, or not with these arguments.
  """
  known = ("xla_chunked", *SWEEPS.values())
  if name is not None and name not in known:
    raise ValueError(f"a sweep has no implementation {name!r}; there are {', '.join(known)}")
  kernel = name or SWEEPS.get(chip.platform, "xla_chunked")
  reason = ""
  if kernel != "xla_chunked":
    misfit = IMPLEMENTATIONS[kernel].misfit(chip, dtype, width) or load(
      kernel
    ).misfit_of_numerators(chip, dtype=dtype, width=width, columns=columns, head_layout=head_layout)
    if misfit and name is not None:
      raise NotImplementedError(f"linear_objective implementation {name!r} {misfit}")
    if misfit:
      kernel, reason = "xla_chunked", f", for {kernel} {misfit}"
  if name is None:
    of = "plain XLA" if kernel == "xla_chunked" else kernel
    implementations.log_once("linear_logprobs", f"linear_objective on {chip}: {of}{reason}")
  return None if kernel == "xla_chunked" else load(kernel)


def load(name: str) -> Any:
  """Imports an implementation's module; nothing else imports Pallas."""
  return importlib.import_module(f"grpo_kernels.linear_logprobs.{IMPLEMENTATIONS[name].module}")
