"""Values for fields of a configuration, by dotted name: what flags and Python have in common."""

import copy
import fnmatch
import numbers
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from grpo_jax.config import configuration
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import ALSO, OPEN, OPTIONS
from grpo_jax.values import checked

# Sections of which an override may add a field. Tasks of data are set as a whole.
OPEN_SECTIONS = (*(name for name in OPEN if name != "data.tasks"), "environments.*")
_EXPECTED = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def override(config: ConfigDict, values: Mapping[str, Any]) -> ConfigDict:
  """Sets fields of a configuration to Python values; all of them, or none if one cannot be set.

  The rules and messages are those of the command line: a mistyped name is answered with the
  nearest one, a value is checked against the type and the range of its field, and another
  `model.path` drops the `model.fallback` of the file.

  Args:
    config: Configuration that `load` returned; it is changed in place.
    values: Dotted name -> value: {"total_steps": 3, "loss.clip_high": 0.28}. A mapping sets the
      fields of a section and leaves its other fields as they are; it may add an environment:
      {"environments.mine": {"module": "function", "path": "my_rewards.brevity"}}.

  Returns:
    The same configuration.

  Raises:
    ConfigError: A name or a value cannot be used; the message has a line for each.
  """
  _apply(copy.deepcopy(config), values)  # nothing is changed if this fails.
  _apply(config, values)
  return config


def names_in(config: ConfigDict, values: Mapping[str, Any]) -> set[str]:
  """Returns the dotted names of the fields that `override` would set."""
  return {name for name, _ in _flat(config, values)}


def make_room(config: ConfigDict, names: Iterable[str]) -> None:
  """Adds, without values, the fields that overrides name and that open sections lack.

  An environment is added by the name of its module, `environments.NAME.module`.
  """
  names = list(names)
  for name in names:
    made = re.fullmatch(r"environments\.(\w+)\.module", name)
    known: Any = config.get("environments")
    if made and isinstance(known, ConfigDict) and not (made[1] in known or hasattr(known, made[1])):
      with known.unlocked():
        known[made[1]] = ConfigDict()
  for name in names:
    path, _, field = name.rpartition(".")
    if any(fnmatch.fnmatchcase(path, pattern) for pattern in OPEN_SECTIONS):
      section = _section(config, path)
      if isinstance(section, ConfigDict) and field.isidentifier() and field not in section:
        with section.unlocked():
          section[field] = None
    elif name in ALSO and field not in _section(config, path):
      with config.unlocked():
        _section(config, path)[field] = placeholder(ALSO[name])


def drop_fallback(config: ConfigDict, of_file: Mapping[str, Any]) -> None:
  """Drops the file's `model.fallback` where an override names another model.

  A fallback replaces one model: a user who names another one wants that one, or an error. A
  fallback that an override gives is kept.

  Args:
    config: Config with the overrides applied.
    of_file: Values before that.
  """
  name = "model.fallback"
  now = configuration.fields(config)
  has_other_model = now.get("model.path") != of_file.get("model.path")
  if has_other_model and now.get(name) and now[name] == of_file[name]:
    section: Any = config.model
    with config.ignore_type():
      section.fallback = None


def _apply(config: ConfigDict, values: Mapping[str, Any]) -> None:
  before = configuration.fields(config)
  flat = dict(_flat(config, values))
  make_room(config, flat)
  complaints = [
    f"{name}: {reason}" for name in flat if (reason := configuration.refusal(config, name))
  ]
  if complaints:
    raise ConfigError("\n".join(complaints))
  may_be_none = configuration.nullable(config)
  for name, value in flat.items():
    path, _, field = name.rpartition(".")
    section = _section(config, path)
    if "[" in name:
      complaints.append(f"{name}: the elements of a list are set together, with the list")
      continue
    wanted = _converted(section.get_type(field), value)
    complaint = _complaint(name, section[field], wanted, name in may_be_none)
    if complaint:
      complaints.append(complaint)
    else:
      with config.ignore_type():
        section[field] = wanted
  if complaints:
    raise ConfigError("\n".join(complaints))
  drop_fallback(config, before)


def _flat(config: ConfigDict, values: Mapping[str, Any], path: str = "") -> Iterator[Any]:
  """Yields (dotted name, value), with mappings for sections as values for their fields."""
  for key, value in values.items():
    name = f"{path}.{key}" if path else str(key)
    is_new = bool(re.fullmatch(r"environments\.\w+", name))
    known = _section(config, name)
    below = is_new or (isinstance(known, ConfigDict) and (len(known) or _is_open(name)))
    if isinstance(value, Mapping | ConfigDict) and len(value) and below:
      yield from _flat(config, dict(value.items()), name)
    else:
      yield name, value


def _is_open(name: str) -> bool:
  return name == "environments" or any(fnmatch.fnmatchcase(name, each) for each in OPEN_SECTIONS)


def _section(config: ConfigDict, path: str) -> Any:
  """Returns the value at a dotted path; None if there is none."""
  found: Any = config
  for part in path.split(".") if path else ():
    found = found[part] if isinstance(found, ConfigDict) and part in found else None
  return found


def _converted(kind: Any, value: Any) -> Any:
  """Returns a value in the type of its field: an integer as a number, a list as a tuple."""
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if isinstance(value, numbers.Integral) and not isinstance(value, bool):
    return float(value) if kind is float else int(value)
  if isinstance(value, numbers.Real) and not isinstance(value, bool):
    return float(value)
  if kind in (tuple, list) and isinstance(value, list | tuple):
    return kind(value)
  return value


def _complaint(name: str, present: Any, value: Any, may_be_none: bool) -> str | None:
  """Returns why a field cannot have a value; None if it can."""
  if value is None and not may_be_none:
    return f"{name}=None: this field needs a value, None is not allowed"
  if name in OPTIONS:
    return OPTIONS[name].kind.problem(name, value)
  if value is None or present is None or name.startswith("environments."):
    return None
  if isinstance(present, ConfigDict):
    fits = isinstance(value, Mapping | ConfigDict)
    return None if fits else f"{name} must be a dict, got {checked.shown(value)}"
  kind = type(present)
  fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
  if fits:
    return None
  return f"{name} must be {_EXPECTED.get(kind, f'a {kind.__name__}')}, got {checked.shown(value)}"
