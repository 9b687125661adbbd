"""Rows that are handed over as Python objects: a run keeps them as files of its folder."""

import contextlib
import hashlib
import json
import logging
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import ConfigDict

from grpo_jax import data, processes
from grpo_jax.config import base, configuration, data_options, modes
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import Config
from grpo_jax.data import in_memory_rows
from grpo_jax.files import atomic
from grpo_jax.files.disk import writing

_log = logging.getLogger(__name__)

TRAINING = "rows.jsonl"  # files of the run folder.
EVALUATION = "evaluation_rows.jsonl"
# Fields of config.data that do not describe its rows.
_OF_THE_RUN = ("max_prompt_tokens", "overlong", "on_error", "shuffle", "epochs")
# Fields that say where data come from. Rows given in Python replace them.
_SOURCE = ("kind", "path", "dataset", "subset", "split", "task", "datasets")
_OF_SOURCE = ("name", "task_args", "task_seed", "size", "dataloader_args")
_SHOWN = 60  # characters of a value.


def lines(rows: Any, name: str) -> list[str]:
  """Returns rows as lines of JSON.

  Args:
    rows: Rows in any of the forms of `in_memory_rows.each`.
    name: Name of the argument, for messages.

  Raises:
    ConfigError: There is no row, or one is not a dict of JSON values.
  """
  try:
    found = [_line(row, f"{name}[{n}]") for n, row in enumerate(in_memory_rows.each(rows, name))]
  except in_memory_rows.RowsError as error:
    raise ConfigError(str(error)) from error
  if not found:
    raise ConfigError(f"{name} is empty: at least one row is needed")
  return found


def with_rows(
  config: ConfigDict, workdir: pathlib.Path, given: Collection[str], named: Collection[str] = ()
) -> ConfigDict:
  """Returns a config that reads the files of given rows in place of its own data.

  The config's settings for its own data, such as the system prompt, do not apply to other rows:
  they get their default values, except those that the caller has set. A log line lists them.

  Args:
    config: Config of the run.
    workdir: Run folder, where `write` puts the files.
    given: Names of the files that the run will have: TRAINING, EVALUATION.
    named: Dotted names of the fields that the caller has set; these are kept.

  Raises:
    ConfigError: The caller names other data, too.
  """
  changes: dict[str, Any] = {}
  if TRAINING in given:
    changes |= {f"data.{n}": v for n, v in _defaults("data").items() if n not in _OF_THE_RUN}
  if given:
    changes |= {f"evaluation.data.{name}": None for name in _defaults("evaluation.data")}
    changes["evaluation.datasets"] = ()
  kept = {name for name in changes if any(_is_in(each, name) for each in named)}
  for file, section in ((TRAINING, "data"), (EVALUATION, "evaluation.data")):
    if file in given:
      _refuse_others(file, section, named)
      changes |= {f"{section}.kind": "jsonl", f"{section}.path": str(workdir / file)}
  changes = {name: value for name, value in changes.items() if name not in kept}
  made = configuration.replaced(config, changes) if changes else config
  if TRAINING in given:
    _log_left_out(config, changes)
  return made


def check_scored(config: ConfigDict, made: ConfigDict) -> None:
  """Raises ConfigError if rows would be scored by another environment than the config's own data.

  Args:
    config: Config as it was before `with_rows`.
    made: Config that it returned; the caller has named neither a reward nor an environment.
  """
  asked = configuration.typed(made)
  now = _environments_of(asked)
  if modes.needs_environments(asked) and not now <= _environments_of(configuration.typed(config)):
    known = ", ".join(map(repr, asked.environments))
    raise ConfigError(
      "rows: nothing says what scores them. Give reward=, or name an environment of this config,"
      f' **{{"data.environment": ...}}; it has {known}'
    )


def write(found: list[str], path: pathlib.Path, *, is_continued: bool) -> None:
  """Writes lines into the run folder; warns if a run that continues began with other rows.

  Of several processes the main one writes, once all have the same rows.

  Args:
    found: Lines, as `lines` returns them.
    path: File.
    is_continued: Whether the run has a checkpoint to continue from.

  Raises:
    WriteError: The file cannot be written.
    DisagreementError: The processes of the run have different rows.
  """
  digest = hashlib.blake2b("".join(found).encode(), digest_size=8).hexdigest()
  processes.agree(f"{len(found)} rows, digest {digest}", what=f"the rows for {path.name}")
  writes = processes.is_main()
  processes.together(
    lambda: _write(found, path, is_continued=is_continued) if writes else None,
    what=f"writing {path.name}",
  )


def _write(found: list[str], path: pathlib.Path, *, is_continued: bool) -> None:
  if path.is_file():
    before = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if before == found:
      return
    if is_continued:
      _log.warning("%s", difference(before, found, path))
  with writing(path):
    atomic.replace_file(path, found)


def difference(before: list[str], now: list[str], path: pathlib.Path) -> str:
  """Returns a sentence on how rows differ from those in a file."""
  changed = [n for n, (old, new) in enumerate(zip(before, now, strict=False)) if old != new]
  first = f"; the first one that differs is row {changed[0]}" if changed else ""
  return (
    f"the rows are not those that this run began with, in {path}: there were {len(before)}, there"
    f" are {len(now)} now{first}"
  )


def _defaults(section: str) -> dict[str, Any]:
  """Returns the fields of a section with their defaults; an empty section is a dict."""
  return _value(base.get_config(), section)


def _is_in(name: str, section: str) -> bool:
  """Returns whether a dotted name is a field, or of a field below it."""
  return name == section or name.startswith(f"{section}.")


def _refuse_others(file: str, section: str, named: Collection[str]) -> None:
  """Raises ConfigError if the caller names data that the rows of the call replace."""
  places = [f"{section}.{name}" for name in _SOURCE]
  places += ["evaluation.datasets"] if file == EVALUATION else []
  if twice := [name for name in places if name in named]:
    argument = file.removesuffix(".jsonl")
    raise ConfigError(f"{argument}= and {twice[0]} both name data: give one of them")


def _environments_of(config: Config) -> set[str]:
  """Returns the names of the environments that score the training data; of invalid data, none."""
  with contextlib.suppress(ValueError):
    return set().union(*map(data.environments, data_options.training(config).values()))
  return set()


def _log_left_out(config: ConfigDict, changes: Mapping[str, Any]) -> None:
  """Logs in one line which settings of the config's own data are not used for given rows."""
  replaced = [f"data.{name}" for name in (*_SOURCE, *_OF_SOURCE)]
  before = {name: _value(config, name) for name in changes if name not in replaced}
  found = [name for name, value in before.items() if value != changes[name] and value != ()]
  shown = [f"{name}={before[name]!r:.{_SHOWN}}" for name in found if name.startswith("data.")]
  shown += ["evaluation.data"] if len(shown) < len(found) else []
  if shown:
    _log.info(
      "rows: not used, since they are of the config's own data: %s. The call can name what the rows"
      ' need: **{"data.system_prompt": ...}',
      ", ".join(shown),
    )


def _value(config: ConfigDict, name: str) -> Any:
  """Returns a field by its dotted name; a section as a dict."""
  found: Any = config
  for part in name.split("."):
    found = found[part]
  return found.to_dict() if hasattr(found, "to_dict") else found


def _line(row: Any, where: str) -> str:
  return json.dumps(in_memory_rows.plain(row, where), allow_nan=False) + "\n"
