"""Runs one environment in a thread with its own event loop, under time-outs.

An environment that raises, sleeps forever or never yields harms only itself:
its thread (a daemon) is abandoned and the attempt is counted as failed. An environment that has
left too many threads behind (`hanging.MOST`) is not started again.
"""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import queue
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from grpo_jax.environments import hanging
from grpo_jax.environments.base import (
  NOT_AN_AGENT,
  NOT_DECLARED,
  AgentEnvironment,
  AnyFactory,
  Endpoint,
  Environment,
  SingleTurn,
  StepResult,
  as_factory,
  as_number,
  as_reward,
  has_run,
)
from grpo_jax.errors import as_raised, last_frames, message_of
from grpo_jax.models.chat.tool_calls import Parsed
from grpo_jax.types import FinishReason, Prompt

_LARGEST = float(np.finfo(np.float32).max)  # advantages are computed in float32.
_LONGEST = 400  # characters of an exception's message.
_GRACE_S = 0.5  # time for a cancelled call to end before its thread is abandoned.


class EnvironmentFailure(Exception):
  """An environment could not score an attempt. Failures are counted by `kind`."""

  def __init__(self, kind: str, message: str):
    super().__init__(message)
    self.kind = kind


def failed(error: BaseException) -> EnvironmentFailure:
  """Returns the failure of user code that raised; its message has the last frames of that code."""
  error = as_raised(error)
  lines = [" ".join(message_of(error).split())[:_LONGEST], *last_frames(error)]
  failure = EnvironmentFailure(type(error).__name__, "\n".join(lines))
  failure.__cause__ = error
  return failure


class IsolatedEnvironment:
  """One environment in its own thread; every failure is raised as EnvironmentFailure."""

  def __init__(self, factory: AnyFactory, prompt: Prompt, *, timeout_s: float):
    """Starts the thread.

    Args:
      factory: Factory that makes the environment, within the thread.
      prompt: Prompt that is attempted.
      timeout_s: Limit of every single call but `run`, in seconds.

    Raises:
      EnvironmentFailure: Too many threads of the factory's environments hang, or the system allows
        no more threads.
    """
    self._factory = factory
    self._hanging = as_factory(factory).hanging
    if refusal := self._hanging.refusal(f"the environment {prompt.environment!r}"):
      raise EnvironmentFailure("hanging", refusal)
    self._prompt = prompt
    self._timeout_s = timeout_s
    self._environment: Environment | AgentEnvironment | None = None
    self._is_lost = False  # whether it blocks its thread.
    self._jobs: queue.SimpleQueue[_EnvironmentCall | None] = queue.SimpleQueue()
    self._thread = threading.Thread(target=self._serve, daemon=True, name="environment")
    try:
      self._thread.start()
    except RuntimeError as error:
      raise EnvironmentFailure("RuntimeError", str(error)) from error

  async def start(self) -> None:
    """Makes and starts the environment."""
    await self._call(self._start)

  async def step(
    self,
    text: str,
    completion_ids: np.ndarray,
    finish_reason: FinishReason,
    *,
    read: Callable[[], Parsed] | None = None,
  ) -> StepResult:
    """Runs one turn.

    Args:
      text: Text of the turn.
      completion_ids: Token ids of the turn.
      finish_reason: Why the turn ended.
      read: Function that parses the tool calls of the turn; it may be the user's own, and is called
        in the thread. None: the form of tool calls is not known.

    Raises:
      EnvironmentFailure: The environment raised or took too long, or the reward is not finite.
    """
    return await self._call(lambda: self._step(text, completion_ids, finish_reason, read))

  async def run(self, endpoint: Endpoint, *, timeout_s: float) -> StepResult:
    """Has an agent's environment make its attempt; cancelling the caller cancels the agent.

    Args:
      endpoint: Server that answers for the policy.
      timeout_s: Limit of the attempt, in seconds.

    Raises:
      EnvironmentFailure: The environment raised or took too long, or the reward is not finite.
    """
    return await self._call(lambda: self._run(endpoint), timeout_s=timeout_s)

  async def close(self) -> None:
    """Closes the environment and ends the thread, without waiting for a blocked environment: that
    is closed if and when its call returns.

    Raises:
      EnvironmentFailure: Closing raised or took too long.
    """
    closing = self._call(self._close)
    self._jobs.put(None)
    try:
      await closing
    finally:
      self._hanging.leave(self._thread, after_s=0.0 if self._is_lost else hanging.WINDING_UP_S)

  def _started(self) -> Environment | AgentEnvironment:
    if self._environment is None:
      raise RuntimeError("start() has not been awaited")
    return self._environment

  async def _start(self) -> None:
    environment = self._environment = self._factory(self._prompt)
    await environment.start()

  async def _step(
    self,
    text: str,
    completion_ids: np.ndarray,
    finish_reason: FinishReason,
    read: Callable[[], Parsed] | None,
  ) -> StepResult:
    environment = self._started()
    if has_run(environment):
      raise EnvironmentFailure("type", NOT_DECLARED.format(type(environment).__name__))
    step_message = getattr(environment, "step_message", None)
    if step_message is None or read is None:
      stepping = cast(Environment, environment).step(text, completion_ids, finish_reason)
    else:
      stepping = step_message(read(), completion_ids, finish_reason)
    return _checked(await stepping, name_of(environment, "step"))

  async def _run(self, endpoint: Endpoint) -> StepResult:
    environment = self._started()
    if not has_run(environment):
      raise EnvironmentFailure("type", NOT_AN_AGENT.format(type(environment).__name__))
    return _checked(
      await cast(AgentEnvironment, environment).run(endpoint), name_of(environment, "run")
    )

  async def _close(self) -> None:
    environment, self._environment = self._environment, None
    if environment is not None:
      await environment.close()

  def _call(
    self, make: Callable[[], Coroutine[Any, Any, Any]], *, timeout_s: float | None = None
  ) -> Awaitable[Any]:
    """Passes a call to the thread; the awaitable waits for its result."""
    job = _EnvironmentCall(make, self._timeout_s if timeout_s is None else timeout_s)
    self._jobs.put(job)
    return self._result(job)

  async def _result(self, job: "_EnvironmentCall") -> Any:
    if self._is_lost:
      return None
    try:
      async with asyncio.timeout(job.timeout_s + _GRACE_S):  # 3.11's wait_for eats a cancel.
        failure, value = await asyncio.wrap_future(job.future)
    except TimeoutError as error:
      self._is_lost = True
      raise job.timeout() from error
    except asyncio.CancelledError:
      job.cancel()
      raise
    if failure is not None:
      raise failure
    return value

  def _serve(self) -> None:
    """Runs the calls one after another in one event loop; the body of the thread."""
    try:
      loop = asyncio.new_event_loop()
    except OSError as error:  # a loop holds three file descriptors.
      self._refuse(error)
      return
    tasks, context = _own_tasks(loop), contextvars.copy_context()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
      return loop.run_until_complete(loop.create_task(work, context=context))

    try:
      asyncio.set_event_loop(loop)
      while job := self._jobs.get():
        if job.future.set_running_or_notify_cancel():
          job.future.set_result(run(self._guarded(job)))
      closing = _EnvironmentCall(self._close, self._timeout_s)
      run(self._guarded(closing))  # does nothing unless the closing was cancelled.
      run(_end(loop, tasks))
    finally:
      asyncio.set_event_loop(None)
      loop.close()

  def _refuse(self, error: OSError) -> None:
    """Answers all calls with the reason why there is no event loop."""
    while job := self._jobs.get():
      if job.future.set_running_or_notify_cancel():
        job.future.set_result((EnvironmentFailure("OSError", str(error)), None))

  async def _guarded(self, job: "_EnvironmentCall") -> tuple[EnvironmentFailure | None, Any]:
    """Awaits a call of the environment and returns what it raises, so that no loop sees it."""
    clock = asyncio.timeout(job.timeout_s)
    try:
      async with clock:
        job.started()
        return None, await job.make()
    except BaseException as error:  # also SystemExit: an environment must not end the run.
      if clock.expired():
        return job.timeout(), None
      if isinstance(error, EnvironmentFailure):
        return error, None
      return failed(error), None


def _own_tasks(loop: asyncio.AbstractEventLoop) -> "weakref.WeakSet[asyncio.Task[Any]]":
  """Has a loop record its tasks, and returns the record.

  `asyncio.all_tasks` and what uses it, such as `asyncio.Runner`, look through the tasks of all
  loops of the process: the time to end one environment would grow with the number of attempts.
  """
  tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()

  def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(coroutine, loop=loop, **options)
    tasks.add(task)
    return task

  loop.set_task_factory(make)
  return tasks


async def _end(loop: asyncio.AbstractEventLoop, tasks: Iterable[asyncio.Task[Any]]) -> None:
  """Ends what an environment has left in its loop."""
  left = [task for task in tasks if task is not asyncio.current_task() and not task.done()]
  for task in left:
    task.cancel()
  await asyncio.gather(*left, return_exceptions=True)
  await loop.shutdown_asyncgens()
  await loop.shutdown_default_executor()


class _EnvironmentCall:
  """One call of an environment."""

  def __init__(self, make: Callable[[], Coroutine[Any, Any, Any]], timeout_s: float):
    self.make = make
    self.timeout_s = timeout_s
    self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    self._lock = threading.Lock()  # guards both below.
    self._cancel: Callable[[], object] | None = None  # cancels the call, from any thread.
    self._is_unwanted = False

  def started(self) -> None:
    """Notes the task that makes the call; called in it.

    Raises:
      asyncio.CancelledError: The call was cancelled before it began.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    with self._lock:
      if self._is_unwanted:  # a call that never waits would not see a cancelled task.
        raise asyncio.CancelledError
      self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)

  def cancel(self) -> None:
    """Cancels the call, running or not; called in the thread of the caller."""
    with self._lock:
      self._is_unwanted = True
      if self._cancel is not None:
        with contextlib.suppress(RuntimeError):  # its loop is closed: the call is over.
          self._cancel()

  def timeout(self) -> EnvironmentFailure:
    """Returns the failure of a call that takes too long."""
    return EnvironmentFailure("timeout", f"no answer within {self.timeout_s:g} s")


def name_of(environment: Any, method: str) -> str:
  """Returns the name of what scores an attempt: a reward function, or a method of a class."""
  if isinstance(environment, SingleTurn):
    return environment.name
  return f"{type(environment).__qualname__}.{method}"


def _checked(result: Any, name: str) -> StepResult:
  """Returns the result with its numbers as floats; raises EnvironmentFailure if it is invalid.

  Args:
    result: Result of the environment.
    name: Name of what has returned it, for messages.
  """
  if not isinstance(result, StepResult) or not isinstance(result.observation, str):
    raise EnvironmentFailure(
      "type", f"{name} returned {result!r:.200}: it must return a valid StepResult"
    )
  try:
    metrics = {str(name): as_number(value) for name, value in result.metrics.items()}
    reward = as_reward(result.reward)
    total = sum(reward.values()) if isinstance(reward, dict) else reward
  except (TypeError, ValueError, OverflowError) as error:
    raise EnvironmentFailure("type", f"{name}: a reward or metric: {error}") from error
  if not abs(total) <= _LARGEST:  # also NaN.
    raise EnvironmentFailure("nan", f"{name} gave the reward {result.reward!s:.200}")
  stop_strings = None if result.stop_strings is None else checked_stops(result.stop_strings)
  return dataclasses.replace(
    result,
    reward=reward,
    done=bool(result.done),
    metrics=metrics,
    stop_strings=stop_strings,
    messages=_checked_mappings("messages", result.messages),
    tool_calls=_checked_mappings("tool_calls", result.tool_calls),
  )


def _checked_mappings(field: str, values: Any) -> tuple[Mapping[str, Any], ...]:
  """Returns the messages or tool calls of a StepResult.

  Raises:
    EnvironmentFailure: The value is not a list of mappings, or a message has no role.
  """
  is_list = isinstance(values, Sequence) and not isinstance(values, str)
  found = [each for each in values if isinstance(each, Mapping)] if is_list else []
  if not is_list or len(found) < len(values):
    raise EnvironmentFailure("type", f"{field} must be a list of mappings, got {values!r:.200}")
  if field == "messages" and not all(isinstance(each.get("role"), str) for each in found):
    raise EnvironmentFailure("type", f"every message needs a role, got {values!r:.200}")
  return tuple(found)


def checked_stops(strings: Any) -> tuple[str, ...]:
  """Returns the stop strings that an environment asks for; a single string is rejected.

  Raises:
    EnvironmentFailure: The value is not a list of non-empty strings.
  """
  is_list = isinstance(strings, Sequence) and not isinstance(strings, str)
  if not is_list or not all(isinstance(text, str) and text for text in strings):
    raise EnvironmentFailure(
      "type", f"stop_strings must be a list of strings, got {strings!r:.200}"
    )
  return tuple(strings)
