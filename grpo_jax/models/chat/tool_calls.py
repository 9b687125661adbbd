"""Parses the tool calls in what a model wrote, in the form that its chat template has. Pure.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>          "hermes"
    <tool_call><function=add><parameter=a>1</parameter></function>…       "qwen3_coder"
    <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>…           "glm4_moe"
    <|python_tag|>{"name": "add", "parameters": {"a": 1}}                  "llama3"
    <|channel|>commentary to=functions.add <|message|>{"a": 1}<|call|>     "gpt_oss"

The text may be anything at all: parsing is linear in its length, and nothing in it is evaluated.
A call in the model's thoughts is not a call.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from grpo_jax.models.chat import untrusted_json
from grpo_jax.models.chat.untrusted_json import JsonError, after_space

MAX_CALLS = 32  # of one turn, malformed ones included.
_SHOWN = 100  # characters of a model's text in a message.
_DEEPEST = 50  # alternatives of a schema within each other.

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


@dataclasses.dataclass(frozen=True, slots=True)
class Malformed:
  """What looks like a call and is not one."""

  reason: str  # for the model to read.
  name: str = ""  # name of the tool, as far as it can be read.


@dataclasses.dataclass(frozen=True, slots=True)
class Parsed:
  """One turn of the assistant."""

  content: str  # text without calls and thoughts.
  # In order: {"id": …, "type": "function", "function": {"name": str, "arguments": dict}}.
  calls: tuple[Mapping[str, Any], ...] = ()
  malformed: tuple[Malformed, ...] = ()
  reasoning: str = ""  # the thoughts that came first, without their marks.


@runtime_checkable
class CallParser(Protocol):
  """A form of tool calls: a function of a turn's text."""

  def __call__(self, text: str, tools: Sequence[Tool]) -> Parsed:
    """Parses a turn.

    Args:
      text: Text of the turn with its special tokens, without the token that ended it.
      tools: Tools that the model was given. Forms that write all values as text need the schemas.
    """
    ...


def parse(
  text: str, form: str | CallParser, *, tools: Sequence[Tool] = (), first_id: int = 0
) -> Parsed:
  """Parses one turn of the assistant.

  Args:
    text: Text that the model wrote, decoded with special tokens. The token that ended the turn may
      be its last one.
    form: Key of `FORMS`, or a function of your own.
    tools: Tools that the model was given.
    first_id: Number in the id of the first call, so that ids are unique in a conversation.

  Returns:
    The turn. Calls beyond `MAX_CALLS` are not read; `malformed` says so. Calls have the ids
    "call00000", "call00001", …, whatever ids a function of your own gives them.

  Raises:
    ValueError: `form` is unknown.
    TypeError: A function of your own does not return a `Parsed` with calls in this form.
  """
  found = _parser(form)(_without_end(text), tools)
  if not isinstance(found, Parsed):
    raise TypeError(f"the parser of tool calls returned {found!r:.100}, not a Parsed")
  calls, malformed = found.calls[:MAX_CALLS], found.malformed[: MAX_CALLS + 1]
  if len(calls) < len(found.calls):
    malformed = (*malformed, _TOO_MANY)
  named = (_with_id(call, first_id + number) for number, call in enumerate(calls))
  return dataclasses.replace(found, calls=tuple(named), malformed=malformed)


def form_of(template: str) -> str | None:
  """Returns the key of `FORMS` whose calls a chat template writes; None: it writes none of them.

  Args:
    template: Jinja source of the template.
  """
  if not re.search(r"\btools\b", template):
    return None
  return next((form for form, marks in _MARKS.items() if all(m in template for m in marks)), None)


def call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a call in OpenAI's form; `parse` gives it its id."""
  return {"id": "", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _parser(form: str | CallParser) -> CallParser:
  if not isinstance(form, str):
    return form
  if form not in FORMS:
    raise ValueError(f"unknown form of tool calls {form!r}; there are: {', '.join(FORMS)}")
  return FORMS[form]


def _with_id(found: Mapping[str, Any], number: int) -> dict[str, Any]:
  function = found.get("function") if isinstance(found, Mapping) else None
  if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
    raise TypeError(f"the parser of tool calls returned {found!r:.100}, which is not a call")
  arguments = function.get("arguments")
  if not isinstance(arguments, Mapping):
    raise TypeError(f"the parser of tool calls returned the arguments {arguments!r:.100}")
  # Nine letters and digits: some templates accept no other ids.
  return {**call(function["name"], arguments), "id": f"call{number:05d}"}


def _without_end(text: str) -> str:
  """Returns the text without the end-of-turn tokens at its end."""
  end = len(text)
  while found := next((mark for mark in _ENDS if text.endswith(mark, 0, end)), None):
    end -= len(found)
  return text[:end]


class _CallError(ValueError):
  """A call is malformed."""

  def __init__(self, reason: str, name: str = ""):
    super().__init__(reason)
    self.malformed = Malformed(reason, name[:_SHOWN])


@dataclasses.dataclass(slots=True)
class _TurnReader:
  """A turn while it is read."""

  text: list[str] = dataclasses.field(default_factory=list)
  calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  malformed: list[Malformed] = dataclasses.field(default_factory=list)
  reasoning: str = ""

  @property
  def is_full(self) -> bool:
    return len(self.calls) + len(self.malformed) >= MAX_CALLS

  def forget(self, reasoning: str) -> None:
    """Makes all that was read so far part of the thoughts."""
    self.text, self.calls, self.malformed = [], [], []
    self.reasoning = reasoning

  def parsed(self) -> Parsed:
    content = "".join(self.text)
    if self.calls or self.malformed or self.reasoning:
      content = content.strip()
    return Parsed(content, tuple(self.calls), tuple(self.malformed), self.reasoning.strip())


# Reads the inside of <tool_call>: (text, where it begins, tools) → (call, where it ends).
_Inside = Callable[[str, int, Sequence[Tool]], tuple[dict[str, Any], int]]


def _tagged(inside: _Inside) -> CallParser:
  """Returns the parser of a form whose calls are in `<tool_call>…</tool_call>`."""

  def parse_turn(text: str, tools: Sequence[Tool]) -> Parsed:
    turn, place = _TurnReader(), 0
    has_thought = text.lstrip().startswith(_THINK)
    if has_thought:
      thought, closed, _ = text.partition(_END_THINK)
      turn.reasoning = thought.lstrip().removeprefix(_THINK)
      place = len(thought) + len(closed)
    while place < len(text):
      opening = text.find(_OPEN, place)
      said = text[place:] if opening < 0 else text[place:opening]
      # The prompt may have opened a thought. It then ends outside of calls.
      if not has_thought and _END_THINK in said:
        has_thought = True
        place += said.index(_END_THINK) + len(_END_THINK)
        turn.forget(text[: place - len(_END_THINK)])
        continue
      turn.text.append(said)
      if _CLOSE in said and not turn.is_full:
        turn.malformed.append(Malformed(f"there is no {_OPEN} before {_CLOSE}"))
      if opening < 0:
        break
      if turn.is_full:
        turn.malformed.append(_TOO_MANY)
        break
      place = _read_tagged(turn, inside, text, opening + len(_OPEN), tools)
    return turn.parsed()

  return parse_turn


def _read_tagged(
  turn: _TurnReader, inside: _Inside, text: str, start: int, tools: Sequence[Tool]
) -> int:
  """Reads one call, and returns the place after it."""
  try:
    found, end = inside(text, start, tools)
    end = after_space(text, end)
    if not text.startswith(_CLOSE, end):
      missing = f"expected {_CLOSE} after the call, got {_shown(text, end)}"
      raise _CallError(missing, found["function"]["name"])
  except _CallError as error:
    turn.malformed.append(error.malformed)
    closing, opening = text.find(_CLOSE, start), text.find(_OPEN, start)
    if closing < 0 or 0 <= opening < closing:
      return opening if opening >= 0 else len(text)
    return closing + len(_CLOSE)
  turn.calls.append(found)
  return end + len(_CLOSE)


def _json_call(text: str, start: int, tools: Sequence[Tool]) -> tuple[dict[str, Any], int]:
  """Reads {"name": …, "arguments": {…}}."""
  try:
    value, end = untrusted_json.read(text, start)
  except JsonError as error:
    raise _CallError(str(error)) from error
  return _named(value, ("arguments",)), end


def _named(value: Any, keys: Sequence[str]) -> dict[str, Any]:
  """Returns the call of an object with `name`, and the arguments under one of the keys."""
  if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
    raise _CallError(f'a call is an object {{"name": …, "{keys[0]}": {{…}}}}')
  key = next((key for key in keys if key in value), keys[0])
  arguments = value.get(key, {})  # a tool without parameters may be called without them.
  if not isinstance(arguments, dict):
    raise _CallError(f'"{key}" must be an object', value["name"])
  return call(value["name"], arguments)


def _function_call(text: str, start: int, tools: Sequence[Tool]) -> tuple[dict[str, Any], int]:
  """Reads <function=NAME> <parameter=KEY> VALUE </parameter> … </function>."""
  place = _expect(text, after_space(text, start), "<function=")
  name, place = _until(text, place, ">", "")
  name = name.strip()
  found: dict[str, Any] = {}
  types = _types_of(name, tools)
  while text.startswith("<parameter=", place := after_space(text, place)):
    key, place = _until(text, place + len("<parameter="), ">", name)
    value, place = _until(text, place, "</parameter>", name)
    _put(found, key.strip(), value.removeprefix("\n").removesuffix("\n"), types, name)
  end = _expect(text, place, "</function>", name)
  return _checked_name(name, found), end


def _arg_call(text: str, start: int, tools: Sequence[Tool]) -> tuple[dict[str, Any], int]:
  """Reads NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> …"""
  begin = _NAME_END.search(text, start)
  place = begin.start() if begin else len(text)
  name = text[start:place].strip()
  found: dict[str, Any] = {}
  types = _types_of(name, tools)
  while text.startswith("<arg_key>", place := after_space(text, place)):
    key, place = _until(text, place + len("<arg_key>"), "</arg_key>", name)
    place = _expect(text, after_space(text, place), "<arg_value>", name)
    value, place = _until(text, place, "</arg_value>", name)
    _put(found, key.strip(), value, types, name)
  return _checked_name(name, found), place


def _checked_name(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
  if not name:
    raise _CallError("the call does not name a function")
  return call(name, arguments)


def _put(found: dict[str, Any], key: str, value: str, types: Mapping[str, Any], name: str) -> None:
  if key in found:
    raise _CallError(f"the parameter {key[:_SHOWN]!r} is given twice", name)
  found[key] = _typed(value, types.get(key))


def _expect(text: str, place: int, mark: str, name: str = "") -> int:
  """Returns the place after a mark that must be here."""
  if not text.startswith(mark, place):
    raise _CallError(f"expected {mark}, got {_shown(text, place)}", name)
  return place + len(mark)


def _until(text: str, place: int, mark: str, name: str) -> tuple[str, int]:
  """Returns the text before the next mark, and the place after the mark."""
  end = text.find(mark, place)
  if end < 0:
    raise _CallError(f"there is no {mark} after {_shown(text, place)}", name)
  return text[place:end], end + len(mark)


def _shown(text: str, place: int) -> str:
  return repr(text[place : place + 20]) if place < len(text) else "the end of the turn"


def _types_of(name: str, tools: Sequence[Tool]) -> Mapping[str, Any]:
  """Returns the schemas of a tool's parameters; none for an unknown tool."""
  for tool in tools:
    function = tool.get("function", {})
    if function.get("name") == name:
      parameters = function.get("parameters")
      found = parameters.get("properties") if isinstance(parameters, Mapping) else None
      return found if isinstance(found, Mapping) else {}
  return {}


def _typed(text: str, schema: Any) -> Any:
  """Returns a value that was written as text: JSON, unless its schema allows a string."""
  kinds, word = _kinds(schema), text.strip()
  if "null" in kinds and word in ("null", "None"):
    return None
  if not kinds or "string" in kinds:
    return text
  if word in _PYTHON:
    return _PYTHON[word]
  try:
    return untrusted_json.read_all(word)
  except JsonError:
    return text  # of the wrong type: a check by the schema finds it.


def _kinds(schema: Any, depth: int = 0) -> set[str]:
  """Returns the types that a schema allows; none: it does not say, or is nested too deeply."""
  if not isinstance(schema, Mapping) or depth > _DEEPEST:
    return set()
  kind = schema.get("type")
  named = kind if isinstance(kind, list | tuple) else (kind,)
  found = {each for each in named if isinstance(each, str)}
  if not found and isinstance(values := schema.get("enum"), list | tuple):
    return {"string"} if any(isinstance(value, str) for value in values) else {"other"}
  for keyword in ("anyOf", "oneOf"):
    alternatives = schema.get(keyword)
    for each in alternatives if isinstance(alternatives, list | tuple) else ():
      found |= _kinds(each, depth + 1) or {"string"}
  return found


def _llama3(text: str, tools: Sequence[Tool]) -> Parsed:
  """Parses a turn that is one JSON object, or has one after <|python_tag|>."""
  said, tag, after = text.partition("<|python_tag|>")
  body = after if tag else text
  turn = _TurnReader([said] if tag else [])
  try:
    value, end = untrusted_json.read(body)
  except JsonError as error:
    if not tag and not _LLAMA_CALL.match(body):
      return Parsed(text)
    turn.malformed.append(Malformed(str(error)))
    return turn.parsed()
  is_call = isinstance(value, dict) and _is_llama_call(value, tools)
  if not tag and not is_call:
    return Parsed(text)
  try:
    turn.calls.append(_named(value, _LLAMA_KEYS))
  except _CallError as error:
    turn.malformed.append(error.malformed)
  rest = body[end:]
  if rest.lstrip(" \n;").startswith("{"):
    turn.malformed.append(Malformed("only one call can be made in a turn; the others are ignored"))
  else:
    turn.text.append(rest)
  return turn.parsed()


def _is_llama_call(value: Mapping[str, Any], tools: Sequence[Tool]) -> bool:
  """Returns whether an object is a call, and not an answer that is an object with a name."""
  known = [tool.get("function", {}).get("name") for tool in tools]
  has_arguments = not value.keys().isdisjoint(_LLAMA_KEYS)
  return "name" in value and (has_arguments or value["name"] in known)


def _gpt_oss(text: str, tools: Sequence[Tool]) -> Parsed:
  """Parses messages `HEADER<|message|>BODY<|end|>`; one with a recipient is a call."""
  turn = _TurnReader()
  thoughts: list[str] = []
  place = 0
  while place < len(text):
    end = text.find("<|start|>", place)
    end = len(text) if end < 0 else end
    header, mark, body = text[place:end].partition("<|message|>")
    place = end + len("<|start|>")
    recipient = _RECIPIENT.search(header) if mark or "<|channel|>" in header else None
    if recipient and recipient[1] not in ("user", "assistant", "all"):
      if turn.calls or turn.malformed:
        turn.malformed.append(Malformed("only one call can be made in a turn; others are ignored"))
        break
      _add_gpt_oss_call(turn, recipient[1].removeprefix("functions."), mark, body)
    elif not mark:
      turn.text.append(header)
    elif "<|channel|>analysis" in header:
      thoughts.append(_gpt_oss_body(body))
    else:
      turn.text.append(_gpt_oss_body(body))
  turn.reasoning = "\n".join(thoughts)
  return turn.parsed()


def _add_gpt_oss_call(turn: _TurnReader, name: str, mark: str, body: str) -> None:
  try:
    if not mark:
      raise JsonError("the call has no <|message|> with its arguments")
    arguments = untrusted_json.read_all(_gpt_oss_body(body))
    if not isinstance(arguments, dict):
      raise JsonError("the arguments must be a JSON object")
    turn.calls.append(call(name, arguments))
  except JsonError as error:
    turn.malformed.append(Malformed(str(error), name[:_SHOWN]))


def _gpt_oss_body(body: str) -> str:
  end = _GPT_OSS_END.search(body)
  return body[: end.start()] if end else body


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _END_THINK = "<think>", "</think>"
_NAME_END = re.compile(r"[\n<]")
_LLAMA_KEYS = ("parameters", "arguments")
_LLAMA_CALL = re.compile(r'\s*\{\s*"name"\s*:')
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_GPT_OSS_END = re.compile(r"<\|(?:end|call|return)\|>")
_PYTHON = {"True": True, "False": False, "None": None}  # as some templates write them.
_ENDS = (
  *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
  *("<|return|>", "<|call|>", "<|end|>", "<|observation|>", "<|user|>"),
  *("</s>", "<end_of_turn>", "<eos>"),
)
_TOO_MANY = Malformed(f"more than {MAX_CALLS} calls in one turn; the others are not read")
# Parts of a template that only one form has; the first form whose parts are all there is taken.
_MARKS = {
  "gpt_oss": ("<|channel|>", "functions."),
  "qwen3_coder": ("<function=", "<parameter="),
  "glm4_moe": ("<arg_key>", "<arg_value>"),
  "hermes": ("<tool_call>", "</tool_call>", "arguments"),
  "llama3": ('"parameters": ', '{"name": "', "ipython"),
}
FORMS: Mapping[str, CallParser] = {
  "hermes": _tagged(_json_call),
  "qwen3_coder": _tagged(_function_call),
  "glm4_moe": _tagged(_arg_call),
  "llama3": _llama3,
  "gpt_oss": _gpt_oss,
}
