"""Finds and reads the model that a run trains."""

import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax import data, processes
from grpo_jax.building import agreements
from grpo_jax.config import configuration
from grpo_jax.config.options import Config
from grpo_jax.data import exported_templates
from grpo_jax.errors import ExpectedFailure
from grpo_jax.files import hub
from grpo_jax.models import files, loading, sources
from grpo_jax.models.chat.rendering import TemplateError
from grpo_jax.models.errors import HubFailure

_log = logging.getLogger(__name__)


def find(config: Config) -> sources.ResolvedModel:
  """Finds the folder of the model; raises ConfigError if there is none."""
  model = config.model
  try:
    return sources.find(model.path, fallback=model.fallback, cache_dir=model.cache_dir)
  except HubFailure as error:
    if sources.is_missing(model.path) and (reason := hub.unreachable()):
      raise hub_needed(config, reason) from error
    raise
  except ExpectedFailure:
    raise
  except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
    raise configuration.ConfigError(f"model.path: {error}") from error


def hub_needed(
  config: Config, reason: str, *, datasets: Sequence[str] = ()
) -> configuration.ConfigError:
  """Returns the error of a run that needs the hub, which does not answer.

  Args:
    config: Config of the run.
    reason: Why nothing can be downloaded.
    datasets: Names of the datasets that are not here.
  """
  model = config.model
  needs = [f"the dataset {name}" for name in datasets]
  instead = ["--config.data.path=FILE (a copy, or your rows in its columns)"] if datasets else []
  if not model.fallback and sources.is_missing(model.path):
    needs.append(f"the model {model.path}")
    instead.append("--config.model.path=FOLDER (a Hugging Face folder)")
  return configuration.ConfigError(
    f"the Hugging Face hub cannot be used: {reason}. This run needs {' and '.join(needs)} from it;"
    f" without it, give {' and '.join(instead)}"
  )


def find_alike(config: Config) -> sources.ResolvedModel:
  """Finds the folder of the model, on all processes the same one.

  If the hub does not answer one host, all processes use `model.fallback`. Downloads and conversions
  are locked in the cache: of the processes of one host one makes them, and the others wait.

  Raises:
    ConfigError: There is no model, or its files differ between the processes.
  """
  found = processes.together(lambda: find(config), what="the model")
  reason = _of_all(found.reason)
  if reason:
    found = processes.together(lambda: _fallen_back(config, found, reason), what="model.fallback")
  agreements.check_model(found.folder)
  return found


def _of_all(reason: str) -> str:
  """Returns why the fallback of the model is used, if any process has to use it; otherwise ""."""
  reasons = processes.exchange(reason, what="whether the model was found")
  return reason or next((each for each in reasons if each), "")


def _fallen_back(
  config: Config, found: sources.ResolvedModel, reason: str
) -> sources.ResolvedModel:
  """Returns the fallback of the model, also where the model itself was found."""
  if found.reason:
    return found
  fallback = config.model.fallback
  assert fallback is not None  # another process uses it.
  _log.warning("another process uses model.fallback=%s: %s", fallback, reason)
  folder = sources.resolve(fallback, cache_dir=config.model.cache_dir)
  return sources.ResolvedModel(folder, found.asked, fallback, reason)


def with_fallback(config: Config, found: sources.ResolvedModel) -> Config:
  """Returns the config to write to the run folder: it records whether a fallback was used.

  If so, `model.fallback_taken` is added: the requested model, the one used instead, and the reason.
  """
  if not found.reason:
    return config
  taken = {"asked": found.asked, "taken": found.taken, "reason": found.reason}
  return configuration.replaced(config, {"model.fallback_taken": taken})


def name_of(config: Config, folder: pathlib.Path) -> str:
  """Returns the name of the model for other programs: that on the hub, or the path of its folder.

  Args:
    config: Config of the run, as `with_fallback` returns it.
    folder: Folder of the model.
  """
  taken = config.model.fallback_taken
  name = taken["taken"] if taken else config.model.path
  return sources.portable(name, folder)


def with_template(config: Config) -> Config:
  """Returns the config to write to the run folder, with the text of a chat template's file: other
  commands need the template, and the file may have changed by then."""
  name = config.model.chat_template
  if name is None or not name.endswith(".jinja"):
    return config
  text = files.read_text(pathlib.Path(name), max_bytes=files.TEMPLATE_BYTES)
  return configuration.replaced(config, {"model.chat_template": text})


def load_tokenizer(
  config: Config, folder: pathlib.Path, *, adapter: pathlib.Path | None = None
) -> data.Tokenizer:
  """Loads the tokenizer of a model's folder with the template and the tool calls of a config.

  Args:
    config: Config with the options of the tokenizer.
    folder: Folder of the model.
    adapter: Folder of an adapter whose tokenizer is used instead; None: there is none.
  """
  options = config.model
  return data.load_tokenizer(
    adapter or folder,
    model_directory=folder,
    chat_template=options.chat_template,
    template_args=options.chat_template_args,
    tool_form=options.tool_calls,
  )


def templates_of(tokenizer: data.Tokenizer) -> Mapping[str, str]:
  """Returns the chat templates with which other programs write a run's prompts; empty: those of the
  model's folder do, or it is logged that no template can."""
  try:
    return exported_templates.of(tokenizer)
  except TemplateError as error:
    _log.warning("the export does not render prompts as the run did: %s", error)
    return {}


def load(facts: loading.ModelFacts, read: Any) -> loading.Loaded:
  """Reads the weights of the model directly into their sharding.

  Args:
    facts: Model.
    read: Form in which they are read, as in `computation.Computation`.
  """
  return loading.load_weights(facts, sharding=lambda _: read.shardings, dtype=read.dtype)
