"""The command line: a configuration file, overrides of its fields, and the run's folder.

The overrides are ml_collections flags. This module adds messages that name the field, the
expected type and the given value, and accepts values for fields that are None.
"""

import ast
import dataclasses
import functools
import pathlib
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from grpo_jax import registry
from grpo_jax.config import configuration, other_programs, overrides, removed
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import ALSO, Config
from grpo_jax.files import local_paths
from grpo_jax.values import names, options

USAGE = """\
Trains a language model by GRPO.

  python -m grpo_jax.main --config=CONFIG [--workdir=FOLDER] [--config.SECTION.FIELD=VALUE ...]
  grpo-jax train CONFIG [--workdir=FOLDER] [--config.SECTION.FIELD=VALUE ...]

  --config    Python file with get_config(), such as my/run.py, or the name of a config of the
              package, such as quickstart; CONFIG:STRING passes STRING to get_config().
  --workdir   folder of the run: settings, metrics, rollouts, checkpoints, report. The same
              command with the same folder continues a stopped run. Default: a new
              folder runs/CONFIG-DATE-TIME, whose name is printed. A URL such as gs://bucket/run
              also works: docs/remote_folders.md
  --config.SECTION.FIELD=VALUE   overrides a field: --config.loss.clip_high=0.28
              on/off: --config.data.shuffle=false, --noconfig.data.shuffle
              lists: --config.evaluation.pass_k=1,8   strings: --config.sampling.stop_strings=a,b
              no value: --config.loss.dual_clip=None
              further arguments of an environment, task, dataloader or engine of your own:
              --config.environments.math.format_reward=0.1
              a new environment: --config.environments.mine.module=my_module.MyClass
  --flagfile=FILE   reads more flags from a file, one per line.
  --help      prints this text; with --config also the fields of that configuration with their
              values and meanings; --help=loss prints those of one section.

Examples:
  python -m grpo_jax.main --config=configs/quickstart.py --workdir=runs/first --config.seed=7
  grpo-jax train quickstart --workdir=runs/first --config.seed=7

`grpo-jax --help` lists the other commands.

Exit codes: 0 finished; 1 failed during training, with one message; 2 wrong command,
configuration or run folder; 130 stopped by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP (a closed
terminal; not under nohup), each after saving a checkpoint. A second signal ends the run at
once, without a checkpoint. docs/stopping.md says what each leaves on disk and how long it takes.
"""


@dataclasses.dataclass(frozen=True)
class Command:
  """The parsed command line."""

  config: ConfigDict  # resolved and locked.
  config_path: str
  workdir: pathlib.Path | str | None  # a path or a URL; None: a new one is needed.


class HelpWanted(Exception):
  """--help was given; the text is the message."""


def parse(arguments: Sequence[str]) -> Command:
  """Reads the arguments after the program's name.

  Raises:
    ConfigError: The command line is wrong; the message says what would be right.
    HelpWanted: The command line has --help.
  """
  parsed = flags.FlagValues()
  flags.DEFINE_string("workdir", None, "folder of the run", flag_values=parsed)
  try:
    argv = parsed.read_flags_from_files(list(arguments), force_gnu=False)
  except flags.Error as error:
    raise ConfigError(str(error)) from error
  _refuse_one_dash(argv)
  _refuse_removed(argv)
  paths, argv = _take(argv, "config")
  asked = [m for each in argv if (m := re.fullmatch(r"--?(help|h|helpfull|helpshort)(=.*)?", each))]
  section = next((m[2][1:] for m in asked if m[2]), "")
  if not any(paths):
    if section:
      raise ConfigError(f"--help={section} needs --config=FILE.py, whose fields it lists")
    if asked:
      raise HelpWanted(f"{USAGE}\n{_present()}")
    raise ConfigError(f"--config is missing, for example --config=quickstart\n{_present()}")
  if len(paths) > 1:
    raise ConfigError(f"--config was given {len(paths)} times: {', '.join(paths)}")
  config = configuration.load(paths[0])
  if asked:
    width = shutil.get_terminal_size((100, 24)).columns
    table = option_table(config, section.removeprefix("config."), width)
    raise HelpWanted(table if section else f"{USAGE}\nFields of {paths[0]}:\n{table}")
  from_file = configuration.fields(config)
  rest = _override(config, parsed, argv)
  overrides.drop_fallback(config, from_file)
  if rest:
    raise ConfigError(_stray(rest[0]))
  return Command(config, paths[0], _workdir(parsed["workdir"].value))


def _workdir(named: str | None) -> pathlib.Path | str | None:
  """Returns the run folder: a path or a URL; None: it was not given."""
  if named == "":
    raise ConfigError("--workdir needs the path of a folder")
  if named is None or local_paths.is_url(named):
    return named
  if reason := local_paths.complaint("--workdir", named):
    raise ConfigError(reason)
  return pathlib.Path(named)


def _refuse_removed(argv: Sequence[str]) -> None:
  for argument in argv:
    name = argument.partition("=")[0].removeprefix("--")
    if name in removed.FLAGS:
      raise ConfigError(f"--{name} was removed: {removed.FLAGS[name]}")


def override(config: ConfigDict, flags_of_config: Sequence[str]) -> None:
  """Applies flags such as --config.loss.clip_high=0.28 to a configuration.

  Raises:
    ConfigError: A name or a value cannot be used.
  """
  _refuse_one_dash(flags_of_config)
  if rest := _override(config, flags.FlagValues(), flags_of_config):
    raise ConfigError(_stray(rest[0]))


def _override(config: ConfigDict, parsed: flags.FlagValues, argv: Sequence[str]) -> list[str]:
  """Applies the flags of `argv` to `config` and `parsed`; returns the other arguments."""
  names = dict.fromkeys(m.group(1) for a in argv if (m := re.match(r"--(?:no)?config\.([^=]*)", a)))
  overrides.make_room(config, names)
  complaints = [f"--config.{n}: {c}" for n in names if (c := configuration.refusal(config, n))]
  if complaints:
    raise ConfigError("\n".join(complaints))
  may_be_none = configuration.nullable(config)
  before = configuration.fields(config)
  for kind, reader in READERS.items():
    config_flags.register_flag_parser_for_type(kind, reader)
  try:
    command = ["grpo_jax", *argv]
    config_flags.DEFINE_config_dict("config", config, flag_values=parsed, sys_argv=command)
    rest = parsed(command)[1:]
  except flags.UnrecognizedFlagError as error:
    raise ConfigError(_unrecognized(error.flagname, config)) from error
  except flags.IllegalFlagValueError as error:
    raise ConfigError(str(error).removeprefix("flag ")) from error
  except (flags.Error, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
    raise ConfigError(f"the overrides cannot be applied: {error}") from error
  values = configuration.fields(config)
  for name in names:
    if name in values and values[name] is None and name not in may_be_none:
      if isinstance(before[name], str) and _take(argv, f"config.{name}")[0][-1:] == ["none"]:
        config.update_from_flattened_dict({name: "none"})  # a word like any other.
        continue
      raise ConfigError(f"--config.{name}=None: this field needs a value, None is not allowed")
  return rest


def _refuse_one_dash(argv: Sequence[str]) -> None:
  """Raises ConfigError for a flag with one dash, which absl would take for the same with two."""
  for argument in argv:
    if re.match(r"-(no)?(config|workdir|flagfile)\b", argument):
      raise ConfigError(f"{argument}: a flag begins with two dashes: -{argument}")


class _Reader(flags.ArgumentParser):
  """Parses one kind of value; `convert` raises ValueError for any other string."""

  def __init__(self, expected: str, convert: Callable[[str], Any]):
    self.expected = expected
    self.convert = convert
    self.syntactic_help = expected

  def parse(self, argument: Any) -> Any:
    """Returns the value of a string; values that are not strings pass through."""
    if not isinstance(argument, str):
      return argument
    if argument.strip() in ("None", "none", "null"):
      return None
    try:
      return self.convert(argument)
    except (ValueError, SyntaxError) as error:
      raise ValueError(f"expected {self.expected}, got {argument!r}") from error

  def flag_type(self) -> str:
    return self.expected


def _boolean(text: str) -> bool:
  words = {"true": True, "yes": True, "on": True, "1": True, "t": True}
  words |= {"false": False, "no": False, "off": False, "0": False, "f": False}
  if text.strip().lower() not in words:
    raise ValueError(text)
  return words[text.strip().lower()]


def _guessed(text: str) -> Any:
  """Returns the Python value that a string spells; otherwise the string itself."""
  if text.lower() in ("true", "false"):
    return text.lower() == "true"
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def _several(text: str) -> list[Any]:
  """Returns the elements of "(1, 2)", "[1, 2]", "1,2", "a,b" or a single value."""
  value = _guessed(text)
  if isinstance(value, tuple | list):
    return list(value)
  if isinstance(value, str) and value == text:
    return [_guessed(part.strip()) for part in text.split(",")] if text else []
  return [value]


def _section(text: str) -> ConfigDict:
  value = ast.literal_eval(text)
  if not isinstance(value, dict):
    raise ValueError(text)
  return ConfigDict(value)


READERS = {
  int: _Reader("an integer", int),
  float: _Reader("a number", float),
  bool: _Reader("true or false", _boolean),
  str: _Reader("a string", str),
  tuple: _Reader("values separated by commas", lambda text: tuple(_several(text))),
  list: _Reader("values separated by commas", _several),
  type(None): _Reader("a value", _guessed),
  ConfigDict: _Reader("a Python dict", _section),
}


def _take(argv: Sequence[str], name: str) -> tuple[list[str], list[str]]:
  """Splits arguments into the values of --name=value (or --name value) and the rest."""
  values, rest = [], []
  remaining = iter(argv)
  for argument in remaining:
    flag, equals, value = argument.partition("=")
    if flag not in (f"--{name}", f"-{name}"):
      rest.append(argument)
    elif equals:
      values.append(value)
    else:
      values.append(next(remaining, ""))
  return values, rest


def _unrecognized(name: str, config: ConfigDict) -> str:
  """Returns the message that a flag is unknown, with the nearest one."""
  if foreign := other_programs.hint(name):
    return f"unknown flag --{name}{foreign}; fields are set by --config.SECTION.FIELD=VALUE"
  known = ["config", "workdir", "help", "flagfile"]
  known += [f"config.{field}" for field in (*configuration.fields(config), *ALSO)]
  close = names.nearest(name, known)
  hint = f"; did you mean --{close[0]}?" if close else ""
  return f"unknown flag --{name}{hint} (--help lists the flags)"


def _stray(argument: str) -> str:
  hint = f"; did you mean --{argument}?" if argument.startswith("config") else ""
  return f"unexpected argument {argument!r}{hint} (flags are written --name=value)"


def _present() -> str:
  files = configuration.present()
  listed = "\n".join(f"  {file}" for file in files)
  here = f"Configurations here:\n{listed}\n" if files else "There is no folder configs/ here.\n"
  by_name = textwrap.fill(
    "Configurations of the package, by name: " + ", ".join(configuration.by_name()),
    width=100,
    subsequent_indent="  ",
  )
  own = (
    "A configuration of your own begins with\n"
    "  from grpo_jax.config import base\n"
    "and its get_config() changes and returns base.get_config()."
  )
  return f"{here}{by_name}" if files else f"{here}{by_name}\n{own}"


def option_table(config: ConfigDict, only: str, width: int) -> str:
  """Returns a table of the fields with their values and meanings, section by section.

  Args:
    config: Config whose fields are listed.
    only: Section to list; "" lists all.
    width: Width of a line, in characters.

  Raises:
    ConfigError: There is no such section.
  """
  fields = configuration.fields(config)
  sections = dict.fromkeys(name.rpartition(".")[0] for name in fields)
  chosen = {s for s in sections if not only or s == only or s.startswith(f"{only}.")}
  meanings = dict(options.meanings(Config))
  places = {name: place for place, name in enumerate(meanings)}
  place_of = lambda name: places.get(name, len(places))
  names = [name for name in fields if name.rpartition(".")[0] in chosen or name == only]
  if not names:
    hint = registry.nearest(only, [*sections, *fields])
    raise ConfigError(
      f"there is no section {only!r}{hint}; there are: {', '.join(filter(None, sections))}"
    )
  lines = []
  for section in sorted({n.rpartition(".")[0] for n in names}, key=lambda s: _order(s, place_of)):
    if section:
      lines += ["", textwrap.shorten(f"{section}: {meanings.get(section, '')}".rstrip(": "), width)]
    inside = [name for name in names if name.rpartition(".")[0] == section]
    for name in sorted(inside, key=place_of):
      lines += _explained(f"  --config.{name}={fields[name]!r}", meanings.get(name, ""), width)
  return "\n".join(lines)


def _order(section: str, place_of: Callable[[str], int]) -> tuple[int, ...]:
  """Returns a sort key: sections in the order of the files, then those that a flag added."""
  parts = section.split(".")
  return tuple(place_of(".".join(parts[: i + 1])) for i in range(len(parts))) if section else ()


def _explained(flag: str, meaning: str, width: int) -> list[str]:
  """Returns a flag with its meaning next to it, or below it if there is no room."""
  margin = 46 if width >= 90 else 8
  wrap = functools.partial(
    textwrap.wrap, width=max(width - 1, margin + 20), subsequent_indent=" " * margin
  )
  if len(flag) < margin - 1 and meaning:
    return wrap(f"{flag:<{margin}}{meaning}")
  return [flag, *wrap(meaning, initial_indent=" " * margin)]
