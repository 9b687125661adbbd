"""Runs one environment in a thread with an event loop of its own, under time-outs.

An environment that raises, sleeps for ever or never yields costs nothing but itself:
its thread is left behind (it is a daemon) and the attempt is told apart as failed.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from grpo_jax.environments.base import Environment, EnvironmentFactory, StepResult
from grpo_jax.types import FinishReason, Prompt


class EnvironmentFailure(Exception):
  """An environment could not score an attempt. `kind` is what failures are counted by."""

  def __init__(self, kind: str, message: str):
    super().__init__(message)
    self.kind = kind


class IsolatedEnvironment:
  """One environment in its own thread; every failure comes out as EnvironmentFailure."""

  def __init__(self, factory: EnvironmentFactory, prompt: Prompt, *, timeout_s: float):
    """Starts the thread.

    Args:
      factory: makes the environment, within the thread.
      prompt: what is attempted.
      timeout_s: limit of every single call, in seconds.
    """
    self._factory = factory
    self._prompt = prompt
    self._timeout_s = timeout_s
    self._environment: Environment | None = None
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._run_loop, daemon=True, name="environment")
    self._thread.start()

  async def start(self) -> None:
    """Makes and starts the environment."""
    await self._call(self._start)

  async def step(
    self, text: str, completion_ids: np.ndarray, finish_reason: FinishReason
  ) -> StepResult:
    """Takes one turn.

    Raises:
      EnvironmentFailure: it raised, took too long, or its reward is no finite number.
    """
    result = await self._call(lambda: self._open().step(text, completion_ids, finish_reason))
    if not isinstance(result, StepResult):
      raise EnvironmentFailure("type", f"step returned {type(result).__name__}, no StepResult")
    if not np.isfinite(result.total):
      raise EnvironmentFailure("nan", f"the reward is {result.reward}")
    return result

  async def close(self) -> None:
    """Closes the environment and ends the thread, unless it hangs.

    Raises:
      EnvironmentFailure: closing raised or took too long.
    """
    try:
      if self._environment is not None:
        await self._call(self._environment.close)
    finally:
      self._loop.call_soon_threadsafe(self._loop.stop)

  def _open(self) -> Environment:
    if self._environment is None:
      raise RuntimeError("start() has not been awaited")
    return self._environment

  async def _start(self) -> None:
    self._environment = self._factory(self._prompt)
    await self._environment.start()

  async def _call(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    future = asyncio.run_coroutine_threadsafe(_guarded(make), self._loop)
    try:
      failure, value = await asyncio.wait_for(asyncio.wrap_future(future), self._timeout_s)
    except TimeoutError as error:
      message = f"no answer within {self._timeout_s:g} s"
      raise EnvironmentFailure("timeout", message) from error
    if failure is not None:
      raise EnvironmentFailure(type(failure).__name__, str(failure)) from failure
    return value

  def _run_loop(self) -> None:
    self._loop.run_forever()
    self._loop.close()


async def _guarded(
  make: Callable[[], Coroutine[Any, Any, Any]],
) -> tuple[BaseException | None, Any]:
  """Awaits a user's coroutine; what it raises is a value, so that no loop sees it."""
  try:
    return None, await make()
  except asyncio.CancelledError:
    raise
  except BaseException as error:  # also SystemExit: an environment must not end the run.
    return error, None
