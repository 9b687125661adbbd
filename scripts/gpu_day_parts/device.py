"""Device, driver, versions; the measured rate of matrix products and of the memory."""

import shutil
import statistics
import subprocess

import record as packages

from gpu_day_parts import child, running, work
from grpo_plan import chips

# Fields of `nvidia-smi --query-gpu`.
_QUERY = (
  *("name", "driver_version", "memory.total", "compute_cap", "power.limit", "temperature.gpu"),
  *("clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "pstate"),
)
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "torch")
# Name → dtype and precision of the product.
_PRODUCTS = {
  "bfloat16": ("bfloat16", None),
  'float32, "tensorfloat32"': ("float32", "tensorfloat32"),
  'float32, "float32"': ("float32", "float32"),
}


TITLE = "device, driver, rates of a matrix product and of the memory"
LIMIT_S = 60.0
SIZES = {"product": 8192, "copied_mib": 2048, "rounds": 5}
TINY = {"product": 128, "copied_mib": 1, "rounds": 2}


def measure(record: child.Record, settings: running.Settings) -> None:
  """Measures the rates.

  Raises:
    NoAccelerator: JAX computes on a CPU, and the sizes are not tiny.
  """
  record.put(nvidia_smi=nvidia_smi(), versions=packages.versions(*_PACKAGES))
  device = child.open_device(record, settings)
  sizes = settings.sizes(SIZES, TINY)
  import head_variants
  import jax
  import jax.numpy as jnp
  import linear_logprobs as benchmark

  sheet = chips.of_kind(device.device_kind)
  record.put(
    memory_bytes=(device.memory_stats() or {}).get("bytes_limit"), devices=len(jax.devices())
  )

  def timer(dtype: str, precision: str | None):
    made = head_variants.make_matmul(sizes.product, dtype)

    def seconds(calls: int) -> float:
      with jax.default_matmul_precision(precision):
        return made(calls)

    return seconds

  array = jnp.ones((sizes.copied_mib, 2**18), jnp.float32)
  negative = jax.jit(jnp.negative, donate_argnums=0)  # in place, so that many calls need no memory.

  def copy() -> jax.Array:
    nonlocal array
    array = negative(array)
    return array

  timers = {name: timer(*options) for name, options in _PRODUCTS.items()}
  timers["copy"] = lambda calls: head_variants.seconds_per_call(copy, calls)
  samples = benchmark.take_turns(timers, sizes.rounds)
  tflops = {name: 2e-12 * sizes.product**3 / statistics.median(samples[name]) for name in _PRODUCTS}
  copied = 2e-9 * array.nbytes / statistics.median(samples["copy"])
  record.put(
    samples_s=samples,
    tflops=tflops,
    copy_gb_per_s=copied,
    nvidia_smi_after=nvidia_smi(),
    headline=f"{device.device_kind}: {sizes.product}³ in bfloat16 {tflops['bfloat16']:.3g} TFLOP/s"
    f" ({work.percent(sheet and 1e12 * tflops['bfloat16'] / sheet.bfloat16)} of the data sheet),"
    f" memory {copied:.4g} GB/s ({work.percent(sheet and 1e9 * copied / sheet.bandwidth)})",
  )


def nvidia_smi() -> str:
  """Returns what the driver reports about the GPUs, as CSV, or why it reports nothing."""
  if shutil.which("nvidia-smi") is None:
    return "there is no nvidia-smi here"
  command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv"]
  done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
  return (done.stdout + done.stderr).strip()[:1000]
