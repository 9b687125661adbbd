"""How long this process has waited for the other processes of its run."""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_seconds = 0.0
_depth = 0


def counted(function: F) -> F:
  """Adds the time that a function takes to `waited_s`; for functions that wait for the others.

  Only calls on the main thread count, and a call within another one counts once.
  """

  @functools.wraps(function)
  def timed(*arguments: Any, **options: Any) -> Any:
    global _depth, _seconds
    if _depth or threading.current_thread() is not threading.main_thread():
      return function(*arguments, **options)
    _depth, began = 1, time.perf_counter()
    try:
      return function(*arguments, **options)
    finally:
      _depth = 0
      _seconds += time.perf_counter() - began

  return cast(F, timed)


def waited_s() -> float:
  """Returns the seconds that the main thread has waited for other processes so far."""
  return _seconds
