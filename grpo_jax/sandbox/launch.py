"""What confines a process: command lines, and whether they work on this machine.

bubblewrap  namespaces of its own: no network, an empty file system but for the interpreter's
            and the system's libraries (read only) and a scratch folder in memory; seccomp.
landlock    no namespaces: files are closed by Landlock, system calls by seccomp.
limits      files are open: limits and seccomp alone.

What each protects from, and what not: docs/code_environment.md.
"""

import compileall
import contextlib
import dataclasses
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

from grpo_jax.registry import choose
from grpo_jax.sandbox import confine, inside, syscalls

KINDS = ("bubblewrap", "landlock", "limits")
NONE = "none"  # for graders alone: a process of its own, that nothing confines.
_PACKAGE = Path(__file__).resolve().parents[1]
_INSIDE = "/sandbox"  # where the package's modules stand, and
_SCRATCH = "/scratch"  # the folder of the program, under bubblewrap.
_SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/nix/store")
_BOOT = (
  "import sys; sys.path.insert(0, {path!r}); from grpo_jax.sandbox import inside; inside.main()"
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_ENVIRONMENT = {"PATH": "/usr/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
_ENVIRONMENT |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_START_S = 30.0
_ADVICE = (
  "install bubblewrap (apt-get install bubblewrap; 0.8 or newer) where user namespaces are"
  " allowed, or choose sandbox='landlock' or 'limits', knowing what they leave open:"
  " docs/code_environment.md"
)
_OPTIONS = ("-s", "-S", "-P", "-B")  # no site packages, no folder of the script, no caches.


class SandboxError(RuntimeError):
  """A sandbox cannot be made, or did not start: the machine's fault, not the program's."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
  """Of one process."""

  timeout_s: float = 5.0  # wall time; CPU time is bounded by the next whole second.
  memory_mib: int = 512  # of the address space.
  output_kib: int = 1024  # what a program may print, or a function return.
  scratch_mib: int = 16  # of all files together (bubblewrap), or of each one.

  def __post_init__(self):
    least = {"timeout_s": 0.1, "memory_mib": 64, "output_kib": 1, "scratch_mib": 1}
    for name, value in dataclasses.asdict(self).items():
      if not value >= least[name]:  # NaN is refused, too.
        raise ValueError(f"{name} must be at least {least[name]}, got {value}")


@dataclasses.dataclass(frozen=True, slots=True)
class Grader:
  """Functions that a sandbox loads once and calls in forks."""

  file: str  # that defines them.
  roots: tuple[str, ...] = ()  # folders to import from.
  readable: tuple[str, ...] = ()  # what can be read of them: files, and folders with all below.


class Launcher:
  """Starts sandboxes of one kind."""

  def __init__(
    self,
    kind: str,
    limits: Limits,
    *,
    interpreter: str | None = None,
    packages: Sequence[str] = (),
    grader: Grader | None = None,
  ):
    """Describes the sandbox and tries it once.

    Args:
      kind: "bubblewrap", "landlock" or "limits".
      limits: of every process.
      interpreter: the Python that runs programs; None: this one.
      packages: folders with further packages that programs may import.
      grader: the sandboxes are for these functions, and for no programs. Then they are not
        tried, and `kind` may also be NONE.

    Raises:
      SandboxError: this kind does not work here; the text says why and what else there is.
      ValueError: there is no such kind, interpreter or folder.
    """
    choose("sandbox", kind, dict.fromkeys((*KINDS, NONE) if grader else KINDS))
    self.kind, self.limits, self._grader = kind, limits, grader
    self._python = os.path.realpath(interpreter or sys.executable)
    self._prefix = sys.base_prefix if interpreter is None else str(Path(self._python).parents[1])
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
    """Starts a sandbox, see `inside`.

    Args:
      channel: file descriptor of its end of the socket over which it is asked.
      stderr: file descriptor of its standard error.
    """
    scratch = None if self.kind == "bubblewrap" else tempfile.mkdtemp(prefix="sandbox-")
    boot = _BOOT.format(path=_INSIDE if scratch is None else str(_PACKAGE.parent))
    command = [self._python, *_OPTIONS, "-c", boot, self._settings(scratch)]
    with contextlib.ExitStack() as stack:
      pipes = ()
      if scratch is None:
        pipes = (_filled_pipe(self._seccomp(processes=True)),)
        stack.callback(os.close, pipes[0])
        command = [*self._bubblewrap(pipes[0]), *command]
      popen = subprocess.Popen(
        command,
        stdin=channel,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env={**_ENVIRONMENT, "HOME": scratch or _SCRATCH},
        cwd=scratch or "/",
        pass_fds=pipes,
        start_new_session=True,
      )
    return Sandbox(popen, scratch)

  def _settings(self, scratch: str | None) -> str:
    """The settings of `inside`, as JSON."""
    limits = self.limits
    settings = {
      "limits": {
        "memory_mib": limits.memory_mib,
        "cpu_s": math.ceil(limits.timeout_s) + 1,
        "file_mib": limits.scratch_mib,
        "count_threads": self.kind == "bubblewrap",
      },
      "shut": {
        "seccomp": self._seccomp(processes=False).hex(),
        "readable": [*self._libraries(), *self._packages],
        "devices": _DEVICES,
        "scratch": scratch if self.kind == "landlock" else None,
      },
      "scratch": scratch or _SCRATCH,
      "packages": self._import_from,
      "parent": 0 if scratch is None else os.getpid(),
      "max_bytes": limits.output_kib * 1024,
      "grader": self._grader.file if self._grader else None,
    }
    if self.kind == NONE:
      is_linux = platform.system() == "Linux"
      settings |= {"shut": None, "parent": os.getpid() if is_linux else 0}
      settings["limits"] = settings["limits"] if is_linux else None
    return json.dumps(settings)

  def _seccomp(self, *, processes: bool) -> bytes:
    if self.kind == NONE:
      return b""
    files = self.kind == "bubblewrap"
    return syscalls.program(platform.machine(), processes=processes, files=files)

  def _libraries(self) -> list[str]:
    """The interpreter and what it needs, and nothing of the rest of the machine."""
    mine = [self._python, *(f"{self._prefix}/{name}" for name in ("lib", "lib64"))]
    return [path for path in (*_SYSTEM, *mine) if os.path.exists(path)]

  def _bubblewrap(self, seccomp: int) -> list[str]:
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--new-session"]
    command += ["--die-with-parent", "--cap-drop", "ALL", "--seccomp", str(seccomp)]
    for path in _SYSTEM:
      if os.path.islink(path):
        command += ["--symlink", os.readlink(path), path]
    real = [p for p in [*self._libraries(), *self._packages] if not os.path.islink(p)]
    for path in real:
      command += ["--ro-bind", path, path]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for device in _DEVICES:
      command += ["--dev-bind", device, device]
    package = f"{_INSIDE}/grpo_jax"
    command += ["--ro-bind", str(_PACKAGE / "__init__.py"), f"{package}/__init__.py"]
    command += ["--ro-bind", str(_PACKAGE / "sandbox"), f"{package}/sandbox"]
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
    with tempfile.TemporaryFile() as said, mine, theirs:
      sandbox = self.start(theirs.fileno(), said.fileno())
      theirs.close()
      try:
        mine.settimeout(_START_S)
        works = mine.recv(1) == inside.READY
      except TimeoutError:
        works = False
      finally:
        sandbox.end()
      said.seek(0)
      reason = said.read(1000).decode(errors="replace").strip() or "it says nothing"
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
    """Kills it with all that is in it; of no effect on a dead one. From any thread."""
    if self._popen.poll() is None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self._popen.pid, signal.SIGKILL)

  def end(self) -> None:
    """Kills it, waits for its end and removes its folder."""
    self.kill()
    self._popen.wait()
    if self._scratch is not None:
      with contextlib.suppress(OSError):
        inside.empty(self._scratch)
        os.rmdir(self._scratch)


def compile_inside() -> None:
  """Compiles the modules of the sandbox once, so that not every process does.

  Where the package cannot be written, every process does.
  """
  compileall.compile_dir(Path(__file__).parent, maxlevels=0, quiet=2)


def _filled_pipe(content: bytes) -> int:
  """Returns the reading end of a pipe that holds a few bytes."""
  end, start = os.pipe()
  os.write(start, content)
  os.close(start)
  return end
