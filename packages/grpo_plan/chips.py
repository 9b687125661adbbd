"""Chips that a run can be planned for: memory, peak rates, connections, and their sources. Pure.

All rates are vendors' peaks. A plan that uses them is a bound that no program reaches.
"""

import dataclasses

from grpo_jax.compilation import gpu_share
from grpo_plan.gpu_targets import TARGETS

GIB = 2**30


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
_BY_JAX = "{:.0%} of the memory that CUDA reports: {}"
_OF_TPUS = "cloud.google.com/tpu/docs/{} (link: half of the bidirectional ICI figure; network: {})"
_SIX = "float32: a sixth of bfloat16, since a product in full precision takes six bfloat16 passes"
_OF_GPUS = (
  "NVIDIA's data sheet of the {}, dense products, bfloat16 summed in float32 (link: half of the"
  " bidirectional {}; network: {} a GPU, one way, {})"
)
_NODE, _PC = "of a usual node of eight", "assumed: 10 Gb/s Ethernet, as on a desktop"
_NO_BFLOAT16 = (
  "; it has no bfloat16 units: products of bfloat16 run as float32, and the 65 TFLOP/s of the data"
  " sheet are float16, which grpo_jax does not use"
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


def _gpu(name: str, sheet: str, peaks: tuple[float, float], rates: tuple[float, float, float],
         link: str = "NVLink figure", network: str = _NODE) -> Chip:  # fmt: skip
  target = TARGETS[name]
  sources = _OF_GPUS.format(sheet, link, f"{rates[2] * 8 / 1e9:g} Gb/s", network)
  return Chip(
    name,
    "gpu",
    target.memory,
    int(gpu_share.ALONE * target.memory),
    _BY_JAX.format(gpu_share.ALONE, "what a run takes"),
    *peaks,
    *rates,
    sources=sources if target.has_bfloat16 else sources + _NO_BFLOAT16,
    target=target.text,
  )


CHIPS = {
  chip.name: chip
  for chip in (
    _tpu("v4", 32 * 10**9, 30.75, 275e12, (1.2e12, 300e9, 6.25e9), "50 Gb/s, as for v5p"),
    _tpu("v5e", 16 * 10**9, 15.75, 197e12, (819e9, 200e9, 3.125e9), "6.4 Tb/s a pod of 256"),
    _tpu("v5p", 95 * GIB, 95.73, 459e12, (2.765e12, 600e9, 6.25e9), "50 Gb/s a chip"),
    _tpu("v6e", 32 * 10**9, 31.24, 918e12, (1.64e12, 400e9, 12.5e9), "25.6 Tb/s a pod of 256"),
    _gpu("t4", "T4", (8.1e12, 8.1e12), (320e9, 16e9, 1.5625e9), "PCIe 3.0 x16 figure",
         "an eighth of a node's 100 Gb/s"),
    _gpu("l4", "L4", (121e12, 30.3e12), (300e9, 32e9, 1.5625e9), "PCIe 4.0 x16 figure",
         "an eighth of a node's 100 Gb/s"),
    _gpu("4090", "GeForce RTX 4090", (165.2e12, 82.6e12), (1.008e12, 32e9, 1.25e9),
         "PCIe 4.0 x16 figure", _PC),
    _gpu("5090", "GeForce RTX 5090", (209.5e12, 104.8e12), (1.792e12, 64e9, 1.25e9),
         "PCIe 5.0 x16 figure", _PC),
    _gpu("a100-40", "A100 40 GB SXM", (312e12, 19.5e12), (1.555e12, 300e9, 25e9)),
    _gpu("a100", "A100 80 GB SXM", (312e12, 19.5e12), (2.039e12, 300e9, 25e9)),
    _gpu("h100", "H100 SXM", (989e12, 67e12), (3.35e12, 450e9, 50e9)),
    _gpu("h200", "H200 SXM", (989e12, 67e12), (4.8e12, 450e9, 50e9)),
  )
}  # fmt: skip

# Name that JAX or nvidia-smi gives a device → chip. A laptop's RTX 4090 and a part of an H100 (MIG)
# have longer names and are other chips.
KINDS = {
  **{target.name: name for name, target in TARGETS.items() if name != "h200"},
  "NVIDIA H200": "h200",
  "TPU v4": "v4",
  "TPU v5 lite": "v5e",
  "TPU v5e": "v5e",
  "TPU v5": "v5p",
  "TPU v5p": "v5p",
  "TPU v6 lite": "v6e",
  "TPU v6e": "v6e",
}


def in_run(chip: Chip, engine: str) -> Chip:
  """Returns a chip with the memory that JAX takes of it in a run.

  Args:
    chip: The chip.
    engine: `engine.name` of the run.

  Raises:
    ValueError: The environment has a share of the memory that is not one.
  """
  if chip.platform != "gpu":
    return chip
  share = gpu_share.of_run(engine)
  origin = _BY_JAX.format(share, gpu_share.origin(engine))
  return dataclasses.replace(chip, usable=int(share * chip.memory), of_usable=origin)


def of_kind(kind: str) -> Chip | None:
  """Returns the chip of a device; None if it is not in the table.

  Args:
    kind: Name of the device that JAX (`device_kind`) or nvidia-smi reports.
  """
  name = kind.strip()
  return CHIPS[KINDS[name]] if name in KINDS else None


def cpu(memory: int) -> Chip:
  """Returns one of the simulated devices of a CPU, whose rates are not known.

  Args:
    memory: Bytes of the machine's memory that fall to one device.
  """
  return Chip("cpu", "cpu", memory, memory, "this machine's memory, divided by the devices")
