"""Adapters as PEFT folders: adapter_config.json and adapter_model.safetensors (I/O).

`peft` and inference servers load what is written here, and what they or others wrote is read here.
A folder may be untrusted: sizes are bounded by the model, and its patterns are never executed.

Reference:
  Format: https://huggingface.co/docs/peft/developer_guides/checkpoint (PEFT 0.21).
"""

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.files import atomic
from grpo_jax.models import export, files, lora, merged_tensors, safetensors
from grpo_jax.models.config import MOST_LAYERS, ModelConfig
from grpo_jax.models.errors import MissingModel, ModelError
from grpo_jax.models.fields import Fields, short
from grpo_jax.processes import arrays

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"


@dataclasses.dataclass(frozen=True)
class StoredFactor:
  """One tensor of a PEFT folder, and its place in the tree of an adapter."""

  name: str
  kernel: str
  part: str  # "a" or "b".
  layer: int
  shape: tuple[int, ...]  # in the file: [r, i] or [o, r].


def stored(config: ModelConfig, options: lora.Options) -> list[StoredFactor]:
  """Returns every tensor of a PEFT folder, in the order of the adapter's tree."""
  return [
    StoredFactor(_tensor_name(kernel, layer, part), kernel, part, layer, leaf.shape[:0:-1])
    for kernel, parts in lora.tree(config, options).items()
    for part, leaf in parts.items()
    for layer in range(config.num_layers)
  ]


def write(
  adapter: Mapping[str, Any],
  config: ModelConfig,
  options: lora.Options,
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
    adapter: Tree {kernel: {"a": [L i r], "b": [L r o]}}, sharded or not.
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
      write_files(tensors, options, scratch, base=base)
      if tokenizer is not None:
        write_tokenizer(scratch, tokenizer, templates)

    atomic.replace_folder(target, fill)

  tensors = to_write(adapter, config, options, dtype=dtype)
  export.by_main(tensors, replace, what="writing the adapter")
  return target


def write_files(
  tensors: Sequence[safetensors.ToWrite],
  options: lora.Options,
  folder: pathlib.Path,
  *,
  base: str,
) -> None:
  """Writes both files into an existing folder; see `write` for the arguments."""
  export.write_json(folder / CONFIG_FILE, to_peft(options, base=base))
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


def to_peft(options: lora.Options, *, base: str) -> dict[str, Any]:
  """Returns the content of adapter_config.json.

  SGLang 0.5.23 multiplies by lora_alpha / r whatever use_rslora says. So a rank-stabilised scale
  α / √r is written as lora_alpha = α √r without use_rslora, which all readers understand alike.

  Args:
    options: Options of the adapter.
    base: Name or folder of the base model.
  """
  alpha = options.alpha * math.sqrt(options.rank) if options.rank_stabilized else options.alpha
  return {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": options.rank,
    "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": [_module(kernel) for kernel in lora.targets(options.targets)],
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "modules_to_save": None,
  }


def to_write(
  adapter: Mapping[str, Any], config: ModelConfig, options: lora.Options, *, dtype: Any = None
) -> list[safetensors.ToWrite]:
  """Returns the tensors of a PEFT folder, fetched when they are needed; see `write`.

  The tensors must be taken in their order: the leaf that the last one is in is kept on the host.
  """
  fetched = _Fetched(adapter)
  return [
    safetensors.ToWrite(
      each.name,
      each.shape,
      np.dtype(adapter[each.kernel][each.part].dtype if dtype is None else dtype),
      values=functools.partial(_in_file, fetched, each, dtype),
      take_part=functools.partial(fetched.fetch, each.kernel, each.part),
    )
    for each in stored(config, options)
  ]


def stored_to_write(
  adapter: merged_tensors.StoredAdapter, config: ModelConfig, *, dtype: Any = np.float32
) -> list[safetensors.ToWrite]:
  """Returns the same tensors as `to_write`, read from files one at a time without devices."""
  made = np.dtype(dtype)

  def read(each: StoredFactor) -> np.ndarray:
    return np.ascontiguousarray(adapter.read(each.kernel, each.part, each.layer).T, made)

  return [
    safetensors.ToWrite(each.name, each.shape, made, functools.partial(read, each))
    for each in stored(config, adapter.options)
  ]


class _Fetched:
  """The leaves of an adapter on the host, one at a time."""

  def __init__(self, adapter: Mapping[str, Any]):
    self._adapter = adapter
    self._last: tuple[Any, Any] = None, None

  def fetch(self, kernel: str, part: str) -> None:
    """Fetches a leaf unless it was the last one; all processes take part."""
    if self._last[0] != (kernel, part):
      self._last = None, None  # never two at once.
      self._last = (kernel, part), arrays.fetch(self._adapter[kernel][part])

  def leaf(self, kernel: str, part: str) -> np.ndarray:
    """Fetches and returns a leaf."""
    self.fetch(kernel, part)
    return self._last[1]


def _in_file(fetched: _Fetched, each: StoredFactor, dtype: Any) -> np.ndarray:
  values = fetched.leaf(each.kernel, each.part)[each.layer].T
  return np.ascontiguousarray(values, dtype)


def options(folder: str | pathlib.Path) -> lora.Options:
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


def look(folder: str | pathlib.Path, config: ModelConfig) -> lora.Options:
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
    The tree {kernel: {"a": [L i r], "b": [L r o]}}.

  Raises:
    MissingModel, ModelError: As for `look`; or a value is not finite.
  """
  found, tensors = _checked(pathlib.Path(folder).expanduser(), config)
  adapter: lora.Adapter = {}
  for (kernel, part), own in by_leaf(config, found).items():
    values = stacked(tensors, own, dtype=dtype)
    placed = arrays.put(values, sharding[kernel][part]) if sharding else jax.device_put(values)
    adapter.setdefault(kernel, {})[part] = jax.block_until_ready(placed)  # frees the host's copy.
  return adapter


def by_leaf(
  config: ModelConfig, options: lora.Options
) -> dict[tuple[str, str], list[StoredFactor]]:
  """Returns the tensors of each leaf (kernel, part) of an adapter, in the order of the layers."""
  found: dict[tuple[str, str], list[StoredFactor]] = {}
  for each in stored(config, options):
    found.setdefault((each.kernel, each.part), []).append(each)
  return found


class FolderAdapter:
  """The adapter of a PEFT folder as a `merged_tensors.StoredAdapter`.

  These files do not say how its base was rounded, so it is used as it is.
  """

  def __init__(self, folder: str | pathlib.Path, config: ModelConfig):
    """Opens and checks a folder; raises the errors of `look`."""
    found, self._tensors = _checked(pathlib.Path(folder).expanduser(), config)
    self._options = dataclasses.replace(found, base_dtype="float32")

  @property
  def options(self) -> lora.Options:
    """Returns the options of the adapter."""
    return self._options

  def read(self, kernel: str, part: str, layer: int) -> np.ndarray:
    """Returns A [i r] or B [r o] of a kernel in a layer, in float32.

    Raises:
      ModelError: A value is not finite.
    """
    return _layer(self._tensors, _tensor_name(kernel, layer, part), np.float32)


def stacked(
  tensors: safetensors.Folder, own: Sequence[StoredFactor], *, dtype: Any = np.float32
) -> np.ndarray:
  """Returns one leaf of an adapter, whose layers are tensors of a file.

  Args:
    tensors: Tensors of a PEFT folder.
    own: Tensors of the leaf, in the order of the layers.
    dtype: Dtype of the result.

  Raises:
    ModelError: A value is not finite.
  """
  values = np.empty((len(own), *own[0].shape[::-1]), dtype)
  for place, each in enumerate(own):
    values[place] = _layer(tensors, each.name, dtype)
  return values


def _layer(tensors: safetensors.Folder, name: str, dtype: Any) -> np.ndarray:
  """Returns one tensor of a file as [i r] or [r o]; raises the same errors as `stacked`."""
  with np.errstate(over="ignore"):
    values = tensors.read(name).T.astype(dtype)
  if not np.isfinite(values).all():
    raise ModelError(
      f"{tensors.entries[name].file}: {name} has values that are not finite numbers of"
      f" {np.dtype(dtype)}"
    )
  return values


def _open(
  directory: pathlib.Path, layers: int | None = None
) -> tuple[lora.Options, safetensors.Folder]:
  """Reads the description and the header of an adapter; raises the same errors as `options`.

  Args:
    directory: PEFT folder.
    layers: Number of layers of the base model; None: as many as have an adapter.
  """
  file, weights = directory / CONFIG_FILE, directory / WEIGHTS_FILE
  fields = Fields(files.read_json(file, is_strict=True), str(file))
  _refuse_other_methods(fields)
  if not weights.exists() and (directory / PICKLED_FILE).exists():
    raise MissingModel(
      f"{directory}: the weights are in {PICKLED_FILE}, a pickle, which could run code when it is"
      f" read: {WEIGHTS_FILE} is needed (PeftModel.save_pretrained writes it by default)"
    )
  tensors = safetensors.Folder(safetensors.open_file(weights))
  found = lora.Options(
    rank=fields.integer("r", low=1, high=_HIGHEST_RANK),
    alpha=fields.number("lora_alpha", above=0.0),
    targets=_targets(fields, tensors.shapes, layers, str(weights)),
    rank_stabilized=fields.boolean("use_rslora", default=False),
  )
  return found, tensors


def _checked(
  directory: pathlib.Path, config: ModelConfig
) -> tuple[lora.Options, safetensors.Folder]:
  """Opens a folder and checks its tensors; raises the errors of `look`."""
  found, tensors = _open(directory, config.num_layers)
  faults = _misfits(tensors.shapes, config, found)
  if faults:
    more = [f"and {len(faults) - _SHOWN_FAULTS} more"] if len(faults) > _SHOWN_FAULTS else []
    base = base_of(directory)
    made_for = f" (it was made for {short(base)})" if base else ""
    raise ModelError(
      f"{directory}: the adapter does not fit this {config.family} model{made_for}: "
      + "; ".join(faults[:_SHOWN_FAULTS] + more)
    )
  return found, tensors


def _refuse_other_methods(fields: Fields) -> None:
  """Raises ModelError for options that change what an adapter computes, each by its name."""
  kind = fields.get("peft_type")
  if kind != "LORA":
    raise fields.wrong("peft_type", "LORA; adapters of other kinds are not supported")
  if fields.get("task_type") not in (None, "CAUSAL_LM"):
    raise fields.wrong("task_type", "CAUSAL_LM")
  if fields.get("bias") not in (None, "none"):
    raise fields.wrong("bias", "none; trained biases are not supported")
  initial = fields.get("init_lora_weights")
  if not isinstance(initial, bool | None) and initial not in _HARMLESS_INITIALIZERS:
    needed = "true, false, or one of " + ", ".join(_HARMLESS_INITIALIZERS)
    reason = "other initialisers change the base, too, which is not in these files"
    raise fields.wrong("init_lora_weights", f"{needed}; {reason}")
  for name in fields.names():
    if name in _HARMLESS or _is_off(fields.get(name)):
      continue
    reason = _REFUSED.get(name, "this option is not known here, and may change the adapter")
    raise ModelError(f"{fields.where}: {name}={short(fields.get(name))}: {reason}")


def _is_off(value: Any) -> bool:
  """Returns whether an option has no effect; a 0 may be the number of a layer."""
  return value is False or (isinstance(value, str | list | dict) and not value)


def _targets(
  fields: Fields, shapes: Mapping[str, Any], layers: int | None, where: str
) -> tuple[str, ...]:
  """Returns the kernels with an adapter.

  A list is resolved as PEFT resolves it. A regular expression from a file is not executed, as it
  could take for ever: the tensors say which modules it has matched.

  Raises:
    ModelError: No kernel has an adapter, or the list has a kernel of some layers only.
  """
  given, excluded = fields.get("target_modules"), fields.get("exclude_modules") or []
  for name, value in {"target_modules": given, "exclude_modules": excluded}.items():
    if not isinstance(value, str | list):
      raise fields.wrong(name, "a list of modules, or a string")
  present = _present(shapes)
  if not present:
    raise ModelError(f"{where}: no tensor is an adapter of a kernel of a layer")
  if isinstance(given, list) and isinstance(excluded, list):
    count = 1 + max(layer for _, layer in present) if layers is None else layers
    return _listed(fields, min(count, MOST_LAYERS))
  return tuple(kernel for kernel in lora.MODULES if any(kernel == own for own, _ in present))


def _present(shapes: Mapping[str, Any]) -> set[tuple[str, int]]:
  """Returns the kernels and layers that have tensors."""
  kernels = {module: kernel for kernel, module in lora.MODULES.items()}
  found = set()
  for name in shapes:
    match = _TENSOR_NAME.fullmatch(name)
    if match and match["module"] in kernels:
      found.add((kernels[match["module"]], int(match["layer"])))
  return found


def _listed(fields: Fields, layers: int) -> tuple[str, ...]:
  """Returns the kernels that lists of module names mean; raises the same errors as `_targets`."""
  wanted = set(fields.strings("target_modules"))
  excluded = set(fields.strings("exclude_modules"))
  found = []
  for kernel in lora.MODULES:
    endings = [_endings(_module_path(kernel, layer)) for layer in range(layers)]
    are_in = [not wanted.isdisjoint(own) and excluded.isdisjoint(own) for own in endings]
    if any(are_in) and not all(are_in):
      raise ModelError(
        f"{fields.where}: target_modules has {_module(kernel)} of some layers and not of layer"
        f" {are_in.index(False)}; an adapter of all layers is needed"
      )
    if all(are_in):
      found.append(kernel)
  if not found:
    known = [_module(kernel) for kernel in lora.MODULES]
    raise fields.wrong("target_modules", f"kernels of a layer: {', '.join(known)}")
  return tuple(found)


def _endings(path: str) -> list[str]:
  """Returns what PEFT takes for the name of a module: its path, from any dot on."""
  parts = path.split(".")
  return [".".join(parts[start:]) for start in range(len(parts))]


def _misfits(
  shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, options: lora.Options
) -> list[str]:
  """Returns the tensors that are missing, unexpected or of another shape, by names and shapes."""
  wanted = {each.name: each.shape for each in stored(config, options)}
  faults = [f"missing: {name} {list(wanted[name])}" for name in wanted if name not in shapes]
  for name, shape in shapes.items():
    if name not in wanted:
      faults.append(f"unexpected: {name[:_SHOWN]} {list(shape)}")
    elif tuple(shape) != wanted[name]:
      needed = list(wanted[name])
      faults.append(f"{name}: has shape {list(shape)}, but the model and r imply {needed}")
  return faults


def _tensor_name(kernel: str, layer: int, part: str) -> str:
  return f"base_model.model.{_module_path(kernel, layer)}.lora_{part.upper()}.weight"


def _module_path(kernel: str, layer: int) -> str:
  return f"model.layers.{layer}.{lora.MODULES[kernel]}"


def _module(kernel: str) -> str:
  return lora.MODULES[kernel].split(".")[1]


_TENSOR_NAME = re.compile(
  r"base_model\.model\.model\.layers\.(?P<layer>\d{1,6})\.(?P<module>\w+\.\w+)\.lora_[AB]\.weight"
)
_HIGHEST_RANK = 1 << 20  # far above every width.
_SHOWN = 200  # characters of a tensor's name in an error.
_SHOWN_FAULTS = 8

# Initialisers that leave the base as it is.
_HARMLESS_INITIALIZERS = ("gaussian", "orthogonal", "eva")

# Options that do not change what a trained adapter computes, or that are read above.
_HARMLESS = frozenset(
  (
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",  # without layers_to_transform.
    "loftq_config",  # without init_lora_weights "loftq".
    "lora_alpha",
    "lora_dropout",  # of training only.
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",  # without use_qalora.
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
  )
)

# Options that are refused unless they are off, with the reason.
_REFUSED = {
  "alpha_pattern": "all kernels need the same lora_alpha",
  "alora_invocation_tokens": "an adapter of all tokens is needed",
  "fan_in_fan_out": "the base must hold its kernels as [out, in]",
  "layer_replication": "the base must have its own layers",
  "layers_to_transform": "an adapter of all layers is needed",
  "lora_bias": "adapters with biases are not supported",
  "modules_to_save": "only adapters of kernels are supported, not whole modules",
  "rank_pattern": "all kernels need the same rank r",
  "target_parameters": "only adapters of the kernels of layers are supported",
  "trainable_token_indices": "only adapters of kernels are supported, not embeddings",
  "use_dora": "DoRA is not supported",
  "use_qalora": "QA-LoRA is not supported",
}
