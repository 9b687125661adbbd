"""Finds modules and functions by name; errors list the valid names and suggest the nearest."""

import contextlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

from grpo_jax.errors import ExpectedFailure, is_of_user, place_and_reason
from grpo_jax.values.names import hint as nearest

T = TypeVar("T")
# Modules of packages/ that extend a package of the trainer: name there -> module. Configs give the
# last word or the whole name; nothing else in the trainer imports them. Entry points would need an
# installed distribution, and a checkout may be used without one.
SATELLITES = {
  "grpo_jax.environments.nemo_gym": "grpo_environments.nemo_gym",
  "grpo_jax.environments.openenv": "grpo_environments.openenv",
  "grpo_jax.environments.sliding_puzzle": "grpo_environments.sliding_puzzle",
  "grpo_jax.environments.verifiers": "grpo_environments.verifiers",
  "grpo_jax.run_folder.sinks.mlflow": "grpo_trackers.mlflow",
  "grpo_jax.run_folder.sinks.swanlab": "grpo_trackers.swanlab",
  "grpo_jax.run_folder.sinks.trackio": "grpo_trackers.trackio",
}
# The packages of this distribution.
OURS = (
  *("grpo_jax", "grpo_kernels", "grpo_sandbox"),
  *("grpo_environments", "grpo_plan", "grpo_trackers"),
)
REMEDY = "in the working folder, in a folder of PYTHONPATH, or installed"


def choose(what: str, name: str, table: Mapping[str, T]) -> T:
  """Returns table[name]; for an unknown name raises a ValueError that lists the known ones."""
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
    usual: Names of arguments that every such function receives; messages do not suggest them.
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
  """Imports one of a package's modules by name, or a module of the user's own.

  Args:
    package: Full name of the package to search, e.g. "grpo_jax.environments".
    name: Name of one of its modules. Any other name is imported unchanged.
    hidden: Modules of the package that cannot be chosen.

  Returns:
    The module.

  Raises:
    ValueError: There is no such module, or importing a module of the user fails.
  """
  if name.endswith(".py"):
    raise ValueError(f"modules are named without .py, as in `import`; got {name!r}")
  if "." in name:
    return _import(name)
  available = sorted(set(modules(package)) - set(hidden))
  if name not in available:
    if name in sys.modules or (name.isidentifier() and importlib.util.find_spec(name)):
      return _import(name)
    raise ValueError(
      f"{package} has no module {name!r}{nearest(name, available)}; there are: "
      f"{', '.join(available)}; name a module of your own as in `import`, {REMEDY}"
    )
  return _import(f"{package}.{name}")


def module_or_member(
  package: str, name: str, *, hidden: Iterable[str] = ()
) -> ModuleType | Callable[..., Any]:
  """Imports what `module` imports, or the function or class that a dotted path names.

  Args:
    package: Full name of the package to search.
    name: Name as for `module`, or a dotted path such as "my_module.MyClass".
    hidden: Modules of the package that cannot be chosen.

  Raises:
    ValueError: Neither a module nor a member of that name exists.
  """
  try:
    return module(package, name, hidden=hidden)
  except ValueError:
    if "." not in name or name.endswith(".py"):
      raise
  return function(name)


def modules(package: str) -> list[str]:
  """Lists the names of the public modules of a package, those in packages/ among them."""
  paths = importlib.import_module(package).__path__
  own = [m.name for m in pkgutil.iter_modules(paths) if not m.name.startswith("_")]
  divided = (path.rpartition(".") for path in SATELLITES)
  return own + [name for home, _, name in divided if home == package]


def function(path: str) -> Callable[..., Any]:
  """Returns the function named by a dotted path, "package.module.function".

  Raises:
    ValueError: The module or the function does not exist, it is not callable, or importing a module
      of the user fails.
  """
  home, dot, name = path.rpartition(".")
  if not dot or not name or home.startswith((".", "/")) or not home:
    raise ValueError(f"a function is named by 'package.module.function', got {path!r}")
  owner = _import(home)
  members = vars(owner)
  if name not in members:
    public = [n for n, value in members.items() if callable(value) and not n.startswith("_")]
    raise ValueError(f"{home} has no function {name!r}{nearest(name, public)}")
  if not callable(members[name]):
    raise ValueError(f"{path} is not a function but {type(members[name]).__name__}")
  return members[name]


def called(what: str, maker: Callable[..., T], **arguments: Any) -> T:
  """Calls a function that a config names, and returns what it returns.

  Args:
    what: Description of the function, for the message.
    maker: Function or class.
    **arguments: Arguments of the call.

  Raises:
    ValueError: The function is user code and failed; the message is one line with file and line.
  """
  with in_one_line(what, getattr(maker, "__module__", ""), says=(ValueError,)):
    return maker(**arguments)


def _import(name: str) -> ModuleType:
  """Imports a module; raises ValueError if it does not exist, or if user code in it fails."""
  name = SATELLITES.get(name, name)
  with in_one_line(f"importing {name!r} failed", name):
    try:
      return importlib.import_module(name)
    except ModuleNotFoundError as error:
      if error.name is None or not f"{name}.".startswith(f"{error.name}."):
        raise
      missing = error.name
  raise ValueError(f"cannot import {name!r}: there is no module {missing!r}; it must be {REMEDY}")


@contextlib.contextmanager
def in_one_line(
  what: str, module: str, *, says: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
  """Turns what user code raises into a ValueError of one line, with the file and the line.

  Args:
    what: Beginning of the message.
    module: Module of the code, or the dotted path of a function in it. Exceptions of our own
      modules pass through: they are bugs.
    says: Exceptions that pass through because their messages explain themselves.

  Raises:
    ValueError: The code raised an exception, or asked the process to exit.
  """
  try:
    yield
  except (Exception, SystemExit) as error:
    is_ours = module.partition(".")[0] in OURS
    if is_ours or isinstance(error, (ExpectedFailure, *says)):
      raise
    raise ValueError(f"{what}: {place_and_reason(error)}") from error


def users_modules() -> dict[str, str]:
  """Returns the source files of the imported modules that are a user's, by the module's name."""
  found = {}
  for name, each in list(sys.modules.items()):
    file = getattr(each, "__file__", None)
    is_ours = name.partition(".")[0] in OURS
    if isinstance(file, str) and not is_ours and is_of_user(os.path.abspath(file)):
      found[name] = file
  return dict(sorted(found.items()))
