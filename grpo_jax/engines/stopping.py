"""Where a completion ends: stop ids, stop strings, the limit. Pure."""

from collections.abc import Callable, Sequence

from grpo_jax.engines.base import SamplingParams
from grpo_jax.types import FinishReason

Decode = Callable[[Sequence[int]], str]


def find_stop_string(
  ids: Sequence[int], seen: int, strings: Sequence[str], decode: Decode
) -> tuple[int, str] | None:
  """Finds the first token that completes a stop string in the text.

  The text of a completion is decoded from its first token each time, because a token's text
  depends on its neighbours (a character may be spread over several tokens).

  Args:
    ids: Ids of the completion so far.
    seen: Number of tokens that are known not to complete a stop string.
    strings: Stop strings; the first of the list wins if one token completes several.
    decode: Function from ids to text.

  Returns:
    (number of tokens up to and including that token, the string); None if there is none.
  """
  if not strings or len(ids) <= seen:
    return None
  text = decode(ids)
  if not any(string in text for string in strings):
    return None
  for end in range(seen + 1, len(ids) + 1):
    text = decode(ids[:end])
    for string in strings:
      if string in text:
        return end, string
  return None


def check(
  ids: Sequence[int], seen: int, sampling: SamplingParams, decode: Decode | None
) -> tuple[int, FinishReason | None, int | str | None]:
  """Decides whether and where a completion ends.

  Args:
    ids: Ids of the completion so far; nothing follows a stop id or the token limit.
    seen: Number of tokens that were checked before.
    sampling: Sampling parameters with the limits.
    decode: Function from ids to text; needed for stop strings only.

  Returns:
    Tokens to keep; the reason, None if it continues; the stop id or string that was met. A stop
    string completed by the same token as a stop id counts as the id.
  """
  found = None
  if sampling.stop_strings and decode is not None:
    found = find_stop_string(ids, seen, sampling.stop_strings, decode)
  if len(ids) and ids[-1] in sampling.stop_ids and (found is None or found[0] == len(ids)):
    return len(ids), FinishReason.STOP, int(ids[-1])
  if found is not None:
    return found[0], FinishReason.STOP, found[1]
  if len(ids) >= sampling.max_tokens:
    return len(ids), FinishReason.LENGTH, None
  return len(ids), None, None
