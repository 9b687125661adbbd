"""Configurations: loaded from a file, checked, written, and compared with a stored one.

A configuration is an ml_collections ConfigDict returned by `get_config()` of a Python
file. A user's mistake raises a ConfigError, whose message names the file and line, or the
field, and what was expected. `command_line.py` handles overrides by flags.
"""

import ast
import dataclasses
import fnmatch
import json
import linecache
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from ml_collections import ConfigDict, FieldReference, config_dict

from grpo_jax import processes, registry
from grpo_jax.config import other_programs, sections
from grpo_jax.config.options import ALSO, Config
from grpo_jax.errors import ExpectedFailure
from grpo_jax.files import atomic, local_paths, package_data
from grpo_jax.values import json_numbers, json_text, names, options

AnyConfig = ConfigDict | Config  # as users edit it, or as the code reads it.
Rule = Callable[[Any], Iterable[str]]
_METHODS = {name for name in dir(ConfigDict) if not name.startswith("_")}
_MOST_OFFERED = 20  # files that a message lists.
_LONGEST_SHOWN = 160  # characters of a value in a comparison.


class ConfigError(ExpectedFailure, ValueError):
  """A configuration cannot be used; the user sees only the message, without a traceback."""

  exit_code = 2


def load(path: str | os.PathLike[str]) -> ConfigDict:
  """Runs a configuration file and returns what its `get_config()` returns, locked.

  Setting an unknown field is an error, whose message names the nearest known one.

  The parent of the file's folder is added to the import path, so that a file in `configs/`
  can import its neighbours from any working directory. So is the parent of the package's own
  configs: `import configs.base` works in a file anywhere.

  Args:
    path: Path of a Python file, or name of a config of the package, such as "quickstart";
      "file.py:string" and "name:string" pass "string" to `get_config`.

  Raises:
    ConfigError: The file does not exist, has a mistake (file:line) or no `get_config`, its
      result is not a ConfigDict, or a section has the name of a ConfigDict method.
  """
  path = os.fspath(path)
  if reason := local_paths.complaint("--config", path):
    raise ConfigError(reason)
  _, colon, word = path.partition(":")
  file = file_of(path)
  for root in (str(file.resolve().parent.parent), str(package_data.folder())):
    if root not in sys.path:
      sys.path.append(root)
  config = _run(file, [word] if colon else [])
  if not isinstance(config, ConfigDict):
    raise ConfigError(
      f"{file}: get_config() must return an ml_collections.ConfigDict, got {_kind(config)}"
    )
  try:
    config.lock()
  except config_dict.RequiredValueError as error:
    raise ConfigError(f"{file}: a required_placeholder has no value; use placeholder") from error
  for section in _reserved(config, ""):
    raise ConfigError(
      f"{file}: {section!r} cannot be the name of a field: it is a method of ConfigDict"
    )
  adopted = sections.adopt(config)
  others = vars(adopted).get("_files", ())  # of a config that this one changes.
  object.__setattr__(adopted, "_files", (str(file), *others))
  return adopted


def place_of(config: AnyConfig, name: str) -> str:
  """Returns "file:line: " of the line of a configuration file that sets a field.

  The file, those that it loads, and those in its folder that it imports are searched for the name.

  Args:
    config: Configuration that `load` returned.
    name: Dotted name of the field.

  Returns:
    The place; "" if it is not found, or `load` did not return the configuration.
  """
  loaded = vars(config).get("_files")
  if loaded is None:
    return ""
  folder = os.path.dirname(os.path.abspath(loaded[0]))
  others = registry.users_modules().values()
  beside = [
    each
    for each in others
    if each.endswith(".py") and os.path.dirname(os.path.abspath(each)) == folder
  ]
  for each in [*loaded, *beside]:
    if line := _line_that_sets(pathlib.Path(each), name.rpartition(".")[2]):
      return f"{each}:{line}: "
  return ""


def _line_that_sets(file: pathlib.Path, field: str) -> int | None:
  """Returns the last line of a file that sets an attribute, an item or an argument of a name."""
  lines = []
  for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
    named = None
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
      named, line = node.attr, node.lineno
    elif isinstance(node, ast.keyword):
      named, line = node.arg, node.lineno
    elif isinstance(node, ast.Constant):
      named, line = str(node.value).rpartition(".")[2], node.lineno
    if named == field:
      lines.append(line)
  return max(lines, default=None)


def file_of(path: str) -> pathlib.Path:
  """Returns the file of a configuration.

  Args:
    path: Path or name, as for `load`.

  Raises:
    ConfigError: There is no such file, and no config of the package has this name.
  """
  name = path.partition(":")[0]
  file = place(name)
  if not file.is_file():
    raise ConfigError(_not_found(file))
  return file


def place(name: str) -> pathlib.Path:
  """Returns where the file of a configuration is, by its name or path; it may be missing."""
  is_ours = _is_bare(name) and name in by_name()
  return _folder() / f"{name}.py" if is_ours else pathlib.Path(name)


def by_name() -> list[str]:
  """Returns the names of the configs of the package."""
  return [pathlib.Path(file).stem for file in present(_folder())]


def typed(config: AnyConfig) -> Config:
  """Returns a configuration in the form that everything behind the command line reads."""
  return config if isinstance(config, Config) else options.read(Config, as_dict(config))


def as_dict(config: AnyConfig) -> dict[str, Any]:
  """Returns the values as nested dicts, their names in alphabetical order."""
  is_typed = isinstance(config, Config)
  return _in_order(options.plain(config) if is_typed else _resolved(config))


def _resolved(config: ConfigDict) -> dict[str, Any]:
  return config.to_dict(preserve_field_references=False)


def _in_order(section: Mapping[str, Any]) -> dict[str, Any]:
  ordered = sorted(section.items())
  return {name: _in_order(x) if isinstance(x, Mapping) else x for name, x in ordered}


C = TypeVar("C", bound=AnyConfig)


def replaced(config: C, values: Mapping[str, Any]) -> C:
  """Returns a copy with new values of some fields, given by dotted name; a ConfigDict is locked.

  In the copy, references and placeholders are replaced by their values.
  """
  if isinstance(config, Config):
    whole = options.plain(config)
    for name, value in values.items():
      section, (*path, last) = whole, name.split(".")
      for part in path:
        section = section[part]
      section[last] = value
    return cast(C, options.read(Config, whole))
  copy = ConfigDict(_resolved(config))
  with copy.unlocked(), copy.ignore_type():
    for name, value in values.items():
      section: Any = copy
      *path, last = name.split(".")
      for part in path:
        section = section[part]
      section[last] = value
  return cast(C, copy.lock())


def fields(config: ConfigDict) -> dict[str, Any]:
  """Returns every value by its dotted name, in the order of the file; an empty section is {}."""
  return dict(_walk(config, ""))


def plain_fields(config: AnyConfig) -> dict[str, Any]:
  """Returns `fields`, with empty sections as plain dicts."""
  return dict(_walk(as_dict(config), ""))


def nullable(config: ConfigDict) -> set[str]:
  """Returns the dotted names of fields that may be None: those that are None, and references.

  `config_dict.FieldReference(20.0)` makes a reference of a field with a value.
  """
  return {
    name
    for name, value in _walk(config, "", references=True)
    if value is None or isinstance(value, FieldReference)
  }


def refusal(config: ConfigDict, name: str) -> str | None:
  """Returns why a field cannot be set, with the nearest valid name; None if it can.

  Args:
    config: Configuration.
    name: Dotted name such as "loss.clip_low"; anything after an index in brackets is ignored.
  """
  found, path = config, ""
  for part in name.split("."):
    if not isinstance(found, ConfigDict):
      return f"{path} is not a section but {_kind(found)}"
    key, bracket, _ = part.partition("[")
    if key not in found:
      if reason := sections.left_out(name):
        return reason
      close = names.nearest_field(name, [*fields(config), *ALSO], cutoff=0.4)
      hint = other_programs.hint(name) or names.did_you_mean(close)
      return f"there is no field {name!r}{hint}; {_list(found, path)}"
    path = f"{path}.{key}" if path else key
    found = found[key]
    if bracket:
      return None
  if isinstance(found, ConfigDict) and len(found):
    new = "; to add one: --config.environments.NAME.module=MODULE"
    hint = new if path == "environments" else ""
    return f"it is a section; set its fields instead. {_list(found, path)}{hint}"
  return None


def check(config: AnyConfig, rules: Iterable[Rule]) -> None:
  """Applies every rule and raises one ConfigError with all complaints.

  Args:
    config: Resolved configuration.
    rules: Functions that take the configuration and return complaints.

  Raises:
    ConfigError: There was at least one complaint.
  """
  complaints = [complaint for rule in rules for complaint in rule(config)]
  if complaints:
    lines = "".join(f"\n  - {complaint}" for complaint in complaints)
    raise ConfigError(f"the configuration cannot work:{lines}")


def to_json(config: AnyConfig) -> dict[str, Any]:
  """Returns the resolved values as strict JSON: tuples as lists, inf and nan as strings.

  Raises:
    ConfigError: A value is not a number, string, boolean, None, list or section.
  """
  return {key: _plain(value, key) for key, value in as_dict(config).items()}


def write(config: AnyConfig, path: str | os.PathLike[str]) -> None:
  """Writes config.json atomically, on the main process.

  Raises:
    WriteError: The file cannot be written; the old one is unchanged.
  """
  if processes.is_main():
    atomic.replace_file(pathlib.Path(path), json.dumps(to_json(config), indent=2) + "\n")


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads a file written by `write`.

  Raises:
    ConfigError: The file cannot be read or parsed.
  """
  try:
    return json_text.parsed_object(pathlib.Path(path).read_bytes(), is_strict=True)
  except (OSError, ValueError) as error:
    raise ConfigError(f"{path} cannot be read: {error}") from error


@dataclasses.dataclass(frozen=True)
class Differences:
  """Differences between a stored configuration and the present one, one line per field."""

  harmless: tuple[str, ...]  # may differ in a continued run.
  serious: tuple[str, ...]  # change what the run learns.


def differences(
  stored: Mapping[str, Any], config: AnyConfig, *, harmless: Sequence[str] = ()
) -> Differences:
  """Compares a stored configuration with the present one.

  Args:
    stored: Stored values, as `to_json` returned them.
    config: Present configuration.
    harmless: Names of fields that may differ: "total_steps", or with wildcards "logging.*".

  Returns:
    Lines such as "loss.clip_low: was 0.2, is 0.3".
  """
  before, now = dict(_walk(stored, "")), dict(_walk(to_json(config), ""))
  lines: dict[bool, list[str]] = {True: [], False: []}
  for name in [*now, *(name for name in before if name not in now)]:
    if name in before and name in now and before[name] == now[name]:
      continue
    was, is_now = (_shown(values[name]) if name in values else "absent" for values in (before, now))
    is_harmless = any(fnmatch.fnmatchcase(name, pattern) for pattern in harmless)
    lines[is_harmless].append(f"{name}: was {was}, is {is_now}")
  return Differences(harmless=tuple(lines[True]), serious=tuple(lines[False]))


def _shown(value: Any) -> str:
  text = json.dumps(value)
  return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def present(folder: str | os.PathLike[str] = "configs") -> list[str]:
  """Returns the paths of the configuration files in a folder, as a user would type them."""
  return [
    str(path) for path in sorted(pathlib.Path(folder).glob("*.py")) if path.stem != "__init__"
  ]


def _run(file: pathlib.Path, arguments: Sequence[str]) -> Any:
  """Executes a file and calls its `get_config`; every mistake in it becomes a ConfigError."""
  scope: dict[str, Any] = {"__name__": "__config__", "__file__": str(file)}
  try:
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), scope)
    if not callable(scope.get("get_config")):
      raise ConfigError(f"{file}: has no function get_config() that returns a ConfigDict")
    return scope["get_config"](*arguments)
  except ConfigError:
    raise
  except SyntaxError as error:
    line = f"\n    {error.text.strip()}" if error.text else ""
    raise ConfigError(f"{error.filename}:{error.lineno}: {error.msg}{line}") from error
  except UnicodeDecodeError as error:
    raise ConfigError(f"{file}: is not UTF-8 text: {error}") from error
  # A configuration file is user code and may raise anything, or exit.
  except (Exception, SystemExit) as error:
    raise ConfigError(_place(error, file)) from error


def _place(error: BaseException, file: pathlib.Path) -> str:
  """Returns "file:line: error" for the innermost frame in a configuration file of the user."""
  package, _, named = str(getattr(error, "name", "")).partition(".")
  if isinstance(error, ModuleNotFoundError) and package == "configs" and named in by_name():
    # The user's own folder or module of this name precedes that of the package.
    error.msg += f"; write configuration.load({named!r}) of grpo_jax, or grpo_jax.config.base"
  frames = traceback.extract_tb(error.__traceback__)
  folder = str(file.parent)
  own = [f for f in frames if f.filename == str(file) or os.path.dirname(f.filename) == folder]
  last = own[-1] if own else None
  if last is None:
    return f"{file}: {type(error).__name__}: {error}"
  text = linecache.getline(last.filename, last.lineno or 0).strip()
  for named in re.findall(r"\bconfig\.([\w.]+)", text):
    if reason := sections.left_out(named):
      return f"{last.filename}:{last.lineno}: {reason}\n    {text}"
  return f"{last.filename}:{last.lineno}: {type(error).__name__}: {error}\n    {text}"


def _not_found(file: pathlib.Path) -> str:
  """Returns the message that a file is missing, with the files that exist."""
  if file.is_dir():
    return f"--config needs a Python file, but {file} is a folder; {_offer(present(file))}"
  near = present(file.parent) or present()
  if _is_bare(str(file)):
    beside = {pathlib.Path(each).stem: each for each in [*present("."), *near]}
    close = names.nearest(str(file), [*by_name(), *beside])
    hint = f" (did you mean {beside.get(close[0], close[0])!r}?)" if close else ""
    return (
      f"no config {str(file)!r}{hint}; by name there are: {', '.join(by_name())}; give a file of"
      " your own by its path, with .py"
    )
  hint = registry.nearest(str(file), near)
  if file.suffix == ".py" and file.stem in by_name():
    hint = f" (did you mean {file.stem!r}, the config of the package?)"
  return f"no file {file}{hint}; {_offer(near)}"


def _folder() -> pathlib.Path:
  return package_data.folder() / "configs"


def _is_bare(name: str) -> bool:
  """Returns whether this is a name, such as "quickstart", and not a path."""
  return bool(name) and os.sep not in name and not name.endswith(".py")


def _offer(files: Sequence[str]) -> str:
  listed = ", ".join(files[:_MOST_OFFERED]) + ", …" * (len(files) > _MOST_OFFERED)
  return f"there are: {listed}" if files else "no configuration files were found"


def _list(section: ConfigDict, path: str) -> str:
  if not len(section):
    return f"{path} is empty here and is set as a whole: --config.{path}=\"{{'KEY': VALUE}}\""
  return f"{path or 'the configuration'} has: {', '.join(sections.known_in(section, path))}"


def _reserved(section: Mapping[str, Any] | ConfigDict, path: str) -> Iterator[str]:
  """Yields the dotted names that hide, or are hidden by, a method of ConfigDict."""
  for key, value in section.items():
    name = f"{path}.{key}" if path else str(key)
    if key in _METHODS:
      yield name
    if isinstance(value, ConfigDict):
      yield from _reserved(value, name)


def _walk(section: Any, path: str, *, references: bool = False) -> Iterator[tuple[str, Any]]:
  """Yields (dotted name, value) of every field below a section."""
  entries = section.items(preserve_field_references=True) if references else section.items()
  for key, value in entries:
    name = f"{path}.{key}" if path else str(key)
    if isinstance(value, Mapping | ConfigDict) and len(value):
      yield from _walk(value, name, references=references)
    else:
      yield name, value


def _plain(value: Any, name: str) -> Any:
  """Returns a value as strict JSON."""
  if isinstance(value, Mapping):
    return {str(key): _plain(each, f"{name}.{key}") for key, each in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(each, f"{name}[{index}]") for index, each in enumerate(value)]
  if isinstance(value, float):
    return json_numbers.encoded(value)
  if value is None or isinstance(value, bool | int | str):
    return value
  raise ConfigError(f"{name} is {_kind(value)}; a configuration holds numbers, strings and lists")


def _kind(value: Any) -> str:
  return "None" if value is None else f"{value!r} ({type(value).__name__})"
