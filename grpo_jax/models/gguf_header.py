"""Reads the header of a GGUF file with the format's own library: metadata and tensors (I/O)."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo_jax.models import files
from grpo_jax.models.errors import ModelError

# Numbers and strings that are read of a header, several times those of the longest published
# vocabulary: the library makes NumPy arrays of each, of 300 bytes together.
MOST_READS = 1 << 23
_SHOWN_REASON = 300  # characters of the library's reason in an error.


@dataclasses.dataclass(frozen=True)
class GgufTensor:
  """A tensor of a file."""

  shape: tuple[int, ...]  # slowest axis first, as in NumPy.
  kind: Any  # gguf.GGMLQuantizationType.
  data: np.ndarray  # as it is stored: a map of the file, of which nothing has been read.


@dataclasses.dataclass(frozen=True)
class Header:
  """The metadata by its keys, and the tensors by their GGUF names."""

  metadata: Mapping[str, Any]
  tensors: Mapping[str, GgufTensor]


def read(file: pathlib.Path) -> Header:
  """Reads the header of a GGUF file of version 2 or 3.

  Raises:
    MissingModel: The file does not exist.
    ModelError: The file is truncated, is not a GGUF file, or its header is too long.
  """
  files.require(file)
  try:
    return _read(file)
  except Exception as error:  # the library has no error of its own for files that are broken.
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:_SHOWN_REASON]
    raise ModelError(f"{file}: is cut short or not a GGUF file, copy it again: {reason}") from error


def _read(file: pathlib.Path) -> Header:
  import gguf

  class Reader(gguf.GGUFReader):
    """Stops at the end of the file: the library continues with empty arrays, up to 2⁶⁴ of them."""

    reads = 0

    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
      self.reads += 1
      if self.reads > MOST_READS:
        raise ValueError(f"it has more than {MOST_READS} numbers and strings before the tensors")
      found = super()._get(offset, dtype, count, override_order)
      if len(found) != count:
        raise ValueError(f"it ends within the {count} values at byte {offset}")
      return found

  reader = Reader(file)
  if reader.byte_order != "I":
    raise ValueError("its byte order is not that of this machine")
  fields = reader.fields.items()
  metadata = {key: field.contents() for key, field in fields if not key.startswith("GGUF.")}
  return Header(metadata, {tensor.name: _entry(tensor) for tensor in reader.tensors})


def _entry(tensor: Any) -> GgufTensor:
  shape = tuple(int(size) for size in tensor.shape[::-1])
  return GgufTensor(shape, tensor.tensor_type, tensor.data)
