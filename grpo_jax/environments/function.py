"""A user's reward function, named by its dotted path.

def reward(prompt: str, completion: str, info: Mapping) -> float | dict[str, float]
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from grpo_jax import registry
from grpo_jax.environments.base import (
  Environment,
  EnvironmentFactory,
  SingleTurn,
  StepResult,
  returned_reward,
)
from grpo_jax.types import Prompt


class FunctionEnvironments(EnvironmentFactory):
  """Makes environments of one turn from a function."""

  def __init__(
    self,
    function: Callable[..., Any],
    settings: Mapping[str, Any],
    timeout_s: float | None,
    solved: float | int | None = None,
    *,
    path: str,
  ):
    self.timeout_s = timeout_s
    self._path = path
    self._function = function
    self._settings = dict(settings)
    self._solved = solved

  def __call__(self, prompt: Prompt) -> Environment:
    return SingleTurn(self._judge, prompt, name=self._path)

  async def _judge(self, prompt: Prompt, text: str) -> Any:
    """Returns what the function returns: anything."""
    reward = self._function(prompt.text, text, prompt.info, **self._settings)
    reward = await reward if inspect.isawaitable(reward) else reward
    if self._solved is None or isinstance(reward, StepResult):
      return reward
    result = StepResult(returned_reward(reward, self._path), done=True)
    return dataclasses.replace(result, metrics={"accuracy": float(result.total >= self._solved)})


def make(
  *,
  path: str,
  settings: Mapping[str, Any] | None = None,
  timeout_s: float | None = None,
  solved: float | int | None = None,
) -> FunctionEnvironments:
  """Makes an environment of one turn from a function.

  Args:
    path: "package.module.function"; the function takes the prompt's text, the
      completion's text and the row's fields, and returns the reward or its components.
      It may be a coroutine function. It is called in a separate thread, so it may block.
    settings: Further keyword arguments of the function.
    timeout_s: Longest time of one call, in seconds; None: rollout.environment_timeout_s.
      A completion whose reward takes longer is left out and counted.
    solved: Smallest reward of a right completion, which counts in the accuracy and in pass@k
      of an evaluation. None: rewards are not verdicts, and neither is reported.

  Raises:
    ValueError: There is no such function, it cannot be called in this way, the time-out
      is not positive, or `solved` is not a number.
  """
  function = registry.function(path)
  extra = dict(settings or {})
  if timeout_s is not None and not timeout_s > 0:
    raise ValueError(f"timeout_s must be positive, got {timeout_s}")
  _check_call(path, function, extra)
  if solved is not None and (isinstance(solved, bool) or not isinstance(solved, int | float)):
    raise ValueError(f"solved must be a number, got {solved!r}")
  return FunctionEnvironments(function, extra, timeout_s, solved, path=path)


def _check_call(path: str, function: Callable[..., Any], extra: Mapping[str, Any]) -> None:
  """Raises ValueError unless function(prompt, completion, info, **extra) fits its signature."""
  try:
    signature = inspect.signature(function)
  except ValueError:  # some compiled functions have no signature: the first call will show it.
    return
  try:
    signature.bind("prompt", "completion", {}, **extra)
  except TypeError as error:
    names = "".join(f", {name}=…" for name in extra)
    raise ValueError(
      f"{path}{signature} cannot be called as (prompt, completion, info{names}): {error}"
    ) from error
