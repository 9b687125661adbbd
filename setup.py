"""Adds the files outside of the package to a wheel; everything else is in pyproject.toml.

`grpo_jax/files/package_data.py` finds them again. A checkout and an editable installation use the
files of the repository.

When pip is about to install the dependencies, too, it is refused at once on a machine that cannot
compile the one that needs it (scripts/can_install.py): pip would say so after all downloads.
"""

import os
import pathlib
import runpy
import subprocess
import sys

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("configs/*.py", "constraints/sglang_*.txt", "scripts/install_sglang.sh")


class BuildWithShipped(build_py):
  def run(self):
    super().run()
    if not self.editable_mode:
      for pattern in SHIPPED:
        self.ship(pattern)

  def ship(self, pattern: str) -> None:
    files = sorted(pathlib.Path().glob(pattern))
    if not files:
      raise FileNotFoundError(f"the source has no {pattern}, which belongs into the wheel")
    for file in files:
      target = pathlib.Path(self.build_lib, "grpo_jax", "shipped", file)
      self.mkpath(str(target.parent))
      self.copy_file(str(file), str(target))


def installs_dependencies():
  """Returns whether this is a step of a program that goes on to install or build dependencies."""
  parent = os.getppid()
  try:
    words = pathlib.Path(f"/proc/{parent}/cmdline").read_text().split("\0")
  except OSError:  # not Linux.
    asked = ["ps", "-o", "args=", "-p", str(parent)]
    words = subprocess.run(asked, capture_output=True, text=True).stdout.split()
  return bool({"install", "wheel"} & {*words}) and not {"--no-deps", "--dry-run"} & {*words}


if "dist_info" in sys.argv and installs_dependencies():
  if reason := runpy.run_path("scripts/can_install.py")["complaint"]():
    sys.exit(f"error: {reason}")

setup(cmdclass={"build_py": BuildWithShipped})
