"""Failures and other events of attempts: counted, and as metrics in files. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.types import Rollout, RolloutGroup

# The names, among an attempt's metrics in files, of the events that happened to it.
_ERROR = "error/"  # error/KIND and error/close_KIND: the kind of a failure.
_CLOSE = "close_"
_TURN_LIMIT = "turn_limit"


def with_events(rollout: Rollout) -> dict[str, float]:
  """Returns the metrics of an attempt in the form used in files.

  They include events of the attempt, with the value 1: "error/KIND" and "turn_limit".
  """
  events = {f"{_ERROR}{kind}": 1.0 for kind in _failure_kinds(rollout)}
  if rollout.hit_turn_limit:
    events = {_TURN_LIMIT: 1.0, **events}
  return {**rollout.metrics, **events}


def split_events(recorded: Mapping[str, float]) -> tuple[dict[str, float], dict[str, Any]]:
  """Splits what `with_events` returned.

  Returns:
    The metrics, and the fields of `Rollout` that describe the events of the attempt.
  """
  own = {k: v for k, v in recorded.items() if k != _TURN_LIMIT and not k.startswith(_ERROR)}
  kinds = [name.removeprefix(_ERROR) for name in recorded if name.startswith(_ERROR)]
  closing = [kind.removeprefix(_CLOSE) for kind in kinds if kind.startswith(_CLOSE)]
  failures = [kind for kind in kinds if not kind.startswith(_CLOSE)]
  return own, {
    "failure": next(iter(failures), ""),
    "close_failure": next(iter(closing), ""),
    "hit_turn_limit": _TURN_LIMIT in recorded,
  }


def error_kinds(groups: Sequence[RolloutGroup]) -> dict[str, int]:
  """Counts the attempts that failed, or whose environment did not close, by kind, sorted by
  kind; greedy attempts count too."""
  attempts = [[*group.rollouts, *filter(None, (group.greedy,))] for group in groups]
  kinds = Counter(
    kind for group in attempts for rollout in group for kind in _failure_kinds(rollout)
  )
  return dict(sorted(kinds.items()))


def _failure_kinds(rollout: Rollout) -> list[str]:
  """Returns the kinds of failure during an attempt and when it was closed."""
  closing = f"{_CLOSE}{rollout.close_failure}" if rollout.close_failure else ""
  return [kind for kind in (rollout.failure, closing) if kind]
