"""A prompt and its completion as a conversation, in words and in a reward model's tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from grpo_jax.types import Prompt

Message = Mapping[str, Any]


def of_attempt(prompt: Prompt, completion: str) -> list[Message]:
  """Returns the prompt's messages and the completion as the assistant's.

  Raises:
    ValueError: the prompt was made without messages.
  """
  if not prompt.messages:
    raise ValueError(
      f"prompt {prompt.prompt_id} has no messages (Prompt.messages), which a reward model needs:"
      " its own chat template renders them"
    )
  return [*prompt.messages, {"role": "assistant", "content": completion}]


class ConversationEncoder:
  """The tokenizer and chat template of a reward model."""

  def __init__(self, backend: Any, where: str):
    """Wraps a tokenizer of transformers; `where` it was found, for errors."""
    self._backend = backend
    self._where = where

  @property
  def vocab_size(self) -> int:
    """Number of ids, added ones included: every id is below it."""
    return max(len(self._backend), max(self._backend.get_vocab().values()) + 1)

  def render(self, messages: Sequence[Message]) -> str:
    """Renders a finished conversation: nothing after the last message asks for another."""
    return self._backend.apply_chat_template(
      [dict(message) for message in messages],
      tokenize=False,
      add_generation_prompt=False,
      return_dict=False,
    )

  def encode(self, messages: Sequence[Message]) -> Int[np.ndarray, " tokens"]:
    """Encodes what `render` gives; the template writes its special tokens itself.

    Raises:
      ValueError: that is nothing.
    """
    ids = self._backend.encode(self.render(messages), add_special_tokens=False)
    if not ids:
      raise ValueError(f"{self._where}: the chat template renders the conversation as nothing")
    return np.asarray(ids, np.int32)


def load_encoder(directory: str | Path, *, chat_template: str | None = None) -> ConversationEncoder:
  """Loads the tokenizer of a local Hugging Face folder.

  Args:
    directory: folder with tokenizer.json (or whatever AutoTokenizer reads).
    chat_template: None: the tokenizer's own; else a file that ends in .jinja, or the
      template itself.

  Raises:
    FileNotFoundError: the template file does not exist.
    ValueError: the folder holds no tokenizer, or there is no chat template.
  """
  from transformers import AutoTokenizer

  try:
    backend = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
  except (OSError, ValueError, KeyError) as error:
    raise ValueError(f"{directory} holds no tokenizer that transformers reads: {error}") from error
  if chat_template is not None:
    is_file = chat_template.endswith(".jinja")
    backend.chat_template = Path(chat_template).read_text() if is_file else chat_template
  if not backend.chat_template:
    raise ValueError(
      f"the tokenizer of the reward model in {directory} has no chat template; name a .jinja"
      " file or a template as chat_template"
    )
  return ConversationEncoder(backend, str(directory))
