"""Accelerators that JAX leaves unused are found without it, with the cause and the repair."""

import pytest

from grpo_jax.building import checks
from grpo_jax.compilation import accelerators, containers, host_memory


@pytest.fixture
def machine(tmp_path, monkeypatch):
  """Makes a machine: a root of the file system, a path of programs, and installed packages."""
  for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
    monkeypatch.delenv(name, raising=False)
  root = tmp_path / "root"
  root.mkdir()
  programs = tmp_path / "bin"
  programs.mkdir()
  monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
  monkeypatch.setattr(accelerators.shutil, "which", lambda name: _which(programs, name))
  installed = {"jax": "0.12.0", "jaxlib": "0.12.0"}
  monkeypatch.setattr(accelerators, "version", installed.get)

  class Machine:
    def smi(self, script):
      (programs / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
      (programs / "nvidia-smi").chmod(0o755)

    def file(self, path, text=""):
      (root / path).parent.mkdir(parents=True, exist_ok=True)
      (root / path).write_text(text)

    def pci(self, vendor, device, kind="0x030200"):
      folder = f"sys/bus/pci/devices/{vendor}:{device}"
      for name, text in (("vendor", vendor), ("device", device), ("class", kind)):
        self.file(f"{folder}/{name}", f"{text}\n")

    def install(self, **versions):
      installed.update({name.replace("_", "-"): v for name, v in versions.items()})

    def unused(self, platform="cpu"):
      return accelerators.unused(platform, root)

  made = Machine()
  made.root = root
  return made


def _which(folder, name):
  return str(folder / name) if (folder / name).exists() else None


H100 = 'echo "NVIDIA H100 80GB HBM3, {driver}"; echo "NVIDIA H100 80GB HBM3, {driver}"'


def test_a_machine_without_accelerators_has_none(machine):
  assert machine.unused() is None
  machine.pci("0x1ae0", "0x0042", "0x020000")  # Google's network card is not a TPU.
  machine.pci("0x10de", "0x22a3", "0x068000")  # NVIDIA's NVSwitch is not a GPU.
  assert machine.unused() is None


@pytest.mark.parametrize(
  "driver, plugins, reason, repair",
  [
    ("570.124.06", {}, "no CUDA plug-in", 'pip install "jax[cuda12]==0.12.0"'),
    ("580.82", {}, "no CUDA plug-in", 'pip install "jax[cuda12]==0.12.0"'),
    (
      "570.124.06",
      {"jax_cuda13_plugin": "0.12.0"},
      "jax-cuda13-plugin needs a driver of version 580 or newer, and this one is 570.124.06",
      "pip uninstall -y jax-cuda13-plugin jax-cuda13-pjrt && pip install",
    ),
    (
      "570.124.06",
      {"jax_cuda12_plugin": "0.7.2"},
      "jax-cuda12-plugin 0.7.2 does not fit jaxlib 0.12.0",
      'pip install "jax[cuda12]==0.12.0"',
    ),
    (
      "580.82",
      {"jax_cuda13_plugin": "0.11.2"},
      "jax-cuda13-plugin 0.11.2 does not fit",
      'pip install "jax[cuda13]==0.12.0"',
    ),
    ("515.65", {"jax_cuda12_plugin": "0.12.0"}, "older than 525", "version 580 or newer"),
    ("570.1", {"jax_cuda12_plugin": "0.12.0"}, "although jax-cuda12-plugin", "jax.devices('cuda')"),
  ],
)
def test_a_gpu_that_is_not_used_has_a_cause_and_a_repair(machine, driver, plugins, reason, repair):
  machine.smi(H100.format(driver=driver))
  machine.install(**plugins)
  found, cause = machine.unused()
  assert found == f"2 x NVIDIA H100 80GB HBM3 (driver {driver})"
  assert reason in cause.reason and repair in cause.repair and not cause.is_chosen
  assert machine.unused("gpu") is None


@pytest.mark.parametrize(
  "name, value",
  [("JAX_PLATFORMS", "cpu"), ("CUDA_VISIBLE_DEVICES", ""), ("CUDA_VISIBLE_DEVICES", "-1")],
)
def test_a_gpu_left_out_by_the_environment_was_a_choice(machine, monkeypatch, name, value):
  machine.smi(H100.format(driver="580.1"))
  monkeypatch.setenv(name, value)
  _, cause = machine.unused()
  assert cause.is_chosen and f"{name}={value}" in cause.reason and cause.repair == f"unset {name}"
  monkeypatch.setenv(name, {"JAX_PLATFORMS": "cuda,cpu"}.get(name, "0"))
  assert not machine.unused()[1].is_chosen


@pytest.mark.parametrize("script", ["exit 9", "echo a, b, c", "exec sleep 60", ""])
def test_without_an_answer_of_nvidia_smi_the_files_of_the_driver_count(
  machine, script, monkeypatch
):
  monkeypatch.setattr(accelerators, "SMI_TIMEOUT_S", 0.2)
  machine.smi(script)
  machine.pci("0x10de", "0x2330")
  found, cause = machine.unused()
  assert found == "1 x NVIDIA GPU" and "driver is not loaded" in cause.reason
  version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 00:00:00 2026\n"
  machine.file("proc/driver/nvidia/version", version)
  machine.file(
    "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA L4\nIRQ: 1\n"
  )
  found, cause = machine.unused()
  assert found == "1 x NVIDIA L4 (driver 570.124.06)"
  assert "/dev/nvidia" in cause.reason and "--gpus all" in cause.repair
  machine.file("dev/nvidia0")
  assert "no CUDA plug-in" in machine.unused()[1].reason


def test_the_open_kernel_module_has_its_version_elsewhere(machine):
  text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n"
  machine.file("proc/driver/nvidia/version", text)
  machine.pci("0x10de", "0x2330")
  assert "(driver 580.82.07)" in machine.unused()[0]


def test_a_tpu_that_is_not_used_has_a_cause(machine, monkeypatch):
  for number in range(4):
    machine.pci("0x1ae0", "0x0063", f"0x12000{number}")
  machine.pci("0x1ae0", "0x0042", "0x020000")
  found, cause = machine.unused()
  assert found == "1 x TPU v5e" and cause.repair == 'pip install "jax[tpu]==0.12.0"'
  machine.install(libtpu="0.0.48")
  assert "cannot be opened" in machine.unused()[1].reason
  machine.file("dev/vfio/0")
  assert "one process at a time" in machine.unused()[1].reason
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  assert machine.unused()[1].is_chosen


def test_a_run_says_on_which_device_it_computes(machine, noticed, monkeypatch):
  from grpo_jax.learn import sharding

  mesh = sharding.make_mesh(data=-1, fsdp=1, tensor=1)
  unused = accelerators.unused
  monkeypatch.setattr(accelerators, "unused", lambda platform: unused(platform, machine.root))
  checks.log_devices(mesh)
  assert [line.partition(",")[0] for line in noticed] == ["devices: 8 x cpu"]
  noticed.clear()
  machine.smi(H100.format(driver="570.124.06"))
  checks.log_devices(mesh)
  assert len(noticed) == 2 and noticed[1].startswith(
    "THIS RUN COMPUTES ON THE CPU, and the machine has 2 x NVIDIA H100"
  )
  assert "no CUDA plug-in" in noticed[1] and "pip install" in noticed[1]
  noticed.clear()
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  checks.log_devices(mesh)
  assert len(noticed) == 1 and noticed[0].endswith("not used: JAX_PLATFORMS=cpu leaves them out")


def test_a_machine_without_any_device_gives_the_reason(machine, monkeypatch):
  unused = accelerators.unused
  monkeypatch.setattr(accelerators, "unused", lambda platform: unused(platform, machine.root))
  assert accelerators.why_none(RuntimeError("no\n  backend")) == "no backend"
  assert accelerators.why_none(AssertionError()) == "it gives no reason"
  monkeypatch.setenv("JAX_PLATFORMS", "cuda")
  said = accelerators.why_none(AssertionError())
  assert said.startswith("JAX_PLATFORMS=cuda names no platform that works here; there is no NVIDIA")
  machine.smi(H100.format(driver="570.1"))
  said = accelerators.why_none(AssertionError())
  assert "no CUDA plug-in" in said and 'pip install "jax[cuda12]' in said


def test_platforms_that_are_not_here_are_named_with_what_they_need(monkeypatch):
  monkeypatch.setattr(accelerators, "unused", lambda platform: None)
  monkeypatch.setattr(accelerators, "version", lambda name: None)
  for name, missing in (
    ("cuda", 'no NVIDIA GPU here, nor a CUDA plug-in of JAX (pip install "jax[cuda12]")'),
    ("gpu,cpu", "no NVIDIA GPU here"),
    ("tpu", 'no TPU here, nor libtpu (pip install "jax[tpu]")'),
    ("metal", "no backend; JAX_PLATFORMS=cpu computes on the CPU"),
  ):
    monkeypatch.setenv("JAX_PLATFORMS", name)
    said = accelerators.why_none(RuntimeError("no backend"))
    assert missing in said and said.endswith("JAX_PLATFORMS=cpu computes on the CPU")


def test_devices_are_described_in_one_line():
  class Chip:
    def __init__(self, platform, kind):
      self.platform, self.device_kind = platform, kind

  chips = [Chip("tpu", "TPU v5 lite")] * 8
  assert accelerators.used(chips) == "8 x TPU v5 lite (tpu)"
  assert accelerators.used([Chip("cpu", "cpu")]).startswith("1 x cpu, ")


def write(root, files):
  for path, text in files.items():
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.parametrize("group", ["/", "/job/step"])
def test_limits_of_control_groups_of_version_2(tmp_path, group):
  write(tmp_path, {"proc/self/cgroup": f"0::{group}\n", "sys/fs/cgroup/memory.max": "max\n"})
  assert containers.memory(tmp_path) is None and containers.cores(tmp_path) is None
  folder = tmp_path / "sys/fs/cgroup" / group.lstrip("/").partition("/")[0]  # one above the job's.
  folder.mkdir(exist_ok=True)
  (folder / "memory.max").write_text(f"{8 << 30}\n")
  (folder / "memory.current").write_text(f"{3 << 30}\n")
  (folder / "cpu.max").write_text("150000 100000\n")
  assert containers.memory(tmp_path) == (8 << 30, 3 << 30)
  assert containers.cores(tmp_path) == 1.5


def test_limits_of_control_groups_of_version_1(tmp_path):
  files = {
    "proc/self/cgroup": "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n1:name=systemd:/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 << 30}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{1 << 30}\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
  }
  write(tmp_path, files)
  assert containers.memory(tmp_path) == (4 << 30, 1 << 30)  # inside, the group is the root's.
  assert containers.cores(tmp_path) is None
  (tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("250000\n")
  assert containers.cores(tmp_path) == 2.5
  (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
  assert containers.memory(tmp_path) is None


def test_available_memory_is_what_a_container_leaves(monkeypatch):
  monkeypatch.setattr(containers, "memory", lambda: None)
  free = host_memory.available_bytes()
  monkeypatch.setattr(containers, "memory", lambda: (3 << 20, 1 << 20))
  assert host_memory.available_bytes() == 2 << 20 < free
