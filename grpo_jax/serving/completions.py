"""What a client reads of a completion: its text, its thoughts, its tool calls. Pure."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.engines.base import Generation
from grpo_jax.models.chat import tool_calls
from grpo_jax.types import FinishReason

Finish = Literal["stop", "length", "tool_calls"]
ToolForm = str | tool_calls.CallParser


def parsed(
  generation: Generation,
  tokenizer: Tokenizer,
  *,
  form: ToolForm | None,
  tools: Sequence[Mapping[str, Any]],
  earlier: int,
  keeps_stop: bool,
) -> tuple[tool_calls.Parsed, Finish]:
  """Returns an answer with its tool calls, and why it ended; malformed calls are in its content.

  Args:
    generation: Completion.
    tokenizer: Tokenizer of the model.
    form: Form in which the model writes tool calls; None: they are not parsed.
    tools: Tools whose calls are parsed.
    earlier: Number of the assistant's messages before it.
    keeps_stop: Whether its text includes the stop string.
  """
  text = content(generation, tokenizer, keeps_stop=keeps_stop)
  found = tool_calls.Parsed(text)
  if tools and form is not None:
    end = -1 if isinstance(generation.matched_stop, int) else None
    whole = tokenizer.decode(generation.token_ids[:end], skip_special=False)
    first = earlier * tool_calls.MAX_CALLS  # as in an ordinary conversation.
    with_calls = tool_calls.parse(whole, form, tools=tools, first_id=first)
    if with_calls.malformed:
      found = dataclasses.replace(with_calls, content=text, reasoning="")
    elif with_calls.calls or with_calls.reasoning:
      found = with_calls
  is_cut = generation.finish_reason is FinishReason.LENGTH
  return found, "tool_calls" if found.calls and not is_cut else finish(generation)


def content(generation: Generation, tokenizer: Tokenizer, *, keeps_stop: bool) -> str:
  """Returns the text of a completion, up to the stop string that ended it."""
  found = tokenizer.decode(generation.token_ids, skip_special=True)
  stop = generation.matched_stop
  if isinstance(stop, str) and not keeps_stop and stop in found:
    return found[: found.index(stop)]
  return found


def message(found: tool_calls.Parsed) -> dict[str, Any]:
  """Returns the assistant's message of an answer."""
  made: dict[str, Any] = {"role": "assistant", "content": found.content}
  if found.reasoning:
    made["reasoning_content"] = found.reasoning
  if found.calls:
    made |= {"content": found.content or None, "tool_calls": list(found.calls)}
  if found.malformed:
    made["malformed_tool_calls"] = [each.reason for each in found.malformed]
  return made


def finish(generation: Generation) -> Finish:
  """Returns why a completion ended."""
  return "length" if generation.finish_reason is FinishReason.LENGTH else "stop"


def empty(name: str) -> Generation:
  """Returns the completion of a request for no tokens."""
  nothing = np.zeros(0, np.int32)
  return Generation(name, nothing, nothing.astype(np.float32), nothing, FinishReason.LENGTH)
