"""Reads and writes safetensors files tensor by tensor (I/O).

The format is a length, a JSON header and raw bytes. Plain file reads instead of a memory map keep
only one tensor in memory at a time. Writing a stream needs no second copy of the model, and cannot
save the wrong bytes of an array that is not C-contiguous.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import ml_dtypes
import numpy as np

from grpo_jax.models import files
from grpo_jax.models.errors import MissingModel, ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADER_BYTES = 100_000_000  # longest header that the format's own library reads.
_MOST_AXES = 8
_SHOWN = 30  # number of names in an error.
_SHOWN_NAME = 200  # characters of a name in an error.


@runtime_checkable
class Tensors(Protocol):
  """Named tensors that are read one at a time: a folder of safetensors, or a GGUF file."""

  @property
  def shapes(self) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of every tensor, by its Hugging Face name."""
    ...

  def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
    """Returns a tensor, or some of its rows (first axis), in the file's own dtype."""
    ...


@dataclasses.dataclass(frozen=True)
class Entry:
  """The place of one tensor in a file."""

  file: pathlib.Path
  offset: int  # bytes from the start of the file.
  shape: tuple[int, ...]
  dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class Folder:
  """The tensors of a Hugging Face folder, in one safetensors file or several."""

  entries: Mapping[str, Entry]

  @property
  def shapes(self) -> Mapping[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in self.entries.items()}

  def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
    entry = self.entries[name]
    if not entry.shape:
      return np.fromfile(entry.file, entry.dtype, 1, offset=entry.offset).reshape(())
    start, stop, _ = rows.indices(entry.shape[0])
    row = math.prod(entry.shape[1:])
    offset = entry.offset + start * row * entry.dtype.itemsize
    values = np.fromfile(entry.file, entry.dtype, (stop - start) * row, offset=offset)
    return values.reshape(stop - start, *entry.shape[1:])


def open_folder(directory: pathlib.Path) -> Folder:
  """Reads the headers of the safetensors files of a Hugging Face folder, but no tensor yet.

  Raises:
    MissingModel: There are no such files, or a file in the index is missing.
    ModelError: A file is truncated or is not a safetensors file, or the index does not fit them.
  """
  index = directory / INDEX_FILE
  weight_map = _weight_map(index) if index.exists() else {}
  names = sorted(set(weight_map.values())) or [SINGLE_FILE]
  absent = [name for name in names if not (directory / name).exists()]
  if absent:
    found = sorted(path.name for path in directory.glob("*") if path.is_file())
    raise MissingModel(
      f"{directory}: needs {absent[:_SHOWN]} (weights are read from safetensors only);"
      f" found {found[:_SHOWN]}"
    )
  entries: dict[str, Entry] = {}
  for name in names:
    in_file = read_header(directory / name)
    twice = sorted(entries.keys() & in_file.keys())
    if twice:
      raise ModelError(f"{directory / name}: {twice[0]} is also in another file of the folder")
    entries.update(in_file)
  for name, file in weight_map.items():
    if name not in entries or entries[name].file.name != file:
      raise ModelError(f"{index}: says that {name} is in {file}, but it is not")
  return Folder(entries)


def _weight_map(index: pathlib.Path) -> dict[str, str]:
  """Returns the file of each tensor, in the folder of the index.

  Raises:
    ModelError: The index has no files, or names a file in another folder.
  """
  content = files.read_json(index, max_bytes=files.INDEX_BYTES, is_strict=True)
  weight_map = content.get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise ModelError(
      f"{index}: weight_map must be an object of tensor and file names,"
      f" got {files.described(weight_map)}"
    )
  for name, file in weight_map.items():
    is_beside = isinstance(file, str) and file == pathlib.PurePath(file).name and "\\" not in file
    if not is_beside or file in ("", ".."):
      raise ModelError(
        f"{index}: weight_map gives {name} the file {files.described(file)};"
        " a file in the same folder is needed"
      )
  return weight_map


def read_header(file: pathlib.Path, *, max_bytes: int = HEADER_BYTES) -> dict[str, Entry]:
  """Returns the entries of one safetensors file.

  The rules are the format's own: a header of at most 100 MB, and tensors that fill the rest of
  the file without gaps or overlaps.

  Args:
    file: File to read.
    max_bytes: Longest header that is read.

  Raises:
    ModelError: The file is truncated, is not a safetensors file, or has an unsupported dtype.
  """
  size = files.require(file)
  with file.open("rb") as stream:
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > size - 8:
      raise ModelError(f"{file}: is cut short or not a safetensors file ({size} bytes)")
    if length > max_bytes:
      raise ModelError(f"{file}: has a header of {length} bytes; at most {max_bytes} are read")
    header = files.json_object(stream.read(length), f"{file}: header", is_strict=True)
  metadata = header.pop("__metadata__", {})
  if not isinstance(metadata, dict):
    raise ModelError(f"{file}: header: __metadata__ must be an object of strings")
  data = 8 + length
  spans = {name: _span(file, name, fields) for name, fields in header.items()}
  _check_filled(file, spans, size - data)
  return {
    name: Entry(file, data + span.begin, span.shape, span.dtype) for name, span in spans.items()
  }


@dataclasses.dataclass(frozen=True)
class _Span:
  """The place of a tensor according to the header, in bytes after the header."""

  begin: int
  end: int
  shape: tuple[int, ...]
  dtype: np.dtype


def _span(file: pathlib.Path, name: str, fields: Any) -> _Span:
  """Checks one entry of a header."""
  where = f"{file}: header: {name[:_SHOWN_NAME]}"
  if not isinstance(fields, dict):
    raise ModelError(f"{where}: must be an object, got {files.described(fields)}")
  dtype_name, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
  if not isinstance(dtype_name, str) or dtype_name not in _DTYPES:
    raise ModelError(
      f"{where}: dtype is {files.described(dtype_name)}; readable are {sorted(_DTYPES)}"
    )
  if not _are_sizes(shape) or len(shape) > _MOST_AXES:
    raise ModelError(f"{where}: shape must be a list of sizes, got {files.described(shape)}")
  if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
    raise ModelError(
      f"{where}: data_offsets must be the first and the last byte, got {files.described(offsets)}"
    )
  dtype, (begin, end) = _DTYPES[dtype_name], offsets
  if end - begin != math.prod(shape) * dtype.itemsize:
    raise ModelError(f"{where}: has {end - begin} bytes for shape {tuple(shape)} of {dtype_name}")
  return _Span(begin, end, tuple(shape), dtype)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
  return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_filled(file: pathlib.Path, spans: Mapping[str, _Span], size: int) -> None:
  """Raises ModelError unless consecutive tensors fill `size` bytes."""
  reached, before = 0, "the header"
  for name, span in sorted(spans.items(), key=lambda item: (item[1].begin, item[1].end)):
    if span.end > size:
      raise ModelError(f"{file}: is cut short: {name} ends at byte {span.end} of {size}")
    if span.begin != reached:
      what = "overlaps with" if span.begin < reached else "leaves a gap after"
      raise ModelError(f"{file}: {name} {what} {before}: it begins at {span.begin}, not {reached}")
    reached, before = span.end, name
  if reached != size:
    raise ModelError(f"{file}: has {size - reached} bytes after the last tensor")


def _nothing() -> None:
  """Is the part of this process in what it need not take part in."""


@dataclasses.dataclass(frozen=True)
class ToWrite:
  """One tensor to be written; its values are made when they are needed.

  Attributes:
    name: Name in the file.
    shape: Shape in the file.
    dtype: Dtype in the file.
    values: Function that returns the values.
    take_part: Function that does the part of this process when another one needs the values.
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  values: Callable[[], np.ndarray]
  take_part: Callable[[], None] = _nothing

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


def write_folder(
  directory: pathlib.Path, tensors: Sequence[ToWrite], *, max_shard_bytes: int | None = None
) -> None:
  """Writes tensors into model.safetensors, or into several files and their index.

  Args:
    directory: Existing folder.
    tensors: Tensors to write one after the other; none is kept after it is written.
    max_shard_bytes: Bytes of tensor data per file; None: one file. A larger tensor gets a
      file of its own.
  """
  shards = _split(tensors, max_shard_bytes)
  if len(shards) == 1:
    write_file(directory / SINGLE_FILE, shards[0])
    return
  files_of = dict(zip(file_names(len(shards)), shards, strict=True))
  for name, shard in files_of.items():
    write_file(directory / name, shard)
  write_index(directory, files_of)


def file_names(number: int) -> list[str]:
  """Returns the names of the files of a folder that has this number of them."""
  if number == 1:
    return [SINGLE_FILE]
  return [f"model-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)]


def write_index(directory: pathlib.Path, files_of: Mapping[str, Sequence[ToWrite]]) -> None:
  """Writes the index of a folder that has several files of weights.

  Args:
    directory: Existing folder.
    files_of: Tensors by the name of their file.
  """
  weight_map = {tensor.name: name for name, shard in files_of.items() for tensor in shard}
  total = sum(tensor.nbytes for shard in files_of.values() for tensor in shard)
  index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
  (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_file(file: pathlib.Path, tensors: Iterable[ToWrite]) -> None:
  """Writes one safetensors file as a stream.

  An existing file of the same size is overwritten in place: in a tmpfs, this avoids allocating its
  memory again, which would take longer than the writing.

  Raises:
    ValueError: The values of a tensor differ from the announced shape or dtype.
  """
  tensors = list(tensors)
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it.
  offset = 0
  for tensor in tensors:
    end = offset + tensor.nbytes
    dtype = _DTYPE_NAMES[tensor.dtype]
    header[tensor.name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
    offset = end
  encoded = json.dumps(header, separators=(",", ":")).encode()
  encoded += b" " * (-len(encoded) % 8)
  is_same_size = file.exists() and file.stat().st_size == 8 + len(encoded) + offset
  with file.open("r+b" if is_same_size else "wb") as stream:
    stream.write(len(encoded).to_bytes(8, "little"))
    stream.write(encoded)
    for tensor in tensors:
      values = np.ascontiguousarray(tensor.values()).reshape(tensor.shape)
      if values.dtype != tensor.dtype:
        raise ValueError(f"{tensor.name}: announced {tensor.dtype}, got {values.dtype}")
      stream.write(values.reshape(-1).view(np.uint8).data)
      del values  # before the next one is fetched.


def _split(tensors: Sequence[ToWrite], max_bytes: int | None) -> list[list[ToWrite]]:
  shards: list[list[ToWrite]] = [[]]
  filled = 0
  for tensor in tensors:
    if max_bytes is not None and shards[-1] and filled + tensor.nbytes > max_bytes:
      shards.append([])
      filled = 0
    shards[-1].append(tensor)
    filled += tensor.nbytes
  return shards


_DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
