"""Tokenizer: chat template, encode, decode, stop ids. Wraps transformers, imported when needed.

Chat templates are rendered by `grpo_jax.models.chat`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from grpo_jax.models import files
from grpo_jax.models.chat import text_bounds, token_bytes, tokenizer_files, tool_calls
from grpo_jax.models.chat.control_tokens import ControlTokens
from grpo_jax.models.chat.plain import Plain
from grpo_jax.models.chat.rendering import ConversationTooLarge
from grpo_jax.models.chat.template import PLAIN, ChatTemplate, Message, Tool
from grpo_jax.models.chat.tool_calls import CallParser
from grpo_jax.models.chat.turn_texts import TurnTexts
from grpo_jax.models.errors import ModelError
from grpo_jax.models.fields import Fields
from grpo_jax.registry import check_arguments, choose, function

__all__ = [
  "PLAIN",
  "HuggingFaceTokenizer",
  "Message",
  "PromptText",
  "Tokenizer",
  "Tool",
  "check_vocabulary",
  "eos_ids",
  "find_tool_form",
  "load",
  "parse_turn",
  "tool_form_of",
]
_COPIES = 4  # times that a template writes a string at most, about.


@dataclasses.dataclass(frozen=True, slots=True)
class PromptText:
  """A conversation as a prompt: the text that the chat template wrote, and its tokens."""

  text: str  # cut if `too_many` is not empty.
  ids: Int[np.ndarray, " tokens"]  # ids of `text`; more than allowed if the prompt is too long.
  too_many: str = ""  # why it was not encoded in full: its characters and the bound; or empty.
  parted: int = 0  # places where the text of a control token is written as ordinary characters.


@runtime_checkable
class Tokenizer(Protocol):
  """The interface of tokenizers."""

  @property
  def vocab_size(self) -> int:
    """Number of ids, added tokens included; every id is smaller."""
    ...

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """All ids that end a completion, ascending."""
    ...

  @property
  def end_id(self) -> int:
    """The stop id with which the chat template ends the assistant's messages."""
    ...

  @property
  def pad_id(self) -> int:
    """Fills rectangular arrays. Never derive a mask from it."""
    ...

  def encode(self, text: str, *, begins: bool = False) -> Int[np.ndarray, " tokens"]:
    """Encodes text without adding special tokens.

    Args:
      text: Text to encode.
      begins: Whether a prompt begins with the text, and no chat template wrote it. Then what the
        tokenizer itself puts at the beginning of texts (BOS) is there, once.
    """
    ...

  def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
    """Decodes ids; undecodable bytes become U+FFFD."""
    ...

  def token_bytes(self, token_id: int) -> bytes:
    """Returns the text of one token, special or not, in UTF-8; it may be part of a character."""
    ...

  def render(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> str:
    """Renders a conversation with the chat template, up to where the assistant's turn begins.

    The text of control tokens in messages and tools is in the output as it is; encoded again, it
    would become tokens.

    Args:
      messages: The conversation.
      tools: Tools that the model may call, each {"type": "function", "function": {"name",
        "description", "parameters": JSON schema}}.
    """
    ...

  def apply_chat_template(
    self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()
  ) -> Int[np.ndarray, " tokens"]:
    """Encodes a conversation as `render` writes it; messages and tools write no control tokens.

    Only the template and `control_tokens.TrustedText` do, and messages of the assistant, which may
    have thoughts and calls as the model writes them (`control_tokens.THOUGHTS_AND_CALLS`). Without
    a template the conversation is encoded as the beginning of a prompt; see `encode`.
    """
    ...

  def prompt(
    self, messages: Sequence[Message], *, max_tokens: int, tools: Sequence[Tool] = ()
  ) -> PromptText:
    """Encodes a conversation like `apply_chat_template`, but only part of one that cannot fit.

    Args:
      messages: The conversation.
      max_tokens: Number of tokens allowed. Text of more than `longest_text(max_tokens)`
        characters is cut to that length before it is encoded, to save time and memory.
      tools: Tools that the model may call; see `render`.
    """
    ...

  def longest_text(self, tokens: int) -> int:
    """Returns a number of characters such that any longer text has more than `tokens` tokens."""
    ...

  def turn_ids(
    self,
    messages: Sequence[Message],
    *,
    after: int | None,
    tools: Sequence[Tool] = (),
    calls: Sequence[Message] = (),
  ) -> Int[np.ndarray, " tokens"]:
    """Encodes what the template writes between a sampled turn and the next: the end of the turn,
    the messages, and the beginning of the next assistant turn.

    Args:
      messages: Messages of the environment, with `role` and `content`; several answer several
        tool calls.
      after: Last sampled id. The template's end-of-turn token is inserted before the messages
        unless the model has sampled it itself.
      tools: Tools of the prompt; see `render`.
      calls: Tool calls of the sampled turn, in OpenAI's form. Some templates need them to write
        the answers of tools.
    """
    ...


class HuggingFaceTokenizer:
  """A tokenizer of a local Hugging Face folder."""

  def __init__(
    self,
    opened: tokenizer_files.OpenedTokenizer,
    stop_ids: tuple[int, ...],
    *,
    plain: bool = False,
    template_args: Mapping[str, Any] | None = None,
    tool_form: str | CallParser | None = None,
  ):
    template = opened.tools_template or opened.template
    self._tool_form = tool_form or (tool_calls.form_of(template) if template else None)
    self._backend = opened.backend
    self._stop_ids = stop_ids
    templates = [each for each in (opened.template, opened.tools_template) if each]
    self._control = ControlTokens(opened.backend, templates=templates)
    added = opened.backend.added_tokens_decoder.items()
    self._special = {i: str(token) for i, token in added if token.special}
    self._marks = {*self._special, *stop_ids}
    self._template: ChatTemplate | Plain
    self._turns: TurnTexts | Plain
    if plain:
      self._template = self._turns = Plain()
    else:
      self._template = ChatTemplate(opened, template_args or {})
      self._turns = TurnTexts(self._template, [opened.backend.decode([i]) for i in stop_ids])
    self._end = self._find_end(plain or not opened.template)  # finds a broken template at once.

  @property
  def vocab_size(self) -> int:
    return self._size

  @functools.cached_property
  def _size(self) -> int:
    return tokenizer_files.vocab_size(self._backend)

  @functools.cached_property
  def _bound(self) -> tuple[int, bool]:
    """Returns how many characters a token covers, and whether that is certain."""
    described = tokenizer_files.description(self._backend)
    if described is None:
      longest = max(len(token) for token in self._backend.get_vocab())
      return longest, False
    return text_bounds.characters_per_token(described)

  @property
  def stop_ids(self) -> tuple[int, ...]:
    return self._stop_ids

  @property
  def end_id(self) -> int:
    return self._end

  @property
  def template(self) -> ChatTemplate | Plain:
    """What writes the prompts."""
    return self._template

  @property
  def tool_form(self) -> str | CallParser | None:
    """Form in which the model writes tool calls; see `tool_form_of`."""
    return self._tool_form

  def _find_end(self, has_no_template: bool) -> int:
    closing = [] if has_no_template else self.encode(self._turns.closing).tolist()
    if closing and closing[0] in self._stop_ids:
      return closing[0]
    own = self._backend.eos_token_id
    return int(own) if own in self._stop_ids else self._stop_ids[0]

  @property
  def pad_id(self) -> int:
    if self._backend.pad_token_id is not None:
      return int(self._backend.pad_token_id)
    return self._stop_ids[0]

  def encode(self, text: str, *, begins: bool = False) -> Int[np.ndarray, " tokens"]:
    with tokenizer_files.guarded():
      ids = self._backend.encode(text, add_special_tokens=False)
    first = self.beginning if begins else []
    return np.asarray(ids if ids[: len(first)] == first else [*first, *ids], np.int32)

  @functools.cached_property
  def beginning(self) -> list[int]:
    """Ids that the tokenizer itself puts at the beginning of texts, such as BOS."""
    bare, whole = (self._backend.encode("a", add_special_tokens=each) for each in (False, True))
    places = range(len(whole) - len(bare) + 1)
    found = (place for place in places if whole[place : place + len(bare)] == bare)
    return whole[: next(found, 0)]

  def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
    with tokenizer_files.guarded():
      return self._backend.decode(
        [int(i) for i in ids],
        skip_special_tokens=skip_special,
        clean_up_tokenization_spaces=False,
      )

  def token_bytes(self, token_id: int) -> bytes:
    with tokenizer_files.guarded():
      return token_bytes.of_token(self._backend, token_id)

  def render(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> str:
    return self._template.write(messages, tools=tools).text

  def apply_chat_template(
    self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()
  ) -> Int[np.ndarray, " tokens"]:
    # The template itself writes the special tokens: none are added to the rendered text.
    marked = self._control.marked(messages, tools, has_own_turns=True)
    messages, tools = marked.values
    return self._prompt_ids(marked.pieces(self.render(messages, tools=tools)))

  def prompt(
    self, messages: Sequence[Message], *, max_tokens: int, tools: Sequence[Tool] = ()
  ) -> PromptText:
    bound = self.longest_text(max_tokens)
    try:
      marked = self._control.marked(messages, tools, has_own_turns=True, most=max_tokens)
      given, tools = marked.values
      longest = bound + _COPIES * marked.characters
      found = self._template.write(given, tools=tools, max_characters=longest)
    except ConversationTooLarge as error:
      text = "".join(str(message.get("content")) for message in messages)[:bound]
      pieces = self._control.apart(text, most=max_tokens)[: max_tokens + 1]
      return PromptText(text, self._prompt_ids(pieces), too_many=str(error))
    pieces = marked.pieces(found.text)
    text = "".join(pieces)
    characters = found.characters - len(found.text) + len(text)
    too_many = ""
    if characters > bound:
      too_many = f"at least {characters} characters, where {max_tokens} tokens have at most {bound}"
      text, pieces = text[:bound], _cut(pieces, bound)
    # Every piece has a token: more of them than tokens are allowed need not be encoded.
    ids = self._prompt_ids(pieces[: max_tokens + 1])
    return PromptText(text, ids, too_many=too_many, parted=len(pieces) - 1)

  def _prompt_ids(self, pieces: Sequence[str]) -> Int[np.ndarray, " tokens"]:
    # A template itself writes what a text begins with: nothing is added to the rendered text.
    return self._joined(pieces, begins=isinstance(self._template, Plain))

  def _joined(self, pieces: Sequence[str], *, begins: bool = False) -> Int[np.ndarray, " tokens"]:
    ids = [self.encode(piece, begins=begins and not n) for n, piece in enumerate(pieces)]
    return np.concatenate(ids)

  def longest_text(self, tokens: int) -> int:
    return text_bounds.longest_text(*self._bound, tokens)

  def turn_ids(
    self,
    messages: Sequence[Message],
    *,
    after: int | None,
    tools: Sequence[Tool] = (),
    calls: Sequence[Message] = (),
  ) -> Int[np.ndarray, " tokens"]:
    marked = self._control.marked(messages, calls, tools)
    messages, calls, tools = marked.values
    written = self._turns.after_turn(messages, tools=tools, calls=calls)
    closing = self._turns.closing
    closing = closing if written.text.startswith(closing) else ""
    opening = written.text[len(closing) :]
    ids = self._joined([closing] * bool(closing) + marked.pieces(opening))
    return ids[self._sampled_end(ids, written.bare, after, has_closing=bool(closing)) :]

  def _sampled_end(
    self, ids: Int[np.ndarray, " tokens"], bare: str, after: int | None, *, has_closing: bool
  ) -> int:
    """Returns the number of tokens at the beginning of what follows a turn that it has already.

    Args:
      ids: Tokens that the template writes after the turn.
      bare: Text that it writes if no message follows.
      after: Last sampled id.
      has_closing: Whether the tokens begin like those at the end of a conversation.
    """
    if after is None or not len(ids):
      return 0
    if ids[0] == after and (has_closing or after in self._marks):
      return 1
    if after not in self._stop_ids:
      return 0
    # What the template writes whatever follows is the end of the turn: up to the token that was
    # sampled, or else up to another stop token, or else up to a special token.
    pairs = zip(ids.tolist(), self.encode(bare).tolist(), strict=False)
    common = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    for ends in ({after}, self._stop_ids, self._special):
      for number, one in enumerate(common, 1):
        if one in ends:
          return number
    return 0


def _cut(pieces: Sequence[str], length: int) -> list[str]:
  """Returns the beginnings of pieces that have this many characters together."""
  found = []
  for piece in pieces:
    found.append(piece[:length])
    length -= len(found[-1])
    if length <= 0:
      break
  return found


def load(
  directory: str | Path,
  *,
  chat_template: str | None = None,
  template_args: Mapping[str, Any] | None = None,
  tool_form: str | None = None,
  model_directory: str | Path | None = None,
) -> HuggingFaceTokenizer:
  """Loads the tokenizer of a local Hugging Face folder.

  Args:
    directory: Folder with tokenizer.json (or anything that AutoTokenizer reads).
    chat_template: Name of a .jinja file, or the template itself; "plain": no template, messages
      are joined by line ends; None: the tokenizer's own.
    template_args: Variables of the template, such as {"enable_thinking": False} for Qwen3.
    tool_form: Form of tool calls: a key of `tool_calls.FORMS`, or the dotted path of a function
      (text, tools) → `tool_calls.Parsed`; None: that of the chat template.
    model_directory: Folder of the model, whose settings name stop ids; None: the same folder.

  Raises:
    MissingModel: The folder or the template file does not exist.
    ModelError: The folder has no readable tokenizer, or names no end-of-sequence token.
    TemplateError: The chat template is broken.
    ValueError: `tool_form` is neither a form nor a function.
  """
  is_plain = chat_template == PLAIN
  opened = tokenizer_files.open_folder(directory, chat_template=None if is_plain else chat_template)
  stop_ids = eos_ids(Path(model_directory or directory), opened.backend.eos_token_id)
  if not stop_ids:
    raise ModelError(
      f"{directory}: neither generation_config.json, config.json nor the tokenizer names an "
      "end-of-sequence token (eos_token_id): no completion would ever end"
    )
  return HuggingFaceTokenizer(
    opened,
    stop_ids,
    plain=is_plain,
    template_args=template_args,
    tool_form=None if tool_form is None else find_tool_form(tool_form),
  )


def find_tool_form(form: str) -> str | CallParser:
  """Returns a form of tool calls by its name, or the function that a dotted path names.

  Raises:
    ValueError: There is no such form or function, or the function takes other arguments.
  """
  if "." not in form:
    choose("form of tool calls", form, tool_calls.FORMS)
    return form
  parser = function(form)
  check_arguments(f"the parser {form}", parser, (), usual=("text", "tools"))
  return parser


def tool_form_of(tokenizer: Tokenizer) -> str | CallParser | None:
  """Returns the form in which a model writes tool calls, for `tool_calls.parse`.

  Args:
    tokenizer: Tokenizer of the model; its attribute `tool_form`, if it has one, is the form.

  Returns:
    The form; None: it is not known.
  """
  return getattr(tokenizer, "tool_form", None)


def parse_turn(
  tokenizer: Tokenizer,
  ids: Int[np.ndarray, " turn"],
  *,
  tools: Sequence[Tool],
  first_id: int = 0,
) -> tool_calls.Parsed:
  """Parses the tool calls of a sampled turn.

  Args:
    tokenizer: Tokenizer of the model.
    ids: Sampled token ids of the turn, stop id included.
    tools: Tools of the prompt.
    first_id: Number in the id of the first call.

  Raises:
    ModelError: The form of tool calls is not known.
    TypeError: A parser of the user's own returned something else than a turn.
  """
  form = tool_form_of(tokenizer)
  if form is None:
    raise ModelError("the form in which this model calls tools is not known: set model.tool_calls")
  if len(ids) and int(ids[-1]) in tokenizer.stop_ids:
    ids = ids[:-1]
  text = tokenizer.decode(ids, skip_special=False)
  return tool_calls.parse(text, form, tools=tools, first_id=first_id)


def eos_ids(directory: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
  """Collects all end-of-sequence ids that a model folder names.

  Models with several stop tokens name some of them in generation_config.json only; a
  missing one turns finished completions into truncated ones.

  Args:
    directory: Hugging Face folder; its JSON files may be absent.
    tokenizer_eos: The tokenizer's own id, if it has one.

  Returns:
    The ids, ascending.

  Raises:
    ModelError: A file is broken, or holds something other than ids.
  """
  found = set() if tokenizer_eos is None else {int(tokenizer_eos)}
  for name in ("generation_config.json", "config.json"):
    path = directory / name
    if path.is_file():
      found.update(Fields(files.read_json(path), str(path)).ids("eos_token_id"))
  return tuple(sorted(found))


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int) -> None:
  """Raises ModelError if the tokenizer or its stop ids exceed the model's vocabulary.

  A model may have more rows than the tokenizer has ids (padding), never fewer.
  """
  if tokenizer.vocab_size > model_vocab_size:
    raise ModelError(
      f"the tokenizer has {tokenizer.vocab_size} ids, the model only {model_vocab_size}: "
      "they do not belong together"
    )
  beyond = [i for i in tokenizer.stop_ids if not 0 <= i < model_vocab_size]
  if beyond:
    raise ModelError(f"stop ids {beyond} are outside the model's vocabulary of {model_vocab_size}")
