"""The experts of the tokens of one attempt, put together from the records of its turns. Pure."""

import numpy as np
from jaxtyping import Int

from grpo_jax.engines.base import Generation
from grpo_jax.types import NOT_RECORDED

Experts = Int[np.ndarray, "tokens L k"]


class ExpertRecord:
  """Which experts the tokens of a conversation went through, as far as it is known.

  Each call of the engine reads all earlier tokens as its prompt, so there are several records of a
  token. The first one counts: it is the one under which the next token was sampled, and its
  logprob belongs to it. A later call may have newer weights, or round otherwise. What the first
  call does not know, a later one adds: the last token of a turn, and what the environment wrote,
  are read by the call that follows.
  """

  def __init__(self):
    """Begins without a record."""
    self._parts: list[Experts] = []

  def add(self, generation: Generation) -> None:
    """Adds the record of a call, whose prompt is all tokens so far; nothing if there is none."""
    prompt, completion = generation.prompt_experts, generation.experts
    if prompt is None or completion is None:
      return
    if not self._parts:
      self._parts = [prompt, completion]  # not copied: the prompt's is that of the whole group.
      return
    known = np.concatenate(self._parts)
    joined = np.concatenate([prompt, completion])
    known = known[: len(prompt)]
    joined[: len(known)] = np.where(known == NOT_RECORDED, joined[: len(known)], known)
    self._parts = [joined]

  def of(self, start: int, stop: int) -> Experts | None:
    """Returns the record of tokens of the conversation; None if no call had one.

    Args:
      start: Index of the first token.
      stop: Index after the last token.
    """
    if not self._parts:
      return None
    first = self._parts[0]
    if start == 0 and stop == len(first):
      return first
    known = np.concatenate(self._parts)[start:stop]
    missing = stop - start - len(known)
    return np.pad(known, ((0, missing), (0, 0), (0, 0)), constant_values=NOT_RECORDED)
