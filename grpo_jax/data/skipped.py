"""Skipped rows: broken ones, and prompts that are too long. Counted and logged."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Literal

from grpo_jax.data import formats
from grpo_jax.types import Prompt

_log = logging.getLogger(__name__)

OnError = Literal["stop", "skip"]
_SHOWN_ERRORS = 5


class OverlongError(formats.RowError):
  """A prompt has more tokens than allowed, and such prompts are dropped."""


@dataclasses.dataclass(slots=True)
class Skipped:
  """Counts skipped rows, and keeps the first reasons."""

  broken: int = 0
  overlong: int = 0
  reasons: list[str] = dataclasses.field(default_factory=list)

  def guard(self, make: Callable[[], Prompt], on_error: OnError) -> Prompt | None:
    """Calls `make`; a row that cannot be used is counted and gives None."""
    try:
      prompt = make()
    except OverlongError as error:
      self.overlong += 1
      self._note(error)
      return None
    except formats.RowError as error:
      if on_error == "stop":
        raise
      self.broken += 1
      self._note(error)
      return None
    self.overlong += prompt.is_cut
    return prompt

  def warn(self) -> None:
    """Logs what was skipped."""
    if self.reasons:
      counts = f"{self.broken} broken rows, {self.overlong} overlong prompts"
      _log.warning("data: %s; first:\n  %s", counts, "\n  ".join(self.reasons))

  def none_left(self, name: str, max_prompt_tokens: int) -> ValueError:
    """Returns the error for a dataset without usable rows."""
    reasons = "\n  ".join(self.reasons)
    return ValueError(
      f"no row of {name!r} can be used: {self.broken} are broken, {self.overlong} "
      f"longer than {max_prompt_tokens} tokens; first:\n  {reasons}"
    )

  def _note(self, error: formats.RowError) -> None:
    if len(self.reasons) < _SHOWN_ERRORS:
      self.reasons.append(str(error))
