"""Reads and writes safetensors files tensor by tensor (I/O).

The format's own library reads tensors, or rows of them, by `pread`: only these are in memory.
Writing is our own: a stream that needs no second copy of the model, and cannot save the wrong bytes
of an array that is not C-contiguous.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np
from jaxtyping import UInt8
from safetensors import SafetensorError, safe_open

from grpo_jax.models import files
from grpo_jax.models.errors import MissingModel, ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHOWN = 30  # number of names in an error.
_SHOWN_REASON = 300  # characters of the library's reason in an error.


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
  """One tensor of a file."""

  file: pathlib.Path
  name: str  # in the file.
  shape: tuple[int, ...]
  dtype: np.dtype
  opened: Any  # safe_open, shared by the tensors of the file.


@dataclasses.dataclass(frozen=True)
class Folder:
  """The tensors of a Hugging Face folder, in one safetensors file or several."""

  entries: Mapping[str, Entry]

  @property
  def shapes(self) -> Mapping[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in self.entries.items()}

  def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
    entry = self.entries[name]
    begin, end, _ = rows.indices(entry.shape[0]) if entry.shape else (0, 0, 1)
    if not entry.shape or (begin, end) == (0, entry.shape[0]):
      return entry.opened.get_tensor(entry.name)
    return entry.opened.get_slice(entry.name)[begin:end]  # refuses an end behind the last row.


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
    in_file = open_file(directory / name)
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


def open_file(file: pathlib.Path) -> dict[str, Entry]:
  """Returns the tensors of one safetensors file, by their names; none is read yet.

  Raises:
    MissingModel: The file does not exist.
    ModelError: The file is truncated, is not a safetensors file, names a tensor twice, or has an
      unsupported dtype.
  """
  files.require(file)
  entries: dict[str, Entry] = {}
  try:
    opened = safe_open(file, "np", backend="pread")
    for name in opened.keys():
      tensor = opened.get_slice(name)
      kind = tensor.get_dtype()
      if kind not in _DTYPES:
        raise ModelError(
          f"{file}: {name[:_SHOWN_REASON]} has the dtype {kind}; readable are {sorted(_DTYPES)}"
        )
      entries[name] = Entry(file, name, tuple(tensor.get_shape()), _DTYPES[kind], opened)
    _check_header(file)
  except (SafetensorError, OSError) as error:
    reason = " ".join(str(error).split())[:_SHOWN_REASON]
    raise ModelError(
      f"{file}: is cut short or not a safetensors file, copy it again: {reason}"
    ) from error
  return entries


def _check_header(file: pathlib.Path) -> None:
  """Raises ModelError if a header that the library could read names a tensor twice.

  The library takes the last one of the two.
  """
  _header(file)


def _header(file: pathlib.Path) -> tuple[int, dict[str, Any]]:
  """Returns where the values begin in a file, in bytes, and its header."""
  with file.open("rb") as stream:
    length = int.from_bytes(stream.read(8), "little")
    return 8 + length, files.json_object(stream.read(length), f"{file}: its header", is_strict=True)


def mapped(directory: pathlib.Path) -> dict[str, UInt8[np.ndarray, " _"]]:
  """Returns the bytes of all tensors of a folder, mapped: they are read when they are used.

  Args:
    directory: Folder that `write_folder` has written, and that nobody writes now.
  """
  found = {}
  for file in sorted(directory.glob("*.safetensors")):
    begin, header = _header(file)
    content = np.memmap(file, np.uint8, "r")
    for name in header.keys() - {"__metadata__"}:
      first, end = header[name]["data_offsets"]
      found[name] = content[begin + first : begin + end]
  return found


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
    made_of: Tree of the arrays that the values are computed from; None: not known.
    is_there: Whether a file of the same header that is overwritten has these values.
    copies: Number of copies of it that are made until it is in the file, the last one included.
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  values: Callable[[], np.ndarray]
  take_part: Callable[[], None] = _nothing
  made_of: Any = None
  is_there: bool = False
  copies: int = 1

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
  memory again. That would take longer than the writing. Tensors that it has already are neither
  fetched nor written.

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
  begin = len(encoded).to_bytes(8, "little") + encoded
  is_same_size = file.exists() and file.stat().st_size == len(begin) + offset
  with file.open("r+b" if is_same_size else "wb") as stream:
    is_same = is_same_size and stream.read(len(begin)) == begin
    stream.seek(0)
    stream.write(begin)
    for tensor in tensors:
      if tensor.is_there and is_same:
        stream.seek(tensor.nbytes, os.SEEK_CUR)
        continue
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
