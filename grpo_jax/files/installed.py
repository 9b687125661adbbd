"""The installed packages against the versions that grpo_jax needs, as pyproject.toml has them."""

import functools
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

import grpo_jax
from grpo_jax.errors import ExpectedFailure
from grpo_jax.files import package_data


class WrongPackages(ExpectedFailure, ImportError):
  """Packages are missing, or have versions that grpo_jax does not run with."""


class Wrong(NamedTuple):
  """A package that is missing, or whose version is outside of the bounds."""

  text: str
  requirement: str  # what pip installs to repair it, such as "flax==0.12.8".


def project() -> Mapping[str, Any]:
  """Returns "requires-python" and "dependencies": of the checkout, or of what is installed."""
  file = package_data.folder() / "pyproject.toml"
  if file.is_file():
    return tomllib.loads(file.read_text())["project"]
  try:
    wanted = metadata.metadata("grpo-jax")["Requires-Python"]
    return {"requires-python": wanted, "dependencies": metadata.requires("grpo-jax")}
  except metadata.PackageNotFoundError:  # a copy of the package's folder: its needs are not known.
    return {"requires-python": "", "dependencies": []}


def wrong() -> list[Wrong]:
  """Returns the packages that are not as grpo_jax needs them, without importing any.

  The bounds of jaxlib are those of the installed jax: it does not import with any other jaxlib.
  """
  found = _outside(project()["dependencies"])
  if not any(Requirement(each.requirement).name == "jax" for each in found):
    try:
      of_jax = metadata.requires("jax") or []
    except metadata.PackageNotFoundError:
      of_jax = []
    found += _outside(text for text in of_jax if Requirement(text).name == "jaxlib")
  return found


def is_strict() -> bool:
  """Returns whether other versions than those that grpo_jax needs are refused."""
  return not os.environ.get("GRPO_JAX_ANY_VERSIONS")


@functools.cache
def check() -> None:
  """Refuses to compute with other packages than grpo_jax needs; takes hundredths of a second.

  Raises:
    WrongPackages: A package is missing or has another version; the message has the repair. Or
      another version of jax or numpy was imported before the present one was installed. Or a
      folder `grpo_jax` that is not the package, such as a clone of that name, hides it.
  """
  if grpo_jax.__file__ is None:
    hides = next(iter(grpo_jax.__path__))
    raise WrongPackages(f"the folder {hides} hides the package: rename it, or work elsewhere")
  found = wrong() if is_strict() else []
  if found:
    reasons = "; ".join(each.text for each in found)
    wanted = " ".join(f'"{each.requirement}"' for each in found)
    raise WrongPackages(f"{reasons}; to repair it: pip install {wanted}")
  for name in ("jax", "numpy"):  # Colab imports numpy before the first cell.
    imported = getattr(sys.modules.get(name), "__version__", None)
    if is_strict() and imported and _minor(imported) != _minor(here := metadata.version(name)):
      raise WrongPackages(
        f"{name} {imported} was imported before {name} {here} was installed: restart Python (in a"
        " notebook its kernel; on Colab: Runtime > Restart session)"
      )


def _minor(version: str) -> tuple[int, ...]:
  """Returns the first two numbers of a version; development versions of both agree in them."""
  return Version(version).release[:2]


def _outside(requirements: Iterable[str]) -> list[Wrong]:
  """Returns what is wrong with the packages that lines of requirements name."""
  found = []
  for line in requirements:
    needed = Requirement(line)
    if needed.marker and not needed.marker.evaluate({"extra": ""}):
      continue
    wanted = f"{needed.name}{needed.specifier}"
    try:
      here = metadata.version(needed.name)
      fits = needed.specifier.contains(Version(str(here)), prereleases=True)
    except metadata.PackageNotFoundError:
      found.append(Wrong(f"{needed.name} is not installed", wanted))
      continue
    except (InvalidVersion, KeyError):  # an interrupted installation left no metadata.
      text = f"{needed.name} is not completely installed (its version cannot be read)"
      found.append(Wrong(text, wanted))
      continue
    if not fits:
      text = f"{needed.name} {here} is installed; grpo_jax needs {needed.specifier}"
      found.append(Wrong(text, wanted))
  return found
