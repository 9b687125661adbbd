"""Adds the files outside of the package to a wheel; everything else is in pyproject.toml.

`grpo_jax/files/package_data.py` finds them again. A checkout and an editable installation use the
files of the repository.
"""

import pathlib

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


setup(cmdclass={"build_py": BuildWithShipped})
