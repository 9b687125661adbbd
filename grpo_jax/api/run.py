"""A run as an object: what its folder holds as data frames, samples of its weights, its report."""

import functools
import importlib.util
import logging
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from grpo_jax import notebook, report
from grpo_jax.building import stored
from grpo_jax.errors import ExpectedFailure
from grpo_jax.files import local_paths
from grpo_jax.report import run_data
from grpo_jax.run_folder import stored_steps

if TYPE_CHECKING:
  from grpo_jax.api.sampling import Prompts, Sampler


_log = logging.getLogger(__name__)


class NotARun(ExpectedFailure, FileNotFoundError):
  """A folder is not the folder of a run."""


class NoSuchStep(ExpectedFailure, LookupError):
  """A run has recorded nothing of a step."""


def open(workdir: str | os.PathLike[str]) -> "Run":
  """Returns the run of a folder. The run may still be training.

  Raises:
    NotARun: There is no such folder, or no run has written to it.
  """
  folder = local_paths.checked("workdir", workdir).expanduser()
  if stored.is_run(folder):
    return Run(folder)
  if not folder.is_dir():
    raise NotARun(f"there is no run folder {folder}{_runs_in(folder.parent)}")
  raise NotARun(
    f"{folder} is not a run folder: it has neither metrics.jsonl nor checkpoints/{_runs_in(folder)}"
  )


class Run:
  """A run and its folder; made by `grpo_jax.train` and `grpo_jax.open`.

  Everything is read when it is asked for, so a run that is still training can be looked at.
  """

  def __init__(self, workdir: pathlib.Path):
    """Makes a run of a folder that is one; see `open`."""
    self._workdir = workdir

  @property
  def workdir(self) -> pathlib.Path:
    """The run folder."""
    return self._workdir

  @property
  def config(self) -> Any:
    """The options of the run, as it last began or continued; `run.config.loss.clip_high`.

    Raises:
      NoWeights: The file config.json is missing or damaged.
    """
    return stored.editable_config_of(self._workdir)

  @property
  def checkpoints(self) -> dict[int, pathlib.Path]:
    """The folders of the complete checkpoints by step, the newest last."""
    folder = self._workdir / "checkpoints"
    return {step: stored_steps.folder(folder, step) for step in stored_steps.complete(folder)}

  @property
  def step(self) -> int:
    """Number of steps that are done, according to metrics.jsonl."""
    return sum("weight_version" in row for row in self._rows())

  @property
  def params(self) -> Any:
    """The weights of the newest checkpoint: float32 arrays on the devices, read at each access.

    If an adapter was trained, these are all weights, with the adapter merged.

    Raises:
      NoWeights: There is no checkpoint.
    """
    return self._sampler.params()

  def metrics(self) -> Any:
    """Returns the metrics of all steps, as metrics.jsonl has them; names: docs/metrics.md.

    Returns:
      A pandas DataFrame, one row per step, whose index is the step; NaN where a metric was not
      measured. Without pandas a list of dicts.
    """
    rows = self._rows()
    frames = _pandas()
    return frames.DataFrame(rows).set_index("step") if frames and rows else _as_frame(rows)

  def rollouts(self, step: int | None = None) -> Any:
    """Returns the completions that were sampled, one row each.

    Args:
      step: Number of the step; a negative one counts from the last: -1. None: all steps.

    Returns:
      A pandas DataFrame with the fields of rollouts/step_NNNNNN.jsonl: prompt, completion, reward,
      advantage, ... Without pandas a list of dicts.

    Raises:
      NoSuchStep: No rollouts of this step were recorded.
    """
    files = run_data.load(self._workdir).rollouts
    if step is None:
      return _as_frame([each for path in files.values() for each in _lines(path)])
    return _as_frame(_lines(files[self._recorded(step, list(files))]))

  def completions(self, step: int = -1, *, limit: int = 20) -> notebook.Html:
    """Returns a table of completions with their rewards and advantages, for a cell of a notebook.

    Args:
      step: Number of the step; a negative one counts from the last.
      limit: Largest number of completions.

    Raises:
      NoSuchStep: No rollouts of this step were recorded.
    """
    files = run_data.load(self._workdir).rollouts
    found = self._recorded(step, list(files))
    return notebook.completions(_lines(files[found]), title=f"step {found}", limit=limit)

  def curve(self) -> notebook.Html:
    """Returns the curves of reward and evaluations, for a cell of a notebook."""
    return notebook.curve(self._rows(), total_steps=self._total_steps)

  def report(self) -> notebook.Page:
    """Writes report.html again and returns its path; as the last line of a cell it is shown there.

    Raises:
      WriteError: The file cannot be written.
    """
    return notebook.Page(report.write(self._workdir))

  def sample(
    self,
    prompts: "Prompts",
    *,
    step: int | None = None,
    before: bool = False,
    temperature: float = 0.0,
    max_tokens: int | None = None,
    seed: int = 0,
  ) -> Any:
    """Returns what the model answers.

        run.sample("2 + 2 =")
        run.sample("2 + 2 =", before=True)  # the model before training.

    Args:
      prompts: A problem, asked like the training data (with system prompt and template); or a
        conversation, a list of messages {"role", "content"}, asked as it is; or a list of
        problems and conversations.
      step: Step of the checkpoint whose weights answer; None: the newest one.
      before: Whether the initial weights answer: the model of `model.path`, without an adapter,
        also in a run that began with one (`model.lora.path`).
      temperature: Divides the logits; 0: the most likely tokens.
      max_tokens: Longest answer in tokens; None: that of the run's completions.
      seed: Random seed, for temperatures above 0.

    Returns:
      The answer; of a list of prompts, a list of answers.

    Raises:
      NoWeights: There is no such checkpoint.
      ConfigError: An argument cannot be used, or a prompt is too long for the model.
    """
    options = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    return self._sampler.sample(prompts, step=step, before=before, **options)

  def evaluate(self, *, step: int | str | None = None, **options: Any) -> Any:
    """Evaluates a checkpoint on held-out data: accuracy and pass@k with their uncertainty.

        run.evaluate(samples=4).summary()

    Args:
      step: Step of the checkpoint, or "best"; None: the newest one.
      **options: Options of `grpo_jax.evaluation.run`, such as `sets`, `samples`, `num_prompts`.

    Returns:
      The result: `summary()` is its text, `metrics` a dict of numbers.

    Raises:
      ConfigError: An option or a set cannot be used.
      NoWeights: There is no such checkpoint.
    """
    from grpo_jax import evaluation  # only now: it imports engines and environments.

    return evaluation.run(f"{self._workdir}:{'latest' if step is None else step}", **options)

  def __repr__(self) -> str:
    return f"Run({str(self._workdir)!r}: {', '.join(self._summary())})"

  def _repr_html_(self) -> str:
    """What a notebook shows: a line on the run, and its curves."""
    return notebook.run_html(str(self._workdir), self._summary(), self.curve())

  def _summary(self) -> list[str]:
    """Returns how far the run has come and what it has reached."""
    done, total = self.step, self._total_steps
    reached = [tile for tile in report.tiles(run_data.load(self._workdir)) if tile[1]]
    return [
      f"{done} of {total} steps" if total else f"{done} steps",
      *(f"{name.lower()} {before} → {after}" for name, before, after, _ in reached),
    ]

  @functools.cached_property
  def _sampler(self) -> "Sampler":
    from grpo_jax.api import sampling  # only now: it imports JAX.

    return sampling.Sampler(self._workdir, self.config)

  def _rows(self) -> list[Mapping[str, Any]]:
    return list(run_data.load(self._workdir).rows)

  @property
  def _total_steps(self) -> int | None:
    return run_data.load(self._workdir).config.get("total_steps")

  def _recorded(self, step: int, steps: list[int]) -> int:
    if not steps:
      raise NoSuchStep(
        f"{self._workdir} has no rollouts: logging.rollouts_every_steps was 0, or no step is done"
      )
    if step < 0 and -step <= len(steps):
      return steps[step]
    if step not in steps:
      raise NoSuchStep(
        f"{self._workdir} has no rollouts of step {step}; it has those of {_ranges(steps)}"
      )
    return step


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
  """Reads a file of rollouts; lines that cannot be read are left out, with a warning."""
  found, broken = run_data.records(path)
  if broken:
    _log.warning("%s: %d lines cannot be read", path, broken)
  return found


def _pandas() -> Any:
  """Returns pandas; None if it is not installed."""
  if importlib.util.find_spec("pandas") is None:
    return None
  return importlib.import_module("pandas")


def _as_frame(rows: Iterable[Mapping[str, Any]]) -> Any:
  """Returns rows as a DataFrame where there is pandas, otherwise as a list of dicts."""
  frames = _pandas()
  return frames.DataFrame(list(rows)) if frames else list(rows)


def _ranges(steps: list[int]) -> str:
  """Returns steps in short: "steps 0 to 13", or all of them where some in between are missing."""
  if steps == list(range(steps[0], steps[-1] + 1)):
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
  return f"steps {', '.join(map(str, steps))}"


def _runs_in(folder: pathlib.Path) -> str:
  """Returns "; there are runs in FOLDER: ..." of a folder such as runs/; or an empty string."""
  found = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
  more = ", ..." if len(found) > 5 else ""
  return f"; there are runs in {folder}: {', '.join(found[:5])}{more}" if found else ""
