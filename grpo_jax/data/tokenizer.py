"""Tokenizer: chat template, encode, decode, stop ids. Wraps transformers, imported when needed."""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

Message = Mapping[str, Any]

_SAID = "\u241fsaid\u241f"  # no template writes this.
PLAIN = "plain"  # as `chat_template`: no template, the contents of the messages, line by line.


@runtime_checkable
class Tokenizer(Protocol):
  """What the rest of the system needs of a tokenizer."""

  @property
  def vocab_size(self) -> int:
    """Number of ids, added ones included: every id is below it."""
    ...

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """All ids that end a completion, ascending."""
    ...

  @property
  def end_id(self) -> int:
    """The stop id with which the chat template ends what the assistant says."""
    ...

  @property
  def pad_id(self) -> int:
    """Fills rectangular arrays. Never derive a mask from it."""
    ...

  def encode(self, text: str) -> Int[np.ndarray, " tokens"]:
    """Encodes text as it stands: no special token is added."""
    ...

  def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
    """Decodes ids; undecodable bytes become U+FFFD."""
    ...

  def render(self, messages: Sequence[Message]) -> str:
    """Renders a conversation by the chat template, up to where the assistant begins."""
    ...

  def apply_chat_template(self, messages: Sequence[Message]) -> Int[np.ndarray, " tokens"]:
    """Encodes what `render` gives."""
    ...

  def turn_ids(self, message: Message, *, after: int | None) -> Int[np.ndarray, " tokens"]:
    """Encodes a message that follows a sampled completion, and the next assistant's beginning.

    Args:
      message: what the environment says, with `role` and `content`.
      after: the last sampled id. The template's end-of-turn token is added in front
        unless the model has sampled it itself.
    """
    ...


class HuggingFaceTokenizer:
  """A tokenizer of a local Hugging Face folder."""

  def __init__(
    self,
    backend: Any,
    stop_ids: tuple[int, ...],
    *,
    plain: bool = False,
    template_args: Mapping[str, Any] | None = None,
  ):
    self._backend = backend
    self._stop_ids = stop_ids
    self._plain = plain
    self._template_args = dict(template_args or {})

  @property
  def vocab_size(self) -> int:
    return self._size

  @functools.cached_property
  def _size(self) -> int:
    return max(len(self._backend), max(self._backend.get_vocab().values()) + 1)

  @property
  def stop_ids(self) -> tuple[int, ...]:
    return self._stop_ids

  @property
  def end_id(self) -> int:
    return self._end

  @functools.cached_property
  def _end(self) -> int:
    if not self._plain and self._backend.chat_template:
      said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
      closing = self.encode(self._render(said, begin_assistant=False).rpartition(_SAID)[2])
      if len(closing) and int(closing[0]) in self._stop_ids:
        return int(closing[0])
    own = self._backend.eos_token_id
    return int(own) if own in self._stop_ids else self._stop_ids[0]

  @property
  def pad_id(self) -> int:
    if self._backend.pad_token_id is not None:
      return int(self._backend.pad_token_id)
    return self._stop_ids[0]

  def encode(self, text: str) -> Int[np.ndarray, " tokens"]:
    return np.asarray(self._backend.encode(text, add_special_tokens=False), np.int32)

  def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
    return self._backend.decode(
      [int(i) for i in ids],
      skip_special_tokens=skip_special,
      clean_up_tokenization_spaces=False,
    )

  def render(self, messages: Sequence[Message]) -> str:
    return self._render(messages, begin_assistant=True)

  def apply_chat_template(self, messages: Sequence[Message]) -> Int[np.ndarray, " tokens"]:
    # The template writes its special tokens itself: none is added to the rendered text.
    return self.encode(self.render(messages))

  def turn_ids(self, message: Message, *, after: int | None) -> Int[np.ndarray, " tokens"]:
    if self._plain:
      return self.encode(f"\n{message['content']}\n")
    closing, opening = self._turn_texts(message)
    closing_ids = self.encode(closing)
    if after is not None and len(closing_ids) and closing_ids[0] == after:
      closing_ids = closing_ids[1:]
    return np.concatenate([closing_ids, self.encode(opening)])

  def _turn_texts(self, message: Message) -> tuple[str, str]:
    """What the template writes after an assistant's words, and for the message after that."""
    past = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
    before = self._render(past, begin_assistant=False)
    after = self._render([*past, message], begin_assistant=True)
    if not after.startswith(before) or _SAID not in before:
      raise ValueError(
        "this chat template rewrites earlier turns when a new one is added, so that a "
        "conversation cannot be continued token by token; give another model.chat_template"
      )
    return before.rpartition(_SAID)[2], after[len(before) :]

  def _render(self, messages: Sequence[Message], *, begin_assistant: bool) -> str:
    if self._plain:
      return "\n".join(str(m["content"]) for m in messages) + ("\n" if begin_assistant else "")
    if not self._backend.chat_template:
      raise ValueError(
        f"the tokenizer in {self._backend.name_or_path!r} has no chat template; name a .jinja "
        f"file or a template as chat_template, or {PLAIN!r} for none (base models)"
      )
    return self._backend.apply_chat_template(
      [dict(m) for m in messages],
      tokenize=False,
      add_generation_prompt=begin_assistant,
      return_dict=False,
      **self._template_args,
    )


def load(
  directory: str | Path,
  *,
  chat_template: str | None = None,
  template_args: Mapping[str, Any] | None = None,
) -> HuggingFaceTokenizer:
  """Loads the tokenizer of a local Hugging Face folder.

  Args:
    directory: folder with tokenizer.json (or whatever AutoTokenizer reads).
    chat_template: None: the tokenizer's own; "plain": none, messages are joined by line
      ends; else a file that ends in .jinja, or the template itself.
    template_args: variables of the template, such as {"enable_thinking": False} for Qwen3.

  Raises:
    FileNotFoundError: the folder or the template file does not exist.
    ValueError: the folder holds no tokenizer, or names no end-of-sequence token.
  """
  directory = Path(directory)
  if not directory.is_dir():
    raise FileNotFoundError(f"no tokenizer folder {directory}")
  from transformers import AutoTokenizer

  try:
    backend = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
  except (OSError, ValueError, KeyError) as error:
    raise ValueError(f"{directory} holds no tokenizer that transformers reads: {error}") from error
  if chat_template is not None and chat_template != PLAIN:
    backend.chat_template = _template_text(chat_template)
  stop_ids = eos_ids(directory, backend.eos_token_id)
  if not stop_ids:
    raise ValueError(
      f"{directory}: neither generation_config.json, config.json nor the tokenizer names an "
      "end-of-sequence token (eos_token_id): no completion would ever end"
    )
  return HuggingFaceTokenizer(
    backend, stop_ids, plain=chat_template == PLAIN, template_args=template_args
  )


def eos_ids(directory: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
  """Unites all end-of-sequence ids that a model folder knows of.

  Models of several stop tokens name some of them in generation_config.json only; one
  that is missed turns finished completions into truncated ones.

  Args:
    directory: the Hugging Face folder; its JSON files may be absent.
    tokenizer_eos: the tokenizer's own, if it has one.

  Returns:
    The ids, ascending.
  """
  found = set() if tokenizer_eos is None else {int(tokenizer_eos)}
  for name in ("generation_config.json", "config.json"):
    path = directory / name
    if path.is_file():
      value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
      found.update(int(i) for i in (value if isinstance(value, list) else [value]) if i is not None)
  return tuple(sorted(found))


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int) -> None:
  """Raises ValueError if the tokenizer or its stop ids go beyond the model's vocabulary.

  A model may have more rows than the tokenizer has ids (padding), never fewer.
  """
  if tokenizer.vocab_size > model_vocab_size:
    raise ValueError(
      f"the tokenizer has {tokenizer.vocab_size} ids, the model only {model_vocab_size}: "
      "they do not belong together"
    )
  beyond = [i for i in tokenizer.stop_ids if not 0 <= i < model_vocab_size]
  if beyond:
    raise ValueError(f"stop ids {beyond} are outside the model's vocabulary of {model_vocab_size}")


def _template_text(chat_template: str) -> str:
  if not chat_template.endswith(".jinja"):
    return chat_template
  path = Path(chat_template)
  if not path.is_file():
    raise FileNotFoundError(f"no chat template file {chat_template}")
  return path.read_text(encoding="utf-8")
