"""Parameters → a Hugging Face folder that transformers and inference servers load (I/O)."""

import dataclasses
import functools
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax import processes
from grpo_jax.compilation.programs import CompileJob, Program
from grpo_jax.files import atomic
from grpo_jax.models import config as model_config
from grpo_jax.models import files, leaves, lora, multimodal, quantized, safetensors
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import LowRank
from grpo_jax.models.transformer import Params
from grpo_jax.processes import arrays


def to_huggingface(
  params: Params,
  config: ModelConfig,
  directory: str | pathlib.Path,
  *,
  source_directory: str | pathlib.Path | None = None,
  templates: Mapping[str, str] | None = None,
  dtype: Any = None,
  max_shard_bytes: int | None = None,
) -> pathlib.Path:
  """Writes a folder that `transformers.AutoModelForCausalLM` loads; a tied head is not stored.

  The folder appears whole or not at all: it is written next to its place and then renamed. An
  existing folder is replaced. If a run has several processes, all of them make the same call; the
  main one writes.

  Args:
    params: Tree of all parameters with stacked layers, sharded or not. Fetched from the devices one
      tensor at a time.
    config: Config of these parameters.
    directory: Folder to write.
    source_directory: Hugging Face folder that the model came from. All fields
      of its config.json except the dtype are kept; tokenizer and generation settings are copied.
      Of a model of several modalities they are those of its text model, which alone is written.
    templates: Chat templates in place of those of the source; see `write_templates`.
    dtype: Dtype in the files; None: that of the parameters, so that reading it back is exact.
      With an adapter it is float32, since bfloat16 would round away most of a small change; and so
      it is if the dtypes of parameters differ.
    max_shard_bytes: Largest size of a file of weights, which are then split into several files and
      an index; None: one file.

  Returns:
    The folder.

  Raises:
    ValueError: The source's config.json describes another model.
    WriteError: The folder cannot be written; `OtherProcessError` on the other processes.
  """
  source = pathlib.Path(source_directory) if source_directory is not None else None
  folder = pathlib.Path(directory)

  def write(tensors: Sequence[safetensors.ToWrite]) -> None:
    def fill(scratch: pathlib.Path) -> None:
      write_files(tensors, config, scratch, source=source, max_shard_bytes=max_shard_bytes)
      if templates:
        write_templates(templates, scratch)

    atomic.replace_folder(folder, fill)

  by_main(to_write(params, config, dtype=dtype), write, what="writing the export")
  return folder


def by_main(
  tensors: Sequence[safetensors.ToWrite],
  write: Callable[[Sequence[safetensors.ToWrite]], None],
  *,
  what: str,
) -> None:
  """Writes tensors on the main process; all processes fetch them, since a fetch is work of all.

  If the main process cannot write, for instance because the disk is full, it fetches the other
  tensors all the same, so that nobody waits for it. Then all processes raise.

  Args:
    tensors: Tensors of `to_write`, the same on all processes.
    write: Function that writes tensors, in their order.
    what: Description of the work, for messages, the same on all processes: "writing the export".

  Raises:
    Exception: What `write` raises, on the main process.
    OtherProcessError: The main process could not write.
  """
  if processes.count() == 1:
    write(tensors)
    return
  left = list(reversed(tensors))
  counted = [dataclasses.replace(tensor, values=lambda: left.pop().values()) for tensor in tensors]

  def work() -> None:
    try:
      if processes.is_main():
        write(counted)
    finally:
      while left:
        left.pop().take_part()

  processes.together(work, what=what)


def write_files(
  tensors: Sequence[safetensors.ToWrite],
  config: ModelConfig,
  folder: pathlib.Path,
  *,
  source: pathlib.Path | None,
  max_shard_bytes: int | None = None,
) -> None:
  """Writes the files of a Hugging Face folder from tensors that are fetched one at a time.

  Args:
    tensors: All tensors of the model, of one dtype.
    config: Config of the model.
    folder: Existing folder; existing files are overwritten.
    source: Hugging Face folder that the model came from, as in `to_huggingface`.
    max_shard_bytes: Largest size of a file of weights, as in `to_huggingface`.

  Raises:
    ValueError: The source's config.json describes another model.
  """
  write_description(config, folder, source=source, dtype=tensors[0].dtype)
  safetensors.write_folder(folder, tensors, max_shard_bytes=max_shard_bytes)


def write_description(
  config: ModelConfig, folder: pathlib.Path, *, source: pathlib.Path | None, dtype: Any
) -> None:
  """Writes all files of a Hugging Face folder but the weights; see `write_files`.

  Raises:
    ValueError: The source's config.json describes another model.
  """
  hf = _with_dtype(_hf_config(config, source), np.dtype(dtype).name)
  if "torch_dtype" not in hf:  # the name in transformers 4.
    hf["dtype"] = np.dtype(dtype).name
  write_json(folder / "config.json", hf)
  if source is not None:
    copy_tokenizer(source, folder)


def to_write(
  params: Params, config: ModelConfig, *, dtype: Any = None
) -> list[safetensors.ToWrite]:
  """Returns the tensors of the checkpoint, in Hugging Face's names and layout, fetched lazily.

  Kernels with an adapter are merged in float32 on their devices, one tensor at a time, and rounded
  once.

  Args:
    params: Tree of all parameters with stacked layers, sharded or not.
    config: Config of these parameters.
    dtype: Dtype in the file, as in `to_huggingface`.
  """
  tensors = []
  file_dtype = _file_dtype(params, config) if dtype is None else np.dtype(dtype)
  for stored in leaves.stored(config):
    array = _at(params, stored.path)
    on_devices = functools.partial(_as_in_file, array, stored, file_dtype)
    tensors.append(
      safetensors.ToWrite(
        stored.name,
        stored.shape,
        file_dtype,
        values=functools.partial(_fetch, on_devices),
        take_part=functools.partial(_take_part, on_devices),
        made_of=array,
        copies=_copies(array, stored, file_dtype),
      )
    )
  return tensors


def stored_to_write(
  tensors: safetensors.Tensors, config: ModelConfig, *, dtype: Any = np.float32
) -> list[safetensors.ToWrite]:
  """Returns the same tensors as `to_write`, read from files one at a time without devices.

  Args:
    tensors: Tensors of a checkpoint or of another folder.
    config: Config of the model.
    dtype: Dtype in the files that are written.
  """
  made = np.dtype(dtype)
  return [
    safetensors.ToWrite(
      stored.name, stored.shape, made, functools.partial(_read, tensors, stored.name, made)
    )
    for stored in leaves.stored(config)
  ]


def _read(tensors: safetensors.Tensors, name: str, dtype: np.dtype) -> np.ndarray:
  return tensors.read(name).astype(dtype, order="C", copy=False)


def copy_tokenizer(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies a model's files other than config.json and weights: tokenizer, templates."""
  _clear_templates(target)
  further = [f"{_TEMPLATES}/{file.name}" for file in (source / _TEMPLATES).glob("*.jinja")]
  for name in (*TOKENIZER_FILES, *further):
    if (source / name).exists():
      (target / name).parent.mkdir(exist_ok=True)
      shutil.copyfile(source / name, target / name)


def write_templates(templates: Mapping[str, str], folder: pathlib.Path) -> None:
  """Replaces all chat templates of a folder, wherever transformers 4 and 5 read them.

  Args:
    templates: Templates by name; one is named "default".
    folder: Folder with the files of a tokenizer.
  """
  _clear_templates(folder)
  texts = {  # Jinja reads what UTF-8 cannot express from escapes.
    name: text.encode("utf-8", "backslashreplace").decode()
    for name, text in templates.items()
    if _FILE_NAME.fullmatch(name)
  }
  for name, text in texts.items():
    place = "chat_template" if name == "default" else f"{_TEMPLATES}/{name}"
    file = folder / f"{place}.jinja"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8", newline="")
  settings = folder / "tokenizer_config.json"
  if settings.exists() and "chat_template" in (content := files.read_json(settings)):
    listed = [{"name": name, "template": text} for name, text in texts.items()]
    content["chat_template"] = listed if len(listed) > 1 else texts["default"]
    write_json(settings, content)


def _clear_templates(folder: pathlib.Path) -> None:
  own = (f"{_TEMPLATES}/*.jinja", "chat_template.*")  # .json is read by processors only.
  for file in (file for pattern in own for file in folder.glob(pattern)):
    file.unlink()


def write_json(file: pathlib.Path, content: dict[str, Any]) -> None:
  """Writes an object as readable JSON."""
  file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _hf_config(config: ModelConfig, source: pathlib.Path | None) -> dict[str, Any]:
  if source is None:
    return model_config.to_hf(config)
  where = str(source / "config.json")
  hf = multimodal.text_config(files.read_json(source / "config.json"), where)
  described = model_config.from_hf(hf, where=where)
  if described != config:
    raise ValueError(f"{source} describes {described}, but the parameters are of {config}")
  return {**hf, **model_config.missing_ids(hf, config)}


def _with_dtype(hf: Mapping[str, Any], dtype: str) -> dict[str, Any]:
  """Returns a config.json in which every dtype, also of parts such as text_config, is this one."""
  return {
    name: dtype
    if name in ("dtype", "torch_dtype")
    else _with_dtype(value, dtype)
    if isinstance(value, Mapping)
    else value
    for name, value in hf.items()
  }


def _as_in_file(array: Any, stored: leaves.Stored, dtype: np.dtype) -> Any:
  """Returns a tensor in the files' layout and dtype, on its devices."""
  if _is_as_stored(array, stored, dtype):
    return array
  return _own(array)(array, stored.index, is_kernel=stored.leaf.is_kernel, dtype=dtype)


def _copies(array: Any, stored: leaves.Stored, dtype: np.dtype) -> int:
  """Returns how often a tensor is copied: on its devices, on the way to the host, into the file."""
  return (not _is_as_stored(array, stored, dtype)) + arrays.copies_of_fetch(array) + 1


def _fetch(on_devices: Callable[[], Any]) -> np.ndarray:
  return np.ascontiguousarray(arrays.fetch(on_devices()))


def _take_part(on_devices: Callable[[], Any]) -> None:
  jax.block_until_ready(on_devices())


def jobs(params: Any, config: ModelConfig, *, dtype: Any = None) -> list[CompileJob]:
  """Returns the compilations of `to_write`: a small program for each shape of a parameter.

  Args:
    params: Shapes, dtypes and shardings of the parameters.
    config: Config of these parameters.
    dtype: Dtype in the file, as in `to_write`.
  """
  found = {}
  file_dtype = _file_dtype(params, config) if dtype is None else np.dtype(dtype)
  for stored in leaves.stored(config):
    array = _at(params, stored.path)
    if not _is_as_stored(array, stored, file_dtype):
      kept = {"is_kernel": stored.leaf.is_kernel, "dtype": file_dtype}
      forms = str(jax.tree.map(lambda x: (x.shape, x.dtype), array)), str(array.sharding)
      key = (type(array), *forms, len(stored.index), *kept.values())
      shape = " × ".join(map(str, array.shape))
      found.setdefault(key, _own(array).job(array, stored.index, detail=shape, **kept))
  return list(found.values())


def _at(params: Any, path: tuple[str, ...]) -> Any:
  for key in path:
    params = params[key]
  return params


def _file_dtype(params: Any, config: ModelConfig) -> np.dtype:
  """Returns the dtype of all tensors in the files: that of the parameters; float32 if they differ.

  Kernels with an adapter, and quantised ones, count as float32.
  """
  own = [_at(params, path) for path in {stored.path for stored in leaves.stored(config)}]
  found = {np.dtype(np.float32 if isinstance(x, LowRank) else x.dtype) for x in own}
  return found.pop() if len(found) == 1 else np.dtype(np.float32)


def _is_as_stored(array: Any, stored: leaves.Stored, dtype: np.dtype) -> bool:
  if isinstance(array, LowRank | quantized.Quantized):
    return False
  is_same = stored.layer is None and not stored.leaf.is_kernel and array.dtype == dtype
  return is_same and _everywhere(array) is None


def _tensor(
  array: Any, place: tuple[jax.Array, ...], *, is_kernel: bool, dtype: np.dtype
) -> jax.Array:
  """Returns one layer, or one expert of it, in the files' layout, computed on its devices."""
  own = array
  for number in place:
    at = lambda x, number=number: jax.lax.dynamic_index_in_dim(x, number, keepdims=False)
    own = jax.tree.map(at, own)
  if isinstance(own, LowRank):
    own = lora.merged(own)
  if isinstance(own, quantized.Quantized):
    own = quantized.dequantized(own)
  return (own.T if is_kernel else own).astype(dtype)


def _own(array: Any) -> Program:
  """Returns the program that makes one tensor; whole on each device if processes share an array."""
  return _program(_everywhere(array))


@functools.cache
def _program(sharding: NamedSharding | None) -> Program:
  names = ("is_kernel", "dtype")
  jitted = jax.jit(_tensor, static_argnames=names, out_shardings=sharding)
  return Program(jitted, name="tensor of the export", static=names)


def _everywhere(array: Any) -> NamedSharding | None:
  """Returns the sharding of a copy on every device; None if this process has every part."""
  sharding = getattr(array, "sharding", None)
  if sharding is None or sharding.is_fully_addressable or sharding.is_fully_replicated:
    return None
  return NamedSharding(sharding.mesh, PartitionSpec())


_TEMPLATES = "additional_chat_templates"  # folder of named templates.
_FILE_NAME = re.compile(r"\w[\w.-]{0,99}")  # a model's names of templates are not trusted.
TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "tokenizer.model",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "vocab.txt",
  "merges.txt",
  "chat_template.jinja",
  "chat_template.json",
  "generation_config.json",
)
