"""Reads the JSON files of a model folder, within bounds (I/O).

A model may be untrusted: no file is read before its size is known, and unexpected content raises a
ModelError.
"""

import json
import pathlib
from typing import Any

from grpo_jax.models.errors import MissingModel, ModelError
from grpo_jax.values import json_text

# Largest sizes in bytes: several times those of published models.
SETTINGS_BYTES = 16 << 20  # config.json, generation_config.json, tokenizer_config.json, …
INDEX_BYTES = 64 << 20  # model.safetensors.index.json.
VOCABULARY_BYTES = 256 << 20  # tokenizer.json, vocab.json, merges.txt, tokenizer.model.
TEMPLATE_BYTES = 1 << 20  # chat_template.jinja.


def read_json(
  file: pathlib.Path, *, max_bytes: int = SETTINGS_BYTES, is_strict: bool = False
) -> dict[str, Any]:
  """Returns the object in a JSON file.

  Args:
    file: File to read.
    max_bytes: Largest allowed size of the file.
    is_strict: Whether a repeated name in an object is an error; else the last value counts.

  Raises:
    MissingModel: The file does not exist; the message lists what is in the folder.
    ModelError: The file is too large or does not contain a JSON object.
  """
  return json_object(read_bytes(file, max_bytes=max_bytes), str(file), is_strict=is_strict)


def read_text(file: pathlib.Path, *, max_bytes: int) -> str:
  """Returns the text of a file in UTF-8.

  Raises:
    MissingModel: The file does not exist.
    ModelError: The file is too large, or not in UTF-8.
  """
  try:
    return read_bytes(file, max_bytes=max_bytes).decode("utf-8")
  except UnicodeDecodeError as error:
    raise ModelError(f"{file}: is not text in UTF-8: {error}") from error


def read_bytes(file: pathlib.Path, *, max_bytes: int) -> bytes:
  """Returns the content of a file; raises the same errors as `read_json`."""
  require(file, max_bytes=max_bytes)
  try:
    with file.open("rb") as stream:
      return stream.read(max_bytes)
  except OSError as error:
    raise ModelError(f"{file}: cannot be read: {error.strerror}") from error


def require(file: pathlib.Path, *, max_bytes: int | None = None) -> int:
  """Checks that a file exists, is a regular file, and is not too large.

  Args:
    file: Path to check; a link to a file counts as one.
    max_bytes: Largest allowed size of the file; None: any.

  Returns:
    The size of the file, in bytes.

  Raises:
    MissingModel: The file does not exist; the message lists what is in the folder.
    ModelError: The path is a folder, a pipe or a device, or the file is too large.
  """
  try:
    if not file.exists():
      raise MissingModel(f"{file} does not exist; its folder has: {_neighbours(file.parent)}")
    if not file.is_file():
      raise ModelError(f"{file}: must be a file, but is a folder, a pipe or a device")
    size = file.stat().st_size
  except (OSError, ValueError) as error:  # ValueError: a null character in the name.
    if isinstance(error, ModelError):
      raise
    raise ModelError(f"{file}: cannot be read: {error}") from error
  if max_bytes is not None and size > max_bytes:
    raise ModelError(f"{file}: has {size} bytes; at most {max_bytes} are read")
  return size


def json_object(content: bytes, where: str, *, is_strict: bool = False) -> dict[str, Any]:
  """Returns the object in JSON text in UTF-8.

  Raises:
    ModelError: The content is not JSON, not an object, or (if `is_strict`) repeats a name.
  """
  try:
    found = json_text.parsed(content, object_pairs_hook=_unique if is_strict else None)
  except ValueError as error:
    raise ModelError(f"{where} is not JSON that can be read ({error})") from error
  if not isinstance(found, dict):
    raise ModelError(f"{where} must be a JSON object, but is {described(found)}")
  return found


def described(value: Any) -> str:
  """Returns a short description of a JSON value."""
  if isinstance(value, dict | list):
    kind = "an object" if isinstance(value, dict) else "a list"
    return f"{kind} of {len(value)}"
  shown = json.dumps(value, default=str)
  return shown if len(shown) <= 60 else f"{shown[:60]}…"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) < len(pairs):
    seen: set[str] = set()
    twice = next(name for name, _ in pairs if name in seen or seen.add(name))
    raise ValueError(f"{twice!r} appears twice")
  return found


def _neighbours(folder: pathlib.Path) -> str:
  if not folder.is_dir():
    return "no folder"
  names = sorted(path.name for path in folder.iterdir())
  return f"{names[:30]}" + (f" and {len(names) - 30} more" if len(names) > 30 else "")
