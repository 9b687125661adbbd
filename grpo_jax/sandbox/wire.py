"""Python values as JSON, and messages on a pipe. Reading runs nothing that was sent.

Plain values are copied. Of subclasses the plain contents are sent, by the methods of the plain
type, so that an overridden `__eq__`, `__iter__` or `__len__` has no say on the other side. All
else is kept by its owner and sent as a number (`Codec.keep`).
"""

import collections
import enum
import importlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

MAX_DEPTH = 400  # of nested containers.
_HEADER = 4  # bytes of a message's length.


class TooLarge(Exception):
  """A message is longer than allowed."""


class Closed(Exception):
  """The other side has gone."""


def pack(message: Any, max_bytes: int) -> bytes:
  """Returns the bytes of a message; raises TooLarge if it takes more than `max_bytes`."""
  body = json.dumps(message, separators=(",", ":")).encode()
  if len(body) > max_bytes:
    raise TooLarge(f"a message of {len(body)} bytes, more than {max_bytes}")
  return len(body).to_bytes(_HEADER, "little") + body


def send(fd: int, message: Any, max_bytes: int) -> None:
  """Writes one message.

  Raises:
    TooLarge: it takes more than `max_bytes`.
    Closed: nobody reads.
  """
  data = memoryview(pack(message, max_bytes))
  try:
    while data:
      data = data[os.write(fd, data) :]
  except BrokenPipeError as error:
    raise Closed from error


def receive(fd: int, max_bytes: int) -> Any:
  """Reads one message; blocks until it is there.

  Raises:
    TooLarge: it announces more than `max_bytes`.
    Closed: the other side has gone, or what it sent is no message.
  """
  size = int.from_bytes(_read(fd, _HEADER), "little")
  if size > max_bytes:
    raise TooLarge(f"a message of {size} bytes, more than {max_bytes}")
  try:
    return json.loads(_read(fd, size))
  except (ValueError, RecursionError) as error:
    raise Closed(f"no JSON: {error}") from error


def _read(fd: int, size: int) -> bytes:
  pieces = []
  while size:
    piece = os.read(fd, min(size, 1 << 20))
    if not piece:
      raise Closed
    pieces.append(piece)
    size -= len(piece)
  return b"".join(pieces)


class Codec:
  """Values ↔ JSON, for one side."""

  def __init__(
    self,
    *,
    keep: Callable[[Any], Any],
    find: Callable[[Any], Any],
    shared: dict[str, type] | None = None,
  ):
    """Describes what is not plain.

    Args:
      keep: object → a JSON value that stands for it; raises TypeError to refuse.
      find: that JSON value, as the other side's `keep` made it, → object.
      shared: classes that both sides have, by name: instances are copied by their
        attributes, named tuples by their items, members of enums by their names. It may be
        filled later.
    """
    self._keep = keep
    self._find = find
    self.shared = {} if shared is None else shared

  def encode(self, value: Any, depth: int = 0) -> Any:
    """Returns the JSON of a value.

    Raises:
      TypeError: it can be neither copied nor kept.
      RecursionError: it is nested too deeply, or contains itself.
    """
    if depth > MAX_DEPTH:
      raise RecursionError("a value is nested too deeply")
    if value is None or value is True or value is False:
      return value
    for kind, pack in _ATOMS:
      if isinstance(value, kind):
        return pack(value)
    if isinstance(value, list):
      return [self.encode(v, depth + 1) for v in list.__iter__(value)]
    name = type(value).__name__
    is_shared = self.shared.get(name) is type(value)
    if is_shared and isinstance(value, tuple):
      return {"record": [name, self.encode(list(tuple.__iter__(value)), depth + 1)]}
    for kind, (tag, items) in _CONTAINERS.items():
      if isinstance(value, kind):
        return {tag: [self.encode(v, depth + 1) for v in items(value)]}
    if is_shared and isinstance(value, enum.Enum):
      return {"member": [name, value.name]}
    if is_shared:
      return {"instance": [name, self.encode(_attributes(value), depth + 1)]}
    if type(value).__module__ in _LIBRARY_MODULES:
      for kind, pack in _library():
        if isinstance(value, kind):
          return pack(value)
    if type(value).__module__ == "numpy" and "tolist" in dir(value):
      return self.encode(
        value.tolist(), depth + 1
      )  # arrays cross as lists, their numbers as numbers.
    return {"kept": self._keep(value)}

  def decode(self, data: Any) -> Any:
    """Returns the value of a JSON.

    Raises:
      ValueError: it is no value's JSON.
    """
    if isinstance(data, list):
      return [self.decode(v) for v in data]
    if not isinstance(data, dict):
      return data
    try:
      ((tag, content),) = data.items()
      if tag == "kept":
        return self._find(content)
      if tag in ("instance", "record", "member"):
        return self._shared_value(tag, *content)
      if tag in _UNPACK_ATOM:
        return _UNPACK_ATOM[tag](content)
      return _UNPACK_CONTAINER[tag]([self.decode(v) for v in content])
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
      raise ValueError(f"no value's JSON: {str(data):.80}") from error

  def _shared_value(self, tag: str, name: str, content: Any) -> Any:
    """An instance of a shared class, without attributes that would hide what the class does."""
    cls = self.shared[name]
    if tag == "record":
      return tuple.__new__(cls, self.decode(content))
    if tag == "member":
      return cls.__members__[content]
    made = object.__new__(cls)
    for attribute, value in self.decode(content).items():
      if not _is_behaviour(cls, attribute):
        object.__setattr__(made, attribute, value)
    return made


def _attributes(value: Any) -> dict[str, Any]:
  """The attributes of an instance, in its dictionary and its slots."""
  found = dict(object.__getattribute__(value, "__dict__")) if type(value).__dictoffset__ else {}
  for name in dir(type(value)):
    is_slot = isinstance(_of_class(type(value), name), types.MemberDescriptorType)
    if is_slot and hasattr(value, name):
      found[name] = object.__getattribute__(value, name)
  return found


def _of_class(cls: type, name: str) -> Any:
  """What stands under a name in a class, before descriptors have their say; None: nothing."""
  return next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)


def _is_behaviour(cls: type, name: str) -> bool:
  """Tells whether a class has a method, a property or the like of this name; no mere default."""
  found = _of_class(cls, name)
  is_descriptor = hasattr(found, "__get__") and not isinstance(found, types.MemberDescriptorType)
  return callable(found) or is_descriptor


def _library() -> Iterator[tuple[type, Callable[[Any], Any]]]:
  """Yields the classes of _LIBRARY whose modules are loaded."""
  for module, name, pack in _LIBRARY:
    if module in sys.modules:
      yield vars(sys.modules[module])[name], pack


def _int(value: int) -> Any:
  plain = int.__int__(value)
  return plain if -(2**53) < plain < 2**53 else {"int": hex(plain)}  # no limit of digits.


def _bytes(value: bytes | bytearray) -> str:
  return bytes(value).decode("latin-1")


# In this order: datetime is a date. Texts are sent as texts, by the method of the plain type.
_ATOMS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
  (int, _int),
  (float, lambda v: {"float": float.hex(v)} if v != v or abs(v) == float("inf") else float(v)),
  (str, lambda v: str.__str__(v)),
  (bytes, lambda v: {"bytes": _bytes(v)}),
  (bytearray, lambda v: {"bytearray": _bytes(v)}),
  (complex, lambda v: {"complex": [float.hex(v.real), float.hex(v.imag)]}),
  (range, lambda v: {"range": [hex(v.start), hex(v.stop), hex(v.step)]}),
)
# Classes of modules that a side imports only if the program or a test does.
_LIBRARY: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
  ("decimal", "Decimal", lambda v: {"decimal": str(v)}),
  ("fractions", "Fraction", lambda v: {"fraction": [hex(v.numerator), hex(v.denominator)]}),
  ("datetime", "datetime", lambda v: {"datetime": v.isoformat()}),
  ("datetime", "date", lambda v: {"date": v.isoformat()}),
  ("datetime", "timedelta", lambda v: {"timedelta": [v.days, v.seconds, v.microseconds]}),
)
_LIBRARY_MODULES = {module for module, *_ in _LIBRARY} | {"_decimal", "_pydecimal"}
_CONTAINERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
  tuple: ("tuple", tuple.__iter__),
  dict: ("dict", lambda v: [tuple(pair) for pair in dict.items(v)]),
  set: ("set", set.__iter__),
  frozenset: ("frozenset", frozenset.__iter__),
  collections.deque: ("deque", collections.deque.__iter__),
}
_UNPACK_ATOM: dict[str, Callable[[Any], Any]] = {
  "int": lambda c: int(c, 16),
  "float": float.fromhex,
  "bytes": lambda c: c.encode("latin-1"),
  "bytearray": lambda c: bytearray(c.encode("latin-1")),
  "complex": lambda c: complex(*map(float.fromhex, c)),
  "range": lambda c: range(*(int(x, 16) for x in c)),
  "decimal": lambda c: importlib.import_module("decimal").Decimal(c),
  "fraction": lambda c: importlib.import_module("fractions").Fraction(*(int(x, 16) for x in c)),
  "datetime": lambda c: importlib.import_module("datetime").datetime.fromisoformat(c),
  "date": lambda c: importlib.import_module("datetime").date.fromisoformat(c),
  "timedelta": lambda c: importlib.import_module("datetime").timedelta(*c),
}
_UNPACK_CONTAINER: dict[str, Callable[[list[Any]], Any]] = {
  "tuple": tuple,
  "dict": dict,
  "set": set,
  "frozenset": frozenset,
  "deque": collections.deque,
}
