"""The records of the experts that an embedded sampler's tokens went through, on the host."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Int

from grpo_jax.types import ExpertShape


@dataclasses.dataclass(slots=True)
class PromptExperts:
  """Experts of a prompt's tokens, as one reading of the prompt chose them.

  Attributes:
    shape: Shape of the record.
    read: Experts of the tokens in the pages, all but the last; None: not fetched yet.
    whole: Experts of all tokens, once a row has decoded the last; its rows share this array.
  """

  shape: ExpertShape
  read: Int[np.ndarray, "fed L k"] | None = None
  whole: Int[np.ndarray, "prompt L k"] | None = None

  def with_last(self, last: Int[np.ndarray, "1 L k"]) -> Int[np.ndarray, "prompt L k"]:
    """Returns the experts of the whole prompt; those of its last token are the first row's."""
    if self.whole is None:
      assert self.read is not None  # fetched with the first chunk of decode steps.
      self.whole = np.concatenate([self.read, last])
    return self.whole


class Readings:
  """The experts of prompts that were read, on the devices until they are fetched."""

  def __init__(self):
    self._unfetched: list[tuple[list[tuple[PromptExperts, int]], list[Array]]] = []

  def add(self, prompts: Sequence[tuple[PromptExperts, int]], experts: Sequence[Array]) -> None:
    """Adds one reading.

    Args:
      prompts: Record of each prompt, and the number of its tokens that were read.
      experts: Experts of these tokens, in chunks; padding may follow the last.
    """
    self._unfetched.append((list(prompts), list(experts)))

  def fetch(self) -> None:
    """Writes the experts of all readings into the records."""
    unfetched, self._unfetched = self._unfetched, []
    for prompts, experts in unfetched:
      found = np.concatenate([np.asarray(each) for each in experts])
      ends = np.cumsum([tokens for _, tokens in prompts])
      for (record, _), own in zip(prompts, np.split(found, ends), strict=False):
        record.read = own.copy()  # the padding behind the last prompt is not kept.


def of_completion(
  prompt: PromptExperts | None, fed: Sequence[Int[np.ndarray, "_ L k"]], count: int
) -> dict[str, Any]:
  """Returns the fields of a generation that have experts; none if they are not recorded.

  Those of a token are the ones that it went through first: weights that came later and read it
  again have not sampled the token after it.

  Args:
    prompt: Record of the prompt; None: experts are not recorded.
    fed: Experts of the tokens that decode steps were fed: the prompt's last, then sampled ones.
    count: Number of sampled tokens.
  """
  if prompt is None:
    return {}
  known = np.concatenate(fed)[:count]
  sampled = np.concatenate([known[1:], prompt.shape.unknown(1)])
  return {"prompt_experts": prompt.with_last(known[:1]), "experts": sampled}
