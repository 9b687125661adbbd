"""Prompts and attempts for the tests of environments whose reward comes from a model."""

import asyncio

import numpy as np

from grpo_jax.environments.base import AnyFactory, StepResult
from grpo_jax.environments.isolation import IsolatedEnvironment
from grpo_jax.types import FinishReason, Prompt


def prompt_of(*messages: tuple[str, str], **info) -> Prompt:
  """Returns a prompt of (role, content)s."""
  said = tuple({"role": role, "content": content} for role, content in messages)
  return Prompt("x:0:0", np.zeros(1, np.int32), "reward", info, messages=said)


async def attempt(
  factory: AnyFactory, prompt: Prompt, text: str, *, timeout_s: float = 30.0
) -> StepResult:
  """Scores one completion in a thread of its own, as a rollout does."""
  environment = IsolatedEnvironment(factory, prompt, timeout_s=timeout_s)
  try:
    await environment.start()
    return await environment.step(text, np.zeros(0, np.int32), FinishReason.STOP)
  finally:
    await environment.close()


def score(factory: AnyFactory, prompt: Prompt, text: str, **options) -> StepResult:
  """The same, waited for."""
  return asyncio.run(attempt(factory, prompt, text, **options))


def scores(factory: AnyFactory, prompt: Prompt, texts: list[str]) -> list[float]:
  """Returns the rewards of completions that are scored at the same time."""

  async def together():
    return await asyncio.gather(*(attempt(factory, prompt, text) for text in texts))

  return [result.total for result in asyncio.run(together())]
