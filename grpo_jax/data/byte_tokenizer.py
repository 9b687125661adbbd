"""A tokenizer of 256 bytes and three marks, for tests and dry runs. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from grpo_jax.data.tokenizer import PromptText

PAD, END, ROLE = 256, 257, 258
_MARKS = {PAD: "<pad>", END: "<end>", ROLE: "<role>"}


class ByteTokenizer:
  """One id per byte of UTF-8. A chat is `<role>user\\n…<end><role>assistant\\n`."""

  vocab_size = 259
  stop_ids = (END,)
  end_id = END
  pad_id = PAD
  tool_form = "hermes"

  def encode(self, text: str, *, begins: bool = False) -> Int[np.ndarray, " tokens"]:
    del begins  # there is no BOS.
    return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

  def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
    pieces = [
      bytes([i]) if i < PAD else b"" if skip_special else _MARKS[i].encode() for i in map(int, ids)
    ]
    return b"".join(pieces).decode("utf-8", errors="replace")

  def token_bytes(self, token_id: int) -> bytes:
    return bytes([token_id]) if token_id < PAD else _MARKS[token_id].encode()

  def render(
    self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
  ) -> str:
    turns = [
      f"{_MARKS[ROLE]}{m['role']}\n{m['content']}{_MARKS[END]}"
      for m in _with_tools(messages, tools)
    ]
    return "".join(turns) + f"{_MARKS[ROLE]}assistant\n"

  def apply_chat_template(
    self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
  ) -> Int[np.ndarray, " tokens"]:
    turns = [self._turn(m) for m in _with_tools(messages, tools)]
    return np.concatenate([*turns, self._marked(ROLE, "assistant\n")])

  def prompt(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    max_tokens: int,
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> PromptText:
    messages = _with_tools(messages, tools)
    text, bound = self.render(messages), self.longest_text(max_tokens)
    if len(text) <= bound:
      return PromptText(text, self.apply_chat_template(messages))
    too_many = f"{len(text)} characters, where {max_tokens} tokens have at most {bound}"
    cut = [{**message, "content": str(message["content"])[:bound]} for message in messages]
    return PromptText(text[:bound], self.apply_chat_template(cut), too_many=too_many)

  def longest_text(self, tokens: int) -> int:
    return max(map(len, _MARKS.values())) * tokens

  def turn_ids(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    after: int | None,
    tools: Sequence[Mapping[str, Any]] = (),
    calls: Sequence[Mapping[str, Any]] = (),
  ) -> Int[np.ndarray, " tokens"]:
    del tools, calls  # are not written between turns.
    closing = np.asarray([] if after == END else [END], np.int32)
    turns = [self._turn(message) for message in messages]
    return np.concatenate([closing, *turns, self._marked(ROLE, "assistant\n")])

  def _turn(self, message: Mapping[str, Any]) -> Int[np.ndarray, " tokens"]:
    text = self._marked(ROLE, f"{message['role']}\n{message['content']}")
    return np.append(text, np.int32(END))

  def _marked(self, mark: int, text: str) -> Int[np.ndarray, " tokens"]:
    return np.concatenate([np.asarray([mark], np.int32), self.encode(text)])


def _with_tools(
  messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
  """Returns the messages after one that lists the tools, if there are any."""
  return [{"role": "tools", "content": json.dumps([*tools])}, *messages] if tools else messages
