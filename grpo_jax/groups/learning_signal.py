"""Counts the completions that a step can learn from, and why it cannot learn from the others. Pure.

A step learns from a completion if it is in the loss with an advantage other than 0. KL and entropy
terms act on the other completions too, but do not depend on rewards: a run without any advantage
completes all its steps and only costs time. So each step counts the lost completions by reason,
and `Watch` reports the run's first steps, or many steps in a row, without signal.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax import batching
from grpo_jax.groups import filters
from grpo_jax.metrics import scored_groups
from grpo_jax.rl.estimators import Estimator
from grpo_jax.types import RolloutGroup


class Reason(NamedTuple):
  """Why nothing is learned from a completion."""

  what: str  # end of a sentence that begins with "N completions".
  remedy: str


_ROWS = "batching.row_tokens and batching.row_buckets, if they are set"
_LONGER = f"raise data.max_prompt_tokens, rollout.max_tokens, {_ROWS}"

REASONS: dict[str, Reason] = {
  "group_of_one": Reason(
    "are the only scored ones of their prompts, and advantages compare completions of one prompt",
    "advantages.estimator='reinforce_pp' compares with the whole step; or give each prompt several"
    " completions (rollout.group_size; in a file, several rows of one input)",
  ),
  "all_truncated": Reason(
    "are in groups of equal rewards whose completions were all truncated",
    "raise sampling.max_tokens and rollout.max_tokens, or ask for shorter answers",
  ),
  "equal_rewards": Reason(
    "have the same reward as all others of their prompt",
    "look at the answers in rollouts/: the task may be too hard or too easy for this model, or the"
    " reward may look for the answer in another form than the prompt asks for",
  ),
  "equal_rewards_in_step": Reason(
    "have the same reward as all others of the step",
    "look at the answers in rollouts/, and at the rewards of the file or of the environment; more"
    " prompts in a step (rollout.prompts_per_step) bring more different rewards",
  ),
  "equal_to_greedy": Reason(
    "have exactly the reward of their prompt's greedy completion",
    "look at the answers in rollouts/: the task may be too hard or too easy for this model; more"
    " completions of a prompt (rollout.group_size) bring more different rewards",
  ),
  "greedy_unscorable": Reason(
    "are compared with a greedy completion that could not be scored",
    "see the lines that begin with 'failed', and rollout/errors/* in metrics.jsonl",
  ),
  "at_baseline": Reason(
    "have exactly the reward that they are compared with",
    "nothing: the other completions of their prompt are learned from",
  ),
  "filtered": Reason(
    "are in groups that the filters left out",
    "see filter/* in metrics.jsonl, and loosen config.filters",
  ),
  "unscorable": Reason(
    "could not be scored",
    "see the lines that begin with 'failed', and error in rollouts/; in a file, the reward",
  ),
  "zero_weight": Reason(
    "belong to prompts of weight 0: longer than data.max_prompt_tokens, or the row says so",
    _LONGER,
  ),
  "prompt_too_long": Reason("have a prompt that fills a whole row", _LONGER),
  "too_long": Reason("do not fit in a row together with their prompt", f"raise {_ROWS}"),
  "empty": Reason(
    "have no token that the model wrote", "look at stop strings and at the chat template"
  ),
  "truncated": Reason(
    "were cut at the token limit, and batching.drop_truncated leaves these out",
    "raise sampling.max_tokens and rollout.max_tokens, or set batching.drop_truncated=False",
  ),
}
LOST = "signal/lost/"
LOST_SHARE = "signal/lost_share"
# Numbers of steps in a row without signal that are reported, and the smallest of them that is
# reported if the run has learned before.
_LOUD = (1, 3, 10, 30, 100, 300, 1000, 3000)
_LATE = 10


@dataclasses.dataclass(frozen=True)
class Signal:
  """How many completions a step has, and how many of them are lost, by reason."""

  completions: int
  lost: Mapping[str, int]  # counts above 0, by key of REASONS.

  @property
  def is_empty(self) -> bool:
    """Whether nothing is learned from any completion."""
    return sum(self.lost.values()) == self.completions

  def metrics(self) -> dict[str, float]:
    """Returns signal/*; the share is NaN in a step without completions."""
    share = sum(self.lost.values()) / self.completions if self.completions else float("nan")
    return {LOST_SHARE: share, **{f"{LOST}{name}": float(n) for name, n in self.lost.items()}}


def find(
  groups: Sequence[RolloutGroup],
  kept: Sequence[RolloutGroup],
  advantages: Sequence[np.ndarray],
  not_computed: Mapping[tuple[int, int], str],
  estimator: Estimator,
  *,
  needs_advantage: bool = True,
) -> Signal:
  """Counts the completions that are learned from.

  Args:
    groups: Groups of the step.
    kept: Groups that passed the filters, with the rewards from which advantages were computed.
    advantages: Advantages of the kept groups, as `credit.advantages_of` returns them.
    not_computed: Completions of the kept groups that are not computed; see `batching.Assembled`.
    estimator: Estimator of the advantages.
    needs_advantage: Whether nothing is learned from a completion whose reward gives it advantage 0;
      False: a teacher teaches on it.
  """
  lost: collections.Counter[str] = collections.Counter()
  names = {group.prompt.prompt_id for group in kept}
  left_out = [group for group in groups if group.prompt.prompt_id not in names]
  lost["filtered"] = sum(_scored(group) for group in left_out)
  lost["unscorable"] = sum(len(group.rollouts) - _scored(group) for group in left_out)
  reasons = {k: v for k, v in not_computed.items() if v != batching.ZERO_ADVANTAGE}
  lost.update(reasons.values())
  if needs_advantage:
    lost.update(_without_advantage(kept, advantages, reasons, estimator))
  completions = sum(len(group.rollouts) for group in groups)
  return Signal(completions, {name: lost[name] for name in REASONS if lost[name]})


def _without_advantage(
  kept: Sequence[RolloutGroup],
  advantages: Sequence[np.ndarray],
  reasons: Mapping[tuple[int, int], str],
  estimator: Estimator,
) -> collections.Counter[str]:
  """Counts the completions in the loss with advantage 0, by the reason for it."""
  lost: collections.Counter[str] = collections.Counter()
  places = [(g, r) for g, group in enumerate(kept) for r in range(len(group.rollouts))]
  in_loss = [place for place in places if place not in reasons]
  values = np.asarray([advantages[g][r] for g, r in in_loss], np.float32)
  if estimator.needs_whitening:  # whitening subtracts the common part, as `advantages.whiten` does.
    if not scored_groups.differs(values):
      one_each = estimator.compares and all(_scored(group) < 2 for group in kept)
      lost["group_of_one" if one_each else "equal_rewards_in_step"] += len(in_loss)
  else:
    zero = [place for place, value in zip(in_loss, values, strict=True) if value == 0]
    lost.update(_why_zero(kept[g], estimator) for g, _ in zero)
  return lost


def lines(first: int, last: int, lost: Mapping[str, float | int]) -> list[str]:
  """Returns the report of steps in a row without signal: why there was none, and what to do.

  Args:
    first: First of the steps.
    last: Last of the steps.
    lost: Completions by reason, of the last step or of all steps.
  """
  steps = f"Step {first}" if first == last else f"Steps {first} to {last}"
  report = [f"{steps}: NOTHING TO LEARN FROM. No completion has an advantage:"]
  for name, count in sorted(lost.items(), key=lambda item: -item[1]):
    reason = REASONS[name]
    report += [f"  {count:.0f} completions {reason.what}.", f"    What to do: {reason.remedy}."]
  return report


def at_the_beginning(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns `lines` of the run's first steps without signal; none if the first step has some.

  Args:
    rows: Rows of metrics.jsonl, in order.
  """
  steps = [row for row in rows if LOST_SHARE in row]
  signal = (i for i, row in enumerate(steps) if row[LOST_SHARE] != 1.0)
  silent = steps[: next(signal, len(steps))]
  if not silent:
    return []
  lost: collections.Counter[str] = collections.Counter()
  for row in silent:
    counts = {name.removeprefix(LOST): row[name] for name in row if name.startswith(LOST)}
    lost.update({name: count for name, count in counts.items() if count and name in REASONS})
  return lines(silent[0]["step"], silent[-1]["step"], lost)


class Watch:
  """Decides which steps without signal are reported: the first ones, then ever fewer."""

  def __init__(self, *, has_learned: bool):
    """Begins to watch.

    Args:
      has_learned: Whether earlier steps may have had signal, since the run continues.
    """
    self._has_learned = has_learned
    self._in_a_row = 0

  @property
  def has_learned(self) -> bool:
    """Whether any step so far had something to learn from."""
    return self._has_learned

  def lines(self, step: int, signal: Signal) -> list[str]:
    """Records a step; returns the lines to print, if any."""
    if not signal.is_empty:
      self._has_learned, self._in_a_row = True, 0
      return []
    self._in_a_row += 1
    is_early = self._has_learned and self._in_a_row < _LATE
    if is_early or self._in_a_row not in _LOUD:
      return []
    return lines(step - self._in_a_row + 1, step, signal.lost)


def _why_zero(group: RolloutGroup, estimator: Estimator) -> str:
  """Returns why an advantage of this group is 0."""
  if estimator.needs_greedy:
    is_known = group.greedy is not None and np.isfinite(group.greedy.reward)
    return "equal_to_greedy" if is_known else "greedy_unscorable"
  if _scored(group) < 2:
    return "group_of_one"
  if filters.has_signal(group):
    return "at_baseline"
  is_cut = filters.truncated_share(group) == 1
  return "all_truncated" if is_cut else "equal_rewards"


def _scored(group: RolloutGroup) -> int:
  """Returns the number of scored rewards of a group."""
  return filters.scored_rewards(group).size
