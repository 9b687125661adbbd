"""Checks the arguments of a call by the JSON schema of its tool, in bounded work. Pure.

A stranger may have written the schema, a model wrote the arguments, and both may be nested in every
way. So each pair of a value and a part of the schema is looked at once, and the number of pairs is
bounded.

What fits the schema is never refused, unless the bound is reached. Keywords that are not checked
here are left to the tool: `pattern` too, since a regular expression may take exponential time.
"""

import itertools
import math
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from grpo_jax.registry import nearest

_SHOWN = 60  # characters of a value in a message.
_NAMED = 50  # names in a message, and alternatives.
_DEEPEST = 250  # steps through a schema within each other; Python allows 1000 calls.
_MOST_STEPS = 50_000  # pairs of a value and a part of the schema.
_WORDS_A_STEP = 20  # names or values of a keyword that are compared in the time of a step.
_READ_A_STEP = 100  # members, types or characters of a reference that are read in that time.

# Ways in which a value can be wrong, one of each alternative: the path to what is wrong, and why.
_Problem = tuple[tuple[tuple[str, ...], str], ...]


class _TooLarge(Exception):
  """Too many steps would be needed."""


def problem(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
  """Returns why a tool cannot be called with these arguments; None if it can.

  Args:
    arguments: Arguments of the call, by name.
    schema: Schema of the parameters, an object. Names that it does not list are refused, unless it
      has a keyword by which others could be allowed, such as `additionalProperties`.
  """
  known = _mapping(schema, "properties")
  if all(schema.get(keyword) is None for keyword in _ALLOW_OTHERS):
    unknown = next((name for name in arguments if name not in known), None)
    if unknown is not None:
      names = [*itertools.islice(known, _NAMED)]
      hint = nearest(unknown[:_SHOWN], names)
      takes = ", ".join(names) or "no arguments"
      return f"unknown argument {_shown(unknown)}{hint}; the tool takes: {takes}"
  missing = [name for name in _required(schema) if name not in arguments]
  if missing:
    return f"the argument {missing[0]} is missing"
  return _checked(dict(arguments), schema)


def _checked(value: Any, schema: Any) -> str | None:
  try:
    found = _Check(schema).problem(value, schema)
  except (_TooLarge, RecursionError):  # the caller may have used up most of Python's stack.
    return "the arguments are too large or too deeply nested to be checked"
  if found is None:
    return None
  said = (f"{_path(path) or 'the arguments'} {why}" for path, why in found)
  return " or ".join(dict.fromkeys(said))


class _Check:
  """A check by one schema, to which parts of it may refer."""

  def __init__(self, root: Any):
    self._root = root
    self._steps = 0
    # By the ids of a value and of a part of the schema. Both live as long as the check.
    self._found: dict[tuple[int, int], _Problem | None] = {}

  def problem(self, value: Any, schema: Any, depth: int = 0) -> _Problem | None:
    """Returns what is wrong with a value; None if it fits.

    Raises:
      _TooLarge: That is not known after the largest number of steps.
    """
    if schema is False:
      return (((), "must not be given"),)
    if not isinstance(schema, Mapping):
      return None
    key = id(value), id(schema)
    if key not in self._found:
      self._count(1)
      if depth > _DEEPEST:
        raise _TooLarge
      self._found[key] = None  # of a schema that refers to itself.
      self._found[key] = self._problem(value, schema, depth + 1)
    return self._found[key]

  def _problem(self, value: Any, schema: Mapping[str, Any], depth: int) -> _Problem | None:
    """Looks at a value itself first, and then at what is in it."""
    if wrong := self._own_problem(value, schema):
      return (((), wrong),)
    for part in (self._referred(schema.get("$ref")), *_list(schema, "allOf")):
      if found := self.problem(value, part, depth):
        return found
    for keyword in ("anyOf", "oneOf"):
      alternatives: list[_Problem] = []
      for part in _list(schema, keyword):
        found = self.problem(value, part, depth)
        if found is None:
          break
        alternatives.append(found)
      else:
        if alternatives:
          return tuple(itertools.chain(*alternatives))[:_ALTERNATIVES]
    if isinstance(value, Mapping):
      return self._problem_in_object(value, schema, depth)
    return self._problem_in_list(value, schema, depth) if isinstance(value, list) else None

  def _own_problem(self, value: Any, schema: Mapping[str, Any]) -> str | None:
    self._count_read(schema.get("type"), list)
    wrong = _type_problem(value, schema)
    if wrong:
      return wrong
    for keyword, check in _CHECKS.items():
      if keyword in schema:
        self._count_words(schema[keyword])
        if needed := check(value, schema[keyword]):
          return f"must {needed}, got {_shown(value)}"
    return None

  def _problem_in_object(
    self, value: Mapping[str, Any], schema: Mapping[str, Any], depth: int
  ) -> _Problem | None:
    known, others = _mapping(schema, "properties"), schema.get("additionalProperties")
    if "patternProperties" in schema:
      others = None  # a name may be among those.
    self._count_words(schema.get("required"))
    self._count_read(value, Mapping)
    required = _required(schema)
    for name in required:
      if name not in value:
        return (((_cut(name),), "is missing"),)
    for name, part in sorted(value.items(), key=_is_container):  # what is quick comes first.
      below = known.get(name, others)
      if below is False:
        names = ", ".join(itertools.islice(known, _NAMED)) or "none"
        return (((_cut(name),), f"is unknown; there are: {names}"),)
      if found := self.problem(part, below, depth):
        return _below(_cut(name), found)
    return None

  def _problem_in_list(
    self, value: Sequence[Any], schema: Mapping[str, Any], depth: int
  ) -> _Problem | None:
    self._count_read(value, list)
    first, others = _list(schema, "prefixItems"), schema.get("items")
    for number, part in enumerate(value):
      below = first[number] if number < len(first) else others
      if found := self.problem(part, below, depth):
        return _below(f"[{number}]", found)
    return None

  def _referred(self, reference: Any) -> Any:
    """Returns the part of the schema that "#/$defs/NAME" names; None: it cannot be found."""
    if not isinstance(reference, str) or not reference.startswith("#"):
      return None
    self._count_read(reference, str)
    found = self._root
    for name in filter(None, urllib.parse.unquote(reference[1:]).split("/")):
      name = name.replace("~1", "/").replace("~0", "~")
      if isinstance(found, list) and name.isdecimal() and len(name) < 10:
        found = found[int(name)] if int(name) < len(found) else None
      else:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found

  def _count_words(self, words: Any) -> None:
    self._count(len(words) // _WORDS_A_STEP if isinstance(words, list) else 0)

  def _count_read(self, value: Any, kind: type) -> None:
    self._count(len(value) // _READ_A_STEP if isinstance(value, kind) else 0)

  def _count(self, steps: int) -> None:
    self._steps += steps
    if self._steps > _MOST_STEPS:
      raise _TooLarge


def _type_problem(value: Any, schema: Mapping[str, Any]) -> str | None:
  kinds = schema.get("type")
  if kinds is None or (schema.get("nullable") and value is None):
    return None
  kinds = kinds if isinstance(kinds, list) else [kinds]
  known = [kind for kind in kinds if isinstance(kind, str) and kind in _TYPES]
  if len(known) < len(kinds) or any(_TYPES[kind](value) for kind in known):
    return None
  return f"must be {' or '.join(_NAMES[kind] for kind in known)}, got {_shown(value)}"


def _mapping(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
  """Returns the value of a keyword; {} if it is absent, null or of another type."""
  found = schema.get(keyword)
  return found if isinstance(found, Mapping) else {}


def _list(schema: Mapping[str, Any], keyword: str) -> Sequence[Any]:
  """Returns the value of a keyword; () if it is absent, null or of another type."""
  found = schema.get(keyword)
  return found if isinstance(found, list | tuple) else ()


def _required(schema: Mapping[str, Any]) -> list[str]:
  return [name for name in _list(schema, "required") if isinstance(name, str)]


def _is_container(member: tuple[str, Any]) -> bool:
  return isinstance(member[1], Mapping | list)


def _below(step: str, found: _Problem) -> _Problem:
  """Returns what is wrong with a value, for the object or list that it is in."""
  return tuple(((step, *path), why) for path, why in found)


def _path(steps: Iterable[str]) -> str:
  return "".join(step if step.startswith("[") else f".{step}" for step in steps).removeprefix(".")


def _cut(name: Any) -> str:
  return str(name)[:_SHOWN]


def _shown(value: Any) -> str:
  if isinstance(value, str):
    return repr(value[:_SHOWN] + "…" if len(value) > _SHOWN else value)
  if isinstance(value, Mapping):
    return "an object"
  if isinstance(value, list):
    return "a list"
  if value is None or isinstance(value, bool):
    return _WORDS[value]
  if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
    return "a number of many digits"
  return str(value)[:_SHOWN]


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
  return _is_number(value) and (isinstance(value, int) or value.is_integer())


def _equal(value: Any, other: Any) -> bool:
  """Compares as JSON does: true is not 1, also within lists and objects."""
  if isinstance(value, list):
    return isinstance(other, list) and len(value) == len(other) and all(map(_equal, value, other))
  if isinstance(value, Mapping):
    is_like = isinstance(other, Mapping) and value.keys() == other.keys()
    return is_like and all(_equal(part, other[name]) for name, part in value.items())
  return isinstance(value, bool) == isinstance(other, bool) and value == other


def _words(values: Iterable[Any]) -> str:
  return ", ".join(map(_shown, itertools.islice(values, _NAMED)))[:300]


def _is_multiple(value: float | int, of: float | int) -> bool:
  """Computes exactly in the decimal digits of both: 0.3 is a multiple of 0.1."""
  if not of or any(isinstance(x, float) and not math.isfinite(x) for x in (value, of)):
    return True
  exact = (Fraction(x if isinstance(x, int) else repr(x)) for x in (value, of))
  return next(exact) % next(exact) == 0


_ALTERNATIVES = 5  # in a message.
_LARGEST_BITS = 2000
# Keywords of a schema that may allow names that its `properties` do not list.
_ALLOW_OTHERS = (
  *("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties"),
  *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"),
)
_TYPES: Mapping[str, Callable[[Any], bool]] = {
  "string": lambda value: isinstance(value, str),
  "number": _is_number,
  "integer": _is_whole,
  "boolean": lambda value: isinstance(value, bool),
  "object": lambda value: isinstance(value, Mapping),
  "array": lambda value: isinstance(value, list),
  "null": lambda value: value is None,
}
_WORDS = {True: "true", False: "false", None: "null"}
_NAMES = {
  "string": "a string",
  "number": "a number",
  "integer": "a whole number",
  "boolean": "true or false",
  "object": "an object",
  "array": "a list",
  "null": "null",
}


def _bound(needed: str, holds: Callable[[Any, Any], bool]) -> Callable[[Any, Any], str | None]:
  """Returns the check of a number; bounds do not concern other values."""

  def check(value: Any, bound: Any) -> str | None:
    is_fine = not _is_number(value) or not _is_number(bound) or holds(value, bound)
    return None if is_fine else f"be {needed} {_shown(bound)}"

  return check


def _length(
  needed: str, kind: type, holds: Callable[[int, Any], bool]
) -> Callable[[Any, Any], str | None]:
  """Returns the check of the length of a string or list."""

  def check(value: Any, bound: Any) -> str | None:
    is_fine = not isinstance(value, kind) or not _is_number(bound) or holds(len(value), bound)
    unit = "characters" if kind is str else "items"
    return None if is_fine else f"have {needed} {_shown(bound)} {unit}"

  return check


def _one_of(value: Any, known: Any) -> str | None:
  is_fine = not isinstance(known, list | tuple) or any(_equal(value, each) for each in known)
  return None if is_fine else f"be one of {_words(known)}"


# Keyword → function (value, bound) that returns what is needed; None: the value is fine.
_CHECKS: Mapping[str, Callable[[Any, Any], str | None]] = {
  "enum": _one_of,
  "const": lambda value, known: None if _equal(value, known) else f"be {_words([known])}",
  "minimum": _bound("at least", lambda value, bound: value >= bound),
  "maximum": _bound("at most", lambda value, bound: value <= bound),
  "exclusiveMinimum": _bound("above", lambda value, bound: value > bound),
  "exclusiveMaximum": _bound("below", lambda value, bound: value < bound),
  "multipleOf": _bound("a multiple of", _is_multiple),
  "minLength": _length("at least", str, lambda length, bound: length >= bound),
  "maxLength": _length("at most", str, lambda length, bound: length <= bound),
  "minItems": _length("at least", list, lambda length, bound: length >= bound),
  "maxItems": _length("at most", list, lambda length, bound: length <= bound),
}
