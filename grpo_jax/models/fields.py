"""Typed fields of an untrusted JSON object, such as config.json. Pure."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.models.errors import ModelError
from grpo_jax.values import json_numbers

_SHOWN = 60


class Fields:
  """Reads the fields of an object; null counts as missing, as in transformers."""

  def __init__(self, content: Mapping[str, Any], where: str):
    """Wraps an object.

    Args:
      content: Content of the object.
      where: Place of the content, for errors: a file, or a part of one.
    """
    self.where = where
    self._content = {name: value for name, value in content.items() if value is not None}

  def __contains__(self, name: str) -> bool:
    return name in self._content

  def names(self) -> list[str]:
    """Returns the names of all fields that are there."""
    return list(self._content)

  def get(self, name: str) -> Any:
    """Returns a field unchecked; None if it is missing."""
    return self._content.get(name)

  def integer(self, name: str, default: int | None = None, *, low: int, high: int) -> int:
    """Returns a whole number from `low` to `high`.

    Raises:
      ModelError: The field is something else, or missing without a default.
    """
    value = self._value(name, default)
    if isinstance(value, float) and value.is_integer():
      value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
      raise self.wrong(name, f"a whole number from {low} to {high}")
    return value

  def number(self, name: str, default: float | None = None, *, above: float) -> float:
    """Returns a finite number above `above`; raises the same errors as `integer`."""
    value = self._value(name, default)
    number = None if isinstance(value, bool) else json_numbers.finite(value)
    if number is None or number <= above:
      raise self.wrong(name, f"a finite number above {above:g}")
    return number

  def numbers(self, name: str, *, above: float) -> tuple[float, ...]:
    """Returns a list of finite numbers above `above`; raises the same errors as `integer`."""
    value = self._value(name, None)
    each = value if isinstance(value, list | tuple) else [None]
    found = [None if isinstance(one, bool) else json_numbers.finite(one) for one in each]
    if not all(one is not None and one > above for one in found):
      raise self.wrong(name, f"a list of finite numbers above {above:g}")
    return tuple(one for one in found if one is not None)

  def boolean(self, name: str, *, default: bool) -> bool:
    """Returns true or false; raises the same errors as `integer`."""
    value = self._value(name, default)
    if not isinstance(value, bool):
      raise self.wrong(name, "true or false")
    return value

  def string(self, name: str) -> str | None:
    """Returns a string, or None if it is missing; raises the same errors as `integer`."""
    value = self.get(name)
    if value is not None and not isinstance(value, str):
      raise self.wrong(name, "a string")
    return value

  def strings(self, name: str) -> list[str]:
    """Returns a list of strings, empty if it is missing; raises the same errors as `integer`."""
    value = self._content.get(name, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
      raise self.wrong(name, "a list of strings")
    return value

  def section(self, name: str) -> dict[str, Any]:
    """Returns an object, empty if it is missing; raises the same errors as `integer`."""
    value = self._content.get(name, {})
    if not isinstance(value, Mapping):
      raise self.wrong(name, "an object")
    return dict(value)

  def ids(self, name: str) -> tuple[int, ...]:
    """Returns the token ids of a field that holds one id or a list; () if it is missing.

    Raises:
      ModelError: The field is something else.
    """
    value = self._content.get(name, [])
    each = value if isinstance(value, list) else [value]
    if not all(type(token) is int and abs(token) < 2**31 for token in each):
      raise self.wrong(name, "a token id or a list of token ids")
    return tuple(each)

  def wrong(self, name: str, needed: str) -> ModelError:
    """Returns the error for a field that does not have the needed form."""
    value = self._content.get(name)
    shown = "nothing" if value is None else short(value)
    return ModelError(f"{self.where}: {name} needs {needed}, got {shown}")

  def _value(self, name: str, default: Any) -> Any:
    value = self._content.get(name, default)
    if value is None:
      raise ModelError(f"{self.where}: {name} is missing")
    return value


def short(value: Any) -> str:
  """Returns a value as a string, shortened for a message."""
  shown = repr(value)
  return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
