"""An engine that answers by a function, for tests: (prompt text, request) -> text and reason."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from grpo_jax.data.byte_tokenizer import END, ByteTokenizer
from grpo_jax.engines.base import Generation, GenerationRequest, OnProgress
from grpo_jax.types import FinishReason

TOKENIZER = ByteTokenizer()


class ScriptedEngine:
  """Remembers the calls; `reverse` lets the last request of a call finish first."""

  def __init__(self, answer: Callable[[GenerationRequest], str], *, reverse: bool = False):
    self._answer = answer
    self._reverse = reverse
    self.calls: list[list[GenerationRequest]] = []
    self.version = 7

  @property
  def weight_version(self) -> int:
    return self.version

  async def generate(
    self, requests: Sequence[GenerationRequest], *, on_progress: OnProgress | None = None
  ) -> AsyncIterator[Generation]:
    self.calls.append(list(requests))
    for request in reversed(requests) if self._reverse else requests:
      await asyncio.sleep(0)
      yield self._generation(request)

  def load_weights(self, params: Any, *, version: int) -> None:
    self.version = version

  def metrics(self) -> dict[str, float]:
    return {}

  def release(self) -> None:
    pass

  def close(self) -> None:
    pass

  def _generation(self, request: GenerationRequest) -> Generation:
    """The scripted text and <end>, cut at max_tokens; token i has logprob -(i + 1) / 8."""
    ids = np.append(TOKENIZER.encode(self._answer(request)), np.int32(END))
    is_cut = len(ids) > request.sampling.max_tokens
    ids = ids[: request.sampling.max_tokens]
    return Generation(
      request_id=request.request_id,
      token_ids=ids,
      logprobs=-(np.arange(len(ids), dtype=np.float32) + 1) / 8,
      weight_versions=np.full(len(ids), self.version, np.int32),
      finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
      matched_stop=None if is_cut else END,
    )
