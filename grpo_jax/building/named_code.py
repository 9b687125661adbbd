"""Says which code the config of a stored run names, before a command runs it.

The folder may be another user's: its config.json can name any function that can be imported, and
programs of MCP servers.
"""

import importlib.util
import logging
import pathlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_jax import registry
from grpo_jax.building import stored
from grpo_jax.config import chosen_options, command_line, configuration
from grpo_jax.config.options import Config
from grpo_jax.http import redaction

_log = logging.getLogger(__name__)

_DOTTED = re.compile(r"([^\s./\\]+)(\.[^\s./\\]+)+")
_SHOWN_CHARS = 4000
_TOOLS = ("calculator", "python")
# Their task is the name of a module; the second is what runs wrote before there were packages.
_VERIFIERS = ("grpo_environments.verifiers.rows", "grpo_jax.environments.verifiers.rows")


def config_to_run(run: pathlib.Path, *, changes: Sequence[str] = ()) -> Config:
  """Returns the config of a run, and logs which code it names.

  What the run chose by the memory of its own devices is left open.

  Args:
    run: Run folder.
    changes: Flags of the command line that change fields.

  Raises:
    NoWeights: config.json is missing or damaged; see `stored.editable_config_of`.
    ConfigError: A flag cannot be used.
  """
  config = chosen_options.unresolved(stored.editable_config_of(run))
  if changes:
    command_line.override(config, changes)
  if found := list(named(configuration.as_dict(config))):
    shown = redaction.shown(", ".join(found), limit=_SHOWN_CHARS)
    what = f"{len(found)} fields of {run / 'config.json'} name code that is run as your user"
    _log.info("%s: %s", what, shown)
  return configuration.typed(config)


def named(config: Mapping[str, Any]) -> Iterator[str]:
  """Yields "FIELD=VALUE" for each field that names a function, module or program of others."""
  for name, settings in config.get("environments", {}).items():
    if not isinstance(settings, Mapping):
      continue
    module = settings.get("module") or name
    if isinstance(module, str) and not _is_known("environments", module):
      yield f"environments.{name}.module={module}"
    tools = settings.get("tools")
    for tool in tools if isinstance(tools, list | tuple) else ():
      if "." not in str(tool) and tool not in _TOOLS:
        yield f"environments.{name}.tools={tool}"
  engine = config.get("engine", {}).get("name", "jax_sampler")
  if not _is_known("engines", engine):
    yield f"engine.name={engine}"
  values = list(_values(config, ""))
  has_modules_as_tasks = any(value in _VERIFIERS for _, value in values)
  for name, value in values:
    field = name.rpartition(".")[2]
    if isinstance(value, list | tuple):
      yield f"{name}={shlex.join(map(str, value))}"
    elif found := _DOTTED.fullmatch(value):
      if _is_of_others(found[1]):
        yield f"{name}={value}"
    elif has_modules_as_tasks and field in ("task", "harness"):
      yield f"{name}={value}"


def _is_known(package: str, module: str) -> bool:
  """Returns whether a module is one of a package of ours; dotted ones are found as any path is."""
  return "." in module or module in registry.modules(f"grpo_jax.{package}")


def _values(value: Any, name: str) -> Iterator[tuple[str, Any]]:
  """Yields the strings in a config by dotted name, and the commands as lists."""
  if isinstance(value, Mapping):
    for key, each in value.items():
      yield from _values(each, f"{name}.{key}" if name else str(key))
  elif isinstance(value, list | tuple):
    if value and name.rpartition(".")[2] == "command":
      yield name, value
      return
    for each in value:
      yield from _values(each, name)
  elif isinstance(value, str):
    yield name, value


def _is_of_others(module: str) -> bool:
  """Returns whether there is such a module, and it is not this package's."""
  try:
    return module not in registry.OURS and importlib.util.find_spec(module) is not None
  except ValueError:  # it is loaded, and has no specification: the main program.
    return True
