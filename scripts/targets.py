"""Chips for which XLA can compile without the chip, and the memory of a program on them."""

from typing import Any

import jax
from jax.experimental import topologies

GIB = 2**30

# What XLA queries from a device; an H100 SXM with 80 GB.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# Usable bytes. TPUs: as reported by their compiler. H100: what XLA preallocates of 79.1 GiB with
# XLA_PYTHON_CLIENT_MEM_FRACTION=.92.
_USABLE = {"h100": 72.8 * GIB, "v5e": 15.75 * GIB, "v6e": 31.25 * GIB}


def devices(target: str, count: int | None = None) -> list[Any]:
  """Returns devices of a machine that is not present.

  Args:
    target: "h100", a TPU slice such as "v5e:2x2", or "cpu": simulated devices of this machine.
    count: Number of devices; None: one H100 or CPU, or all of a slice.
  """
  if target == "cpu":
    jax.config.update("jax_num_cpu_devices", count or 1)
    return jax.devices()[: count or 1]
  if target == "h100":
    topology = topologies.get_topology_desc(
      "h100", platform="cuda", target_config=H100, topology=f"1x1x{count or 1}"
    )
  else:
    topology = topologies.get_topology_desc(target, platform="tpu")
  return list(topology.devices)[: count or None]


def usable_bytes(target: str) -> int | None:
  """Returns the bytes of a chip's memory available to a program; None if unknown."""
  size = _USABLE.get(target.partition(":")[0])
  return None if size is None else int(size)
