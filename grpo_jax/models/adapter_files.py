"""Adapters as PEFT folders: adapter_config.json and adapter_model.safetensors (I/O).

`peft` and inference servers load what is written here, and what they or others wrote is read here.
A folder may be untrusted: sizes are bounded by the model. `peft_format` says what the files mean.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.files import atomic
from grpo_jax.models import export, files, lora, merged_tensors, peft_format, safetensors
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.errors import MissingModel, ModelError
from grpo_jax.models.fields import Fields, short
from grpo_jax.processes import arrays

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"


def write(
  adapter: Mapping[str, Any],
  config: ModelConfig,
  options: lora.AdapterOptions,
  folder: str | pathlib.Path,
  *,
  base: str,
  dtype: Any = None,
  tokenizer: pathlib.Path | None = None,
  templates: Mapping[str, str] | None = None,
) -> pathlib.Path:
  """Writes a folder that `peft.PeftModel.from_pretrained` and SGLang load.

  The folder appears whole or not at all, and replaces an existing one. If a run has several
  processes, all of them make the same call; the main one writes.

  Args:
    adapter: Tree {kernel: {"a": [L i r], "b": [L r o]}}, sharded or not; see `lora`.
    config: Sizes of the base model.
    options: Options of the adapter.
    folder: Folder to write.
    base: Name or folder of the base model, which is written into the files.
    dtype: Dtype in the file; None: that of the arrays.
    tokenizer: Folder whose tokenizer is copied; None: the adapter has none.
    templates: Chat templates in place of those of the tokenizer; see `export.write_templates`.

  Returns:
    The folder.

  Raises:
    WriteError: The folder cannot be written; `OtherProcessError` on the other processes.
  """
  target = pathlib.Path(folder)

  def replace(tensors: Sequence[safetensors.ToWrite]) -> None:
    def fill(scratch: pathlib.Path) -> None:
      write_files(tensors, config, options, scratch, base=base)
      if tokenizer is not None:
        write_tokenizer(scratch, tokenizer, templates)

    atomic.replace_folder(target, fill)

  tensors = to_write(adapter, config, options, dtype=dtype)
  export.by_main(tensors, replace, what="writing the adapter")
  return target


def write_files(
  tensors: Sequence[safetensors.ToWrite],
  config: ModelConfig,
  options: lora.AdapterOptions,
  folder: pathlib.Path,
  *,
  base: str,
) -> None:
  """Writes both files into an existing folder; see `write` for the arguments."""
  export.write_json(folder / CONFIG_FILE, peft_format.to_peft(config, options, base=base))
  safetensors.write_file(folder / WEIGHTS_FILE, tensors)


def write_tokenizer(
  folder: pathlib.Path, source: pathlib.Path, templates: Mapping[str, str] | None
) -> None:
  """Writes the tokenizer with which an adapter was trained; see `write` for the arguments."""
  export.copy_tokenizer(source, folder)
  if (folder / "tokenizer.json").exists():  # it has all tokens; SGLang counts these as new ones.
    (folder / "added_tokens.json").unlink(missing_ok=True)
  if templates:
    export.write_templates(templates, folder)


def to_write(
  adapter: Mapping[str, Any],
  config: ModelConfig,
  options: lora.AdapterOptions,
  *,
  dtype: Any = None,
) -> list[safetensors.ToWrite]:
  """Returns the tensors of a PEFT folder, fetched when they are needed; see `write`.

  The tensors must be taken in their order: the leaf that the last one is in is kept on the host.
  """
  fetched = _Fetched(adapter)

  def of(each: peft_format.StoredFactor) -> safetensors.ToWrite:
    own = adapter[each.kernels[0]][each.part]
    return safetensors.ToWrite(
      each.name,
      each.shape,
      np.dtype(own.dtype if dtype is None else dtype),
      values=lambda: each.in_file([x[each.layer] for x in fetched.of(each)], dtype),
      take_part=lambda: fetched.fetch(each),
      copies=len(each.kernels) * arrays.copies_of_fetch(own) + 2,
    )

  return [of(each) for each in peft_format.stored(config, options)]


def stored_to_write(
  adapter: merged_tensors.StoredAdapter, config: ModelConfig, *, dtype: Any = np.float32
) -> list[safetensors.ToWrite]:
  """Returns the same tensors as `to_write`, read from files one at a time without devices."""
  made = np.dtype(dtype)

  def read(each: peft_format.StoredFactor) -> np.ndarray:
    own = [adapter.read(kernel, each.part, each.layer) for kernel in each.kernels]
    return each.in_file(own, made)

  return [
    safetensors.ToWrite(each.name, each.shape, made, functools.partial(read, each))
    for each in peft_format.stored(config, adapter.options)
  ]


class _Fetched:
  """The leaves of an adapter on the host: those of one kind of tensor at a time."""

  def __init__(self, adapter: Mapping[str, Any]):
    self._adapter = adapter
    self._last: tuple[Any, list[np.ndarray]] = None, []

  def fetch(self, each: peft_format.StoredFactor) -> None:
    """Fetches the leaves of a tensor unless they were the last ones; all processes take part."""
    key = each.kernels, each.part
    if self._last[0] != key:
      self._last = None, []  # never those of two kinds at once.
      self._last = key, [arrays.fetch(self._adapter[name][each.part]) for name in each.kernels]

  def of(self, each: peft_format.StoredFactor) -> list[np.ndarray]:
    """Fetches and returns the leaves of a tensor."""
    self.fetch(each)
    return self._last[1]


def options(folder: str | pathlib.Path) -> lora.AdapterOptions:
  """Returns what the two files of an adapter say about it, without the base model; cheap.

  Args:
    folder: PEFT folder.

  Returns:
    Rank, alpha, targets and kind of scale. PEFT's files do not hold the others, which have their
    defaults.

  Raises:
    MissingModel: A file is missing, or the weights are in a pickle.
    ModelError: The files are damaged, or are not those of an adapter by LoRA of the kernels of all
      layers.
  """
  return _open(pathlib.Path(folder).expanduser())[0]


def base_of(folder: str | pathlib.Path) -> str | None:
  """Returns the name or folder of the base that adapter_config.json names; None: it names none.

  Raises:
    MissingModel, ModelError: The file is missing or damaged.
  """
  file = pathlib.Path(folder).expanduser() / CONFIG_FILE
  return Fields(files.read_json(file), str(file)).string("base_model_name_or_path")


def look(folder: str | pathlib.Path, config: ModelConfig) -> lora.AdapterOptions:
  """Returns the same as `options`, and checks the tensors against a base model; cheap.

  Args:
    folder: PEFT folder.
    config: Sizes of the base model.

  Raises:
    MissingModel, ModelError: As for `options`; or tensors do not fit the model, and the message
      names them.
  """
  return _checked(pathlib.Path(folder).expanduser(), config)[0]


def read(
  folder: str | pathlib.Path,
  config: ModelConfig,
  *,
  sharding: Mapping[str, Mapping[str, Any]] | None = None,
  dtype: Any = jnp.float32,
) -> lora.Adapter:
  """Reads an adapter, one kernel after another, directly into its sharding.

  Args:
    folder: PEFT folder.
    config: Sizes of the base model.
    sharding: Tree {kernel: {"a": sharding, "b": sharding}}; None: everything on the default device.
    dtype: Dtype of the arrays, whatever the file contains.

  Returns:
    The tree {kernel: {"a": [L i r], "b": [L r o]}}; see `lora`.

  Raises:
    MissingModel, ModelError: As for `look`; or a value is not finite.
  """
  found, tensors = _checked(pathlib.Path(folder).expanduser(), config)
  adapter: lora.Adapter = {}
  for (kernel, part), own in peft_format.by_leaf(config, found).items():
    values = stacked(tensors, own, kernel, dtype=dtype)
    placed = arrays.put(values, sharding[kernel][part]) if sharding else jax.device_put(values)
    adapter.setdefault(kernel, {})[part] = jax.block_until_ready(placed)  # frees the host's copy.
  return adapter


class FolderAdapter:
  """The adapter of a PEFT folder as a `merged_tensors.StoredAdapter`.

  These files do not say how its base was rounded, so it is used as it is.
  """

  def __init__(self, folder: str | pathlib.Path, config: ModelConfig):
    """Opens and checks a folder; raises the errors of `look`."""
    found, self._tensors = _checked(pathlib.Path(folder).expanduser(), config)
    self._options = dataclasses.replace(found, base_dtype="float32")
    self._factors = peft_format.by_leaf(config, found)

  @property
  def options(self) -> lora.AdapterOptions:
    """Returns the options of the adapter."""
    return self._options

  def read(self, kernel: str, part: str, layer: int) -> np.ndarray:
    """Returns A [(X) i r] or B [(X) r o] of a kernel in a layer, in float32.

    Raises:
      ModelError: A value is not finite.
    """
    each = self._factors[kernel, part][layer]
    return each.in_tree(_layer(self._tensors, each.name, np.float32), kernel)


def stacked(
  tensors: safetensors.Folder,
  own: Sequence[peft_format.StoredFactor],
  kernel: str,
  *,
  dtype: Any = np.float32,
) -> np.ndarray:
  """Returns one leaf of an adapter, whose layers are tensors of a file.

  Args:
    tensors: Tensors of a PEFT folder.
    own: Tensors of the leaf, in the order of the layers.
    kernel: Kernel of the leaf.
    dtype: Dtype of the result.

  Raises:
    ModelError: A value is not finite.
  """
  shape = own[0].shapes[own[0].kernels.index(kernel)]
  values = np.empty((len(own), *shape), dtype)
  for place, each in enumerate(own):
    values[place] = each.in_tree(_layer(tensors, each.name, dtype), kernel)
  return values


def _layer(tensors: safetensors.Folder, name: str, dtype: Any) -> np.ndarray:
  """Returns one tensor of a file; raises the same errors as `stacked`."""
  with np.errstate(over="ignore"):
    values = tensors.read(name).astype(dtype)
  if not np.isfinite(values).all():
    raise ModelError(
      f"{tensors.entries[name].file}: {name} has values that are not finite numbers of"
      f" {np.dtype(dtype)}"
    )
  return values


def _open(
  directory: pathlib.Path, layers: int | None = None
) -> tuple[lora.AdapterOptions, safetensors.Folder]:
  """Reads the description and the header of an adapter; raises the same errors as `options`.

  Args:
    directory: PEFT folder.
    layers: Number of layers of the base model; None: as many as have an adapter.
  """
  file, weights = directory / CONFIG_FILE, directory / WEIGHTS_FILE
  fields = Fields(files.read_json(file, is_strict=True), str(file))
  peft_format.refuse_other_methods(fields)
  if not weights.exists() and (directory / PICKLED_FILE).exists():
    raise MissingModel(
      f"{directory}: the weights are in {PICKLED_FILE}, a pickle, which could run code when it is"
      f" read: {WEIGHTS_FILE} is needed (PeftModel.save_pretrained writes it by default)"
    )
  tensors = safetensors.Folder(safetensors.open_file(weights))
  found = lora.AdapterOptions(
    rank=fields.integer("r", low=1, high=_HIGHEST_RANK),
    alpha=fields.number("lora_alpha", above=0.0),
    targets=peft_format.targets(fields, tensors.shapes, layers, str(weights)),
    rank_stabilized=fields.boolean("use_rslora", default=False),
  )
  return found, tensors


def _checked(
  directory: pathlib.Path, config: ModelConfig
) -> tuple[lora.AdapterOptions, safetensors.Folder]:
  """Opens a folder and checks its tensors; raises the errors of `look`."""
  found, tensors = _open(directory, config.num_layers)
  try:
    faults = _misfits(tensors.shapes, config, found)
  except ValueError as error:  # a kernel that the model does not have.
    faults = [str(error)]
  if faults:
    more = [f"and {len(faults) - _SHOWN_FAULTS} more"] if len(faults) > _SHOWN_FAULTS else []
    base = base_of(directory)
    made_for = f" (it was made for {short(base)})" if base else ""
    raise ModelError(
      f"{directory}: the adapter does not fit this {config.family} model{made_for}: "
      + "; ".join(faults[:_SHOWN_FAULTS] + more)
    )
  return found, tensors


def _misfits(
  shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, options: lora.AdapterOptions
) -> list[str]:
  """Returns the tensors that are missing, unexpected or of another shape, by names and shapes."""
  wanted = {each.name: each.shape for each in peft_format.stored(config, options)}
  faults = [f"missing: {name} {list(wanted[name])}" for name in wanted if name not in shapes]
  for name, shape in shapes.items():
    if name not in wanted:
      faults.append(f"unexpected: {name[:_SHOWN]} {list(shape)}")
    elif tuple(shape) != wanted[name]:
      needed = list(wanted[name])
      faults.append(f"{name}: has shape {list(shape)}, but the model and r imply {needed}")
  return faults


_HIGHEST_RANK = 1 << 20  # far above every width.
_SHOWN = 200  # characters of a tensor's name in an error.
_SHOWN_FAULTS = 8
