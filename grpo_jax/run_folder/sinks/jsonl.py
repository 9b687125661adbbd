"""The files metrics.jsonl and rollouts/step_NNNNNN.jsonl, which reports and resumed runs read.

When they are opened at step s, the records of steps >= s are dropped, since those steps are
repeated: a killed and resumed run leaves the same files as an uninterrupted one.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_jax import metrics
from grpo_jax.files.atomic import replace_file
from grpo_jax.files.disk import writing
from grpo_jax.run_folder.options import LoggingOptions
from grpo_jax.run_folder.rollout_log import TokenTexts, drop_rollouts, json_line, rollout_records
from grpo_jax.run_folder.sinks.base import Opening, Sink, StepRollouts
from grpo_jax.values import json_numbers

_log = logging.getLogger(__name__)


def make(
  opening: Opening, *, rollouts_every_steps: int = LoggingOptions.rollouts_every_steps
) -> Sink:
  """Opens the files.

  Args:
    opening: Run for which the files are opened.
    rollouts_every_steps: Steps between two files of rollouts; 0: never.

  Raises:
    WriteError: The folder cannot be written to.
  """
  return _Jsonl(opening, rollouts_every_steps)


class MetricLines:
  """The file metrics.jsonl: one object per step, in the order of steps.

  JSON has neither NaN nor infinity: both are written as null.
  """

  def __init__(self, path: Path, start_step: int):
    """Opens the file at a step, without the lines of that step and later ones."""
    with writing(path):  # something else than a file may have its name.
      text = path.read_text(errors="replace") if path.exists() else ""
    rows, broken = metrics.parse_lines(text)
    kept = [row for row in rows if row["step"] < start_step]
    self.broken = [number for number in broken if number < text.count("\n") + 1]
    replace_file(path, (json_line(row) for row in kept))
    self._path = path
    self._offset = path.stat().st_size  # start of the last line, in bytes.
    self._last: dict[str, Any] = {"step": start_step - 1}  # nothing written since it was opened.
    self._start_step = start_step

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Adds a line, or adds the values to the last line if it is that of the same step."""
    if step < max(self._start_step, self._last["step"]):
      raise ValueError(f"steps must not go back: got {step} after {self._last['step']}")
    finite = {name: json_numbers.finite(value) for name, value in values.items()}
    if step == self._last["step"]:
      self._last |= finite
    else:
      self._offset = self._path.stat().st_size
      self._last = {"step": step} | finite
    with writing(self._path), open(self._path, "r+b") as file:
      file.seek(self._offset)
      file.write(json_line(self._last).encode())
      file.truncate()


class _Jsonl(Sink):
  """See `make`. `write` has flushed every line when it returns."""

  def __init__(self, opening: Opening, rollouts_every_steps: int):
    self._folder = opening.workdir / "rollouts"
    self._every = rollouts_every_steps
    self._texts = TokenTexts(opening.decode) if opening.decode else None
    with writing(opening.workdir):
      drop_rollouts(self._folder, opening.start_step)
    self._lines = MetricLines(opening.workdir / "metrics.jsonl", opening.start_step)
    if self._lines.broken:
      _log.warning("metrics.jsonl: lines %s could not be read and were dropped", self._lines.broken)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    self._lines.write(step, values)

  def write_rollouts(self, rollouts: StepRollouts) -> None:
    step = rollouts.step
    if not self._every or step % self._every:
      return
    records = rollout_records(
      *(step, rollouts.groups, rollouts.advantages, rollouts.policy_logprobs),
      *(self._texts, rollouts.shaped_rewards),
    )
    with writing(self._folder):
      self._folder.mkdir(exist_ok=True)
    replace_file(self._folder / f"step_{step:06d}.jsonl", map(json_line, records))
