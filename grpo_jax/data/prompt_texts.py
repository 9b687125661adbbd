"""Turns messages into the tokens of a prompt; a prompt that is too long costs little."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from grpo_jax.data.formats import RowError
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.models.chat.rendering import TemplateRefusal
from grpo_jax.models.chat.tokenizer_files import TokenizerFailure


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
  """A prompt as text and tokens."""

  text: str
  ids: Int[np.ndarray, " tokens"]  # cut to the allowed number.
  too_long: str  # why it is longer than allowed; empty if it is not.
  is_shortened: bool  # it had more characters than its tokens can have, and `text` is cut.
  parted: int = 0  # places where the text of a control token is written as ordinary characters.


def ask(
  tokenizer: Tokenizer,
  messages: Sequence[Mapping[str, Any]],
  where: str,
  *,
  max_tokens: int,
  tools: Sequence[Mapping[str, Any]] = (),
) -> Asked:
  """Makes a prompt from messages.

  Args:
    tokenizer: Tokenizer whose chat template renders them.
    messages: The conversation.
    where: Place of the messages, "file:line".
    max_tokens: Longest prompt, in tokens.
    tools: Tools that the chat template receives.

  Raises:
    RowError: The chat template rejects the messages, or renders nothing, or the tokenizer fails.
    TemplateError: The chat template is broken.
  """
  try:
    found = tokenizer.prompt(messages, max_tokens=max_tokens, tools=tools)
  except (TemplateRefusal, TokenizerFailure) as error:
    raise RowError(where, str(error)) from error
  except RecursionError as error:
    raise RowError(where, "messages or tools are nested too deeply") from error
  if not len(found.ids):
    raise RowError(where, "the prompt has no tokens")
  too_long = found.too_many
  if not too_long and len(found.ids) > max_tokens:
    too_long = f"{len(found.ids)} tokens, more than {max_tokens}"
  ids, is_shortened = found.ids[:max_tokens], bool(found.too_many)
  return Asked(found.text, ids, too_long, is_shortened, found.parted)


def shortened(value: Any, max_characters: int) -> Any:
  """Returns a value of a row with every string in it cut, so that nothing too long is kept."""
  if isinstance(value, str):
    return value[:max_characters]
  if isinstance(value, Mapping):
    return {name: shortened(each, max_characters) for name, each in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(shortened(each, max_characters) for each in value)
  return value
