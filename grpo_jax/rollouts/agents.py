"""Attempts by agents: environments that drive their own conversation, against a server of the
policy.

What is learned from is what the policy sampled, in one chain of turns: each continues the tokens of
the one before. All that the agent wrote is part of the completion, unlearned.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from grpo_jax.data.tokenizer import Tokenizer, tool_form_of
from grpo_jax.engines.base import OnProgress
from grpo_jax.environments.base import StepResult
from grpo_jax.environments.isolation import EnvironmentFailure
from grpo_jax.rollouts.attempt import Attempt
from grpo_jax.rollouts.turn_sampling import TurnSampler, request_seed
from grpo_jax.serving.policy_server import PolicyServer
from grpo_jax.serving.request_scheduling import PATIENCE_S, ImmediateScheduler, RoundScheduler
from grpo_jax.serving.session import ServedPolicy, Session
from grpo_jax.serving.terms import RunDecides
from grpo_jax.serving.turns import SampledTurn
from grpo_jax.types import FinishReason, Prompt

MODEL = "policy"  # its name for clients.

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
  """Bounds of attempts by agents."""

  call_timeout_s: float  # limit of the start and the closing of an environment.
  run_timeout_s: float  # limit of an attempt, unless its factory has one of its own.
  concurrency: int  # attempts at the same time.
  slots: asyncio.Semaphore  # of as many, perhaps shared with other calls.


class Agents:
  """Has agents make their attempts."""

  def __init__(
    self, turns: TurnSampler, bounds: Bounds, *, in_rounds: bool, on_done: Callable[[Attempt], None]
  ):
    """Starts nothing.

    Args:
      turns: Engine, tokenizer and options of the run.
      bounds: Limits.
      in_rounds: Whether the requests of all agents go to the engine together; see
        `request_scheduling.RoundScheduler`.
      on_done: Function that is called with each attempt that has ended.
    """
    self._turns = turns
    self._bounds = bounds
    self._in_rounds = in_rounds
    self._on_done = on_done

  async def run(self, attempts: Sequence[Attempt]) -> None:
    """Has all attempts made.

    Raises:
      Exception: The engine failed, or the endpoint.
    """
    if not attempts:
      return
    async with self._serving() as (server, policy):
      work = asyncio.create_task(self._all(attempts, server, policy))
      try:
        await asyncio.wait({work, server.failed}, return_when=asyncio.FIRST_COMPLETED)
        if server.failed.done():
          await server.failed
        await work
      finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

  @contextlib.asynccontextmanager
  async def _serving(self) -> AsyncIterator[tuple[PolicyServer, ServedPolicy]]:
    """Runs a server of the policy during the block."""
    engine, tokenizer = self._turns.engine, self._turns.tokenizer
    scheduler = (
      RoundScheduler(engine, patience_s=PATIENCE_S)
      if self._in_rounds
      else ImmediateScheduler(engine)
    )
    policy = ServedPolicy(
      scheduler=scheduler,
      tokenizer=tokenizer,
      sampling=self._turns.sampling,
      terms=RunDecides(),
      max_tokens=self._turns.max_tokens,
      tool_form=tool_form_of(tokenizer),
    )
    server = PolicyServer(model=MODEL)
    try:
      await server.start()
      yield server, policy
    finally:
      await server.close()
      await scheduler.close()

  async def _all(
    self, attempts: Sequence[Attempt], server: PolicyServer, policy: ServedPolicy
  ) -> None:
    """Makes the attempts in their order, as many at a time as the bounds allow."""
    waiting = iter(enumerate(attempts))
    progress = _Progress(self._turns.on_progress, len(attempts))

    async def work() -> None:
      async with self._bounds.slots:
        policy.scheduler.join()
        try:
          for number, attempt in waiting:
            session = self._session(attempt, policy, number)
            await self._make(attempt, session, server)
            progress.add(session)
            self._on_done(attempt)
        finally:
          policy.scheduler.leave()

    workers = min(self._bounds.concurrency, len(attempts))
    await together(*(work() for _ in range(workers)))

  def _session(self, attempt: Attempt, policy: ServedPolicy, number: int) -> Session:
    prompt = attempt.prompt
    where = (self._turns.seed, attempt.step, prompt.prompt_id, attempt.number)
    return Session(
      policy,
      name=f"{prompt.prompt_id}#{attempt.number}",
      number=number,
      seed=functools.partial(request_seed, *where),
      first_ids=prompt.token_ids,
      first_messages=prompt.messages,
      first_tools=prompt.tools,
      stop_strings=attempt.stop_strings,
    )

  async def _make(self, attempt: Attempt, session: Session, server: PolicyServer) -> None:
    """Has one attempt made; its environment is closed and its session is shut afterwards."""
    endpoint = server.open(session)
    try:
      await attempt.run(
        endpoint,
        timeout_s=self._bounds.call_timeout_s,
        run_timeout_s=self._bounds.run_timeout_s,
      )
    finally:
      server.shut(endpoint.api_key)
    _end(attempt, session)
    await attempt.close()


def settle(attempts: Sequence[Attempt], tokenizer: Tokenizer) -> None:
  """Gives the attempts of a group their prompt: the tokens with which all their chains begin.

  What an attempt read beyond them, before its first answer, becomes part of its completion. An
  attempt that begins with another token than most of the group fails.

  Args:
    attempts: All attempts of a group; they have ended.
    tokenizer: Tokenizer of the model.
  """
  begun = [each for each in attempts if len(each.first_ids)]
  if not begun:
    return
  tokens = Counter(int(each.first_ids[0]) for each in begun)
  first = next(e.first_ids for e in begun if e.first_ids[0] == tokens.most_common(1)[0][0])
  shared = [_common(first, each.first_ids) for each in begun]
  common = min(each for each in shared if each)
  prompt = _beginning(attempts[0].prompt, first[:common], tokenizer)
  for attempt in attempts:
    attempt.begin_with(prompt, attempt.first_ids[common:])
  for attempt, length in zip(begun, shared, strict=True):
    if not length:
      attempt.begin_with(prompt, attempt.first_ids)
      attempt.fail(
        EnvironmentFailure("other_prompt", "its first token is not that of the group's attempts")
      )


def _beginning(prompt: Prompt, ids: Int[np.ndarray, " common"], tokenizer: Tokenizer) -> Prompt:
  """Returns a prompt with the tokens that its attempts began with."""
  if np.array_equal(ids, prompt.token_ids):
    return prompt
  text = tokenizer.decode(ids, skip_special=False)
  return dataclasses.replace(prompt, token_ids=ids.astype(np.int32), text=text, is_cut=False)


def _common(one: np.ndarray, other: np.ndarray) -> int:
  """Returns the number of tokens with which both begin."""
  length = min(len(one), len(other))
  differs = one[:length] != other[:length]
  return int(np.argmax(differs)) if differs.any() else length


def _end(attempt: Attempt, session: Session) -> None:
  """Gives an attempt the tokens that were sampled in its session, and the reason why it ended."""
  chain = session.last_chain()
  _adopt(attempt, chain)
  sampled = sum(len(turn.generation.token_ids) for turn in session.turns)
  counts = session.counts
  attempt.count(
    endpoint_requests=float(counts.requests),
    endpoint_refused=float(counts.refused),
    endpoint_tokens_left_out=float(sampled - sum(len(turn.generation.token_ids) for turn in chain)),
  )
  if session.mistake:
    attempt.fail(EnvironmentFailure("endpoint", session.mistake))
  elif attempt.error and chain and session.is_out_of_room:
    attempt.excuse(StepResult(0.0, done=True))  # as a conversation that is cut before its reward.
  elif not chain and not attempt.error:
    nothing = "the agent asked for no completion, or for none that it waited for"
    attempt.fail(EnvironmentFailure("no_completion", nothing))
  if attempt.error:
    return
  last = chain[-1].generation.finish_reason
  is_cut = last is FinishReason.LENGTH or session.is_out_of_room
  attempt.finish(
    FinishReason.LENGTH if is_cut else FinishReason.ENV_DONE if len(chain) > 1 else None
  )


def _adopt(attempt: Attempt, chain: Sequence[SampledTurn]) -> None:
  """Gives an attempt the tokens of a chain: what was sampled, and what was written between."""
  ids = chain[-1].token_ids if chain else np.zeros(0, np.int32)  # begins with those of all turns.
  place = 0
  for number, turn in enumerate(chain):
    written = ids[place : turn.prompt_length]
    if number == 0:
      attempt.first_ids = written
    else:
      attempt.add_observation(written)
    attempt.add_sampled(turn.generation)
    place = turn.prompt_length + len(turn.generation.token_ids)


class _Progress:
  """Counts attempts that have ended, for the progress function of a call."""

  def __init__(self, report: OnProgress | None, total: int):
    self._report = report
    self._total = total
    self._done = 0
    self._tokens = 0

  def add(self, session: Session) -> None:
    """Counts the attempt of a session."""
    self._done += 1
    self._tokens += sum(len(turn.generation.token_ids) for turn in session.turns)
    if self._report is not None:
      self._report(self._done, self._total, self._tokens)


async def together(*works: Coroutine[Any, Any, None]) -> None:
  """Awaits several; ends the others if one fails."""
  tasks = [asyncio.create_task(work) for work in works]
  try:
    await asyncio.gather(*tasks)
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
