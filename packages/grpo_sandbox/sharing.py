"""Objects that a test and a program share.

In plain Python a test and a program hold the same list; here, each has its own copy. Both sides
number the objects that occur in their messages, in the order in which they occur. An object
that occurs again is sent as its place and stays one object. Each side reports its changes in place
with its next message.

An object is forgotten as soon as only one side holds it, because then nobody can see the two
copies.
"""

import collections
import operator
import sys
import types
from collections.abc import Iterable
from typing import Any


class Shared:
  """The shared objects of one side, by their places."""

  def __init__(self):
    self._objects: list[Any] = []
    self._places: dict[int, int] = {}  # id of an object → its place.
    self._known: dict[int, Any] = {}  # place → contents, as the other side knows them.

  def __len__(self) -> int:
    return len(self._objects)

  def __getitem__(self, place: int) -> Any:
    return self._objects[place]

  def add(self, value: Any) -> None:
    """Gives an object the next place."""
    self._places[id(value)] = len(self._objects)
    self._objects.append(value)

  def place(self, value: Any) -> int | None:
    """Returns the place of an object; None if it has no place."""
    return self._places.get(id(value))

  def note(self, places: Iterable[int]) -> None:
    """Records the present contents of some objects as what the other side knows."""
    for place in places:
      self._known[place] = contents(self._objects[place])

  def has_changed(self, place: int) -> bool:
    """Returns whether an object differs from what the other side knows; False if never noted."""
    known = self._known.get(place)
    if known is None:
      return False
    now = contents(self._objects[place])
    if isinstance(now, bytes):
      return now != known
    return len(now) != len(known) or not all(map(operator.is_, now, known))

  def cut(self, size: int) -> None:
    """Forgets the objects from a place on."""
    self.forget(range(size, len(self._objects)))

  def forget(self, places: Iterable[int]) -> None:
    """Forgets some objects; those after them move up."""
    dropped = set(places)
    if not dropped:
      return
    left = [place for place in range(len(self._objects)) if place not in dropped]
    self._known = {new: self._known[old] for new, old in enumerate(left) if old in self._known}
    self._objects = [self._objects[place] for place in left]
    self._places = {id(value): place for place, value in enumerate(self._objects)}

  def lonely(self, start: int, end: int) -> list[int]:
    """Returns the places, from `start` and before `end`, of objects held nowhere else here.

    They are dropped in the process: call `forget` afterwards. An object precedes those that it
    contains, so that these have lost their holder when they are checked.
    """
    found = []
    for place in range(start, end):
      if not is_mutable(self._objects[place]) or _holders(self._objects, place) == _ALONE:
        self._known.pop(place, None)
        self._objects[place] = None
        found.append(place)
    return found


def is_mutable(value: Any) -> bool:
  """Returns whether an object that has a place can be changed."""
  return not isinstance(value, (tuple, frozenset))


def contents(value: Any) -> Any:
  """Returns what an object holds, one level deep, as a list or bytes that later changes spare."""
  if isinstance(value, list):
    return list.copy(value)
  if isinstance(value, dict):
    return [*dict.keys(value), *dict.values(value)]
  if isinstance(value, bytearray):
    return bytes(value)
  if isinstance(value, set):
    return [*set.__iter__(value)]
  if isinstance(value, collections.deque):
    return [*collections.deque.__iter__(value)]
  if not is_mutable(value):
    return None
  held = attributes(value)
  return [*held, *held.values()]


def refill(value: Any, new: Any) -> None:
  """Replaces what an object holds.

  Args:
    value: Object to change.
    new: Its new items: bytes, pairs of a dictionary or of an instance's attributes, or a list.

  Raises:
    TypeError, ValueError: These are not items of such an object.
  """
  if isinstance(value, list):
    list.__setitem__(value, slice(None), new)
  elif isinstance(value, bytearray):
    value[:] = new
  elif isinstance(value, set):
    set.clear(value)
    set.update(value, new)
  elif isinstance(value, collections.deque):
    collections.deque.clear(value)
    collections.deque.extend(value, new)
  elif isinstance(value, dict):
    dict.clear(value)
    dict.update(value, new)
  elif is_mutable(value):
    set_attributes(value, dict(new))
  else:
    raise TypeError(f"{type(value).__name__} cannot be changed")


def attributes(value: Any) -> dict[str, Any]:
  """Returns the attributes of an instance, from its dictionary and its slots."""
  found = dict(object.__getattribute__(value, "__dict__")) if type(value).__dictoffset__ else {}
  for name in dir(type(value)):
    is_slot = isinstance(_class_entry(type(value), name), types.MemberDescriptorType)
    if is_slot and hasattr(value, name):
      found[name] = object.__getattribute__(value, name)
  return found


def set_attributes(value: Any, new: dict[str, Any]) -> None:
  """Sets the attributes of an instance, except those that would hide behaviour of its class."""
  for name in attributes(value):
    if name not in new and not _is_behaviour(type(value), name):
      object.__delattr__(value, name)
  for name, content in new.items():
    if not _is_behaviour(type(value), name):
      object.__setattr__(value, name, content)


def _class_entry(cls: type, name: str) -> Any:
  """Returns the entry of a name in a class, ignoring descriptors; None if there is none."""
  return next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)


def _is_behaviour(cls: type, name: str) -> bool:
  """Returns whether a class has a method, property or the like of this name, not just a default."""
  found = _class_entry(cls, name)
  is_descriptor = hasattr(found, "__get__") and not isinstance(found, types.MemberDescriptorType)
  return callable(found) or is_descriptor


def _holders(objects: list[Any], place: int) -> int:
  return sys.getrefcount(objects[place])


_ALONE = _holders([object()], 0)
