"""Confines processes: the command lines of sandboxes, and whether they work on this machine.

bubblewrap  its own namespaces: no network, an empty file system except for the interpreter's
            and the system's libraries (read only, without Python packages) and a scratch
            folder in memory; seccomp.
landlock    no namespaces: files are protected by Landlock, system calls by seccomp.
limits      files are accessible: resource limits and seccomp only.

docs/code_environment.md lists what each protects from and what it does not.
"""

import compileall
import contextlib
import dataclasses
import difflib
import functools
import glob
import json
import math
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_sandbox import confine, fork_server, syscalls

KINDS = ("bubblewrap", "landlock", "limits")
NONE = "none"  # for graders only: a separate process without restrictions.
_PACKAGE = Path(__file__).resolve().parent
_INSIDE = "/sandbox"  # folder of the package's modules, and
_SCRATCH = "/scratch"  # folder of the program, under bubblewrap.
_FOLDER = "folder"  # name of the program's folder in the scratch folder of the other kinds.
_STORE = "/nix/store"
_SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", _STORE)
_BOOT = "import sys; sys.path.insert(0, {path!r}); "
_BOOT += "from grpo_sandbox import fork_server; fork_server.main()"
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_ENVIRONMENT = {"PATH": "/usr/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
_ENVIRONMENT |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_START_S = 30.0
_ADVICE = (
  "install bubblewrap (apt-get install bubblewrap; 0.8 or newer) where user namespaces are"
  " allowed, or choose sandbox='landlock' or 'limits', which leave more open:"
  " docs/code_environment.md"
)
_OPTIONS = ("-s", "-S", "-P", "-B")  # no site packages, no folder of the script, no caches.


class SandboxError(RuntimeError):
  """A sandbox cannot be created or did not start. This is not the fault of the program."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
  """The limits of one process."""

  timeout_s: float = 5.0  # wall time; CPU time is bounded by the next whole second.
  memory_mib: int = 512  # size of the address space.
  output_kib: int = 1024  # largest output of a program, or result of a function.
  scratch_mib: int = 16  # size of all files together (bubblewrap), or of each file.

  def __post_init__(self):
    least = {"timeout_s": 0.1, "memory_mib": 64, "output_kib": 1, "scratch_mib": 1}
    for name, value in dataclasses.asdict(self).items():
      if not value >= least[name]:  # rejects NaN as well.
        raise ValueError(f"{name} must be at least {least[name]}, got {value}")


@dataclasses.dataclass(frozen=True, slots=True)
class Grader:
  """Functions that a sandbox loads once and calls in forks."""

  file: str  # Python file that defines them.
  roots: tuple[str, ...] = ()  # folders to import from.
  readable: tuple[str, ...] = ()  # readable parts of them: files, and folders with their content.


class Launcher:
  """Starts sandboxes of one kind."""

  def __init__(
    self,
    kind: str,
    limits: ProcessLimits,
    *,
    interpreter: str | None = None,
    packages: Sequence[str] = (),
    grader: Grader | None = None,
  ):
    """Describes the sandbox and tries it once.

    Args:
      kind: "bubblewrap", "landlock" or "limits".
      limits: Limits of every process.
      interpreter: Python that runs programs; None: the running one.
      packages: Folders with further packages that programs may import.
      grader: Functions for which the sandboxes are used in place of programs. The sandboxes are
        then not tried, and `kind` may also be NONE.

    Raises:
      SandboxError: This kind does not work here; the message gives the reason and alternatives.
      ValueError: There is no such kind, interpreter or folder.
    """
    kinds = (*KINDS, NONE) if grader else KINDS
    if kind not in kinds:
      close = difflib.get_close_matches(kind, kinds, n=1, cutoff=0.5)
      hint = f" (did you mean {close[0]!r}?)" if close else ""
      raise ValueError(f"unknown sandbox {kind!r}{hint}; there are: {', '.join(kinds)}")
    self.kind, self.limits, self._grader = kind, limits, grader
    self._python = os.path.realpath(interpreter or sys.executable)
    prefix = sys.base_prefix if interpreter is None else Path(self._python).parents[1]
    self._prefix = os.path.realpath(prefix)
    self._import_from = [os.path.realpath(path) for path in packages]
    self._packages = self._import_from
    if grader is not None:
      self._import_from = list(grader.roots)
      self._packages = [grader.file, *grader.readable]
    for path in (self._python, *self._packages):
      if not os.path.exists(path):
        raise ValueError(f"interpreter or packages: there is no {path}")
    compile_inside()
    if grader is None:
      self._check()

  def start(self, channel: int, stderr: int = subprocess.DEVNULL) -> "Sandbox":
    """Starts a sandbox, see `fork_server`.

    Args:
      channel: File descriptor of the sandbox's end of the socket for requests.
      stderr: File descriptor of its standard error.
    """
    scratch = None if self.kind == "bubblewrap" else tempfile.mkdtemp(prefix="sandbox-")
    boot = _BOOT.format(path=_INSIDE if scratch is None else str(_PACKAGE.parent))
    settings = self._settings(scratch)
    command = [self._python, *_OPTIONS, "-c", boot, json.dumps(settings)]
    popen = subprocess.Popen(
      command if scratch else [*self._bubblewrap(), *command],
      stdin=channel,
      stdout=subprocess.DEVNULL,
      stderr=stderr,
      env={**_ENVIRONMENT, "HOME": settings["folder"]},
      cwd=scratch or "/",
      start_new_session=True,
    )
    return Sandbox(popen, scratch)

  def _settings(self, scratch: str | None) -> dict[str, Any]:
    """Returns the settings of `fork_server`."""
    limits = self.limits
    folder = f"{scratch}/{_FOLDER}" if scratch else _SCRATCH
    is_linux = platform.system() == "Linux"
    process_limits = {
      "memory_mib": limits.memory_mib,
      "cpu_s": math.ceil(limits.timeout_s) + 1,
      "file_mib": limits.scratch_mib,
      "count_threads": self.kind == "bubblewrap",
    }
    walls = {"server": None, "seccomp": None, "writable": None}
    return {
      **(walls if self.kind == NONE else self._walls(scratch, folder)),
      "limits": process_limits if is_linux else None,
      "scratch": scratch or _SCRATCH,
      "folder": folder,
      "packages": self._import_from,
      "parent": os.getpid() if is_linux and scratch else 0,
      "max_bytes": limits.output_kib * 1024,
      "grader": self._grader.file if self._grader else None,
    }

  def _walls(self, scratch: str | None, folder: str) -> dict[str, Any]:
    """Returns the restrictions of the sandbox: files and system calls."""
    has_landlock = self.kind == "landlock"
    files = {
      "readable": sorted({os.path.realpath(p) for p in (*self._libraries(), *self._packages)}),
      "hidden": self._hidden(),
      "devices": _DEVICES,
      "scratch": scratch,
    }
    may_change = self.kind == "bubblewrap"
    return {
      "server": {
        "seccomp": _seccomp(processes=True, files=True),
        "files": files if has_landlock else None,
        "devices": [] if scratch else _DEVICES,
      },
      "seccomp": {
        "files": _seccomp(processes=False, files=may_change),
        "no_files": _seccomp(processes=False, files=False),
      },
      "writable": [folder, *_DEVICES] if has_landlock else None,
    }

  def _libraries(self) -> list[str]:
    """Returns the interpreter and the files that it needs."""
    mine = [self._python, *(f"{self._prefix}/{name}" for name in ("lib", "lib64"))]
    return [path for path in (*_SYSTEM, *mine) if os.path.exists(path)]

  def _hidden(self) -> list[str]:
    """Returns package folders among the libraries, except those that programs may import from."""
    mine = [Path(path) for path in self._packages]
    found = _package_folders(tuple(self._libraries()))
    return [p for p in found if not any(Path(p).is_relative_to(package) for package in mine)]

  def _bubblewrap(self) -> list[str]:
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--new-session"]
    # Needed to mount devices read-only; dropped before the first program: confine.shut_server.
    command += ["--die-with-parent", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
    for path in _SYSTEM:
      if os.path.islink(path):
        command += ["--symlink", os.readlink(path), path]
    for path in self._libraries():
      if not os.path.islink(path):
        command += ["--ro-bind", path, path]
    hidden = self._hidden()
    for path in hidden:
      command += ["--tmpfs", path]
    for path in self._packages:
      command += ["--ro-bind", path, path]
    for path in hidden:
      command += ["--remount-ro", path]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for device in _DEVICES:
      command += ["--dev-bind", device, device]
    command += ["--ro-bind", str(_PACKAGE), f"{_INSIDE}/{_PACKAGE.name}"]
    command += ["--size", str(self.limits.scratch_mib << 20), "--tmpfs", _SCRATCH]
    return [*command, "--remount-ro", "/", "--chdir", _SCRATCH, "--"]

  def _check(self) -> None:
    """Runs an empty program; raises SandboxError if that fails."""
    if platform.system() != "Linux":
      raise SandboxError(f"sandboxes need Linux, this is {platform.system()}")
    if self.kind == "bubblewrap" and shutil.which("bwrap") is None:
      raise SandboxError(f"there is no program bwrap on the path; {_ADVICE}")
    if self.kind == "landlock" and confine.landlock_abi() < confine.LANDLOCK_ABI:
      raise SandboxError(f"this kernel has no Landlock of Linux 6.2 or newer; {_ADVICE}")
    mine, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as errors, mine, theirs:
      sandbox = self.start(theirs.fileno(), errors.fileno())
      theirs.close()
      try:
        mine.settimeout(_START_S)
        works = mine.recv(1) == fork_server.READY
      except TimeoutError:
        works = False
      finally:
        sandbox.end()
      errors.seek(0)
      reason = errors.read(1000).decode(errors="replace").strip() or "it printed no reason"
    if not works:
      raise SandboxError(f"the sandbox {self.kind!r} does not work here: {reason}; {_ADVICE}")


class Sandbox:
  """A sandbox's process and its scratch folder."""

  def __init__(self, popen: subprocess.Popen[bytes], scratch: str | None):
    self._popen, self._scratch = popen, scratch

  @property
  def pid(self) -> int:
    return self._popen.pid

  def kill(self) -> None:
    """Kills the sandbox and everything in it, if it runs. Callable from any thread."""
    if self._popen.poll() is None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self._popen.pid, signal.SIGKILL)

  def end(self) -> None:
    """Kills the sandbox, waits for its end and removes its folder."""
    self.kill()
    self._popen.wait()
    if self._scratch is not None:
      with contextlib.suppress(OSError):
        fork_server.empty(self._scratch)
        os.rmdir(self._scratch)


def compile_inside() -> None:
  """Compiles the modules of the sandbox once, to save that work in every process.

  If the package folder is not writable, every process compiles them.
  """
  compileall.compile_dir(_PACKAGE, maxlevels=0, quiet=2)


def _seccomp(*, processes: bool, files: bool) -> str:
  """Returns a filter of system calls, in hexadecimal."""
  return syscalls.program(platform.machine(), processes=processes, files=files).hex()


@functools.cache
def _package_folders(libraries: tuple[str, ...]) -> list[str]:
  """Finds the folders in which packages of any Python on this machine are installed.

  Args:
    libraries: Folders to search. In Nix's store, only folders with Python packages.
  """
  found = [p for name in _PACKAGE_FOLDERS for p in glob.glob(f"{_STORE}/*/lib*/python*/{name}")]
  for library in libraries:
    if library == _STORE or os.path.islink(library):
      continue
    for folder, names, _ in os.walk(library):
      found += [os.path.join(folder, name) for name in names if name in _PACKAGE_FOLDERS]
      names[:] = [name for name in names if name not in _PACKAGE_FOLDERS]
  return sorted({path for path in found if not os.path.islink(path)})
