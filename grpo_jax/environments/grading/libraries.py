"""Finds the files that a grader needs: a few distributions and their requirements."""

import functools
import importlib.metadata
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePath

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@functools.cache
def needed(*names: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Finds the files of distributions.

  Args:
    *names: Names of distributions, such as "math-verify".

  Returns:
    Folders to import from, and the files and folders in them that belong to the distributions
    or to their installed requirements.

  Raises:
    ModuleNotFoundError: A named distribution is not installed.
  """
  for name in names:
    try:
      importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
      raise ModuleNotFoundError(
        f"the package {name} is not installed: pip install {name}"
      ) from error
  roots, files = set(), set()
  for distribution in _closure(names):
    root = Path(os.path.realpath(str(distribution.locate_file(""))))
    roots.add(str(root))
    entries = {path.parts[0] for path in _installed(distribution)} - {"..", "__pycache__"}
    files |= {str(root / entry) for entry in entries if (root / entry).exists()}
  return tuple(sorted(roots)), tuple(sorted(files))


def _installed(distribution: importlib.metadata.Distribution) -> Iterable[PurePath]:
  """Returns the installed files of a distribution, relative to the folder to import from.

  `setup.py install`, which pip before 23.1 runs where the package wheel is missing (Debian 12),
  lists them relative to its egg-info folder; `Distribution.files` of Python 3.11 has the sources.
  """
  listed = distribution.read_text("installed-files.txt")
  if listed is None:
    return distribution.files or ()
  return [PurePath(line).relative_to("..") for line in listed.split("\n") if line.startswith("../")]


def _closure(names: tuple[str, ...]) -> list[importlib.metadata.Distribution]:
  """Returns the distributions and all their requirements, as far as they are installed."""
  found: dict[str, importlib.metadata.Distribution] = {}
  waiting = list(names)
  while waiting:
    name = _canonical(waiting.pop())
    if name in found:
      continue
    try:
      found[name] = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
      continue
    for requirement in found[name].requires or ():
      named = _NAME.match(requirement)
      if named and "extra ==" not in requirement:
        waiting.append(named[0])
  return list(found.values())


def _canonical(name: str) -> str:
  return re.sub(r"[-_.]+", "-", name).lower()
