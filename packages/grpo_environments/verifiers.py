"""Environments of the verifiers package (Prime Intellect), by name or module.

Their data are the prompts, their turns and tools make the conversation, their rubrics the reward:
this module only puts our endpoint in place of their model. What is learned from are the tokens
that the endpoint sampled; the transcripts of the package are not used.

An environment is code of another author that runs in this process, with all its rights. It may
start programs, reach the network and download data.

    config.data.kind = "grpo_environments.verifiers.rows"
    config.data.task = "gsm8k"             # the environment's name, or its module
    config.data.task_args = dict(…)        # its arguments
    config.data.environment = "verifiers"

Versions before 0.4 have environments with `load_environment`; `verifiers.v1` has tasksets. Where
both exist (0.3), the module decides.
"""

import asyncio
import importlib
import importlib.util
import json
import threading
from collections.abc import Mapping
from typing import Any

from grpo_environments.verifiers_kinds import classic, tasksets
from grpo_environments.verifiers_kinds.base import (
  PackageError,
  Running,
  Tasks,
  VerifiersOptions,
  package,
)
from grpo_jax.environments.base import Endpoint, EnvironmentFactory, StepResult
from grpo_jax.http.background import BackgroundLoop
from grpo_jax.types import Prompt

FIELD = "verifiers"  # field of a row: the environment and the number of the task.

_SPLITS = ("train", "eval")


class Known:
  """Environments whose data were opened, by name, arguments and split: they are loaded once."""

  def __init__(self):
    self._lock = threading.Lock()
    self._classic: dict[str, Any] = {}
    self._tasks: dict[str, Tasks] = {}

  def tasks(self, name: str, args: Mapping[str, Any], split: str, size: int) -> Tasks:
    """Returns the tasks of an environment; see `rows`."""
    key = json.dumps([name, dict(args), split, size], sort_keys=True, default=str)
    with self._lock:
      if key not in self._tasks:
        self._tasks[key] = self._load(name, args, split, size)
      return self._tasks[key]

  def running(
    self, name: str, args: Mapping[str, Any], tasks: Tasks, options: VerifiersOptions
  ) -> Running:
    """Returns what makes attempts at tasks of an environment."""
    if isinstance(tasks, classic.DatasetTasks):
      return classic.ClassicEnvironment(self._environment(name, args), tasks, options)
    assert isinstance(tasks, tasksets.TasksetTasks)
    return tasksets.TasksetEnvironment(name, args, tasks, options)

  def _load(self, name: str, args: Mapping[str, Any], split: str, size: int) -> Tasks:
    if _is_classic(name):
      return classic.DatasetTasks(self._environment(name, args), split)
    return tasksets.TasksetTasks(name, args, size)

  def _environment(self, name: str, args: Mapping[str, Any]) -> Any:
    key = json.dumps([name, dict(args)], sort_keys=True, default=str)
    if key not in self._classic:
      self._classic[key] = classic.load(name, args)
    return self._classic[key]


KNOWN = Known()


class VerifiersEnvironments(EnvironmentFactory):
  """Makes the environments. Attempts of all of them are made in one event loop of their own."""

  is_agent = True

  def __init__(self, name: str | None, options: VerifiersOptions):
    """Starts the event loop.

    Args:
      name: Name of the only environment whose rows are taken; None: of any.
      options: Options of the environments.
    """
    self._name = name
    self._options = options
    self._loop = BackgroundLoop("verifiers")
    self._lock = threading.Lock()
    self._running: dict[str, tuple[Running, Any]] = {}

  def __call__(self, prompt: Prompt) -> "VerifiersAttempt":
    source = prompt.info.get(FIELD)
    if not isinstance(source, Mapping):
      raise ValueError(
        f"prompt {prompt.prompt_id}: the verifiers environment needs the rows of an environment of"
        " the package, data.kind='grpo_environments.verifiers.rows'"
      )
    if self._name is not None and source["id"] != self._name:
      raise ValueError(f"the row is of the environment {source['id']!r}, not {self._name!r}")
    return VerifiersAttempt(self, source)

  async def attempt(self, source: Mapping[str, Any], endpoint: Endpoint) -> StepResult:
    """Makes an attempt at a row's task."""
    running, started = self._environment(source)
    await asyncio.wrap_future(started)
    attempt = running.attempt(int(source["number"]), endpoint)
    return await asyncio.wrap_future(self._loop.submit(attempt))

  def close(self) -> None:
    """Ends all environments."""
    self._loop.close(self._end())

  def _environment(self, source: Mapping[str, Any]) -> tuple[Running, Any]:
    key = json.dumps({**source, "number": None}, sort_keys=True, default=str)
    with self._lock:
      if key not in self._running:
        name, args = source["id"], source["args"]
        tasks = KNOWN.tasks(name, args, source["split"], source["size"])
        running = KNOWN.running(name, args, tasks, self._options)
        self._running[key] = running, self._loop.submit(running.start())
      return self._running[key]

  async def _end(self) -> None:
    for running, _ in self._running.values():
      await running.close()


class VerifiersAttempt:
  """One attempt at a task."""

  def __init__(self, factory: VerifiersEnvironments, source: Mapping[str, Any]):
    self._factory = factory
    self._source = source

  async def start(self) -> None:
    """Does nothing; the environment starts with its first attempt."""

  async def run(self, endpoint: Endpoint) -> StepResult:
    """Has the environment hold its conversation with the policy, and score it."""
    return await self._factory.attempt(self._source, endpoint)

  async def close(self) -> None:
    """Does nothing; the environment cleans up after each attempt itself."""


class TaskRows:
  """The tasks of an environment as rows; see `rows`."""

  def __init__(self, name: str, args: Mapping[str, Any], split: str, size: int, label: str | None):
    self.name = label or name.rpartition("/")[2]
    self._tasks = KNOWN.tasks(name, args, split, size)
    self._source = {"id": name, "args": dict(args), "split": split, "size": size}

  def __len__(self) -> int:
    return len(self._tasks)

  def __getitem__(self, number: int) -> Mapping[str, Any]:
    return {**self._tasks.row(number), FIELD: {**self._source, "number": number}}

  def where(self, number: int) -> str:
    """Returns the place of a row, for messages."""
    return f"{self.name}:{number + 1}"


def rows(config: Any) -> TaskRows:
  """Opens the tasks of an environment: a kind of data, for `data.kind`.

  Args:
    config: Source that a data section describes (`data.sources.SourceConfig`): `task` is the name
      or the module of the environment, `task_args` its arguments, `split` "train" or "eval" (its
      data set for evaluation, in versions before 0.4), `size` the number of tasks of a taskset
      without end.

  Raises:
    ValueError: The package or the environment is not installed, or it cannot be learned from.
  """
  split = config.split or "train"
  if not config.task:
    raise ValueError("data.task must be the name of an environment of verifiers, or its module")
  if split not in _SPLITS:
    raise ValueError(f"data.split must be one of {', '.join(_SPLITS)}, got {split!r}")
  return TaskRows(config.task, dict(config.task_args), split, config.size, config.name)


def make(
  *,
  id: str | None = None,
  harness: str | Mapping[str, Any] | None = None,
  env: Mapping[str, Any] | None = None,
  max_turns: int | None = None,
  solved_reward: float | None = None,
) -> VerifiersEnvironments:
  """Makes the environment of rows that `rows` opened.

  Args:
    id: Name of the only environment whose rows are taken; None: of any that the data name.
    harness: Program that talks to the policy, an id of the package ("bash", "null", …) or its
      options; None: that of the taskset, otherwise a loop of turns and tools in this process.
      From 0.4 on.
    env: Options of the package's `env` section, e.g. dict(agent=dict(runtime=dict(type="docker")))
      or another environment for a taskset, dict(id="best-of-n"). From 0.4 on.
    max_turns: Largest number of turns of an attempt; None: as the environment has it. From 0.4 on.
    solved_reward: Smallest reward of a solved attempt (metric accuracy); None: the environment's
      `pass_threshold` before 0.4, otherwise 1.

  Returns:
    A factory of environments. Metrics of an attempt: accuracy, and those of the environment, which
    are the values of its reward functions before 0.4. From 0.4 on, several rewards are components.

  Raises:
    ValueError: The package is not installed.
  """
  if isinstance(id, str):
    package("verifiers")
  options = VerifiersOptions(
    harness=harness, env=env or {}, max_turns=max_turns, solved_reward=solved_reward
  )
  return VerifiersEnvironments(id, options)


def _is_classic(name: str) -> bool:
  """Returns whether an environment is one of `load_environment`.

  Raises:
    PackageError: The package, or the environment's module, is not installed.
  """
  package("verifiers")
  has_tasksets = importlib.util.find_spec("verifiers.v1") is not None
  module_name = name.rpartition("/")[2].partition("@")[0].replace("-", "_")
  if has_tasksets and _exists(f"verifiers.v1.tasksets.{module_name}"):
    return False
  if not _exists(module_name):
    raise PackageError(
      f"no environment {name!r}: the module {module_name} is not installed. Environments are"
      " packages of their own, e.g. of the Environments Hub: prime env install OWNER/NAME"
    )
  module = importlib.import_module(module_name)
  if callable(getattr(module, "load_environment", None)):
    if has_tasksets and not _exists("verifiers.envs"):
      raise PackageError(
        f"the environment {name!r} has load_environment, which verifiers"
        f" {package('verifiers').__version__} does not support: pip install 'verifiers<0.4'"
      )
    return True
  version = package("verifiers").__version__
  if not has_tasksets or _exists("verifiers.envs"):
    raise PackageError(
      f"the module {module_name} has no load_environment, and tasksets need verifiers 0.4 or newer;"
      f" {version} is installed"
    )
  return False


def _exists(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:  # one of the packages that it is in.
    return False
