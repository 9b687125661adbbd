"""Requests of OpenAI's API: what they ask for, and what is refused. Pure."""

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.http import redaction
from grpo_jax.models.chat import untrusted_json
from grpo_jax.models.chat.untrusted_json import JsonError

MAX_STOPS = 64  # strings that end a completion; every token is compared with all of them.
MAX_STOP = 1000  # characters of one of them.

Message = dict[str, Any]  # as chat templates take it: `content` is a string, arguments are objects.

_ROLES = ("system", "developer", "user", "assistant", "tool")
# What the sampling options of the run decide; a request's own values have no effect.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens")
# What would change the distribution, or the form, of what is sampled; with the value that does not.
_NEUTRAL: Mapping[str, Any] = {
  "n": 1,
  "best_of": 1,
  "presence_penalty": 0,
  "frequency_penalty": 0,
  "repetition_penalty": 1,
  "logit_bias": {},
  "response_format": {"type": "text"},
  "ignore_eos": False,
  "use_beam_search": False,
  "echo": False,
  "suffix": "",
  "continue_final_message": False,
  "modalities": ["text"],
  "top_logprobs": 0,
  "prompt_logprobs": 0,
  "functions": [],
}
_GRAMMARS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")


class RequestError(Exception):
  """A request cannot be served; answered in OpenAI's form of errors."""

  def __init__(
    self,
    message: str,
    *,
    status: int = 400,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
  ):
    super().__init__(message)
    self.status = status
    self.kind = kind
    self.param = param
    self.code = code

  def body(self, *, hidden: str = "") -> dict[str, Any]:
    """Returns the answer, as JSON.

    Args:
      hidden: Secret that is removed from it.
    """
    message = redaction.without(str(self), hidden)
    fields = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
    return {"error": fields}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOptions:
  """The part of a request that chat and text completions have in common."""

  max_tokens: int | None = None  # None: as many as the run's options allow.
  stop: tuple[str, ...] = ()
  has_logprobs: bool = False
  has_token_ids: bool = False  # whether the answer has token ids, as vLLM's.
  names_tokens_by_id: bool = False  # whether logprobs name tokens "token_id:ID", as vLLM's.
  keeps_stop: bool = False  # whether the text of the answer includes the stop string.
  is_stream: bool = False
  has_usage: bool = False  # whether a stream ends with the numbers of tokens.
  ignored: tuple[str, ...] = ()  # options in the request that have no effect.


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

  prompt: str | tuple[int, ...]  # text, or token ids.
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
    raise RequestError(f"the body of the request must be a JSON object, got {_shown(found)}")
  return found


def check_model(body: Mapping[str, Any], model: str) -> None:
  """Raises RequestError unless the request names the model that is served."""
  if "model" not in body:
    raise RequestError("`model` is missing", param="model")
  if body["model"] != model:
    raise RequestError(
      f"the model {_shown(body['model'])} does not exist; this server has {model!r}",
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
      f"tool_choice {_shown(choice)} is not supported: nothing forces the policy to call a tool;"
      " 'auto' and 'none' are",
      param="tool_choice",
    )
  options = _options(body)
  if body.get("parallel_tool_calls") is False and body.get("tools"):
    options = dataclasses.replace(options, ignored=(*options.ignored, "parallel_tool_calls"))
  return ChatRequest(
    messages=_named([_message(each, f"messages[{i}]") for i, each in enumerate(messages)]),
    tools=tuple(_tools(body.get("tools") or [])),
    reads_calls=choice != "none",
    options=dataclasses.replace(options, has_logprobs=_flag(body, "logprobs")),
  )


def read_text(body: Mapping[str, Any]) -> TextRequest:
  """Reads a request for `/v1/completions`.

  Raises:
    RequestError: A field is missing or wrong, or the request cannot be served.
  """
  prompt = body.get("prompt")
  if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
    prompt = prompt[0]
  if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
    found: str | tuple[int, ...] = tuple(prompt)
  elif isinstance(prompt, str) and prompt:
    found = prompt
  else:
    raise RequestError(
      "`prompt` must be a non-empty string or a list of token ids; one request has one prompt",
      param="prompt",
    )
  logprobs = body.get("logprobs")
  if logprobs not in (None, False, True, 0, 1):
    raise RequestError(
      f"logprobs must be at most 1, got {_shown(logprobs)}: {_SAMPLED_ONLY}", param="logprobs"
    )
  options = dataclasses.replace(_options(body), has_logprobs=logprobs not in (None, False))
  return TextRequest(prompt=found, options=options)


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


def _options(body: Mapping[str, Any]) -> RequestOptions:
  for name, neutral in _NEUTRAL.items():
    value = body.get(name)
    if value is not None and value != neutral and value not in ([], {}):
      raise RequestError(_REASONS.get(name, _CHANGES).format(f"{name}={_shown(value)}"), param=name)
  for name in _GRAMMARS:
    if body.get(name) is not None:
      raise RequestError(_CHANGES.format(name), param=name)
  stream = _flag(body, "stream")
  given = body.get("stream_options") or {}
  if not isinstance(given, Mapping):
    raise RequestError("stream_options must be an object", param="stream_options")
  return RequestOptions(
    max_tokens=_max_tokens(body),
    stop=_stop(body.get("stop")),
    has_token_ids=_flag(body, "return_token_ids"),
    names_tokens_by_id=_flag(body, "return_tokens_as_token_ids"),
    keeps_stop=_flag(body, "include_stop_str_in_output"),
    is_stream=stream,
    has_usage=_flag(given, "include_usage"),
    ignored=tuple(name for name in _SAMPLING if body.get(name) is not None),
  )


def _flag(body: Mapping[str, Any], name: str) -> bool:
  value = body.get(name)
  if value is not None and not isinstance(value, bool):
    raise RequestError(f"{name} must be true or false, got {_shown(value)}", param=name)
  return bool(value)


def _max_tokens(body: Mapping[str, Any]) -> int | None:
  for name in ("max_completion_tokens", "max_tokens"):
    value = body.get(name)
    if value is not None:
      if type(value) is not int or value < 1:
        message = f"{name} must be a whole number of at least 1, got {_shown(value)}"
        raise RequestError(message, param=name)
      return value
  return None


def _stop(value: Any) -> tuple[str, ...]:
  strings = [value] if isinstance(value, str) else value or []
  if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
    message = f"stop must be a string or a list of non-empty strings, got {_shown(value)}"
    raise RequestError(message, param="stop")
  if len(strings) > MAX_STOPS or any(len(each) > MAX_STOP for each in strings):
    message = f"stop may have {MAX_STOPS} strings of {MAX_STOP} characters each"
    raise RequestError(message, param="stop")
  return tuple(strings)


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
    raise RequestError(f"{where} must be an object, got {_shown(message)}", param=where)
  role = message.get("role")
  if role not in _ROLES:
    raise RequestError(
      f"{where}.role must be one of {', '.join(_ROLES)}, got {_shown(role)}", param=f"{where}.role"
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
        f"{where}[{number}] is not text but {_shown(kind)}: this policy reads text only",
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
    message = f"{where}.function.arguments must be an object, got {_shown(arguments)}"
    raise RequestError(message, param=where)
  found = {"name": function["name"], "arguments": arguments}
  return {"id": str(call.get("id") or ""), "type": "function", "function": found}


def _shown(value: Any) -> str:
  text = _SHORT.repr(value)
  return text if len(text) <= 80 else f"{text[:80]}…"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong = 3, 80, 40
_CHANGES = (
  "{} is not supported: it would change the distribution that the run samples from and trains"
)
_SAMPLED_ONLY = "the engine reports the logprobs of sampled tokens only"
_REASONS = {
  "n": "{} is not supported: ask several times",
  "best_of": "{} is not supported: ask several times",
  "top_logprobs": "{} is not supported: " + _SAMPLED_ONLY,
  "prompt_logprobs": "{} is not supported: " + _SAMPLED_ONLY,
  "functions": "{} is not supported: declare tools",
  "echo": "{} is not supported: the answer has only what was sampled",
  "suffix": "{} is not supported: text is continued, not inserted",
  "continue_final_message": "{} is not supported: use /v1/completions to continue text",
  "modalities": "{} is not supported: this policy writes text only",
}
