"""Which model a run trains, and how it is read."""

import pathlib
from typing import Any

from grpo_jax.config import configuration
from grpo_jax.errors import ExpectedFailure
from grpo_jax.models import loading, sources

# An ml_collections.ConfigDict, whose fields a type checker cannot know.
Config = Any


def find(config: Config) -> sources.Found:
  """Finds the folder of the model; raises ConfigError if there is none."""
  model = config.model
  try:
    return sources.find(model.path, fallback=model.fallback, cache_dir=model.cache_dir)
  except ExpectedFailure:
    raise
  except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
    raise configuration.ConfigError(f"model.path: {error}") from error


def with_fallback(config: Config, found: sources.Found) -> Config:
  """Returns the config as it is written; a model's fallback is named in it if it was taken.

  Then `model.fallback_taken` is added: the model that was asked for, the one that was taken, and
  why.
  """
  if not found.reason:
    return config
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.model.fallback_taken = {
      "asked": found.asked,
      "taken": found.taken,
      "reason": found.reason,
    }
  return config


def load(folder: pathlib.Path, shardings: Any) -> loading.Loaded:
  """Reads the model straight into its sharding."""
  return loading.load(folder, sharding=lambda _: shardings)
