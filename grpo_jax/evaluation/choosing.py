"""Which sets are evaluated: those of a config, or others by name or file."""

import pathlib
from collections.abc import Sequence
from typing import Any

from grpo_jax.config import configuration
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import Config
from grpo_jax.data import groups, named, sources
from grpo_jax.files import local_paths
from grpo_jax.values import options

# Environments of the named sets, where the config has none of that name.
ENVIRONMENTS = {
  "math": {"module": "math"},
  "multiple_choice": {"module": "math", "verifier": "multiple_choice"},
  "short_answer": {"module": "short_answer"},
  "code": {"module": "code"},
}
# Fields of the config's data that also hold for other sets: they are of the model.
_KEPT = ("system_prompt", "system_prompt_file", "max_prompt_tokens", "overlong", "on_error")


def with_sets(config: Config, sets: Sequence[str]) -> Config:
  """Returns a config whose evaluation sets are others; its system prompt and sampling are kept.

  Its mode follows from the rows: recorded responses are ranked (`mode="offline"`), and for problems
  completions are sampled.

  Args:
    config: Config whose sets are replaced.
    sets: Names such as "gsm8k" or "aime_2024"; "gsm8k=FILE" with the rows of a local file; or the
      file of a set of your own, whose rows have `problem` and `expected_answer` or are recorded
      groups, responses or rollouts (docs/offline.md).

  Raises:
    ConfigError: A set is not known, cannot be read, or is named twice; or some sets hold recorded
      responses and others problems.
  """
  datasets = [_fields(text) for text in sets]
  recorded = [_is_recorded(each) for each in datasets]
  if len({*recorded}) > 1:
    one, other = (datasets[recorded.index(kind)]["name"] for kind in (True, False))
    raise ConfigError(
      f"--sets: {one} holds recorded responses, which are ranked, and {other} problems, for which"
      " completions are sampled: evaluate them with two commands"
    )
  labels = [each["name"] for each in datasets]
  if twice := {label for label in labels if labels.count(label) > 1}:
    raise ConfigError(f"two evaluation sets are called {sorted(twice)[0]!r}")
  default = Config()
  values: dict[str, Any] = {
    f"data.{n}": v for n, v in options.values(default.data).items() if n not in _KEPT
  }
  values |= {f"evaluation.data.{n}": None for n in default.evaluation.data}
  values |= {"evaluation.datasets": tuple(datasets), "data.kind": "auto"}
  values["mode"] = "offline" if recorded[0] else "online"
  values["checkpoint.best_metric"] = None  # may be a metric of the sets that are replaced.
  needed = {each["environment"] for each in datasets if "environment" in each} | {"math"}
  if recorded[0] and config.offline.rewards == "file":
    needed = set()
  environments = dict(config.environments)
  lacking = sorted(needed - environments.keys())
  for name in lacking:
    if name not in ENVIRONMENTS:
      raise ConfigError(
        f"--sets: a set is scored by the environment {name!r}, which the config does not have: no"
        " rule can check its answers"
      )
  missing = {name: ENVIRONMENTS[name] for name in lacking}
  values["environments"] = {**environments, **missing}
  return configuration.replaced(config, values)


def _is_recorded(dataset: dict[str, Any]) -> bool:
  """Returns whether a set holds responses, by its processor or by the first row of its file."""
  entry = named.find(dataset["dataset"]) if "dataset" in dataset else None
  if entry is not None:
    return entry.group is not None
  try:
    rows = sources.open_source(sources.SourceConfig("auto", path=dataset["path"]))
    return bool(len(rows)) and groups.is_recorded(rows[0])
  except (OSError, ValueError, ImportError) as error:
    raise ConfigError(f"--sets: {error}") from error


def _fields(text: str) -> dict[str, Any]:
  """Returns the fields of a dataset that NAME, NAME=FILE or FILE stands for."""
  name, _, path = text.partition("=")
  if reason := local_paths.complaint("--sets", path or name):
    raise ConfigError(reason)
  if not path and pathlib.Path(name).is_file():
    return {"name": pathlib.Path(name).stem, "path": name, "environment": "math"}
  try:
    entry = named.find(name)
  except ValueError as error:
    if pathlib.Path(name).suffix or "/" in name:
      raise ConfigError(f"--sets={text}: there is no such file") from error
    raise ConfigError(f"--sets: {error}; or name a file of rows") from error
  if entry is None:
    raise ConfigError(
      f"--sets={text}: {name} is not a known dataset of the hub; name it in a config, as"
      " evaluation.datasets with its fields"
    )
  fields = {"name": name.rpartition("/")[2], "dataset": name, "environment": entry.environment}
  if entry.evaluation_split:
    fields["split"] = entry.evaluation_split
  return {**fields, "path": path, "split": None} if path else fields
