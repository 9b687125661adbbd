"""Configs in Python: `configuration.load("quickstart", {"total_steps": 3})`."""

import os
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from grpo_jax.config import configuration
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.overrides import names_in, override

__all__ = ["ConfigError", "changed", "load", "names_in", "override"]


def load(
  name_or_path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None
) -> ConfigDict:
  """Returns a configuration, locked: a field that does not exist cannot be set.

  Args:
    name_or_path: Name of a config of the package, such as "quickstart", or path of a Python file
      with `get_config()`. A word after a colon is passed to it: "curriculum:mixed".
    overrides: Values of fields by dotted name; see `override`.

  Raises:
    ConfigError: There is no such config, there is a mistake in it, or an override cannot be
      applied.
  """
  config = configuration.load(name_or_path)
  object.__setattr__(config, "_as_loaded", configuration.plain_fields(config))
  return override(config, overrides) if overrides else config


def changed(config: ConfigDict) -> set[str]:
  """Returns the dotted names of the fields that were set since `load` returned a config.

  The result is empty for a config that `load` did not return.
  """
  before = vars(config).get("_as_loaded")
  now = configuration.plain_fields(config)
  if before is None:
    return set()
  return {name for name in now if name not in before or before[name] != now[name]}
