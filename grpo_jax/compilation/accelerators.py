"""Accelerators of this machine, whether or not JAX uses them, and why it does not.

JAX computes on the CPU where it cannot use a GPU or TPU. Nothing here imports JAX: GPUs are found
by nvidia-smi, by the files of the driver and on the PCI bus; TPUs on the PCI bus.
"""

import collections
import ctypes
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterable
from importlib import metadata
from typing import Any

SMI_TIMEOUT_S = 5.0
# The lowest driver for each generation of CUDA libraries (docs.jax.dev, "Installing JAX").
LOWEST_DRIVER = {"cuda12": (525, 60), "cuda13": (580, 0)}
_GPU_CLASS = "0x03"  # display controllers, 3D controllers among them.
_NVIDIA, _GOOGLE = "0x10de", "0x1ae0"
_TPUS = {  # device on the PCI bus -> name; jax/_src/hardware_utils.py has the same table.
  "0x0027": "TPU v2 or v3",
  "0x005e": "TPU v4",
  "0x0062": "TPU v5p",
  "0x0063": "TPU v5e",
  "0x006f": "TPU v6e",
  "0x0076": "TPU7x",
}


@dataclasses.dataclass(frozen=True)
class Accelerators:
  """GPUs or TPUs that are in this machine."""

  platform: str  # "gpu" or "tpu", as JAX calls them.
  names: tuple[str, ...]  # one for each device.
  driver: str | None = None  # of NVIDIA GPUs, such as "570.124.06"; None: not loaded.
  is_open: bool = True  # whether programs may open the devices; containers may not.

  def __str__(self) -> str:
    driver = f" (driver {self.driver})" if self.driver else ""
    return f"{counted(self.names)}{driver}"


@dataclasses.dataclass(frozen=True)
class Cause:
  """Why JAX does not use an accelerator."""

  reason: str
  repair: str  # a command, or what to do.
  is_chosen: bool = False  # by an environment variable.


def counted(names: Iterable[str]) -> str:
  """Returns "2 x NVIDIA H100, 1 x NVIDIA A100"."""
  return ", ".join(f"{n} x {name}" for name, n in collections.Counter(names).items())


def why_none(error: BaseException) -> str:
  """Returns in one line why JAX found no device at all.

  Args:
    error: Exception that JAX raised.
  """
  wanted = os.environ.get("JAX_PLATFORMS", "")
  asked = f"JAX_PLATFORMS={wanted} names no platform that works here" if wanted else ""
  said = " ".join(str(error).split())
  left = unused("cpu")
  cause = (
    f"{left[0]}: {left[1].reason}. To repair it: {left[1].repair}" if left else _absent(wanted)
  )
  return "; ".join(filter(None, [said or asked, cause])) or "it gives no reason"


def _absent(wanted: str) -> str:
  """Returns what a machine without accelerators lacks for the platforms of JAX_PLATFORMS."""
  names = {name.strip() for name in wanted.split(",")}
  plugins = any(version(f"jax-{name}-plugin") for name in LOWEST_DRIVER)
  lines = []
  if names & {"gpu", "cuda"}:
    missing = "" if plugins else f", nor a CUDA plug-in of JAX ({_install('cuda12')})"
    lines.append(f"there is no NVIDIA GPU here{missing}")
  if "tpu" in names:
    missing = "" if version("libtpu") else f", nor libtpu ({_install('tpu')})"
    lines.append(f"there is no TPU here{missing}")
  if wanted:
    lines.append("JAX_PLATFORMS=cpu computes on the CPU")
  return "; ".join(lines)


def used(devices: Iterable[Any], *, processes: int = 1) -> str:
  """Returns one line on the devices that JAX computes on.

  Args:
    devices: Devices of JAX.
    processes: Number of processes that they belong to.
  """
  devices = list(devices)
  kinds = counted(device.device_kind for device in devices)
  kinds += f" on {processes} processes" if processes > 1 else ""
  if devices[0].platform != "cpu":
    return f"{kinds} ({devices[0].platform})"
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  return f"{kinds}, {cores} cores"


def unused(platform: str, root: pathlib.Path = pathlib.Path("/")) -> tuple[str, Cause] | None:
  """Returns which accelerators JAX leaves unused, and why; None if there are none.

  Args:
    platform: Platform that JAX uses: "cpu", "gpu" or "tpu".
    root: Root of the file system.
  """
  if platform != "cpu":
    return None
  if found := gpus(root):
    return str(found), cause_of_gpus(found)
  if found := tpus(root):
    return str(found), cause_of_tpus(found)
  return None


def gpus(root: pathlib.Path = pathlib.Path("/")) -> Accelerators | None:
  """Returns the NVIDIA GPUs of this machine; None if there are none.

  Args:
    root: Root of the file system.
  """
  if rows := smi("name", "driver_version"):
    return Accelerators("gpu", tuple(row[0] for row in rows), rows[0][1])
  module = _text(root / "proc/driver/nvidia/version")
  driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", module)
  files = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
  models = [re.search(r"^Model:\s*(.+?)\s*$", _text(file), re.MULTILINE) for file in files]
  names = [model[1] if model else "NVIDIA GPU" for model in models]
  names = names or ["NVIDIA GPU"] * len(list(_on_bus(root, _NVIDIA, _GPU_CLASS)))
  is_open = any(root.glob("dev/nvidia[0-9]*")) or (root / "dev/dxg").exists()
  number = driver[1] if driver else None
  return Accelerators("gpu", tuple(names), number, is_open) if names else None


def tpus(root: pathlib.Path = pathlib.Path("/")) -> Accelerators | None:
  """Returns the TPU chips of this machine; None if there are none.

  Args:
    root: Root of the file system.
  """
  ids = [_text(folder / "device").strip() for folder in _on_bus(root, _GOOGLE, "")]
  names = tuple(_TPUS[each] for each in ids if each in _TPUS)
  is_open = any(root.glob("dev/accel*")) or any(root.glob("dev/vfio/[0-9]*"))
  return Accelerators("tpu", names, None, is_open) if names else None


def cause_of_gpus(found: Accelerators) -> Cause:
  """Returns why JAX does not use the GPUs that are in the machine."""
  if chosen := _chosen("gpu", "cuda"):
    return chosen
  hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
  if hidden is not None and hidden.strip() in ("", "-1", "none", "NoDevFiles"):
    reason = f"CUDA_VISIBLE_DEVICES={hidden} hides them"
    return Cause(reason, "unset CUDA_VISIBLE_DEVICES", is_chosen=True)
  if found.driver is None:
    return Cause(
      "the NVIDIA driver is not loaded",
      f"install the driver of the GPU, version {_shown(LOWEST_DRIVER['cuda13'])} or newer",
    )
  if not found.is_open:
    return Cause(
      "/dev/nvidia* cannot be opened here",
      "start the container with access to the GPUs: docker run --gpus all",
    )
  driver = _numbers(found.driver)
  plugins = {name: v for name in LOWEST_DRIVER if (v := version(f"jax-{name}-plugin"))}
  repair = _install("cuda12")  # its libraries run on newer drivers, too.
  if driver < LOWEST_DRIVER["cuda12"]:
    return Cause(
      f"the driver {found.driver} is older than {_shown(LOWEST_DRIVER['cuda12'])}, which CUDA 12"
      " needs",
      f"install a driver of version {_shown(LOWEST_DRIVER['cuda13'])} or newer",
    )
  if not plugins:
    return Cause("no CUDA plug-in of JAX is installed", repair)
  too_new = [name for name in plugins if driver < LOWEST_DRIVER[name]]
  if too_new and len(too_new) == len(plugins):
    name = too_new[0]
    return Cause(
      f"jax-{name}-plugin needs a driver of version {_shown(LOWEST_DRIVER[name])} or newer, and"
      f" this one is {found.driver}",
      f"pip uninstall -y jax-{name}-plugin jax-{name}-pjrt && {repair}",
    )
  jaxlib = version("jaxlib") or ""
  for name, installed in plugins.items():
    if _numbers(installed)[:3] != _numbers(jaxlib)[:3]:
      return Cause(
        f"jax-{name}-plugin {installed} does not fit jaxlib {jaxlib}: their versions must be equal",
        _install(name),
      )
  return Cause(
    f"JAX cannot use them although jax-{next(iter(plugins))}-plugin is installed",
    "python -c \"import jax; print(jax.devices('cuda'))\" prints the reason",
  )


def cause_of_tpus(found: Accelerators) -> Cause:
  """Returns why JAX does not use the TPUs that are in the machine."""
  if chosen := _chosen("tpu"):
    return chosen
  if version("libtpu") is None:
    return Cause("libtpu is not installed", _install("tpu"))
  if not found.is_open:
    return Cause(
      "/dev/accel* and /dev/vfio/* cannot be opened here",
      "start the container with access to the TPU: docker run --privileged",
    )
  return Cause(
    "JAX cannot use them although libtpu is installed; one process at a time can have them",
    "python -c \"import jax; print(jax.devices('tpu'))\" prints the reason",
  )


def cuda_of_driver() -> str | None:
  """Returns the newest CUDA version that the driver can run, such as "12.8"; None without one."""
  try:
    libcuda = ctypes.CDLL("libcuda.so.1")
    number = ctypes.c_int()
    if libcuda.cuDriverGetVersion(ctypes.byref(number)) != 0:
      return None
  except (OSError, AttributeError):
    return None
  return f"{number.value // 1000}.{number.value % 1000 // 10}"


def smi(*fields: str) -> list[list[str]]:
  """Asks nvidia-smi for fields of each GPU; returns a row for each GPU.

  No rows if there is no nvidia-smi, if it fails, or if it does not answer in `SMI_TIMEOUT_S`.
  """
  program = shutil.which("nvidia-smi")
  if program is None:
    return []
  command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
  try:
    done = subprocess.run(
      command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, stdin=subprocess.DEVNULL
    )
  except (OSError, subprocess.TimeoutExpired):
    return []
  rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
  return [row for row in rows if len(row) == len(fields)] if done.returncode == 0 else []


def version(distribution: str) -> str | None:
  """Returns the installed version of a distribution; None if it is not installed."""
  try:
    return metadata.version(distribution)
  except metadata.PackageNotFoundError:
    return None


def _chosen(*platforms: str) -> Cause | None:
  """Returns the cause if JAX_PLATFORMS leaves these platforms out."""
  wanted = os.environ.get("JAX_PLATFORMS", "")
  names = [name.strip() for name in wanted.split(",") if name.strip()]
  if not names or {*names} & {*platforms}:
    return None
  return Cause(f"JAX_PLATFORMS={wanted} leaves them out", "unset JAX_PLATFORMS", is_chosen=True)


def _install(extra: str) -> str:
  """Returns the command that adds an extra to the JAX that is installed."""
  pinned = f"=={installed}" if (installed := version("jax")) else ""
  return f'pip install "jax[{extra}]{pinned}"'


def _on_bus(root: pathlib.Path, vendor: str, kind: str) -> Iterable[pathlib.Path]:
  """Yields the folders of the PCI devices of a vendor whose class begins with `kind`."""
  for folder in sorted(root.glob("sys/bus/pci/devices/*")):
    if _text(folder / "vendor").strip() == vendor and _text(folder / "class").startswith(kind):
      yield folder


def _text(path: pathlib.Path) -> str:
  try:
    return path.read_text(errors="replace")
  except OSError:
    return ""


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(int(part) for part in re.findall(r"\d+", text))


def _shown(numbers: tuple[int, ...]) -> str:
  return str(numbers[0])
