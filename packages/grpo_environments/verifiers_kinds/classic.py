"""Environments of verifiers before 0.4: `vf.Environment`, with a data set and a rubric."""

import contextlib
import inspect
import signal
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_environments.verifiers_kinds.base import PackageError, VerifiersOptions, package, plain
from grpo_jax.environments.base import Endpoint, StepResult
from grpo_jax.environments.isolation import EnvironmentFailure


def load(name: str, args: Mapping[str, Any]) -> Any:
  """Returns the `vf.Environment` of a name or module.

  Raises:
    PackageError: The environment scores groups, or completes text.
  """
  module = package("verifiers")
  with _own_signals():
    environment = module.load_environment(name, **args)
  rubric = environment.rubric
  if getattr(rubric, "has_group_rewards", False):
    raise PackageError(
      f"the environment {name!r} has rewards of whole groups ({', '.join(_group_rewards(rubric))}),"
      " which are not supported: an attempt is scored by itself"
    )
  if getattr(rubric, "has_advantages", False):
    raise PackageError(
      f"the environment {name!r} computes advantages itself, which is not supported:"
      " advantages.estimator does so"
    )
  if getattr(environment, "message_type", "chat") != "chat":
    raise PackageError(f"the environment {name!r} completes text; only chats are supported")
  return environment


class DatasetTasks:
  """The rows of an environment's data set."""

  def __init__(self, environment: Any, split: str):
    """Builds the data set.

    Args:
      environment: Environment that has it.
      split: "train", or "eval" for the data set of the evaluation.

    Raises:
      PackageError: The environment has no such data set.
    """
    is_eval = split != "train"
    try:
      self._rows = environment.get_eval_dataset() if is_eval else environment.get_dataset()
    except ValueError as error:
      raise PackageError(
        f"the environment has no data set for the split {split!r}: {error}"
      ) from error

  def __len__(self) -> int:
    return len(self._rows)

  def task(self, number: int) -> dict[str, Any]:
    """Returns a row as the environment takes it."""
    return dict(self._rows[number])

  def row(self, number: int) -> dict[str, Any]:
    task = self.task(number)
    answer = task.get("answer")
    fields = {"messages": plain(task["prompt"])}
    return fields if answer in (None, "") else {**fields, "expected_answer": str(answer)}


class ClassicEnvironment:
  """Makes attempts with an environment's own loop of turns, tools and rubric."""

  def __init__(self, environment: Any, tasks: DatasetTasks, options: VerifiersOptions):
    if options.env or options.harness or options.max_turns is not None:
      raise PackageError(
        "harness, env and max_turns are options of verifiers from 0.4 on; environments of earlier"
        " versions take theirs as args"
      )
    self._environment = environment
    self._tasks = tasks
    threshold = getattr(environment, "pass_threshold", 0.5)
    self._solved = threshold if options.solved_reward is None else options.solved_reward
    self._http: Any = None

  async def start(self) -> None:
    self._http = package("openai").DefaultAsyncHttpxClient(timeout=None)

  async def close(self) -> None:
    if self._http is not None:
      await self._http.aclose()
    teardown = getattr(self._environment, "_teardown", None)
    if teardown is not None and inspect.iscoroutinefunction(teardown):
      await teardown()

  async def attempt(self, number: int, endpoint: Endpoint) -> StepResult:
    openai = package("openai").AsyncOpenAI(
      base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=self._http, max_retries=0
    )
    client = package("verifiers.clients").OpenAIChatCompletionsClient(openai)
    task = self._tasks.task(number)
    output = await self._environment.run_rollout(task, client, endpoint.model, {})
    if error := output.get("error"):
      raise EnvironmentFailure(*_named(error))
    reward = float(output.get("reward") or 0.0)
    numbers = output.get("metrics") or {}
    metrics = {str(k): float(v) for k, v in numbers.items() if isinstance(v, bool | int | float)}
    return StepResult(
      reward, done=True, metrics={"accuracy": float(reward >= self._solved), **metrics}
    )


def _named(error: Any) -> tuple[str, str]:
  """Returns kind and message of an error in an output."""
  if isinstance(error, Mapping):
    kind = error.get("error") or error.get("type") or "error"
    message = error.get("error_chain_str") or error.get("message") or error
    return str(kind), str(message)
  return (type(error).__name__ if isinstance(error, Exception) else "error"), str(error)


def _group_rewards(rubric: Any) -> list[str]:
  rubrics = getattr(rubric, "rubrics", [rubric])
  return [
    getattr(function, "__name__", repr(function))
    for one in rubrics
    for function in getattr(one, "_get_group_reward_funcs", list)()
  ]


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
  """Keeps the run's signal handlers: an environment of these versions installs its own."""
  kinds = (signal.SIGINT, signal.SIGTERM)
  before = [signal.getsignal(kind) for kind in kinds]
  try:
    yield
  finally:
    for kind, handler in zip(kinds, before, strict=True):
      if signal.getsignal(kind) is not handler:
        signal.signal(kind, handler)
