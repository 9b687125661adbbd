"""Runs the calls of a turn: every failure is an answer that the model reads, and is counted."""

import asyncio
import dataclasses
import functools
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_jax.environments.toolbox import functions, schemas
from grpo_jax.environments.toolbox.functions import Tool
from grpo_jax.errors import place_and_reason
from grpo_jax.models.chat.tool_calls import Malformed, Parsed, call
from grpo_jax.registry import nearest

_log = logging.getLogger(__name__)

_SHOWN = 500  # characters of an error's message.

# What can go wrong with a call, and the metric that counts it.
FAILURES = ("unknown_tools", "wrong_arguments", "tool_errors", "tool_timeouts")


class ToolError(Exception):
  """A tool's own answer that something went wrong; its message is what the model reads."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallLimits:
  """Limits of one call."""

  timeout_s: float = 20.0  # time of one call, in seconds.
  max_result_chars: int = 8192  # characters of a result; a longer one is cut, and says so.


class Toolbox:
  """The tools of a run."""

  def __init__(self, tools: Iterable[Tool], limits: CallLimits | None = None):
    """Collects the tools.

    Args:
      tools: Tools of different names.
      limits: Limits of one call; None: `CallLimits()`.

    Raises:
      ValueError: Two tools have the same name.
    """
    self.limits = limits or CallLimits()
    self._tools: dict[str, Tool] = {}
    for tool in tools:
      if tool.name in self._tools:
        raise ValueError(
          f"two tools have the name {tool.name!r}; those of an MCP server get other names by its"
          " setting `prefix`"
        )
      self._tools[tool.name] = tool

  @property
  def declarations(self) -> tuple[Mapping[str, Any], ...]:
    """What the chat template receives."""
    return tuple(tool.declaration for tool in self._tools.values())

  def metrics(self) -> dict[str, float]:
    """Returns how many calls hang now: they were given up, and block a thread until they return."""
    count = sum(tool.hanging.count() for tool in self._tools.values())
    return {"hanging_calls": float(count)} if count else {}

  async def answer(self, name: str, arguments: Mapping[str, Any], counts: Counter[str]) -> str:
    """Runs one call, and returns its result as text; "error: …" if it failed.

    Args:
      name: Name of the tool, as the model wrote it.
      arguments: Arguments, as the model wrote them.
      counts: Counters, to which this call is added.
    """
    counts["calls"] += 1
    failure, text = await self._outcome(name, arguments)
    if failure:
      counts["failed_calls"] += 1
      counts[failure] += 1
      text = f"error: {text}"
    text = text.encode("utf-8", "replace").decode()  # half surrogate pairs become "?".
    most = self.limits.max_result_chars
    if len(text) > most:
      counts["cut_results"] += 1
      text = f"{text[:most]}\n[cut: the first {most} of {len(text)} characters]"
    return text

  async def _outcome(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the failure, if there is one, and the text."""
    tool = self._tools.get(name)
    if tool is None:
      known = ", ".join(self._tools)
      return "unknown_tools", (
        f"there is no tool {name[:100]!r}{nearest(name[:100], self._tools)}; there are: {known}"
      )
    if refusal := tool.hanging.refusal(f"the tool {name!r}"):
      return "tool_errors", refusal
    clock = asyncio.timeout(self.limits.timeout_s)
    try:
      async with clock:
        wrong = await asyncio.to_thread(schemas.problem, arguments, tool.parameters)
        if wrong:
          return "wrong_arguments", f"{name}: {wrong}"
        return "", as_text(await tool.run(arguments))
    except functions.WrongArguments as error:
      return "wrong_arguments", f"{name}: {error}"[:_SHOWN]
    except ToolError as error:
      return "tool_errors", str(error)
    except asyncio.CancelledError:
      raise
    except BaseException as error:  # a tool may raise anything, SystemExit too.
      if clock.expired():
        return "tool_timeouts", f"{name}: no result within {self.limits.timeout_s:g} s"
      _report(name, place_and_reason(error)[:_SHOWN])  # the model does not see the place.
      return "tool_errors", f"{name}: {type(error).__name__}: {error}"[:_SHOWN]


@functools.lru_cache(maxsize=64)
def _report(name: str, reason: str) -> None:
  """Logs why a tool failed, each reason once."""
  _log.warning("the tool %s failed, and the model has read this as its answer: %s", name, reason)


def as_text(result: Any) -> str:
  """Returns a tool's result as the model reads it: a string unchanged, anything else as JSON."""
  if isinstance(result, str):
    return result
  if dataclasses.is_dataclass(result) and not isinstance(result, type):
    result = dataclasses.asdict(result)
  return json.dumps(result, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
  """Returns a JSON value for one that JSON lacks."""
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return dataclasses.asdict(value)
  for method in ("tolist", "model_dump"):  # of arrays and NumPy's numbers; of Pydantic's models.
    if callable(convert := getattr(value, method, None)):
      return convert()
  return list(value) if isinstance(value, set | frozenset) else str(value)


async def answers(
  toolbox: Toolbox, turn: Parsed, counts: Counter[str]
) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]]]:
  """Runs the calls of a turn in order.

  Args:
    toolbox: The tools.
    turn: Turn of the model, with calls or malformed calls.
    counts: Counters of the conversation.

  Returns:
    The messages that answer the turn, one for each call and each malformed call; and the calls of
    the turn as chat templates need them. If all calls are malformed, that is one without arguments,
    because some templates write no answer without a call.
  """
  messages = []
  for each in turn.calls:
    function = each["function"]
    text = await toolbox.answer(function["name"], function["arguments"], counts)
    messages.append(_message(each["id"], function["name"], text))
  calls = turn.calls or [_stand_in(each) for each in turn.malformed[:1]]
  for each in turn.malformed:
    counts["malformed_calls"] += 1
    name = each.name or _UNNAMED
    messages.append(_message(calls[-1]["id"], name, f"error: malformed call: {each.reason}"))
  return messages, calls


def _message(call_id: str, name: str, content: str) -> dict[str, Any]:
  return {"role": "tool", "name": name, "tool_call_id": call_id, "content": content}


def _stand_in(malformed: Malformed) -> dict[str, Any]:
  return {**call(malformed.name or _UNNAMED, {}), "id": "call99999"}


_UNNAMED = "unknown"
