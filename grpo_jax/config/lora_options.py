"""The options of LoRA, made from `config.model.lora` and checked."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, Literal

from grpo_jax.config import configuration
from grpo_jax.config.options import Config
from grpo_jax.models import adapter_files, lora
from grpo_jax.models.errors import ModelError
from grpo_jax.models.options import ALL, LoraOptions
from grpo_jax.values import options

QUANTIZED = ("int8", "nf4")
_USUAL = options.values(LoraOptions())
_OF_FOLDER = ("rank", "targets", "alpha", "rank_stabilized")


def load(config: Config) -> lora.AdapterOptions | None:
  """Returns the options of the adapter; None: every weight is trained.

  Raises:
    ConfigError: The folder of `model.lora.path` cannot be used or contradicts another option.
    ValueError: The targets do not name kernels.
  """
  section = config.model.lora
  if section.path is not None:
    return _of_folder(section, section.path)
  return None if section.rank is None else _given(section, section.rank)


def of_stored(config: Config) -> lora.AdapterOptions | None:
  """Returns the same as `load` of the config in a run folder, which is resolved.

  The folder of `model.lora.path` is not read; it may be gone.
  """
  section = config.model.lora
  return None if section.rank is None else _given(section, section.rank)


def resolved(config: Config) -> Config:
  """Returns a copy of the config in which the options of the adapter folder replace the defaults.

  Raises:
    ConfigError: As for `load`.
  """
  if config.model.lora.path is None:
    return config
  found = _of_folder(config.model.lora, config.model.lora.path)
  values = {f"model.lora.{name}": getattr(found, name) for name in _OF_FOLDER}
  return configuration.replaced(config, values)


def sync(config: Config) -> Literal["merged", "adapter"]:
  """Returns what engines get of a policy with an adapter.

  Merged weights lose a small adapter when they are rounded to bfloat16, so that the engine would
  sample from nearly the base.
  """
  section = config.model.lora
  if section.sync is not None:
    return section.sync
  is_exact = config.model.compute_dtype == "float32" and section.base_dtype not in QUANTIZED
  return "merged" if is_exact else "adapter"


def is_unmerged(config: Config) -> bool | None:
  """Returns whether engines get the adapter apart from its base; None: there is no adapter."""
  return None if config.model.lora.rank is None else sync(config) == "adapter"


def problems(config: Config) -> Iterator[str]:
  """Yields a message for each option that cannot work."""
  section = config.model.lora
  if section.rank is None and section.path is None:
    yield from _never_read(config)
    return
  try:
    load(config)
  except ValueError as error:
    yield str(error)
  if section.sync == "merged" and section.base_dtype in QUANTIZED:
    yield (
      f"model.lora.sync='merged' cannot work with model.lora.base_dtype={section.base_dtype!r}:"
      " merged weights are not quantised, so that engines would sample from another policy than"
      " the one that is trained; set it to 'adapter'"
    )
  if config.reference.update_every_steps:
    yield (
      f"reference.update_every_steps={config.reference.update_every_steps} cannot work with"
      " model.lora: the reference of a policy with a frozen base is that base, which never"
      " changes; set it to 0"
    )


def _never_read(config: Config) -> Iterator[str]:
  """Yields a message for each option of an adapter that there is not."""
  for name, usual in _USUAL.items():
    value = getattr(config.model.lora, name)
    if _plain(value) != _plain(usual):
      yield (
        f"model.lora.{name}={value!r} would never be read: model.lora.rank is None, so every weight"
        " is trained; set the rank to train an adapter"
      )


def _given(section: LoraOptions, rank: int) -> lora.AdapterOptions:
  """Returns the options as the config has them."""
  return lora.AdapterOptions(
    rank=rank,
    alpha=float(section.alpha),
    targets=lora.targets(_plain(section.targets)),
    rank_stabilized=section.rank_stabilized,
    base_dtype=section.base_dtype,
  )


def _of_folder(section: LoraOptions, path: str) -> lora.AdapterOptions:
  """Returns the options of the adapter in `model.lora.path`, with the dtype that the config has.

  Raises:
    ConfigError: An option is neither the default nor that of the folder.
  """
  folder = pathlib.Path(path).expanduser()
  if not folder.is_dir():
    raise configuration.ConfigError(
      f"model.lora.path={path!r} is not a folder: it must be a PEFT folder, such as"
      " adapter/ of a run. A run that continues does without it: set the path to None, and"
      f" {', '.join(_OF_FOLDER)} as in the run's config.json"
    )
  try:
    found = adapter_files.options(folder)
  except ModelError as error:
    below = folder / "adapter"
    is_run = (below / adapter_files.CONFIG_FILE).is_file()
    hint = f"; the adapter of this run is {below}" if is_run else ""
    raise configuration.ConfigError(f"model.lora.path: {error}{hint}") from error
  wrong = list(_contradictions(section, found))
  if wrong:
    raise configuration.ConfigError(
      f"model.lora.path={path!r} holds an adapter that contradicts other options:"
      f" {'; '.join(wrong)}. Leave them at their defaults to take those of the folder"
    )
  return dataclasses.replace(found, base_dtype=section.base_dtype)


def _contradictions(section: Any, found: lora.AdapterOptions) -> Iterator[str]:
  """Yields the options that a user has set and that the adapter of a folder does not have."""
  if section.rank is not None and section.rank != found.rank:
    yield f"model.lora.rank={section.rank}, but the adapter has rank {found.rank}"
  own = _plain(section.targets)
  if own != _USUAL["targets"] and lora.targets(own) != lora.targets(found.targets):
    yield f"model.lora.targets={own}, but the adapter has {lora.targets(found.targets)}"
  scaling = {name: getattr(section, name) for name in ("alpha", "rank_stabilized")}
  is_set = any(value != _USUAL[name] for name, value in scaling.items())
  scale = dataclasses.replace(found, **scaling).scale
  if is_set and abs(scale - found.scale) > 1e-6 * found.scale:
    given = ", ".join(f"model.lora.{name}={value}" for name, value in scaling.items())
    yield f"{given} multiply by {scale:g}, but the adapter is multiplied by {found.scale:g}"


def _plain(value: Any) -> Any:
  """Returns targets, which may be one string or a list, as a tuple; other values as they are."""
  if isinstance(value, list | tuple):
    return tuple(value)
  return (value,) if value == ALL else value
