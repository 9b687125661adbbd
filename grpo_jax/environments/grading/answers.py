r"""Finds the answer in text. Pure, linear in the text.

The required form is part of the task: a completion without it has no answer.

  boxed        the content of the last \boxed{…} whose braces close
  hash         what follows the last #### on its line or the next one, as in GSM8K
  tag          the content of the last <answer>…</answer>
  last_number  the last number in the text, see numerals.py: lenient, rewards an answer in any form
  line         what follows the last "Answer:", in the text's last 300 characters (DAPO)
  any          boxed, otherwise hash, otherwise last_number
  raw          the whole text, stripped
"""

import re
from collections.abc import Callable

from grpo_jax.environments.grading import notation, numerals

_BRACES = re.compile(
  r"(?P<box>\\{1,2}(?:[Bb]oxed|fbox|framebox)\s*\{)"
  r"|\\{1,2}boxed\s+(?P<bare>[^\s{}\\$.,]+)|\\.|[{}]",
  re.DOTALL,
)
_HASH = re.compile(r"#{4,}[ \t]*(?:\r?\n[ \t]*)?([^\n#]*)")
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_ANSWER_LINE = re.compile(r"answer[*_]{0,3}(?:\s+is)?\s*[:：][*_]{0,3}\s*([^\n]+)", re.IGNORECASE)
_TAIL_CHARS = 300
_DELIMITERS = "$*_`~=-\\[]() \t\r"  # a line of these alone delimits a formula or a part.
_HEADING = re.compile(r"(?:\d+[.)]\s+)?[^\W\d_]{2}")
_STATED = re.compile(r"\banswer(?:\s+is)?[\s:*_]++(.*[^.\s])", re.IGNORECASE)
_EMPHASIS = re.compile(r"([*_`]{1,3})([^*_`]+)\1")


def boxed(text: str) -> str | None:
  r"""Returns the content of the last \boxed{…} (also \fbox, and \boxed 5) that closes."""
  starts: list[int | None] = []  # where the content of each open brace's box begins.
  last, found = -1, None
  for token in _BRACES.finditer(text):
    start: int | None = None
    if token["bare"]:
      last, found = token.start("bare"), token["bare"]
    elif token["box"]:
      starts.append(token.end())
    elif token[0] == "{":
      starts.append(None)
    elif token[0] == "}" and starts:
      start = starts.pop()
    if start is not None and start > last and not text[start : token.start()].isspace():
      content = text[start : token.start()]
      last, found = (start, content) if content else (last, found)
  return _stripped(found)


def hashed(text: str) -> str | None:
  """Returns what follows the last ####, or "the answer is" behind it, to the end of the line.

  If #### is alone on its line, the answer is on the next one; if that is empty, it does not count.
  """
  found = [content for content in map(_plain, _HASH.findall(text)) if content]
  return _stated(found[-1]) if found else None


def tagged(text: str) -> str | None:
  """Returns the content of the last <answer>…</answer>."""
  tags = list(_TAG.finditer(text))
  for opening, closing in zip(reversed(tags[:-1]), reversed(tags[1:]), strict=True):
    if closing[1] and not opening[1]:
      return _stripped(text[opening.end() : closing.start()])
  return None


def answer_line(text: str) -> str | None:
  """Returns what follows the last "Answer:" on its line, near the end of the text."""
  found = _ANSWER_LINE.findall(text[-_TAIL_CHARS:])
  return _plain(found[-1]) if found else None


def raw(text: str) -> str | None:
  """Returns the whole text, stripped."""
  return _stripped(text)


def anywhere(text: str) -> str | None:
  """Returns the first of these that is present: boxed, hash, last_number."""
  return boxed(text) or hashed(text) or numerals.last(text)


def gold(text: str) -> str:
  r"""Returns the answer of a reference solution: in \boxed{}, after ####, or all of it.

  Solutions with headings have words after ####, and more text below: their answer is the last line.
  """
  if found := boxed(text):
    return found
  lines = [line for line in text.splitlines() if line.strip(_DELIMITERS)]
  marked = [number for number, line in enumerate(lines) if "####" in line]
  if not marked:
    return text.strip()
  found = hashed(text)
  is_heading = not hashed(lines[marked[-1]]) or _HEADING.match(found or "") is not None
  if is_heading and marked[-1] < len(lines) - 1:
    return _stated(lines[-1]) or text.strip()
  return found or text.strip()


def _stripped(answer: str | None) -> str | None:
  return (answer or "").strip() or None


def _stated(line: str) -> str | None:
  """Returns what follows "answer is" or "Answer:" on a line, otherwise the line."""
  stated = _STATED.search(line)
  return _plain(stated[1] if stated else line)


def _plain(answer: str) -> str | None:
  """Returns an answer in the characters of ASCII, without emphasis of Markdown around it."""
  answer = notation.characters(answer).strip()
  emphasised = _EMPHASIS.fullmatch(answer)
  if emphasised:
    return _stripped(emphasised[2])
  return _stripped(answer if answer.startswith(("*", "_")) else answer.rstrip("*_"))


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
  "boxed": boxed,
  "hash": hashed,
  "tag": tagged,
  "last_number": numerals.last,
  "line": answer_line,
  "any": anywhere,
  "raw": raw,
}
