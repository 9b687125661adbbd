"""A reward function of the user's own, named by its dotted path.

def reward(prompt: str, completion: str, info: Mapping) -> float | dict[str, float]
"""

import inspect
from collections.abc import Awaitable, Mapping
from typing import Any

from grpo_jax import registry
from grpo_jax.environments.base import Environment, EnvironmentFactory, Reward, SingleTurn
from grpo_jax.types import Prompt


def make(*, path: str, settings: Mapping[str, Any] | None = None) -> EnvironmentFactory:
  """Makes an environment of one turn out of a function.

  Args:
    path: "package.module.function"; the function takes the prompt's text, the
      completion's text and the row's fields, and returns the reward or its components.
      It may be a coroutine function. Called in a thread of its own: it may block.
    settings: further keyword arguments of the function.

  Raises:
    ValueError: there is no such function.
  """
  function = registry.function(path)
  extra = dict(settings or {})

  async def judge(prompt: Prompt, text: str) -> Reward:
    reward: Reward | Awaitable[Reward] = function(prompt.text, text, prompt.info, **extra)
    return await reward if inspect.isawaitable(reward) else reward

  def factory(prompt: Prompt) -> Environment:
    return SingleTurn(judge, prompt)

  return factory
