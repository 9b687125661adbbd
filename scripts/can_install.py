"""Says in one message what this machine lacks to install grpo_jax, before pip begins.

The Makefile runs it with the Python that was chosen, and setup.py with the one that pip has; both
may be too old for the package, so this file keeps to what Python 3.6 understands.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile

OLDEST, NEWEST_TESTED = (3, 11), (3, 13)
# reasoning-gym pins it. It is the only dependency that is published as C source alone.
NEEDS_COMPILER = "pycosat==0.6.6"
C_CODE = "#include <Python.h>\nint grpo_jax(void) { return PY_MAJOR_VERSION; }\n"


def complaint(with_venv=False):
  """Returns what is missing and how to get it; "" if nothing is.

  Args:
    with_venv: Whether this Python will have to make a virtual environment.
  """
  here = sys.version_info[:2]
  if here < OLDEST:
    wanted = f"grpo_jax needs Python >= {_dotted(OLDEST)}"
    return f"{wanted}, and {sys.executable} is {_dotted(here)}; {_another_python()}"
  missing = []
  if with_venv and not (importlib.util.find_spec("ensurepip") and importlib.util.find_spec("venv")):
    missing.append(f"the modules venv and ensurepip of {sys.executable}")
  if not can_compile() and not has_without_compiler():
    missing.append(f"a C compiler with Python.h, which {NEEDS_COMPILER} needs")
  return "missing: {}; to get it: {}".format(", and ".join(missing), _packages()) if missing else ""


def can_compile():
  """Returns whether a C extension of this Python can be compiled and linked here."""
  compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
  with tempfile.TemporaryDirectory() as folder:
    source = os.path.join(folder, "grpo_jax.c")
    with open(source, "w") as file:
      file.write(C_CODE)
    include = "-I" + sysconfig.get_path("include")
    words = ["-shared", "-fPIC", include, source, "-o", os.path.join(folder, "grpo_jax.so")]
    return _succeeds(compiler + words)


def has_without_compiler():
  """Returns whether pip gets the package that would be compiled in another way.

  That is: it is installed (conda has it), or pip built it before, or an index has a wheel.
  """
  name, _, version = NEEDS_COMPILER.partition("==")
  folders = [sysconfig.get_path(each) for each in ("purelib", "platlib")]
  if any(os.path.isdir(os.path.join(f, name + "-" + version + ".dist-info")) for f in folders):
    return True
  tag = "-{}-cp{}{}-".format(version, *sys.version_info[:2])
  if tag in _printed("cache", "list", name):
    return True
  with tempfile.TemporaryDirectory() as folder:
    words = ["download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder, NEEDS_COMPILER]
    _printed(*words)
    return bool(os.listdir(folder))


def _printed(*words):
  """Returns what a command of pip prints; its environment is not the one of an isolated build."""
  outside = {name: each for name, each in os.environ.items() if name != "PYTHONPATH"}
  done = subprocess.run(
    [sys.executable, "-m", "pip"] + list(words),
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    stdin=subprocess.DEVNULL,
    env=outside,
  )
  return done.stdout.decode(errors="replace")


def _succeeds(words):
  try:
    return (
      subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    )
  except OSError:
    return False


def _packages():
  """Returns the command that installs a compiler, Python's headers and venv on this system."""
  python = "python" + _dotted(sys.version_info[:2])
  if os.environ.get("CONDA_PREFIX"):
    return "conda install -c conda-forge c-compiler, then `conda activate` again"
  if shutil.which("apt-get"):
    own = sys.base_prefix == "/usr"  # others bring their headers along.
    more = f" {python}-dev {python}-venv" if own else ""
    return "apt-get install build-essential" + more
  if shutil.which("dnf"):
    return "dnf install gcc {}-devel".format("python3" if python in _real("python3") else python)
  if sys.platform == "darwin":
    return "xcode-select --install"
  return "your system's packages of gcc and of Python's headers (python3-dev or python3-devel)"


def _another_python():
  """Returns where a Python that is new enough is, or the command that installs one."""
  for minor in range(NEWEST_TESTED[1], OLDEST[1] - 1, -1):
    name = f"python3.{minor}"
    if _succeeds([name, "-c", ""]):
      return f"take {name}: make PYTHON={name} ..., or {name} -m venv .venv"
  install = f"your system's package of Python {_dotted(OLDEST)}"
  if shutil.which("apt-get"):
    install = "apt-get install build-essential python3.11 python3.11-dev python3.11-venv"
  elif shutil.which("dnf"):
    install = "dnf install gcc python3.12 python3.12-devel"
  elif shutil.which("brew"):
    install = "brew install python@3.12"
  return f"to get one: {install} (or conda create -n grpo python=3.12), then make PYTHON=..."


def _real(program):
  return os.path.realpath(shutil.which(program) or "")


def _dotted(version):
  return ".".join(map(str, version))


if __name__ == "__main__":
  if sys.version_info[:2] > NEWEST_TESTED:
    newest = _dotted(NEWEST_TESTED)
    print(f"note: this Python is newer than {newest}, the newest that is tested;")
    print(f"      if the installation fails, try make PYTHON=python{newest}")
  sys.exit(complaint(with_venv=True) or 0)
