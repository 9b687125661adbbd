"""Shows what the package and its libraries log, in one format, on the screen of a run.

Every module logs to `logging.getLogger(__name__)`: notices as INFO, warnings as WARNING. Used as a
library the package adds no handler. The program (`for_program`) and a run (`on_screen`) show

    run folder: runs/first                                        a notice
    warning: the disk is almost full                              a warning
    warning: jax: a donated buffer was not usable                 a warning of a library
"""

import contextlib
import logging
import pathlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from grpo_jax.run_folder import process_log
from grpo_jax.run_folder import screen as screens

PACKAGE = "grpo_jax"
# Packages whose notices are shown without a name: kernels log which implementation they chose.
OURS = (PACKAGE, "grpo_kernels")

# The lowest level shown, for libraries that log more than a user can act on.
LEVELS = {
  "aiobotocore": logging.WARNING,  # of s3://; says where it found credentials.
  "absl": logging.WARNING,  # also Orbax, which reports every phase of a save as INFO.
  "httpx": logging.WARNING,
  "jax": logging.WARNING,
  "transformers": logging.WARNING,
  "huggingface_hub": logging.WARNING,
}
# Libraries that add their own handler for standard error when they are imported.
WITH_A_HANDLER = ("datasets", "huggingface_hub", "transformers")


class ScreenHandler(logging.Handler):
  """Prints records on a screen; the screen can be replaced."""

  def __init__(self, screen: screens.Screen | None = None):
    """Makes a handler.

    Args:
      screen: Screen to print on; None: standard output.
    """
    super().__init__()
    self.screen = screen or screens.Screen()

  def emit(self, record: logging.LogRecord) -> None:
    """Prints a record, with its traceback if it has one."""
    try:
      text = _origin(record) + record.getMessage()
      if record.exc_info:
        text += "\n" + logging.Formatter().formatException(record.exc_info)
      process_log.add(record.levelno, text)
      if record.levelno >= logging.ERROR:
        self.screen.notice("error: ", text, screens.FAILED)
      elif record.levelno >= logging.WARNING:
        self.screen.notice("warning: ", text)
      else:
        self.screen.print(text)
    except Exception:
      self.handleError(record)


class _Others(logging.Handler):
  """Passes the records of libraries to the package's handler."""

  def __init__(self, ours: ScreenHandler):
    super().__init__()
    self._ours = ours

  def emit(self, record: logging.LogRecord) -> None:
    if record.name.partition(".")[0] not in OURS:  # the packages' own records are already shown.
      self._ours.handle(record)


class _WithoutHandlers(logging.Logger):
  """A logger whose records go to the root logger whatever handlers its library adds."""

  propagate = property(lambda self: True, lambda self, value: None)  # pyright: ignore

  def addHandler(self, hdlr: logging.Handler) -> None:
    """Does nothing."""


@contextlib.contextmanager
def on_screen(screen: screens.Screen) -> Iterator[None]:
  """Shows the package's notices on a screen within the block.

  Under `for_program`, its handler prints there; elsewhere, e.g. in a notebook, a handler is added.
  If a user has added a handler to the logger "grpo_jax", that one is kept and none is added.
  """
  logger = logging.getLogger(PACKAGE)
  ours = next((each for each in logger.handlers if isinstance(each, ScreenHandler)), None)
  if ours is not None:
    before, ours.screen = ours.screen, screen
    try:
      yield
    finally:
      ours.screen = before
  elif logger.handlers:
    yield
  else:
    with _handling(ScreenHandler(screen)):
      yield


@contextlib.contextmanager
def for_program() -> Iterator[None]:
  """Shows everything that the package and its libraries log or warn about, within the block.

  Other handlers that write to standard output or standard error are removed meanwhile.
  """
  root = logging.getLogger()
  aside = [each for each in root.handlers if _is_standard(each)]
  ours = ScreenHandler()
  others = _Others(ours)
  levels = {name: logging.getLogger(name).level for name in LEVELS}
  show = warnings.showwarning
  for each in aside:
    root.removeHandler(each)
  root.addHandler(others)
  for name, level in LEVELS.items():
    logging.getLogger(name).setLevel(level)
  for name in WITH_A_HANDLER:
    _take_handlers(logging.getLogger(name))
  warnings.showwarning = _show_warning
  try:
    with _handling(ours):
      yield
  finally:
    warnings.showwarning = show
    for name in WITH_A_HANDLER:
      logging.getLogger(name).__class__ = logging.Logger
    for name, level in levels.items():
      logging.getLogger(name).setLevel(level)
    root.removeHandler(others)
    for each in aside:
      root.addHandler(each)


@contextlib.contextmanager
def _handling(handler: logging.Handler) -> Iterator[None]:
  """Adds a handler to the packages' loggers, so that they also log notices.

  Where the root logger prints, as in some notebooks, it gets no records: they would be shown twice.
  """
  with contextlib.ExitStack() as stack:
    for name in OURS:
      stack.enter_context(_handled(logging.getLogger(name), handler))
    yield


@contextlib.contextmanager
def _handled(logger: logging.Logger, handler: logging.Handler) -> Iterator[None]:
  """Adds a handler to one logger."""
  level, propagates = logger.level, logger.propagate
  logger.addHandler(handler)
  if any(_is_standard(each) for each in logging.getLogger().handlers):
    logger.propagate = False
  if not logger.isEnabledFor(logging.INFO):
    logger.setLevel(logging.INFO)
  try:
    yield
  finally:
    logger.setLevel(level)
    logger.propagate = propagates
    logger.removeHandler(handler)


def _take_handlers(logger: logging.Logger) -> None:
  for each in [each for each in logger.handlers if _is_standard(each)]:
    logger.removeHandler(each)
  if type(logger) is logging.Logger:
    logger.__class__ = _WithoutHandlers


def _is_standard(handler: logging.Handler) -> bool:
  """Returns whether a handler writes to standard output or standard error."""
  standard = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
  stream: Any = getattr(handler, "stream", None)
  return stream is not None and any(stream is each for each in standard)


def _origin(record: logging.LogRecord) -> str:
  """Returns "jax: " for a record of a library; "" for one of ours."""
  name = record.name.partition(".")[0]
  if name in OURS:
    return ""
  if name == "py":  # a Python warning.
    return ""
  if name in ("root", "absl"):
    name = _library(record.pathname) or name
  return f"{name}: "


def _library(path: str) -> str:
  """Returns the name of the installed package that a source file belongs to; "" if none."""
  parts = pathlib.PurePath(path).parts
  for folder in ("site-packages", "dist-packages"):
    if folder in parts[:-1]:
      return parts[parts.index(folder) + 1].removesuffix(".py")
  return ""


def _show_warning(
  message: Warning | str,
  category: type[Warning],
  filename: str,
  lineno: int,
  file: Any = None,
  line: str | None = None,
) -> None:
  """Logs a Python warning in one line, without the source line that it came from."""
  del file, line
  origin = _library(filename) or pathlib.PurePath(filename).name
  place = f"{pathlib.PurePath(filename).name}:{lineno}"
  logging.getLogger("py.warnings").warning(
    "%s: %s (%s, %s)", origin, message, category.__name__, place
  )
