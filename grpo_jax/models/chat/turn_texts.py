"""The text that a chat template writes between a sampled turn and the next one. Pure.

Tokens of earlier turns are never written again: they are those that were sampled. Only what comes
after them is taken from the template. It is found by rendering a short conversation in which a
placeholder takes the place of what was sampled; the text behind the placeholder is the answer,
whatever the template does to earlier turns.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from grpo_jax.models.chat import control_tokens
from grpo_jax.models.chat.rendering import TemplateRefusal
from grpo_jax.models.chat.template import ChatTemplate, Message, Tool

# Strings of letters and digits, which survive trimming, JSON and HTML.
_SAID, _READ = "xSaidByTheModelx", "xReadByTheModelx"
# Conversations before the sampled turn; the next one is tried if a template rejects the one before.
_PASTS: tuple[tuple[Message, ...], ...] = (
  ({"role": "user", "content": "?"},),
  ({"role": "system", "content": "?"}, {"role": "user", "content": "?"}),
)


class TurnRefusal(TemplateRefusal):
  """A chat template cannot continue a conversation with messages of these roles."""


@dataclasses.dataclass(frozen=True)
class Written:
  """What a template writes after a sampled turn."""

  text: str  # the end of the turn, the messages, the beginning of the next assistant turn.
  bare: str  # the same without messages; "" if the template rejects that.


@dataclasses.dataclass(frozen=True)
class _Form:
  """A way to show a template a conversation."""

  past: tuple[Message, ...]
  has_calls: bool  # whether the placeholder is an argument of tool calls, in place of the content.
  bare: str = ""  # see `Written`.


_FORMS_WITH_CALLS = tuple(_Form(past, has_calls=True) for past in _PASTS)
_FORMS = tuple(_Form(past, has_calls=False) for past in _PASTS)


class TurnTexts:
  """Finds what a chat template writes after sampled turns."""

  def __init__(self, template: ChatTemplate, stops: Sequence[str]):
    """Renders nothing yet.

    Args:
      template: The chat template.
      stops: Text of the tokens that end a completion.
    """
    self._template = template
    self._stops = tuple(stop for stop in stops if stop)
    self._forms: dict[tuple[Any, ...], _Form] = {}

  @functools.cached_property
  def closing(self) -> str:
    """The text after the assistant's at the end of a conversation; "" if it is not known."""
    try:
      turn = _turn(_SAID, ())
      text = self._template.write([*_PASTS[0], turn], begin_assistant=False).text
    except TemplateRefusal:  # the template rejects this conversation.
      return ""
    return text.rpartition(_SAID)[2] if _SAID in text else ""

  def after_turn(
    self, messages: Sequence[Message], *, tools: Sequence[Tool], calls: Sequence[Message]
  ) -> Written:
    """Returns the text between a sampled turn and the next one.

    Args:
      messages: Messages that follow the turn, with `role` and `content`.
      tools: Tools of the conversation.
      calls: Tool calls of the turn, in OpenAI's form. If there are none, the names in messages of
        role "tool" take their place: the arguments of calls do not matter here.

    Raises:
      TurnRefusal: The template cannot write messages of these roles after a turn.
      TemplateRefusal: The template rejects these messages, but not others of the same roles.
    """
    self._template.require(tools)
    calls = calls or _calls_of(messages)
    said = control_tokens.absent(_SAID, messages, tools, calls)
    kinds = tuple((message["role"], _has_parts(message)) for message in messages)
    key = (kinds, len(calls), bool(tools))
    if key not in self._forms:
      self._forms[key] = self._found_form(said, messages, tools, calls)
    form = self._forms[key]
    return Written(self._behind(form, said, messages, tools, calls), form.bare)

  def _found_form(
    self,
    said: str,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    calls: Sequence[Message],
  ) -> _Form:
    """Returns the first form in which the template writes everything."""
    words = [f"{_READ}{i}x" for i in range(len(messages))]
    probes = [_probe(message, word) for message, word in zip(messages, words, strict=True)]
    reasons: dict[str, None] = {}
    for form in _FORMS_WITH_CALLS + _FORMS if calls else _FORMS:
      try:
        text = self._behind(form, said, probes, tools, calls)
      except TemplateRefusal as error:
        reasons[str(error).removeprefix(f"{self._template.where}: the chat template ")] = None
        continue
      missing = _left_out(text, messages, words)
      if not missing:
        return dataclasses.replace(form, bare=self._bare(form, said, tools, calls))
      reasons[f"leaves out the content of messages of role {missing!r}"] = None
    roles = " and ".join(repr(role) for role in dict.fromkeys(m["role"] for m in messages))
    raise TurnRefusal(
      f"{self._template.where}: the chat template cannot continue a conversation with a message of"
      f" role {roles}: it {'; it '.join(reasons).removesuffix('.')}. Use another template"
      " (model.chat_template=FILE) or answer in another role (docs/chat_templates.md)"
    )

  def _bare(self, form: _Form, said: str, tools: Sequence[Tool], calls: Sequence[Message]) -> str:
    try:
      return self._behind(form, said, (), tools, calls)
    except TemplateRefusal:  # the template demands a message after the assistant's.
      return ""

  def _behind(
    self,
    form: _Form,
    said: str,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    calls: Sequence[Message],
  ) -> str:
    """Returns the text behind the sampled turn.

    Args:
      form: Form of the conversation.
      said: Placeholder of the turn.
      messages: Messages after the turn.
      tools: Tools of the conversation.
      calls: Tool calls of the turn.

    Raises:
      TemplateRefusal: The template rejects the conversation, or does not write the turn once.
    """
    turn = _turn(said, calls if form.has_calls else ())
    text = self._template.write([*form.past, turn, *messages], tools=tools).text
    if form.has_calls:
      return self._behind_calls(text, said)
    times = text.count(said)
    if times != 1:
      raise TemplateRefusal(
        f"writes the model's turn {times} times" if times else "leaves out the model's turn"
      )
    return text.partition(said)[2]

  def _behind_calls(self, text: str, said: str) -> str:
    """Returns the text from the stop token on that follows the last argument."""
    _, found, rest = text.rpartition(said)
    if not found:
      raise TemplateRefusal("leaves out the arguments of tool calls")
    places = [place for place in (rest.find(stop) for stop in self._stops) if place >= 0]
    end = min(places, default=len(rest))
    if not places or _READ in rest[:end]:
      raise TemplateRefusal("writes no stop token of the model after a tool call")
    return rest[end:]


def _turn(said: str, calls: Sequence[Message]) -> dict[str, Any]:
  """Returns the assistant's turn with the placeholder as content, or as argument of its calls."""
  if not calls:
    return {"role": "assistant", "content": said}
  written = [
    {**call, "function": {**call.get("function", {}), "arguments": {said: said}}} for call in calls
  ]
  return {"role": "assistant", "content": "", "tool_calls": written}


def _calls_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
  """Returns calls that the tool messages answer, as far as these name their tools."""
  return [
    {
      "id": message.get("tool_call_id", f"call{i:05d}"),
      "type": "function",
      "function": {"name": message["name"], "arguments": {}},
    }
    for i, message in enumerate(messages)
    if message["role"] == "tool" and message.get("name")
  ]


def _probe(message: Message, word: str) -> dict[str, Any]:
  """Returns a message with a word as content, or as the text of its parts."""
  if not _has_parts(message):
    return {**message, "content": word}
  return {**message, "content": [{**part, "text": word} for part in message["content"]]}


def _has_parts(message: Message) -> bool:
  content = message.get("content")
  return isinstance(content, list) and all(isinstance(part, dict) for part in content or [None])


def _left_out(text: str, messages: Sequence[Message], words: Sequence[str]) -> str:
  """Returns the role of the first message whose word is not in its place; "" if all are."""
  place = 0
  for message, word in zip(messages, words, strict=True):
    place = text.find(word, place)
    if place < 0:
      return message["role"]
  return ""
