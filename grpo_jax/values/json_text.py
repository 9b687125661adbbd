"""Reads JSON text that may be broken in every way: each of them is a ValueError. Pure."""

import json
import math
from typing import Any

# Errors that reading parsed data in another form than the expected one raises.
UNEXPECTED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
MAX_DEPTH = 200  # objects and lists within each other; code that walks through values is recursive.
MAX_DIGITS = 300  # of a whole number; the largest float has 309.


def parsed(text: str | bytes, *, is_strict: bool = False, **options: Any) -> Any:
  """Returns the value of JSON text.

  Args:
    text: Text, or bytes in UTF-8.
    is_strict: Whether NaN, infinities, numbers beyond every float and half surrogate pairs are
      errors, as in files that only this package writes.
    **options: Arguments of `json.loads`, such as parse_float.

  Raises:
    ValueError: The text is not JSON or not UTF-8, or is nested more than `MAX_DEPTH` deep.
  """
  text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
  options |= STRICT if is_strict else {}
  try:
    value = json.loads(text, **options)
  except RecursionError as error:
    raise ValueError(_TOO_DEEP) from error
  if text.count("[") + text.count("{") > MAX_DEPTH:
    _check_depth(value)
  if is_strict and ("\\ud" in text or "\\uD" in text):
    json.dumps(value, ensure_ascii=False).encode("utf-8")
  return value


def parsed_object(text: str | bytes, *, is_strict: bool = False) -> dict[str, Any]:
  """Returns the object of JSON text; see `parsed`.

  Raises:
    ValueError: The text is another value, or see `parsed`.
  """
  value = parsed(text, is_strict=is_strict)
  if not isinstance(value, dict):
    raise ValueError(f"it must be an object, but is {value!r:.60}")
  return value


def _check_depth(value: Any) -> None:
  level = [value]
  for _ in range(MAX_DEPTH):
    level = [
      inner
      for each in level
      for inner in (each.values() if isinstance(each, dict) else each)
      if isinstance(inner, dict | list)
    ]
    if not level:
      return
  raise ValueError(_TOO_DEEP)


def _constant(name: str) -> Any:
  raise ValueError(f"{name} is not JSON")


def _float(digits: str) -> float:
  value = float(digits)
  if not math.isfinite(value):
    raise ValueError(f"the number {digits[:20]} is too large")
  return value


def _integer(digits: str) -> int:
  if len(digits) > MAX_DIGITS:
    raise ValueError(f"a whole number has more than {MAX_DIGITS} digits")
  return int(digits)


# Arguments of `json.loads` that refuse numbers that JSON or a float cannot have.
STRICT = {"parse_constant": _constant, "parse_float": _float, "parse_int": _integer}
_TOO_DEEP = f"values are nested more than {MAX_DEPTH} deep"
