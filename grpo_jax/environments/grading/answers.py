r"""Finds the answer in text, and compares answers as text. Pure, linear in the text.

The required form is part of the task: a completion without it has no answer.

  boxed        the content of the last \boxed{…} whose braces close
  hash         what follows the last #### on its line, as in GSM8K
  tag          the content of the last <answer>…</answer>
  last_number  the last number in the text: lenient, rewards an answer in any form
  line         what follows the last "Answer:", in the text's last 300 characters (DAPO)
  any          boxed, otherwise hash, otherwise last_number
  raw          the whole text, stripped
"""

import re
from collections.abc import Callable

_BRACES = re.compile(
  r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\boxed\s+(?P<bare>[^\s{}\\$.,]+)|\\.|[{}]", re.DOTALL
)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_TAIL_CHARS = 300
_INTEGER = re.compile(r"[-+]?\d{1,100}(?:\.0+)?")
_WITH_UNIT = re.compile(r"(?P<number>[-+]?\d{1,100}(?:\.0+)?) (?P<words>[A-Za-z][A-Za-z ]{2,40})")
# Words behind a number that are not a unit of it.
_NO_UNITS = {
  *("hundred", "thousand", "million", "billion", "trillion", "dozen", "percent", "half", "halves"),
  *("third", "thirds", "quarter", "quarters", "mod", "and", "or", "not", "less", "more", "times"),
}

_REWRITES = (
  (re.compile(r"\\(?:left|right|displaystyle|,|!|;|:| )"), ""),
  (re.compile(r"\\[dtc]frac"), r"\\frac"),
  (re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}"), r"\1"),
  (re.compile(r"\\?\$"), ""),
  (re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))"), ""),
  (re.compile(r"(?<!\w)\s+|\s+(?!\w)|(?<=\s)\s+"), ""),  # "1 1/2" is not "11/2".
)


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
    if start is not None and start > last:
      last, found = start, text[start : token.start()]
  return _stripped(found)


def hashed(text: str) -> str | None:
  """Returns what follows the last #### on its line."""
  _, mark, after = text.rpartition("####")
  return _stripped(after.lstrip(" \t").partition("\n")[0]) if mark else None


def tagged(text: str) -> str | None:
  """Returns the content of the last <answer>…</answer>."""
  before, closing, _ = text.rpartition("</answer>")
  _, opening, content = before.rpartition("<answer>")
  return _stripped(content) if closing and opening else None


def last_number(text: str) -> str | None:
  """Returns the last number, with its commas, dollar sign, percent sign or fraction."""
  found = _NUMBER.findall(text)
  return found[-1].rstrip(",") if found else None


def answer_line(text: str) -> str | None:
  """Returns what follows the last "Answer:" on its line, near the end of the text."""
  found = _ANSWER_LINE.findall(text[-_TAIL_CHARS:])
  return _stripped(found[-1]) if found else None


def raw(text: str) -> str | None:
  """Returns the whole text, stripped."""
  return _stripped(text)


def anywhere(text: str) -> str | None:
  """Returns the first of these that is present: boxed, hash, last_number."""
  return boxed(text) or hashed(text) or last_number(text)


def gold(text: str) -> str:
  r"""Returns the answer of a reference solution: after ####, in \boxed{}, or all of it."""
  return hashed(text) or boxed(text) or text.strip()


def normalized(answer: str) -> str:
  """Removes what never changes the meaning of an answer: spaces, $, thousands separators, …"""
  for pattern, replacement in _REWRITES:
    answer = pattern.sub(replacement, answer)
  return answer.rstrip(".")


def equal_as_text(gold_answer: str, answer: str) -> bool | None:
  """Compares two answers without mathematics.

  Returns:
    True if they are the same text, False if both are whole numbers and differ (the answer
    may have a unit in words, "4 balls"), None if text alone does not decide.
  """
  left, right = normalized(gold_answer), normalized(answer)
  if left == right:
    return bool(left)
  right = _without_unit(right)
  if _INTEGER.fullmatch(left) and _INTEGER.fullmatch(right):
    return int(left.partition(".")[0]) == int(right.partition(".")[0])
  return None


def _without_unit(answer: str) -> str:
  match = _WITH_UNIT.fullmatch(answer)
  if match is None or _NO_UNITS & set(match["words"].lower().split()):
    return answer
  return match["number"]


def _stripped(answer: str | None) -> str | None:
  return (answer or "").strip() or None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
  "boxed": boxed,
  "hash": hashed,
  "tag": tagged,
  "last_number": last_number,
  "line": answer_line,
  "any": anywhere,
  "raw": raw,
}
