"""`grpo_jax.train`: a training run as one call."""

import copy
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from grpo_jax import configuration, processes
from grpo_jax import train as training
from grpo_jax.api import callbacks, rewards, row_files
from grpo_jax.api.callbacks import OnSteps
from grpo_jax.api.run import Run
from grpo_jax.compilation import gpu_share
from grpo_jax.config import configuration as checking
from grpo_jax.config.configuration import ConfigError
from grpo_jax.errors import ExpectedFailure
from grpo_jax.files import installed, local_paths
from grpo_jax.processes import starting
from grpo_jax.run_folder import notices, screen, workdirs

# What is handed over is checked here, with messages of our own.
if TYPE_CHECKING:
  ConfigOrName = str | os.PathLike[str] | ConfigDict
  Rows = Iterable[Mapping[str, Any]]
else:
  ConfigOrName = Rows = Any


def train(
  config: ConfigOrName,
  workdir: str | os.PathLike[str],
  *,
  on_step: OnSteps = None,
  rows: Rows | None = None,
  evaluation_rows: Rows | None = None,
  reward: Any = None,
  **overrides: Any,
) -> Run:
  """Trains a model, and returns the run. The same call with the same folder continues a run.

      run = grpo_jax.train("quickstart", "runs/first", total_steps=3, **{"loss.clip_high": 0.28})

  The folder belongs to this call until it returns. The stop button of a notebook (Ctrl-C, a
  KeyboardInterrupt) ends the run with a checkpoint of the last whole step and is raised again; a
  second one ends it at once, without. Either way `grpo_jax.open(workdir)` returns the run.

  On several hosts every process makes the same call (docs/hosts.md); the first one joins the
  processes, so that it must come before anything else that uses JAX's devices.

  Args:
    config: Name of a config of the package, such as "quickstart"; path of a config file; or a
      config that `grpo_jax.configuration.load` returned, which is not changed.
    workdir: Run folder, or its URL; made if it is missing. Its files: README.md, "What a run
      leaves".
    on_step: Function (step, metrics), or several, called after every step with the metrics of that
      step, and with those of the evaluation before it if there was one. Its method
      `on_evaluation(step, metrics)`, if it has one, is called after every evaluation. StopTraining
      ends the run with a checkpoint; another exception does so, too, and is raised again.
    rows: Training data: an iterable of dicts with the fields of a row, such as "problem" and
      "expected_answer" (docs/data.md): a list, a generator that ends, a data frame, a dataset of
      the datasets library. They become the file rows.jsonl of the run folder. What the config says
      of its own data, such as a system prompt, is only used if the call names it. A run that
      continues with other rows warns. With mode="offline" they are recorded groups
      (docs/offline.md).
    evaluation_rows: Held-out rows, as `rows`. Where `rows` are given and these are not, nothing is
      evaluated, unless the call names other rows or splits some off (docs/python_api.md).
    reward: Function (prompt, completion, info) that returns a number, or a dict of components,
      which may be a lambda or a function of the notebook; or a class of environments
      (docs/environments.md). It scores training and evaluation data.
    **overrides: Fields of the config by dotted name: `total_steps=3`, `**{"loss.clip_high": 0.28}`.

  Raises:
    ConfigError: An argument or the configuration cannot work.
    ExpectedFailure: The folder is in use, or another failure that a user can repair: data, servers,
      the disk, gradients, other versions of packages than grpo_jax needs.
    KeyboardInterrupt: The run was interrupted; what was learned is saved.
  """
  installed.check()
  hooks = callbacks.Callbacks(callbacks.functions(on_step))
  place = workdir if local_paths.is_url(workdir) else pathlib.Path(workdir).expanduser()
  folder = workdirs.local_folder(place)
  before, named = _chosen(config, overrides)
  gpu_share.set_for_run(before.get("engine"))
  starting.start(before.get("distributed"))
  files = _files(rows, evaluation_rows)
  with notices.on_screen(screen.Screen()):
    chosen = row_files.with_rows(before, folder, files, named)
  if reward is not None:
    chosen = rewards.with_reward(chosen, reward)
  elif rows is not None and not named & {"data.environment", "data.tasks"}:
    row_files.check_scored(before, chosen)
  checking.check(chosen, [training.validate])
  starting.allow_open_files()
  with processes.failing(), workdirs.opened(place, stop=hooks, named="workdir"):
    is_continued = bool(workdirs.steps(folder))
    for name, lines in files.items():
      row_files.write(lines, folder / name, is_continued=is_continued)
    if reward is not None:
      rewards.record(reward, folder, is_continued=is_continued)
    try:
      training.train(chosen, folder, stop=hooks, sinks=[hooks])
    except ExpectedFailure as error:
      raise error.with_traceback(None) from None  # its message is all that a user needs.
    except KeyboardInterrupt:
      raise KeyboardInterrupt(_interrupted(folder)) from None
  if isinstance(hooks.error, KeyboardInterrupt):  # it came while a function was called.
    raise KeyboardInterrupt(_interrupted(folder)) from None
  if hooks.error is not None:
    raise hooks.error
  return Run(folder)


def _chosen(config: ConfigOrName, overrides: Mapping[str, Any]) -> tuple[ConfigDict, set[str]]:
  """Returns a config of this call's own with the overrides, and the names of the fields that the
  caller has set: in the call, or in a config that was loaded before."""
  if isinstance(config, ConfigDict):
    changed = configuration.changed(config)
    chosen = copy.deepcopy(config)
  elif isinstance(config, str | os.PathLike):
    changed = set()
    chosen = configuration.load(os.fspath(config))
  else:
    raise ConfigError(
      "config must be the name of a config, a path, or what grpo_jax.configuration.load returned;"
      f" got {config!r:.80}"
    )
  if not overrides:
    return chosen, changed
  named = changed | configuration.names_in(chosen, overrides)
  return configuration.override(chosen, overrides), named


def _files(rows: Rows | None, evaluation_rows: Rows | None) -> dict[str, list[str]]:
  """Returns the lines of the files of rows that were given, by the name of the file."""
  given = {
    (row_files.TRAINING, "rows"): rows,
    (row_files.EVALUATION, "evaluation_rows"): evaluation_rows,
  }
  return {
    file: row_files.lines(found, name) for (file, name), found in given.items() if found is not None
  }


def _interrupted(folder: pathlib.Path) -> str:
  """Returns where an interrupted run stands and how it continues."""
  steps = workdirs.steps(folder)
  saved = f"the checkpoint of step {steps[-1]} is saved" if steps else "no step was done"
  return (
    f"{saved}; the same call continues, grpo_jax.open({str(folder)!r}) returns the run as it is"
  )
