"""Sends the requests of many conversations to an engine: each at once, or in rounds."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

from grpo_jax.engines.base import Generation, GenerationRequest
from grpo_jax.serving.request_errors import RequestError

PATIENCE_S = 1.0  # a round begins without a conversation that has been silent this long.


@runtime_checkable
class ServedEngine(Protocol):
  """The part of an engine that is used; see `engines.base.Engine`."""

  def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation]: ...


@runtime_checkable
class RequestScheduler(Protocol):
  """Samples completions for conversations."""

  def join(self) -> None:
    """Adds a conversation that may ask."""
    ...

  def leave(self) -> None:
    """Removes a conversation that will not ask again."""
    ...

  async def sample(self, request: GenerationRequest, *, of: int) -> Generation:
    """Samples one completion.

    Args:
      request: Request for it.
      of: Number of the conversation.

    Raises:
      RequestError: The engine cannot serve this request.
      Exception: The engine failed.
    """
    ...

  async def close(self) -> None:
    """Ends what is in progress."""
    ...


class ImmediateScheduler:
  """Sends each request when it comes."""

  def __init__(self, engine: ServedEngine):
    self._engine = engine

  def join(self) -> None:
    """Does nothing: nobody waits for a conversation."""

  def leave(self) -> None:
    """Does nothing."""

  async def sample(self, request: GenerationRequest, *, of: int) -> Generation:
    """Samples one completion; see `RequestScheduler`."""
    del of
    async with contextlib.aclosing(_generations(self._engine, [request])) as found:
      async for generation in found:
        return generation
    raise RuntimeError(f"the engine left request {request.request_id!r} unanswered")

  async def close(self) -> None:
    """Does nothing."""


@dataclasses.dataclass(eq=False)
class _Waiting:
  of: int
  request: GenerationRequest
  answer: "asyncio.Future[Generation]"


class RoundScheduler:
  """Sends the requests of all conversations together, in an order that does not depend on timing.

  So the batches of an engine whose numerics depend on them repeat themselves. A round begins when
  every conversation has a request, or when none has come for `patience_s`: a conversation whose
  tools are slow does not hold up the others.
  """

  def __init__(self, engine: ServedEngine, *, patience_s: float = PATIENCE_S):
    self._engine = engine
    self._at_once = ImmediateScheduler(engine)
    self._patience_s = patience_s
    self._members = 0  # conversations that may ask.
    self._waiting: list[_Waiting] = []
    self._round: asyncio.Task[None] | None = None
    self._timer: asyncio.TimerHandle | None = None

  def join(self) -> None:
    """Adds a conversation."""
    self._members += 1

  def leave(self) -> None:
    """Removes a conversation that will not ask again."""
    self._members -= 1
    self._look()

  async def sample(self, request: GenerationRequest, *, of: int) -> Generation:
    """Samples one completion in the next round; see `RequestScheduler`."""
    waiting = _Waiting(of, request, asyncio.get_running_loop().create_future())
    self._waiting.append(waiting)
    self._look()
    try:
      return await waiting.answer
    finally:
      if waiting in self._waiting:  # its conversation has left.
        self._waiting.remove(waiting)

  async def close(self) -> None:
    """Ends the round in progress."""
    self._stop_timer()
    if self._round is not None:
      self._round.cancel()
      await asyncio.gather(self._round, return_exceptions=True)

  def _look(self) -> None:
    """Begins a round if it is time; else waits for more requests for a while."""
    self._stop_timer()
    if self._round is not None or not self._waiting:
      return
    if len({each.of for each in self._waiting}) >= self._members:
      self._begin()
    else:
      loop = asyncio.get_running_loop()
      self._timer = loop.call_later(self._patience_s, self._begin)

  def _begin(self) -> None:
    self._stop_timer()
    if self._waiting and self._round is None:
      batch, self._waiting = self._waiting, []
      batch.sort(key=lambda each: each.of)
      self._round = asyncio.create_task(self._sample(batch))
      self._round.add_done_callback(self._ended)

  def _ended(self, task: asyncio.Task[None]) -> None:
    self._round = None
    if not task.cancelled():
      task.exception()  # every request of the round has it.
      self._look()

  def _stop_timer(self) -> None:
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None

  async def _sample(self, batch: Sequence[_Waiting]) -> None:
    """Samples a round, and answers its requests as they finish."""
    names = {f"{number}:{each.request.request_id}": each for number, each in enumerate(batch)}
    requests = [dataclasses.replace(each.request, request_id=name) for name, each in names.items()]
    try:
      async with contextlib.aclosing(_generations(self._engine, requests)) as found:
        async for generation in found:
          one = names.pop(generation.request_id)
          own = dataclasses.replace(generation, request_id=one.request.request_id)
          _answer(one, own)
      if names:
        raise RuntimeError(f"the engine left {len(names)} requests unanswered: {[*names][:5]}")
    except RequestError:
      await self._one_by_one(batch)  # only those that cannot be served are refused.
    except BaseException as error:
      for each in names.values():
        _answer(each, error if isinstance(error, Exception) else asyncio.CancelledError())
      raise

  async def _one_by_one(self, batch: Sequence[_Waiting]) -> None:
    for each in batch:
      try:
        _answer(each, await self._at_once.sample(each.request, of=each.of))
      except Exception as error:
        _answer(each, error)


def _answer(waiting: _Waiting, answer: Generation | BaseException) -> None:
  if waiting.answer.done():
    return
  if isinstance(answer, asyncio.CancelledError):
    waiting.answer.cancel()
  elif isinstance(answer, BaseException):
    waiting.answer.set_exception(answer)
  else:
    waiting.answer.set_result(answer)


async def _generations(
  engine: ServedEngine, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[Generation, None]:
  """Yields the generations; at the end closes the engine's iterator, and so cancels the rest."""
  try:
    found = engine.generate(requests)
  except ValueError as error:
    raise RequestError(str(error)) from error
  try:
    async for generation in found:
      yield generation
  finally:
    if close := getattr(found, "aclose", None):
      await close()
