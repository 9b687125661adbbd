r"""Compares an answer with the gold answer as far as this needs no mathematics. Pure, linear.

What decides, in this order: the same text; a gold answer in words, which only the same words equal
(BCA is not ABC, and no product of letters); another unit (15 km, 15 m); decimals, which are equal
if they are the same number; sets, points and lists, which differ. What is left needs mathematics.
"""

import dataclasses
import functools
import re
from decimal import Decimal

from grpo_jax.environments.grading import notation, units

_BLANKS = re.compile(r"(?<!\w)\s+|\s+(?!\w)")  # "1 1/2" is not "11/2".
_INDIAN = re.compile(r"(?<![\w.,])\d{1,2}(?:,\d\d){1,10},\d{3}(?![\d,])")
_DECIMAL = re.compile(r"[-+]?\d{1,400}(?:\.\d{1,400})?")
_WORD = re.compile(r"[^\W\d_]+(?:['.-][^\W\d_]+)*\.?")
_PRODUCT = re.compile(r"[a-z]|(?![a-z]?[eiou])[a-z]{2}")  # "xy" is one; "no" and "BC" are not.
_FUNCTION = re.compile(r"(?:sqrt|sin|cos|tan|log|ln|exp|pi)\b")
_UNREAD = re.compile(r"\\text\{|(?<![\\A-Za-z{])[A-Za-z]{4}")  # 2 hours 30, and not a product.
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_ARTICLES = ("a", "an", "the")


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedAnswer:
  """An answer, read."""

  text: str  # in LaTeX, with its unit; without blanks that mean nothing.
  value: str  # in LaTeX, without the unit.
  unit: units.Unit
  words: tuple[str, ...]  # if it consists of words: these, otherwise empty.

  @property
  def decimal(self) -> Decimal | None:
    """The value, if it is written as a decimal."""
    digits = squeezed(self.value)  # "- 5" is one, too.
    return Decimal(digits) if _DECIMAL.fullmatch(digits) else None


def read(answer: str, *, is_number: bool = False) -> ParsedAnswer:
  """Reads an answer.

  Args:
    answer: Answer as it was written.
    is_number: Whether the gold answer is a number. Then 12,34,567 is one, too, and not a list;
      for units see `units.split`.
  """
  text = notation.latex(answer)
  if len(text) > notation.MAX_CHARS:
    return ParsedAnswer(text, text, units.Unit(), ())
  if is_number:
    text = _INDIAN.sub(lambda found: found[0].replace(",", ""), text)
  value, unit = units.split(text, is_number=is_number)
  return ParsedAnswer(squeezed(text), value, unit, _words(text))


read_gold = functools.lru_cache(maxsize=1024)(read)


def read_pair(gold_answer: str, answer: str) -> tuple[ParsedAnswer, ParsedAnswer]:
  """Reads the gold answer and an answer to the same question."""
  wanted = read_gold(gold_answer)
  return wanted, read(answer, is_number=wanted.decimal is not None)


def normalized(answer: str) -> str:
  """Removes what never changes the meaning of an answer: blanks, $, thousands separators, …"""
  return squeezed(notation.latex(answer))


def equal_as_text(gold_answer: str, answer: str) -> bool | None:
  """Compares two answers without mathematics.

  Returns:
    Whether they are equal; None if text alone does not decide.
  """
  return decided(*read_pair(gold_answer, answer))


def decided(wanted: ParsedAnswer, found: ParsedAnswer) -> bool | None:
  """Compares two answers that were read; see `equal_as_text`."""
  if wanted.text == found.text:
    return bool(wanted.text)
  if wanted.words:
    return wanted.words == found.words
  if not found.unit.agrees_with(wanted.unit):
    return False
  left, right = wanted.decimal, found.decimal
  if left is not None and right is not None:
    shift = 2 * (wanted.unit.is_percent - found.unit.is_percent)
    return left == right or (shift != 0 and left == right.scaleb(shift))
  if squeezed(wanted.value) == squeezed(found.value):
    return True
  if wanted.unit.base or _UNREAD.search(wanted.value) or _UNREAD.search(found.value):
    return _without_text(wanted.text) == _without_text(found.text)
  forms = (_form(wanted.value), _form(found.value))
  is_ordered = "=" in wanted.value
  if set(forms) == {"set", "point"} or (forms == ("list", "point") and not is_ordered):
    return False
  return None


def squeezed(text: str) -> str:
  """Removes the blanks that mean nothing in mathematics."""
  return _BLANKS.sub("", text)


def _without_text(answer: str) -> str:
  r"""Returns an answer with the words of \text{…} as plain ones: 2 hours 30 minutes."""
  return " ".join(_TEXT.sub(r" \1 ", answer).split())


def _words(text: str) -> tuple[str, ...]:
  """Returns the words of an answer that is not mathematics, in lower case; () for mathematics.

  The members of a list are sorted. A single letter keeps its case.
  """
  parts = [part.strip("()[]. ").split() for part in text.split(",")]
  if not all(map(_is_phrase, parts)):
    return ()
  phrases = [" ".join(each[1:] if each[0].lower() in _ARTICLES else each) for each in parts]
  return tuple(sorted(each if len(each) == 1 else each.casefold() for each in phrases))


def _is_phrase(words: list[str]) -> bool:
  """Returns whether words are a phrase or a capital letter, and not symbols."""
  if not words or _FUNCTION.match(words[0]) or not _WORD.fullmatch(words[0]):
    return False
  if len(words) == 1:
    return not _PRODUCT.fullmatch(words[0])
  are_words = all(_WORD.fullmatch(word) or word.isdigit() for word in words)
  return are_words and any(len(word) > 2 and word.isalpha() for word in words)


def _form(value: str) -> str:
  """Returns whether a value is a "set" in braces, a "point" (or interval) or a "list"."""
  depth, has_comma, closes_early = 0, False, False
  for token in re.finditer(r"\\?[{(\[]|\\?[})\]]|[,;]", value):
    if token[0] in ",;":
      has_comma = has_comma or depth == 0
    else:
      depth += 1 if token[0][-1] in "{([" else -1
      closes_early = closes_early or (depth == 0 and token.end() < len(value))
  if has_comma:
    return "list"
  if closes_early or "," not in value:
    return ""
  return "set" if value.startswith(r"\{") else "point" if value[0] in "([" else ""
