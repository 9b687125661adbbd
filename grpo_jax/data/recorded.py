"""Reads one row of recorded attempts as a Recording: prompt, responses, and their quality. Pure.

Four kinds of rows (docs/offline.md), distinguished by their fields:

  ranked      {"prompt": …, "group": [{"response": …, "rank": 1}, …]}      one group per row
  recorded    {"input": …, "output": …, "reward": 1.0}                     one response per row
  nemo_gym    {"responses_create_params": …, "response": …, "reward": …}   one response per row
  rollouts    what a run writes to rollouts/step_NNNNNN.jsonl              one response per row

Prompts and responses are strings or chats. Responses in separate rows form a group
if their `Recording.key` is equal.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_jax.data import formats, recorded_calls
from grpo_jax.data.formats import RowError, field
from grpo_jax.data.options import REASONING, TOOLS, DataOptions, OfflineOptions

ASSISTANT = "assistant"


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedTurn:
  """Consecutive text of one side, after the prompt."""

  role: str  # "assistant": text of the model, learned from; others: text that it was given.
  text: str
  token_ids: tuple[int, ...] | None = None  # the sampled ids; None: the text is encoded.
  logprobs: tuple[float, ...] | None = None  # logprob of each sampled token, in nats.
  # The same as a chat message, if it has fields other than role and content, such as tool calls.
  message: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Response:
  """One answer to a prompt, with its reward or rank."""

  turns: tuple[RecordedTurn, ...]
  reward: float | None = None  # NaN: it could not be scored; None: the row has none.
  rank: float | None = None
  components: Mapping[str, float] = dataclasses.field(default_factory=dict)  # parts of reward.
  ranks: Mapping[str, float] = dataclasses.field(default_factory=dict)  # ranks by criterion.
  is_truncated: bool = False  # the token limit cut it: it has no stop id.
  weight: float = 1.0  # of the response in the loss.


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
  """The content of one row: a prompt and one or all of the responses to it."""

  messages: tuple[Mapping[str, Any], ...]  # the prompt; empty if only its tokens are known.
  responses: tuple[Response, ...]
  info: Mapping[str, Any]  # what an environment may need: the other fields of the row.
  key: str | None = None  # rows with the same key are one group; None: the row is a whole group.
  group_type: str | None = None  # metrics are reported separately for each type.
  prompt_ids: tuple[int, ...] | None = None  # ids of the prompt; None: the messages are encoded.
  prompt_text: str = ""  # text of `prompt_ids`.
  # tools that the model was offered, for the chat template.
  tools: tuple[recorded_calls.Tool, ...] = ()
  weight: float = 1.0  # of all responses of a group in the loss, besides their own.


@dataclasses.dataclass(frozen=True, slots=True)
class Style:
  """How rows are read."""

  prompt: formats.PromptStyle = formats.PromptStyle()  # system prompt and template.
  input_key: str | None = None  # field of the prompt; None: "prompt" of a group, else "input".
  output_key: str | None = None  # field of the response; None: "response" in a group, or "output".
  reward_key: str = OfflineOptions.reward_key
  type_key: str = OfflineOptions.type_key
  # Field of the tools that a row declares; "": none is read.
  tools_key: str = DataOptions.tools_key
  # NeMo Gym: keep thoughts in <think> tags before the answer, or "drop".
  reasoning: str = OfflineOptions.reasoning
  # "refuse": the chat template gets tools and calls, and a row whose tools it does not write is an
  # error. "ignore": declared tools are left out, and calls are text.
  tools: str = OfflineOptions.tools

  def __post_init__(self):
    for name, known in (("reasoning", REASONING), ("tools", TOOLS)):
      value = {"reasoning": self.reasoning, "tools": self.tools}[name]
      if value not in known:
        raise ValueError(f"{name} must be one of {known}, got {value!r}")


Reader = Callable[[Mapping[str, Any], str, Style], Recording]


def from_ranked(row: Mapping[str, Any], where: str, style: Style) -> Recording:
  """Reads a whole group: a prompt and a list of responses with ranks, or with rewards.

  Raises:
    RowError: Something is missing or has the wrong type, or only some responses have ranks.
  """
  input_key = style.input_key or "prompt"
  members = field(row, "group", where)
  if not isinstance(members, list) or not members:
    raise RowError(where, f"'group' must be a list of responses, got {type_name(members)}")
  responses = tuple(
    _member(member, f"{where}: response {i + 1}", style) for i, member in enumerate(members)
  )
  kinds = {(r.rank is not None, *sorted(r.ranks), r.reward is not None) for r in responses}
  if len(kinds) > 1:
    raise RowError(where, "all responses of a group need the same: a rank, or a reward")
  record = prompt_record(row, input_key, where, style, leave_out=("group",))
  return Recording(
    record.messages,
    responses,
    record.info,
    group_type=group_type(row, where, style),
    tools=tools_of(row, where, style),
    weight=formats.loss_multiplier(row, where),
  )


def from_recorded(row: Mapping[str, Any], where: str, style: Style) -> Recording:
  """Reads one response to a prompt, with its reward; rows of equal prompts are one group.

  A field `group_id` separates equal prompts that belong to different groups.
  """
  input_key, output_key = style.input_key or "input", style.output_key or "output"
  own = (output_key, style.reward_key, *_RESPONSE_FIELDS)
  record = prompt_record(row, input_key, where, style, leave_out=own)
  prompt = field(row, input_key, where)
  tools = tools_of(row, where, style)
  return Recording(
    record.messages,
    (_response(row, output_key, where, style),),
    record.info,
    key=key_of(row.get("group_id"), prompt, *tools),
    group_type=group_type(row, where, style),
    tools=tools,
  )


def from_rollouts(row: Mapping[str, Any], where: str, style: Style) -> Recording:
  """Reads a rollout of an earlier run: its tokens and logprobs, exactly as they were sampled."""
  ids = integers(field(row, "completion_ids", where), "'completion_ids'", where)
  mask = integers(field(row, "loss_mask", where), "'loss_mask'", where)
  behavior = field(row, "behavior_logprobs", where)
  if not (isinstance(behavior, list) and len(ids) == len(mask) == len(behavior)):
    raise RowError(where, "completion_ids, loss_mask and behavior_logprobs differ in length")
  reward = None
  if style.reward_key in row:
    value = row[style.reward_key]  # null: it could not be scored.
    reward = math.nan if value is None else number(value, repr(style.reward_key), where)
  response = Response(
    turns=_token_turns(ids, mask, behavior, where),
    reward=reward,
    components=_numbers(row, "reward_components", where, null=math.nan),
    is_truncated=row.get("finish_reason") == "length",
    weight=formats.loss_multiplier(row, where),
  )
  return Recording(
    messages=(),
    responses=(response,),
    info={k: row[k] for k in ("prompt_id", "environment", "step") if k in row},
    key=key_of(row.get("step"), row.get("prompt_id"), field(row, "prompt_ids", where)),
    group_type=group_type(row, where, style),
    prompt_ids=integers(row["prompt_ids"], "'prompt_ids'", where),
    prompt_text=str(row.get("prompt", "")),
  )


def prompt_record(
  row: Mapping[str, Any],
  input_key: str,
  where: str,
  style: Style,
  *,
  leave_out: Sequence[str] = (),
) -> formats.Record:
  """Reads the prompt of a row: a string (the user's message) or a chat."""
  with formats.option_names("data.input_key", row):
    value = field(row, input_key, where)
  check_input(value, repr(input_key), where)
  if isinstance(value, str):
    value = [{"role": "user", "content": value}]
  messages = conversation(value, repr(input_key), where, style)
  if messages[-1]["role"] == ASSISTANT:
    raise RowError(
      where, f"{input_key!r} ends with the assistant: the answer belongs in the response"
    )
  extra = {k: v for k, v in row.items() if k not in (input_key, "messages", *leave_out)}
  return formats.from_messages(
    {**extra, "messages": messages}, where, style.prompt, needs_user=False
  )


def check_input(value: Any, name: str, where: str) -> None:
  """Raises RowError for an empty prompt."""
  if value is None or value == [] or (isinstance(value, str) and not value.strip()):
    raise RowError(where, f"{name} is empty", kind=formats.EMPTY_INPUT)


def tools_of(row: Mapping[str, Any], where: str, style: Style) -> tuple[recorded_calls.Tool, ...]:
  """Returns the tools that a row declares; none if the style ignores them."""
  if style.tools == "ignore" or not style.tools_key:
    return ()
  return recorded_calls.tools_of(row.get(style.tools_key), where)


def conversation(value: Any, name: str, where: str, style: Style) -> list[dict[str, Any]]:
  """Reads a chat: a list of {"role", "content"}; contents in parts are joined.

  Messages of the assistant may have `tool_calls`. If the style ignores tools, calls become text.
  """
  if not isinstance(value, list) or not value:
    raise RowError(where, f"{name} must be a string or a list of messages, got {type_name(value)}")
  messages = []
  for i, message in enumerate(value):
    label = f"message {i + 1} of {name}"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
      raise RowError(where, f"{label} must be an object with role and content")
    if message["role"] not in formats.ROLES:
      known = ", ".join(formats.ROLES)
      raise RowError(where, f"{label} has role {message['role']!r}; there are: {known}")
    checked = recorded_calls.checked(message, label, where)
    content = text_of(field(checked, "content", where), f"content of {label}", where)
    messages.append(as_read({**checked, "content": content}, style))
  return recorded_calls.named(messages)


def as_read(message: Mapping[str, Any], style: Style) -> dict[str, Any]:
  """Returns a message without its thoughts, or with its calls as text, if the style says so."""
  made = dict(message)
  if style.reasoning == "drop":
    made.pop("reasoning_content", None)
  return recorded_calls.as_text(made) if style.tools == "ignore" and "tool_calls" in made else made


def turn_of(message: Mapping[str, Any]) -> RecordedTurn:
  """Returns a message of a conversation as a turn."""
  has_fields = message.keys() > {"role", "content"}
  text = str(recorded_calls.as_text(message)["content"])
  return RecordedTurn(message["role"], text, message=message if has_fields else None)


def text_of(content: Any, name: str, where: str) -> str:
  """Returns text that is given as a string, or as parts {"type": …, "text": …}."""
  if isinstance(content, list):
    texts: list[str] = []
    for part in content:
      text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
      if not isinstance(text, str):
        raise _not_text(part, name, where)
      texts.append(text)
    content = "".join(texts)
  if not isinstance(content, str):
    raise RowError(where, f"{name} must be a string, got {type_name(content)}")
  try:
    content.encode("utf-8")
  except UnicodeEncodeError as error:
    raise RowError(where, f"{name} holds half a surrogate pair at {error.start}") from error
  return content


def _not_text(part: Any, name: str, where: str) -> RowError:
  """Returns the error for a part of a content that is not text."""
  kind = str(part.get("type")) if isinstance(part, dict) else type_name(part)
  for media in ("image", "audio", "video", "file"):
    if media in kind:
      return RowError(
        where, f"{name} has a part of type {kind!r}: models read text", kind=f"with {media} parts"
      )
  return RowError(where, f"{name} has a part that is not text: {kind}")


def number(value: Any, name: str, where: str) -> float:
  """Returns a finite number."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    raise RowError(where, f"{name} must be a number, got {type_name(value)}")
  if not math.isfinite(value):
    raise RowError(where, f"{name} must be finite, got {value}")
  return float(value)


def integers(value: Any, name: str, where: str) -> tuple[int, ...]:
  """Returns a list of integers from 0."""
  if not isinstance(value, list) or not all(type(v) is int and v >= 0 for v in value):
    raise RowError(where, f"{name} must be a list of integers from 0")
  return tuple(value)


def log_probabilities(value: Any, name: str, where: str) -> tuple[float, ...]:
  """Returns a list of numbers of at most 0; values that rounding put above 0 become 0."""
  if not isinstance(value, list):
    raise RowError(where, f"{name} must be a list of logprobs, got {type_name(value)}")
  values = tuple(number(v, f"{name}[{i}]", where) for i, v in enumerate(value))
  if any(v > 1e-3 for v in values):
    raise RowError(where, f"{name} has a logprob above 0: {max(values)}")
  return tuple(min(v, 0.0) for v in values)


def group_type(row: Mapping[str, Any], where: str, style: Style) -> str | None:
  """Returns the row's group type; None if it has none."""
  value = row.get(style.type_key)
  if value is None or isinstance(value, str):
    return value or None
  raise RowError(where, f"{style.type_key!r} must be a string, got {type_name(value)}")


def key_of(*parts: Any) -> str:
  """Returns a key that is equal for the rows of one group."""
  return json.dumps(parts, sort_keys=True, ensure_ascii=False)


def type_name(value: Any) -> str:
  """Returns the type of a JSON value, for messages."""
  if value is None:
    return "null"
  names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
  return f"{'an empty ' if value in ([], '') else ''}{names.get(type(value), 'a number')}".replace(
    "empty a ", "empty "
  )


def _member(value: Any, where: str, style: Style) -> Response:
  """Reads one response of a group."""
  if not isinstance(value, dict):
    raise RowError(where, f"must be an object with response and rank, got {type_name(value)}")
  response = _response(value, style.output_key or "response", where, style)
  if response.rank is None and response.reward is None and not response.ranks:
    raise RowError(where, f"no key 'rank' and no {style.reward_key!r}; it has {', '.join(value)}")
  return response


def _response(row: Mapping[str, Any], key: str, where: str, style: Style) -> Response:
  """Reads the response in a field, and its quality and logprobs in the neighbouring fields."""
  with formats.option_names("data.output_key", row):
    value = field(row, key, where)
  ids, logprobs = row.get("token_ids"), row.get("logprobs")
  if isinstance(value, str):
    turn = RecordedTurn(
      ASSISTANT,
      text_of(value, repr(key), where),
      None if ids is None else integers(ids, "'token_ids'", where),
      None if logprobs is None else log_probabilities(logprobs, "'logprobs'", where),
    )
    if turn.token_ids is not None and turn.logprobs is not None:
      if len(turn.token_ids) != len(turn.logprobs):
        counts = f"{len(turn.token_ids)} token_ids and {len(turn.logprobs)} logprobs"
        raise RowError(where, f"one logprob per token is needed, got {counts}")
    turns = (turn,)
  elif ids is not None or logprobs is not None:
    raise RowError(where, f"token_ids and logprobs need {key!r} as a string, not as messages")
  else:
    if isinstance(value, dict):
      value = [value]
    messages = conversation(value, repr(key), where, style)
    if messages[0]["role"] != ASSISTANT or messages[-1]["role"] != ASSISTANT:
      raise RowError(where, f"a chat as {key!r} must begin and end with the assistant")
    turns = tuple(turn_of(message) for message in messages)
  reward, rank = row.get(style.reward_key), row.get("rank")
  return Response(
    turns=turns,
    reward=None if reward is None else number(reward, repr(style.reward_key), where),
    rank=None if rank is None else number(rank, "'rank'", where),
    components=_numbers(row, "reward_components", where),
    ranks=_numbers(row, "ranks", where),
    is_truncated=row.get("finish_reason") == "length",
    weight=formats.loss_multiplier(row, where),
  )


def _numbers(
  row: Mapping[str, Any], key: str, where: str, *, null: float | None = None
) -> dict[str, float]:
  """Reads an optional object of numbers; a JSON null becomes the value `null`, if given."""
  value = row.get(key)
  if value is None:
    return {}
  if not isinstance(value, dict):
    raise RowError(where, f"{key!r} must be an object of numbers, got {type_name(value)}")
  return {
    name: null if v is None and null is not None else number(v, f"{key}.{name}", where)
    for name, v in value.items()
  }


def _token_turns(
  ids: Sequence[int], mask: Sequence[int], behavior: Sequence[Any], where: str
) -> tuple[RecordedTurn, ...]:
  """Splits tokens into sampled parts and parts written in between."""
  turns, start = [], 0
  for end in range(1, len(ids) + 1):
    if end < len(ids) and bool(mask[end]) == bool(mask[start]):
      continue
    part = slice(start, end)
    known = log_probabilities(list(behavior[part]), "'behavior_logprobs'", where)
    sampled = bool(mask[start])
    turns.append(
      RecordedTurn(
        ASSISTANT if sampled else "environment", "", tuple(ids[part]), known if sampled else None
      )
    )
    start = end
  return tuple(turns)


_RESPONSE_FIELDS = ("rank", "ranks", "reward_components", "token_ids", "logprobs", "finish_reason")
