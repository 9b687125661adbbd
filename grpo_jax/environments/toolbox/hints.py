"""Type hints as JSON schemas, and JSON values as the types of hints. Pure."""

import collections.abc
import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from grpo_jax.environments.toolbox import schemas


@dataclasses.dataclass(frozen=True, slots=True)
class Typed:
  """A type of parameters."""

  schema: dict[str, Any]
  convert: Callable[[Any], Any]  # makes a value of the type from a JSON value that fits.


def typed(hint: Any, where: str) -> Typed:
  """Returns the schema of a type hint.

  Args:
    hint: Type hint: str, int, float, bool, None, Any, Literal, an Enum, a union, list, tuple, set,
      dict with string keys, their abstract classes, a TypedDict, a dataclass, or Annotated with a
      description.
    where: Name of the parameter, for errors.

  Raises:
    ValueError: The hint has no schema.
  """
  if hint in _PLAIN:
    return _PLAIN[hint]
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin is typing.Annotated:
    return _annotated(typed(arguments[0], where), arguments[1:])
  if origin is typing.Literal:
    return _choice(arguments, where)
  if origin in (typing.Union, types.UnionType):
    return _union([typed(each, where) for each in arguments])
  if typing.is_typeddict(hint):
    return _typed_dict(hint, where)
  kind = origin or hint
  if isinstance(kind, type):
    if issubclass(kind, enum.Enum):
      found = _choice([member.value for member in kind], where)
      return Typed(found.schema, kind)
    if dataclasses.is_dataclass(kind):
      return _dataclass(kind, where)
    if kind is tuple:
      return _tuple(arguments, where)
    if issubclass(kind, collections.abc.Mapping):
      return _mapping(kind, arguments, where)
    if kind in _CONTAINERS:
      return _list(_CONTAINERS[kind], arguments, where)
  raise ValueError(f"{where}: {_named(hint)} has no JSON schema; docs/tools.md lists the types")


def _annotated(found: Typed, notes: tuple[Any, ...]) -> Typed:
  """Takes the description from a string, or from an object with a description."""
  for note in notes:
    text = note if isinstance(note, str) else getattr(note, "description", None)
    if isinstance(text, str):
      return Typed({**found.schema, "description": text}, found.convert)
  return found


def _choice(values: Any, where: str) -> Typed:
  kinds = {type(value) for value in values}
  if not kinds <= {str, int, bool, float, type(None)}:
    raise ValueError(f"{where}: {[*values]} are not all strings, numbers, booleans or None")
  schema: dict[str, Any] = {"enum": [*values]}
  if len(kinds) == 1:
    schema = {**_PLAIN[kinds.pop()].schema, **schema}
  return Typed(schema, _same)


def _union(parts: list[Typed]) -> Typed:
  names = [part.schema["type"] for part in parts if part.schema.keys() == {"type"}]
  is_plain = len(names) == len(parts) and all(isinstance(name, str) for name in names)
  schema = {"type": names} if is_plain else {"anyOf": [part.schema for part in parts]}

  def convert(value: Any) -> Any:
    exact = [part for part in parts if part.schema.get("type") == "integer" and type(value) is int]
    for part in (*exact, *parts):
      if schemas.fits(value, part.schema):
        return part.convert(value)
    raise ValueError("the value fits none of the types of a union")

  return Typed(schema, convert)


def _list(make: Callable[[Any], Any], arguments: tuple[Any, ...], where: str) -> Typed:
  if not arguments:
    return Typed({"type": "array"}, make)
  each = typed(arguments[0], where)
  return Typed(
    {"type": "array", "items": each.schema}, lambda values: make(map(each.convert, values))
  )


def _tuple(arguments: tuple[Any, ...], where: str) -> Typed:
  if not arguments or arguments[-1] is Ellipsis:
    return _list(tuple, arguments[:1], where)
  parts = [typed(each, where) for each in arguments]
  length = {"minItems": len(parts), "maxItems": len(parts)}
  schema = {"type": "array", "prefixItems": [part.schema for part in parts], **length}
  return Typed(
    schema, lambda values: tuple(p.convert(v) for p, v in zip(parts, values, strict=True))
  )


def _mapping(kind: type, arguments: tuple[Any, ...], where: str) -> Typed:
  if kind not in _MAPPINGS:
    raise ValueError(f"{where}: {_named(kind)} has no JSON schema; docs/tools.md lists the types")
  if not arguments:
    return Typed({"type": "object"}, dict)
  if arguments[0] is not str:
    raise ValueError(f"{where}: the keys of an object are strings, not {_named(arguments[0])}")
  each = typed(arguments[1], where)
  return Typed(
    {"type": "object", "additionalProperties": each.schema},
    lambda values: {name: each.convert(value) for name, value in values.items()},
  )


def _typed_dict(hint: Any, where: str) -> Typed:
  required = hint.__required_keys__
  parts = {
    name: typed(_without_mark(each), f"{where}.{name}")
    for name, each in typing.get_type_hints(hint, include_extras=True).items()
  }
  return _object(parts, [name for name in parts if name in required], dict)


def _without_mark(hint: Any) -> Any:
  """Returns the hint inside of Required[…] or NotRequired[…]."""
  is_marked = typing.get_origin(hint) in (typing.Required, typing.NotRequired)
  return typing.get_args(hint)[0] if is_marked else hint


def _dataclass(kind: Any, where: str) -> Typed:
  hints = typing.get_type_hints(kind, include_extras=True)
  fields = [field for field in dataclasses.fields(kind) if field.init]
  parts = {field.name: typed(hints[field.name], f"{where}.{field.name}") for field in fields}
  missing = dataclasses.MISSING
  required = [
    field.name for field in fields if field.default is missing and field.default_factory is missing
  ]
  return _object(parts, required, lambda values: kind(**values))


def _object(
  parts: Mapping[str, Typed], required: list[str], make: Callable[[dict[str, Any]], Any]
) -> Typed:
  schema = {
    "type": "object",
    "properties": {name: part.schema for name, part in parts.items()},
    "required": required,
    "additionalProperties": False,
  }
  return Typed(schema, lambda values: make({n: parts[n].convert(v) for n, v in values.items()}))


def _same(value: Any) -> Any:
  return value


def _named(hint: Any) -> str:
  return getattr(hint, "__qualname__", None) or str(hint)


_PLAIN: Mapping[Any, Typed] = {
  Any: Typed({}, _same),
  object: Typed({}, _same),
  str: Typed({"type": "string"}, _same),
  bool: Typed({"type": "boolean"}, _same),
  int: Typed({"type": "integer"}, int),  # 3.0 is a whole number in JSON.
  float: Typed({"type": "number"}, float),
  None: Typed({"type": "null"}, _same),
  type(None): Typed({"type": "null"}, _same),
}
_CONTAINERS: Mapping[Any, Callable[[Any], Any]] = {
  list: list,
  set: set,
  frozenset: frozenset,
  collections.abc.Sequence: list,
  collections.abc.Iterable: list,
  collections.abc.Collection: list,
  collections.abc.MutableSequence: list,
  collections.abc.Set: set,
}
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
