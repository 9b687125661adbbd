"""Turns a recorded response into tokens: those that were sampled, and those written in between."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from grpo_jax.data import formats, rendered_turns
from grpo_jax.data.formats import RowError
from grpo_jax.data.recorded import ASSISTANT, RecordedTurn, Response
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.models.chat.rendering import TemplateRefusal

# Ids of a part of a response, and the logprobs of its tokens if they are known.
Part = tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"] | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Encoder:
  """Encodes the responses of one row."""

  tokenizer: Tokenizer
  where: str  # place of the row.
  tools: Sequence[Mapping[str, Any]] = ()  # tools of the prompt.
  # Number of tokens that a response may have. Of a longer one, a few more are encoded. None: any.
  room: int | None = None

  def encode(
    self, response: Response
  ) -> tuple[Int[np.ndarray, " n"], Bool[np.ndarray, " n"], Float[np.ndarray, " n"] | None]:
    """Returns the ids of a response, a mask of the sampled ones, and their logprobs if known.

    Raises:
      RowError: The tokens or logprobs do not fit, or the chat template does not write a turn.
    """
    parts: list[Part] = []
    masks: list[np.ndarray] = []
    said: RecordedTurn | None = None  # the latest turn of the assistant.
    uses_template = _has_calls(response.turns) and rendered_turns.writes_calls(self.tokenizer)
    for is_sampled, run in itertools.groupby(response.turns, lambda turn: turn.role == ASSISTANT):
      turns = list(run)
      if is_sampled:
        said = turns[-1]
        for turn in turns:
          is_cut = response.is_truncated and turn is response.turns[-1]
          parts.append(self._sampled(turn, is_cut=is_cut, uses_template=uses_template))
      else:
        after = parts[-1][0] if parts else np.zeros(0, np.int32)
        calls = said.message.get("tool_calls", ()) if said and said.message else ()
        parts.append(self._written(turns, calls if uses_template else (), after=after))
      masks += [np.full(len(ids), is_sampled) for ids, _ in parts[len(masks) :]]
    known = [logprobs for _, logprobs in parts if logprobs is not None]
    joined = _joined(known, np.float32) if len(known) == len(parts) else None
    return _joined([ids for ids, _ in parts], np.int32), _joined(masks, np.bool_), joined

  def _sampled(self, turn: RecordedTurn, *, is_cut: bool, uses_template: bool) -> Part:
    """Returns ids and logprobs of a sampled turn; text gets the template's end of turn."""
    if turn.token_ids is not None:
      ids = checked(self.tokenizer, turn.token_ids, self.where)
      return ids, None if turn.logprobs is None else np.asarray(turn.logprobs, np.float32)
    needed = None if self.room is None else max(self.room, len(turn.logprobs or ()))
    if uses_template:
      message = turn.message or {"role": ASSISTANT, "content": turn.text}
      ids, has_end = self._by_template(message, needed)
      ids, has_end = (ids[:-1], False) if has_end and is_cut else (ids, has_end)
    else:
      ids = self.tokenizer.encode(self._shortened(turn.text, needed))
      has_end = bool(len(ids)) and int(ids[-1]) in self.tokenizer.stop_ids
    ended = ids if has_end or is_cut else np.append(ids, np.int32(self.tokenizer.end_id))
    if turn.logprobs is None:
      return ended, None
    for candidate in (ended, ids):  # the recorder may have left the end out.
      if len(candidate) == len(turn.logprobs):
        return candidate, np.asarray(turn.logprobs, np.float32)
    counts = f"{len(turn.logprobs)} logprobs for a response of {len(ended)} tokens"
    raise RowError(self.where, f"{counts}; record token_ids, too")

  def _by_template(
    self, message: Mapping[str, Any], needed: int | None
  ) -> tuple[Int[np.ndarray, " n"], bool]:
    """Encodes a turn as the chat template writes it; says whether it ends with a stop id."""
    longest = self._characters(needed)
    try:
      return rendered_turns.turn(self.tokenizer, message, tools=self.tools, max_characters=longest)
    except TemplateRefusal as error:
      reason = f"{error}; offline.tools='ignore' reads calls as text"
      raise RowError(self.where, reason, kind=formats.UNWRITTEN_TOOLS) from error

  def _written(
    self, turns: Sequence[RecordedTurn], calls: Sequence[Mapping[str, Any]], *, after: np.ndarray
  ) -> Part:
    """Returns the ids between two turns of the model. They are not learned from.

    Args:
      turns: Messages that the model reads, or their tokens.
      calls: Tool calls that some of them answer.
      after: Ids of the turn before.
    """
    if all(turn.token_ids is not None for turn in turns):
      every = [i for turn in turns for i in turn.token_ids or ()]
      ids = checked(self.tokenizer, every, self.where)
      return ids, np.zeros(len(ids), np.float32)
    messages = [
      {**(turn.message or {"role": turn.role}), "content": self._shortened(turn.text, self.room)}
      for turn in turns
    ]
    last = int(after[-1]) if len(after) else None
    try:
      ids = self.tokenizer.turn_ids(messages, after=last, tools=self.tools, calls=calls)
    except ValueError as error:  # the template cannot continue a conversation.
      raise RowError(self.where, f"a response of several turns: {error}") from error
    return ids, np.zeros(len(ids), np.float32)

  def _characters(self, tokens: int | None) -> int | None:
    """Returns a number of characters that have more than that many tokens; None: any number."""
    return None if tokens is None else self.tokenizer.longest_text(max(tokens, 0) + 1) + 1

  def _shortened(self, text: str, tokens: int | None) -> str:
    """Returns a string cut so that it still has more than that many tokens; None keeps it whole."""
    return text[: self._characters(tokens)]


def _has_calls(turns: Sequence[RecordedTurn]) -> bool:
  return any("tool_calls" in turn.message for turn in turns if turn.message is not None)


def checked(tokenizer: Tokenizer, ids: Sequence[int], where: str) -> Int[np.ndarray, " n"]:
  """Returns recorded ids; raises RowError for one that the tokenizer does not know."""
  highest = max(ids, default=0)
  if highest >= tokenizer.vocab_size:
    raise RowError(
      where,
      f"token id {highest} is outside the vocabulary of {tokenizer.vocab_size}: "
      "these tokens are from another model",
    )
  return np.asarray(ids, np.int32)


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
  """Joins arrays; a completion without tokens has none."""
  return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
