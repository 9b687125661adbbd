"""Failures that a user can repair, explained in one message; and where user code failed."""

import linecache
import os
import sysconfig
import traceback

_LONGEST = 200  # characters of a source line that are shown.
_HERE = os.path.dirname(__file__)
_OURS = (_HERE, os.path.join(os.path.dirname(_HERE), "packages"))  # the latter in a checkout only.


class ExpectedFailure(Exception):
  """A failure whose message is all that a user needs: `main` prints it without a traceback.

  The message says what was needed, what came instead, and where. Subclasses also derive from the
  built-in exception that fits them, so that callers of single functions can catch `ValueError` or
  `OSError` as usual.

  Attributes:
    exit_code: Exit code of a program that the failure ends: 1, or 2 for wrong use.
  """

  exit_code: int = 1


class MissingExtra(ExpectedFailure, ImportError, ValueError):
  """A package of an extra is not installed."""

  def __init__(self, what: str, extra: str, error: ImportError):
    """Makes the error.

    Args:
      what: Part of the library that needs a package.
      extra: Name of the extra that has the package.
      error: Error of the import that failed.
    """
    super().__init__(f"{what} needs a package ({error}): pip install 'grpo-jax[{extra}]'")


def place_and_reason(error: BaseException) -> str:
  """Returns "file:line: type: message" in one line, with the place in the innermost user code."""
  error = as_raised(error)
  frames = traceback.extract_tb(error.__traceback__)
  places = [(frame.filename, frame.lineno) for frame in frames if _is_of_user(frame)]
  message = message_of(error)
  if isinstance(error, SyntaxError) and error.filename:
    places, message = [(error.filename, error.lineno)], error.msg
  where = "{}:{}: ".format(*places[-1]) if places else ""
  return " ".join(f"{where}{type(error).__name__}: {message}".split())


def message_of(error: BaseException) -> str:
  """Returns the message of an error of user code, whose `__str__` may raise or return anything."""
  try:
    return str(error)
  except Exception as second:
    return f"(its __str__ raised {type(second).__name__})"


def as_raised(error: BaseException) -> BaseException:
  """Returns what user code raised: coroutines and generators turn a StopIteration, such as that of
  `next` of nothing, into a RuntimeError."""
  cause = error.__cause__
  if isinstance(error, RuntimeError) and isinstance(cause, StopIteration | StopAsyncIteration):
    return cause
  return error


def last_frames(error: BaseException, most: int = 3) -> list[str]:
  """Returns where user code raised an error: "file:line, in function: source", innermost last.

  Args:
    error: Error that was raised.
    most: Number of frames; libraries that user code has called have the last one only.
  """
  frames = [
    frame
    for frame in traceback.extract_tb(as_raised(error).__traceback__)
    if not any(_is_within(frame.filename, each) for each in _OURS)
  ]
  users = [frame for frame in frames if _is_of_user(frame)]
  if not users:
    return []
  chosen = users[-most:] if users[-1] is frames[-1] else [*users[1 - most :], frames[-1]]
  return [
    f"{frame.filename}:{frame.lineno}, in {frame.name}: {(frame.line or '?')[:_LONGEST]}"
    for frame in chosen
  ]


def is_of_user(file: str) -> bool:
  """Returns whether a file, or the cell of a notebook, is neither ours nor of Python or an
  installed library."""
  paths = sysconfig.get_paths()
  others = (*_OURS, *(paths[each] for each in ("stdlib", "purelib", "platlib")))
  is_there = os.path.isfile(file) or file in linecache.cache
  return is_there and not any(_is_within(file, each) for each in others)


def _is_of_user(frame: traceback.FrameSummary) -> bool:
  """Returns whether a frame is of user code, also of a program on standard input or of `exec`.

  Methods that dataclasses and named tuples generate are in "<string>", too: `__init__`, `__new__`.
  """
  is_typed = frame.filename in ("<stdin>", "<string>") and not frame.name.startswith("__")
  return is_typed or is_of_user(frame.filename)


def _is_within(file: str, folder: str) -> bool:
  return file.startswith(f"{folder}{os.sep}")
