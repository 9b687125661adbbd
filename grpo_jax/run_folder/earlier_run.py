"""What an earlier run left in a run folder, when there is no checkpoint to continue from."""

import logging
import pathlib

from grpo_jax import metrics, processes
from grpo_jax.files import atomic
from grpo_jax.files.disk import writing

_log = logging.getLogger(__name__)

# What a run that begins at step 0 would delete, overwrite or mix with its own output.
_WRITTEN = (
  *("metrics.jsonl", "rollouts", "evaluations", "tensorboard", "trackers", "report.html"),
  *("export", "adapter", "config.json", "output.log"),
)


def set_aside(workdir: pathlib.Path) -> pathlib.Path | None:
  """Moves the output of an earlier run to a folder earlier_N, if that run learned anything.

  Call it when a run begins at step 0: the earlier run's checkpoints were deleted, or it was killed
  before the first.

  Returns:
    The new folder; None if there was nothing to keep, and on processes other than the main one.

  Raises:
    WriteError: The output of the earlier run cannot be moved.
  """
  if not processes.is_main():
    return None
  steps = _steps_of(workdir)
  has_export = (workdir / "export").exists()
  if not steps and not has_export:
    return None
  number = 1
  while (target := workdir / f"earlier_{number}").exists():
    number += 1
  with writing(target):
    target.mkdir()
    for name in _WRITTEN:
      if (workdir / name).exists():
        atomic.move(workdir / name, target / name)
  what = f"steps {min(steps)} to {max(steps)}" if steps else "an export"
  _log.warning(
    "%s has %s of an earlier run but no checkpoint to continue from: beginning at step 0; the old"
    " files are now in %s",
    *(workdir, what, target),
  )
  return target


def _steps_of(workdir: pathlib.Path) -> set[int]:
  """Returns the steps that were learned, according to metrics.jsonl and the rollout files."""
  steps = set()
  for path in (workdir / "rollouts").glob("step_*.jsonl"):
    number = path.stem.removeprefix("step_")
    if number.isdecimal():
      steps.add(int(number))
  file = workdir / "metrics.jsonl"
  rows, _ = metrics.parse_lines(file.read_text(errors="replace") if file.is_file() else "")
  return steps | {row["step"] for row in rows if "weight_version" in row}
