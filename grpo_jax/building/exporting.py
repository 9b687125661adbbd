"""Writes a checkpoint as a Hugging Face folder, one tensor at a time and without devices."""

import dataclasses
import math
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax.building import policy_model, stored
from grpo_jax.config import field_checks
from grpo_jax.config.configuration import ConfigError
from grpo_jax.files import atomic
from grpo_jax.files.disk import WriteError
from grpo_jax.models import adapter_files, export
from grpo_jax.models.options import ExportOptions
from grpo_jax.models.safetensors import ToWrite


class ExportError(WriteError):
  """The place of an export is taken, or has no room."""


@dataclasses.dataclass(frozen=True)
class Exported:
  """An export that was written."""

  folder: pathlib.Path
  weights: stored.StoredWeights
  dtype: str
  num_bytes: int  # of the weights.
  num_files: int  # of the weights.


def run(
  reference: str,
  out: pathlib.Path,
  *,
  dtype: str | None = None,
  max_shard_gb: float | None = None,
  base: str | None = None,
  only_adapter: bool = False,
  on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
  """Writes a Hugging Face folder that training's own export would have written at this step.

  Of a run that trains an adapter these are the merged weights; or the adapter, as a PEFT folder.

  The folder appears whole or not at all. The optimizer's state is not read. The export needs
  the memory of about two tensors; the largest tensor is usually the embedding.

  Args:
    reference: RUN[:STEP|:best|:latest].
    out: Folder to write; it must not be there yet, or be empty.
    dtype: Dtype of the weights: "float32", "bfloat16" or "float16"; None: the run's `export.dtype`.
    max_shard_gb: Largest size of a file of weights in gigabytes, infinite for one file; None: the
      run's `export.max_shard_gb`.
    base: Model that the run began with; see `stored.find`.
    only_adapter: Whether to write the adapter alone.
    on_progress: Called with (tensors written, tensors in all).

  Raises:
    ExportError: The place is taken, or the disk has no room.
    ConfigError: An option is not valid, `reference` is a model and not a run, or the run trains no
      adapter.
    NoWeights, WeightsError, ModelError: See `stored.find`.
    WriteError: The folder cannot be written.
  """
  check_free(out)
  given = stored.parse(reference)
  is_adapter = given.step is None and stored.is_adapter(pathlib.Path(given.place).expanduser())
  if given.step is None and not is_adapter:
    raise ConfigError(
      f"{reference}: a run folder is needed, as RUN, RUN:STEP or RUN:best, or an adapter's folder"
    )
  weights = stored.find(given, base=base)
  templates = {} if is_adapter else _templates(given, weights)
  if only_adapter:
    return _adapter(
      weights,
      out,
      dtype=dtype,
      max_shard_gb=max_shard_gb,
      templates=templates,
      on_progress=on_progress,
    )
  own = ExportOptions()
  if not is_adapter:
    own = stored.whole_config_of(pathlib.Path(given.place)).export
  made = str(dtype or own.dtype or "float32")
  limit = own.max_shard_gb if max_shard_gb is None else max_shard_gb
  _check(dtype=made, max_shard_gb=None if limit == math.inf else limit)
  tensors = export.stored_to_write(weights.tensors, weights.config, dtype=made)

  def fill(folder: pathlib.Path) -> None:
    export.write_files(
      _counted(tensors, on_progress),
      weights.config,
      folder,
      source=weights.directory,
      max_shard_bytes=int(limit * 1e9) if limit and limit < math.inf else None,
    )
    if weights.tokenizer is not None:
      export.copy_tokenizer(weights.tokenizer, folder)
    if templates:
      export.write_templates(templates, folder)

  return _written(out, fill, weights, tensors, made)


def _templates(given: stored.WeightsReference, weights: stored.StoredWeights) -> Mapping[str, str]:
  """Returns the chat templates with which a run's prompts are written; see `templates_of`."""
  config = stored.whole_config_of(pathlib.Path(given.place))
  if config.model.chat_template is None and not len(config.model.chat_template_args):
    return {}
  return policy_model.templates_of(policy_model.load_tokenizer(config, weights.directory))


def _adapter(
  weights: stored.StoredWeights,
  out: pathlib.Path,
  *,
  dtype: str | None,
  max_shard_gb: float | None,
  templates: Mapping[str, str],
  on_progress: Callable[[int, int], None],
) -> Exported:
  """Writes the adapter of stored weights as a PEFT folder; see `run`."""
  adapter = weights.adapter
  if adapter is None:
    raise ConfigError(f"{weights.label} has no adapter: every weight was trained")
  if max_shard_gb is not None:
    raise ConfigError("the weights of an adapter are always one file, without --max-shard-gb")
  made = str(dtype or "float32")
  _check(dtype=made)
  tensors = adapter_files.stored_to_write(adapter, weights.config, dtype=made)

  def fill(folder: pathlib.Path) -> None:
    counted = _counted(tensors, on_progress)
    adapter_files.write_files(
      counted, weights.config, adapter.options, folder, base=weights.base_name
    )
    source = weights.tokenizer or weights.directory
    adapter_files.write_tokenizer(folder, source, templates)

  return _written(out, fill, weights, tensors, made)


def _written(
  out: pathlib.Path,
  fill: Callable[[pathlib.Path], None],
  weights: stored.StoredWeights,
  tensors: Sequence[ToWrite],
  dtype: str,
) -> Exported:
  """Writes a folder whole or not at all; raises the same errors as `run`."""
  num_bytes = sum(tensor.nbytes for tensor in tensors)
  _check_room(out, num_bytes)

  def fill_once(folder: pathlib.Path) -> None:
    fill(folder)
    check_free(out)  # another process may have been faster.

  atomic.replace_folder(out, fill_once)
  return Exported(out, weights, dtype, num_bytes, len(list(out.glob("*.safetensors"))))


def check_free(out: pathlib.Path) -> None:
  """Raises ExportError if there is something at the place of an export."""
  if out.is_symlink() or (out.exists() and not out.is_dir()):
    raise ExportError(f"{out} is there, and is not a folder: choose another name")
  if out.is_dir() and any(out.iterdir()):
    raise ExportError(f"{out} is there, and nothing is overwritten: choose another name")


def _check(**given: Any) -> None:
  """Raises ConfigError for values that the section `export` of a config does not take either."""
  wrong = field_checks.wrong({f"export.{name}": value for name, value in given.items()})
  if wrong:
    raise ConfigError("; ".join(wrong.values()))


def _check_room(out: pathlib.Path, num_bytes: int) -> None:
  """Raises ExportError if the disk has less room than the weights need."""
  above = next(folder for folder in out.absolute().parents if folder.is_dir())
  free = shutil.disk_usage(above).free
  if free < num_bytes:
    raise ExportError(
      f"{out} needs {num_bytes / 1e9:.2f} GB, and its disk has {free / 1e9:.2f} GB free"
    )


def _counted(tensors: Sequence[ToWrite], on_progress: Callable[[int, int], None]) -> list[ToWrite]:
  """Returns the same tensors, which report when they are fetched."""

  def counted(number: int, tensor: ToWrite) -> ToWrite:
    def values() -> np.ndarray:
      on_progress(number, len(tensors))
      return tensor.values()

    return dataclasses.replace(tensor, values=values)

  return [counted(number, tensor) for number, tensor in enumerate(tensors, start=1)]
