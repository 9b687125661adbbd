"""The judge's side of the link: stand-ins for the program's functions and objects.

A stand-in never passes an expected value to the program: comparing it with a plain value, or
computing with one, happens here, and `in` iterates. Only two objects of the program are
compared by the program.
"""

import builtins
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from grpo_sandbox import wire


class Gone(BaseException):
  """The program has ended, or violated the protocol. No test can catch it as an Exception."""


class ProgramError(Exception):
  """The program raised something that is not a built-in Exception."""


class Link:
  """Asks the program one question at a time."""

  def __init__(self, requests: int, replies: int, max_bytes: int):
    """Takes two file descriptors and the length of the longest message."""
    self._requests, self._replies, self._max_bytes = requests, replies, max_bytes
    self._callbacks: list[Callable[..., Any]] = []
    self._remotes: dict[int, Remote] = {}
    self.codec = wire.Codec(keep=self._keep, find=self._find)
    self._objects = self.codec.objects
    # What the program does not know yet: changes, and places of objects that are forgotten.
    self._news: list[list[Any]] = []
    self.errors: dict[str, type] = {}  # classes of the tests that a program may raise, by name.
    self.names: set[str] = set()
    self.questions = 0
    self.gone = ""  # why there will be no more answers.
    self.over = ""  # "memory" or "output": the limit that the program reached last.

  def load(self, sources: list[str]) -> dict[str, Any]:
    """Runs the program.

    Returns:
      {} or the error of the program: {"error": names of classes, "message": text, "compile": True
      if it is not Python}.
    """
    taken, sent = sorted(self.codec.sent), sorted(self.codec.taken)  # it takes what we send.
    answer = self._ask({"do": "load", "sources": sources, "taken": taken, "sent": sent})
    names = answer.get("names", [])
    self.names = {n for n in names if isinstance(n, str)}
    return answer if "error" in answer else {}

  def name(self, name: str) -> Any:
    """Returns a global value of the program."""
    return self._value({"do": "name", "name": name})

  def call(self, target: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an object of the program; arguments that it changes in place are changed here."""
    return self._value({"do": "call", "target": target, "kwargs": kwargs}, *args)

  def attribute(self, target: int, name: str) -> Any:
    """Returns an attribute of an object of the program."""
    return self._value({"do": "attribute", "target": target, "name": name})

  def method(self, target: int, name: str, *args: Any) -> Any:
    """Applies a built-in function, such as len, to an object of the program."""
    return self._value({"do": "method", "target": target, "name": name, "kwargs": {}}, *args)

  def iterate(self, target: int) -> Iterator[Any]:
    """Yields what an iterator of the program yields."""
    while (value := self._value({"do": "next", "target": target})) is not _END:
      yield value

  def _value(self, request: dict[str, Any], *args: Any) -> Any:
    """Asks for a value; objects shared by both sides stay the same objects.

    Args:
      request: Question; its "kwargs", if it has any, are values to send along.
      *args: Further values to send along.
    """
    known = len(self._objects)
    try:
      changes = self.codec.changes(range(known))
    except BaseException:
      self._objects.cut(known)
      raise
    forgotten = self._objects.lonely(0, known)
    self._objects.forget(forgotten)
    if changes or forgotten:
      self._news.append([changes, forgotten])
    size = len(self._objects)
    try:
      if "kwargs" in request:
        request["args"] = [self.codec.encode(value) for value in args]
        kwargs = request["kwargs"].items()
        request["kwargs"] = {name: self.codec.encode(value) for name, value in kwargs}
    except BaseException:
      self._objects.cut(size)
      raise
    request["news"], self._news = self._news, []
    answer = self._ask(request)
    value = self._understood(answer, known - len(forgotten))
    if "error" in answer:
      raise self._error(answer)
    return value

  def _understood(self, answer: dict[str, Any], start: int) -> Any:
    """Returns the value in an answer, and applies the changes that the program made in place.

    Args:
      answer: Answer of the program.
      start: First place of the objects of this question and answer.
    """
    if "lost" in answer:
      self._objects.cut(0)
      return None
    try:
      value = _END if "end" in answer else self.codec.decode(answer.get("value"))
      self.codec.apply(answer.get("changes", []))
      held = set(answer.get("held", []))
      self._objects.forget([p for p in range(start, len(self._objects)) if p not in held])
      self._objects.note(range(len(self._objects)))
    except (LookupError, TypeError, ValueError, RecursionError, MemoryError) as error:
      self._leave(f"not understood: {error}")
    return value

  def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
    if self.gone:
      raise Gone(self.gone)
    self.questions += 1
    try:
      wire.send(self._requests, request, self._max_bytes)
      while True:
        answer = wire.receive(self._replies, self._max_bytes)
        if not isinstance(answer, dict):
          raise wire.Closed("the message is not an answer")
        if "callback" not in answer:
          return answer
        wire.send(self._requests, self._called_back(answer), self._max_bytes)
    except wire.TooLarge as error:
      self.over = "output"
      self._leave(str(error))
    except wire.Closed as error:
      self._leave(str(error) or "the program has ended")
    except (LookupError, TypeError, ValueError) as error:
      self._leave(f"not understood: {error}")

  def _called_back(self, answer: dict[str, Any]) -> dict[str, Any]:
    """Calls a function of the test for the program, or asks an iterator of the test."""
    function = self._callbacks[answer["callback"]]
    self.codec.met = []
    size = len(self._objects)
    args, kwargs = self.codec.decode(answer["args"]), self.codec.decode(answer["kwargs"])
    self.codec.apply(answer["changes"])
    passed = [*self.codec.met, *range(size, len(self._objects))]
    self._objects.note(passed)
    size = len(self._objects)
    try:
      value = function(*args, **kwargs)
      return {"value": self.codec.encode(value), "changes": self.codec.changes(passed)}
    except StopIteration:
      return {"end": True}
    except Exception as error:  # the test's function may raise anything, for the program to see.
      self._objects.cut(size)
      return {"raised": f"{type(error).__name__}: {error}"[:200]}

  def _leave(self, reason: str) -> NoReturn:
    self.gone = reason[:200]
    raise Gone(self.gone)

  def _error(self, answer: dict[str, Any]) -> Exception:
    """Returns what the program raised; records the limit that it reached, if any."""
    error = _exception(answer, self.errors)
    self.over = "memory" if isinstance(error, MemoryError) else self.over
    self.over = "output" if str(error).startswith("TooLarge:") else self.over
    return error

  def _keep(self, value: Any) -> Any:
    """Refers the program to its own object, or to a function or an iterator of ours."""
    if isinstance(value, Remote):
      return object.__getattribute__(value, "_target")
    is_iterator = isinstance(value, Iterator)
    if not callable(value) and not is_iterator:
      raise TypeError(f"a test cannot pass {type(value).__name__} to the program")
    self._callbacks.append(value.__next__ if is_iterator else value)
    return {"callback": len(self._callbacks) - 1, "is_iterator": is_iterator}

  def _find(self, target: Any) -> "Remote":
    """Returns the stand-in for an object of the program: always the same one."""
    number = int(target)
    return self._remotes.setdefault(number, Remote(self, number))


_END = object()  # end of an iteration.


class Remote:
  """An object of the program: a function, a class, an instance, a generator."""

  def __init__(self, link: Link, target: int):
    """Represents the object that the program keeps under the number `target`."""
    object.__setattr__(self, "_link", link)
    object.__setattr__(self, "_target", target)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self._link.call(self._target, args, kwargs)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__") and name not in ("__name__", "__doc__"):
      raise AttributeError(name)  # unsupported protocols: copying, pickling, ...
    return self._link.attribute(self._target, name)

  def __setattr__(self, name: str, value: Any) -> None:
    raise TypeError("a test cannot set attributes of the program's objects")

  def __len__(self) -> int:
    return self._plain("len", int)

  def __bool__(self) -> bool:
    return self._plain("bool", bool)

  def __int__(self) -> int:
    return self._plain("int", int)

  def __float__(self) -> float:
    return self._plain("float", float)

  def __str__(self) -> str:
    return self._plain("str", str)

  def __repr__(self) -> str:
    return self._plain("repr", str)

  def __iter__(self) -> Iterator[Any]:
    iterator = self._link.method(self._target, "iter")
    if isinstance(iterator, Remote):
      return self._link.iterate(object.__getattribute__(iterator, "_target"))
    raise ProgramError("__iter__ did not return an iterator")

  def __next__(self) -> Any:
    for value in self._link.iterate(self._target):
      return value
    raise StopIteration

  def __getitem__(self, key: Any) -> Any:
    return self._link.method(self._target, "getitem", key)

  def __setitem__(self, key: Any, value: Any) -> None:
    self._link.method(self._target, "setitem", key, value)

  def __hash__(self) -> int:
    return hash(self._target)

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, Remote):
      return False  # an expected value must not be sent to the program.
    return bool(self._link.method(self._target, "eq", other) is True)

  def __lt__(self, other: object) -> Any:
    return self._with("lt", other)

  def __add__(self, other: object) -> Any:
    return self._with("add", other)

  def __sub__(self, other: object) -> Any:
    return self._with("sub", other)

  def __mul__(self, other: object) -> Any:
    return self._with("mul", other)

  def _with(self, name: str, other: object) -> Any:
    if not isinstance(other, Remote):
      return NotImplemented
    return self._link.method(self._target, name, other)

  def _plain(self, name: str, kind: type) -> Any:
    value = self._link.method(self._target, name)
    if type(value) is not kind:
      raise ProgramError(f"{name}() gave {type(value).__name__}")
    return value


# StopIteration and SystemExit are never raised as themselves: `all(map(f, cases))`
# would be true for a program that raises StopIteration.
_NOT_RAISED = ("StopIteration", "StopAsyncIteration")


def _exception(answer: dict[str, Any], shared: Mapping[str, type]) -> Exception:
  """Returns what the program raised, as the nearest exception that the tests know."""
  names, message = answer["error"], str(answer.get("message", ""))
  for name in names if isinstance(names, list) else []:
    kind = {**vars(builtins), **shared}.get(str(name))
    if name in _NOT_RAISED or kind is Exception:
      break
    if isinstance(kind, type) and issubclass(kind, Exception):
      try:
        return kind(message)
      except TypeError:  # it needs more arguments, like UnicodeDecodeError.
        if name in shared:
          return kind.__new__(kind, message)
  return ProgramError(f"{names[0] if names else 'error'}: {message}")
