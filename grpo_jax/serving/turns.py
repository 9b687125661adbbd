"""The turns of a session, found by the conversation, the tokens or the text that continues them."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from grpo_jax.engines.base import Generation
from grpo_jax.serving.prefixes import Kept, Prefixes
from grpo_jax.serving.requests import ChatRequest, Message


@dataclasses.dataclass(eq=False)
class SampledTurn:
  """One completion, and the turn that its prompt continues."""

  number: int  # of its request in the session, from 0.
  prompt_length: int  # tokens that the policy read.
  generation: Generation
  parent: "SampledTurn | None"  # its prompt begins with all tokens of this turn.
  depth: int  # number of turns before it in its chain.
  is_own: bool = False  # whether it is of the attempt's own conversation.
  messages: int = 0  # of the conversation, without the answer; 0: a text completion.
  reasoning: str = ""  # thoughts of the answer, if they were separated from its content.
  key: bytes = b""  # of the conversation with the answer.
  characters: int = 0  # of prompt and answer, if it is a text completion.
  kept: "Kept[SampledTurn] | None" = None  # its tokens in the session.
  # the characters of a text completion in the session.
  kept_text: "Kept[SampledTurn] | None" = None

  @property
  def token_ids(self) -> Int[np.ndarray, " tokens"]:
    """All tokens, prompt included, as they were read and sampled."""
    assert self.kept is not None
    return self.kept.whole

  @property
  def prompt_ids(self) -> Int[np.ndarray, " prompt"]:
    """All tokens that the policy read."""
    return self.token_ids[: self.prompt_length]

  def chain(self) -> "list[SampledTurn]":
    """Returns the turns from the first one to this one."""
    found, turn = [], self
    while turn is not None:
      found.append(turn)
      turn = turn.parent
    return found[::-1]

  def has_thoughts_of(self, messages: Sequence[Message]) -> bool:
    """Returns whether a client left the thoughts of the answers out, or as they were."""
    return all(
      messages[each.messages].get("reasoning_content", each.reasoning).strip() == each.reasoning
      for each in self.chain()
      if each.messages
    )


class TurnIndex:
  """The turns of a session."""

  def __init__(self, *, kept: int | None):
    """Makes an empty collection.

    Args:
      kept: Number of newest turns that are kept; None: all.
    """
    self.all: list[SampledTurn] = []
    self.by_key: dict[bytes, SampledTurn] = {}
    self._kept = kept
    self._tokens: Prefixes[SampledTurn] = Prefixes()
    self._texts: Prefixes[SampledTurn] = Prefixes()  # of text completions.

  def begun_by(self, ids: Int[np.ndarray, " prompt"]) -> SampledTurn | None:
    """Returns the longest turn whose tokens are a prefix of the prompt, if there is one."""
    return self._tokens.longest(ids)

  def begun_by_text(self, prompt: str) -> SampledTurn | None:
    """Returns the longest text completion whose text is a prefix of the prompt, if there is one."""
    return self._texts.longest(_code_points(prompt))

  def keep(
    self, turn: SampledTurn, prompt_ids: Int[np.ndarray, " prompt"], *, text: str = ""
  ) -> SampledTurn | None:
    """Keeps a turn that has been sampled.

    Args:
      turn: The turn.
      prompt_ids: All tokens that the policy read.
      text: Prompt and answer, if the request was for text; otherwise empty.

    Returns:
      The turn that is no longer kept, if there is one.
    """
    parent = turn.parent if self._kept is None else None  # others may be forgotten.
    known = 0 if parent is None else parent.prompt_length + len(parent.generation.token_ids)
    ids = np.concatenate([prompt_ids[known:], turn.generation.token_ids])
    turn.kept = self._tokens.add(ids, turn, after=None if parent is None else parent.kept)
    if text:
      turn.characters = len(text)
      turn.kept_text = self._texts.add(_code_points(text), turn)
    if turn.key:
      self.by_key[turn.key] = turn
    self.all.append(turn)
    if self._kept is None or len(self.all) <= self._kept:
      return None
    forgotten = self.all.pop(0)
    self._forget(forgotten)
    return forgotten

  def _forget(self, turn: SampledTurn) -> None:
    if self.by_key.get(turn.key) is turn:
      del self.by_key[turn.key]
    if turn.kept is not None:
      self._tokens.remove(turn.kept, turn)
    if turn.kept_text is not None:
      self._texts.remove(turn.kept_text, turn)


def keys_of(request: ChatRequest) -> list[bytes]:
  """Returns a key of the conversation before each message, and of the whole one."""
  return [*_each_key(request)]


def key_with_answer(key: bytes, content: str, calls: Sequence[Mapping[str, Any]]) -> bytes:
  """Returns the key of a conversation to which an answer was added."""
  return _key(key, _said(content, calls))


def _each_key(request: ChatRequest) -> Iterator[bytes]:
  key = _key(b"", request.tools)
  yield key
  for message in request.messages:
    is_said = message["role"] == "assistant"
    calls = message.get("tool_calls", ())
    key = _key(key, _said(message["content"], calls) if is_said else message)
    yield key


def _key(before: bytes, value: Any) -> bytes:
  content = json.dumps(value, sort_keys=True, default=str).encode()
  return hashlib.blake2b(before + content, digest_size=16).digest()


def _said(content: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns what identifies a message of the assistant: clients trim texts, and rename calls."""
  return {
    "role": "assistant",
    "content": content.strip(),
    "tool_calls": [call["function"] for call in calls],
  }


def _code_points(text: str) -> Int[np.ndarray, " characters"]:
  return np.frombuffer(text.encode("utf-32-le"), np.int32)
