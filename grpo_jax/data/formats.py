"""Reads one row of a data file as a Record: strict, with file:line in every error. Pure.

A row is a JSON object. It keeps all its fields: those that are not part of the prompt
are passed to the environment unchanged, in `Prompt.info`.
"""

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from grpo_jax.errors import ExpectedFailure
from grpo_jax.models.chat.control_tokens import TrustedText
from grpo_jax.registry import nearest
from grpo_jax.values import names

_MAX_MULTIPLIER = 1_000_000  # of a row in the loss, whose sums are float32.
# What the fields that options name have, and their usual names.
_HAS = {"data.input_key": "problem", "data.output_key": "answer"}
_USUAL = {
  "data.input_key": ("problem", "question", "prompt", "input", "instruction", "query", "text"),
  "data.output_key": (
    *("expected_answer", "answer", "final_answer", "solution", "target", "label", "output"),
    *("ground_truth", "response", "completion"),
  ),
}
SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")


# Kinds of rows that cannot be used, in words that follow a count: "7 with an empty input".
EMPTY_INPUT = "with an empty input"
EMPTY_OUTPUT = "with an empty output"
NO_REWARD = "without a reward"
NO_ANSWER = "without an answer that can be checked"
UNWRITTEN_TOOLS = "with tools that the chat template does not write"


class RowError(ExpectedFailure, ValueError):
  """A row that cannot be used. Its message is "file:line: reason"."""

  OTHER = "broken"  # kind of the rows that no other kind names.

  def __init__(self, where: str, reason: str, *, kind: str = OTHER):
    """Makes the error.

    Args:
      where: Place of the row, "file:line".
      reason: Why it cannot be used.
      kind: Kind of the row in words that follow a count, such as `EMPTY_INPUT`.
    """
    super().__init__(f"{where}: {reason}")
    self.where = where
    self.reason = reason
    self.kind = kind


class MissingKey(RowError):
  """A row without a field that is needed."""

  remedy = ""  # option that names the field, in a sentence; "": none does.

  def __init__(self, where: str, key: str, row: Mapping[str, Any], *, missing: str = ""):
    """Makes the error.

    Args:
      where: Place of the row.
      key: Field that it does not have.
      row: Fields that it has.
      missing: Why there is no such nested field; "": the field is not nested.
    """
    keys = ", ".join(map(repr, row)) or "no keys at all"
    what = f"no {key!r}: {missing}" if missing else f"no key {key!r}{nearest(key, row)}"
    super().__init__(where, f"{what}; the row has {keys}", kind=f"without the field {key!r}")
    self._key = key

  def named_by(self, option: str, row: Mapping[str, Any], otherwise: str = "") -> "MissingKey":
    """Adds to the remedy that an option names the field.

    Args:
      option: "data.input_key" or "data.output_key".
      row: Fields of the row.
      otherwise: Further remedy.
    """
    others = {name for each in _USUAL if each != option for name in _USUAL[each]}
    close = names.nearest(self._key, [name for name in map(str, row) if name not in others])
    found = next((name for name in (*close, *_USUAL[option]) if name in row), None)
    example = f": set it to {found!r}" if found else ""
    self.remedy = f"{option} names the field of the {_HAS[option]}{example}{otherwise}"
    return self


class LeftOut(RowError):
  """A row that is left out and counted even if broken rows stop the run: the file is not at
  fault."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
  """A task as text: what the chat template gets, and what the environment gets."""

  messages: tuple[Mapping[str, Any], ...]
  info: Mapping[str, Any]
  tools: tuple[Mapping[str, Any], ...] = ()  # tools that the row declares, for the chat template.


@dataclasses.dataclass(frozen=True, slots=True)
class PromptStyle:
  """How the text of a row becomes messages."""

  input_key: str = "problem"
  output_key: str | None = "expected_answer"  # None: the rows have no answer.
  system_prompt: str | None = None
  prompt_template: str | None = None  # with {} for the problem.

  def __post_init__(self):
    if self.prompt_template is not None:
      fill_template(self.prompt_template, "")


@contextlib.contextmanager
def option_names(option: str, row: Mapping[str, Any], otherwise: str = "") -> Iterator[None]:
  """Adds the option that names a field to the error of a row that lacks it; see `MissingKey`."""
  try:
    yield
  except MissingKey as error:
    raise error.named_by(option, row, otherwise) from None


def parse_line(line: bytes, where: str) -> dict[str, Any]:
  """Reads one line of a JSONL file.

  Args:
    line: Bytes of the line; a leading byte order mark is allowed.
    where: Place of the line, "file:line", for errors.

  Raises:
    RowError: The line is not UTF-8, not JSON (NaN and Infinity are not allowed), or not an object.
  """
  try:
    text = line.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
  except UnicodeDecodeError as error:
    raise RowError(where, f"invalid UTF-8 at byte {error.start + 1} of the line") from error
  try:
    row = json.loads(text, parse_constant=refuse_constant)
  except json.JSONDecodeError as error:
    raise RowError(where, f"invalid JSON at column {error.colno}: {error.msg}") from error
  except (ValueError, RecursionError) as error:
    raise RowError(where, f"invalid JSON: {error}") from error
  if not isinstance(row, dict):
    raise RowError(where, f"a row must be a JSON object, got {_type_name(row)}")
  return row


def fill_template(template: str, problem: str) -> TrustedText:
  r"""Inserts the problem, which is data, where the template says {}.

  `{{}}` writes a literal `{}`, and the braces of a LaTeX command (`\boxed{}`) are kept. All
  other braces, of the template and of the problem, are kept as well.

  Raises:
    ValueError: The template has no {}.
  """
  pieces, place, data = [], 0, []
  for word in re.split(r"(\{\{\}\}|\\[A-Za-z]+\{\}|\{\})", template):
    piece = {"{{}}": "{}", "{}": problem}.get(word, word)
    if word == "{}":
      data.append((place, place + len(problem)))
    pieces.append(piece)
    place += len(piece)
  if not data:
    raise ValueError(f"a prompt template needs {{}} for the problem, got {template!r}")
  return TrustedText("".join(pieces), data)


def from_problem(row: Mapping[str, Any], where: str, style: PromptStyle) -> Record:
  """Reads `{"problem": …, "expected_answer": …}`, with the field names of the style."""
  with option_names("data.input_key", row):
    problem = _text(row, style.input_key, where)
  answer = {} if style.output_key is None else {"expected_answer": _answer(row, style, where)}
  extra = {k: v for k, v in row.items() if k not in (style.input_key, style.output_key)}
  return Record(
    messages=ask(problem, style),
    info=merged(extra, {"problem": problem, **answer}),
  )


def from_messages(
  row: Mapping[str, Any], where: str, style: PromptStyle, *, needs_user: bool = True
) -> Record:
  """Reads a chat, `{"messages": [{"role", "content"}, …]}`.

  If the last message is the assistant's, it is the expected answer and not part of the prompt;
  otherwise the answer is the field `output_key`, if the row has it. The prompt template
  is put around the user's last message.

  Args:
    row: Fields of the row.
    where: Place of the row, "file:line".
    style: Keys, system prompt and template of the prompt.
    needs_user: Whether a chat without a message of the user is broken; otherwise its last message
      is the problem.

  Raises:
    RowError: The row is not such a chat.
  """
  messages = _messages(row, where)
  expected: dict[str, Any] = {}
  if messages[-1]["role"] == "assistant":
    expected = {"expected_answer": messages.pop()["content"]}
  elif style.output_key is not None and style.output_key.partition(".")[0] in row:
    expected = {"expected_answer": _answer(row, style, where)}
  users = [i for i, m in enumerate(messages) if m["role"] == "user"]
  if messages and not users and not needs_user and style.prompt_template is None:
    users = [len(messages) - 1]
  if not users or messages[-1]["role"] == "assistant":
    raise RowError(where, "a chat needs a message of the user before the answer")
  problem = messages[users[-1]]["content"]
  messages[users[-1]] = {**messages[users[-1]], "content": _styled(problem, style)}
  extra = {k: v for k, v in row.items() if k not in ("messages", style.output_key)}
  return Record(
    messages=_with_system(messages, style),
    info=merged(extra, {"problem": problem, **expected}),
  )


def from_any(row: Mapping[str, Any], where: str, style: PromptStyle) -> Record:
  """Distinguishes a generated task, a chat (`messages`, and no input key) and a problem."""
  if {"entry", "task", "task_args"} <= row.keys():
    return from_task(row, where, style)
  is_chat = "messages" in row and style.input_key not in row
  return (from_messages if is_chat else from_problem)(row, where, style)


def from_task(row: Mapping[str, Any], where: str, style: PromptStyle) -> Record:
  """Reads a row of ReasoningGymSource. Its answer may be anything; the whole entry is passed to
  the environment, because the task's own scorer needs it."""
  entry = row["entry"]
  problem = _check_text(entry["question"], "the question", where)
  return Record(
    messages=ask(problem, style),
    info={"problem": problem, "expected_answer": entry["answer"], **row},
  )


def loss_multiplier(row: Mapping[str, Any], where: str) -> float:
  """Returns the row's `loss_multiplier`: 1 if it has none, 0 to learn nothing from it.

  Raises:
    RowError: The value is not a number, or not in the range.
  """
  value = row.get("loss_multiplier")
  if value is None:
    return 1.0
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if not is_number or not 0 <= value <= _MAX_MULTIPLIER:
    wanted = f"must be a number from 0 to {_MAX_MULTIPLIER:,}"
    raise RowError(where, f"'loss_multiplier' {wanted}, got {value!r:.40}")
  return float(value)


def lookup(row: Mapping[str, Any], key: str, where: str) -> Any:
  """Returns a field; "answers.text.0" refers to a field in nested objects and lists.

  Raises:
    RowError: The row has no such field.
  """
  if key in row or "." not in key:
    return field(row, key, where)
  found: Any = row
  for part in key.split("."):
    if isinstance(found, Mapping) and part in found:
      found = found[part]
    elif isinstance(found, Sequence) and part.isdigit() and int(part) < len(found):
      found = found[int(part)]
    else:
      reason = f"there is no {part!r} in {_type_name(found)}"
      raise MissingKey(where, key, row, missing=reason)
  return found


def merged(extra: Mapping[str, Any], standard: Mapping[str, Any]) -> dict[str, Any]:
  """Adds the standard names; an extra field of the same name moves to "row/NAME"."""
  moved = {f"row/{k}" if k in standard else k: v for k, v in extra.items()}
  return {**moved, **standard}


def ask(problem: str, style: PromptStyle) -> tuple[Mapping[str, Any], ...]:
  """Returns the messages that pose a problem: the system's, if any, and the user's."""
  return _with_system([{"role": "user", "content": _styled(problem, style)}], style)


def _styled(problem: str, style: PromptStyle) -> str:
  if style.prompt_template is None:
    return problem
  return fill_template(style.prompt_template, problem)


def _with_system(
  messages: Sequence[Mapping[str, Any]], style: PromptStyle
) -> tuple[Mapping[str, Any], ...]:
  """Puts the system prompt in front, unless the chat has its own."""
  if style.system_prompt is None or messages[0]["role"] in SYSTEM_ROLES:
    return tuple(messages)
  return ({"role": "system", "content": TrustedText(style.system_prompt)}, *messages)


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
  return as_text(lookup(row, key, where), repr(key), where)


def _answer(row: Mapping[str, Any], style: PromptStyle, where: str) -> str:
  """Returns the expected answer as text, see `as_answer`."""
  key = str(style.output_key)
  with option_names("data.output_key", row, "; '' means that the rows have none"):
    return as_answer(lookup(row, key, where), repr(key), where)


def as_answer(value: Any, name: str, where: str) -> str:
  """Returns an answer as text; a number in digits, without an exponent: 0.00001 and not 1e-05.

  Raises:
    RowError: The value is empty, or neither a string nor a finite number.
  """
  if isinstance(value, (int, float)) and not isinstance(value, bool):
    if not math.isfinite(value):
      raise RowError(where, f"{name} must be finite, got {value}")
    return format(Decimal(float.__repr__(value)), "f") if isinstance(value, float) else str(value)
  return as_text(value, name, where)


def as_text(value: Any, name: str, where: str) -> str:
  """Returns a string that is not empty; raises RowError for anything else."""
  if not isinstance(value, str):
    raise RowError(where, f"{name} must be a string, got {_type_name(value)}")
  return _check_text(value, name, where)


def field(row: Mapping[str, Any], key: str, where: str) -> Any:
  """Returns row[key]; if it is missing, raises MissingKey with the list of fields."""
  if key not in row:
    raise MissingKey(where, key, row)
  return row[key]


def _messages(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
  value = field(row, "messages", where)
  if not isinstance(value, list) or not value:
    raise RowError(where, f"'messages' must be a list of messages, got {_type_name(value)}")
  return [_message(m, f"message {i + 1}", where) for i, m in enumerate(value)]


def _message(value: Any, name: str, where: str) -> dict[str, Any]:
  if not isinstance(value, dict):
    raise RowError(where, f"{name} must be an object, got {_type_name(value)}")
  role = field(value, "role", f"{where}: {name}")
  if role not in ROLES:
    raise RowError(where, f"{name} has role {role!r}; there are: {', '.join(ROLES)}")
  has_calls = role == "assistant" and bool(value.get("tool_calls"))
  content = value.get("content") if has_calls else field(value, "content", f"{where}: {name}")
  if has_calls and content is None:
    content = ""
  if not isinstance(content, str):
    raise RowError(where, f"content of {name} must be a string, got {_type_name(content)}")
  if role in ("system", "tool") or has_calls:  # these may be empty.
    _check_unicode(content, f"content of {name}", where)
  else:
    _check_text(content, f"content of {name}", where)
  return {**value, "content": content}


def _check_text(value: str, name: str, where: str) -> str:
  if not value.strip():
    raise RowError(where, f"{name} is empty")
  return _check_unicode(value, name, where)


def _check_unicode(value: str, name: str, where: str) -> str:
  try:
    value.encode("utf-8")
  except UnicodeEncodeError as error:
    raise RowError(where, f"{name} holds half a surrogate pair at {error.start}") from error
  return value


def _type_name(value: Any) -> str:
  names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
  if value is None:
    return "null"
  if isinstance(value, list) and not value:
    return "an empty list"
  return names.get(type(value), "a number")


def refuse_constant(name: str) -> None:
  """Rejects NaN and Infinity, which Python's JSON reader would accept."""
  raise ValueError(f"{name} is not JSON")


RowReader = Callable[[Mapping[str, Any], str, PromptStyle], Record]
FORMATS: dict[str, RowReader] = {
  "auto": from_any,
  "problem": from_problem,
  "messages": from_messages,
  "task": from_task,
}
