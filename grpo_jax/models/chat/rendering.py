"""Renders chat templates with transformers, in the sandbox of Jinja that it sets up.

A template is a program that comes with a model. The sandbox denies it access to files and to
Python's internals, but does not stop it from using all memory or running forever.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.errors import ExpectedFailure
from grpo_jax.values import json_text

_LONGEST_MESSAGE = 500  # characters of an error message.
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's thoughts.


class TemplateError(ExpectedFailure, ValueError):
  """A chat template cannot be used: it is broken."""


class TemplateRefusal(TemplateError):
  """A chat template rejects a conversation, or fails on it; others may work."""


class ConversationTooLarge(TemplateRefusal):
  """A conversation is larger than a template may receive."""


@dataclasses.dataclass(frozen=True)
class Rendered:
  """The output of a template."""

  text: str  # cut to the requested number of characters.
  characters: int  # number of characters written; more than in `text` if that is cut.


class Renderer:
  """One chat template; it is compiled when first needed."""

  def __init__(self, template: str, *, where: str):
    """Describes the renderer.

    Args:
      template: Jinja source of the template.
      where: Place of the template, for errors: a file.
    """
    self._template = template
    self._where = where

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    max_characters: int | None = None,
  ) -> Rendered:
    """Renders a conversation.

    Args:
      messages: At least one message.
      variables: Further variables of the template, such as `add_generation_prompt`.
      max_characters: Length to which the text is cut; None: it is not cut.

    Raises:
      TemplateRefusal: The template rejects the conversation, or fails on it.
      TemplateError: The template is broken, or needs more memory than there is.
    """
    from transformers.utils import chat_template_utils

    if not messages:
      raise TemplateRefusal(f"{self._where}: a conversation needs at least one message")
    chat = [_with_reasoning(with_objects(message, self._where)) for message in messages]
    try:
      (text,), _ = chat_template_utils.render_jinja_template(
        [chat], chat_template=self._template, **variables
      )
    except Exception as error:
      raise self._failure(error) from error
    return Rendered(text[:max_characters], len(text))

  def _failure(self, error: Exception) -> TemplateError:
    """Returns the failure of a template for what it raised."""
    import jinja2

    where = f"{self._where}: the chat template"
    match error:
      case jinja2.TemplateSyntaxError():
        reason = _short(f"line {error.lineno}: {error.message}")
        return TemplateError(f"{where} is not valid Jinja: {reason}")
      case MemoryError():
        return TemplateError(f"{where} needs more memory than there is")
      case RecursionError():
        return TemplateError(f"{where} calls itself too deeply")
    reason = _short(f"{_place(error)}{type(error).__name__}: {error}")
    return TemplateRefusal(f"{where} fails: {reason}")


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
  """Adds a message's thoughts under the names that templates know, like newer transformers; removes
  fields without a value, like `apply_chat_template`."""
  message = {name: value for name, value in message.items() if value is not None}
  thoughts = next((message[name] for name in _REASONING if name in message), None)
  if thoughts is None:
    return message
  return {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _place(error: Exception) -> str:
  """Returns "line N: " of the template, if the error has a line."""
  lines, trace = [], error.__traceback__
  while trace is not None:
    if trace.tb_frame.f_code.co_filename == "<template>":
      lines.append(trace.tb_lineno)
    trace = trace.tb_next
  return f"line {lines[-1]}: " if lines else ""


def _short(message: str) -> str:
  message = " ".join(message.split())
  return message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}…"


def with_objects(message: Any, where: str = "the conversation") -> Any:
  """Returns a message whose tool calls have objects as arguments, as templates expect them.

  Like in SGLang and vLLM, the arguments may be the JSON text of an object.

  Args:
    message: Message; other values are returned unchanged.
    where: Place of the conversation or of its template, for errors.

  Raises:
    TemplateRefusal: The text is not JSON, is that of another value, or is nested too deeply.
  """
  calls = message.get("tool_calls") if isinstance(message, Mapping) else None
  if not isinstance(calls, list | tuple):
    return message
  return {**message, "tool_calls": [_with_object(call, where) for call in calls]}


def _with_object(call: Any, where: str) -> Any:
  function = call.get("function") if isinstance(call, Mapping) else None
  if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments"), str):
    return call
  try:
    arguments = json_text.parsed_object(text) if text.strip() else {}
  except ValueError as error:
    message = f"the arguments of a tool call are not a JSON object, {text[:60]!r}: {error}"
    raise TemplateRefusal(f"{where}: {message}") from error
  return {**call, "function": {**function, "arguments": arguments}}
