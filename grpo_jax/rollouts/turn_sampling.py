"""The turns of attempts: requests to the engine, and the observations between them."""

import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.engines.base import Generation, GenerationRequest, OnProgress, SamplingParams
from grpo_jax.environments.base import StepResult
from grpo_jax.environments.isolation import EnvironmentFailure
from grpo_jax.models.chat.turn_texts import TurnRefusal
from grpo_jax.rollouts.attempt import Attempt


@runtime_checkable
class Generator(Protocol):
  """The part of an engine that rollouts use."""

  def generate(
    self, requests: Sequence[GenerationRequest], *, on_progress: OnProgress | None = None
  ) -> AsyncIterator[Generation]:
    """Yields one generation for each request, in any order; see `engines.base.Engine`."""
    ...


def request_seed(seed: int, step: int, prompt_id: str, attempt: int, turn: int = 0) -> int:
  """Returns the seed of one request, the same in every process and whenever it is sampled.

  Args:
    seed: Random seed of the run.
    step: Step that the prompt is for.
    prompt_id: Name of the prompt.
    attempt: Number of the attempt at the prompt, from 0.
    turn: Number of the turn of the attempt, from 0.

  Returns:
    A number in [0, 2⁶³).
  """
  key = json.dumps([seed, step, prompt_id, attempt, turn]).encode()
  digest = hashlib.blake2b(key, digest_size=8).digest()
  return int.from_bytes(digest, "little") >> 1


@dataclasses.dataclass(frozen=True, slots=True)
class TurnSampler:
  """An engine, and the options of its requests."""

  engine: Generator
  tokenizer: Tokenizer
  sampling: SamplingParams
  seed: int  # random seed of the run.
  max_tokens: int | None  # bound of prompt and completion, all turns; None: no bound here.
  on_progress: OnProgress | None

  def sample(self, attempts: Sequence[Attempt]) -> AsyncIterator[Generation]:
    """Samples the next turn of several attempts, in one call of the engine."""
    requests = [self.request(attempt) for attempt in attempts]
    return self.engine.generate(requests, on_progress=self.on_progress)

  def room(self, attempt: Attempt, more: int = 0) -> int:
    """Returns how many tokens the next turn may have, after `more` others."""
    if self.max_tokens is None:
      return self.sampling.max_tokens
    return min(self.sampling.max_tokens, self.max_tokens - len(attempt.token_ids) - more)

  def request(self, attempt: Attempt) -> GenerationRequest:
    """Returns the request of an attempt's next turn."""
    where = (attempt.prompt.prompt_id, attempt.number, attempt.turn)
    return GenerationRequest(
      request_id=attempt.request_id,
      prompt_ids=attempt.token_ids,
      sampling=dataclasses.replace(
        self.sampling,
        temperature=0.0 if attempt.is_greedy else self.sampling.temperature,
        max_tokens=self.room(attempt),
        stop_strings=tuple(dict.fromkeys((*self.sampling.stop_strings, *attempt.stop_strings))),
      ),
      seed=request_seed(self.seed, attempt.step, *where),
      group=attempt.prompt.prompt_id,
    )

  def observation_ids(
    self, attempt: Attempt, result: StepResult, generation: Generation
  ) -> Int[np.ndarray, " written"]:
    """Returns the tokens of an observation; one that is too long for the room is cut.

    Raises:
      EnvironmentFailure: The observation cannot be encoded, or the chat template refuses it.
      TurnRefusal: The chat template cannot write any message of its role.
    """
    try:
      longest = None
      if self.max_tokens is not None:
        left = max(self.max_tokens - len(attempt.token_ids), 0)
        longest = self.tokenizer.longest_text(left + 1) + 1
      text = result.observation[:longest]
      if not result.messages and result.observation_role is None:
        return self.tokenizer.encode(text)
      messages = [{"role": result.observation_role, "content": text}]
      last = int(generation.token_ids[-1]) if len(generation.token_ids) else None
      return self.tokenizer.turn_ids(
        [_cut(message, longest) for message in result.messages] or messages,
        after=last,
        tools=attempt.prompt.tools,
        calls=result.tool_calls,
      )
    except TurnRefusal:  # no other attempt would fare better.
      raise
    except Exception as error:  # any string meets the user's template and tokenizer here.
      raise EnvironmentFailure("observation", f"{type(error).__name__}: {error}") from error


def _cut(message: Mapping[str, Any], longest: int | None) -> Mapping[str, Any]:
  """Returns a message with at most that many characters of content."""
  content = message.get("content")
  return {**message, "content": content[:longest]} if isinstance(content, str) else message
