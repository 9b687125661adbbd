"""Requests of OpenAI's API: what they ask for, and what is refused. Pure."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.models.chat import untrusted_json
from grpo_jax.models.chat.untrusted_json import JsonError
from grpo_jax.serving.request_errors import RequestError, shown
from grpo_jax.serving.request_fields import (
  MAX_CHOICES,
  RequestOptions,
  read_chat_options,
  read_text_options,
)

Message = dict[str, Any]  # as chat templates take it: `content` is a string, arguments are objects.

_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest:
  """A conversation to be continued."""

  messages: tuple[Message, ...]
  tools: tuple[Mapping[str, Any], ...] = ()
  reads_calls: bool = True  # whether calls of tools are parsed.
  options: RequestOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRequest:
  """Text to be continued: `/v1/completions`."""

  prompts: tuple[str | tuple[int, ...], ...]  # each is text, or token ids.
  options: RequestOptions


def read_json(content: bytes | bytearray) -> dict[str, Any]:
  """Reads the body of a request.

  Raises:
    RequestError: The body is not a JSON object in UTF-8, or not of the kind that
      `untrusted_json.read` accepts.
  """
  try:
    found = untrusted_json.read_all(content.decode("utf-8"))
  except UnicodeDecodeError as error:
    place = f"invalid UTF-8 at byte {error.start + 1}"
    raise RequestError(f"the body of the request is not JSON: {place}") from error
  except JsonError as error:
    raise RequestError(f"the body of the request is not JSON: {error}") from error
  if not isinstance(found, dict):
    raise RequestError(f"the body of the request must be a JSON object, got {shown(found)}")
  return found


def check_model(body: Mapping[str, Any], model: str) -> None:
  """Raises RequestError unless the request names the model that is served."""
  if "model" not in body:
    raise RequestError("`model` is missing", param="model")
  if body["model"] != model:
    raise RequestError(
      f"the model {shown(body['model'])} does not exist; this server has {model!r}",
      status=404,
      param="model",
      code="model_not_found",
    )


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
  """Reads a request for a chat completion.

  Raises:
    RequestError: A field is missing or wrong, or the request cannot be served.
  """
  messages = body.get("messages")
  if not isinstance(messages, list) or not messages:
    raise RequestError("`messages` must be a list with at least one message", param="messages")
  choice = body.get("tool_choice") or "auto"
  if choice not in ("auto", "none"):
    raise RequestError(
      f"tool_choice {shown(choice)} is not supported: nothing forces the policy to call a tool;"
      " 'auto' and 'none' are",
      param="tool_choice",
    )
  return ChatRequest(
    messages=_named([_message(each, f"messages[{i}]") for i, each in enumerate(messages)]),
    tools=tuple(_tools(body.get("tools") or [])),
    reads_calls=choice != "none",
    options=read_chat_options(body),
  )


def read_text(body: Mapping[str, Any]) -> TextRequest:
  """Reads a request for `/v1/completions`.

  Raises:
    RequestError: A field is missing or wrong, or the request cannot be served.
  """
  prompts, options = _prompts(body.get("prompt")), read_text_options(body)
  if len(prompts) * options.choices > MAX_CHOICES:
    asked = f"{len(prompts)} prompts with n={options.choices}"
    message = f"one request may have {MAX_CHOICES} completions, this one asks for {asked}"
    raise RequestError(message, param="n")
  return TextRequest(prompts=prompts, options=options)


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
  """Returns the prompts of a request: one, or those of a list."""
  is_several = isinstance(given, list) and bool(given) and isinstance(given[0], str | list)
  found = [_prompt(each) for each in (given if is_several else [given])]
  if None in found:
    message = (
      "`prompt` must be a string or a list of token ids, or a list of these; none may be empty"
    )
    raise RequestError(message, param="prompt")
  return tuple(each for each in found if each is not None)


def _prompt(given: Any) -> str | tuple[int, ...] | None:
  """Returns one prompt; None if it is neither text nor token ids."""
  if isinstance(given, str):
    return given or None
  is_ids = isinstance(given, list) and all(type(each) is int for each in given)
  return tuple(given) or None if is_ids else None


def size(value: Any, most: int) -> int:
  """Returns the number of characters and values in a value of JSON, or one above `most`."""
  found, todo = 0, [value]
  while todo and found <= most:
    each = todo.pop()
    if isinstance(each, str):
      found += len(each)
    elif isinstance(each, list | tuple):
      found += len(each)
      todo += each
    elif isinstance(each, dict):
      found += len(each)
      todo += (*each, *each.values())
  return found


def _tools(tools: Any) -> Sequence[Mapping[str, Any]]:
  if not isinstance(tools, list):
    raise RequestError("tools must be a list", param="tools")
  for number, tool in enumerate(tools):
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
      raise RequestError(f"tools[{number}] must be of type 'function'", param="tools")
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
      raise RequestError(f"tools[{number}].function.name is missing", param="tools")
  return [{"type": "function", **tool} for tool in tools]


def _message(message: Any, where: str) -> Message:
  """Returns a message as chat templates take it, without fields that are null."""
  if not isinstance(message, dict):
    raise RequestError(f"{where} must be an object, got {shown(message)}", param=where)
  role = message.get("role")
  if role not in _ROLES:
    raise RequestError(
      f"{where}.role must be one of {', '.join(_ROLES)}, got {shown(role)}", param=f"{where}.role"
    )
  # Templates that do not know developers leave their messages out.
  role = "system" if role == "developer" else role
  found: Message = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
  for name in ("name", "tool_call_id", "reasoning_content"):
    if message.get(name) is not None:
      if not isinstance(message[name], str):
        raise RequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
      found[name] = message[name]
  if calls := message.get("tool_calls"):
    if role != "assistant" or not isinstance(calls, list):
      raise RequestError(
        f"{where}.tool_calls must be a list, in a message of the assistant", param=where
      )
    found["tool_calls"] = [_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
  return found


def _named(messages: Sequence[Message]) -> tuple[Message, ...]:
  """Returns the messages; answers of tools name the tool, because templates may write it."""
  names = {
    call["id"]: call["function"]["name"]
    for message in messages
    for call in message.get("tool_calls", ())
  }
  return tuple(
    {"name": names[message["tool_call_id"]], **message}
    if message["role"] == "tool" and message.get("tool_call_id") in names
    else message
    for message in messages
  )


def _text(content: Any, where: str) -> str:
  """Returns the text of a message's content; parts are joined."""
  if content is None:
    return ""
  if isinstance(content, str):
    return content
  if not isinstance(content, list):
    raise RequestError(f"{where} must be a string or a list of parts", param=where)
  texts = []
  for number, part in enumerate(content):
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
      raise RequestError(
        f"{where}[{number}] is not text but {shown(kind)}: this policy reads text only",
        param=f"{where}[{number}]",
      )
    texts.append(part[kind])
  return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
  """Returns a tool call whose arguments are an object, as templates take them."""
  function = call.get("function") if isinstance(call, dict) else None
  if not isinstance(function, dict) or not isinstance(function.get("name"), str):
    raise RequestError(f"{where} must have function.name", param=where)
  arguments = function.get("arguments")
  if isinstance(arguments, str):
    try:
      arguments = untrusted_json.read_all(arguments) if arguments.strip() else {}
    except JsonError as error:
      raise RequestError(
        f"{where}.function.arguments are not JSON: {error}", param=where
      ) from error
  arguments = {} if arguments is None else arguments
  if not isinstance(arguments, dict):
    message = f"{where}.function.arguments must be an object, got {shown(arguments)}"
    raise RequestError(message, param=where)
  found = {"name": function["name"], "arguments": arguments}
  return {"id": str(call.get("id") or ""), "type": "function", "function": found}
