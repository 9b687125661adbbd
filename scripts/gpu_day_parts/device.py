"""Device, driver, versions; the measured rate of matrix products and of the memory."""

import importlib.metadata
import shutil
import statistics
import subprocess
from typing import Any

from gpu_day_parts import arithmetic, child, running

# Fields of `nvidia-smi --query-gpu`.
_QUERY = (
  *("name", "driver_version", "memory.total", "compute_cap", "power.limit", "temperature.gpu"),
  *("clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "pstate"),
)
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "torch", "liger-kernel")
# Name → dtype and precision of the product.
_PRODUCTS = {
  "bfloat16": ("bfloat16", None),
  'float32, "tensorfloat32"': ("float32", "tensorfloat32"),
  'float32, "float32"': ("float32", "float32"),
  'float32, "default"': ("float32", "default"),
}
_SAMPLES, _LEAST_SAMPLE_S = 5, 0.05


def measure(
  record: child.Record,
  settings: running.Settings,
  *,
  products: list[list[int]],
  copied_mib: int,
) -> None:
  """Measures the rates.

  Args:
    record: Record of the measurements.
    settings: Settings of the day.
    products: Sizes [M, K, N] of matrix products; the first is measured in every precision, the
      others in bfloat16.
    copied_mib: Size of the array that is read and written, in MiB.

  Raises:
    NoAccelerator: JAX computes on a CPU, and the sizes are not tiny.
  """
  record.put(nvidia_smi=nvidia_smi(), versions=versions())
  device = child.open_device(record, settings)
  import jax
  import jax.numpy as jnp

  record.put(
    devices=len(jax.devices()),
    backend=str(getattr(device.client, "platform_version", ""))[:200],
    memory_bytes=(device.memory_stats() or {}).get("bytes_limit"),
    sheet=vars(sheet) if (sheet := arithmetic.data_sheet(device.device_kind)) else None,
  )
  for number, (m, k, n) in enumerate(products):
    for name in _PRODUCTS if number == 0 else ("bfloat16",):
      dtype, precision = _PRODUCTS[name]
      left = jax.random.normal(jax.random.key(0), (m, k), dtype)
      right = jax.random.normal(jax.random.key(1), (k, n), dtype)
      product = jax.jit(lambda a, b, precision=precision: jnp.matmul(a, b, precision=precision))
      seconds = in_a_row(lambda product=product, a=left, b=right: product(a, b))
      tflops = 2e-12 * m * k * n / statistics.median(seconds)
      record.append(
        "products", {"shape": [m, k, n], "name": name, "tflops": tflops, "samples_s": seconds}
      )
  array = jnp.ones((copied_mib, 2**18), jnp.float32)
  size = array.nbytes
  negative = jax.jit(jnp.negative, donate_argnums=0)  # in place, so that many calls need no memory.

  def copy() -> jax.Array:
    nonlocal array
    array = negative(array)
    return array

  rate = 2e-9 * size / statistics.median(in_a_row(copy))
  record.put(copy_gb_per_s=rate, nvidia_smi_after=nvidia_smi())


def in_a_row(call: Any) -> list[float]:
  """Returns samples of the time per call, each over enough calls to hide the start-up."""
  import time

  import jax

  def sample(calls: int) -> float:
    start = time.perf_counter()
    last = None
    for _ in range(calls):
      last = call()
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / calls

  sample(1)
  calls = max(1, round(_LEAST_SAMPLE_S / max(sample(1), 1e-6)))
  return [sample(calls) for _ in range(_SAMPLES)]


def nvidia_smi() -> dict[str, str] | str:
  """Returns what the driver reports about the first GPU, or why it reports nothing."""
  if shutil.which("nvidia-smi") is None:
    return "there is no nvidia-smi here"
  command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
  done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
  if done.returncode:
    return (done.stderr.strip() or done.stdout.strip())[:500]
  values = done.stdout.splitlines()[0].split(", ")
  return dict(zip(_QUERY, values, strict=True))


def versions() -> dict[str, str]:
  """Returns the versions of the packages used for computing."""
  found = {}
  for distribution in importlib.metadata.distributions():
    name = distribution.metadata["Name"].lower()
    if name in _PACKAGES or name.startswith(("jax-cuda", "libtpu", "nvidia-")):
      found[name] = distribution.version
  return dict(sorted(found.items()))
