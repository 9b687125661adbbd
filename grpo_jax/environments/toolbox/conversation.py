"""The environment of a conversation with declared tools."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from grpo_jax.environments.base import Environment, EnvironmentFactory, StepResult
from grpo_jax.environments.toolbox import calling
from grpo_jax.environments.toolbox.calling import FAILURES, Toolbox
from grpo_jax.models.chat.tool_calls import Parsed
from grpo_jax.types import FinishReason, Prompt

_REST_S = 60.0  # time of a turn beside its calls, in seconds: the judgement of an answer.

_UNANSWERED = {"accuracy": 0.0, "has_answer": 0.0}

# Makes the environment that judges the final answer to a prompt, in one step.
JudgeOf = Callable[[Prompt], Environment]


class ToolEnvironments(EnvironmentFactory):
  """Makes the environments, which share the tools."""

  observation_roles = ("tool",)

  def __init__(
    self,
    toolbox: Toolbox,
    judge_of: JudgeOf,
    *,
    max_calls: int,
    reward_wrong: float,
    call_reward: float,
    stack: contextlib.ExitStack,
  ):
    """Initialises the factory.

    Args:
      toolbox: The tools.
      judge_of: Function that makes the judge of the final answer.
      max_calls: Largest number of calls in a conversation, malformed ones included.
      reward_wrong: Reward of a conversation that ends without an answer.
      call_reward: Reward of the first call that gives a result.
      stack: Stack that closes what the tools need.
    """
    self.toolbox = toolbox
    self.judge_of = judge_of
    self.max_calls = max_calls
    self.reward_wrong = reward_wrong
    self.call_reward = call_reward
    self.tools = toolbox.declarations
    self.timeout_s = max_calls * toolbox.limits.timeout_s + _REST_S
    self._stack = stack

  def __call__(self, prompt: Prompt) -> Environment:
    known = {tool["function"]["name"] for tool in self.tools}
    declared = Counter(tool.get("function", {}).get("name") for tool in prompt.tools)
    for name, count in declared.items():
      if name not in known:
        raise ValueError(
          f"prompt {prompt.prompt_id}: its row declares the tool {name!r}, which this"
          f" environment cannot run; it has: {', '.join(known)}"
        )
      if count > 1:
        raise ValueError(
          f"prompt {prompt.prompt_id}: its row declares {count} tools named {name!r}"
        )
    return ToolConversation(self, self.judge_of(prompt))

  def metrics(self) -> dict[str, float]:
    """Returns how many calls of tools hang."""
    return self.toolbox.metrics()

  def close(self) -> None:
    """Ends the processes of the tools."""
    self._stack.close()


class ToolConversation:
  """One conversation."""

  def __init__(self, options: ToolEnvironments, judge: Environment):
    self._options = options
    self._judge = judge
    self._counts: Counter[str] = Counter()
    self._rewarded = 0.0  # reward so far, for the answer.

  async def start(self) -> None:
    """Prepares the judge."""
    await self._judge.start()

  async def step(
    self, text: str, completion_ids: Int[np.ndarray, " turn"], finish_reason: FinishReason
  ) -> StepResult:
    """Raises RuntimeError: turns are judged by `step_message`."""
    raise RuntimeError(
      "an environment with tools needs turns whose calls are parsed, but the form of the calls is"
      " not known: set model.tool_calls"
    )

  async def step_message(
    self, message: Parsed, completion_ids: Int[np.ndarray, " turn"], finish_reason: FinishReason
  ) -> StepResult:
    """Runs the calls of a turn, or has the answer of a turn without calls judged."""
    wanted = len(message.calls) + len(message.malformed)
    if not wanted:
      result = await self._judge.step(message.content, completion_ids, finish_reason)
      return self._result(result.reward, done=True, metrics=result.metrics)
    made = self._counts["calls"] + self._counts["malformed_calls"]
    if finish_reason is FinishReason.LENGTH or made + wanted > self._options.max_calls:
      return self._result(self._options.reward_wrong, done=True, metrics=_UNANSWERED)
    had_result = self._has_result
    messages, calls = await calling.answers(self._options.toolbox, message, self._counts)
    first = self._options.call_reward * (self._has_result and not had_result)
    # A conversation counts as wrong until it is right: one that is cut off earns no more than that.
    made = self._result(self._options.reward_wrong, done=False, call=first, metrics=_UNANSWERED)
    return dataclasses.replace(made, messages=messages, tool_calls=calls)

  async def close(self) -> None:
    """Closes the judge."""
    await self._judge.close()

  @property
  def _has_result(self) -> bool:
    return self._counts["calls"] > self._counts["failed_calls"]

  def _result(
    self,
    judged: float | Mapping[str, float],
    *,
    done: bool,
    metrics: Mapping[str, float],
    call: float = 0.0,
  ) -> StepResult:
    reward: Any = judged
    earlier = self._rewarded
    if isinstance(judged, Mapping):  # only a final answer has components.
      reward = {**judged, "correct": judged.get("correct", 0.0) - earlier} if earlier else judged
    else:
      self._rewarded, reward = judged, judged - earlier
    if self._options.call_reward:
      reward = {**(reward if isinstance(reward, Mapping) else {"correct": reward}), "call": call}
    counted = ("calls", "failed_calls", "malformed_calls", *FAILURES, "cut_results")
    counts = {name: float(self._counts[name]) for name in counted}
    return StepResult(
      reward=reward,
      done=done,
      metrics={**metrics, **counts, "used_tool": float(self._has_result)},
    )
