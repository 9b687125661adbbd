"""The steps at which a run evaluates, saves and ends."""

import dataclasses

from grpo_jax.run_folder.time_left import Ahead


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Decides what is done at which step."""

  total_steps: int
  evaluate_at_start: bool
  evaluate_every: int  # steps; 0: never.
  evaluate_at_end: bool
  save_every: int  # steps; 0: never.
  max_skipped: int  # consecutive steps that change nothing.

  def evaluates(self, step: int) -> bool:
    """Returns whether the weights of a step are evaluated."""
    if step == 0:
      return self.evaluate_at_start
    is_last = step == self.total_steps and self.evaluate_at_end
    return is_last or _is_due(step, self.evaluate_every)

  def saves(self, step: int) -> bool:
    """Returns whether a checkpoint of the weights of a step is written."""
    return _is_due(step, self.save_every)

  def ahead(self, done: int, *, is_evaluated: bool) -> Ahead:
    """Returns what is left of the run.

    Args:
      done: Number of steps done.
      is_evaluated: Whether the weights of that step are evaluated already.
    """
    first, total = done + is_evaluated, self.total_steps
    evaluations = _count_due(first, total, self.evaluate_every)
    evaluations += first == 0 and self.evaluate_at_start
    if first <= total and total > 0 and not _is_due(total, self.evaluate_every):
      evaluations += self.evaluate_at_end
    saves = _count_due(done, total, self.save_every)
    return Ahead(max(0, total - done), evaluations, saves)


def _count_due(first: int, last: int, every: int) -> int:
  """Returns how many of the steps from `first` to `last` are due; step 0 is not counted."""
  if every <= 0 or first > last:
    return 0
  return last // every - (max(first, 1) - 1) // every


def _is_due(step: int, every: int) -> bool:
  return every > 0 and step % every == 0
