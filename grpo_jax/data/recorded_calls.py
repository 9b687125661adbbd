"""Tools and tool calls of recorded rows, in the form of chat completions. Pure.

A message of the assistant may have calls, and thoughts in `reasoning_content`:

    {"role": "assistant", "content": "Let me add.", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
    {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.data import formats
from grpo_jax.data.formats import RowError
from grpo_jax.values import json_text

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}.


def tools_of(value: Any, where: str) -> tuple[Tool, ...]:
  """Returns the tools that a row declares.

  Args:
    value: A list of functions, each as chat completions have it (under "function") or as the
      Responses API has it (its fields beside "type"); or such a list as JSON text; None: no tools.
    where: Place of the row.

  Raises:
    RowError: The value is not such a list.
  """
  if isinstance(value, str):  # data sets of the hub often keep schemas as text.
    value = _parsed(value, "'tools'", where) if value.strip() else None
  if value is None:
    return ()
  if not isinstance(value, list):
    raise RowError(where, f"'tools' must be a list of functions, got {value!r:.60}")
  return tuple(_tool(tool, f"tool {i + 1}", where) for i, tool in enumerate(value))


def _tool(tool: Any, name: str, where: str) -> Tool:
  if not isinstance(tool, Mapping):
    raise RowError(where, f"{name} must be an object, got {tool!r:.60}")
  kind = tool.get("type", "function")
  if kind != "function":
    raise RowError(
      where,
      f"{name} has type {kind!r}; only functions have a schema that a chat template can write",
      kind=formats.UNWRITTEN_TOOLS,
    )
  given = tool.get("function", tool)
  if not isinstance(given, Mapping) or not isinstance(given.get("name"), str) or not given["name"]:
    raise RowError(where, f"{name} has no name: {tool!r:.100}")
  parameters = given.get("parameters") or {"type": "object", "properties": {}}
  if isinstance(parameters, str):
    parameters = _parsed(parameters, f"parameters of {name}", where)
  function = {
    "name": given["name"],
    "description": given.get("description") or "",
    "parameters": parameters,
  }
  return {"type": "function", "function": function}


def call(name: Any, arguments: Any, label: str, where: str, *, call_id: Any = None) -> dict:
  """Returns a call of a tool.

  Args:
    name: Name of the tool.
    arguments: Its arguments, an object or the JSON text of one.
    label: Name of the call, for messages.
    where: Place of the row.
    call_id: Identifier of the call, to which an answer refers; None: it has none.

  Raises:
    RowError: The name is not a string, or the arguments are not JSON, or not an object.
  """
  if not isinstance(name, str) or not name:
    raise RowError(where, f"{label} has no name of a function, got {name!r:.60}")
  if isinstance(arguments, str):
    arguments = _parsed(arguments, f"arguments of {label}", where) if arguments.strip() else {}
  arguments = {} if arguments is None else arguments
  if not isinstance(arguments, Mapping):
    raise RowError(
      where,
      f"arguments of {label} must be an object, got {arguments!r:.60}",
      kind="with broken JSON",
    )
  made: dict[str, Any] = {"id": call_id} if isinstance(call_id, str) and call_id else {}
  return {**made, "type": "function", "function": {"name": name, "arguments": arguments}}


def checked(message: Mapping[str, Any], label: str, where: str) -> dict[str, Any]:
  """Returns a message whose calls have the form above; a null content becomes "".

  Raises:
    RowError: `tool_calls` is not a list of calls.
  """
  given = message.get("tool_calls")
  kept = {key: value for key, value in message.items() if key != "tool_calls"}
  if not given:
    return kept
  if not isinstance(given, list):
    raise RowError(where, f"tool_calls of {label} must be a list, got {given!r:.60}")
  made = []
  for i, each in enumerate(given):
    name = f"call {i + 1} of {label}"
    function = each.get("function", each) if isinstance(each, Mapping) else None
    if not isinstance(function, Mapping):
      raise RowError(where, f"{name} must be an object, got {each!r:.60}")
    made.append(
      call(function.get("name"), function.get("arguments", {}), name, where, call_id=each.get("id"))
    )
  content = kept.get("content")
  return {**kept, "content": "" if content is None else content, "tool_calls": made}


def as_text(message: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a message whose thoughts and calls are text: <think>…</think>, and <tool_call> as
  Qwen's and Hermes' chat templates write it."""
  text = str(message["content"])
  if message.get("reasoning_content"):
    text = f"<think>{message['reasoning_content']}</think>{text}"
  for each in message.get("tool_calls", ()):
    function = each["function"]
    written = json.dumps(
      {"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False
    )
    gap = "\n" if text else ""
    text += f"{gap}<tool_call>\n{written}\n</tool_call>"
  others = ("content", "reasoning_content", "tool_calls")
  return {**{k: v for k, v in message.items() if k not in others}, "content": text}


def named(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Returns messages in which the answer of a tool has the name of the tool that was called."""
  names: dict[str, str] = {}
  found: list[dict[str, Any]] = []
  for message in messages:
    made = dict(message)
    for each in made.get("tool_calls", ()):
      if "id" in each:
        names[each["id"]] = each["function"]["name"]
    called = names.get(str(made.get("tool_call_id")))
    if made.get("role") == "tool" and called and not made.get("name"):
      made["name"] = called
    found.append(made)
  return found


def _parsed(text: str, name: str, where: str) -> Any:
  try:
    return json_text.parsed(text, is_strict=True)
  except ValueError as error:
    raise RowError(where, f"{name} are not JSON: {error}", kind="with broken JSON") from error
