"""Reads JSON that a model wrote, in linear time, and refuses what JSON proper does not have. Pure.

Refused are NaN and Infinity, numbers beyond every float, whole numbers of hundreds of digits, an
object with two equal names, strings with half a surrogate pair, and values nested too deeply.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from grpo_jax.values import json_text

MAX_DEPTH = 64  # objects and lists within each other.

_SPACE = re.compile(r"[ \t\n\r]*")


class JsonError(ValueError):
  """A string is not the JSON that was asked for; the message can be shown to the model."""


def read(text: str, start: int = 0) -> tuple[Any, int]:
  """Reads one JSON value.

  Args:
    text: Text that contains the value.
    start: Place where the value begins; white space before the value is skipped.

  Returns:
    The value, and the place after it.

  Raises:
    JsonError: There is no valid JSON value at this place.
  """
  begin = after_space(text, start)
  try:
    value, end = _DECODER.raw_decode(text, begin)
  except json.JSONDecodeError as error:
    raise JsonError(f"invalid JSON at character {error.pos - begin + 1}: {error.msg}") from error
  except RecursionError as error:
    raise JsonError(_TOO_DEEP) from error
  except ValueError as error:
    raise JsonError(str(error)) from error
  _check(value)
  return value, end


def read_all(text: str) -> Any:
  """Returns the JSON value that is the whole text; see `read`."""
  value, end = read(text)
  if after_space(text, end) < len(text):
    raise JsonError(f"text after the JSON value: {text[end : end + 20]!r}")
  return value


def after_space(text: str, start: int) -> int:
  """Returns the place of the first character from `start` on that is not white space."""
  found = _SPACE.match(text, start)
  return found.end() if found else start


def _check(value: Any) -> None:
  """Raises JsonError for a value that is nested too deeply or cannot be written as UTF-8."""
  level: list[Any] = [value]
  for _ in range(MAX_DEPTH + 1):
    inner = [each for outer in level for each in _inner(outer)]
    if not any(isinstance(each, dict | list) for each in level):
      return
    level = inner
  raise JsonError(_TOO_DEEP)


def _inner(value: Any) -> Sequence[Any]:
  """Returns the values within a value; names of objects are among them."""
  if isinstance(value, dict):
    return [*value, *value.values()]
  if isinstance(value, list):
    return value
  if isinstance(value, str):
    try:
      value.encode()
    except UnicodeEncodeError as error:
      raise JsonError("a string holds half a surrogate pair") from error
  return ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) < len(pairs):
    seen: set[str] = set()
    twice = next(name for name, _ in pairs if name in seen or seen.add(name))
    raise ValueError(f"an object has the name {twice[:60]!r} twice")
  return found


_TOO_DEEP = f"values are nested more than {MAX_DEPTH} deep"
_DECODER = json.JSONDecoder(object_pairs_hook=_object, **json_text.STRICT)
