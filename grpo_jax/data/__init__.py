"""Files and tasks → prompts, in a reproducible, resumable order."""

from typing import Any

from grpo_jax.data.prompts import (
  OnError,
  PromptDataset,
  PromptStream,
  held_out,
  open_dataset,
)
from grpo_jax.data.tokenizer import Tokenizer, check_vocabulary
from grpo_jax.data.tokenizer import load as load_tokenizer
from grpo_jax.types import Prompt

__all__ = [
  "PromptDataset",
  "PromptStream",
  "Tokenizer",
  "check_vocabulary",
  "load_tokenizer",
  "make",
  "make_held_out",
]


def make(
  tokenizer: Tokenizer,
  *,
  shuffle: bool = True,
  seed: int = 0,
  epochs: int | None = None,
  on_error: OnError = "stop",
  cursor: int = 0,
  **dataset: Any,
) -> PromptStream:
  """Makes the stream of training prompts.

  Args:
    tokenizer: of the model.
    shuffle: whether every epoch has an order of its own.
    seed: of that order.
    epochs: passes over the data; None: without end.
    on_error: "stop" or "skip", for broken rows.
    cursor: where to go on.
    **dataset: see `prompts.open_dataset`.
  """
  return PromptStream(
    open_dataset(tokenizer, **dataset),
    shuffle=shuffle,
    seed=seed,
    epochs=epochs,
    on_error=on_error,
    cursor=cursor,
  )


def make_held_out(
  tokenizer: Tokenizer,
  *,
  limit: int | None = None,
  on_error: OnError = "stop",
  **dataset: Any,
) -> list[Prompt]:
  """Makes an evaluation set: the first `limit` rows of a dataset (see `make`)."""
  return held_out(open_dataset(tokenizer, **dataset), limit=limit, on_error=on_error)
