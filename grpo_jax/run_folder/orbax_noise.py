"""Silences what Orbax prints about a failed save; its future raises the same error.

On a full disk it printed up to 18 tracebacks: three log records per failure, and one traceback for
every array that was still being written when its event loop closed.
"""

import contextlib
import logging
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

_IN_ORBAX = f"{os.sep}orbax{os.sep}"
_MARKS = ("[tensorstore_spec", "[source locations", "[source_locations", "[key=")
_LONGEST = 300  # characters of a reason.
_KNOWN = (
  "No space left on device",
  "Disk quota exceeded",
  "Read-only file system",
  "File too large",
)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
  """Drops these messages in all threads, within the block; other messages pass."""
  logger = logging.getLogger("absl")
  before, before_unraisable = sys.excepthook, sys.unraisablehook

  def keep(record: logging.LogRecord) -> bool:
    return not (record.levelno >= logging.ERROR and _IN_ORBAX in record.pathname)

  def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if not _is_late(error, trace):
      before(kind, error, trace)

  def report_unraisable(unraisable: Any) -> None:
    if not _is_late(unraisable.exc_value, unraisable.exc_traceback):
      before_unraisable(unraisable)

  logger.addFilter(keep)
  # TensorStore calls one of the two for an exception in one of its callbacks.
  sys.excepthook, sys.unraisablehook = report, report_unraisable
  try:
    yield
  finally:
    logger.removeFilter(keep)
    if sys.excepthook is report:
      sys.excepthook = before
    if sys.unraisablehook is report_unraisable:
      sys.unraisablehook = before_unraisable


def reason(error: BaseException) -> str:
  """Returns in one line why a save or a read failed, without TensorStore's specifications."""
  text = (str(error).strip() or type(error).__name__).split("\n")[0]
  for known in _KNOWN:
    if known in text:
      return known
  for mark in _MARKS:
    text = text.partition(mark)[0].strip()
  return text[:_LONGEST]


def _is_late(error: BaseException | None, trace: types.TracebackType | None) -> bool:
  """Returns whether a write reported to an event loop that no longer waits for it."""
  is_closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
  return is_closed and trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
