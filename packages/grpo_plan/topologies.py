"""Machines by name, such as "v5e-16" or "2xh100:8", and their devices without the machines.

A TPU's name is Google's: "v5e-16" has 16 chips, and "v5p-16" has 16 TensorCores, which are 8 chips.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from grpo_jax.config.configuration import ConfigError
from grpo_jax.values import names
from grpo_plan import chips
from grpo_plan.chips import CHIPS, Chip

_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8",
          256: "4x8x8", 512: "8x8x8", 1024: "8x8x16", 2048: "8x16x16"}  # fmt: skip

# TPU generation → chips → shape of the slice.
SHAPES = {"v4": _CUBES, "v5e": _FLAT, "v5p": _CUBES, "v6e": _FLAT}
_CORES = {"v4": 2, "v5p": 2}  # TensorCores of a chip, by which Google names slices.
# What people write for a chip, without hyphens in the names of GPUs.
_ALIASES = {
  "v5litepod": "v5e",
  "v5lite": "v5e",
  "rtx4090": "4090",
  "rtx5090": "5090",
  "a10040": "a100-40",
  "a10040gb": "a100-40",
  "a10080": "a100",
  "a10080gb": "a100",
}
MOST_GPUS = 8  # GPUs of a node.
_MOST_DEVICES = 1 << 14
_MOST_CPUS = 256  # simulated devices, each with threads of its own.

_NAME = re.compile(
  r"(?:(?P<count>\d+)x)?(?P<kind>a100-[48]0(?:gb)?|(?:rtx-?)?[45]090|[a-z][a-z0-9]*?)"
  r"(?:(?P<mark>[-:])(?P<size>[\dx]+))?",
  re.IGNORECASE,
)

# JAX's names for what installs a compiler, and the module that shows that it is installed.
_NEEDS = {
  "tpu": ("libtpu", "plan-tpu", "0.3 GB"),
  "gpu": ("jax_cuda12_plugin jax_cuda13_plugin", "plan-cuda", "1.1 GB"),
}


class PlanError(ConfigError):
  """A plan cannot be made: a name is wrong, or a compiler is not installed."""


@dataclasses.dataclass(frozen=True)
class Topology:
  """Machines that a run can be planned for.

  Attributes:
    name: Name, such as "v5e-16".
    chip: The kind of chip.
    devices: Devices as JAX counts them.
    hosts: Machines, each of which has a process of the run.
    slices: Groups of chips that are connected more slowly with each other: TPU slices, GPU nodes.
    shape: Shape of a TPU slice, such as "4x4"; "": it has none.
  """

  name: str
  chip: Chip
  devices: int
  hosts: int = 1
  slices: int = 1
  shape: str = ""

  @property
  def per_host(self) -> int:
    """Devices of one host."""
    return self.devices // self.hosts

  def __str__(self) -> str:
    each = f", {self.hosts} hosts of {self.per_host}" if self.hosts > 1 else ", one host"
    shape = f" ({self.shape})" if self.shape else ""
    return f"{self.name}: {self.devices} × {self.chip.name}{shape}{each}"


def valid() -> list[str]:
  """Returns the names of TPU slices, and examples of names of GPUs."""
  slices = [f"{kind}-{count * _CORES.get(kind, 1)}" for kind, of in SHAPES.items() for count in of]
  counts = [1, 2, 4, MOST_GPUS]
  gpus = [f"{name}:{n}" for name, chip in CHIPS.items() if chip.platform == "gpu" for n in counts]
  several = [f"2x{name}" for name in gpus if name.endswith(f":{MOST_GPUS}")]
  return [*slices, *gpus, *several, "cpu:8"]


def parse(name: str) -> Topology:
  """Returns the machine of a name.

  Args:
    name: "v5e-16", "v5p-8" (in TensorCores, as Google counts), "2xv5e-16" (two slices), "v5e:4x4"
      (by its shape), "h100:8", "4090" (one of them), "a100-40:8" (of 40 GB), "2xh100:8" (two
      nodes), or "cpu:8" (simulated devices).

  Raises:
    PlanError: There is no such machine; the message names the nearest ones.
  """
  given = name.strip()
  match = _NAME.fullmatch(given)
  kind = match["kind"].lower().replace("-", "") if match else ""
  kind = _ALIASES.get(kind, kind)
  if match is None or (kind != "cpu" and kind not in CHIPS) or match["count"] == "0":
    raise _unknown(name)
  count = int(match["count"] or 1)
  if kind == "cpu":
    return _simulated(name, match["size"], count)
  make = _tpu if CHIPS[kind].platform == "tpu" else _gpu
  found = make(name, kind, match["mark"] or "", match["size"] or "", count)
  _check_size(name, found.devices, _MOST_DEVICES)
  return found


def _check_size(name: str, devices: int, most: int) -> None:
  """Raises PlanError if a machine has more devices than the compilers are asked for."""
  if devices > most:
    raise PlanError(f"--topology={name} has {devices} devices; a plan takes at most {most}")


def _unknown(name: str, reason: str = "") -> PlanError:
  near = names.nearest(name, valid(), count=3, cutoff=0.3)
  hint = f"; the nearest are {', '.join(near)}" if near else ""
  kinds = (
    "TPU slices (v4-8, v5e-16, v5p-8, v6e-8), GPUs (t4, l4, 4090, 5090, a100-40, a100:8, h100:8,"
    " h200:8, 2xh100:8), cpu:8"
  )
  found = f": {reason}" if reason else f" is not one of {kinds}"
  return PlanError(f"--topology={name}{found}{hint}")


def _simulated(name: str, size: str | None, count: int) -> Topology:
  if count != 1 or not (size or "1").isdigit() or int(size or 1) < 1:
    raise _unknown(name)
  devices = int(size or 1)
  _check_size(name, devices, _MOST_CPUS)
  memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return Topology(f"cpu:{devices}", chips.cpu(memory // devices), devices)


def _gpu(name: str, kind: str, mark: str, size: str, count: int) -> Topology:
  if mark == "-" or not (size or "1").isdigit() or not 1 <= int(size or 1) <= MOST_GPUS:
    most = f"a node has 1 to {MOST_GPUS} GPUs; write several nodes as 2x{kind}:{MOST_GPUS}"
    raise _unknown(name, most)
  each = int(size or 1)
  several = f"{count}x" if count > 1 else ""
  return Topology(f"{several}{kind}:{each}", CHIPS[kind], each * count, hosts=count, slices=count)


def _tpu(name: str, kind: str, mark: str, size: str, count: int) -> Topology:
  known = SHAPES[kind]
  if mark == ":" and "x" in size:
    shape = size if size.count("x") == known[4].count("x") else f"{size}x1"
    chips_of = math.prod(int(one) for one in size.split("x") if one)
    if known.get(chips_of) != shape:
      raise _unknown(name, f"{kind} has the shapes {', '.join(known.values())}")
  else:
    cores = _CORES.get(kind, 1)
    chips_of = int(size) // cores if size.isdigit() and int(size) % cores == 0 else 0
    if chips_of not in known or mark not in ("-", ":"):
      sizes = ", ".join(f"{kind}-{n * cores}" for n in known)
      raise _unknown(name, f"there are {sizes}")
  # One host has all chips of a slice of up to 8 chips (v5e, v6e), else 4.
  hosts = 1 if known is _FLAT and chips_of <= 8 else max(chips_of // 4, 1)
  shown = f"{count}x" * (count > 1) + f"{kind}-{chips_of * _CORES.get(kind, 1)}"
  shape = known[chips_of]
  return Topology(shown, CHIPS[kind], chips_of * count, hosts * count, count, shape)


def slice_of(kind: str, chips_of: int) -> str | None:
  """Returns Google's name of a slice; None if there is none of this size.

  Args:
    kind: Name of the chip, such as "v5e".
    chips_of: Number of chips.
  """
  return f"{kind}-{chips_of * _CORES.get(kind, 1)}" if chips_of in SHAPES[kind] else None


def host_of(topology: Topology) -> Topology:
  """Returns one host of a machine, as a machine of its own."""
  if topology.hosts == 1:
    return topology
  kind, each = topology.chip.name, topology.per_host
  if topology.chip.platform == "gpu":
    return parse(f"{kind}:{each}")
  return parse(f"{kind}-{each * _CORES.get(kind, 1)}")


def check_compiler(topology: Topology) -> None:
  """Checks that the compiler for a machine's chips is installed.

  Raises:
    PlanError: The compiler is not installed; the message says what installs it.
  """
  if topology.chip.platform not in _NEEDS:
    return
  modules, extra, size = _NEEDS[topology.chip.platform]
  if not any(importlib.util.find_spec(module) for module in modules.split()):
    what = {"tpu": "a TPU", "gpu": "an NVIDIA GPU"}[topology.chip.platform]
    raise PlanError(
      f"--topology={topology.name} needs the compiler for {topology.chip.name}, which is not"
      f' installed ({" or ".join(modules.split())}): pip install "grpo-jax[{extra}]" ({size};'
      f" {what} and its driver are not needed)"
    )


def devices(topology: Topology) -> list[Any]:
  """Returns the devices of a machine that is not present, in JAX's order.

  Raises:
    PlanError: The compiler for its chips is not installed, or refuses the machine.
  """
  check_compiler(topology)
  make = {"cpu": _of_cpu, "gpu": _of_gpus, "tpu": _of_tpus}[topology.chip.platform]
  try:
    with _quiet_tpu() if topology.chip.platform == "tpu" else contextlib.nullcontext():
      found = list(make(topology))
  except (RuntimeError, ValueError, NotImplementedError) as error:
    reason = " ".join(str(error).split())[:300]
    raise PlanError(f"--topology={topology.name}: the compiler refuses it: {reason}") from error
  if len(found) != topology.devices:
    raise PlanError(
      f"--topology={topology.name}: the compiler gives {len(found)} devices, expected"
      f" {topology.devices}"
    )
  return found


def _of_cpu(topology: Topology) -> list[Any]:
  with contextlib.suppress(RuntimeError):  # JAX has been started: with how many devices?
    jax.config.update("jax_num_cpu_devices", topology.devices)
  found = jax.devices("cpu")
  if len(found) < topology.devices:
    raise ValueError(f"JAX was started with {len(found)} CPU devices")
  return found[: topology.devices]


def _of_gpus(topology: Topology) -> Any:
  return topologies.get_topology_desc(
    topology.chip.name,
    platform="cuda",
    target_config=topology.chip.target,
    topology=f"1x{topology.hosts}x{topology.per_host}",
  ).devices


def _of_tpus(topology: Topology) -> Any:
  options: dict[str, Any] = {"num_slices": topology.slices} if topology.slices > 1 else {}
  if topology.chip.name in _CORES:
    options["chip_config_name"] = "megacore"  # a chip is one device.
  if topology.shape in ("1x1", "2x4"):
    options["chips_per_host_bounds"] = [*map(int, topology.shape.split("x")), 1]
  name = f"{topology.chip.name}:{topology.shape}"
  return topologies.get_topology_desc(name, platform="tpu", **options).devices


@contextlib.contextmanager
def _quiet_tpu() -> Iterator[None]:
  """Drops what libtpu writes to standard error: it looks for the TPU of this machine."""
  kept = os.dup(2)
  with open(os.devnull, "wb") as nowhere:
    os.dup2(nowhere.fileno(), 2)
  try:
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)
