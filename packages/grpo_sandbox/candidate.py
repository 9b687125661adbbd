"""The sandboxed process of a program: runs it, or answers calls of its functions.

It knows the program and the arguments of its calls, but not the expected results.
"""

import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from grpo_sandbox import wire

# Exit codes by which the trainer recognises how a program ended. Faking one still means "wrong".
COMPILE_ERROR, OUT_OF_MEMORY, RAISED = 65, 66, 67
MAX_SOURCE = 1 << 24  # size of a program, in bytes.
_MESSAGE = 500  # characters of an error that are sent.


def run_program() -> None:
  """Runs one program with the standard streams as they are; returns if it ends by itself.

  The first message on standard input is the program; the program reads the rest.
  """
  source = wire.receive(0, MAX_SOURCE)
  sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
  sys.stdout = sys.__stdout__ = open(
    1, "w", encoding="utf-8", errors="surrogateescape", closefd=False
  )
  try:
    code = compile(source, "<program>", "exec", dont_inherit=True)
  except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
    os._exit(COMPILE_ERROR)
  try:
    exec(code, _module("__main__").__dict__)
  except SystemExit:
    raise
  except MemoryError:
    os._exit(OUT_OF_MEMORY)
  except BaseException:
    _flush()
    os._exit(RAISED)


def serve_functions(max_bytes: int) -> None:
  """Runs a program, then calls its functions as the judge asks.

  Args:
    max_bytes: Length of the longest message.
  """
  requests, replies = os.dup(0), os.dup(1)
  for stream in (0, 1):
    silence(stream)
  _Functions(requests, replies, max_bytes).serve()


class _Functions:
  """The program's side of the link to the judge."""

  def __init__(self, requests: int, replies: int, max_bytes: int):
    self._requests, self._replies, self._max_bytes = requests, replies, max_bytes
    self._kept: list[Any] = []
    self._numbers: dict[int, int] = {}  # id of a kept object → its place.
    self._answers = {
      "load": self._load,
      "name": self._name,
      "call": self._call,
      "attribute": self._attribute,
      "method": self._method,
      "next": self._next,
    }
    self._codec = wire.Codec(keep=self._keep, find=self._find)
    self._objects = self._codec.objects
    self._space: dict[str, Any] = {}

  def serve(self) -> None:
    """Answers requests until the judge disconnects."""
    while True:
      try:
        request = wire.receive(self._requests, self._max_bytes)
      except wire.Closed:
        os._exit(0)
      self._reply(self._answer(request))

  def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
    """Handles a request, and reports changes in objects that the judge holds as well."""
    start = len(self._objects)
    try:
      for changes, forgotten in request.pop("news", ()):
        start = len(self._objects) - len(forgotten)
        self._codec.apply(changes)
        self._objects.forget(forgotten)
      reply = self._answers[request.pop("do")](**request)
    except BaseException as error:  # a program may raise anything; it must answer later requests.
      reply = _described(error)
    return {**reply, **self._report(start)}

  def _report(self, start: int) -> dict[str, Any]:
    """Returns what the call has changed, and which objects, from a place on, are still held."""
    size = len(self._objects)
    if not size:
      return {}
    try:
      report = {"changes": self._codec.changes(range(size))}
    except BaseException as error:  # an argument now contains something that cannot be sent.
      self._objects.cut(size)
      report = _described(error)
    size = len(self._objects)
    lonely = self._objects.lonely(start, size)
    held = sorted(set(range(start, size)) - set(lonely))
    self._objects.forget(lonely)
    self._objects.note(range(len(self._objects)))
    return {**report, "held": held}

  def _reply(self, message: dict[str, Any]) -> None:
    try:
      wire.send(self._replies, message, self._max_bytes)
    except (wire.TooLarge, RecursionError, MemoryError) as error:
      self._objects.cut(0)
      wire.send(self._replies, {**_described(error), "lost": True}, self._max_bytes)
    except wire.Closed:
      os._exit(0)

  def _load(self, sources: list[str], taken: list[str], sent: list[str]) -> dict[str, Any]:
    """Runs the sources one after another in one module.

    Args:
      sources: Pieces of the program's code.
      taken: Names of the classes whose instances the tests may pass.
      sent: Names of the classes whose instances the tests accept.
    """
    try:
      codes = [compile(s, "<program>", "exec", dont_inherit=True) for s in sources]
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
      return {**_described(error), "compile": True}
    self._space = _module("program").__dict__
    for code in codes:
      exec(code, self._space)
    mine = {n: c for n in {*taken, *sent} if isinstance(c := self._space.get(n), type)}
    self._codec.taken = _Classes(mine)
    self._codec.sent = {n: c for n, c in mine.items() if n in sent}
    return {"names": [n for n, v in self._space.items() if not isinstance(v, types.ModuleType)]}

  def _valued(self, value: Any) -> dict[str, Any]:
    size = len(self._objects)
    try:
      return {"value": self._codec.encode(value)}
    except BaseException:
      self._objects.cut(size)
      raise

  def _name(self, name: str) -> dict[str, Any]:
    return self._valued(self._space[name])

  def _call(self, target: int, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    given, named = self._received(args, kwargs)
    return self._valued(self._kept[target](*given, **named))

  def _attribute(self, target: int, name: str) -> dict[str, Any]:
    return self._valued(getattr(self._kept[target], name))

  def _method(
    self, target: int, name: str, args: list[Any], kwargs: dict[str, Any]
  ) -> dict[str, Any]:
    """Calls a special method through the built-in function or operator for it."""
    given, named = self._received(args, kwargs)
    return self._valued(_SPECIAL[name](self._kept[target], *given, **named))

  def _next(self, target: int) -> dict[str, Any]:
    try:
      value = next(self._kept[target])
    except StopIteration:
      return {"end": True}
    return self._valued(value)

  def _received(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns values from the judge; their objects become what the judge knows."""
    size = len(self._objects)
    given = [self._codec.decode(value) for value in args]
    named = {name: self._codec.decode(value) for name, value in kwargs.items()}
    self._objects.note(range(size, len(self._objects)))
    return given, named

  def _keep(self, value: Any) -> int:
    if id(value) not in self._numbers:
      self._numbers[id(value)] = len(self._kept)
      self._kept.append(value)
    return self._numbers[id(value)]

  def _find(self, reference: Any) -> Any:
    """Returns one of our own objects that came back, or a function or iterator of the judge."""
    if isinstance(reference, int):
      return self._kept[reference]
    number = reference["callback"]
    if reference["is_iterator"]:
      return self._iterated(number)
    return lambda *args, **kwargs: self._call_back(number, args, kwargs)

  def _iterated(self, number: int) -> Iterator[Any]:
    while True:
      try:
        value = self._call_back(number, (), {})
      except StopIteration:
        return
      yield value

  def _call_back(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function of the judge; it sees the present state of its arguments."""
    codec, size = self._codec, len(self._objects)
    codec.met = []
    try:
      message = {"callback": number, "args": codec.encode([*args]), "kwargs": codec.encode(kwargs)}
      message["changes"] = codec.changes(codec.met)
    except BaseException:
      self._objects.cut(size)
      raise
    self._objects.note(range(size, len(self._objects)))
    self._reply(message)
    answer = wire.receive(self._requests, self._max_bytes)
    if "raised" in answer:
      raise RuntimeError(answer["raised"])
    if "end" in answer:
      raise StopIteration
    (value,), _ = self._received([answer["value"]], {})
    codec.apply(answer["changes"])
    return value


class _Classes(dict[str, type]):
  """The program's classes by name; a missing one is replaced by a class with only attributes."""

  def __missing__(self, name: str) -> type:
    self[name] = type(name, (), {})
    return self[name]


_END = object()
_SPECIAL = {
  "len": len,
  "str": str,
  "repr": repr,
  "bool": bool,
  "int": int,
  "float": float,
  "iter": iter,
  "getitem": lambda x, key: x[key],
  "setitem": lambda x, key, value: x.__setitem__(key, value),
  "eq": lambda x, y: bool(x == y),
  "lt": lambda x, y: bool(x < y),
  "add": lambda x, y: x + y,
  "sub": lambda x, y: x - y,
  "mul": lambda x, y: x * y,
}


def _module(name: str) -> types.ModuleType:
  module = types.ModuleType(name)
  sys.modules[name] = module
  return module


def _described(error: BaseException) -> dict[str, Any]:
  """Returns an error as a message: the names of its classes and its text."""
  try:
    text = str(error)[:_MESSAGE]
  except BaseException:  # __str__ is code of the program.
    text = ""
  return {"error": [str(c.__name__) for c in type(error).__mro__], "message": text}


def silence(stream: int) -> None:
  """Redirects a standard stream to the null device."""
  nowhere = os.open(os.devnull, os.O_RDWR)
  os.dup2(nowhere, stream)
  os.close(nowhere)


def _flush() -> None:
  try:
    sys.stdout.flush()
  except BaseException:  # closed, or replaced by the program.
    pass
