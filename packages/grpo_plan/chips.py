"""Chips that a run can be planned for: memory, peak rates, connections, and their sources. Pure.

All rates are vendors' peaks. A plan that uses them is a bound that no program reaches.
"""

import dataclasses

GIB = 2**30

# What XLA queries from a GPU. Values: XLA's own specifications (xla/backends/gpu/target_config).
_GPU_TEXT = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} minor: 0 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""


def _hopper(name: str, *, memory: int, bandwidth: int) -> str:
  sizes = {"shared_memory": 233472, "optin": 232448, "l2": 52428800, "cores": 132, "fpus": 128}
  return _GPU_TEXT.format(
    name=name, memory=memory, bandwidth=bandwidth, clock=1.98, major=9, **sizes
  )


_AMPERE = _GPU_TEXT.format(
  name="NVIDIA A100-SXM4-80GB",
  memory=85100068864,
  bandwidth=2039040000000,
  clock=1.41,
  major=8,
  shared_memory=167936,
  optin=166912,
  l2=41943040,
  cores=108,
  fpus=64,
)


@dataclasses.dataclass(frozen=True)
class Chip:
  """One kind of chip.

  Attributes:
    name: Name in topologies, such as "v5e".
    platform: "tpu", "gpu" or "cpu".
    memory: Bytes of memory by the vendor.
    usable: Bytes available to a program.
    of_usable: Origin of `usable`.
    bfloat16: Peak operations per second with bfloat16 factors; 0: not known.
    float32: Peak operations per second with float32 factors in full precision; 0: not known.
    bandwidth: Peak bytes per second between the chip and its memory; 0: not known.
    link: Peak bytes per second that a chip receives from chips of its slice or node; 0: not known.
    network: Peak bytes per second that a chip receives from other slices or nodes; 0: not known.
    sources: Origin of the rates.
    target: Description of a GPU for XLA; "": none is needed.
  """

  name: str
  platform: str
  memory: int
  usable: int
  of_usable: str
  bfloat16: float = 0.0
  float32: float = 0.0
  bandwidth: float = 0.0
  link: float = 0.0
  network: float = 0.0
  sources: str = ""
  target: str = ""


_BY_COMPILER = "the limit of the TPU compiler of libtpu 0.0.48.1"
_BY_JAX = "92 % of the memory that CUDA reports (XLA_PYTHON_CLIENT_MEM_FRACTION=.92)"
_OF_TPUS = "cloud.google.com/tpu/docs/{} (link: half of the bidirectional ICI figure; network: {})"
_SIX = "float32: a sixth of bfloat16, since a product in full precision takes six bfloat16 passes"
_OF_GPUS = (
  "NVIDIA's data sheet of the {}, dense products (link: half of the bidirectional NVLink figure;"
  " network: {} a GPU, one way, of a usual node of eight)"
)


def _tpu(name: str, memory: int, usable: float, peak: float, rates: tuple[float, float, float],
         network: str) -> Chip:  # fmt: skip
  return Chip(
    name,
    "tpu",
    memory,
    int(usable * GIB),
    _BY_COMPILER,
    peak,
    peak / 6,
    *rates,
    sources=f"{_OF_TPUS.format(name, network)}; {_SIX}",
  )


def _gpu(name: str, sheet: str, memory: int, peaks: tuple[float, float],
         rates: tuple[float, float, float], target: str) -> Chip:  # fmt: skip
  return Chip(
    name,
    "gpu",
    memory,
    int(0.92 * memory),
    _BY_JAX,
    *peaks,
    *rates,
    sources=_OF_GPUS.format(sheet, f"{rates[2] * 8 / 1e9:g} Gb/s"),
    target=target,
  )


# What CUDA reports of a chip's memory is less than the data sheet's figure.
_H100_MEMORY, _H200_MEMORY, _A100_MEMORY = 84978434048, 151397597184, 85100068864

CHIPS = {
  chip.name: chip
  for chip in (
    _tpu("v4", 32 * 10**9, 30.75, 275e12, (1.2e12, 300e9, 6.25e9), "50 Gb/s, as for v5p"),
    _tpu("v5e", 16 * 10**9, 15.75, 197e12, (819e9, 200e9, 3.125e9), "6.4 Tb/s a pod of 256"),
    _tpu("v5p", 95 * GIB, 95.73, 459e12, (2.765e12, 600e9, 6.25e9), "50 Gb/s a chip"),
    _tpu("v6e", 32 * 10**9, 31.24, 918e12, (1.64e12, 400e9, 12.5e9), "25.6 Tb/s a pod of 256"),
    _gpu("a100", "A100 80 GB SXM", _A100_MEMORY, (312e12, 19.5e12),
         (2.039e12, 300e9, 25e9), _AMPERE),
    _gpu("h100", "H100 SXM", _H100_MEMORY, (989e12, 67e12), (3.35e12, 450e9, 50e9),
         _hopper("NVIDIA H100 80GB HBM3", memory=_H100_MEMORY, bandwidth=3352320000000)),
    _gpu("h200", "H200 SXM", _H200_MEMORY, (989e12, 67e12), (4.8e12, 450e9, 50e9),
         _hopper("NVIDIA H200 141GB HBM3e", memory=_H200_MEMORY, bandwidth=4800000000000)),
  )
}  # fmt: skip


def cpu(memory: int) -> Chip:
  """Returns one of the simulated devices of a CPU, whose rates are not known.

  Args:
    memory: Bytes of the machine's memory that fall to one device.
  """
  return Chip("cpu", "cpu", memory, memory, "this machine's memory, divided by the devices")
