"""The evaluation sets of a run: prompts that it does not train on."""

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from grpo_jax import data, processes
from grpo_jax.building import checks, policy_model
from grpo_jax.config import configuration, data_options, modes
from grpo_jax.config.options import Config
from grpo_jax.data import formats, overlap, skipped_rows
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.data.overlap import Overlap
from grpo_jax.files import hub
from grpo_jax.types import Prompt

_log = logging.getLogger(__name__)


_MISSING = (
  ". Set config.{section}.path to a file of rows; or to None, {none} config.{section}.dataset to a"
  " dataset by name, such as GSM8K (docs/data.md)"
)
_LISTED = ". Correct it in config.{section}.datasets"


def check_sources(config: Config) -> None:
  """Opens the training data and the evaluation sets, and reads a few rows, without a model.

  Raises:
    ConfigError: A file, a name or a library is missing, or the rows lack what options name.
  """
  processes.together(lambda: _check_sources(config), what="looking at the data")


def _check_sources(config: Config) -> None:
  sets = data_options.evaluation(config) if data_options.evaluates(config) else {}
  of_training = _MISSING.format(section="data", none="and")
  if config.data.datasets:
    of_training = _LISTED.format(section="data")
  of_evaluation = _MISSING.format(section="evaluation.data", none="for no evaluation, or")
  if config.evaluation.datasets:
    of_evaluation = _LISTED.format(section="evaluation")
  missing: dict[str, str] = {}
  for remedy, found in ((of_training, data_options.training(config)), (of_evaluation, sets)):
    for fields in found.values():
      try:
        _check_source(config, fields)
      except hub.Unavailable as error:
        if not error.is_silent:
          raise configuration.ConfigError(f"the data cannot be used: {error}") from error
        missing[fields["dataset"]] = error.reason
      except (OSError, ValueError, ImportError) as error:
        what = remedy if isinstance(error, FileNotFoundError) else ""
        raise configuration.ConfigError(f"the data cannot be used: {error}{what}") from error

  if missing:
    raise policy_model.hub_needed(config, next(iter(missing.values())), datasets=[*missing])


def _check_source(config: Config, fields: Mapping[str, Any]) -> None:
  """Opens a dataset; raises RowError if none of its first rows can be read as prompts."""
  given = {name: value for name, value in fields.items() if name != "weight"}
  if modes.is_offline(config):  # groups have formats and keys of their own.
    of_groups = dict.fromkeys(("input_key", "output_key"), None)
    given |= {**of_groups, "format": "auto", "side": "all", "split_validation_size": 0}
  dataset = data.open_dataset(ByteTokenizer(), **given)
  if modes.is_offline(config) or config.data.on_error == "skip":
    return
  refused = []
  for row in range(min(checks.TRIED, len(dataset))):
    try:
      dataset.question(dataset.part.source_row(row))
      return
    except formats.LeftOut:
      return
    except formats.RowError as error:
      refused.append(error)
  raise skipped_rows.explained(refused[0])


def held_out(
  config: Config, tokenizer: data.Tokenizer, opener: data.Opener
) -> dict[str, list[Prompt]]:
  """Opens the training data, and returns the prompts of every evaluation set by its name.

  A set that is part of the training data is left out. This is logged, as is the number of prompts
  that another set shares with the training data.

  Args:
    config: Config of the run.
    tokenizer: Tokenizer of the model.
    opener: Function that opens a dataset of prompts, or of recorded groups.

  Raises:
    ConfigError: A file, a name or a library is missing, or a held-out row is broken.
  """
  stream, sets, found = processes.together(
    lambda: _opened(config, tokenizer, opener), what="opening the data"
  )
  counted = count(config, stream, sets, limit=config.evaluation.num_prompts)
  kept = {name: prompts for name, prompts in found.items() if not counted[name].is_trained}
  for name in kept:
    if counted[name].shared:
      log_shared(name, counted[name])
  reasons = []
  if data_options.evaluates(config) and (same := data_options.trained_on(config)):
    reasons.append(f"the rows of {', '.join(map(repr, same))} are those of the training data")
  for name in sorted(found.keys() - kept.keys()):
    reasons.append(f"all {counted[name].prompts} prompts of {name!r} are training rows")
  if reasons:
    _log_left_out(config, reasons, kept)
  return kept


def count(
  config: Config, stream: data.PromptStream, sets: Mapping[str, data.Dataset], *, limit: int
) -> dict[str, Overlap]:
  """Counts the prompts of evaluation sets that are also in the training data.

  All processes return what the main one has counted, because it stops after some time.

  Args:
    config: Config of the run.
    stream: Its training data.
    sets: Evaluation sets by name.
    limit: Number of rows of each set that are evaluated.
  """
  counted = {}
  if processes.is_main():
    counted = overlap.count(stream.loaders, sets, limit=limit, reads=_most_prompts(config))
  fields = processes.broadcast({name: dataclasses.asdict(each) for name, each in counted.items()})
  return {name: Overlap(**each) for name, each in fields.items()}


def _most_prompts(config: Config) -> int:
  """Returns the largest number of prompts that a run takes from its data."""
  dynamic, of_step = config.dynamic_sampling, config.rollout.prompts_per_step
  if dynamic.enabled:
    of_step = dynamic.max_rounds * (dynamic.prompts_per_round or of_step)
  return config.total_steps * of_step


def log_shared(name: str, found: Overlap) -> None:
  """Logs how much of a set is also in the training data.

  It is a warning, unless a task has drawn less than half of the prompts again.
  """
  why = ": the task draws some prompts again" if found.by_chance else ""
  ended = "" if found.is_complete else f", until {overlap.LONGEST_S:g} s had passed"
  _log.log(
    logging.INFO if found.by_chance and 2 * found.shared < found.prompts else logging.WARNING,
    "%d of %d evaluation prompts are also in the training data%s (evaluation set %r; %d training"
    " rows were compared%s)",
    *(found.shared, found.prompts, why, name, found.compared, ended),
  )


def _log_left_out(config: Config, reasons: Sequence[str], kept: Collection[str]) -> None:
  """Logs in one line why sets are not evaluated, and how to hold rows out."""
  measured = tuple(f"eval/{name}/" for name in kept)
  is_ranked = any(
    not metric.startswith("eval/") or metric.startswith(measured)
    for metric in data_options.best_metrics(config)
  )
  ranking = "" if is_ranked else ". No checkpoint is the best one; the newest are kept"
  _log.log(
    logging.WARNING if data_options.names_held_out(config) else logging.INFO,
    "no evaluation%s: %s. To hold rows out, name others in evaluation.data (path, split or"
    " task_seed; in Python: evaluation_rows), or set data.split_validation_size%s",
    *(" of some sets" if kept else "", "; ".join(reasons), ranking),
  )


def _opened(
  config: Config, tokenizer: data.Tokenizer, opener: data.Opener
) -> tuple[data.PromptStream, dict[str, data.Dataset], dict[str, list[Prompt]]]:
  """Opens the training data and the evaluation sets, and reads the latter."""
  try:
    stream = data.make(tokenizer, opener=opener, **data_options.stream_options(config))
    sets = data_options.open_sets(config, tokenizer, opener)
    found = {
      name: data.held_out(each, limit=config.evaluation.num_prompts, on_error=config.data.on_error)
      for name, each in sets.items()
    }
  except (OSError, ValueError, ImportError) as error:
    raise configuration.ConfigError(f"the data cannot be used: {error}") from error
  return stream, sets, found
