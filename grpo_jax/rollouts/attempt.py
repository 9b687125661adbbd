"""One attempt at a prompt while it is in progress: tokens, turns, rewards, failure."""

import dataclasses
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from grpo_jax.data.tokenizer import Tokenizer, parse_turn, tool_form_of
from grpo_jax.engines.base import Generation
from grpo_jax.environments.base import Endpoint, EnvironmentFactory, StepResult
from grpo_jax.environments.isolation import EnvironmentFailure, IsolatedEnvironment, checked_stops
from grpo_jax.models.chat.tool_calls import MAX_CALLS, Parsed
from grpo_jax.rollouts.expert_records import ExpertRecord, Experts
from grpo_jax.types import FinishReason, Prompt, Rollout, Turn

_log = logging.getLogger(__name__)

_SHOWN = 1500  # characters of an error's message, with the last frames of user code.


@dataclasses.dataclass(slots=True)
class _Piece:
  """Consecutive tokens of a completion, sampled or written by the environment."""

  token_ids: np.ndarray
  logprobs: np.ndarray
  weight_versions: np.ndarray
  is_sampled: bool


class Attempt:
  """One attempt while it is in progress."""

  def __init__(
    self,
    prompt: Prompt,
    number: int,
    factory: EnvironmentFactory,
    *,
    step: int,
    is_greedy: bool = False,
  ):
    """Starts nothing.

    Args:
      prompt: Prompt that is attempted.
      number: Number of the attempt in its group, from 0.
      factory: Factory of its environment.
      step: Step that the prompt is for.
      is_greedy: Whether its turns are sampled at temperature 0.
    """
    self.is_greedy = is_greedy
    self.prompt = prompt
    self.number = number
    self.step = step
    self.turn = 0
    self.is_done = False
    self.error: EnvironmentFailure | None = None
    # Strings that end the next turn, in addition to those of the sampling options.
    self.stop_strings = (*prompt.stop_strings, *first_stops(factory))
    self._factory = factory
    self._timeout_s = factory.timeout_s
    self._environment: IsolatedEnvironment | None = None
    self._lead = np.zeros(0, np.int32)  # tokens after the prompt, before the first turn.
    self._pieces: list[_Piece] = []  # alternately sampled and written, sampled first.
    self._experts = ExpertRecord()
    self._results: list[StepResult] = []
    self._finish_reason = FinishReason.STOP
    self._close_failure = ""
    self._hit_turn_limit = False
    self.first_ids = np.zeros(0, np.int32)  # what the policy read first, for an agent.
    self._counts: dict[str, float] = {}  # further metrics.

  @property
  def request_id(self) -> str:
    return f"{self.prompt.prompt_id}#{self.number}.{self.turn}"

  @property
  def token_ids(self) -> np.ndarray:
    """All tokens so far, prompt included, as they were sampled or written."""
    before = [self.prompt.token_ids, self._lead]
    return np.concatenate([*before, *(p.token_ids for p in self._pieces)])

  @property
  def prompt_experts(self) -> Experts | None:
    """Experts of the prompt's tokens; None if they are not known, or if the attempt failed."""
    return None if self.error else self._experts.of(0, len(self.prompt.token_ids))

  @property
  def is_agent(self) -> bool:
    """Whether its environment drives the conversation itself; see `agents.py`."""
    return self._factory.is_agent

  def begin_with(self, prompt: Prompt, lead: Int[np.ndarray, " lead"]) -> None:
    """Sets the prompt and the unlearned tokens between it and the first turn."""
    self.prompt = prompt
    self._lead = lead

  def add_sampled(self, generation: Generation) -> None:
    """Appends what the engine sampled in this turn."""
    self._pieces.append(
      _Piece(generation.token_ids, generation.logprobs, generation.weight_versions, True)
    )
    self._experts.add(generation)
    self._finish_reason = generation.finish_reason

  def add_observation(self, ids: Int[np.ndarray, " written"]) -> None:
    """Appends what the environment wrote, without logprobs and weights; it is not learned from."""
    count = len(ids)
    self._pieces.append(
      _Piece(ids, np.zeros(count, np.float32), np.full(count, -1, np.int32), False)
    )
    self.turn += 1

  async def judge(
    self, generation: Generation, tokenizer: Tokenizer, timeout_s: float
  ) -> StepResult | None:
    """Has the environment judge a turn; None: it failed, and the attempt ends.

    Args:
      generation: The turn as it was sampled.
      tokenizer: Tokenizer that decodes it.
      timeout_s: Limit of one call, in seconds, unless the environment has one of its own.
    """
    timeout_s = timeout_s if self._timeout_s is None else self._timeout_s
    try:
      environment = self._environment or await self._started(timeout_s)
      ids = generation.token_ids
      result = await environment.step(
        tokenizer.decode(ids, skip_special=True),
        ids,
        generation.finish_reason,
        read=None if tool_form_of(tokenizer) is None else lambda: self._parsed(ids, tokenizer),
      )
    except EnvironmentFailure as error:
      self.fail(error)
      return None
    self._results.append(result)
    if result.stop_strings is not None:
      self.stop_strings = tuple(result.stop_strings)
    return result

  def count(self, **counts: float) -> None:
    """Adds metrics of the attempt; its environment may replace them."""
    self._counts |= counts

  async def run(self, endpoint: Endpoint, *, timeout_s: float, run_timeout_s: float) -> bool:
    """Has an agent's environment make the attempt; returns whether it did.

    Args:
      endpoint: Server that answers for the policy.
      timeout_s: Limit of its start and its closing, in seconds, unless it has one of its own.
      run_timeout_s: Limit of the attempt, in seconds, unless it has one of its own.
    """
    own = self._timeout_s
    try:
      environment = await self._started(timeout_s if own is None else own)
      result = await environment.run(endpoint, timeout_s=run_timeout_s if own is None else own)
    except EnvironmentFailure as error:
      self.fail(error)
      return False
    self._results.append(result)
    return True

  async def _started(self, timeout_s: float) -> IsolatedEnvironment:
    """Starts the environment; returns it."""
    self._environment = IsolatedEnvironment(self._factory, self.prompt, timeout_s=timeout_s)
    await self._environment.start()
    return self._environment

  def _parsed(self, ids: np.ndarray, tokenizer: Tokenizer) -> Parsed:
    """Returns a turn with its tool calls, whose ids are unique in the conversation."""
    first_id = self.turn * MAX_CALLS
    return parse_turn(tokenizer, ids, tools=self.prompt.tools, first_id=first_id)

  def fail(self, error: EnvironmentFailure) -> None:
    """Ends the attempt without a reward."""
    self.error = error
    self.is_done = True

  def excuse(self, result: StepResult) -> None:
    """Replaces a failure by a result."""
    self.error = None
    self._results.append(result)

  def finish(self, reason: FinishReason | None = None) -> None:
    """Ends the attempt; None keeps the last turn's reason."""
    self.is_done = True
    self._finish_reason = reason or self._finish_reason

  def finish_at_turn_limit(self) -> None:
    """Ends the attempt at the turn limit, although the environment was not done."""
    self._hit_turn_limit = True
    self.finish()

  async def close(self) -> None:
    """Closes the environment. A failure is counted and does not cost the reward."""
    environment, self._environment = self._environment, None
    if environment is not None:
      try:
        await environment.close()
      except EnvironmentFailure as error:
        self._close_failure = error.kind
        _report(f"{self.prompt.environment!r}: {error.kind}: {error}"[:_SHOWN])

  def rollout(self, tokenizer: Tokenizer) -> Rollout:
    """Returns the finished attempt."""
    begin = len(self.prompt.token_ids)
    ids = self.token_ids[begin:]
    components: Counter[str] = Counter()
    metrics = dict(self._counts)
    for result in self._results:
      components.update(result.components)
      metrics.update({name: float(value) for name, value in result.metrics.items()})
    rewards = [result.total for result in self._results]
    return Rollout(
      completion_ids=ids,
      loss_mask=self._joined(lambda p: np.full(len(p.token_ids), p.is_sampled), bool, 0),
      behavior_logprobs=self._joined(lambda p: p.logprobs, np.float32, 0),
      weight_versions=self._joined(lambda p: p.weight_versions, np.int32, -1),
      finish_reason=self._finish_reason,
      reward=math.nan if self.error else float(sum(rewards)),
      text=tokenizer.decode(ids, skip_special=True),
      reward_components={} if self.error else dict(components),
      metrics=metrics,
      turns=self.turn + 1,
      turn_log=self._turn_log(rewards),
      error=f"{self.error.kind}: {self.error}"[:_SHOWN] if self.error else "",
      failure=self.error.kind if self.error else "",
      close_failure=self._close_failure,
      hit_turn_limit=self._hit_turn_limit,
      experts=self._experts.of(begin, begin + len(ids)),
    )

  def _turn_log(self, rewards: Sequence[float]) -> tuple[Turn, ...]:
    """Returns the tokens and the reward of every turn; the reward of an unjudged turn is NaN."""
    sampled = [len(p.token_ids) for p in self._pieces if p.is_sampled]
    written = [len(p.token_ids) for p in self._pieces if not p.is_sampled]
    written += [0] * (len(sampled) - len(written))
    missing = [math.nan] * (len(sampled) - len(rewards))
    # The reward of an agent is that of the whole conversation.
    rewards = [*missing, *rewards] if self.is_agent else [*rewards, *missing]
    rewards = rewards[: len(sampled)]
    return tuple(Turn(*turn) for turn in zip(sampled, written, rewards, strict=True))

  def _joined(self, read: Callable[[_Piece], np.ndarray], dtype: Any, of_lead: int) -> np.ndarray:
    """Returns a number for each token of the completion; `of_lead` for those before the turns."""
    lead = np.full(len(self._lead), of_lead, dtype)
    return np.concatenate([lead, *(read(p) for p in self._pieces)]).astype(dtype)


@functools.lru_cache(maxsize=64)
def _report(reason: str) -> None:
  """Logs why an environment could not be closed, each reason once."""
  _log.warning("closing the environment %s", reason)


def first_stops(factory: EnvironmentFactory) -> tuple[str, ...]:
  """Returns the stop strings that an environment asks for in the first turn.

  Raises:
    ValueError: The stop strings are not a list of strings.
  """
  try:
    return checked_stops(factory.stop_strings)
  except EnvironmentFailure as error:
    raise ValueError(f"an environment's {error}") from error
