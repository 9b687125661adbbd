"""Reads rollouts of NeMo Gym as prompts, and as recorded responses. Pure.

A rollout is {"responses_create_params": {"input": …}, "response": {"output": […]}, "reward": …}
with items as in OpenAI's Responses API; in the simpler form of the guides, "output" replaces
"response". The items become messages as in chat completions (see `recorded_calls`):

    message               text of its role
    reasoning             thoughts of the assistant, or dropped
    function_call         a tool call of the assistant
    function_call_output  a message of the tool

Consecutive items of the assistant are one turn. `responses_create_params.tools` are the tools that
the chat template receives. Items that were recorded for training carry `prompt_token_ids`,
`generation_token_ids` and `generation_log_probs`: these are then used, and no text is encoded
again.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.data import formats, recorded, recorded_calls
from grpo_jax.data.formats import RowError
from grpo_jax.data.recorded import (
  ASSISTANT,
  RecordedTurn,
  Recording,
  Response,
  Style,
  field,
  type_name,
)

_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
_PLACEHOLDER = [[0], [0]]  # ids of prompt and generation of an item that no model has sampled.


def is_rollout(row: Mapping[str, Any]) -> bool:
  """Returns whether a row is from NeMo Gym."""
  return "responses_create_params" in row


def to_prompt(row: Mapping[str, Any], where: str, style: formats.PromptStyle) -> formats.Record:
  """Reads the task of a rollout, or of a file of tasks, for online training.

  All fields except the answer reach the environment; the one named by `style.output_key`
  is the expected answer, if the row has it. Declared tools are the record's tools.
  """
  messages = prompt_messages(row, where, Style())
  left_out = ("responses_create_params", "response", "output", "messages")
  extra = {k: v for k, v in row.items() if k not in left_out}
  extra["nemo_gym_row"] = row  # which NeMo Gym\'s servers need as it is.
  record = formats.from_messages({**extra, "messages": messages}, where, style, needs_user=False)
  return dataclasses.replace(record, tools=declared_tools(row, where))


def to_recording(row: Mapping[str, Any], where: str, style: Style) -> Recording:
  """Reads a rollout as one response to its prompt; the rollouts of one task are one group.

  Rollouts of one task have the same `_ng_task_index`, if there is one, the same input and the same
  tools.
  """
  items = output_items(row, where)
  tokens = token_turns(items, where)
  messages = prompt_messages(row, where, style)
  tools = () if tokens or style.tools == "ignore" else declared_tools(row, where)
  reward = row.get(style.reward_key)
  turns = tokens[1] if tokens else _text_turns(items, where, style)
  record = formats.from_messages(
    {**_others(row, style), "messages": messages}, where, style.prompt, needs_user=False
  )
  agent = row.get("agent_ref")
  named = _text_or_none(agent, "name") if isinstance(agent, dict) else None
  return Recording(
    messages=record.messages,
    responses=(
      Response(
        turns,
        reward=None if reward is None else recorded.number(reward, repr(style.reward_key), where),
        is_truncated=_is_truncated(row, items),
        weight=formats.loss_multiplier(row, where),
      ),
    ),
    info=record.info,
    key=recorded.key_of(row.get("_ng_task_index"), named, messages, *tools),
    group_type=recorded.group_type(row, where, style) or named or _text_or_none(row, "task_name"),
    prompt_ids=tokens[0] if tokens else None,
    tools=tools,
  )


def declared_tools(row: Mapping[str, Any], where: str) -> tuple[recorded_calls.Tool, ...]:
  """Returns the tools that the model was offered; none if it was told not to call any."""
  params = _params(row, where)
  return (
    ()
    if params.get("tool_choice") == "none"
    else recorded_calls.tools_of(params.get("tools"), where)
  )


def prompt_messages(row: Mapping[str, Any], where: str, style: Style) -> list[dict[str, Any]]:
  """Returns the chat that the model was asked to continue.

  Raises:
    RowError: There is no chat, or it is empty, or it has parts that are not text.
  """
  params = _params(row, where)
  given = field(params, "input", f"{where}: responses_create_params")
  recorded.check_input(given, "'input'", where)
  if isinstance(given, str):
    given = [{"role": "user", "content": given}]
  messages = turns_of(given, "input", where, style)
  if messages[-1]["role"] == ASSISTANT:
    raise RowError(where, "'input' ends with the assistant: the answer belongs in 'output'")
  if params.get("instructions"):
    messages = [{"role": "system", "content": params["instructions"]}, *messages]
  return messages


def _params(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
  params = field(row, "responses_create_params", where)
  if not isinstance(params, dict):
    raise RowError(where, f"'responses_create_params' must be an object, got {type_name(params)}")
  return params


def output_items(row: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
  """Returns what the model and its environment wrote, item by item."""
  holder: Any = row
  if "response" in row:
    holder = row["response"]
    if not isinstance(holder, dict):
      raise RowError(where, f"'response' must be an object, got {type_name(holder)}")
  items = field(holder, "output", where)
  if not isinstance(items, list) or not items:
    kind = formats.EMPTY_OUTPUT if items in ([], None) else RowError.OTHER
    raise RowError(where, f"'output' must be a list of items, got {type_name(items)}", kind=kind)
  return items


def answers(row: Mapping[str, Any], where: str) -> list[str]:
  """Returns the text of each message of the model, without thoughts and calls.

  Raises:
    RowError: The row has no output, or a message of it is not text.
  """
  found = []
  for number, item in enumerate(output_items(row, where), 1):
    if isinstance(item, dict) and item.get("type", "message") == "message":
      message = _message({"role": ASSISTANT, **item}, f"item {number} of 'output'", where)
      found += [message["content"]] if message["role"] == ASSISTANT else []
  return found


def turns_of(
  items: Any, name: str, where: str, style: Style, *, keeps_thoughts: bool = False
) -> list[dict[str, Any]]:
  """Returns items as a chat, in which consecutive items of the assistant are one message.

  Args:
    items: Items of the Responses API.
    name: Name of their field, for messages.
    where: Place of the row.
    style: Options of reading rows.
    keeps_thoughts: Whether the thoughts of a message without calls are a field of it, and not text.
  """
  if not isinstance(items, list) or not items:
    raise RowError(where, f"{name!r} must be a string or a list of items, got {type_name(items)}")
  messages = [
    _item(item, f"item {i + 1} of {name!r}", where, style) for i, item in enumerate(items)
  ]
  turns: list[dict[str, Any]] = []
  for role, run in itertools.groupby(messages, key=lambda message: message["role"]):
    together = list(run)
    turns += [_one_turn(together, style, keeps_thoughts)] if role == ASSISTANT else together
  return recorded_calls.named(turns)


def _one_turn(
  run: Sequence[Mapping[str, Any]], style: Style, keeps_thoughts: bool
) -> dict[str, Any]:
  """Returns consecutive messages of the assistant as one.

  Calls remain calls if they come after the thoughts and the text, as chat templates write them, and
  become text otherwise.
  """
  parts = ("reasoning_content", "content", "tool_calls")
  order = [i for message in run for i, part in enumerate(parts) if message.get(part)]
  has_fields = 2 in order or (keeps_thoughts and order.count(0) == 1)
  if style.tools == "ignore" or not has_fields or order != sorted(order):
    text = ""
    for message in run:
      is_call = "tool_calls" in message and not message["content"]
      text += ("\n" if text and is_call else "") + recorded_calls.as_text(message)["content"]
    return {"role": ASSISTANT, "content": text}
  thoughts = "\n".join(m["reasoning_content"] for m in run if m.get("reasoning_content"))
  made = [call for message in run for call in message.get("tool_calls", ())]
  return {
    "role": ASSISTANT,
    "content": "".join(message["content"] for message in run),
    **({"reasoning_content": thoughts} if thoughts else {}),
    **({"tool_calls": made} if made else {}),
  }


def token_turns(
  items: Sequence[Mapping[str, Any]], where: str
) -> tuple[tuple[int, ...], tuple[RecordedTurn, ...]] | None:
  """Returns the prompt's tokens and the turns, from the token ids of the items.

  Each sampled item repeats all tokens before it; the new ones among them since the previous item
  were written by the environment.

  Returns:
    The tokens and the turns; None if no item has token ids.

  Raises:
    RowError: An item does not continue the tokens before it.
  """
  prompt: tuple[int, ...] | None = None
  seen: tuple[int, ...] = ()
  turns: list[RecordedTurn] = []
  for i, item in enumerate(items):
    if not isinstance(item, dict) or not item.get("generation_token_ids"):
      continue
    if [item.get("prompt_token_ids"), item["generation_token_ids"]] == _PLACEHOLDER:
      continue
    label = f"{where}: item {i + 1} of 'output'"
    before = recorded.integers(field(item, "prompt_token_ids", label), "prompt_token_ids", label)
    sampled = recorded.integers(item["generation_token_ids"], "generation_token_ids", label)
    logprobs = recorded.log_probabilities(
      field(item, "generation_log_probs", label), "generation_log_probs", label
    )
    if len(sampled) != len(logprobs):
      raise RowError(label, f"{len(sampled)} generation_token_ids, {len(logprobs)} log_probs")
    if before[: len(seen)] != seen:
      raise RowError(label, "its prompt_token_ids do not begin with the tokens before it")
    if prompt is None:
      prompt = before
    elif len(before) > len(seen):
      turns.append(RecordedTurn("environment", "", before[len(seen) :]))
    turns.append(RecordedTurn(ASSISTANT, "", sampled, logprobs))
    seen = before + sampled
  return None if prompt is None else (prompt, tuple(turns))


def _text_turns(items: Sequence[Any], where: str, style: Style) -> tuple[RecordedTurn, ...]:
  """Returns the turns of a response from texts, up to the last one of the assistant."""
  # A message without a role, as in the guides, is the model's.
  given = [{"role": ASSISTANT, **item} if isinstance(item, dict) else item for item in items]
  chat = turns_of(given, "output", where, style, keeps_thoughts=True)
  while chat and chat[-1]["role"] != ASSISTANT:
    chat.pop()  # the model did not answer the environment's last message.
  if not chat or chat[0]["role"] != ASSISTANT:
    raise RowError(where, "'output' must begin with what the assistant wrote")
  return tuple(recorded.turn_of(message) for message in chat)


def _item(item: Any, name: str, where: str, style: Style) -> dict[str, Any]:
  """Returns one item as a message."""
  if not isinstance(item, dict):
    raise RowError(where, f"{name} must be an object, got {type_name(item)}")
  kind = item.get("type", "message")
  if kind == "message":
    return _message(item, name, where)
  if kind == "reasoning":
    parts = [*(item.get("summary") or []), *(item.get("content") or [])]
    thoughts = recorded.text_of(parts, f"summary of {name}", where)
    kept = {"reasoning_content": thoughts} if thoughts and style.reasoning == "think" else {}
    return {"role": ASSISTANT, "content": "", **kept}
  if kind == "function_call":
    tool, arguments = field(item, "name", where), field(item, "arguments", where)
    made = recorded_calls.call(tool, arguments, name, where, call_id=item.get("call_id"))
    return {"role": ASSISTANT, "content": "", "tool_calls": [made]}
  if kind == "function_call_output":
    text = recorded.text_of(field(item, "output", where), f"output of {name}", where)
    answered = item.get("call_id")
    return {"role": "tool", "content": text, **({"tool_call_id": answered} if answered else {})}
  raise RowError(
    where,
    f"{name} has type {kind!r}; there are: {', '.join(_ITEMS)}",
    kind=f"with items of type {kind!r}",
  )


def _message(item: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
  """Returns an item of type message; its calls, if it has some as chat completions do, are kept."""
  role = item.get("role")
  if role not in formats.ROLES:
    raise RowError(where, f"{name} has role {role!r}; there are: {', '.join(formats.ROLES)}")
  checked = recorded_calls.checked(item, name, where)
  text = recorded.text_of(field(checked, "content", where), f"content of {name}", where)
  kept = {key: checked[key] for key in ("tool_calls", "tool_call_id") if checked.get(key)}
  return {"role": role, "content": text, **kept}


def _is_truncated(row: Mapping[str, Any], items: Sequence[Any]) -> bool:
  """Returns whether the token limit ended the last text of the model."""
  response = row.get("response")
  statuses = [response.get("status")] if isinstance(response, dict) else []
  statuses += [item.get("status") for item in items[-1:] if isinstance(item, dict)]
  return "incomplete" in statuses


def _text_or_none(row: Mapping[str, Any], key: str) -> str | None:
  value = row.get(key)
  return value if isinstance(value, str) and value else None


def _others(row: Mapping[str, Any], style: Style) -> dict[str, Any]:
  """Returns the fields that may concern an environment."""
  own = ("responses_create_params", "response", "output", "messages", style.reward_key)
  return {k: v for k, v in row.items() if k not in own}
