"""The screen of a run: lines and, on a terminal, a progress bar below them.

Only the main process prints. The colours are legible on light and dark backgrounds; there are none
in a file or pipe, or if NO_COLOR is set.
"""

import contextlib
import math
import re
import textwrap
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
  BarColumn,
  MofNCompleteColumn,
  Progress,
  ProgressColumn,
  SpinnerColumn,
  Task,
  TextColumn,
  TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text
from rich.theme import Theme

from grpo_jax import processes

SPARSE_S = 60.0  # seconds between two lines of progress where there is no terminal.
ALL_COLUMNS = 1000  # characters; lines of a log file are never cut.
NOTEBOOK_COLUMNS = 100  # characters of a line in the output of a cell.
CONTINUED = " " * 11  # indents the continuation lines of a long message.

# In the usual palettes red and magenta have a contrast of at least 3:1 on white and on black;
# yellow, cyan and green do not.
NOTABLE = "magenta"
FAILED = "bold red"
THEME = Theme(
  {
    "bar.back": "dim",
    "bar.complete": "bold",
    "bar.finished": "bold",
    "bar.pulse": "bold",
    "progress.download": "none",
    "progress.elapsed": "none",
    "progress.remaining": "none",
    "progress.spinner": NOTABLE,
  }
)


class Screen:
  """Prints lines and, on a terminal, a progress bar below them.

  Processes other than the main one print nothing.
  """

  def __init__(
    self,
    console: Console | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    note: Callable[[], str] = lambda: "",
  ):
    """Makes a screen.

    Args:
      console: Console to print on; None: standard output.
      clock: Function that returns monotonic seconds.
      note: Function that returns what the program is doing now, shown next to the bar, or "".
    """
    self._console = console or _standard_output()
    self._console.push_theme(THEME)
    self._clock = clock
    self._note = note
    self._progress: Progress | None = None

  @property
  def width(self) -> int:
    """Width of the terminal or notebook in characters; a log file has room for all columns."""
    return self._console.width if self._console.is_terminal or _is_notebook() else ALL_COLUMNS

  def run_left(self) -> str:
    """Returns the expected time until the end of a run; "" if there is none, or it is not known."""
    return ""

  def print(self, line: str | Text) -> None:
    """Prints a line; it is never truncated, nor interpreted as markup or by the terminal.

    On a terminal, a string that is too long for one line is folded between words.
    """
    if isinstance(line, str):
      for part in printable(line).split("\n"):
        for each in fold(part, self.width):
          self._put(Text(each))
    else:
      self._put(line)

  def notice(self, label: str, line: str, style: str = NOTABLE) -> None:
    """Prints a line after a coloured label such as "warning: "."""
    parts = f"{label}{printable(line)}".split("\n")
    first, *others = [each for part in parts for each in fold(part, self.width)]
    self._put(Text.assemble((first[: len(label)], style), first[len(label) :]))
    for each in others:
      self._put(Text(each))

  def _put(self, text: Text) -> None:
    if not processes.is_main():
      return
    encoding = self._console.encoding
    spelled = text.plain.encode(encoding, "replace").decode(encoding)
    self._console.print(text if spelled == text.plain else Text(spelled), soft_wrap=True)

  @contextlib.contextmanager
  def progress(self, description: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Shows the progress of a long phase; yields a function `advance(count=1)`.

    On a terminal it is a bar that disappears at the end; elsewhere one line per minute.

    Args:
      description: Name of the phase, such as "sampling".
      total: Number of items; None if unknown.
    """
    if not processes.is_main():
      yield lambda count=1: None
      return
    if not self._console.is_terminal or self._console.is_dumb_terminal:
      yield self._sparse(description, total)
      return
    bar = self._progress
    if bar is None:
      whole = Column(no_wrap=True)  # the last column, a long note, is cut instead.
      bar = self._progress = Progress(
        SpinnerColumn(table_column=whole),
        TextColumn("{task.description:<12}", table_column=whole, markup=False),
        BarColumn(bar_width=20, table_column=whole),
        _Done(table_column=whole),
        TimeElapsedColumn(table_column=whole),
        _Left(self._note, self.run_left),
        console=self._console,
        transient=True,
      )
      bar.start()
    task = bar.add_task(printable(description), total=total)
    try:
      yield lambda count=1: bar.advance(task, count)
    finally:
      bar.remove_task(task)
      if not bar.task_ids:
        bar.stop()
        self._progress = None

  def _sparse(self, description: str, total: int | None) -> Callable[..., None]:
    """Shows progress in a pipe or a log file: one line per minute."""
    start = last = self._clock()
    done = 0

    def advance(count: int = 1) -> None:
      nonlocal last, done
      done += count
      now = self._clock()
      if now - last >= SPARSE_S:
        last = now
        left = self.run_left()
        of_run = f"; run: {left} left" if left else ""
        self.print(f"{description}: {done}/{total or '?'} after {seconds(now - start)} s{of_run}")

    return advance


def _standard_output() -> Console:
  """Returns the console of standard output; in a notebook it prints plain text.

  There rich would make a display of every line, and ipykernel sets variables by which rich would
  take the notebook for a terminal.
  """
  if not _is_notebook():
    return Console(highlight=False)
  return Console(highlight=False, force_jupyter=False, force_terminal=False, width=NOTEBOOK_COLUMNS)


def _is_notebook() -> bool:
  return Console().is_jupyter


class _Done(MofNCompleteColumn):
  """The count of items done, with the total if it is known."""

  def render(self, task: Task) -> Text:
    return super().render(task) if task.total is not None else Text("")


class _Left(ProgressColumn):
  """A column with the current activity of the program or, if it has none, the remaining time of the
  phase and of the run: "left 20s, run 12min"."""

  def __init__(self, note: Callable[[], str], run_left: Callable[[], str]):
    super().__init__()
    self._note = note
    self._run_left = run_left

  def render(self, task: Task) -> Text:
    if note := self._note():
      return Text(note, style=NOTABLE, no_wrap=True)  # a second line would stay on the screen.
    run = self._run_left()
    parts = [f"left {duration(left)}"] if (left := _seconds_left(task)) is not None else []
    parts += [f"run {run}"] if run else []
    return Text(", ".join(parts), no_wrap=True)


def _seconds_left(task: Task) -> float | None:
  """Returns the expected seconds of a phase; None if nothing of it is done yet."""
  if task.total is None or not task.completed or task.elapsed is None:
    return None
  return task.elapsed * (task.total - task.completed) / task.completed


def duration(value: float) -> str:
  """Returns seconds in at most 5 characters: 45s, 12min, 1.7h, 35h, 3.2d; "-" if not finite."""
  if not math.isfinite(value):
    return "-"
  if value < 5940:  # 99 minutes.
    return f"{value:.0f}s" if value < 99.5 else f"{value / 60:.0f}min"
  amount, unit = (value / 3600, "h") if value < 48 * 3600 else (value / 86400, "d")
  return f"{amount:.1f}{unit}" if amount < 9.95 else f"{amount:.0f}{unit}"


def seconds(value: float) -> str:
  """Returns seconds with three significant digits: 0.13, 12.4, 184."""
  if not math.isfinite(value):
    return "-"
  return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def fold(line: str, width: int) -> list[str]:
  """Splits a line between words, so that the terminal does not split a number.

  Args:
    line: String without line breaks; blanks within it are kept.
    width: Width of a line, in characters; a longer word gets its own line and is not split.
  """
  if len(line) <= width:
    return [line]
  continued = f"{'':>8} │ " if line[8:11] == " │ " else CONTINUED
  found = textwrap.wrap(
    line,
    max(width, 2 * len(continued)),
    subsequent_indent=continued,
    expand_tabs=False,
    replace_whitespace=False,
    break_long_words=False,
    break_on_hyphens=False,
  )
  return found or [line]


def printable(text: str) -> str:
  """Returns the text with control characters escaped, since a terminal would obey them."""
  return re.sub(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]",
    lambda found: found.group().encode("unicode_escape").decode(),
    text,
  )
