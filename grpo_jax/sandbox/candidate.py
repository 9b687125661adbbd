"""The sandboxed process of a program: runs it, or answers calls of its functions.

It knows the program and what it is called with, and nothing of what is expected.
"""

import os
import sys
import types
from typing import Any

from grpo_jax.sandbox import wire

# Exit codes by which the trainer names an end. A program may fake them: all mean "wrong".
COMPILE_ERROR, OUT_OF_MEMORY, RAISED = 65, 66, 67
MAX_SOURCE = 1 << 24  # bytes of a program.
_MESSAGE = 500  # characters of an error that travel.


def run_program() -> None:
  """Runs one program with the standard streams as they are; returns if it ends by itself.

  The first message on standard input is the program; what follows it, the program reads.
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
    max_bytes: longest message.
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
    self._space: dict[str, Any] = {}

  def serve(self) -> None:
    """Answers requests until the judge goes."""
    while True:
      try:
        request = wire.receive(self._requests, self._max_bytes)
      except wire.Closed:
        os._exit(0)
      self._reply(self._answer(request))

  def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
    try:
      return self._answers[request.pop("do")](**request)
    except BaseException as error:  # a program may raise anything; it stays alive to be asked on.
      return _described(error)

  def _reply(self, message: dict[str, Any]) -> None:
    try:
      wire.send(self._replies, message, self._max_bytes)
    except (wire.TooLarge, RecursionError, MemoryError) as error:
      wire.send(self._replies, _described(error), self._max_bytes)
    except wire.Closed:
      os._exit(0)

  def _load(self, sources: list[str], shared: list[str]) -> dict[str, Any]:
    """Runs the sources one after another in one module."""
    try:
      codes = [compile(s, "<program>", "exec", dont_inherit=True) for s in sources]
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
      return {**_described(error), "compile": True}
    self._space = _module("program").__dict__
    for code in codes:
      exec(code, self._space)
    found = {name: self._space.get(name) for name in shared}
    self._codec.shared |= {n: c for n, c in found.items() if isinstance(c, type)}
    return {"names": [n for n, v in self._space.items() if not isinstance(v, types.ModuleType)]}

  def _name(self, name: str) -> dict[str, Any]:
    return {"value": self._codec.encode(self._space[name])}

  def _call(self, target: int, args: Any, kwargs: Any) -> dict[str, Any]:
    """Calls; reports the arguments too, if the call has changed them in place."""
    args, kwargs = self._codec.decode(args), self._codec.decode(kwargs)
    before = self._codec.encode(args)
    value = self._codec.encode(self._kept[target](*args, **kwargs))
    after = self._codec.encode(args)
    return {"value": value} if before == after else {"value": value, "args": after}

  def _attribute(self, target: int, name: str) -> dict[str, Any]:
    return {"value": self._codec.encode(getattr(self._kept[target], name))}

  def _method(self, target: int, name: str, args: Any) -> dict[str, Any]:
    """Calls a special method by the function of the language that stands for it."""
    function = _SPECIAL[name]
    return {"value": self._codec.encode(function(self._kept[target], *self._codec.decode(args)))}

  def _next(self, target: int) -> dict[str, Any]:
    try:
      return {"value": self._codec.encode(next(self._kept[target]))}
    except StopIteration:
      return {"end": True}

  def _keep(self, value: Any) -> int:
    if id(value) not in self._numbers:
      self._numbers[id(value)] = len(self._kept)
      self._kept.append(value)
    return self._numbers[id(value)]

  def _find(self, reference: Any) -> Any:
    """One of our own objects, come back, or a function of the judge's."""
    if isinstance(reference, int):
      return self._kept[reference]
    number = reference["callback"]

    def callback(*args: Any) -> Any:
      self._reply({"callback": number, "args": self._codec.encode(args)})
      answer = wire.receive(self._requests, self._max_bytes)
      if "raised" in answer:
        raise RuntimeError(answer["raised"])
      return self._codec.decode(answer["value"])

    return callback


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
  """An error as a message: the names of its classes and its text."""
  try:
    text = str(error)[:_MESSAGE]
  except BaseException:  # its __str__ is the program's.
    text = ""
  return {"error": [str(c.__name__) for c in type(error).__mro__], "message": text}


def silence(stream: int) -> None:
  """Points a standard stream to nowhere."""
  nowhere = os.open(os.devnull, os.O_RDWR)
  os.dup2(nowhere, stream)
  os.close(nowhere)


def _flush() -> None:
  try:
    sys.stdout.flush()
  except BaseException:  # closed, or replaced by the program.
    pass
