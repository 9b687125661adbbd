"""A run that trains an adapter: where it begins, what its checkpoints say, and what cannot work."""

import dataclasses
import logging
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from grpo_jax import data, processes
from grpo_jax.building import agreements
from grpo_jax.building.computation import Computation
from grpo_jax.config import lora_options
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import Config
from grpo_jax.errors import ExpectedFailure
from grpo_jax.models import adapter_files, leaves, loading, lora, parameter_reading, quantized
from grpo_jax.run_folder.checkpointing import Checkpoints

_log = logging.getLogger(__name__)


FACT = "adapter"  # name of the facts in the `extra` of a checkpoint.
_OPTIONS = ("rank", "alpha", "targets", "rank_stabilized", "base_dtype")


def check(config: Config, model: loading.ModelFacts) -> None:
  """Checks the adapter's options against the sizes of the model, before weights are loaded.

  Warns if the rank is larger than the smaller size of some kernels, where a part of it is of no
  use.

  Args:
    config: Resolved config of the run.
    model: Model of the run.

  Raises:
    ConfigError: The rank is larger than the smaller size of all kernels with an adapter, or the
      adapter of `model.lora.path` is of another model, or the model lacks some targets, or it
      has experts that the options would quantise or keep apart from their adapter.
  """
  options = lora_options.load(config)
  if options is None:
    return
  of_layer = leaves.layer(model.config)
  try:
    kernels = lora.kernels(model.config, options)
  except ValueError as error:
    raise ConfigError(f"{error} ({model.directory})") from error
  _check_experts(config, options, kernels, model)
  sizes = {name: of_layer[name].shape[-2:] for name in kernels}
  small = {name: shape for name, shape in sizes.items() if min(shape) < options.rank}
  shown = ", ".join(f"{name} {i} × {o}" for name, (i, o) in small.items())
  if len(small) == len(sizes):
    raise ConfigError(
      f"model.lora.rank={options.rank} is larger than the smaller size of every kernel with an"
      f" adapter ({shown}; {model.directory}): at most {max(map(min, sizes.values()))} can be of"
      " use"
    )
  if small:
    _log.warning("model.lora.rank=%d is larger than needed for %s", options.rank, shown)
  if config.model.lora.path is not None:
    try:
      adapter_files.look(_path(config), model.config)
    except ValueError as error:
      raise ConfigError(f"model.lora.path: {error}") from error


def _check_experts(
  config: Config,
  options: lora.AdapterOptions,
  kernels: Sequence[str],
  model: loading.ModelFacts,
) -> None:
  """Raises ConfigError if experts would be quantised, or if servers would get their adapter."""
  if model.config.mixture is None:
    return
  is_apart = config.engine.name == "sglang" and lora_options.sync(config) == "adapter"
  if is_apart and not set(leaves.EXPERTS).isdisjoint(kernels):
    raise ConfigError(
      "model.lora.targets has kernels of experts, whose adapter SGLang servers get merged only: set"
      " model.lora.sync='merged', or model.lora.targets=('q', 'k', 'v', 'o')"
    )
  if options.base_dtype in quantized.FORMATS:
    raise ConfigError(
      f"model.lora.base_dtype={options.base_dtype!r} needs a model without experts, because experts"
      f" are not quantised ({model.directory}): set model.lora.base_dtype='bfloat16'"
    )


def check_prompts(config: Config, tokenizer: data.Tokenizer, folder: pathlib.Path) -> None:
  """Warns if the adapter to begin with was trained with another chat template.

  Args:
    config: Resolved config of the run.
    tokenizer: Tokenizer of the run.
    folder: Folder of the model.
  """
  if config.model.lora.path is None or not (_path(config) / "tokenizer_config.json").is_file():
    return
  asked = [{"role": "user", "content": "?"}]
  try:
    own = data.load_tokenizer(_path(config), model_directory=folder).apply_chat_template(asked)
  except ExpectedFailure:  # without a template of its own.
    return
  if not np.array_equal(own, tokenizer.apply_chat_template(asked)):
    _log.warning(
      "the adapter in model.lora.path=%s was trained with another chat template than this run has;"
      " its own is in that folder (model.chat_template=FILE)",
      config.model.lora.path,
    )


def read(config: Config, made: Computation) -> Any:
  """Returns the adapter to begin with, on the devices; None: a new one is made.

  Raises:
    ModelError: The files of `model.lora.path` cannot be read.
  """
  if config.model.lora.path is None:
    return None
  return adapter_files.read(_path(config), made.model, sharding=made.trainable_shardings)


def _path(config: Config) -> pathlib.Path:
  """Returns the folder of the adapter that the run begins with; there must be one."""
  path = config.model.lora.path
  assert path is not None
  return pathlib.Path(path).expanduser()


def facts(config: Config, base: loading.ModelFacts) -> dict[str, Any]:
  """Returns what checkpoints say about the adapter and its base; {}: every weight is trained.

  Args:
    config: Resolved config of the run.
    base: Model on which the adapter is trained.
  """
  options = lora_options.load(config)
  if options is None:
    return {}
  return {
    FACT: {
      "base": str(base.directory.resolve()),
      "base_digest": agreements.digest_of_weights(base.directory),
      "rank": options.rank,
      "alpha": options.alpha,
      "targets": list(lora.targets(options.targets)),
      "rank_stabilized": options.rank_stabilized,
      "base_dtype": options.base_dtype,
    }
  }


def check_same(checkpoints: Checkpoints, facts: Mapping[str, Any]) -> None:
  """Checks that the newest checkpoint is of the same kind of run, adapter and base.

  Args:
    checkpoints: Checkpoints of the run folder.
    facts: Facts of the present run, as `facts` returns them.

  Raises:
    ConfigError: The checkpoint is of another run; the message names what differs.
  """
  extra = checkpoints.newest_extra()
  if extra is None:
    return
  lines = list(differences(extra.get(FACT), facts.get(FACT)))
  if lines:
    listed = "".join(f"\n  - {line}" for line in lines)
    raise ConfigError(
      f"the checkpoints in {checkpoints.directory} are of another run than this one:{listed}\n"
      "Set these as they were, or choose another --workdir"
    )


def differences(was: Any, now: Mapping[str, Any] | None) -> Iterator[str]:
  """Yields a line for each difference between the adapter of a checkpoint and that of the run.

  Args:
    was: Facts in the checkpoint; None: it is of a run that trains every weight.
    now: Facts of the run; None: it trains every weight.
  """
  if was is None and now is None:
    return
  whole = "None (every weight is trained)"
  if not isinstance(was, Mapping) or now is None:
    before = was.get("rank") if isinstance(was, Mapping) else whole
    yield f"model.lora.rank: was {before}, is {now['rank'] if now else whole}"
    return
  for name in _OPTIONS:
    if was.get(name) != now[name]:
      yield f"model.lora.{name}: was {was.get(name)}, is {now[name]}"
  if was.get("base_digest") != now["base_digest"]:
    yield (
      f"model.path, the frozen base: was {was.get('base')} (digest {was.get('base_digest')}), is"
      f" {now['base']} (digest {now['base_digest']})"
    )


def log_sizes(made: Computation) -> None:
  """Logs how much of the model a run trains; nothing if it trains every weight."""
  options = lora_options.load(made.config)
  if options is None:
    return
  state, base = made.state, made.read.described
  trained, frozen = _count(state.params), _count(leaves.tree(made.model))
  _log.info(
    "LoRA: rank %d on %s trains %s of %s parameters (%.2g %%); adapter %s, optimizer %s, frozen"
    " base (%s) %s",
    *(options.rank, ", ".join(lora.kernels(made.model, options)), f"{trained:,}", f"{frozen:,}"),
    *(100 * trained / frozen, _size(state.params), _size(state.opt_state)),
    *(options.base_dtype, _size(base)),
  )


def with_rounding(config: Config, model: loading.Loaded) -> loading.Loaded:
  """Returns a model with the rounding of the whole base, and logs it; all processes take part.

  Args:
    config: Resolved config of the run.
    model: Model as this process has read it.
  """
  if lora_options.load(config) is None:
    return model
  own = [model.rounding.squared_error, model.rounding.squared_norm]
  parts = processes.exchange(own, what="the rounding of the base")
  rounding = parameter_reading.Rounding(*(sum(part) for part in zip(*parts, strict=True)))
  if rounding.relative:
    _log.warning(
      "model.lora.base_dtype=%r rounds the weights of %s by a relative %.1e; lora/relative_change"
      " says how much the adapter changes them. The run trains the adapter on the rounded weights:"
      " export/ has both; adapter/ on the published weights is a different policy",
      config.model.lora.base_dtype,
      config.model.path,
      rounding.relative,
    )
  return dataclasses.replace(model, rounding=rounding)


def log_beginning(config: Config) -> None:
  """Logs that a run begins apart from its reference policy; nothing if it does not."""
  if config.model.lora.path is not None:
    _log.info(
      "the run begins with the adapter in %s: its KL is measured to the initial weights, the model"
      " without an adapter, and is not 0 at the first step (all/kl_to_initial%s)",
      *(config.model.lora.path, ", and the KL of the loss" if config.loss.kl_coef else ""),
    )


def _count(tree: Any) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _size(tree: Any) -> str:
  """Returns the bytes of a tree, on all devices together, as 1.23 GB, 45.6 MB or 7.9 kB."""
  count = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
  if count < 1e6:
    return f"{count / 1e3:.1f} kB"
  return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
