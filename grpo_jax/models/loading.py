"""Reads models and classifiers from Hugging Face folders, and checks what is in them (I/O)."""

import dataclasses
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models import (
  classifier,
  files,
  fused_experts,
  leaves,
  multimodal,
  parameter_reading,
  safetensors,
  transformer,
)
from grpo_jax.models import config as model_config
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.errors import ModelError
from grpo_jax.models.fields import Fields


@dataclasses.dataclass(frozen=True)
class ModelFacts:
  """What the files of a Hugging Face folder say of a model, apart from its weights.

  Attributes:
    config: Sizes of the model, from config.json.
    directory: The folder; holds the tokenizer.
    generation: Content of generation_config.json; empty if there is none.
  """

  config: ModelConfig
  directory: pathlib.Path
  generation: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Loaded:
  """A model as it was read."""

  config: ModelConfig
  params: transformer.Params
  directory: pathlib.Path  # Hugging Face folder that it was read from; holds the tokenizer.
  generation: Mapping[str, Any]  # generation_config.json; empty if there is none.
  rounding: parameter_reading.Rounding = dataclasses.field(
    default_factory=parameter_reading.Rounding
  )


def load(
  path: str | pathlib.Path,
  *,
  sharding: Callable[[Any], Any] | None = None,
  dtype: parameter_reading.Dtypes = jnp.float32,
) -> Loaded:
  """Reads a model from a local Hugging Face folder; see `sources.resolve` for other places.

  The host holds at most the parameters read so far and the leaf (all layers of one kernel) that is
  being read, never the model twice. A leaf that is quantised is never there in full precision: it
  is read and quantised a few rows at a time.

  Args:
    path: Folder with config.json and safetensors files, single or sharded.
    sharding: Function from the tree of logical axis names (`transformer.logical_axes`) to a tree
      of `jax.sharding.Sharding`; None: everything on the default device.
    dtype: Dtype of the parameters, whatever the files contain; or the dtypes of kinds of
      leaves ("kernel", "head", "embedding", ...), where others are float32. A dtype of kernels may
      be a format of `quantized`; then the shardings are those of `parameter_reading.described`.

  Raises:
    MissingModel: A file is missing.
    ModelError: The model is not supported, or tensors are missing, unexpected or of another shape
      than config.json implies; the message names each.
  """
  return load_weights(read_facts(pathlib.Path(path)), sharding=sharding, dtype=dtype)


def load_weights(
  facts: ModelFacts,
  *,
  sharding: Callable[[Any], Any] | None = None,
  dtype: parameter_reading.Dtypes = jnp.float32,
) -> Loaded:
  """Reads the weights of a model whose other files have been read; see `load`."""
  tensors = open_tensors(facts.directory, facts.config)
  check(tensors, facts.config, str(facts.directory))
  rounding = parameter_reading.Rounding()
  params = parameter_reading.read_params(
    tensors, facts.config, sharding=sharding, dtype=dtype, rounding=rounding
  )
  return Loaded(facts.config, params, facts.directory, facts.generation, rounding)


@dataclasses.dataclass(frozen=True)
class LoadedClassifier:
  """A sequence classifier, such as a reward model, as it was read."""

  config: ModelConfig  # of the body.
  params: classifier.Params
  directory: pathlib.Path  # Hugging Face folder that it was read from; holds the tokenizer.
  num_labels: int
  pad_id: int | None  # from config.json: a sequence is pooled at its last token that is not this.


def load_classifier(path: str | pathlib.Path, *, dtype: Any = jnp.float32) -> LoadedClassifier:
  """Reads a sequence classifier from a local Hugging Face folder, onto the default device.

  Args:
    path: Folder with config.json and safetensors files, single or sharded.
    dtype: Dtype of the parameters, whatever the files contain.

  Raises:
    MissingModel: A file is missing.
    ModelError: As for `load`; or there is no score matrix [labels, hidden_size].
  """
  directory = pathlib.Path(path)
  file = directory / "config.json"
  hf = files.read_json(file)
  config = model_config.classifier_from_hf(hf, where=str(file))
  tensors = open_tensors(directory, config)
  shape = tuple(tensors.shapes.get(SCORE_NAME, ()))
  if len(shape) != 2 or shape[1] != config.hidden_size:
    found = sorted(name for name in tensors.shapes if not name.startswith("model."))
    raise ModelError(
      f"{directory}: needs {SCORE_NAME} [labels, {config.hidden_size}], but has"
      f" {list(shape) or 'none'}; the tensors outside the body are {found}"
    )
  check(tensors, config, str(directory), others=(SCORE_NAME, _head_name(config)))
  body = parameter_reading.read_params(tensors, config, dtype=dtype)
  score = jax.device_put(tensors.read(SCORE_NAME).astype(np.dtype(dtype)))
  pad = Fields(hf, str(file)).ids("pad_token_id")
  return LoadedClassifier(
    config=config,
    params={"body": body, "score": score},
    directory=directory,
    num_labels=shape[0],
    pad_id=pad[0] if pad else None,
  )


def read_config(directory: pathlib.Path) -> ModelConfig:
  """Reads the config.json of a Hugging Face folder; raises the same errors as `load`."""
  file = directory / "config.json"
  return model_config.from_hf(files.read_json(file), where=str(file))


def open_tensors(directory: pathlib.Path, config: ModelConfig) -> safetensors.Tensors:
  """Opens the tensors of the text model in a Hugging Face folder, by its own names.

  There is one for each expert, also where a file holds all experts of a layer in one tensor.

  Raises:
    MissingModel, ModelError: As for `load`, except that no tensor is read.
  """
  hf = files.read_json(directory / "config.json")
  entries: dict[str, safetensors.Entry] = {}
  for name, entry in safetensors.open_folder(directory).entries.items():
    own = multimodal.own_name(name, hf)
    if own in entries:
      raise ModelError(f"{directory}: two of its tensors are {own} of the text model")
    if own is not None:
      entries[own] = entry
  return fused_experts.apart(safetensors.Folder(entries), config)


def read_facts(directory: pathlib.Path) -> ModelFacts:
  """Reads the JSON files of a Hugging Face folder; raises the same errors as `load`."""
  return ModelFacts(read_config(directory), directory, read_generation(directory))


def look(path: str | pathlib.Path) -> ModelConfig:
  """Checks the JSON files and headers of a local Hugging Face folder; cheap.

  Returns:
    The configuration of the model in it.

  Raises:
    MissingModel, ModelError: As for `load`, except that no tensor is read.
  """
  directory = pathlib.Path(path).expanduser()
  config = read_config(directory)
  tensors = open_tensors(directory, config)
  faults = _misfits(tensors, config)
  if faults:
    raise _unfit(str(directory), faults)
  for file, content in (
    (directory / "generation_config.json", read_generation(directory)),
    (directory / "config.json", files.read_json(directory / "config.json")),
  ):
    beyond = [i for i in Fields(content, str(file)).ids("eos_token_id") if i >= config.vocab_size]
    if beyond:
      raise ModelError(f"{file}: eos_token_id {beyond} is not below {config.vocab_size}")
  return config


def read_generation(directory: pathlib.Path) -> dict[str, Any]:
  """Reads generation_config.json; empty if there is none.

  Raises:
    ModelError: The file is not a JSON object, or a field does not hold token ids.
  """
  file = directory / "generation_config.json"
  if not file.exists():
    return {}
  content = files.read_json(file)
  for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
    Fields(content, str(file)).ids(name)
  return content


def check(
  tensors: safetensors.Tensors,
  config: ModelConfig,
  where: str,
  *,
  others: Collection[str] = (),
) -> None:
  """Compares the tensors of a checkpoint with those that the config implies.

  A tied checkpoint may store its head too, if it is the embedding.

  Args:
    tensors: Tensors of the checkpoint.
    config: Config that it should fit.
    where: Place of the checkpoint, for errors.
    others: Names of other tensors that are allowed, whatever they contain.

  Raises:
    ModelError: Tensors are missing, unexpected or of another shape; the message names them.
  """
  faults = _misfits(tensors, config, others)
  checks_head = config.tie_embeddings and _head_name(config) not in others
  if not faults and checks_head and not _stored_head_is_tied(tensors, config):
    faults.append(
      f"{_head_name(config)} differs from the embedding, yet config.json says"
      " tie_word_embeddings: true"
    )
  if faults:
    raise _unfit(where, faults)


def _misfits(
  tensors: safetensors.Tensors, config: ModelConfig, others: Collection[str] = ()
) -> list[str]:
  """Returns the tensors that are missing, unexpected or of another shape, by names and shapes."""
  wanted = {stored.name: stored.shape for stored in leaves.stored(config)}
  found = tensors.shapes
  faults = [f"missing: {name} {list(wanted[name])}" for name in wanted if name not in found]
  for name, shape in found.items():
    if name in wanted and tuple(shape) != wanted[name]:
      faults.append(f"{name}: has shape {list(shape)}, but the config implies {list(wanted[name])}")
    if name not in wanted and name not in others and not _is_ignored(name, config):
      faults.append(f"unexpected: {name[:_SHOWN]} {list(shape)}")
  return faults


def _unfit(where: str, faults: list[str]) -> ModelError:
  more = [f"and {len(faults) - _SHOWN_FAULTS} more"] if len(faults) > _SHOWN_FAULTS else []
  return ModelError(f"{where} does not fit its config: " + "; ".join(faults[:_SHOWN_FAULTS] + more))


def _head_name(config: ModelConfig) -> str:
  return model_config.FAMILIES_BY_NAME[config.family].TOP_NAMES["head"]


def _is_ignored(name: str, config: ModelConfig) -> bool:
  """Returns whether a tensor is allowed but not needed: old rotary buffers, a tied head."""
  if name.endswith("rotary_emb.inv_freq"):
    return True
  return config.tie_embeddings and name == _head_name(config)


def _stored_head_is_tied(tensors: safetensors.Tensors, config: ModelConfig) -> bool:
  names = model_config.FAMILIES_BY_NAME[config.family].TOP_NAMES
  if names["head"] not in tensors.shapes:
    return True
  if tuple(tensors.shapes[names["head"]]) != (config.vocab_size, config.hidden_size):
    return False
  rows = max(1, parameter_reading.CHUNK_VALUES // config.hidden_size)
  starts = range(0, config.vocab_size, rows)
  cuts = (slice(start, start + rows) for start in starts)
  return all(
    np.array_equal(tensors.read(names["head"], cut), tensors.read(names["embed"], cut))
    for cut in cuts
  )


SCORE_NAME = "score.weight"  # of a sequence classifier, [labels, hidden_size].
_SHOWN = 200  # characters of a tensor's name in an error.
_SHOWN_FAULTS = 8
