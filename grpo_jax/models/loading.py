"""Reads the parameters of a checkpoint tensor by tensor, directly into their sharding (I/O)."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models import classifier, files, leaves, quantized, safetensors, transformer
from grpo_jax.models import config as model_config
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.errors import ModelError
from grpo_jax.models.fields import Fields

# Dtype of all parameters, or those of the kinds of `leaves.Leaf`; others are float32. Kernels may
# have a format of `quantized`.
Dtypes = Any


@dataclasses.dataclass
class Rounding:
  """How far the weights that this process has read differ from those in the files.

  Each process counts its share of what several of them have read, so that the sums over all
  processes are those of the model. Tensors whose dtype holds every value of the file are left out.
  """

  squared_error: float = 0.0  # ‖read − file‖².
  squared_norm: float = 0.0  # ‖file‖².
  share: float = 1.0  # of this process in what is being read.

  @property
  def relative(self) -> float:
    """‖read − file‖ / ‖file‖; 0 if nothing was rounded."""
    return math.sqrt(self.squared_error / self.squared_norm) if self.squared_error else 0.0

  def add(self, values: np.ndarray, read: np.ndarray) -> None:
    """Counts values of a file, and what was made of them."""
    exact = np.asarray(values, np.float64 if values.dtype == np.float64 else np.float32).ravel()
    error = np.asarray(read, exact.dtype).ravel() - exact
    self.squared_error += self.share * float(np.dot(error, error))
    self.squared_norm += self.share * float(np.dot(exact, exact))


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
  rounding: Rounding = dataclasses.field(default_factory=Rounding)


def load(
  path: str | pathlib.Path,
  *,
  sharding: Callable[[Any], Any] | None = None,
  dtype: Dtypes = jnp.float32,
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
      be a format of `quantized`; then the shardings are those of `described`.

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
  dtype: Dtypes = jnp.float32,
) -> Loaded:
  """Reads the weights of a model whose other files have been read; see `load`."""
  tensors = safetensors.open_folder(facts.directory)
  check(tensors, facts.config, str(facts.directory))
  rounding = Rounding()
  params = read_params(tensors, facts.config, sharding=sharding, dtype=dtype, rounding=rounding)
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
  tensors = safetensors.open_folder(directory)
  shape = tuple(tensors.shapes.get(SCORE_NAME, ()))
  if len(shape) != 2 or shape[1] != config.hidden_size:
    found = sorted(name for name in tensors.shapes if not name.startswith("model."))
    raise ModelError(
      f"{directory}: needs {SCORE_NAME} [labels, {config.hidden_size}], but has"
      f" {list(shape) or 'none'}; the tensors outside the body are {found}"
    )
  check(tensors, config, str(directory), others=(SCORE_NAME, _head_name(config)))
  body = read_params(tensors, config, dtype=dtype)
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
  tensors = safetensors.open_folder(directory)
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


def read_params(
  tensors: safetensors.Tensors,
  config: ModelConfig,
  *,
  sharding: Callable[[Any], Any] | None = None,
  dtype: Dtypes = jnp.float32,
  rounding: Rounding | None = None,
) -> transformer.Params:
  """Reads all parameters, leaf by leaf, after `check`; see `load` for the arguments.

  What the dtype does to the values is added to `rounding`.
  """
  rounding = Rounding() if rounding is None else rounding
  tree = leaves.tree(config)
  shardings = sharding(transformer.logical_axes(config)) if sharding else None
  sources: dict[tuple[str, ...], list[leaves.Stored]] = {}
  for stored in leaves.stored(config):
    sources.setdefault(stored.path, []).append(stored)
  params: transformer.Params = {"layers": {}}
  for path, parts in sources.items():
    below, shape, at = params, tree, shardings
    for key in path[:-1]:
      below, shape, at = below[key], shape[key], at and at[key]
    placed = at[path[-1]] if at else None
    entry = shape[path[-1]]
    form = form_of(entry, dtype)
    read: Any = _read_leaf if isinstance(form, np.dtype) else _read_quantized
    leaf = read(tensors, parts, entry.shape, placed, form, rounding)
    # Placement is asynchronous: the host's copy of this leaf must be freed before the next is read.
    below[path[-1]] = jax.block_until_ready(leaf)
  return params


def form_of(leaf: leaves.Leaf, dtypes: Dtypes) -> Any:
  """Returns the dtype of a leaf, or its format of `quantized`."""
  own = dtypes.get(leaf.kind, np.float32) if isinstance(dtypes, Mapping) else dtypes
  is_format = any(own is form for form in quantized.FORMATS.values())
  return own if is_format else np.dtype(own)


def described(leaf: leaves.Leaf, sharding: Any, dtypes: Dtypes) -> Any:
  """Returns shape, dtype and sharding of a leaf as it is read.

  Args:
    leaf: Leaf of the tree of all parameters.
    sharding: Its sharding, if it were an array.
    dtypes: Dtypes as in `load`.

  Returns:
    A `jax.ShapeDtypeStruct`; for a quantised leaf, those of its fields.

  Raises:
    ModelError: The mesh splits the leaf within a block of its format.
  """
  form = form_of(leaf, dtypes)
  if isinstance(form, np.dtype):
    return jax.ShapeDtypeStruct(leaf.shape, form, sharding=sharding)
  return quantized.described(leaf.shape, form, sharding)


def rounded(rows: np.ndarray, leaf: leaves.Leaf, *, dtypes: Dtypes) -> np.ndarray:
  """Returns values of a tensor as `load` would round or quantise them, in float32 on the host.

  Args:
    rows: Rows of the tensor, as in the file.
    leaf: Leaf that the tensor is of.
    dtypes: Dtypes as in `load`.
  """
  form = form_of(leaf, dtypes)
  if isinstance(form, np.dtype):
    return rows.astype(form).astype(np.float32)
  return quantized.on_host(quantized.quantize(rows.T, form)).T


def _read_leaf(
  tensors: safetensors.Tensors,
  parts: list[leaves.Stored],
  shape: tuple[int, ...],
  sharding: jax.sharding.Sharding | None,
  dtype: np.dtype,
  rounding: Rounding,
) -> jax.Array:
  """Reads one leaf of the tree: each device's part separately, equal parts once."""
  rounding.share = 1.0
  if sharding is None:
    whole = (slice(None),) * len(shape)
    return jax.device_put(_read_part(tensors, parts, shape, dtype, whole, rounding))
  made: dict[tuple, np.ndarray] = {}
  shares = _shares(sharding, shape)

  def part(index):
    key = _key(index, shape)
    if key not in made:
      rounding.share = shares[key]
      made[key] = _read_part(tensors, parts, shape, dtype, index, rounding)
    return made[key]

  return jax.make_array_from_callback(shape, sharding, part)


def _key(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple:
  return tuple(s.indices(n) for s, n in zip(index, shape, strict=True))


def _shares(sharding: Any, shape: tuple[int, ...]) -> dict[tuple, float]:
  """Returns one process's share of each part of an array; several processes may have a part."""
  holders: dict[tuple, set[int]] = {}
  for device, index in sharding.devices_indices_map(shape).items():
    holders.setdefault(_key(index or (), shape), set()).add(device.process_index)
  return {key: 1 / len(processes) for key, processes in holders.items()}


def _read_quantized(
  tensors: safetensors.Tensors,
  parts: list[leaves.Stored],
  shape: tuple[int, ...],
  shardings: Any,
  form: quantized.Format,
  rounding: Rounding,
) -> Any:
  """Reads and quantises one leaf of the tree: each device's part separately, equal parts once.

  Scales are of whole kernels, so the result does not depend on the mesh.
  """
  rounding.share = 1.0
  if shardings is None:
    whole = (slice(None),) * len(shape)
    return jax.device_put(_quantized_part(tensors, parts, shape, whole, form, rounding))
  made: dict[tuple, Any] = {}
  placed = []
  shares = _shares(shardings.codes, shape)
  for device, index in shardings.codes.addressable_devices_indices_map(shape).items():
    key = _key(index, shape)
    if key not in made:
      rounding.share = shares[key]
      made[key] = _quantized_part(tensors, parts, shape, index, form, rounding)
    placed.append(jax.device_put(made[key], device))

  def joined(field: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding, *own: jax.Array) -> Any:
    return jax.make_array_from_single_device_arrays(field.shape, sharding, list(own))

  return jax.tree.map(joined, quantized.described(shape, form), shardings, *placed)


def _quantized_part(
  tensors: safetensors.Tensors,
  parts: list[leaves.Stored],
  shape: tuple[int, ...],
  index: tuple[slice, ...],
  form: quantized.Format,
  rounding: Rounding,
) -> Any:
  """Reads and quantises the part of stacked kernels given by `index`.

  All inputs of a few outputs are read at once, because an output may have one scale for all.
  """
  layers, outputs = range(*index[0].indices(shape[0])), index[2].indices(shape[2])
  first, last, rows = outputs[0], outputs[1], max(1, _CHUNK_VALUES // shape[1])
  inputs = index[1].indices(shape[1])[:2]
  size = len(layers), inputs[1] - inputs[0], last - first
  out = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), quantized.described(size, form))
  for place, layer in enumerate(layers):
    for start in range(first, last, rows):
      stop = min(start + rows, last)
      read = tensors.read(parts[layer].name, slice(start, stop))
      made = quantized.of_inputs(quantized.quantize(read.T, form), *inputs)
      rounding.add(read.T[slice(*inputs)], quantized.on_host(made))
      for target, values in zip(jax.tree.leaves(out), jax.tree.leaves(made), strict=True):
        target[place, :, start - first : stop - first] = values
  return out


def _read_part(
  tensors: safetensors.Tensors,
  parts: list[leaves.Stored],
  shape: tuple[int, ...],
  dtype: np.dtype,
  index: tuple[slice, ...],
  rounding: Rounding,
) -> np.ndarray:
  """Reads the part of a leaf given by `index`, one tensor of the file after another."""
  size = [len(range(*s.indices(n))) for s, n in zip(index, shape, strict=True)]
  out = np.empty(size, dtype)
  if parts[0].layer is None:
    _copy(tensors, parts[0], index, out, rounding)
    return out
  layers = range(*index[0].indices(shape[0]))
  for place, layer in enumerate(layers):
    _copy(tensors, parts[layer], index[1:], out[place], rounding)
  return out


def _copy(
  tensors: safetensors.Tensors,
  stored: leaves.Stored,
  index: tuple[slice, ...],
  out: np.ndarray,
  rounding: Rounding,
) -> None:
  """Fills `out` with the part of one tensor, a few rows of the file at a time."""
  in_file = index[::-1] if stored.leaf.is_kernel else index
  first, last, _ = in_file[0].indices(stored.shape[0])
  target = out.T if stored.leaf.is_kernel else out
  rows = max(1, _CHUNK_VALUES // max(1, int(np.prod(stored.shape[1:]))))
  for start in range(first, last, rows):
    stop = min(start + rows, last)
    values = tensors.read(stored.name, slice(start, stop))[(slice(None), *in_file[1:])]
    read = target[start - first : stop - first]
    read[...] = values
    if values.dtype != out.dtype and values.itemsize >= out.itemsize:
      rounding.add(values, read)


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
  rows = max(1, _CHUNK_VALUES // config.hidden_size)
  starts = range(0, config.vocab_size, rows)
  cuts = (slice(start, start + rows) for start in starts)
  return all(
    np.array_equal(tensors.read(names["head"], cut), tensors.read(names["embed"], cut))
    for cut in cuts
  )


SCORE_NAME = "score.weight"  # of a sequence classifier, [labels, hidden_size].
_SHOWN = 200  # characters of a tensor's name in an error.
_SHOWN_FAULTS = 8
_CHUNK_VALUES = 1 << 20  # read at once: 4 MiB of float32.
