"""Descriptions of NVIDIA GPUs for XLA's compiler, which asks for no GPU if it has one. Pure.

Values of A100, H100 and H200 are XLA's own (xla/backends/gpu/target_config). It has none of the
others: theirs are NVIDIA's architecture papers (processors, clocks, L2) and the table of compute
capabilities in the CUDA programming guide (shared memory, threads), as CUDA's `deviceQuery` prints.
"""

import dataclasses

_TEXT = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory}
  threads_per_core_limit: {threads}
  core_count: {processors}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""

# Compute capability → of a processor: bytes of shared memory, those of a block, threads, FPUs.
_PROCESSORS = {
  "7.5": (65536, 65536, 1024, 64),
  "8.0": (167936, 166912, 2048, 64),
  "8.9": (102400, 101376, 1536, 128),
  "9.0": (233472, 232448, 2048, 128),
  "12.0": (102400, 101376, 1536, 128),
}


@dataclasses.dataclass(frozen=True)
class GpuTarget:
  """One kind of GPU.

  Attributes:
    name: Name that CUDA reports, and JAX as `device_kind`.
    capability: Compute capability, such as "8.9".
    memory: Bytes that CUDA reports, which are less than those of the data sheet.
    bandwidth: Bytes per second between the GPU and its memory.
    processors: Number of streaming multiprocessors.
    l2: Bytes of the L2 cache.
    clock: Clock in GHz.
  """

  name: str
  capability: str
  memory: int
  bandwidth: int
  processors: int
  l2: int
  clock: float

  @property
  def has_bfloat16(self) -> bool:
    """Whether it multiplies bfloat16, which NVIDIA's GPUs do since compute capability 8.0."""
    return int(self.capability.partition(".")[0]) >= 8

  @property
  def text(self) -> str:
    """The description, in the text form of XLA's `GpuTargetConfigProto`."""
    major, _, minor = self.capability.partition(".")
    shared_memory, optin, threads, fpus = _PROCESSORS[self.capability]
    return _TEXT.format(
      **dataclasses.asdict(self), major=major, minor=minor, shared_memory=shared_memory,
      optin=optin, threads=threads, fpus=fpus,
    )  # fmt: skip


_MIB = 2**20
# Name of a chip → its description.
TARGETS = {
  "t4": GpuTarget("Tesla T4", "7.5", 15637086208, 320000000000, 40, 4 * _MIB, 1.59),
  "l4": GpuTarget("NVIDIA L4", "8.9", 23583784960, 300000000000, 58, 48 * _MIB, 2.04),
  "4090": GpuTarget(
    "NVIDIA GeForce RTX 4090", "8.9", 25250627584, 1008000000000, 128, 72 * _MIB, 2.52
  ),
  "5090": GpuTarget(
    "NVIDIA GeForce RTX 5090", "12.0", 33668988928, 1792000000000, 170, 96 * _MIB, 2.407
  ),
  "a100-40": GpuTarget(
    "NVIDIA A100-SXM4-40GB", "8.0", 42298834944, 1555200000000, 108, 40 * _MIB, 1.41
  ),
  "a100": GpuTarget(
    "NVIDIA A100-SXM4-80GB", "8.0", 85100068864, 2039040000000, 108, 40 * _MIB, 1.41
  ),
  "h100": GpuTarget(
    "NVIDIA H100 80GB HBM3", "9.0", 84978434048, 3352320000000, 132, 50 * _MIB, 1.98
  ),
  "h200": GpuTarget(
    "NVIDIA H200 141GB HBM3e", "9.0", 151397597184, 4800000000000, 132, 50 * _MIB, 1.98
  ),
}
