"""The judge's side of the link: stand-ins for the program's functions and objects.

A stand-in never hands an expected value to the program: comparing it with a plain value, or
computing with one, happens here, and `in` iterates. Only two objects of the program's are
compared by the program.
"""

import builtins
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from grpo_jax.sandbox import wire


class Gone(BaseException):
  """The program has ended, or broke the rules of the link. No test can catch it as Exception."""


class ProgramError(Exception):
  """The program raised something that is no built-in Exception."""


class Link:
  """Asks the program. One question at a time."""

  def __init__(self, requests: int, replies: int, max_bytes: int):
    """Takes two file descriptors and the length of the longest message."""
    self._requests, self._replies, self._max_bytes = requests, replies, max_bytes
    self._callbacks: list[Callable[..., Any]] = []
    self.codec = wire.Codec(keep=self._keep, find=lambda reference: Remote(self, int(reference)))
    self.names: set[str] = set()
    self.questions = 0
    self.gone = ""  # why there will be no more answers.
    self.over = ""  # "memory" or "output": the limit that the program has met last.

  def load(self, sources: list[str]) -> dict[str, Any]:
    """Has the program run.

    Returns:
      {} or what it raised: {"error": names of classes, "message": text, "compile": True if
      it is no Python}.
    """
    answer = self._ask(do="load", sources=sources, shared=sorted(self.codec.shared))
    names = answer.get("names", [])
    self.names = {n for n in names if isinstance(n, str)}
    return answer if "error" in answer else {}

  def name(self, name: str) -> Any:
    """Returns a global value of the program."""
    return self._value(self._ask(do="name", name=name))

  def call(self, target: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an object of the program; arguments that it changes in place are changed here."""
    sent = self.codec.encode(args), self.codec.encode(kwargs)
    answer = self._ask(do="call", target=target, args=sent[0], kwargs=sent[1])
    value = self._value(answer)
    if "args" in answer:
      for mine, theirs in zip(args, self._decode(answer["args"]), strict=False):
        _overwrite(mine, theirs)
    return value

  def attribute(self, target: int, name: str) -> Any:
    """Returns an attribute of an object of the program."""
    return self._value(self._ask(do="attribute", target=target, name=name))

  def method(self, target: int, name: str, *args: Any) -> Any:
    """Applies a function of the language, such as len, to an object of the program."""
    encoded = self.codec.encode(args)
    return self._value(self._ask(do="method", target=target, name=name, args=encoded))

  def iterate(self, target: int) -> Iterator[Any]:
    """Yields what an iterator of the program yields."""
    while "end" not in (answer := self._ask(do="next", target=target)):
      yield self._value(answer)

  def _ask(self, **request: Any) -> dict[str, Any]:
    if self.gone:
      raise Gone(self.gone)
    self.questions += 1
    try:
      wire.send(self._requests, request, self._max_bytes)
      while True:
        answer = wire.receive(self._replies, self._max_bytes)
        if not isinstance(answer, dict):
          raise wire.Closed("no answer but something else")
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
    """Calls a function of the test for the program."""
    function, args = self._callbacks[answer["callback"]], self._decode(answer["args"])
    try:
      return {"value": self.codec.encode(function(*args))}
    except Exception as error:  # the test's function may raise anything, and the program see it.
      return {"raised": f"{type(error).__name__}: {error}"[:200]}

  def _leave(self, reason: str) -> NoReturn:
    self.gone = reason[:200]
    raise Gone(self.gone)

  def _value(self, answer: dict[str, Any]) -> Any:
    if "error" in answer:
      error = _exception(answer, self.codec.shared)
      self.over = "memory" if isinstance(error, MemoryError) else self.over
      self.over = "output" if str(error).startswith("TooLarge:") else self.over
      raise error
    return self._decode(answer.get("value"))

  def _decode(self, data: Any) -> Any:
    try:
      return self.codec.decode(data)
    except (ValueError, RecursionError, MemoryError) as error:
      self._leave(f"not understood: {error}")

  def _keep(self, value: Any) -> Any:
    """Gives the program back its own object, or a function to call."""
    if isinstance(value, Remote):
      return object.__getattribute__(value, "_target")
    if not callable(value):
      raise TypeError(f"a test cannot pass {type(value).__name__} to the program")
    self._callbacks.append(value)
    return {"callback": len(self._callbacks) - 1}


class Remote:
  """An object of the program's: a function, a class, an instance, a generator."""

  def __init__(self, link: Link, target: int):
    """Stands for the object that the program keeps under the number `target`."""
    object.__setattr__(self, "_link", link)
    object.__setattr__(self, "_target", target)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self._link.call(self._target, args, kwargs)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__") and name not in ("__name__", "__doc__"):
      raise AttributeError(name)  # protocols that are not offered: copying, pickling, ...
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
    raise ProgramError("__iter__ returned no iterator")

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
      return False  # an expected value: the program is not asked.
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


# Ends of iterations and of processes are never raised as what they are: `all(map(f, cases))`
# would be true for a program that raises StopIteration.
_NOT_RAISED = ("StopIteration", "StopAsyncIteration")


def _exception(answer: dict[str, Any], shared: Mapping[str, type]) -> Exception:
  """What the program raised, as the nearest exception that the tests know."""
  names, message = answer["error"], str(answer.get("message", ""))
  for name in names if isinstance(names, list) else []:
    kind = {**vars(builtins), **shared}.get(str(name))
    if name in _NOT_RAISED or kind is Exception:
      break
    if isinstance(kind, type) and issubclass(kind, Exception):
      try:
        return kind(message)
      except TypeError:  # it wants more arguments, as UnicodeDecodeError does.
        if name in shared:
          return kind.__new__(kind, message)
  return ProgramError(f"{names[0] if names else 'error'}: {message}")


def _overwrite(mine: Any, theirs: Any) -> None:
  """Makes a mutable argument what the program made of it."""
  if type(mine) is not type(theirs):
    return
  if isinstance(mine, (list, bytearray)):
    mine[:] = theirs
  elif isinstance(mine, (dict, set)):
    mine.clear()
    mine.update(theirs)
  elif hasattr(mine, "__dict__") and not isinstance(mine, Remote):
    vars(mine).update(vars(theirs))
