"""Turns messages into the tokens of a prompt; a prompt that is too long costs little."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from grpo_jax.data.formats import SYSTEM_ROLES, RowError
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.models.chat.rendering import TemplateRefusal
from grpo_jax.models.chat.tokenizer_files import TokenizerFailure

_SAID = "xSaidByTheSystemx"  # letters, which survive trimming, JSON and HTML.
_INSTEAD = (
  "put its text into the user's message (data.prompt_template in place of data.system_prompt), or"
  " give another model.chat_template"
)


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
    RowError: The chat template rejects the messages, leaves out the system's, or renders nothing,
      or the tokenizer fails.
    TemplateError: The chat template is broken.
  """
  first = str(messages[0].get("role")) if messages else ""
  is_system = first in SYSTEM_ROLES
  if is_system and _fate_of_first(tokenizer, first) == "left out":
    raise RowError(where, f"the chat template leaves out messages of role {first!r}; {_INSTEAD}")
  try:
    found = tokenizer.prompt(messages, max_tokens=max_tokens, tools=tools)
  except (TemplateRefusal, TokenizerFailure) as error:
    is_refused = is_system and _fate_of_first(tokenizer, first) == "refused"
    reason = f"{error}; it refuses messages of role {first!r}; {_INSTEAD}"
    raise RowError(where, reason if is_refused else str(error)) from error
  except RecursionError as error:
    raise RowError(where, "messages or tools are nested too deeply") from error
  if not len(found.ids):
    raise RowError(where, "the prompt has no tokens")
  too_long = found.too_many
  if not too_long and len(found.ids) > max_tokens:
    too_long = f"{len(found.ids)} tokens, more than {max_tokens}"
  ids, is_shortened = found.ids[:max_tokens], bool(found.too_many)
  return Asked(found.text, ids, too_long, is_shortened, found.parted)


@functools.lru_cache(maxsize=8)
def _fate_of_first(tokenizer: Tokenizer, role: str) -> str:
  """Returns what the chat template does with a message of a role before a user's.

  "refused" is only said if the template writes the user's message alone.
  """
  asked = {"role": "user", "content": "?"}
  try:
    text = tokenizer.render([{"role": role, "content": _SAID}, asked])
  except TemplateRefusal:
    try:
      tokenizer.render([asked])
    except TemplateRefusal:
      return "unknown"
    return "refused"
  return "written" if _SAID in text else "left out"


def shortened(value: Any, max_characters: int) -> Any:
  """Returns a value of a row with every string in it cut, so that nothing too long is kept."""
  if isinstance(value, str):
    return value[:max_characters]
  if isinstance(value, Mapping):
    return {name: shortened(each, max_characters) for name, each in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(shortened(each, max_characters) for each in value)
  return value
