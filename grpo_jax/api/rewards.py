"""A reward that is a Python function or class, named so that a config can hold it."""

import functools
import inspect
import logging
import pathlib
import re
import textwrap
from typing import Any

from ml_collections import ConfigDict

from grpo_jax import processes, registry
from grpo_jax.api import inline_rewards
from grpo_jax.config import configuration, modes
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import Config
from grpo_jax.environments import function
from grpo_jax.files import atomic
from grpo_jax.files.disk import writing

_log = logging.getLogger(__name__)

NAME = "reward"  # of the environment in the config and in metrics.
SOURCE = "reward.py"  # file of the run folder: the source that the run began with.
FORMS = (
  "a function (prompt, completion, info) that returns a number or a dict of components, or a class"
  " with the methods of an environment (docs/environments.md)"
)


def with_reward(config: ConfigDict, reward: Any) -> ConfigDict:
  """Returns a config whose training and evaluation data are scored by a function or class.

  Args:
    config: Config of a run.
    reward: Function or class; see `FORMS`. A function runs in a thread of this process, under
      `rollout.environment_timeout_s`, so it may be a lambda or a closure.

  Raises:
    ConfigError: The reward cannot be called in this way, or the config names its own rewards.
  """
  _check(configuration.typed(config), reward)
  path = _path_of(reward)
  if inspect.isclass(reward):
    settings = {"module": path}
  else:
    settings = {"module": "function", "path": path}
    try:
      function.make(path=path)
    except ValueError as error:
      raise ConfigError(f"reward: {str(error).replace(path, _called(reward))}") from error
  return configuration.replaced(
    config,
    {
      f"environments.{NAME}": settings,
      "data.environment": NAME,
      "data.rows_choose_environment": False,
      "evaluation.data.environment": None,
    },
  )


def record(reward: Any, workdir: pathlib.Path, *, is_continued: bool) -> None:
  """Writes the source of a reward into the run folder.

  Warns if a resumed run uses a different reward; the earlier source becomes reward_1.py. Values
  that a closure or an instance holds are not part of a source.

  Args:
    reward: Function or class.
    workdir: Run folder.
    is_continued: Whether the run has a checkpoint to continue from.

  Raises:
    WriteError: The file cannot be written.
  """
  source = source_of(reward)
  if not source or not processes.is_main():
    return
  path = workdir / SOURCE
  before = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else source
  if is_continued and before != source:
    number = 1
    while (earlier := workdir / f"reward_{number}.py").exists():
      number += 1
    with writing(earlier):
      atomic.move(path, earlier)
    _log.warning("reward: its source has changed since the run began; it was %s", earlier)
  with writing(path):
    atomic.replace_file(path, source)


def source_of(reward: Any) -> str:
  """Returns the source of a function or class; "" if it is not known."""
  while isinstance(reward, functools.partial):
    reward = reward.func
  found = reward if inspect.isroutine(reward) or inspect.isclass(reward) else type(reward)
  try:
    return textwrap.dedent(inspect.getsource(found))
  except (OSError, TypeError):
    return ""


def _check(config: Config, reward: Any) -> None:
  if not callable(reward):
    raise ConfigError(f"reward must be {FORMS}; got {reward!r:.80}")
  if inspect.isgeneratorfunction(reward) or inspect.isasyncgenfunction(reward):
    raise ConfigError(f"reward must return its value; {_called(reward)} is a generator")
  if inspect.isclass(reward):
    missing = [name for name in ("start", "step", "close") if not callable(_of(reward, name))]
    if missing:
      raise ConfigError(
        f"reward must be {FORMS}; the class {_called(reward)} has no {' and no '.join(missing)}"
      )
  if modes.is_offline(config):
    raise ConfigError(
      "reward: a run with mode='offline' takes the rewards of its recorded groups"
      " (offline.rewards); it cannot be given another one"
    )
  if config.data.datasets or config.data.tasks or config.evaluation.datasets:
    raise ConfigError(
      "reward: this config has several datasets or tasks, which name environments of their own"
      " (data.datasets, data.tasks, evaluation.datasets); name the function there, by"
      " environments.NAME.module='function' and environments.NAME.path='my_module.my_function'"
    )


def _of(owner: Any, name: str) -> Any:
  return getattr(owner, name, None)


def _path_of(reward: Any) -> str:
  """Returns a path under which `registry.function` finds the very object."""
  name = str(_of(reward, "__qualname__") or "")
  path = f"{_of(reward, '__module__')}.{name}"
  if re.fullmatch(r"\w+(\.\w+)*", path) and _leads_to(path, reward):
    return path
  alias = re.sub(r"\W+", "_", _called(reward)).strip("_") or "reward"
  setattr(inline_rewards, alias, reward)
  return f"{inline_rewards.__name__}.{alias}"


def _leads_to(path: str, reward: Any) -> bool:
  try:
    return registry.function(path) is reward
  except Exception:  # what importing a module raises; the object is handed over by itself then.
    return False


def _called(reward: Any) -> str:
  while isinstance(reward, functools.partial):
    reward = reward.func
  return str(_of(reward, "__qualname__") or type(reward).__qualname__).rpartition(".")[2]
