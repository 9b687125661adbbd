"""The files evaluations/NAME/step_NNNNNN.jsonl: the completions of evaluations, as rollouts."""

import contextlib
import logging
import re
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.files.atomic import replace_file
from grpo_jax.files.disk import writing
from grpo_jax.run_folder.rollout_log import Decode, TokenTexts, json_line, rollout_records
from grpo_jax.types import RolloutGroup

_log = logging.getLogger(__name__)

FOLDER = "evaluations"


class EvaluationLog:
  """Writes one file for each evaluation of each set, in the schema of rollouts/."""

  def __init__(self, workdir: Path, decode: Decode | None, *, max_mb: float | None = None):
    """Makes no file yet.

    Args:
      workdir: Run folder.
      decode: Token ids to text; None leaves the texts of tokens out.
      max_mb: Largest size of a file in megabytes (1e6 bytes); None: no limit.
    """
    self._folder = workdir / FOLDER
    self._texts = TokenTexts(decode) if decode else None
    self._max_bytes = None if max_mb is None else int(max_mb * 1e6)

  def write(self, step: int, name: str, groups: Sequence[RolloutGroup]) -> Path:
    """Writes the completions of one evaluation, whole groups up to the largest size.

    Args:
      step: Step of the weights.
      name: Name of the evaluation set.
      groups: Groups in the order of the prompts.
    """
    path = self.path(step, name)
    with writing(path):
      path.parent.mkdir(parents=True, exist_ok=True)
    kept, size = [], 0
    for number, group in enumerate(groups):
      text = "".join(map(json_line, self.records(step, number, group)))
      size += len(text.encode())
      if self._max_bytes is not None and size > self._max_bytes:
        _log.info("%s: the first %d of %d prompts are kept", path, number, len(groups))
        break
      kept.append(text)
    replace_file(path, kept)
    return path

  def path(self, step: int, name: str) -> Path:
    """Returns the file of an evaluation."""
    folder = urllib.parse.quote(name, safe=" ,;=+")
    folder = folder.replace(".", "%2E") if folder.startswith(".") else folder  # "..", say.
    return self._folder / folder / f"step_{step:06d}.jsonl"

  @contextlib.contextmanager
  def appending(self, step: int, name: str) -> Iterator[Callable[..., None]]:
    """Begins the file of an evaluation; yields a function that appends one group.

    The function takes the arguments of `records` without the step.
    """
    path = self.path(step, name)
    with writing(path):
      path.parent.mkdir(parents=True, exist_ok=True)
      path.unlink(missing_ok=True)

    def append(*group: Any) -> None:
      with writing(path), open(path, "a", encoding="utf-8") as file:
        file.writelines(map(json_line, self.records(step, *group)))

    yield append

  def records(
    self,
    step: int,
    number: int,
    group: RolloutGroup,
    logprobs: Sequence[np.ndarray] | None = None,
  ) -> list[dict[str, Any]]:
    """Returns the records of one group.

    Args:
      step: Step of the weights.
      number: Place of the group in the set.
      group: Group with its rewards.
      logprobs: Policy's logprobs of the tokens of each completion; None: they are not known.
    """
    nothing = np.full(len(group.rollouts), np.nan)  # nobody learns from them.
    known = None if logprobs is None else [logprobs]
    records = rollout_records(step, [group], [nothing], known, self._texts)
    return [{**record, "group": number} for record in records]


def files(folder: Path) -> Iterator[tuple[str, int, Path]]:
  """Yields the name of the set, the step and the file of every evaluation of a run folder."""
  for path in sorted((folder / FOLDER).glob("*/step_*.jsonl")):
    found = re.fullmatch(r"step_(\d+)\.jsonl", path.name)
    if found and path.is_file():
      yield urllib.parse.unquote(path.parent.name), int(found[1]), path


def drop(workdir: Path, start_step: int) -> None:
  """Removes the files of steps that a run takes again, and files half written.

  The evaluation of the step at which the run continues may be part of its checkpoint: it stays.
  """
  for _, step, path in files(workdir):
    if step > start_step:
      path.unlink()
  for path in (workdir / FOLDER).glob("*/step_*.jsonl.tmp"):
    path.unlink()
