"""Options that a run chooses by the memory of its devices where its config says None.

The run's config.json has the values, and the names of these options in `chosen_by_memory`: a run
that continues keeps its choice, and other commands choose for the machine on which they run.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from grpo_jax.config import configuration
from grpo_jax.config.options import Config

REMAT, ROWS, CACHE = "model.remat", "engine.max_rows", "engine.cache_gib"
FIELDS = (REMAT, ROWS, CACHE)
_RECORD = "chosen_by_memory"

C = TypeVar("C", bound=configuration.AnyConfig)


def resolved(config: Config, values: Mapping[str, Any]) -> Config:
  """Returns a copy of the config with chosen values in place of None, and a record of it.

  Args:
    config: Config of a run.
    values: Values of `FIELDS`; those of options that are not None are ignored.
  """
  taken = {name: values[name] for name in open_fields(config) if name in values}
  if not taken:
    return config
  record = tuple(sorted({*(config.chosen_by_memory or ()), *taken}))
  return configuration.replaced(config, {**taken, _RECORD: record})


def continued(config: Config, stored: Mapping[str, Any]) -> Config:
  """Returns a copy of the config in which the values of an earlier part of the run replace None.

  Args:
    config: Config of the run.
    stored: Content of its config.json; it may be that of a run in which nothing was None.
  """
  section = lambda name: stored.get(name.partition(".")[0]) or {}
  values = {name: section(name).get(name.partition(".")[2]) for name in open_fields(config)}
  values = {name: value for name, value in values.items() if value is not None}
  chosen = {*(stored.get(_RECORD) or ())}
  given = {name: value for name, value in values.items() if name not in chosen}
  config = configuration.replaced(config, given) if given else config
  return resolved(config, {name: value for name, value in values.items() if name in chosen})


def unresolved(config: C) -> C:
  """Returns a copy of the config of a run without what the run chose by its memory."""
  names = configuration.as_dict(config).get(_RECORD) or ()
  return (
    configuration.replaced(config, {**dict.fromkeys(names), _RECORD: None}) if names else config
  )


def has_chosen_rows(config: Config) -> bool:
  """Returns whether the rows of the sampler were chosen by memory, so that it was counted."""
  return ROWS in (config.chosen_by_memory or ())


def open_fields(config: Config) -> list[str]:
  """Returns the names of the options that are None."""
  engine = config.engine
  values = {REMAT: config.model.remat, ROWS: engine.max_rows, CACHE: engine.cache_gib}
  return [name for name in FIELDS if values[name] is None]
