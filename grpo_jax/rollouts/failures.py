"""How attempts ended: their failures counted, and the error if more failed than are allowed."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from grpo_jax.environments.isolation import EnvironmentFailure
from grpo_jax.errors import ExpectedFailure
from grpo_jax.http import redaction
from grpo_jax.metrics import attempt_events
from grpo_jax.rollouts.attempt import Attempt
from grpo_jax.types import RolloutGroup


class TooManyFailures(ExpectedFailure, RuntimeError):
  """More attempts than allowed could not be scored."""


class AttemptOutcome(NamedTuple):
  """How an attempt ended, as far as failures are concerned."""

  prompt_id: str
  kind: str  # of the failure; "": there was none.
  error: str  # "KIND: message"
  asked: str = ""  # text of the prompt.
  row: str = ""  # place of its row.
  cause: EnvironmentFailure | None = None  # None: it is not known here.

  @property
  def failed(self) -> bool:
    """Whether the attempt could not be scored."""
    return bool(self.kind)


def outcomes(groups: Sequence[RolloutGroup]) -> list[AttemptOutcome]:
  """Returns how the attempts of groups ended that count; see `check_failures`."""
  return [
    AttemptOutcome(
      group.prompt.prompt_id, each.failure, each.error, group.prompt.text, group.prompt.where
    )
    for group in groups
    if group.prompt.weight > 0
    for each in (*group.rollouts, *([group.greedy] if group.greedy else []))
  ]


def check_failures(groups: Sequence[RolloutGroup], max_share: float, *, where: str = "") -> None:
  """Checks that no more than a share of the attempts of groups failed.

  Prompts of weight 0 do not count: cut ones may leave no room.

  Args:
    groups: Groups of a step, of all processes.
    max_share: Allowed share, `AttemptLimits.max_error_share`.
    where: Place of the failures, for the message; "": this process.

  Raises:
    TooManyFailures: More failed.
  """
  check_outcomes(outcomes(groups), max_share, where)


def error_counts(groups: Sequence[RolloutGroup]) -> dict[str, float]:
  """Counts the attempts of the groups that failed, by kind, as "rollout/errors/KIND"."""
  kinds = attempt_events.error_kinds(groups)
  return {f"rollout/errors/{kind}": float(count) for kind, count in kinds.items()}


def outcome_of(attempt: Attempt) -> AttemptOutcome:
  """Returns how an attempt ended; it may be one that is not part of a group yet."""
  prompt, error = attempt.prompt, attempt.error
  if error is None:
    return AttemptOutcome(prompt.prompt_id, "", "")
  said = f"{error.kind}: {error}"
  return AttemptOutcome(prompt.prompt_id, error.kind, said, prompt.text, prompt.where, error)


def check_outcomes(counting: Sequence[AttemptOutcome], max_share: float, where: str = "") -> None:
  """Checks that no more than a share of the attempts failed.

  Args:
    counting: Outcomes of the attempts that count.
    max_share: Allowed share, `AttemptLimits.max_error_share`.
    where: Place of the failures, for the message; "": this process.

  Raises:
    TooManyFailures: More failed.
  """
  failed = [each for each in counting if each.failed]
  if len(failed) <= max_share * len(counting):
    return
  kinds = Counter(each.kind for each in failed)
  row = f" (row {failed[0].row})" if failed[0].row else ""
  message = (
    f"{len(failed)} of {len(counting)} attempts could not be scored, more than the allowed share "
    f"of {max_share:g} (rollout.max_error_share): {dict(kinds)}{where and f' ({where})'}; the "
    f"first, {failed[0].prompt_id}{row}: {failed[0].error}\nprompt: {failed[0].asked[:200]!r}"
    f"{_firsts_of_others(failed)}"
  )
  # A model, or the row of a file, may have written what a terminal obeys.
  lines = map(redaction.printable, message.split("\n"))
  raise TooManyFailures("\n".join(lines)) from failed[0].cause


def _firsts_of_others(failed: Sequence[AttemptOutcome]) -> str:
  """Returns a line for the first failure of each of up to three other kinds.

  A sandbox that cannot start, for example, follows the time-outs of those who waited for it.
  """
  firsts: dict[str, AttemptOutcome] = {}
  for each in failed:
    firsts.setdefault(each.kind, each)
  return "".join(f"\n{each.prompt_id}: {each.error}" for each in [*firsts.values()][1:4])
