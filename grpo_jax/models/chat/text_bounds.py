"""Bounds the characters that a number of tokens can cover, by a tokenizer's description. Pure.

In byte-level and byte-fallback vocabularies a token covers no more characters than its own name
has: text that exceeds this bound can be rejected without encoding it.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_jax.models.chat import token_bytes

# If characters may vanish (stripped blanks, unknown words as one token), a text counts as too long
# only far above the bound.
UNSAFE_FACTOR = 16
UNSAFE_CHARACTERS = 1 << 20

# Composing makes one character of at most four (U+1F82 and the like).
_COMPOSED = 4
# Steps that drop no characters, and the factor by which they shorten a text at most.
_NORMALIZERS = {
  "ByteLevel": 1,
  "Lowercase": 1,
  "NFC": _COMPOSED,
  "NFD": 1,
  "NFKC": _COMPOSED,
  "NFKD": 1,
  "Prepend": 1,
}
_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace")
_SPLITS = ("Punctuation", "Split")  # drop nothing, unless they remove the separator.
_LONGEST_REPLACEMENT = 256  # characters that one character may become, over all steps.


def characters_per_token(description: Mapping[str, Any]) -> tuple[int, bool]:
  """Returns how many characters of text a token covers at most, and whether that is certain.

  Args:
    description: Content of a tokenizer.json.
  """
  longest = max((len(token) for token in _tokens(description)), default=1)
  shrinking = _shrinking(description.get("normalizer"))
  is_certain = (
    shrinking is not None
    and _keeps_all(description.get("pre_tokenizer"))
    and _covers_all(description)
    and not any(t.get("lstrip") or t.get("rstrip") for t in description.get("added_tokens") or ())
  )
  return max(1, math.ceil(longest * (shrinking or _COMPOSED))), is_certain


def longest_text(each: int, is_certain: bool, tokens: int) -> int:
  """Returns a number of characters that no text of at most `tokens` tokens exceeds.

  Args:
    each: Characters that a token covers; see `characters_per_token`.
    is_certain: Whether no characters are dropped.
    tokens: Largest number of tokens.
  """
  if is_certain:
    return each * tokens
  return max(UNSAFE_CHARACTERS, UNSAFE_FACTOR * each * tokens)


def growth(description: Mapping[str, Any]) -> int:
  """Returns the largest number of characters that the replacing steps can make of one.

  Several steps that each multiply the text could use up all memory.
  """
  grown = [1, 1]
  for side, part in enumerate(("normalizer", "decoder")):
    for step in _steps(description.get(part)):
      if step.get("type") == "Replace":
        grown[side] *= max(1, len(str(step.get("content", ""))))
      if step.get("type") == "Prepend":
        grown[side] *= 1 + len(str(step.get("prepend", "")))
  return max(grown)


def is_bomb(description: Mapping[str, Any]) -> bool:
  """Returns whether the replacing steps multiply text beyond any reasonable use."""
  return growth(description) > _LONGEST_REPLACEMENT


def _tokens(description: Mapping[str, Any]) -> Iterator[str]:
  vocab = description["model"].get("vocab") or ()
  yield from vocab if isinstance(vocab, Mapping) else (entry[0] for entry in vocab)
  yield from (token["content"] for token in description.get("added_tokens") or ())


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
  """Yields the steps of a normalizer or pre-tokenizer, those of sequences one by one."""
  if not isinstance(part, Mapping):
    return
  if part.get("type") == "Sequence":
    inner = (part.get(name) for name in ("normalizers", "pretokenizers", "decoders"))
    for each in next(filter(None, inner), ()):
      yield from _steps(each)
  else:
    yield part


def _shrinking(normalizer: Any) -> float | None:
  """Returns the factor by which the normalizer shortens text at most; None: it may drop some."""
  factor = 1.0
  for step in _steps(normalizer):
    if step.get("type") == "Replace":
      pattern, content = step.get("pattern") or {}, step.get("content") or ""
      if "String" not in pattern or not content:
        return None
      factor *= max(1.0, len(pattern["String"]) / len(content))
    elif step.get("type") in _NORMALIZERS:
      factor *= _NORMALIZERS[step["type"]]
    else:
      return None
  return factor


def _keeps_all(pre_tokenizer: Any) -> bool:
  """Returns whether every character ends up in some piece."""
  return all(
    step.get("type") in _PRE_TOKENIZERS
    or (step.get("type") in _SPLITS and step.get("behavior") != "Removed")
    for step in _steps(pre_tokenizer)
  )


def _covers_all(description: Mapping[str, Any]) -> bool:
  """Returns whether every piece, whatever it is, becomes tokens that cover all of it."""
  model = description["model"]
  vocab = model.get("vocab") or ()
  known = set(vocab) if isinstance(vocab, Mapping) else {entry[0] for entry in vocab}
  if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in known for byte in range(256)):
    return True
  if model.get("type") != "BPE":
    return False
  if model.get("unk_token") is not None and not model.get("fuse_unk"):
    return True
  parts = (*_steps(description.get("normalizer")), *_steps(description.get("pre_tokenizer")))
  is_byte_level = any(step.get("type") == "ByteLevel" for step in parts)
  return is_byte_level and token_bytes.letters().keys() <= known
