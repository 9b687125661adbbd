"""Prints the lines of steps and evaluations, and regularly a sampled group."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_jax import metrics
from grpo_jax.metrics import scored_groups
from grpo_jax.run_folder import console
from grpo_jax.run_folder.options import LoggingOptions
from grpo_jax.run_folder.sinks.base import Opening, Sink, StepRollouts


def make(
  opening: Opening, *, samples_every_steps: int = LoggingOptions.samples_every_steps
) -> Sink:
  """Opens the sink.

  Args:
    opening: Run for which the sink is opened.
    samples_every_steps: Steps between two prints of a group's best and worst completion; 0: never.
  """
  return _Console(opening, samples_every_steps)


class _Console(Sink):
  """See `make`."""

  def __init__(self, opening: Opening, samples_every_steps: int):
    self._screen = opening.screen
    self._total_steps = opening.total_steps
    self._every = samples_every_steps
    self._first: dict[str, float] = {}  # the first value of every evaluation metric.
    file = opening.workdir / "metrics.jsonl"
    text = file.read_text(errors="replace") if file.is_file() else ""
    rows = [row for row in metrics.parse_lines(text)[0] if row["step"] < opening.start_step]
    for row in rows:
      self._remember_first(row)
    self._screen.recall(rows, opening.start_step)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    evaluated = evaluations(values)
    for name in evaluated:
      self._screen.print(console.eval_line(name, step, values, self._first))
    if evaluated:
      self._screen.evaluated(step, values)
    if "rollout/reward_mean" in values:
      self._screen.step(step, self._total_steps, values)
    self._remember_first(values)

  def write_rollouts(self, rollouts: StepRollouts) -> None:
    groups = rollouts.groups
    for line in console.failure_lines(groups):
      self._screen.print(line)
    if groups and self._every and rollouts.step % self._every == 0:
      chosen = next((i for i, group in enumerate(groups) if scored_groups.has_signal(group)), 0)
      if groups[chosen].rollouts:
        self._screen.sample(rollouts.step, groups[chosen], rollouts.advantages[chosen])

  def _remember_first(self, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
      if name.startswith("eval/") and value is not None:
        self._first.setdefault(name, value)


def evaluations(names: Iterable[str]) -> list[str]:
  """Returns the NAMEs of metrics eval/NAME/..., sorted."""
  pattern = re.compile(r"eval/(.+?)(/errors)?/[^/]+$")
  return sorted({found[1] for name in names if (found := pattern.match(name))})
