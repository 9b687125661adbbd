"""The interface of environments: asynchronous, single-use objects that score one attempt.

    environment = factory(prompt)
    await environment.start()
    result = await environment.step(text, completion_ids, finish_reason)   # once a turn
    await environment.close()

An agent's environment drives the conversation itself, against an endpoint that the run serves:

    await environment.start()
    result = await environment.run(endpoint)                               # once an attempt
    await environment.close()

A module of this package, or of a user, offers `make(**config) -> factory`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from grpo_jax.environments.hanging import Hanging
from grpo_jax.types import FinishReason, Prompt


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
  """An environment's answer to one turn."""

  # Reward of this turn; the rewards of all turns add up. Components add up to the reward.
  reward: float | Mapping[str, float]
  done: bool
  observation: str = ""  # text that the model reads next; its tokens are never learned from.
  # None: the observation is appended unchanged. A role ("user", "tool"): it is rendered
  # as a message of the chat template, and a new assistant turn begins.
  observation_role: str | None = None
  # Chat messages that the model reads next, in place of `observation` and `observation_role`:
  # {"role": "tool", "name", "tool_call_id", "content"}; several answer several calls.
  messages: Sequence[Mapping[str, Any]] = ()
  # Tool calls of the turn that was judged, in OpenAI's form; templates need them for tool answers.
  tool_calls: Sequence[Mapping[str, Any]] = ()
  # Strings that end the next turn, in addition to those of the sampling options. None: the
  # same as for this turn; (): no others.
  stop_strings: Sequence[str] | None = None
  # Numbers to log; evaluation counts attempts with "accuracy" 1 as solved.
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

  @property
  def total(self) -> float:
    """The reward as one number."""
    if isinstance(self.reward, Mapping):
      return float(sum(self.reward.values()))
    return float(self.reward)

  @property
  def components(self) -> dict[str, float]:
    """The reward's components; none if it is one number."""
    if isinstance(self.reward, Mapping):
      return {name: float(value) for name, value in self.reward.items()}
    return {}


@runtime_checkable
class Environment(Protocol):
  """One attempt at one prompt. All calls come from one event loop of its own.

  An environment with tools also has a method

      async def step_message(self, message: tool_calls.Parsed, completion_ids, finish_reason)

  which is called instead of `step`. It gets the turn as text, tool calls and malformed calls.
  """

  async def start(self) -> None:
    """Prepares what the attempt needs."""
    ...

  async def step(
    self,
    text: str,
    completion_ids: Int[np.ndarray, " turn"],
    finish_reason: FinishReason,
  ) -> StepResult:
    """Judges one turn.

    Args:
      text: Text that the model wrote in this turn, without special tokens.
      completion_ids: Sampled token ids of this turn, stop id included.
      finish_reason: LENGTH if the turn was cut.
    """
    ...

  async def close(self) -> None:
    """Frees the resources of `start`; called once, also after a failure."""
    ...


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
  """An OpenAI-compatible server in front of the policy, as one attempt may use it.

  Everything that is sampled with this key belongs to the attempt, and is what is learned from.
  The endpoint exists until `run` returns.
  """

  base_url: str  # "http://127.0.0.1:PORT/v1", as clients of OpenAI's API take it.
  api_key: str = dataclasses.field(repr=False)  # secret; names the session of the attempt.
  model: str  # name of the model, for requests; no other is served.


@runtime_checkable
class AgentEnvironment(Protocol):
  """One attempt at one prompt that drives its own conversation with the policy.

  All calls come from one event loop of its own.
  """

  async def start(self) -> None:
    """Prepares what the attempt needs."""
    ...

  async def run(self, endpoint: Endpoint) -> StepResult:
    """Makes the attempt, with as many requests as it needs, and scores it.

    Args:
      endpoint: Server that answers for the policy.

    Returns:
      Reward and metrics of the attempt; the other fields are not used.
    """
    ...

  async def close(self) -> None:
    """Frees the resources of `start`; called once, also after a failure."""
    ...


class EnvironmentFactory:
  """Makes the environment of each attempt, and holds what the environments of a run share.

  A subclass defines `__call__`, and the other members where it needs them. Functions, classes of
  environments and objects that can be called are factories as well: see `as_factory`.
  """

  # They end the first turn, and the later ones until a StepResult names others.
  stop_strings: Sequence[str] = ()
  timeout_s: float | None = None  # limit of one call, in seconds; None: that of the run.
  is_agent: bool = False  # whether it makes environments of the kind AgentEnvironment.
  # Tools that the chat template receives for its prompts, unless a row has its own; each
  # {"type": "function", "function": {"name", "description", "parameters": JSON schema}}.
  tools: Sequence[Mapping[str, Any]] = ()
  # Roles of the messages that its environments answer with: the run checks at its start that the
  # chat template can write them. None: not known.
  observation_roles: Sequence[str] | None = None

  def __call__(self, prompt: Prompt) -> Environment | AgentEnvironment:
    """Returns the environment of one attempt.

    Raises:
      ValueError: The prompt lacks what its environment needs.
    """
    raise NotImplementedError

  @functools.cached_property
  def hanging(self) -> Hanging:
    """Threads of its environments whose calls do not return."""
    return Hanging()

  def answer(self, prompt: Prompt, text: str) -> str | None:
    """Returns the answer in a completion: its vote in maj@k; None: it has none.

    Raises:
      NotImplementedError: The answers of this environment are not compared with each other.
    """
    raise NotImplementedError

  def metrics(self) -> dict[str, float]:
    """Returns counts since the start of the run."""
    return {}

  def close(self) -> None:
    """Frees the resources of the factory; called at the end of the run."""


# Members of an EnvironmentFactory that are values.
_MEMBERS = ("stop_strings", "timeout_s", "tools", "observation_roles")

# A factory as users write it: anything that makes an environment out of a prompt.
AnyFactory = Callable[[Prompt], Environment | AgentEnvironment]


def as_factory(made: AnyFactory) -> EnvironmentFactory:
  """Returns a function, a class or an object that can be called as an EnvironmentFactory.

  Its members with the names of an EnvironmentFactory's are used. The methods of a class are not,
  since they belong to its environments.
  """
  return made if isinstance(made, EnvironmentFactory) else _Adapted(made)


class _Adapted(EnvironmentFactory):
  """A factory that is not an EnvironmentFactory; see `as_factory`."""

  def __init__(self, made: AnyFactory):
    self._made = made
    owner = made.func if isinstance(made, functools.partial) else made
    values = {name: getattr(owner, name, None) for name in _MEMBERS}
    # A property of a class has its value only in an environment.
    known = {n: v for n, v in values.items() if v is not None and not hasattr(v, "__get__")}
    vars(self).update(known)
    self._methods = None if isinstance(owner, type) else owner
    is_agent = isinstance(owner, type) and has_run(owner) or getattr(owner, "is_agent", False)
    self.is_agent = bool(is_agent)

  def __call__(self, prompt: Prompt) -> Environment | AgentEnvironment:
    return self._made(prompt)

  def metrics(self) -> dict[str, float]:
    found = getattr(self._methods, "metrics", None)
    return found() if found else {}

  def close(self) -> None:
    if found := getattr(self._methods, "close", None):
      found()


NOT_DECLARED = "{} has run() and no step(): set is_agent = True on the factory that makes it"
NOT_AN_AGENT = "{} has step() or no run(), but its factory has is_agent = True"


def has_run(environment: Any) -> bool:
  """Returns whether an environment, or a class of them, is an agent's: has `run` and no `step`."""
  return callable(getattr(environment, "run", None)) and not hasattr(environment, "step")


Reward = float | Mapping[str, float] | StepResult
RewardFunction = Callable[[Prompt, str], Reward | Awaitable[Reward]]


def as_number(value: Any) -> float:
  """Returns a number of any numeric type as a float.

  Raises:
    TypeError, ValueError, OverflowError: `value` is not numeric; strings are always rejected,
      even numeric ones.
  """
  if isinstance(value, str | bytes):
    raise TypeError(f"{value!r:.50} is a string, not a number")
  try:
    return float(value)
  except TypeError as error:
    raise TypeError(f"{value!r:.50} is not a number") from error


def as_reward(value: Any) -> float | dict[str, float]:
  """Returns the result of a reward function, a number or components, as floats; see `as_number`."""
  if isinstance(value, Mapping):
    if not value:
      raise ValueError("the reward has no components")
    return {str(name): as_number(part) for name, part in value.items()}
  return as_number(value)


def returned_reward(value: Any, name: str) -> float | dict[str, float]:
  """Returns the result of a reward function as `as_reward` does.

  Args:
    value: Result of the function.
    name: Name of the function.

  Raises:
    TypeError, ValueError, OverflowError: The result is not a reward; the message says what the
      function must return.
  """
  try:
    return as_reward(value)
  except (TypeError, ValueError, OverflowError) as error:
    raise type(error)(
      f"{name} returned {value!r:.80}: {error}; it must return a number, a dict of numbers or a"
      " StepResult, and NaN to leave a completion out"
    ) from error


class SingleTurn:
  """An environment of one turn, made from a reward function."""

  def __init__(self, reward_fn: RewardFunction, prompt: Prompt, *, name: str | None = None):
    """Binds the function to a prompt.

    Args:
      reward_fn: Function (prompt, completion text) -> the reward, its components, or a whole
        StepResult; may be a coroutine function.
      prompt: Prompt that is attempted.
      name: Name of the function, for messages; None: its own.
    """
    self.name = name or getattr(reward_fn, "__qualname__", type(reward_fn).__qualname__)
    self._reward_fn = reward_fn
    self._prompt = prompt

  async def start(self) -> None:
    """Does nothing."""

  async def step(
    self,
    text: str,
    completion_ids: Int[np.ndarray, " turn"],
    finish_reason: FinishReason,
  ) -> StepResult:
    reward = self._reward_fn(self._prompt, text)
    if inspect.isawaitable(reward):
      reward = await reward
    if isinstance(reward, StepResult):
      return reward
    return StepResult(returned_reward(reward, self.name), done=True)

  async def close(self) -> None:
    """Does nothing."""
