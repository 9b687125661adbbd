"""Says in one message what this Python lacks to install grpo_jax, before `make` begins to.

It may be too old for the package, so this file keeps to what Python 3.6 understands.
"""

import importlib.util
import shutil
import subprocess
import sys

OLDEST, NEWEST_TESTED = (3, 11), (3, 13)


def complaint():
  """Returns what is missing and how to get it; "" if nothing is."""
  here = sys.version_info[:2]
  if here < OLDEST:
    wanted = f"grpo_jax needs Python >= {_dotted(OLDEST)}"
    return f"{wanted}, and {sys.executable} is {_dotted(here)}; {_another_python()}"
  if importlib.util.find_spec("ensurepip") and importlib.util.find_spec("venv"):
    return ""
  install = "your system's package of them"
  if shutil.which("apt-get"):  # no other system divides them.
    install = f"apt-get install python{_dotted(here)}-venv"
  return f"missing: the modules venv and ensurepip of {sys.executable}; to get them: {install}"


def _another_python():
  """Returns where a Python that is new enough is, or the command that installs one."""
  for minor in range(NEWEST_TESTED[1], OLDEST[1] - 1, -1):
    name = f"python3.{minor}"
    if _runs(name):
      return f"take {name}: make PYTHON={name} ..., or {name} -m venv .venv"
  install = f"your system's package of Python {_dotted(OLDEST)}"
  if shutil.which("apt-get"):
    install = "apt-get install python3.11 python3.11-venv"
  elif shutil.which("dnf"):
    install = "dnf install python3.12"
  elif shutil.which("brew"):
    install = "brew install python@3.12"
  return f"to get one: {install} (or conda create -n grpo python=3.12), then make PYTHON=..."


def _runs(name):
  """Returns whether a Python of that name is there and starts."""
  try:
    return subprocess.run([name, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0
  except OSError:
    return False


def _dotted(version):
  return ".".join(map(str, version))


if __name__ == "__main__":
  if sys.version_info[:2] > NEWEST_TESTED:
    newest = _dotted(NEWEST_TESTED)
    print(f"note: this Python is newer than {newest}, the newest that is tested;")
    print(f"      if the installation fails, try make PYTHON=python{newest}")
  sys.exit(complaint() or 0)
