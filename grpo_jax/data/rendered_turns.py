"""Recorded turns with tool calls, as the chat template of a model writes them.

What a model samples when it calls a tool is the text that its template writes between the beginning
of the assistant's turn and the token that ends the turn. A template without tools is recognised by
what it writes for a tool, or for a call.
"""

import collections
import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from grpo_jax.data import formats, prompt_texts, recorded_calls
from grpo_jax.data.formats import RowError
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.models.chat.rendering import TemplateRefusal

_ASKED = {"role": "user", "content": "?"}
_FUNCTION = {"name": "find_it", "description": "Finds it.", "parameters": {"type": "object"}}
_CALL = {"id": "call00000", "function": {"name": "find_it", "arguments": {"place": "here"}}}
_NO_THOUGHTS = re.compile(r"\A\s*<think>\s*</think>\s*")
_END_OF_THOUGHTS = re.compile(r"\A\s*(?:<think>\s*)?</think>\s*")
_BEGUN_THOUGHTS = re.compile(r"<think>\s*(?:</think>\s*)?\Z")


@functools.lru_cache(maxsize=8)
def writes_tools(tokenizer: Tokenizer) -> bool:
  """Returns whether the chat template writes the tools that a conversation declares."""
  return _writes(tokenizer, "find_it", tools=[{"type": "function", "function": _FUNCTION}])


@functools.lru_cache(maxsize=8)
def writes_calls(tokenizer: Tokenizer) -> bool:
  """Returns whether the chat template writes the tool calls of the assistant."""
  return _writes(tokenizer, "find_it", _calling(""))


@functools.lru_cache(maxsize=8)
def _writes_text_beside_calls(tokenizer: Tokenizer) -> bool:
  return _writes(tokenizer, "said before it", _calling("said before it"))


def _calling(text: str) -> dict[str, Any]:
  return {"role": "assistant", "content": text, "tool_calls": [{"type": "function", **_CALL}]}


def _writes(tokenizer: Tokenizer, text: str, *messages: Mapping[str, Any], tools: Any = ()) -> bool:
  try:
    return text in tokenizer.render([_ASKED, *messages], tools=tools)
  except TemplateRefusal:
    return False


def messages_for(
  tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
  """Returns messages that the chat template can write; if it writes no calls, they become text."""
  if not any("tool_calls" in message for message in messages) or writes_calls(tokenizer):
    return messages
  return [recorded_calls.as_text(m) if "tool_calls" in m else m for m in messages]


def ask(
  tokenizer: Tokenizer,
  messages: Sequence[Mapping[str, Any]],
  where: str,
  *,
  max_tokens: int,
  tools: Sequence[Mapping[str, Any]] = (),
  otherwise: str = "",
) -> prompt_texts.Asked:
  """Makes a prompt from messages that may have tool calls, like `prompt_texts.ask`.

  Args:
    tokenizer: Tokenizer whose chat template renders them.
    messages: The conversation. Calls become text if the template writes no calls.
    where: Place of the messages, "file:line".
    max_tokens: Longest prompt, in tokens.
    tools: Tools that the row declares.
    otherwise: Further ways out, for the message on a template that writes no tools.

  Raises:
    RowError: The chat template rejects the messages, renders nothing, or does not write tools.
  """
  check_tools(tokenizer, tools, where, otherwise)
  messages = messages_for(tokenizer, messages)
  return prompt_texts.ask(tokenizer, messages, where, max_tokens=max_tokens, tools=tools)


def check_tools(
  tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], where: str, otherwise: str = ""
) -> None:
  """Raises RowError if there are tools and the chat template does not write them; see `ask`."""
  if tools and not writes_tools(tokenizer):
    count = "a tool" if len(tools) == 1 else f"{len(tools)} tools"
    raise RowError(
      where,
      f"the prompt declares {count}, but the chat template does not write tools; give another"
      f" model.chat_template{otherwise}",
      kind=formats.UNWRITTEN_TOOLS,
    )


def turn(
  tokenizer: Tokenizer,
  message: Mapping[str, Any],
  *,
  tools: Sequence[Mapping[str, Any]] = (),
  max_characters: int | None = None,
) -> tuple[Int[np.ndarray, " tokens"], bool]:
  """Encodes a turn of the assistant, as the chat template writes it.

  An empty block of thoughts that the template adds is left out, because nobody has recorded it.
  Where a template writes no text beside calls, the text is put before them. Thoughts that a
  template drops are put first, in <think> tags, and thoughts that its header has begun are ended.

  Args:
    tokenizer: Tokenizer of the model.
    message: Message that may have `tool_calls`; see `recorded_calls`.
    tools: Tools of the conversation.
    max_characters: Length to which the text is cut before it is encoded; None: no limit.

  Returns:
    The ids, and whether the last of them is a stop id. It is not if the template ends its turns
    with no stop id, or if the text is cut.

  Raises:
    TemplateRefusal: The template rejects the message, or writes only a part of it.
  """
  is_calling, said = bool(message.get("tool_calls")), ""
  if is_calling and not _writes_text_beside_calls(tokenizer):
    said = recorded_calls.as_text({**message, "tool_calls": ()})["content"]
    message = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
  before = tokenizer.render([_ASKED], tools=tools)
  form, rendered = _rendered(tokenizer, message, tools)
  text, is_open = _after_header(before, rendered)
  text = _with_thoughts(
    text, message, has_begun=before.rstrip().endswith("<think>"), is_open=is_open
  )
  _check_calls(message, text)
  text = f"{said}{text}"
  ids, is_ended = _to_first_stop(tokenizer, text[:max_characters])
  if is_ended:
    return ids, True
  next_header = os.path.commonprefix([before[::-1], text[::-1]])[::-1]
  text = text.removesuffix(next_header)
  ids = tokenizer.encode(text[:max_characters])
  is_whole = max_characters is None or len(text) <= max_characters
  end = _end_of_calls(tokenizer, form, tools, text) if is_calling and is_whole else None
  return (ids, False) if end is None else (np.append(ids, np.int32(end)), True)


def _end_of_calls(
  tokenizer: Tokenizer,
  message: Mapping[str, Any],
  tools: Sequence[Mapping[str, Any]],
  text: str,
) -> int | None:
  """Returns the stop id that the template writes between a call and its answer, if it does: it may
  be another one than after an answer to the user."""
  answer = {"role": "tool", "content": "?", "tool_call_id": "call00000", "name": "find_it"}
  rendered = tokenizer.render([_ASKED, message, answer], tools=tools)
  following = tokenizer.encode(rendered.rpartition(text)[2])
  is_stop = bool(len(following)) and int(following[0]) in tokenizer.stop_ids
  return int(following[0]) if is_stop else None


def _with_thoughts(text: str, message: Mapping[str, Any], *, has_begun: bool, is_open: bool) -> str:
  """Returns the text of a turn with the thoughts of the message, without an empty block of them.

  Args:
    text: Output of the template after its header.
    message: The turn.
    has_begun: Whether the header begins the thoughts.
    is_open: Whether it does, and the text does not end them.
  """
  thoughts = str(message.get("reasoning_content") or "").strip("\n")
  if is_open or thoughts not in text:
    begin = "" if has_begun else "<think>\n"
    return f"{begin}{thoughts}\n</think>\n\n{_END_OF_THOUGHTS.sub('', text).lstrip()}"
  return text if thoughts else _NO_THOUGHTS.sub("", text)


def _to_first_stop(tokenizer: Tokenizer, text: str) -> tuple[Int[np.ndarray, " tokens"], bool]:
  """Encodes text up to the first stop id; says whether there is one."""
  ids = tokenizer.encode(text)
  (stops,) = np.nonzero(np.isin(ids, tokenizer.stop_ids))
  return (ids[: stops[0] + 1], True) if len(stops) else (ids, False)


def _check_calls(message: Mapping[str, Any], text: str) -> None:
  """Raises TemplateRefusal if a call of the message is not in what the template wrote."""
  names = collections.Counter(call["function"]["name"] for call in message.get("tool_calls", ()))
  for name, count in names.items():
    if text.count(name) < count:
      raise TemplateRefusal(f"the chat template does not write all {count} calls of {name!r}")


def _after_header(before: str, rendered: str) -> tuple[str, bool]:
  """Returns what follows the beginning of the assistant's turn, and whether that has begun thoughts
  that the turn does not have.

  Args:
    before: A rendered question, up to where the turn begins.
    rendered: The same with the turn.

  Raises:
    TemplateRefusal: The second does not begin like the first, thoughts apart.
  """
  if rendered.startswith(before):
    return rendered[len(before) :], False
  header = _BEGUN_THOUGHTS.sub("", before)
  if rendered.startswith(header):
    return rendered[len(header) :], before[len(header) :].strip() == "<think>"
  raise TemplateRefusal("the chat template does not write a turn with calls as it begins turns")


def _rendered(
  tokenizer: Tokenizer, message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], str]:
  """Renders a question and the turn, with its thoughts as the template reads them, or without if it
  drops them; returns the turn in that form, too."""
  thoughts = str(message.get("reasoning_content") or "").strip()
  for form in _forms(message):
    with contextlib.suppress(TemplateRefusal):  # other forms may be accepted.
      rendered = tokenizer.render([_ASKED, form], tools=tools)
      if thoughts in rendered:
        return form, rendered
  form = {key: value for key, value in message.items() if key != "reasoning_content"}
  return form, tokenizer.render([_ASKED, form], tools=tools)


def _forms(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
  """Yields a message that has thoughts with them in the fields that templates read, and then in its
  text."""
  if not message.get("reasoning_content"):
    return
  others = {key: value for key, value in message.items() if key != "reasoning_content"}
  for name in ("reasoning_content", "thinking"):  # most models, gpt-oss.
    yield {**others, name: message["reasoning_content"]}
  text = recorded_calls.as_text({**message, "tool_calls": ()})["content"]
  yield {**others, "content": text}
