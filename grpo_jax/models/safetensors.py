"""Reads and writes safetensors files tensor by tensor (I/O).

The format is a length, a JSON header and raw bytes. Reading it with plain file reads, and not
through a memory map, keeps one tensor in memory at a time; writing it as a stream needs no second
copy of the model, and cannot save the wrong bytes of an array that is not C-contiguous.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@runtime_checkable
class Tensors(Protocol):
  """Named tensors that are read one at a time: a folder of safetensors, or a GGUF file."""

  @property
  def shapes(self) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of every tensor, by its Hugging Face name."""
    ...

  def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
    """Returns a tensor, or those of its rows (first axis), as the file's own dtype."""
    ...


@dataclasses.dataclass(frozen=True)
class Entry:
  """Where the bytes of one tensor stand."""

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
  """Reads the headers of the safetensors files of a Hugging Face folder, and no tensor yet.

  Raises:
    FileNotFoundError: if there are none, or one that the index names is missing.
    ValueError: if a file is cut short or is no safetensors file.
  """
  index = directory / INDEX_FILE
  if index.exists():
    weight_map = json.loads(index.read_text())["weight_map"]
    files = [directory / name for name in sorted(set(weight_map.values()))]
  else:
    files = [directory / SINGLE_FILE]
  absent = [file.name for file in files if not file.exists()]
  if absent:
    found = sorted(path.name for path in directory.glob("*") if path.is_file())
    raise FileNotFoundError(
      f"{directory}: needs {absent} (weights are read from safetensors only); found {found}"
    )
  entries: dict[str, Entry] = {}
  for file in files:
    entries.update(read_header(file))
  return Folder(entries)


def read_header(file: pathlib.Path) -> dict[str, Entry]:
  """Returns the entries of one safetensors file.

  Raises:
    ValueError: if it is cut short, is no safetensors file, or holds a dtype we do not read.
  """
  size = file.stat().st_size
  with file.open("rb") as stream:
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > size - 8:
      raise ValueError(f"{file}: is cut short or no safetensors file ({size} bytes)")
    try:
      header = json.loads(stream.read(length))
    except ValueError as error:
      raise ValueError(f"{file}: is no safetensors file: its header is no JSON") from error
  header.pop("__metadata__", None)
  entries = {}
  for name, field in header.items():
    if field["dtype"] not in _DTYPES:
      raise ValueError(f"{file}: {name} is {field['dtype']}; readable are {sorted(_DTYPES)}")
    begin, end = field["data_offsets"]
    dtype, shape = _DTYPES[field["dtype"]], tuple(field["shape"])
    if end - begin != math.prod(shape) * dtype.itemsize:
      raise ValueError(f"{file}: the header gives {name} {end - begin} bytes for shape {shape}")
    if 8 + length + end > size:
      raise ValueError(f"{file}: is cut short: {name} ends at {8 + length + end} of {size} bytes")
    entries[name] = Entry(file, 8 + length + begin, shape, dtype)
  return entries


@dataclasses.dataclass(frozen=True)
class ToWrite:
  """One tensor to be written: its header now, its values when their turn comes."""

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  values: Callable[[], np.ndarray]

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


def write_folder(
  directory: pathlib.Path, tensors: Sequence[ToWrite], *, max_shard_bytes: int | None = None
) -> None:
  """Writes tensors into model.safetensors, or into several files and their index.

  Args:
    directory: exists already.
    tensors: written one after the other; none is held longer than its writing takes.
    max_shard_bytes: of tensor data in a file; None: one file. A tensor larger than that gets a
      file of its own.
  """
  shards = _split(tensors, max_shard_bytes)
  if len(shards) == 1:
    write_file(directory / SINGLE_FILE, shards[0])
    return
  weight_map = {}
  for number, shard in enumerate(shards, start=1):
    name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    write_file(directory / name, shard)
    weight_map.update({tensor.name: name for tensor in shard})
  total = sum(tensor.nbytes for tensor in tensors)
  index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
  (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_file(file: pathlib.Path, tensors: Iterable[ToWrite]) -> None:
  """Writes one safetensors file as a stream.

  A file of the same size that is already there is written over in place: its memory, if it
  stands in a tmpfs, is then not asked for anew, which takes longer than the writing.

  Raises:
    ValueError: if the values of a tensor are not of the shape and dtype that were announced.
  """
  tensors = list(tensors)
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without.
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
