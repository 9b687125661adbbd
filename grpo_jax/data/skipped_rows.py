"""Skipped rows: broken ones, and prompts that are too long. Counted by kind."""

import collections
import dataclasses
import logging
from collections.abc import Callable
from typing import Literal, TypeVar

from grpo_jax.data.formats import LeftOut, MissingKey, RowError
from grpo_jax.errors import ExpectedFailure

_log = logging.getLogger(__name__)

T = TypeVar("T")
OnError = Literal["stop", "skip"]
_SHOWN = 5  # reasons.
HINT = "data.on_error='skip' leaves such rows out and counts them"


class OverlongError(LeftOut):
  """A prompt has more tokens than allowed, and such prompts are dropped."""

  def __init__(self, where: str, reason: str):
    super().__init__(where, reason, kind="with a prompt that is too long")


class NoUsableRow(ExpectedFailure, ValueError):
  """A dataset has rows, and none of them can be used."""


def explained(error: RowError) -> RowError:
  """Returns the error of a row that stops a run, with what to do about it."""
  remedy = (isinstance(error, MissingKey) and error.remedy) or HINT
  return RowError(error.where, f"{error.reason}; {remedy}", kind=error.kind)


@dataclasses.dataclass(slots=True)
class SkippedRows:
  """Counts skipped rows by kind, and keeps the first reasons."""

  rows: int = 0  # rows that were read, usable ones included.
  overlong: int = 0  # prompts that are too long, whether they are dropped or cut.
  dropped: int = 0  # the part of `overlong` that is dropped.
  parted: int = 0  # usable rows with text of control tokens, written as ordinary characters.
  kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  first: str = ""  # place and reason of the first skipped row.
  others: list[str] = dataclasses.field(default_factory=list)  # of rows whose kind has no name.

  @property
  def broken(self) -> int:
    """Number of skipped rows, apart from prompts that are too long."""
    return self.kinds.total() - self.dropped

  def guard(self, make: Callable[[], T], on_error: OnError) -> T | None:
    """Calls `make`; a row that cannot be used is counted and gives None.

    Raises:
      RowError: The row is broken and `on_error` is "stop"; the message says how to skip it.
    """
    self.rows += 1
    try:
      made = make()
    except RowError as error:
      if on_error == "stop" and not isinstance(error, LeftOut):
        raise explained(error) from error
      self.add(error)
      return None
    self.overlong += bool(getattr(made, "is_cut", False))
    self.parted += bool(getattr(made, "parted", 0))
    return made

  def add(self, error: RowError) -> None:
    """Counts a skipped row; `guard` has counted it among the rows that were read."""
    if isinstance(error, OverlongError):
      self.overlong += 1
      self.dropped += 1
    self.kinds[error.kind] += 1
    self.first = self.first or str(error)
    if error.kind == RowError.OTHER and str(error) != self.first and len(self.others) < _SHOWN - 1:
      self.others.append(str(error))

  def line(self) -> str:
    """Returns a line with the number of skipped rows of each kind, and the first of them.

    The first few rows whose kind has no name follow, one a line.
    """
    kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
    line = f"skipped {self.kinds.total()} of {self.rows} rows: {kinds}; first: {self.first}"
    return "\n  ".join([line, *self.others])

  def warn(self) -> None:
    """Logs what was skipped."""
    if self.kinds:
      _log.warning("data: %s", self.line())

  def warn_of_parted(self) -> None:
    """Logs how many rows contain text of control tokens."""
    if self.parted:
      _log.warning(
        "data: %d of %d rows contain text of control tokens (such as <|im_end|>), which is written"
        " as ordinary characters; data.allow_control_tokens=True makes tokens of it",
        *(self.parted, self.rows),
      )

  def none_left(self, name: str, max_prompt_tokens: int | None = None) -> "NoUsableRow":
    """Returns the error for a dataset without usable rows.

    Args:
      name: Name of the dataset.
      max_prompt_tokens: Length of the longest prompt that is allowed; None: not compared.
    """
    limit = f" (data.max_prompt_tokens={max_prompt_tokens})" if self.dropped else ""
    return NoUsableRow(f"no row of {name!r} can be used: {self.line()}{limit}")
