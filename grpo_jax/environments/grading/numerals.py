r"""Finds the last number in text, as a person reads it. Pure, linear in the text.

sign       "-" in any of its spellings (−, –, －, …), with a blank if it follows =, (, "is" or the
           like, and "minus" or "negative"; not the dash of a range, a list item or a difference:
           3–5, 1914–1918, step-5, 7 - 5. After ± the number is ±5, which equals no number
digits     of all scripts; .5 and 1,234.50; groups of three with , {,} ' _ or a blank between
           them; 12,34,567; other commas separate numbers, so 3,5 is two numbers
exponents  1.5e-3, 2.5 \times 10^{4}, 10⁴
fractions  3/4, \frac{3}{4}, ¾, and with a whole number before them: 3 1/2 and 3½ are 3.5
percent    40% stays 40%; currency signs are left out
"""

import collections
import re
from fractions import Fraction

from grpo_jax.environments.grading import notation

# A character of a word or symbol that a number may be part of: x5. Scripts without blanks write
# words beside numbers: 答案是-5, 5米.
_SYMBOL = r"[^\W\u0e01-\u0e4f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3]"
# At most ten groups, so that no search takes more than linear time.
_GROUPED = (
  r"[1-9]\d{0,2}(?:(?:,\d{3}){1,10}|(?:(?:\{,\}|,?\\[,;:!])\d{3}){1,10}"
  r"|(?:[ ]\d{3}){1,10}(?![ ]\d)|(?:'\d{3}){1,10}|(?:_\d{3}){1,10}"
  r"|(?:,\d\d){1,10},\d{3})(?![\d_])"
)
_POWER_OF_TEN = (
  r"(?:(?P<times>[ ]?(?:×|·|\*|[xX]|\\times|\\cdot)[ ]?10)|(?<=10)(?<![\d.]10))[ ]?"
  r"(?:\^[ ]?(?:\{[ ]?)?(?P<power>[-+]?\d{1,4})(?:[ ]?\})?|(?P<raised>⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,5}))"
)
_NUMBER = re.compile(
  rf"(?<!{_SYMBOL})(?<!\.)(?:(?:\\?\$|[€£¥₹])[ ]?)?(?:"
  rf"(?P<whole>{_GROUPED}|\d+)(?P<part>\.\d+)?(?:[eE](?P<exponent>[-+]?\d{{1,4}})(?!{_SYMBOL}|\.)"
  rf"|{_POWER_OF_TEN}|(?P<over>/\d+)|[ ]?(?P<vulgar>{notation.VULGAR})"
  rf"|[ ](?P<above>\d{{1,3}})/(?P<below>\d{{1,3}})(?!{_SYMBOL}|/)"
  r"|[ ]?\\[dtc]?frac(?:\{(?P<top>\d{1,40})\}\{(?P<bottom>\d{1,40})\}|(?P<short>\d\d)))?"
  r"|(?P<bare>\.\d+)"
  rf"|(?P<alone>{notation.VULGAR})"
  r"|\\[dtc]?frac(?:\{(?P<upper>-?\d{1,40})\}\{(?P<lower>\d{1,40})\}|(?P<brief>\d\d))"
  r")(?P<percent>\\?%)?"
)
_MOST_DIGITS = 40  # of a number in front of a fraction; Python's int() has a limit.
_TAIL_CHARS = 2000  # in which the last number usually is.
_CONTEXT = 60  # characters before a number in which its sign is.
# What may be between a sign and its number: blanks, brackets, emphasis, commands around the number.
_SIGN = re.compile(
  r"(?P<sign>-+|\+|±|\\pm\b|\\mp\b|\b(?i:minus|negative)\b)"
  r"(?P<gap>(?:[ ({*_`$]|\\[,!;: ({]|\\[A-Za-z]{2,12}\{){0,4})\Z"
)
_OPERAND = re.compile(rf"(?:{_SYMBOL}|[.)\]}}%!°])\Z")
_OPERAND_OF_WORDS = re.compile(r"(?:[\d)\]}%!°]|(?<![A-Za-z])[a-z])[ ]*\Z")
_BEFORE_SIGN = re.compile(
  r"(?:[=<>≤≥≈≠(:\[{,|*×·÷/+&$~→]|\\(?:times|cdot|div|approx|sim|le|leq|ge|geq|ne|neq|to|pm|[(\[])"
  r"|\b(?i:is|are|be|was|were|equals?|gives|yields|becomes|get|minus)|[是为為得は])"
  r"[ ]{0,3}[*_`]{0,3}[ ]?\Z"
)


def last(text: str) -> str | None:
  """Returns the last number in ASCII: "-1234.5", "3/4", "1.5e-3", "40%"; None: no number."""
  for size in (_TAIL_CHARS, len(text)):
    tail = notation.characters(text[-size:])
    numbers = collections.deque(_NUMBER.finditer(tail), maxlen=1)
    if numbers and (numbers[0].start() > _CONTEXT or size >= len(text)):
      return _written(tail, numbers[0])
  return None


def _written(text: str, found: re.Match[str]) -> str:
  """Returns a number of the text in ASCII."""
  sign = _sign(text, found)
  value = _value(found)
  if value.startswith("-"):  # of the numerator.
    sign, value = {"": "-", "-": ""}.get(sign, sign), value[1:]
  return f"{sign}{value}{'%' if found['percent'] else ''}"


def _sign(text: str, found: re.Match[str]) -> str:
  """Returns the sign in front of a number: "-", "±" or nothing."""
  before = text[max(0, found.start() - _CONTEXT) : found.start()]
  match = _SIGN.search(before)
  if match is None or match["sign"] == "+":
    return ""
  sign, front = match["sign"], before[: match.start()]
  if sign in ("±", r"\pm", r"\mp"):
    return "±"
  if sign.lower() == "negative":
    return "-"
  if sign[0] == "-" and " " not in match["gap"]:
    return "" if _OPERAND.search(front) else "-"
  if sign[0] != "-":
    return "" if _OPERAND_OF_WORDS.search(front) else "-"
  if _BEFORE_SIGN.search(front):
    return "-"
  is_all = (
    not front.strip() and len(before) < _CONTEXT and not text[found.end() :].strip(" .*\n)}]$\\")
  )
  return "-" if is_all else ""


def _value(found: re.Match[str]) -> str:
  """Returns the number of a match without its sign."""
  whole = re.sub(r"\D", "", found["whole"] or "")
  decimal = f"{whole}{found['part'] or found['bare'] or ''}"
  if found["exponent"]:
    return f"{decimal}e{found['exponent']}"
  if power := found["power"] or (found["raised"] or "").translate(notation.RAISED):
    return _shifted(decimal if found["times"] else "1", int(power))
  above, below = _fraction(found)
  if not above or len(whole) > _MOST_DIGITS:
    return decimal + (found["over"] or "")
  is_mixed = whole and int(above) < int(below)
  if not is_mixed:
    return f"{above}/{below}"
  return _shown(Fraction(int(whole) * int(below) + int(above), int(below)))


def _fraction(found: re.Match[str]) -> tuple[str, str]:
  """Returns numerator and denominator of a match; ("", "") if it has no fraction."""
  if sign := found["vulgar"] or found["alone"]:
    return notation.fraction_of(sign)
  for above, below in (("above", "below"), ("top", "bottom"), ("upper", "lower")):
    if found[above]:
      return found[above], found[below]
  digits = found["short"] or found["brief"] or ""
  return digits[:1], digits[1:]


def _shown(value: Fraction) -> str:
  """Returns a fraction as a decimal if that ends, otherwise as a/b."""
  for places in range(1, 20):
    if 10**places % value.denominator == 0:
      digits = str(value.numerator * 10**places // value.denominator).zfill(places + 1)
      return f"{digits[:-places]}.{digits[-places:]}"
  return f"{value.numerator}/{value.denominator}"


def _shifted(decimal: str, power: int) -> str:
  """Returns decimal · 10^power, in digits if it is large and these are not too many."""
  if not 0 <= power <= 30:
    return f"{decimal}e{power}"
  whole, _, part = decimal.partition(".")
  part = part.ljust(power, "0")
  digits = (whole + part[:power]).lstrip("0") or "0"
  return f"{digits}.{part[power:]}" if part[power:].strip("0") else digits
