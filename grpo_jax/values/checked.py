"""Checks the values of options: their types, their ranges, whether None is allowed. Pure.

The owner of a set of options describes them once, in a table {name: Kind}. `problems` checks
values against the table; configs and the library's `make` functions use the same tables.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Bound = float | int | None


@dataclasses.dataclass(frozen=True)
class Kind:
  """The requirements of a value."""

  needed: str  # description that follows "must be" in messages.
  fits: Callable[[Any], bool]
  words: tuple[str, ...] = ()  # allowed values of a choice.

  def problem(self, name: str, value: Any) -> str | None:
    """Returns "NAME must be NEEDED, got VALUE"; None if the value fits."""
    return None if self.fits(value) else f"{name} must be {self.needed}, got {shown(value)}"


def number(
  *,
  low: Bound = None,
  above: Bound = None,
  high: Bound = None,
  below: Bound = None,
  infinite: bool = False,
  nan: bool = False,
  none: bool = False,
) -> Kind:
  """Describes a real number: finite unless `infinite`, never a boolean or a string.

  Args:
    low: Smallest allowed value.
    above: Bound that the value must exceed.
    high: Largest allowed value.
    below: Bound that the value must not reach.
    infinite: Whether infinities within the bounds are allowed.
    nan: Whether NaN is allowed.
    none: Whether None is allowed.
  """
  within = _within(low, above, high, below)
  needed = "a number" if infinite else "a finite number"

  def fits(value: Any) -> bool:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
      return False
    as_float = _as_float(value)
    if math.isnan(as_float):
      return nan
    return within(as_float) and (infinite or math.isfinite(as_float))

  needed += _bounds(low, above, high, below)
  return _maybe(Kind(f"{needed}, or NaN" if nan else needed, fits), none)


def whole(*, low: int | None = None, high: int | None = None, none: bool = False) -> Kind:
  """Describes an integer; True, 1.0 and "1" are not integers."""
  within = _within(low, None, high, None)
  is_integer = lambda x: isinstance(x, numbers.Integral) and not isinstance(x, bool)
  kind = Kind(
    "an integer" + _bounds(low, None, high, None),
    lambda x: is_integer(x) and within(int(x)),
  )
  return _maybe(kind, none)


def switch() -> Kind:
  """Describes a boolean; 1, 0, "true" and "no" are not booleans."""
  return Kind("True or False", lambda x: isinstance(x, bool))


def choice(words: Iterable[str], *, none: bool = False) -> Kind:
  """Describes a string that is one of several."""
  known = tuple(words)
  needed = "one of " + ", ".join(map(repr, known))
  return _maybe(Kind(needed, lambda x: isinstance(x, str) and x in known, known), none)


def text(*, empty: bool = False, none: bool = False) -> Kind:
  """Describes a string."""
  needed = "a string" if empty else "a string that is not empty"
  return _maybe(Kind(needed, lambda x: isinstance(x, str) and (empty or bool(x.strip()))), none)


def nonempty() -> Kind:
  """Describes a string of at least one character, which may be a space or a line break."""
  return Kind("a string that is not empty", lambda x: isinstance(x, str) and bool(x))


def path(*, none: bool = False) -> Kind:
  """Describes the path of a file or folder: a string that is not empty, or a path object."""
  fits = lambda x: hasattr(x, "__fspath__") or (isinstance(x, str) and bool(x.strip()))
  return _maybe(Kind("a path that is not empty", fits), none)


def several(each: Kind, *, least: int = 0, length: int | None = None, none: bool = False) -> Kind:
  """Describes a list or tuple; a string is not one.

  Args:
    each: Kind of every element.
    least: Smallest number of elements.
    length: Exact number of elements; None: any number from `least` on.
    none: Whether None is allowed.
  """

  def fits(value: Any) -> bool:
    if not isinstance(value, list | tuple):
      return False
    is_long = len(value) >= least if length is None else len(value) == length
    return is_long and all(each.fits(one) for one in value)

  size = f" of {length} elements" if length else " that is not empty" if least else ""
  return _maybe(Kind(f"a list{size}, each {each.needed}", fits), none)


def mapping(*, none: bool = False) -> Kind:
  """Describes a mapping from names to values."""
  fits = lambda x: isinstance(x, Mapping) and all(isinstance(key, str) for key in x)
  return _maybe(Kind("a mapping from names to values", fits), none)


def problems(
  kinds: Mapping[str, Kind], values: Mapping[str, Any], *, prefix: str = ""
) -> list[str]:
  """Returns a message for every value that is not of its kind; names without a kind are skipped.

  Args:
    kinds: Kind of each option, by name.
    values: Given values, by name.
    prefix: String before each name in the messages, such as "loss.".
  """
  found = (
    kinds[name].problem(f"{prefix}{name}", value) for name, value in values.items() if name in kinds
  )
  return [problem for problem in found if problem]


def fields_of(made: Any) -> dict[str, Any]:
  """Returns the fields of a dataclass by name, with unconverted values."""
  return {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}


def require(kinds: Mapping[str, Kind], values: Mapping[str, Any], *, of: str) -> None:
  """Raises one ValueError, "OF: PROBLEM; PROBLEM", unless every value is of its kind."""
  found = problems(kinds, values)
  if found:
    raise ValueError(f"{of}: " + "; ".join(found))


def shown(value: Any) -> str:
  """Returns a value for use in messages, with its type if the value does not make it clear."""
  as_text = repr(value)
  as_text = as_text if len(as_text) <= 80 else as_text[:77] + "..."
  is_plain = value is None or isinstance(value, int | float | list | tuple | dict)
  return as_text if is_plain else f"{as_text} ({type(value).__name__})"


def optional(kind: Kind) -> Kind:
  """Returns the same kind with None allowed."""
  if kind.fits(None):
    return kind
  return Kind(f"{kind.needed}, or None", lambda x: x is None or kind.fits(x), kind.words)


def _maybe(kind: Kind, none: bool) -> Kind:
  return optional(kind) if none else kind


def _within(low: Bound, above: Bound, high: Bound, below: Bound) -> Callable[[float | int], bool]:
  """Returns whether a number is within the bounds; NaN never is."""
  return lambda x: (
    x == x
    and (low is None or x >= low)
    and (above is None or x > above)
    and (high is None or x <= high)
    and (below is None or x < below)
  )


def _bounds(low: Bound, above: Bound, high: Bound, below: Bound) -> str:
  signs: Sequence[tuple[str, Bound]] = (
    (">=", low),
    (">", above),
    ("<=", high),
    ("<", below),
  )
  if low is not None and high is not None:
    return f" from {low} to {high}"
  parts = [f"{sign} {bound}" for sign, bound in signs if bound is not None]
  return f" {' and '.join(parts)}" if parts else ""


def _as_float(value: Any) -> float:
  """Returns the value; inf for an integer that is too large for a float."""
  try:
    return float(value)
  except OverflowError:
    return math.inf
