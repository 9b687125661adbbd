"""Turns files, hub datasets and tasks into prompts, in a reproducible, resumable order.

The names below are those of `streams`, which is imported when one of them is first used: `options`
is read before JAX is imported, so that a mistake in a command is answered at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from grpo_jax.data.streams import *  # noqa: F403

_OF_STREAMS = (
  *("DATALOADERS", "Dataset", "Loader", "Opener", "PromptDataset", "PromptStream", "Tokenizer"),
  *("check_vocabulary", "environments", "evaluation_sets", "find_tool_form", "first_prompts"),
  *("held_out", "load_tokenizer", "make", "make_dataloader", "make_held_out", "name_of"),
  *("names_a_source", "open_dataset", "tool_form_of", "trained_on", "training_sets"),
)


def __getattr__(name: str) -> Any:
  """Returns a name of `streams` (PEP 562)."""
  if name in _OF_STREAMS:
    return getattr(importlib.import_module(f"{__name__}.streams"), name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
