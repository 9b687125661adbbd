"""Python values as JSON, and messages on a pipe. Reading never executes received data.

Plain values are copied. Instances of subclasses are sent as their plain contents, by the methods of
the plain type, so that an overridden `__eq__`, `__iter__` or `__len__` has no effect on the other
side. Everything else is kept by its owner and sent as a number (`Codec.keep`). A container that
occurs again is sent as its place (`sharing`).
"""

import collections
import enum
import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from grpo_sandbox import sharing

MAX_DEPTH = 400  # depth of nested containers.
_HEADER = 4  # bytes of a message's length.


class TooLarge(Exception):
  """A message is longer than allowed."""


class Closed(Exception):
  """The other side has closed the connection."""


def pack(message: Any, max_bytes: int) -> bytes:
  """Returns the bytes of a message; raises TooLarge if it takes more than `max_bytes`."""
  body = json.dumps(message, separators=(",", ":")).encode()
  if len(body) > max_bytes:
    raise TooLarge(f"a message of {len(body)} bytes, more than {max_bytes}")
  return len(body).to_bytes(_HEADER, "little") + body


def send(fd: int, message: Any, max_bytes: int) -> None:
  """Writes one message.

  Raises:
    TooLarge: The message takes more than `max_bytes`.
    Closed: Nobody reads.
  """
  data = memoryview(pack(message, max_bytes))
  try:
    while data:
      data = data[os.write(fd, data) :]
  except BrokenPipeError as error:
    raise Closed from error


def receive(fd: int, max_bytes: int) -> Any:
  """Reads one message; blocks until it has arrived.

  Raises:
    TooLarge: The message announces more than `max_bytes`.
    Closed: The other side has closed the pipe, or sent something other than a message.
  """
  size = int.from_bytes(_read(fd, _HEADER), "little")
  if size > max_bytes:
    raise TooLarge(f"a message of {size} bytes, more than {max_bytes}")
  try:
    return json.loads(_read(fd, size))
  except (ValueError, RecursionError) as error:
    raise Closed(f"not JSON: {error}") from error


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
  """Converts values to JSON and back, for one side."""

  def __init__(self, *, keep: Callable[[Any], Any], find: Callable[[Any], Any]):
    """Defines what happens to values that are not plain.

    Args:
      keep: Function from an object to a JSON value that represents it; raises TypeError to refuse.
      find: Function from a JSON value made by the other side's `keep` to the object.
    """
    self._keep = keep
    self._find = find
    # Classes that both sides have, by name: instances are copied by their attributes, named tuples
    # by their items, members of enums by their names. This side sends those in `sent` and accepts
    # those in `taken`.
    self.sent: dict[str, type] = {}
    self.taken: Mapping[str, type] = {}
    self.objects = sharing.Shared()
    self.met: list[int] = []  # places of objects that occurred again.

  def encode(self, value: Any, depth: int = 0) -> Any:
    """Returns a value as JSON.

    Raises:
      TypeError: The value can be neither copied nor kept.
      RecursionError: The value is nested too deeply.
    """
    pack = _PLAIN.get(type(value))
    if pack is not None:
      return pack(value)
    place = self.objects.place(value)
    if place is not None:
      self.met.append(place)
      return {"same": place}
    if depth > MAX_DEPTH:
      raise RecursionError("a value is nested too deeply")
    if isinstance(value, list):
      self.objects.add(value)
      return [self.encode(v, depth + 1) for v in list.__iter__(value)]
    for kind, pack in _ATOMS:
      if isinstance(value, kind):
        return pack(value)
    if isinstance(value, bytearray):
      self.objects.add(value)
      return {"bytearray": _bytes(value)}
    name = type(value).__name__
    is_shared = self.sent.get(name) is type(value)
    for kind, (tag, items) in _CONTAINERS.items():
      if isinstance(value, kind):
        if sharing.is_mutable(value):
          self.objects.add(value)
        encoded = [self.encode(v, depth + 1) for v in items(value)]
        if not sharing.is_mutable(value):
          self.objects.add(value)
        return {"record": [name, encoded]} if is_shared and kind is tuple else {tag: encoded}
    if is_shared and isinstance(value, enum.Enum):
      return {"member": [name, value.name]}
    if is_shared:
      self.objects.add(value)
      return {"instance": [name, self._attributes(value, depth)]}
    if type(value) in _VIEWS:
      return {_VIEWS[type(value)]: [self.encode(v, depth + 1) for v in value]}
    if type(value).__module__ in _LIBRARY_MODULES:
      for kind, pack in _library():
        if isinstance(value, kind):
          return pack(value)
    if type(value).__module__ == "numpy" and "tolist" in dir(value):
      # Arrays are sent as lists, their numbers as numbers.
      return self.encode(value.tolist(), depth + 1)
    return {"kept": self._keep(value)}

  def decode(self, data: Any) -> Any:
    """Returns the value of a JSON representation.

    Raises:
      ValueError: The JSON does not represent a value.
    """
    if isinstance(data, list):
      made: list[Any] = []
      self.objects.add(made)
      made += [self.decode(v) for v in data]
      return made
    if not isinstance(data, dict):
      return data
    try:
      ((tag, content),) = data.items()
      if tag == "same":
        self.met.append(content)
        return self.objects[content]
      if tag == "kept":
        return self._find(content)
      if tag in _UNPACK_ATOM:
        return _UNPACK_ATOM[tag](content)
      if tag in _UNPACK_VIEW:
        return _UNPACK_VIEW[tag]([self.decode(v) for v in content])
      return self._container(tag, content)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
      raise ValueError(f"not the JSON of a value: {str(data):.80}") from error

  def changes(self, places: Iterable[int]) -> list[Any]:
    """Returns changes in the objects at some places, as JSON.

    Places that are appended to `places` in the meantime count as well.
    """
    found = []
    done = set()
    for place in places:
      if place not in done and self.objects.has_changed(place):
        found.append([place, self._items(self.objects[place])])
        self.objects.note([place])
      done.add(place)
    return found

  def apply(self, changes: list[Any]) -> None:
    """Applies the changes of the other side.

    Raises:
      ValueError: The JSON does not represent changes.
    """
    try:
      for place, items in changes:
        value = self.objects[place]
        if isinstance(value, bytearray):
          new = items.encode("latin-1")
        elif isinstance(value, (list, set, collections.deque)):
          new = [self.decode(v) for v in items]
        else:
          new = _pairs([self.decode(v) for v in items])
        sharing.refill(value, new)
        self.objects.note([place])
    except (AttributeError, LookupError, TypeError) as error:
      raise ValueError(f"not the JSON of changes: {str(changes):.80}") from error

  def _items(self, value: Any) -> Any:
    if isinstance(value, bytearray):
      return _bytes(value)
    for kind, (_, items) in _CONTAINERS.items():
      if isinstance(value, kind):
        return [self.encode(v, 1) for v in items(value)]
    return self._attributes(value, 0)

  def _attributes(self, value: Any, depth: int) -> list[Any]:
    held = sharing.attributes(value).items()
    return [self.encode(v, depth + 1) for pair in held for v in pair]

  def _container(self, tag: str, content: Any) -> Any:
    """Returns a container as JSON; a mutable one gets its place before its content."""
    if tag == "member":
      return self.taken[content[0]].__members__[content[1]]
    if tag in _MUTABLE:
      made = bytearray(content.encode("latin-1")) if tag == "bytearray" else _MUTABLE[tag]()
      self.objects.add(made)
      if tag != "bytearray":
        items = [self.decode(v) for v in content]
        sharing.refill(made, _pairs(items) if tag == "dict" else items)
      return made
    if tag == "instance":
      made = object.__new__(self.taken[content[0]])
      self.objects.add(made)
      sharing.refill(made, _pairs([self.decode(v) for v in content[1]]))
      return made
    items = [self.decode(v) for v in (content[1] if tag == "record" else content)]
    made = tuple.__new__(self.taken[content[0]], items) if tag == "record" else _FIXED[tag](items)
    self.objects.add(made)
    return made


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
  return list(zip(items[::2], items[1::2], strict=True))


def _library() -> Iterator[tuple[type, Callable[[Any], Any]]]:
  """Yields the classes of _LIBRARY whose modules are loaded."""
  for module, name, pack in _LIBRARY:
    if module in sys.modules:
      yield vars(sys.modules[module])[name], pack


def _int(value: int) -> Any:
  plain = int.__int__(value)
  return plain if -(2**53) < plain < 2**53 else {"int": hex(plain)}  # hex has no digit limit.


def _bytes(value: bytes | bytearray) -> str:
  return bytes(value).decode("latin-1")


def _float(value: float) -> Any:
  is_finite = value == value and abs(value) != float("inf")
  return float(value) if is_finite else {"float": float.hex(value)}


# The most frequent types.
_PLAIN: dict[type, Callable[[Any], Any]] = {
  type(None): lambda v: v,
  bool: lambda v: v,
  int: _int,
  float: _float,
  str: lambda v: v,
}
# The order matters: datetime is a date. Subclasses are handled by the method of the plain type.
_ATOMS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
  (int, _int),
  (float, _float),
  (str, lambda v: str.__str__(v)),
  (bytes, lambda v: {"bytes": _bytes(v)}),
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
  list: ("list", list.__iter__),
  tuple: ("tuple", tuple.__iter__),
  dict: ("dict", lambda v: itertools.chain.from_iterable(dict.items(v))),
  set: ("set", set.__iter__),
  frozenset: ("frozenset", frozenset.__iter__),
  collections.deque: ("deque", collections.deque.__iter__),
}
_UNPACK_ATOM: dict[str, Callable[[Any], Any]] = {
  "int": lambda c: int(c, 16),
  "float": float.fromhex,
  "bytes": lambda c: c.encode("latin-1"),
  "complex": lambda c: complex(*map(float.fromhex, c)),
  "range": lambda c: range(*(int(x, 16) for x in c)),
  "decimal": lambda c: importlib.import_module("decimal").Decimal(c),
  "fraction": lambda c: importlib.import_module("fractions").Fraction(*(int(x, 16) for x in c)),
  "datetime": lambda c: importlib.import_module("datetime").datetime.fromisoformat(c),
  "date": lambda c: importlib.import_module("datetime").date.fromisoformat(c),
  "timedelta": lambda c: importlib.import_module("datetime").timedelta(*c),
}
_MUTABLE: dict[str, Callable[[], Any]] = {
  "dict": dict,
  "set": set,
  "deque": collections.deque,
  "bytearray": bytearray,
}
_FIXED: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "frozenset": frozenset}
_VIEWS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
_UNPACK_VIEW: dict[str, Callable[[list[Any]], Any]] = {
  "keys": lambda c: dict.fromkeys(c).keys(),
  "values": lambda c: dict(enumerate(c)).values(),
  "items": lambda c: dict(c).items(),
}
