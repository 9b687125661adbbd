"""The bytes that a token of a vocabulary writes, which may be part of a character. Pure."""

import re
from typing import Any


def of_token(backend: Any, token_id: int) -> bytes:
  """Returns the text of one token, special or not, in UTF-8.

  Args:
    backend: Tokenizer of transformers.
    token_id: Its id.
  """
  text = backend.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
  if "\ufffd" not in text:
    return text.encode()
  return _written(str(backend.convert_ids_to_tokens(token_id))) or text.encode()


def letters() -> dict[str, int]:
  """Returns the bytes by the printable letter that stands for each in GPT-2's vocabularies."""
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = (byte for byte in range(256) if byte not in printable)
  return {
    **{chr(byte): byte for byte in printable},
    **{chr(256 + n): b for n, b in enumerate(others)},
  }


def _written(token: str) -> bytes | None:
  """Returns the bytes that an entry of a vocabulary writes; None: it is not written in bytes."""
  if match := re.fullmatch("<0x([0-9A-F]{2})>", token):
    return bytes.fromhex(match[1])
  return bytes(_LETTERS[x] for x in token) if _LETTERS.keys() >= set(token) else None


_LETTERS = letters()
