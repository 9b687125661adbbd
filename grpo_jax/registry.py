"""Finds modules and functions by name; on failure says what exists and what was probably meant."""

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from grpo_jax.values.names import hint as nearest

T = TypeVar("T")


def choose(what: str, name: str, table: Mapping[str, T]) -> T:
  """Returns table[name]; raises ValueError that lists the names, if there is none such."""
  if name not in table:
    known = ", ".join(sorted(table))
    raise ValueError(f"unknown {what} {name!r}{nearest(name, table)}; there are: {known}")
  return table[name]


def check_arguments(
  what: str, function: Callable[..., Any], given: Iterable[str], *, usual: Iterable[str] = ()
) -> None:
  """Raises ValueError unless a function can be called with arguments of these names.

  Args:
    what: Description of the function, for the message.
    function: Function to be called.
    given: Names that a user chose.
    usual: Names of arguments that every such function is given; not offered to the user.
  """
  given, usual = set(given), set(usual)
  parameters = inspect.signature(function).parameters.values()
  variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
  named = [p for p in parameters if p.kind not in variable]
  takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
  own = [p.name for p in named if p.name not in usual]
  unknown = [] if takes_any else sorted(given - {*own})
  if unknown:
    hint = nearest(unknown[0], own)
    raise ValueError(f"{what} takes no {unknown[0]!r}{hint}; it takes: {', '.join(own) or 'none'}")
  unasked = [] if takes_any else sorted(usual - {p.name for p in named})
  if unasked:
    raise ValueError(f"{what} must take {', '.join(unasked)}")
  missing = [p.name for p in named if p.default is p.empty and p.name not in given | usual]
  if missing:
    raise ValueError(f"{what} needs {', '.join(missing)}")


def module(package: str, name: str, *, hidden: Iterable[str] = ()) -> ModuleType:
  """Imports a module by its name in a package of ours, or a module of the user's own.

  Args:
    package: full name of the package that is searched, e.g. "grpo_jax.environments".
    name: name of one of its modules; any other name, with a dot or without, is imported as it
      stands.
    hidden: modules of the package that cannot be chosen.

  Returns:
    The module.

  Raises:
    ValueError: there is no such module. An ImportError from within the module passes
      through untouched, since its cause lies there.
  """
  if name.endswith(".py"):
    raise ValueError(f"modules are named without .py, as in `import`; got {name!r}")
  if "." in name:
    return _import(name)
  available = sorted(set(modules(package)) - set(hidden))
  if name not in available:
    if name in sys.modules or (name.isidentifier() and importlib.util.find_spec(name)):
      return importlib.import_module(name)
    raise ValueError(
      f"{package} has no module {name!r}{nearest(name, available)}; there are: "
      f"{', '.join(available)}; a module of your own, on the Python path, is named as in `import`"
    )
  return importlib.import_module(f"{package}.{name}")


def module_or_member(
  package: str, name: str, *, hidden: Iterable[str] = ()
) -> ModuleType | Callable[..., Any]:
  """Imports what `module` imports, or the function or class that a dotted path names.

  Args:
    package: see `module`.
    name: see `module`; or "my_module.MyClass".
    hidden: see `module`.

  Raises:
    ValueError: there is neither such a module nor such a member.
  """
  try:
    return module(package, name, hidden=hidden)
  except ValueError:
    if "." not in name or name.endswith(".py"):
      raise
  return function(name)


def modules(package: str) -> list[str]:
  """Lists the names of the public modules of a package."""
  paths = importlib.import_module(package).__path__
  return [m.name for m in pkgutil.iter_modules(paths) if not m.name.startswith("_")]


def function(path: str) -> Callable[..., Any]:
  """Returns the function named by a dotted path, "package.module.function".

  Raises:
    ValueError: the module or the function does not exist, or it is not callable.
  """
  home, dot, name = path.rpartition(".")
  if not dot or not home:
    raise ValueError(f"a function is named by 'package.module.function', got {path!r}")
  owner = _import(home)
  members = vars(owner)
  if name not in members:
    public = [n for n, value in members.items() if callable(value) and not n.startswith("_")]
    raise ValueError(f"{home} has no function {name!r}{nearest(name, public)}")
  if not callable(members[name]):
    raise ValueError(f"{path} is not a function but {type(members[name]).__name__}")
  return members[name]


def _import(name: str) -> ModuleType:
  """Imports a module, turning "it does not exist", and only that, into a ValueError."""
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    if error.name is None or not f"{name}.".startswith(f"{error.name}."):
      raise
    raise ValueError(f"cannot import {name!r}: no module {error.name!r} on the path") from error
