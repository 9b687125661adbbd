"""Prompts × engine × environments → groups of scored attempts.

Token in, token out: what the engine sampled is never decoded and encoded again. The
tokens that an environment writes stand in the completion with `loss_mask` False.
"""

import asyncio
import concurrent.futures
import dataclasses
import hashlib
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from grpo_jax import checked, metrics
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.engines.base import (
  Generation,
  GenerationRequest,
  OnProgress,
  SamplingParams,
)
from grpo_jax.environments.base import EnvironmentFactory, StepResult
from grpo_jax.environments.isolation import EnvironmentFailure
from grpo_jax.errors import ExpectedFailure
from grpo_jax.interrupts import Stopped
from grpo_jax.registry import nearest
from grpo_jax.rollouts.attempt import Attempt
from grpo_jax.types import FinishReason, Prompt, RolloutGroup

_LOOK_S = 0.1  # between two looks at whether the run is to stop.
_CANCELS, _CANCEL_S = 3, 0.5  # how often work that was cancelled is cancelled again.


@runtime_checkable
class Generator(Protocol):
  """What rollouts need of an engine."""

  def generate(
    self, requests: Sequence[GenerationRequest], *, on_progress: OnProgress | None = None
  ) -> AsyncIterator[Generation]:
    """Yields one generation for each request, in any order; see `engines.base.Engine`."""
    ...


class TooManyFailures(ExpectedFailure, RuntimeError):
  """More attempts than allowed could not be scored."""


LIMIT_KINDS: Mapping[str, checked.Kind] = {
  "max_turns": checked.whole(low=1),
  "max_tokens": checked.whole(low=2, none=True),
  "environment_timeout_s": checked.number(above=0),
  "environment_concurrency": checked.whole(low=1),
  "max_error_share": checked.number(low=0, high=1),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
  """Bounds of one attempt, and of what may go wrong."""

  max_turns: int = 1
  max_tokens: int | None = 1024  # of prompt and completion, all turns; None: no bound here.
  environment_timeout_s: float = 60.0  # of one call of an environment.
  environment_concurrency: int = 16  # calls of environments at the same time.
  max_error_share: float = 0.2  # of the attempts; when more cannot be scored, `collect` raises.

  def __post_init__(self):
    checked.require(LIMIT_KINDS, checked.fields_of(self), of="rollout")


async def collect(
  engine: Generator,
  environments: Mapping[str, EnvironmentFactory],
  prompts: Sequence[Prompt],
  tokenizer: Tokenizer,
  *,
  group_size: int,
  sampling: SamplingParams,
  seed: int,
  step: int,
  limits: Limits | None = None,
  schedule: Literal["rounds", "free"] = "rounds",
  on_progress: OnProgress | None = None,
) -> list[RolloutGroup]:
  """Attempts every prompt `group_size` times and scores the attempts.

  The first turns of all attempts go to the engine in one call; attempts are scored while
  others are still sampled. The result does not depend on which of them ends first.

  Args:
    engine: samples the completions.
    environments: factories by name; a prompt names its own.
    prompts: of different ids.
    tokenizer: decodes for the environments, and encodes what they write.
    group_size: attempts at each prompt, at least 1.
    sampling: of each turn; `max_tokens` bounds a turn.
    seed: of the run.
    step: of the run; the same (seed, step, prompt id, attempt, turn) samples the same.
    limits: bounds; `Limits()` if None.
    schedule: how later turns are sent to the engine. "rounds": all of a turn together,
      so that an engine whose numerics depend on the batch repeats itself exactly;
      "free": each at once.
    on_progress: goes to the engine: (completions done, asked for, tokens sampled).

  Returns:
    The groups, in the order of the prompts; a group's attempts in the order of their
    numbers. An attempt that could not be scored has reward NaN and a metric "error/KIND".

  Raises:
    TooManyFailures: more than `limits.max_error_share` of the attempts failed, not
      counting those at prompts of weight 0.
    ValueError: a prompt names an unknown environment, or ids are repeated.
  """
  if group_size < 1:
    raise ValueError(f"group_size must be at least 1, got {group_size}")
  _check_unique(prompts)
  limits = limits or Limits()
  factories = {p.environment: _factory(environments, p) for p in prompts}
  attempts = [
    Attempt(prompt, number, factories[prompt.environment])
    for prompt in prompts
    for number in range(group_size)
  ]
  sampler = _Sampler(engine, tokenizer, sampling, seed, step, limits.max_tokens, on_progress)
  collector = _Collector(sampler, limits, attempts)
  try:
    await (collector.in_rounds() if schedule == "rounds" else collector.freely())
  finally:
    await asyncio.gather(*(a.close() for a in attempts))
  _check_failures(attempts, limits.max_error_share)
  rollouts = [a.rollout(tokenizer) for a in attempts]
  return [
    RolloutGroup(prompt, tuple(rollouts[i * group_size : (i + 1) * group_size]))
    for i, prompt in enumerate(prompts)
  ]


def collect_sync(*args: Any, stop: Any = False, **kwargs: Any) -> list[RolloutGroup]:
  """Calls `collect` from ordinary code, also in a notebook where a loop already runs.

  Raises:
    interrupts.Stopped: `stop` has become true.
  """
  return run_sync(collect(*args, **kwargs), stop=stop)


def run_sync(coroutine: Coroutine[Any, Any, Any], *, stop: Any = False) -> Any:
  """Runs a coroutine to its end in a loop and a thread of its own; returns its result.

  Ctrl-C in the calling thread cancels it, and so does `stop`. What then does not end within
  seconds is left behind, in daemon threads.

  Args:
    coroutine: to be run.
    stop: becomes true when the result is no longer wanted; see `interrupts.Flag`.

  Raises:
    interrupts.Stopped: `stop` has become true.
  """
  loop = asyncio.new_event_loop()
  result: concurrent.futures.Future[Any] = concurrent.futures.Future()
  task: list[asyncio.Task[Any]] = []

  async def body() -> Any:
    task.append(asyncio.ensure_future(coroutine))
    return await task[0]

  def work() -> None:
    try:
      result.set_result(loop.run_until_complete(body()))
    except BaseException as error:
      result.set_exception(error)
    finally:
      loop.run_until_complete(loop.shutdown_asyncgens())
      loop.close()

  thread = threading.Thread(target=work, name="rollout", daemon=True)
  thread.start()
  try:
    return _awaited(result, stop)
  except (KeyboardInterrupt, Stopped):
    for _ in range(_CANCELS):  # the first cancels the work, the next what closes it.
      if thread.is_alive() and task:
        loop.call_soon_threadsafe(task[0].cancel)
      thread.join(_CANCEL_S)
    raise


def _awaited(result: concurrent.futures.Future[Any], stop: Any) -> Any:
  """Returns the result once it is there; raises Stopped as soon as nobody wants it."""
  while True:
    try:
      return result.result(timeout=_LOOK_S)
    except TimeoutError:
      if result.done():  # just now, or the coroutine itself raised a TimeoutError.
        return result.result()
    if stop:
      raise Stopped


def counting(advance: Callable[[int], None]) -> OnProgress:
  """Turns "so many are done" into "so many more are done"."""
  seen = 0

  def tell(done: int, total: int, tokens: int) -> None:
    nonlocal seen
    advance(max(done - seen, 0))
    seen = done

  return tell


def request_seed(seed: int, step: int, prompt_id: str, attempt: int, turn: int = 0) -> int:
  """Returns the seed of one request, in [0, 2⁶³): the same in every process."""
  key = json.dumps([seed, step, prompt_id, attempt, turn]).encode()
  digest = hashlib.blake2b(key, digest_size=8).digest()
  return int.from_bytes(digest, "little") >> 1


def error_counts(groups: Sequence[RolloutGroup]) -> dict[str, float]:
  """Counts the attempts of the groups that failed, by kind, as "rollout/errors/KIND"."""
  kinds = metrics.error_kinds(groups)
  return {f"rollout/errors/{kind}": float(count) for kind, count in kinds.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class _Sampler:
  """An engine with all that a request is made of."""

  engine: Generator
  tokenizer: Tokenizer
  sampling: SamplingParams
  seed: int
  step: int
  max_tokens: int | None
  on_progress: OnProgress | None

  def generate(self, attempts: Sequence[Attempt]) -> AsyncIterator[Generation]:
    """Samples the next turn of several attempts, in one call of the engine."""
    requests = [self.request(a) for a in attempts]
    return self.engine.generate(requests, on_progress=self.on_progress)

  def room(self, attempt: Attempt, more: int = 0) -> int:
    """Tokens that the next turn may have, after `more` others."""
    if self.max_tokens is None:
      return self.sampling.max_tokens
    return min(self.sampling.max_tokens, self.max_tokens - len(attempt.token_ids) - more)

  def request(self, attempt: Attempt) -> GenerationRequest:
    """The request of an attempt's next turn."""
    where = (attempt.prompt.prompt_id, attempt.number, attempt.turn)
    return GenerationRequest(
      request_id=attempt.request_id,
      prompt_ids=attempt.token_ids,
      sampling=dataclasses.replace(
        self.sampling,
        max_tokens=self.room(attempt),
        stop_strings=tuple(dict.fromkeys((*self.sampling.stop_strings, *attempt.stop_strings))),
      ),
      seed=request_seed(self.seed, self.step, *where),
      group=attempt.prompt.prompt_id,
    )

  def observation_ids(
    self, attempt: Attempt, result: StepResult, generation: Generation
  ) -> np.ndarray:
    """The tokens of what the environment wrote; of more than there is room for, a part.

    Raises:
      EnvironmentFailure: it cannot be encoded, or the chat template refuses it.
    """
    try:
      text = result.observation
      if self.max_tokens is not None:
        left = max(self.max_tokens - len(attempt.token_ids), 0)
        text = text[: self.tokenizer.longest_text(left + 1) + 1]
      if result.observation_role is None:
        return self.tokenizer.encode(text)
      message = {"role": result.observation_role, "content": text}
      last = int(generation.token_ids[-1]) if len(generation.token_ids) else None
      return self.tokenizer.turn_ids(message, after=last)
    except Exception as error:  # any text meets the user's template and tokenizer here.
      raise EnvironmentFailure("observation", f"{type(error).__name__}: {error}") from error


class _Collector:
  """Takes attempts through their turns."""

  def __init__(
    self,
    sampler: _Sampler,
    limits: Limits,
    attempts: Sequence[Attempt],
  ):
    self._sampler = sampler
    self._limits = limits
    self._attempts = attempts
    self._judges = asyncio.Semaphore(limits.environment_concurrency)

  async def in_rounds(self) -> None:
    """Takes every turn of all attempts together."""
    while active := self._active():
      await self._turn(active, self._advance)

  async def freely(self) -> None:
    """Takes each attempt's next turn as soon as it can be taken."""

    async def advance_and_go_on(attempt: Attempt, generation: Generation) -> None:
      await self._advance(attempt, generation)
      if not attempt.is_done:
        await self._turn([attempt], advance_and_go_on)

    if active := self._active():
      await self._turn(active, advance_and_go_on)

  def _active(self) -> list[Attempt]:
    """The attempts that go on; one whose prompt leaves no room for an answer fails."""
    for attempt in self._attempts:
      if not attempt.is_done and self._sampler.room(attempt) < 1:
        tokens = len(attempt.prompt.token_ids)
        reason = f"a prompt of {tokens} tokens leaves no room in {self._limits.max_tokens}"
        attempt.fail(EnvironmentFailure("no_room", reason))
    return [a for a in self._attempts if not a.is_done]

  async def _turn(
    self,
    attempts: Sequence[Attempt],
    advance: Callable[[Attempt, Generation], Coroutine[Any, Any, None]],
  ) -> None:
    """Samples one turn of several attempts, and advances each as its tokens arrive."""
    waiting = {a.request_id: a for a in attempts}
    tasks: list[asyncio.Task[None]] = []
    try:
      async for generation in self._sampler.generate(attempts):
        if generation.request_id not in waiting:
          raise RuntimeError(f"the engine answered an unknown request {generation.request_id!r}")
        attempt = waiting.pop(generation.request_id)
        tasks.append(asyncio.create_task(advance(attempt, generation)))
      if waiting:
        raise RuntimeError(f"the engine left {len(waiting)} requests unanswered: {[*waiting][:5]}")
      await asyncio.gather(*tasks)
    finally:
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)

  async def _advance(self, attempt: Attempt, generation: Generation) -> None:
    """Takes one attempt from a turn's tokens to the next turn, or to its end."""
    attempt.add_sampled(generation)
    if generation.finish_reason is FinishReason.ABORT:
      attempt.fail(EnvironmentFailure("abort", "the engine gave up on the request"))
    else:
      text = self._sampler.tokenizer.decode(generation.token_ids, skip_special=True)
      async with self._judges:
        result = await attempt.judge(text, generation, self._limits.environment_timeout_s)
      if result is not None:
        self._continue(attempt, generation, result)
    if attempt.is_done:
      async with self._judges:
        await attempt.close()

  def _continue(self, attempt: Attempt, generation: Generation, result: StepResult) -> None:
    """Decides whether there is a next turn, and appends the observation if there is."""
    is_cut = generation.finish_reason is FinishReason.LENGTH
    if result.done or is_cut:
      is_conversation = attempt.turn > 0 and not is_cut
      attempt.finish(FinishReason.ENV_DONE if is_conversation else None)
    elif attempt.turn + 1 >= self._limits.max_turns:
      attempt.finish_at_turn_limit()
    else:
      try:
        ids = self._sampler.observation_ids(attempt, result, generation)
      except EnvironmentFailure as error:
        attempt.fail(error)
        return
      if self._sampler.room(attempt, more=len(ids)) < 1:
        attempt.finish(FinishReason.LENGTH)
      else:
        attempt.add_observation(ids)


def _factory(environments: Mapping[str, EnvironmentFactory], prompt: Prompt) -> EnvironmentFactory:
  if prompt.environment not in environments:
    raise ValueError(
      f"prompt {prompt.prompt_id} names the environment {prompt.environment!r}"
      f"{nearest(prompt.environment, environments)}; there are: {', '.join(environments)}"
    )
  return environments[prompt.environment]


def _check_unique(prompts: Sequence[Prompt]) -> None:
  counts = Counter(p.prompt_id for p in prompts)
  repeated = [name for name, count in counts.items() if count > 1]
  if repeated:
    raise ValueError(f"prompt ids must differ, repeated: {repeated[:5]}")


def _check_failures(attempts: Sequence[Attempt], max_share: float) -> None:
  """Raises TooManyFailures. Prompts of weight 0 do not count: cut ones may leave no room."""
  counting = [a for a in attempts if a.prompt.weight > 0]
  errors = [(a.prompt.prompt_id, a.error) for a in counting if a.error]
  if len(errors) <= max_share * len(counting):
    return
  kinds = Counter(error.kind for _, error in errors)
  where, first = errors[0]
  raise TooManyFailures(
    f"{len(errors)} of {len(counting)} attempts could not be scored, more than the allowed share "
    f"of {max_share:g}: {dict(kinds)}; the first, {where}: {first.kind}: {first}"
  ) from first
