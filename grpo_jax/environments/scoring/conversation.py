"""A prompt and its completion as a conversation, as text and as a reward model's tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from grpo_jax.models.chat import tokenizer_files
from grpo_jax.models.chat.control_tokens import ControlTokens
from grpo_jax.models.chat.rendering import Renderer
from grpo_jax.models.errors import ModelError
from grpo_jax.types import Prompt

Message = Mapping[str, Any]


def from_attempt(prompt: Prompt, completion: str) -> list[Message]:
  """Returns the prompt's messages and the completion as the assistant's.

  Raises:
    ValueError: The prompt was made without messages.
  """
  if not prompt.messages:
    raise ValueError(
      f"prompt {prompt.prompt_id} has no messages (Prompt.messages), which a reward model needs:"
      " its own chat template renders them"
    )
  return [*prompt.messages, {"role": "assistant", "content": completion}]


class ConversationEncoder:
  """The tokenizer and chat template of a reward model."""

  def __init__(self, opened: tokenizer_files.OpenedTokenizer, template: str, where: str):
    """Wraps a tokenizer; `where` names its location in errors."""
    self._backend = opened.backend
    self._renderer = Renderer(template, where=opened.template_file)
    self._where = where
    self._control = ControlTokens(opened.backend, templates=[template])
    named = opened.backend.special_tokens_map
    self._variables = {"tools": None, "documents": None, "add_generation_prompt": False, **named}

  @property
  def vocab_size(self) -> int:
    """Number of ids, added tokens included; every id is smaller."""
    return tokenizer_files.vocab_size(self._backend)

  def render(self, messages: Sequence[Message]) -> str:
    """Renders a finished conversation, without a prompt for another message at the end."""
    return self._renderer.render(messages, self._variables).text

  def encode(self, messages: Sequence[Message]) -> Int[np.ndarray, " tokens"]:
    """Encodes the output of `render`; only the template writes control tokens.

    Raises:
      TokenizerFailure: The tokenizer fails on the text.
      ValueError: The rendered conversation is empty.
    """
    marked = self._control.marked(messages, has_own_turns=True)
    pieces = marked.pieces(self.render(*marked.values))
    with tokenizer_files.guarded():
      ids = [i for p in pieces for i in self._backend.encode(p, add_special_tokens=False)]
    if not ids:
      raise ValueError(f"{self._where}: the chat template renders an empty conversation")
    return np.asarray(ids, np.int32)


def load_encoder(directory: str | Path, *, chat_template: str | None = None) -> ConversationEncoder:
  """Loads the tokenizer of a local Hugging Face folder.

  Args:
    directory: Folder with tokenizer.json (or anything that AutoTokenizer reads).
    chat_template: Name of a .jinja file, or the template itself; None: the tokenizer's own.

  Raises:
    MissingModel: The folder or the template file does not exist.
    ModelError: The folder has no tokenizer, or there is no chat template.
  """
  opened = tokenizer_files.open_folder(directory, chat_template=chat_template)
  if not opened.template:
    raise ModelError(
      f"the tokenizer of the reward model in {directory} has no chat template; set"
      " environments.NAME.chat_template to a .jinja file or a template"
    )
  return ConversationEncoder(opened, opened.template, str(directory))
