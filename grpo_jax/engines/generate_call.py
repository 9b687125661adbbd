"""Passes what a worker thread has sampled to the event loop of the caller of `generate`."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from grpo_jax.engines.base import Generation, GenerationRequest, OnProgress


class GenerateCall:
  """One `generate` call in flight. Made, and iterated over, in the caller's event loop."""

  def __init__(self, requests: Sequence[GenerationRequest], on_progress: OnProgress | None):
    self.requests = requests
    self._on_progress = on_progress
    self._loop = asyncio.get_running_loop()
    self._arrived: asyncio.Queue[Generation | tuple[int, int] | BaseException] = asyncio.Queue()
    self._is_left = False
    self._delivered = 0
    self._tokens = 0

  @property
  def is_complete(self) -> bool:
    """Whether everything was delivered."""
    return self._delivered == len(self.requests)

  @property
  def is_over(self) -> bool:
    """Whether everything was delivered, or nobody waits for it. Read by the worker."""
    return self.is_complete or self.is_left

  @property
  def is_left(self) -> bool:
    """Whether nobody waits any longer: the rest need not be computed. Read by the worker."""
    return self._is_left or self._loop.is_closed()

  def deliver(self, generation: Generation) -> None:
    """Passes on a finished completion; called by the worker."""
    self._delivered += 1
    self._tokens += len(generation.token_ids)
    self._put(generation)

  def progress(self, tokens: int) -> None:
    """Reports how many tokens the unfinished completions have; called by the worker."""
    if self._on_progress is not None:
      self._put((self._delivered, self._tokens + tokens))

  def fail(self, error: BaseException) -> None:
    """Raises an error in the caller; called by the worker, or when the engine is closed."""
    self._put(error)

  async def stream(self) -> AsyncGenerator[Generation, None]:
    """Yields the generations as they arrive; raises the error of the worker."""
    left = len(self.requests)
    try:
      while left:
        item = await self._arrived.get()
        if isinstance(item, BaseException):
          raise item
        if isinstance(item, Generation):
          left -= 1
          yield item
        elif self._on_progress is not None:
          done, tokens = item
          self._on_progress(done, len(self.requests), tokens)
    finally:
      self._is_left = True

  def _put(self, item: Generation | tuple[int, int] | BaseException) -> None:
    try:
      self._loop.call_soon_threadsafe(self._arrived.put_nowait, item)
    except RuntimeError:  # the event loop is closed: nobody waits.
      self._is_left = True
