"""Which prompts may be sampled ahead, and which finished groups a step takes. Pure bookkeeping.

Step s begins with weights of version s. A group that was admitted while version v was the newest
has tokens of version v or later, so it must be learned from at step v + k at the latest, where k is
the bound of staleness: s - v ≤ k. With P groups a step, the outstanding groups can all keep their
deadlines at step s if and only if, with N_d the number of those whose deadline is d or earlier,

    N_d ≤ (d - s + 1) P      for every d ≥ s.

Admission keeps this: a block may be admitted at version v only if at most (k + 1) P groups are
outstanding then (AReaL's rule, arXiv:2505.24298, section 5.1, with the running groups counted).
Taking the groups of a step keeps it, too: at least N_d - (d - s) P of the groups of step s have a
deadline of d or earlier. The other places go to the groups that finished first. So nothing has to
be thrown away, nothing is skipped, and slow groups are overtaken but never left behind. With k = 1
steps take groups in the order of their prompts instead, so that a run repeats bit for bit.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRule:
  """How far sampling may run ahead of learning, and in which order groups are learned from.

  Attributes:
    max_staleness: Largest number k of versions by which the weights that sampled a token may be
      older than those of the step that learns from it.
    groups_per_step: Number P of groups of a step.
  """

  max_staleness: int
  groups_per_step: int

  @property
  def in_turn(self) -> bool:
    """Whether everything repeats bit for bit, with k = 1.

    Blocks are then sampled one after the other and finished before the engine gets new weights, and
    steps take groups in the order of their prompts. Else steps take those that finish first, as far
    as deadlines allow, and the engine gets new weights while others are under way.
    """
    return self.max_staleness <= 1

  @property
  def capacity(self) -> int:
    """Largest number of groups that are admitted and not yet learned from: (k + 1) P."""
    return (self.max_staleness + 1) * self.groups_per_step

  def deadline(self, version: int) -> int:
    """Returns the last step that may learn from tokens of a version."""
    return version + self.max_staleness

  def is_too_old(self, version: int, step: int) -> bool:
    """Returns whether tokens of a version are too old for a step; -1, an unknown one, is not."""
    return 0 <= version and self.deadline(version) < step


@dataclasses.dataclass(slots=True)
class _Entry:
  """A group that is admitted and not yet taken."""

  version: int  # of the weights when it was admitted; all of its tokens are of this one or later.
  oldest: int | None = None  # oldest version among its tokens; None: it is not finished.

  @property
  def is_finished(self) -> bool:
    return self.oldest is not None


class AdmissionQueue:
  """The groups that are admitted and not yet taken, by the running numbers of their prompts."""

  def __init__(self, rule: AdmissionRule, *, first: int = 0):
    """Makes a queue without groups.

    Args:
      rule: Rule of admission.
      first: Number of the next prompt.
    """
    self.rule = rule
    self._next = first
    self._entries: dict[int, _Entry] = {}  # in the order of the numbers.
    self._finished: list[int] = []  # in the order in which they finished.

  @property
  def outstanding(self) -> int:
    """Number of groups that are admitted and not yet taken."""
    return len(self._entries)

  @property
  def next_number(self) -> int:
    """Number of the next prompt that is admitted."""
    return self._next

  @property
  def finished(self) -> tuple[int, ...]:
    """Numbers of the finished groups that are not yet taken, in the order of finishing."""
    return tuple(self._finished)

  @property
  def has_unfinished(self) -> bool:
    """Whether an admitted group is not finished."""
    return len(self._entries) > len(self._finished)

  @property
  def unfinished(self) -> tuple[int, ...]:
    """Numbers of the admitted groups that are not finished."""
    return tuple(number for number, entry in self._entries.items() if not entry.is_finished)

  def version_of(self, number: int) -> int:
    """Returns the version of the weights when a group was admitted."""
    return self._entries[number].version

  def may_admit(self, count: int, *, held: int = 0, capacity: int | None = None) -> bool:
    """Returns whether a block of prompts may be admitted now.

    Args:
      count: Number of prompts of the block.
      held: Number of groups that were taken and not yet learned from, such as a surplus.
      capacity: Bound of all that is outstanding then; None: that of the rule.
    """
    bound = self.rule.capacity if capacity is None else capacity
    return self.outstanding + held + count <= bound

  def admit(self, count: int, version: int) -> range:
    """Admits the next prompts while `version` is the newest, and returns their numbers."""
    numbers = range(self._next, self._next + count)
    self._entries |= {number: _Entry(version) for number in numbers}
    self._next += count
    return numbers

  def restore(self, number: int, version: int) -> None:
    """Admits a prompt again whose number was given before the run was interrupted."""
    self._entries[number] = _Entry(version)
    self._next = max(self._next, number + 1)

  def finish(self, number: int, oldest: int) -> None:
    """Records that a group is finished.

    Args:
      number: Number of its prompt.
      oldest: Oldest version among its tokens; at least that of its admission.
    """
    self._entries[number].oldest = oldest
    self._finished.append(number)

  def restart(self, numbers: Iterable[int], version: int) -> None:
    """Records that groups are given up and their prompts admitted again."""
    for number in numbers:
      self._entries[number] = _Entry(version)
      if number in self._finished:
        self._finished.remove(number)

  def take(self, numbers: Sequence[int]) -> None:
    """Removes groups that a step has taken."""
    for number in numbers:
      del self._entries[number]
    self._finished = [number for number in self._finished if number in self._entries]

  def too_old(self, step: int) -> list[int]:
    """Returns the groups that can no longer be learned from at this step or later."""
    oldest = {n: e.version if e.oldest is None else e.oldest for n, e in self._entries.items()}
    return [number for number, version in oldest.items() if self.rule.deadline(version) < step]

  def count_finished(self, count: int) -> int:
    """Returns how many of the `count` groups that a step waits for are finished."""
    if self.rule.in_turn:
      return sum(entry.is_finished for entry in itertools.islice(self._entries.values(), count))
    return min(len(self._finished), count)

  def choose(self, count: int, step: int, *, held: Sequence[int] = ()) -> list[int] | None:
    """Returns the groups that a step takes, in the order of their prompts.

    Args:
      count: Number of groups to take; fewer if fewer are outstanding.
      step: Step that takes them.
      held: Oldest versions of the groups that the step already has, such as a surplus.

    Returns:
      Numbers of finished groups; None if the step has to wait.
    """
    wanted = min(count, self.outstanding)
    if self.rule.in_turn:
      first = list(itertools.islice(self._entries, wanted))
      return first if all(self._entries[number].is_finished for number in first) else None
    if len(self._finished) < wanted:
      return None
    needed = self._needed(step, wanted, held)
    chosen: list[int] = []
    for number in self._finished:
      if len(chosen) == wanted:
        break
      left = wanted - len(chosen) - 1
      deadline = self._deadline(number)
      rest = {d: n - (deadline <= d) for d, n in needed.items()}
      if max(rest.values(), default=0) <= left:
        chosen.append(number)
        needed = rest
    return sorted(chosen) if len(chosen) == wanted else None

  def _deadline(self, number: int) -> int:
    return self.rule.deadline(self._entries[number].version)

  def _needed(self, step: int, wanted: int, held: Sequence[int]) -> dict[int, int]:
    """Returns how many groups with a deadline of d or earlier the step must take, for each d."""
    of_held = [self.rule.deadline(version) for version in held]
    deadlines = [*(self._deadline(number) for number in self._entries), *of_held]
    needed = {}
    for d in sorted({*deadlines}):
      due = sum(each <= d for each in deadlines) - max(d - step, 0) * self.rule.groups_per_step
      needed[d] = min(max(due - sum(each <= d for each in of_held), 0), wanted)
    return needed
