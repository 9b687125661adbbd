"""The weights that RUN[:STEP|:best|:latest], a model's folder or a model's name stands for."""

import dataclasses
import functools
import os
import pathlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from grpo_jax.building import agreements
from grpo_jax.config import base as defaults
from grpo_jax.config import configuration, data_options, field_checks, removed, sections
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import Config
from grpo_jax.errors import ExpectedFailure
from grpo_jax.learn import adapters, policy
from grpo_jax.models import (
  adapter_files,
  loading,
  lora,
  merged_tensors,
  parameter_reading,
  safetensors,
  sources,
)
from grpo_jax.models.config import ModelConfig
from grpo_jax.processes import arrays
from grpo_jax.run_folder import stored_steps, stored_weights
from grpo_jax.values import checked, names

WORDS = ("best", "latest")


class NoWeights(ConfigError):
  """There is no such run, checkpoint or model."""


@dataclasses.dataclass(frozen=True)
class WeightsReference:
  """A run and one of its checkpoints; or, where `step` is None, a model."""

  place: str  # run folder; or folder or name of a model, as `model.path` takes it.
  step: int | str | None  # of the checkpoint, or "best" or "latest".


@dataclasses.dataclass(frozen=True)
class StoredWeights:
  """The full weights of a policy on the disk; nothing but their names and shapes is read yet.

  Attributes:
    label: Name of the weights in messages: "runs/first:20", or the folder of a model.
    model: Sizes and settings of the model, and its folder.
    tensors: The weights in Hugging Face's names and layout, read one tensor at a time. Those of an
      adapter and its base are merged, in float32.
    step: Step of the checkpoint; None: a model.
    metrics: Metrics of the evaluation of that checkpoint; empty: it was not evaluated.
    adapter: Adapter of the weights; None: they have none.
    base: Tensors of the adapter's base; None: there is no adapter, and `tensors` are all.
    base_name: Name or folder of the adapter's base, for other programs.
    dtypes: Dtypes in which the weights, or the adapter's base, are read onto devices; see
      `parameter_reading.Dtypes`.
    tokenizer: Folder of an adapter with a tokenizer, which comes before that in `directory`; None:
      there is none.
  """

  label: str
  model: loading.ModelFacts
  tensors: safetensors.Tensors
  step: int | None
  metrics: Mapping[str, float]
  adapter: merged_tensors.StoredAdapter | None = None
  base: safetensors.Tensors | None = None
  base_name: str = ""
  dtypes: Any = np.float32
  tokenizer: pathlib.Path | None = None

  @property
  def config(self) -> ModelConfig:
    """Sizes of the model."""
    return self.model.config

  @property
  def directory(self) -> pathlib.Path:
    """Hugging Face folder with the tokenizer and the settings of the model."""
    return self.model.directory


def parse(text: str) -> WeightsReference:
  """Reads RUN[:STEP|:best|:latest], or a model; a run without a step means its newest one.

  Raises:
    NoWeights: Something else than a step follows a run.
  """
  if is_run(pathlib.Path(text)):
    return WeightsReference(text, "latest")
  place, colon, word = text.rpartition(":")
  if colon and is_run(pathlib.Path(place)):
    if word in WORDS:
      return WeightsReference(place, word)
    if re.fullmatch(r"\d{1,18}", word):
      return WeightsReference(place, int(word))
    hint = names.hint(word, WORDS)
    raise NoWeights(
      f"{text}: a number, 'best' or 'latest' must follow {place}:, not {word!r}{hint}"
    )
  is_place = os.path.exists(text)  # a colon may be part of a name.
  if colon and not is_place and (word in WORDS or re.fullmatch(r"\d{1,18}", word)):
    raise NoWeights(f"{text}: {_not_a_run(place)}")
  return WeightsReference(text, None)


def is_run(folder: pathlib.Path) -> bool:
  """Returns whether a folder is that of a run."""
  return os.path.isdir(folder / "checkpoints") or os.path.isfile(folder / "metrics.jsonl")


def find(
  reference: WeightsReference | str,
  *,
  base: str | None = None,
  cache_dir: str | None = None,
) -> StoredWeights:
  """Opens the weights that a reference stands for.

  Args:
    reference: Reference to the weights, made by `parse`.
    base: Model that a run began with; its tokenizer and settings are used. None: the one that the
      run's config.json names.
    cache_dir: Folder for converted models; None: that of the run, or the user's.

  Raises:
    NoWeights: There is no such run or step.
    WeightsError: The checkpoint is damaged.
    MissingModel, ModelError: There is no such model, or it cannot be used.
  """
  given = parse(reference) if isinstance(reference, str) else reference
  if given.step is None:
    if is_adapter(pathlib.Path(given.place).expanduser()):
      return _with_folder(given.place, base, cache_dir)
    folder = sources.resolve(given.place, cache_dir=cache_dir)
    model = loading.read_facts(folder)
    return StoredWeights(given.place, model, _opened(model), None, {})
  run = pathlib.Path(given.place)
  step = choose_step(run, given.step)
  directory = _base_of(run, base, cache_dir)
  model = loading.read_facts(directory)
  checkpoint = stored_steps.folder(run / "checkpoints", step)
  opened = stored_weights.open_checkpoint(checkpoint, model.config)
  metrics, label = stored_steps.metrics(checkpoint), f"{run}:{step}"
  if isinstance(opened, stored_weights.CheckpointTensors):
    return StoredWeights(label, model, opened, step, metrics)
  _check_base(opened, directory)
  bare = StoredWeights(label, model, _opened(model), step, metrics)
  return _joined(bare, opened, base or _path_of(run))


def is_adapter(folder: pathlib.Path) -> bool:
  """Returns whether a folder holds an adapter in PEFT's format, and not a whole model."""
  return (folder / adapter_files.CONFIG_FILE).is_file() and not (folder / "config.json").exists()


def _opened(model: loading.ModelFacts) -> safetensors.Tensors:
  tensors = loading.open_tensors(model.directory, model.config)
  loading.check(tensors, model.config, str(model.directory))
  return tensors


def _with_folder(place: str, base: str | None, cache_dir: str | None) -> StoredWeights:
  """Opens an adapter's folder and its base; raises the same errors as `find`.

  The base must be named, since the folder may name a path of another machine.
  """
  if base is None:
    named = adapter_files.base_of(place)
    hint = f", for example the one it was made for, --base={shlex.quote(named)}" if named else ""
    raise NoWeights(f"{place} is an adapter: name the model that it changes with --base{hint}")
  folder = sources.resolve(base, cache_dir=cache_dir)
  model = loading.read_facts(folder)
  adapter = adapter_files.FolderAdapter(place, model.config)
  own = pathlib.Path(place).expanduser()
  tokenizer = own if (own / "tokenizer_config.json").is_file() else None
  bare = StoredWeights(place, model, _opened(model), None, {}, tokenizer=tokenizer)
  return _joined(bare, adapter, base)


def _check_base(adapter: stored_weights.CheckpointAdapter, directory: pathlib.Path) -> None:
  """Raises WeightsError unless a model is the base that an adapter was trained on."""
  digest = agreements.digest_of_weights(directory)
  if digest != adapter.base_digest:
    raise stored_weights.WeightsError(
      f"{adapter.folder} holds an adapter of the weights in {adapter.base} (digest"
      f" {adapter.base_digest}), but the weights in {directory} are others (digest {digest}); name"
      " the right ones with --base=MODEL"
    )


def _joined(
  weights: StoredWeights, adapter: merged_tensors.StoredAdapter, name: str
) -> StoredWeights:
  """Returns the weights of a base with an adapter; the user has named the base."""
  dtypes = adapters.read_dtypes(adapter.options)
  rounded = functools.partial(parameter_reading.rounded, dtypes=dtypes)
  base = weights.tensors
  tensors = merged_tensors.MergedTensors(base, adapter, weights.config, rounded=rounded)
  name = sources.portable(name, weights.directory)
  parts = {"tensors": tensors, "adapter": adapter, "base": base, "base_name": name}
  return dataclasses.replace(weights, **parts, dtypes=dtypes)


def load(weights: StoredWeights, *, like: Any = None) -> loading.Loaded:
  """Reads weights into arrays on devices, in their own dtypes; an adapter apart from its base.

  Args:
    weights: Weights to read.
    like: Shapes, dtypes and shardings of the result, as `described` returns them; None: everything
      is on the default device.

  Raises:
    WeightsError: The checkpoint was deleted meanwhile.
  """
  config, adapter = weights.config, weights.adapter
  places = None if like is None else policy.shardings_of(lora.base_of(like))
  sharding = None if places is None else lambda _: places
  tensors = weights.tensors if weights.base is None else weights.base
  params = parameter_reading.read_params(tensors, config, sharding=sharding, dtype=weights.dtypes)
  if adapter is not None:
    params = lora.join(params, _placed(adapter, config, like), adapter.options.scale)
  return loading.Loaded(config, params, weights.directory, weights.model.generation)


def _placed(adapter: merged_tensors.StoredAdapter, config: ModelConfig, like: Any) -> lora.Adapter:
  """Reads an adapter onto the devices."""
  found: lora.Adapter = {}
  for kernel, parts in lora.tree(config, adapter.options).items():
    for part in parts:
      layers = range(config.num_layers)
      values = np.stack([adapter.read(kernel, part, layer) for layer in layers])
      place = None if like is None else getattr(like["layers"][kernel], part).sharding
      placed = jax.device_put(values) if place is None else arrays.put(values, place)
      found.setdefault(kernel, {})[part] = jax.block_until_ready(placed)
  return found


def fields(weights: StoredWeights) -> dict[str, Any]:
  """Returns the fields of a config that say which weights an engine samples from."""
  own = defaults.get_config().model.lora.to_dict()
  if weights.adapter is not None:
    own |= dataclasses.asdict(weights.adapter.options)
    del own["sync"]  # of the engine, not of the weights.
  return {
    "model.path": str(weights.directory),
    **{f"model.lora.{name}": value for name, value in own.items()},
  }


def steps(run: pathlib.Path) -> list[int]:
  """Returns the steps of a run that have a checkpoint, in ascending order."""
  return stored_steps.complete(run / "checkpoints")


def choose_step(run: pathlib.Path, wanted: int | str) -> int:
  """Returns the step that a number, "best" or "latest" stands for.

  The best one is by the run's own `checkpoint.best_metric` and `best_mode`, among the checkpoints
  that are there; of equal ones it is the newer one.

  Raises:
    NoWeights: There is no such checkpoint; names those that there are.
  """
  present = steps(run)
  if not present:
    exported = f"; its final weights are the model {run / 'export'}"
    raise NoWeights(f"{run} has no checkpoint{exported if (run / 'export').is_dir() else ''}")
  if wanted == "latest":
    return present[-1]
  listed = f"{run} has checkpoints of the steps {', '.join(map(str, present))}"
  if wanted == "best":
    return _best(run, present, listed)
  if wanted not in present:
    raise NoWeights(f"there is no checkpoint of step {wanted}; {listed}")
  return int(wanted)


def _best(run: pathlib.Path, present: Sequence[int], listed: str) -> int:
  config = whole_config_of(run)
  metric_names, mode = data_options.best_metrics(config), config.checkpoint.best_mode
  folder = run / "checkpoints"
  found = {
    step: stored_steps.metric(stored_steps.folder(folder, step), metric_names) for step in present
  }
  best = stored_steps.best_first(found, mode)[0]
  if found[best] is None:
    raise NoWeights(
      f"none of the checkpoints of {run} has {' or '.join(metric_names)}, by which the best one is"
      f" chosen: no step with a checkpoint was evaluated; {listed}"
    )
  return best


def _base_of(run: pathlib.Path, base: str | None, cache_dir: str | None) -> pathlib.Path:
  """Returns the folder of the model that a run began with."""
  if base is not None:
    return sources.resolve(base, cache_dir=cache_dir)
  path = _path_of(run)
  try:
    return sources.resolve(path, cache_dir=cache_dir or whole_config_of(run).model.cache_dir)
  except (ExpectedFailure, OSError) as error:
    raise NoWeights(
      f"the model that {run} began with, whose tokenizer and settings are needed, cannot be"
      f" found: {error}. If it is elsewhere now, name it with --base=MODEL"
    ) from error


def _path_of(run: pathlib.Path) -> str:
  """Returns the path or name of the model that a run began with."""
  model = config_of(run).get("model")
  if not isinstance(model, dict) or not isinstance(model.get("path"), str):
    raise NoWeights(f"{run / 'config.json'} does not name a model; name it with --base=MODEL")
  taken = model.get("fallback_taken")
  found = taken.get("taken") if isinstance(taken, dict) else None
  return found if found and isinstance(found, str) else model["path"]


def config_of(run: pathlib.Path) -> dict[str, Any]:
  try:
    return configuration.read(run / "config.json")
  except ConfigError as error:
    raise NoWeights(f"{run} is not a whole run folder: {error}") from error


def whole_config_of(run: pathlib.Path) -> Config:
  """Returns the config of a run, with the fields of this version.

  Raises:
    NoWeights: As for `editable_config_of`.
  """
  return configuration.typed(editable_config_of(run))


def editable_config_of(run: pathlib.Path) -> Any:
  """Returns the config of a run as a ConfigDict, locked, with the fields of this version.

  Raises:
    NoWeights: config.json is missing or damaged, or a field has a value that it cannot have.
  """
  config: Any = defaults.get_config()  # its placeholders know the types of fields that are None.
  with config.unlocked(), config.ignore_type():
    problems = list(_fill(config, _numbers(removed.without(config_of(run)))))
  problems += field_checks.wrong(configuration.plain_fields(config)).values()
  if problems:
    raise NoWeights(f"{run / 'config.json'}: {problems[0]}")
  return sections.adopt(config).lock()


def _fill(section: Any, values: Mapping[str, Any]) -> Iterator[str]:
  """Sets the fields of a section; what has fields of a user's choice is replaced as a whole.

  Yields:
    The problem of each section whose value is not one.
  """
  for name, value in values.items():
    own = section[name] if name in section else None
    is_section = isinstance(own, ml_collections.ConfigDict) and bool(len(own))
    if is_section and not isinstance(value, Mapping):
      yield f"{name} must be a section, got {checked.shown(value)}"
    elif is_section and name != "environments":
      yield from _fill(own, value)
    else:
      section[name] = ml_collections.ConfigDict(value) if isinstance(value, Mapping) else value


def _numbers(value: Any) -> Any:
  """Returns a stored value with its infinite numbers, which are strings in JSON, as floats."""
  if isinstance(value, dict):
    return {name: _numbers(each) for name, each in value.items()}
  if isinstance(value, list):
    return tuple(_numbers(each) for each in value)
  return float(value) if value in ("inf", "-inf", "nan") else value


def _not_a_run(place: str) -> str:
  if "://" in place:
    return f"a run at a URL is not read here: copy {place} to a folder first, and name that"
  folder = pathlib.Path(place)
  if not folder.exists():
    return f"there is no run folder {folder}"
  return f"{folder} is not a run folder: it has neither checkpoints/ nor metrics.jsonl"
