"""A conversation with tools: the model calls them, reads the results, and answers.

    model        I need 37 * 89. <calculator>37 * 89</calculator>
    environment  <result>3293</result>
    model        <answer>3293</answer>

A turn that calls a tool continues the conversation. A turn that does not is the answer, which is
compared with `info["expected_answer"]` (as in the math environment).

Without the settings `tools` and `mcp_servers` there is one tool, the calculator above, which the
model calls in its text. Expressions are evaluated by grading/arithmetic.py, never by Python: they
can neither run code nor hang. With these settings the tools are declared to the chat template, and
calls are in the form that the model's family has; see docs/tools.md.
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from grpo_jax import registry
from grpo_jax.environments import function
from grpo_jax.environments.base import Environment, EnvironmentFactory, StepResult
from grpo_jax.environments.grading import answers, arithmetic, comparison
from grpo_jax.environments.toolbox import builtin, conversation
from grpo_jax.environments.toolbox.calling import CallLimits, Toolbox
from grpo_jax.registry import choose
from grpo_jax.types import FinishReason, Prompt

_OPEN_SERVERS = "grpo_environments.mcp_servers.open_servers"  # in packages/: found by name only.


class ToolUseEnvironments(EnvironmentFactory):
  """Makes the environments of the calculator in the text."""

  def __init__(
    self,
    *,
    tool: str,
    answer: str,
    max_calls: int,
    reward_correct: float,
    reward_wrong: float,
    call_reward: float,
    observation_role: str | None,
  ):
    if not re.fullmatch(r"[A-Za-z_]\w*", tool):
      raise ValueError(f"tool must be a word, because it becomes a tag, got {tool!r}")
    if max_calls < 1:
      raise ValueError(f"max_calls must be at least 1, got {max_calls}")
    self.stop_strings = (f"</{tool}>",)
    self.tool = tool
    self.extract = choose("answer form", answer, answers.EXTRACTORS)
    self.max_calls = max_calls
    self.reward_correct = reward_correct
    self.reward_wrong = reward_wrong
    self.call_reward = call_reward
    self.observation_role = observation_role
    self.observation_roles = (observation_role,) if observation_role else ()

  def __call__(self, prompt: Prompt) -> Environment:
    return ToolUse(self, _gold(prompt))


class ToolUse:
  """One conversation."""

  def __init__(self, options: ToolUseEnvironments, gold: str):
    self._options = options
    self._gold = gold
    self._calls = 0
    self._failed_calls = 0
    self._rewarded = 0.0  # reward so far, for the answer.

  async def start(self) -> None:
    """Does nothing."""

  async def step(
    self, text: str, completion_ids: Int[np.ndarray, " turn"], finish_reason: FinishReason
  ) -> StepResult:
    """Runs the calls of a turn, or judges the answer of a turn without calls."""
    *calls, rest = text.split(f"</{self._options.tool}>")
    if calls and self._calls + len(calls) <= self._options.max_calls:
      return self._called(calls)
    return self._answered(None if calls else self._options.extract(rest))

  async def close(self) -> None:
    """Does nothing."""

  def _called(self, calls: Sequence[str]) -> StepResult:
    """Evaluates the calls of a turn in order: usually one, as its end stops the turn."""
    had_result = self._calls > self._failed_calls
    results = [self._evaluated(call) for call in calls]
    is_first_result = not had_result and self._calls > self._failed_calls
    return StepResult(
      reward=self._reward(is_right=False, call=self._options.call_reward * is_first_result),
      done=False,
      observation="\n" + "".join(f"<result>{result}</result>\n" for result in results),
      observation_role=self._options.observation_role,
      metrics=self._metrics(accuracy=0.0, has_answer=0.0),
    )

  def _evaluated(self, before_close: str) -> str:
    """Returns the result of one call; its expression follows the last opening tag."""
    self._calls += 1
    _, opening, expression = before_close.rpartition(f"<{self._options.tool}>")
    try:
      if not opening:
        raise arithmetic.ExpressionError(f"no <{self._options.tool}> before the closing tag")
      return arithmetic.shown(arithmetic.evaluate(expression))
    except arithmetic.ExpressionError as error:
      self._failed_calls += 1
      return f"error: {error}"

  def _answered(self, answer: str | None) -> StepResult:
    is_right = answer is not None and is_equal(self._gold, answer)
    return StepResult(
      reward=self._reward(is_right=is_right, call=0.0),
      done=True,
      metrics=self._metrics(accuracy=float(is_right), has_answer=float(answer is not None)),
    )

  def _reward(self, *, is_right: bool, call: float) -> float | dict[str, float]:
    """Returns the reward of this turn. A conversation counts as wrong until it is right, so that
    one that is cut off earns no more than a wrong answer."""
    options = self._options
    due = options.reward_correct if is_right else options.reward_wrong
    added, self._rewarded = due - self._rewarded, due
    return {"correct": added, "call": call} if options.call_reward else added

  def _metrics(self, *, accuracy: float, has_answer: float) -> dict[str, float]:
    return {
      "accuracy": accuracy,
      "has_answer": has_answer,
      "calls": float(self._calls),
      "failed_calls": float(self._failed_calls),
      "used_tool": float(self._calls > self._failed_calls),
    }


def is_equal(gold: str, answer: str) -> bool:
  """Returns whether two answers are the same text, or the same decimal number."""
  return comparison.equal_as_text(gold, answer) is True


class AnswerJudge:
  """Compares the final answer of a conversation with the expected one."""

  def __init__(
    self, gold: str, extract: Callable[[str], str | None], *, right: float, wrong: float
  ):
    """Binds the expected answer.

    Args:
      gold: Expected answer.
      extract: Function that finds the answer in the text of a turn.
      right: Reward of a right answer.
      wrong: Reward of any other.
    """
    self._gold = gold
    self._extract = extract
    self._right = right
    self._wrong = wrong

  async def start(self) -> None:
    """Does nothing."""

  async def step(
    self, text: str, completion_ids: Int[np.ndarray, " turn"], finish_reason: FinishReason
  ) -> StepResult:
    """Judges the final answer."""
    answer = self._extract(text)
    is_right = answer is not None and is_equal(self._gold, answer)
    metrics = {"accuracy": float(is_right), "has_answer": float(answer is not None)}
    return StepResult(self._right if is_right else self._wrong, done=True, metrics=metrics)

  async def close(self) -> None:
    """Does nothing."""


def make(
  *,
  tool: str = "calculator",
  answer: str = "tag",
  max_calls: int = 8,
  reward_correct: float = 1.0,
  reward_wrong: float = 0.0,
  call_reward: float = 0.0,
  observation_role: str | None = None,
  tools: Sequence[str] = (),
  mcp_servers: Mapping[str, Any] | None = None,
  python: Mapping[str, Any] | None = None,
  tool_timeout_s: float | int = 20.0,
  max_result_chars: int = 8192,
  reward_function: str | None = None,
  reward_settings: Mapping[str, Any] | None = None,
  solved: float | int | None = None,
) -> EnvironmentFactory:
  r"""Makes the environment of a conversation with tools.

  Args:
    tool: Name of the tag that the model calls: `<calculator>…</calculator>`, which is also
      the stop string of every turn. Not with declared tools.
    answer: Place of the final answer: "tag" (<answer>…</answer>), "boxed", "hash"
      (after ####), "last_number", "any" (boxed, otherwise hash, otherwise the last number), "raw".
    max_calls: Largest number of calls in a conversation; one more ends it as wrong.
    reward_correct: Reward of a right answer.
    reward_wrong: Reward of a wrong answer, and of a conversation without one.
    call_reward: Added once, at the first call that gives a result; the reward then has the
      components "correct" and "call".
    observation_role: None: results are appended unchanged, and the model continues its text;
      "tool" or "user": they are messages of the chat template. Not with declared tools.
    tools: Tools to declare: "calculator", "python" (runs programs in a sandbox), modules on the
      Python path whose public functions are tools, or dotted paths of functions.
    mcp_servers: MCP servers whose tools are declared: name → {"command": [program, argument, …],
      "environment": {…}, "folder": …, "tools": [names; all if absent], "start_timeout_s": 30}.
    python: Settings of the tool "python": sandbox, workers, timeout_s, memory_mib, output_kib,
      packages.
    tool_timeout_s: Longest time of one call of a declared tool, in seconds.
    max_result_chars: Length of the longest result of a declared tool; a longer one is cut.
    reward_function: Dotted path of a function (prompt, completion, info) that returns the reward of
      the final answer, as for the environment `function`; None: the answer is compared with
      `expected_answer`. The completion is the text of the last turn, without thoughts.
    reward_settings: Further keyword arguments of that function.
    solved: Smallest reward of that function that counts as right in the accuracy.

  Returns:
    A factory of environments. Metrics of an attempt: accuracy, has_answer, calls, failed_calls,
    used_tool (1: at least one call gave a result); with declared tools also malformed_calls,
    unknown_tools, wrong_arguments, tool_errors, tool_timeouts, cut_results.

  Raises:
    ValueError: A tool does not exist or has no schema, a server does not start, or a setting cannot
      be used.
  """
  if not tools and not mcp_servers:
    _refuse_settings(reward_function=reward_function, python=python)
    return ToolUseEnvironments(
      tool=tool,
      answer=answer,
      max_calls=max_calls,
      reward_correct=reward_correct,
      reward_wrong=reward_wrong,
      call_reward=call_reward,
      observation_role=observation_role,
    )
  if observation_role is not None or tool != "calculator":
    raise ValueError(
      "tool and observation_role belong to the calculator in the text: leave them out with declared"
      " tools (tools, mcp_servers)"
    )
  judge_of = _judge_of(
    answer, reward_correct, reward_wrong, reward_function, reward_settings, solved
  )
  with contextlib.ExitStack() as stack:
    opened = builtin.open_tools(tools, stack, python=python)
    if mcp_servers:
      opened += registry.function(_OPEN_SERVERS)(mcp_servers, stack)
    made = conversation.ToolEnvironments(
      Toolbox(opened, CallLimits(float(tool_timeout_s), max_result_chars)),
      judge_of,
      max_calls=max_calls,
      reward_wrong=reward_wrong,
      call_reward=call_reward,
      stack=stack.pop_all(),
    )
  return made


def _refuse_settings(**given: Any) -> None:
  """Raises ValueError for a setting that only declared tools have."""
  for name, value in given.items():
    if value is not None:
      raise ValueError(f"{name} needs declared tools: set tools or mcp_servers as well")


def _judge_of(
  answer: str,
  right: float,
  wrong: float,
  path: str | None,
  settings: Mapping[str, Any] | None,
  solved: float | int | None,
) -> conversation.JudgeOf:
  """Returns the function that makes the judge of a prompt's final answer."""
  if path is not None:
    return function.make(path=path, settings=settings, solved=solved)
  if settings is not None or solved is not None:
    raise ValueError("reward_settings and solved need reward_function")
  extract = choose("answer form", answer, answers.EXTRACTORS)
  return lambda prompt: AnswerJudge(_gold(prompt), extract, right=right, wrong=wrong)


def _gold(prompt: Prompt) -> str:
  """Returns the expected answer of a prompt; raises ValueError if it has none."""
  expected = prompt.info.get("expected_answer")
  if not isinstance(expected, str) or not expected.strip():
    raise ValueError(f"prompt {prompt.prompt_id}: the tool_use environment needs expected_answer")
  return answers.gold(expected)
