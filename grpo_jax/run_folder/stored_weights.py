"""Reads the weights out of a checkpoint one tensor at a time, and nothing else of it (I/O).

Neither devices nor the other arrays of the training state are needed. A checkpoint holds a leaf of
the state, such as one kernel of all layers, as one value or a few; a layer is a range of its bytes,
and only that range is read.
"""

import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore

from grpo_jax.errors import ExpectedFailure
from grpo_jax.files import manifest
from grpo_jax.models import leaves, lora
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.fields import Fields
from grpo_jax.models.options import BASE_DTYPES
from grpo_jax.run_folder import stored_leaves

ADAPTER = "adapter"  # what a checkpoint says about its adapter, in `extra`.
_PARAMS = "params"  # the weights, in the training state.
_INDEX_BYTES = 20  # at the end of a value: offset, size, and a checksum of both.
_PIECE = 8 << 20  # bytes that are read at once: they are in memory twice.
_NOT_STORED = 2**64 - 1  # as an offset: all elements have the fill value.

_Range = tuple[int, int]


class WeightsError(ExpectedFailure, ValueError):
  """The weights of a checkpoint cannot be read."""


def open_checkpoint(
  folder: pathlib.Path, config: ModelConfig
) -> "CheckpointTensors | CheckpointAdapter":
  """Opens what one checkpoint holds of a policy, once its files are as they were written.

  Args:
    folder: Folder of the step: checkpoints/step_00000020.
    config: Config of the model that was trained.

  Returns:
    All weights, or the adapter if only an adapter was trained.

  Raises:
    WeightsError: The checkpoint is damaged, or is of another model.
  """
  info = _info(folder)
  if ADAPTER in info.extra:
    return _open_adapter(folder, info, config)
  wanted = {_name(stored.path): _shape(stored, config) for stored in leaves.stored(config)}
  return CheckpointTensors(folder, config, _checked(folder, info, wanted))


def _open_adapter(
  folder: pathlib.Path, info: stored_leaves.Info, config: ModelConfig
) -> "CheckpointAdapter":
  """Opens the adapter of a checkpoint; raises the same errors as `open_checkpoint`."""
  facts = info.extra[ADAPTER]
  options = _options(folder, facts)
  wanted = {
    _name((kernel, part)): leaf.shape
    for kernel, parts in lora.tree(config, options).items()
    for part, leaf in parts.items()
  }
  _checked(folder, info, wanted)
  return CheckpointAdapter(folder, options, str(facts.get("base")), str(facts.get("base_digest")))


def _info(folder: pathlib.Path) -> stored_leaves.Info:
  """Returns info.json of a checkpoint, once its files are as they were written."""
  try:
    if reason := manifest.damage(folder):
      raise WeightsError(f"{folder} cannot be used: {reason}")
    return stored_leaves.read(folder / "info.json")
  except PermissionError as error:
    raise WeightsError(f"{error.filename} may not be read: {error.strerror}") from error
  except stored_leaves.UnusableCheckpoint as error:
    raise WeightsError(f"{folder} cannot be used: {error}") from error


def _checked(
  folder: pathlib.Path, info: stored_leaves.Info, wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, np.dtype]:
  """Returns the dtypes of the trained arrays, once they have the wanted names and shapes."""
  present = {name: leaf for name, leaf in info.leaves.items() if name.startswith(f"{_PARAMS}.")}
  dtype_of = {name: dtype for name, (_, dtype) in present.items()}
  needed = {name: (shape, dtype_of.get(name, "float32")) for name, shape in wanted.items()}
  try:
    stored_leaves.check_needed(present, needed)
  except stored_leaves.OtherState as error:
    raise WeightsError(f"{folder} does not hold the weights of this model: it {error}") from error
  return {name: np.dtype(dtype_of[name]) for name in wanted}


def _options(folder: pathlib.Path, facts: Any) -> lora.AdapterOptions:
  """Returns the options of an adapter from what its checkpoint says about it.

  Raises:
    WeightsError: A fact is missing, or cannot be.
  """
  if not isinstance(facts, dict):
    raise WeightsError(f"{folder} cannot be used: {ADAPTER!r} in info.json is not an object")
  fields = Fields(facts, f"{folder / 'info.json'}: {ADAPTER}")
  try:
    base_dtype = fields.string("base_dtype")
    if base_dtype is None or base_dtype not in BASE_DTYPES:
      raise fields.wrong("base_dtype", f"one of {', '.join(BASE_DTYPES)}")
    return lora.AdapterOptions(
      rank=fields.integer("rank", low=1, high=2**31 - 1),
      alpha=fields.number("alpha", above=0.0),
      targets=lora.targets(fields.strings("targets")),
      rank_stabilized=fields.boolean("rank_stabilized", default=False),
      base_dtype=base_dtype,
    )
  except ValueError as error:
    raise WeightsError(f"{folder} cannot be used: {error}") from error


class CheckpointAdapter:
  """The adapter of a checkpoint as a `merged_tensors.StoredAdapter`.

  Attributes:
    folder: Folder of the step.
    base: Folder of the base when the checkpoint was written.
    base_digest: Digest of the base's files of weights.
  """

  def __init__(
    self, folder: pathlib.Path, options: lora.AdapterOptions, base: str, base_digest: str
  ):
    """Opens the arrays; `open_checkpoint` makes this and checks them."""
    self.folder, self.base, self.base_digest = folder, base, base_digest
    self._options = options
    self._arrays = _Arrays(folder / "state")

  @property
  def options(self) -> lora.AdapterOptions:
    """Returns the options of the adapter."""
    return self._options

  def read(self, kernel: str, part: str, layer: int) -> np.ndarray:
    """Returns A [(X) i r] (part "a") or B [(X) r o] (part "b") of a kernel in a layer, in float32.

    Raises:
      WeightsError: The checkpoint was deleted meanwhile, or its arrays make no sense.
    """
    found = _read(self.folder, self._arrays, _name((kernel, part)), (layer, layer + 1))
    return found[0].astype(np.float32, copy=False)


class CheckpointTensors:
  """The weights of a checkpoint as `safetensors.Tensors`: Hugging Face's names and layout.

  One layer of a parameter is kept until another one is read, as readers take several parts of each.
  """

  def __init__(self, folder: pathlib.Path, config: ModelConfig, dtypes: Mapping[str, np.dtype]):
    """Opens the arrays; `open_checkpoint` makes this and checks them.

    Args:
      folder: Folder of the step.
      config: Config of the model.
      dtypes: Dtype of each leaf.
    """
    self._folder = folder
    self._arrays = _Arrays(folder / "state")
    self._stored = {stored.name: stored for stored in leaves.stored(config)}
    self._dtypes = dtypes
    self._last: tuple[Any, np.ndarray] | None = None

  @property
  def shapes(self) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of every tensor, by its Hugging Face name."""
    return {name: stored.shape for name, stored in self._stored.items()}

  def dtype(self, name: str) -> np.dtype:
    """Returns the dtype of a tensor."""
    return self._dtypes[_name(self._stored[name].path)]

  def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
    """Returns a tensor, or some of its rows, in the dtype of the training state.

    Raises:
      WeightsError: The checkpoint was deleted meanwhile, or its arrays make no sense.
    """
    stored = self._stored[name]
    key = stored.path, stored.layer
    if self._last is None or self._last[0] != key:
      self._last = None  # never two at once.
      self._last = key, self._read(stored)
    own = self._last[1] if stored.expert is None else self._last[1][stored.expert]
    own = own.T if stored.leaf.is_kernel else own
    return own[rows] if stored.shape else own

  def _read(self, stored: leaves.Stored) -> np.ndarray:
    layers = None if stored.layer is None else (stored.layer, stored.layer + 1)
    own = _read(self._folder, self._arrays, _name(stored.path), layers)
    return own if layers is None else own[0]


def _read(folder: pathlib.Path, arrays: "_Arrays", name: str, rows: _Range | None) -> np.ndarray:
  """Reads an array of a checkpoint, or some of its rows.

  Raises:
    WeightsError: The checkpoint was deleted meanwhile, or its arrays make no sense.
  """
  try:
    return arrays.read(name, rows)
  except (LookupError, OSError, TypeError, ValueError) as error:
    gone = "" if folder.is_dir() else "it was deleted meanwhile, as newer ones were kept: "
    raise WeightsError(f"{folder} cannot be read: {gone}{error}") from error


class _Arrays:
  """The arrays that Orbax has written into a folder, read in parts along their first axis."""

  def __init__(self, folder: pathlib.Path):
    self._place = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder.resolve()}/"}}
    self._values = tensorstore.KvStore.open(self._place).result()

  def read(self, name: str, rows: _Range | None = None) -> np.ndarray:
    """Returns an array, or the rows from the first to before the second."""
    meta = json.loads(self._values.read(f"{name}/zarr.json").result().value)
    rows = rows or (0, meta["shape"][0])
    chunk = _plain_chunk(meta)
    if chunk is None:
      return self._read_by_chunks(name, rows)
    shape, dtype = meta["shape"], _dtype(meta["data_type"])
    parts = list(_chunks(shape, chunk, rows))
    if len(parts) == 1 and list(chunk[1:]) == shape[1:]:
      return self._part(name, meta, chunk, dtype, *parts[0])
    out = np.empty((rows[1] - rows[0], *shape[1:]), dtype)
    for index, within in parts:
      start = index[0] * chunk[0] + within[0] - rows[0]
      there = [slice(start, start + within[1] - within[0])]
      there += [
        slice(i * size, (i + 1) * size) for i, size in zip(index[1:], chunk[1:], strict=True)
      ]
      target = out[tuple(there)]
      part = self._part(name, meta, chunk, dtype, index, within)
      target[...] = part[tuple(slice(n) for n in target.shape)]  # the last chunks go beyond.
    return out

  def _part(
    self,
    name: str,
    meta: Mapping[str, Any],
    chunk: Sequence[int],
    dtype: np.dtype,
    index: tuple[int, ...],
    rows: _Range,
  ) -> np.ndarray:
    """Reads some rows of one chunk, as a range of bytes."""
    key = "/".join([name, "c", *map(str, index)])
    shape = (rows[1] - rows[0], *chunk[1:])
    found = self._values.read(key, byte_range=slice(-_INDEX_BYTES, None)).result()
    begin = int.from_bytes(found.value[:8], "little") if found.value else _NOT_STORED
    if begin == _NOT_STORED:
      return np.full(shape, meta["fill_value"], dtype)
    row = math.prod(chunk[1:]) * dtype.itemsize
    out = np.empty(shape, dtype)
    bytes_of = out.reshape(-1).view(np.uint8)
    for start in range(0, out.nbytes, _PIECE):
      stop = min(start + _PIECE, out.nbytes)
      cut = slice(begin + rows[0] * row + start, begin + rows[0] * row + stop)
      value = self._values.read(key, byte_range=cut).result().value
      bytes_of[start:stop] = np.frombuffer(value, np.uint8)
    return out

  def _read_by_chunks(self, name: str, rows: _Range) -> np.ndarray:
    """Reads an array of whatever layout; a whole chunk of it is in memory at once."""
    spec = {"driver": "zarr3", "kvstore": {**self._place, "path": f"{name}/"}}
    return tensorstore.open(spec, open=True).result()[rows[0] : rows[1]].read().result()


def _chunks(
  shape: Sequence[int], chunk: Sequence[int], rows: _Range
) -> Iterator[tuple[tuple[int, ...], _Range]]:
  """Yields the chunks that hold some rows: their place in the grid, and which of their rows."""
  counts = [-(-size // of_chunk) for size, of_chunk in zip(shape, chunk, strict=True)]
  first, last = rows[0] // chunk[0], -(-rows[1] // chunk[0])
  for index in itertools.product(range(first, last), *map(range, counts[1:])):
    start = index[0] * chunk[0]
    yield index, (max(rows[0] - start, 0), min(rows[1] - start, chunk[0]))


def _plain_chunk(meta: Mapping[str, Any]) -> list[int] | None:
  """Returns the shape of the chunks; None if they are not their elements in order."""
  outer = meta["chunk_grid"]["configuration"]["chunk_shape"]
  plain = {"name": "bytes", "configuration": {"endian": "little"}}
  codecs = meta["codecs"]
  if len(codecs) != 1 or codecs[0]["name"] != "sharding_indexed":
    return None
  inner = codecs[0]["configuration"]
  is_plain = (
    inner["chunk_shape"] == outer
    and inner["codecs"] == [plain]
    and inner["index_codecs"] == [plain, {"name": "crc32c"}]
    and inner.get("index_location", "end") == "end"
    and meta.get("chunk_key_encoding", {"name": "default"}) == {"name": "default"}
  )
  return outer if is_plain else None


def _dtype(name: str) -> np.dtype:
  return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _name(path: Sequence[str]) -> str:
  """Returns the name of a parameter in a checkpoint."""
  return ".".join((_PARAMS, *path))


def _shape(stored: leaves.Stored, config: ModelConfig) -> tuple[int, ...]:
  """Returns the shape of the leaf that a tensor is in."""
  return stored.leaf.shape if stored.layer is None else (config.num_layers, *stored.leaf.shape)
