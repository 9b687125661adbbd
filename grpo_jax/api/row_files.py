"""Rows that are handed over as Python objects: a run keeps them as files of its folder."""

import hashlib
import json
import logging
import pathlib
from collections.abc import Collection
from typing import Any

from grpo_jax import processes
from grpo_jax.config import configuration
from grpo_jax.config.configuration import ConfigError
from grpo_jax.data import given_rows
from grpo_jax.files import atomic
from grpo_jax.files.disk import writing

_log = logging.getLogger(__name__)

TRAINING = "rows.jsonl"  # files of the run folder.
EVALUATION = "evaluation_rows.jsonl"
# Fields of config.data that name other data, and their values where rows are given.
_ELSEWHERE = {
  **dict.fromkeys(("dataset", "subset", "split", "name", "task"), None),
  "datasets": (),
  "num_prompts_per_dataloader": None,
  "dataloader": None,
}


def lines(rows: Any, name: str) -> list[str]:
  """Returns rows as lines of JSON.

  Args:
    rows: Rows in any of the forms of `given_rows.each`.
    name: Name of the argument, for messages.

  Raises:
    ConfigError: There is no row, or one is not a dict of JSON values.
  """
  try:
    found = [_line(row, f"{name}[{n}]") for n, row in enumerate(given_rows.each(rows, name))]
  except given_rows.RowsError as error:
    raise ConfigError(str(error)) from error
  if not found:
    raise ConfigError(f"{name} is empty: at least one row is needed")
  return found


def with_rows(config: Any, workdir: pathlib.Path, given: Collection[str]) -> Any:
  """Returns a config that reads the files of given rows in place of its own data.

  Where training rows replace the data and no others are named for the evaluation, nothing is
  evaluated: the held-out data of the config are of another task.

  Args:
    config: Config of the run.
    workdir: Run folder, where `write` puts the files.
    given: Names of the files that the run will have: TRAINING, EVALUATION.
  """
  if not given:
    return config
  changes: dict[str, Any] = {}
  if TRAINING in given:
    changes |= {f"data.{name}": value for name, value in _ELSEWHERE.items()}
    changes |= {"data.kind": "jsonl", "data.path": str(workdir / TRAINING)}
  if EVALUATION in given:
    no_others = dict.fromkeys(("dataset", "subset", "split", "name", "task", "task_seed"), None)
    changes |= {f"evaluation.data.{name}": value for name, value in no_others.items()}
    changes |= {
      "evaluation.data.kind": "jsonl",
      "evaluation.data.path": str(workdir / EVALUATION),
      "evaluation.datasets": (),
    }
  elif not _evaluates_other_data(config):
    changes |= {f"evaluation.{name}": False for name in ("at_start", "at_end")}
    changes |= {"evaluation.every_steps": 0, "evaluation.data.task": None}
    changes |= {"evaluation.data.task_seed": None, "evaluation.datasets": ()}
  return configuration.replaced(config, changes)


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


def _evaluates_other_data(config: Any) -> bool:
  """Returns whether the evaluation has a split of the rows, or files and datasets of its own."""
  own = config.evaluation.data
  return bool(config.data.split_validation_size or own.path or own.dataset)


def _line(row: Any, where: str) -> str:
  return json.dumps(given_rows.plain(row, where), allow_nan=False) + "\n"
