r"""Decides whether an answer leaves something to compute that the gold answer does not. Pure.

An answer may be equal to the gold one because it is the problem itself: \int_0^1 x\,dx for 1/2,
\binom{10}{3} for 120, 48+24 for 72. The operations of both are therefore compared by kind: a kind
that occurs only in the answer is left undone.

  always counted  integrals, sums, products, limits, derivatives, determinants, binomials,
                  factorials, gcd and lcm, maximum and minimum, floor and ceiling, absolute values,
                  remainders, logarithms, trigonometry
  of numbers      addition, multiplication, division, powers: `48+24`, `12\cdot 13`, `2^{10}`,
                  where a symbol is not a number: `x+3`, `2\pi` and `(x+1)^2` are final
  for a number    roots, \pi and powers of e and i, if the gold answer consists of numbers alone;
                  fractions, if it consists of whole numbers alone (6/3 for 2)

These are final and not operations: signs, decimals, fractions (in lowest terms or not), mixed
numbers, percent, units, powers of ten and 3 \times 10^8; lists, points, intervals and sets of them;
and a computation with its result, 48+24=72. The reader takes one token at a time; text that is
longer than `_MAX_CHARS`, or has brackets nested deeper than `_MAX_DEPTH`, counts as left undone.
"""

import collections
import dataclasses
import enum
import functools
import re

from grpo_jax.environments.grading import notation

_MAX_DEPTH = 20
_MAX_CHARS = 10_000

_TOKEN = re.compile(
  r"(?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]\d+)?)|\\(?P<command>[A-Za-z]+|.)|(?P<word>[A-Za-z]+)|(?P<char>\S)",
  re.DOTALL,
)


def _kinds(**words: str) -> dict[str, str]:
  return {word: kind.replace("_", " ") for kind, some in words.items() for word in some.split()}


# LaTeX commands and words, with the kind of operation that they denote.
_NAMED = _kinds(
  integral="int iint iiint oint smallint integral integrate idotsint",
  sum="sum bigoplus",
  product="prod coprod product",
  limit="lim limsup liminf varlimsup varliminf limit",
  extremum="max min sup inf argmax argmin maximum minimum",
  common_divisor="gcd lcm hcf gcf lcd GCD LCM HCF GCF",
  determinant="det determinant vmatrix Vmatrix tr trace rank",
  floor="lfloor lceil floor ceil ceiling round",
  binomial="binom choose",
  remainder="bmod mod pmod pod",
  logarithm="log ln lg",
  derivative="nabla partial diff",
  absolute_value="abs",
  trigonometry="sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth cis arccot atan"
  " asin acos",
  exponential="exp",
  root="sqrt",
  intersection="cap bigcap",
  function="Gamma zeta Re Im deg sgn sign",
)
_DETERMINANTS = {"vmatrix", "Vmatrix", "det"}
_IGNORED = {"mathbb", "mathcal", "$", "#", "~"}  # others are removed by `notation.latex`.
_TEXT_COMMANDS = {"text", "operatorname", "mathop"}
_TIMES = {"cdot", "times", "*", "ast"}
_OVER = {"/", "div", "over"}
_SIGNS = {"+", "-", "pm", "mp"}
_RELATIONS = {"=", "<", ">", "le", "leq", "ge", "geq", "ne", "neq", "in", "approx", "lt", "gt"}
_SEPARATORS = {
  *(",", ";", ":", "=", "<", ">", "&", "\\", "|", "vert", "lvert", "rvert", "mid", "le", "leq"),
  *("ge", "geq", "ne", "neq", "in", "approx", "equiv", "to", "rightarrow", "implies", "cup", "or"),
  *("and", "cap", "setminus", "sim", "cong", "Rightarrow", "iff", "lor", "land", "vee", "wedge"),
  *("bmod", "mod", "pmod", "pod", "choose", "begin", "end", "notin", "colon", "lt", "gt", "is"),
}
_OPENING = {"(": ")", "[": "]", "{": "}", "lparen": "rparen"}
_CLOSING = {*_OPENING.values(), "rfloor", "rceil"}
_BARS = {"|", "vert", "lvert", "rvert"}
_UNITS = {"%", "circ", "degree", "infty", "prime", "."}
_DIFFERENTIALS = {"d", "partial"}
_OVER_DIGITS = {"overline", "bar", "dot", "overrightarrow", "vec", "hat"}


class _Value(enum.IntEnum):
  """The kind of value that a part has."""

  NOTHING = 0
  UNIT = 1
  INTEGER = 2
  DECIMAL = 3
  FRACTION = 4
  POWER_OF_TEN = 5
  NUMBER = 6  # number that is left to compute.
  CONSTANT = 7  # roots and pi, next to numbers.
  SYMBOL = 8


_NUMBERS = {
  *(_Value.INTEGER, _Value.DECIMAL, _Value.FRACTION, _Value.POWER_OF_TEN, _Value.NUMBER),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
  """The operations and the numbers in an answer."""

  kinds: frozenset[str]  # kinds of operations.
  has_only_numbers: bool  # has no symbols or roots, apart from units.
  has_only_integers: bool


def left_undone(gold: str, answer: str) -> frozenset[str]:
  """Returns the kinds of operations that an answer leaves undone and the gold answer does not.

  Args:
    gold: Reference answer, as it would appear in a box.
    answer: Answer of the model.
  """
  if len(answer) > _MAX_CHARS:
    return frozenset({"length"})
  wanted = _form_of_gold(gold)
  found = form(answer, letters_are_units=wanted.has_only_numbers)
  allowed = set(wanted.kinds)
  if not wanted.has_only_integers:
    allowed |= {"fraction"}
  if not wanted.has_only_numbers:
    allowed |= {"root", "pi", "exponential"}
  if wanted.kinds & {"exponential", "trigonometry"}:
    allowed |= {"exponential", "trigonometry"}
  return found.kinds - allowed


def form(text: str, *, letters_are_units: bool = False) -> Form:
  """Reads an answer.

  Args:
    text: Answer in LaTeX or plain text.
    letters_are_units: Whether letters are not symbols: "5 m", "x = 5".
  """
  reader = _Reader(_tokens(notation.latex(text)), letters_are_units)
  try:
    reader.read()
  except _TooDeepError:
    reader.kinds.add("nesting")
  values = reader.values
  return Form(
    frozenset(reader.kinds),
    has_only_numbers=not values & {_Value.CONSTANT, _Value.SYMBOL},
    has_only_integers=not values - {_Value.INTEGER, _Value.UNIT, _Value.NOTHING},
  )


@functools.lru_cache(maxsize=1024)
def _form_of_gold(gold: str) -> Form:
  return form(gold)


def _tokens(text: str) -> list[tuple[str, str]]:
  """Returns (group of _TOKEN, text) of every token that carries meaning."""
  found = [(m.lastgroup or "", m[m.lastgroup or 0]) for m in _TOKEN.finditer(text)]
  return [(kind, token) for kind, token in found if kind != "command" or token not in _IGNORED]


class _TooDeepError(Exception):
  """Brackets are nested too deeply."""


class _Reader:
  """Reads tokens from left to right, and collects kinds of operations."""

  def __init__(self, tokens: list[tuple[str, str]], letters_are_units: bool):
    self.kinds: set[str] = set()
    self.values: set[_Value] = set()  # values alone or after the last "=".
    self._tokens = tokens
    self._at = 0
    self._depth = 0
    self._words = 0  # number of \text groups and the like that are open.
    self._letters_are_units = letters_are_units
    self._letters: collections.Counter[str] = collections.Counter()
    self._environments = 0  # depth of matrices and the like.

  def read(self) -> None:
    """Reads all tokens."""
    settled = {"absolute value"} if sum(token in _BARS for _, token in self._tokens) > 1 else set()
    side: set[str] = set()
    separator = ""
    while self._at < len(self._tokens):
      self.kinds = set()
      first = self._at
      value = self._sum()
      is_name = self._at - first <= 4 and value is _Value.SYMBOL and not self.kinds  # x_1 = 5.
      is_result = self._letters_are_units and separator == "=" and value > _Value.UNIT
      side = self.kinds if is_result else side | self.kinds  # 48+24=72 is done.
      separator = self._peek()
      self.kinds = set()
      if separator == "=" and is_name:
        self.values.clear()
      if separator != "=":
        settled |= side
        side = set()
      self._separator()
      settled |= self.kinds
    self.kinds = settled | side

  def _peek(self, ahead: int = 0) -> str:
    place = self._at + ahead
    return self._tokens[place][1] if place < len(self._tokens) else ""

  def _ends(self) -> bool:
    token = self._peek()
    return not token or token in _SEPARATORS or token in _CLOSING

  def _separator(self) -> None:
    token = self._peek()
    if token in _NAMED:
      self.kinds.add(_NAMED[token])
    self._at += 1
    if token in ("begin", "end"):
      self._environment(token)
    elif token == "cup" and self._tokens[self._at - 2 : self._at - 1] == [("command", "}")]:
      self.kinds.add("union")  # the sets could be written as one.
    elif token and token in _CLOSING and self._peek() == "'":
      self._at += 1

  def _environment(self, token: str) -> None:
    r"""Reads the name of \begin or \end."""
    if self._peek() == "{":
      if self._peek(1) in _DETERMINANTS:
        self.kinds.add("determinant")
      while self._peek() not in ("}", ""):
        self._at += 1
      self._at += 1
    self._environments += token == "begin"
    if self._environments > 1:
      self.kinds.add("several matrices")
    if token == "end" and self._peek() == "^":
      place = 1
      while self._peek(place) in ("{", "-"):
        place += 1
      if self._peek(place).isdigit():
        self.kinds.add("power")

  def _group(self) -> _Value:
    """Reads up to and including a closing bracket."""
    found = []
    while self._peek():
      found.append(self._sum())
      if self._peek() in _CLOSING or not self._peek():
        break
      self._separator()
    self._at += 1
    present = [value for value in found if value]
    return present[0] if len(present) == 1 else _Value.SYMBOL if present else _Value.NOTHING

  def _sum(self) -> _Value:
    """Reads terms up to a separator or a closing bracket."""
    found: list[_Value] = []
    while True:
      self._signs()
      if self._ends():
        break
      found.append(self._term())
      if self._peek() not in _SIGNS:
        break
    if sum(value in _NUMBERS for value in found) > 1:
      self.kinds.add("addition")
    if not found:
      return _Value.NOTHING
    whole = found[0] if len(found) == 1 else max(_Value.NUMBER, *found)
    self.values.add(whole)
    return whole

  def _signs(self) -> None:
    """Reads the signs before a term; a single minus is not an operation."""
    negations = 0
    while self._peek() in _SIGNS:
      negations += self._peek() == "-"
      self._at += 1
    if negations and self._peek() in _OPENING:
      negations += self._peek(1) == "-"
    if negations > 1:  # -(-5).
      self.kinds.add("addition")

  def _term(self) -> _Value:
    """Reads factors."""
    number, other = _Value.NOTHING, _Value.NOTHING
    operation, follows_number = "", False
    while not self._ends() and self._peek() not in _SIGNS:
      token = self._peek()
      if token in _TIMES or token in _OVER:
        operation, self._at = token, self._at + 1
        continue
      before = self._at
      factor = self._factor()
      is_literal = self._tokens[before][0] == "number" or token in {"frac", *_OVER_DIGITS}
      if factor not in _NUMBERS:
        other = max(other, factor)
        follows_number = follows_number and factor <= _Value.UNIT
      elif number is _Value.NOTHING or not (operation or follows_number):
        number, follows_number = factor, True
      else:
        is_beside = not operation and is_literal and follows_number
        number = self._combined(number, operation, factor, is_beside)
        follows_number = True
      operation = ""
    return number if other <= _Value.UNIT and number else max(number, other)

  def _combined(self, left: _Value, operation: str, right: _Value, is_beside: bool) -> _Value:
    """Returns the value that two adjacent numbers of a term form."""
    whole = (_Value.INTEGER, _Value.DECIMAL)
    if operation in _OVER:
      return self._quotient(left, right)
    if operation in _TIMES and right is _Value.POWER_OF_TEN and left in whole:
      return _Value.DECIMAL
    if is_beside and left in whole and right is _Value.FRACTION:
      return right  # 4\frac{2}{3}.
    self.kinds.add("multiplication")
    return _Value.NUMBER

  def _quotient(self, above: _Value, below: _Value) -> _Value:
    if above in _NUMBERS and below in _NUMBERS:
      is_fraction = above is below is _Value.INTEGER
      self.kinds.add("fraction" if is_fraction else "division")
      return _Value.FRACTION if is_fraction else _Value.NUMBER
    return max(above, below)

  def _factor(self) -> _Value:
    """Reads one factor with its powers, subscripts and the like."""
    kind, token = self._tokens[self._at]
    letter = self._peek(2) if token in _TEXT_COMMANDS else token
    value = self._primary(kind, token)
    while True:
      after = self._peek()
      if after == "^":
        self._at += 1
        value = self._power(letter, value)
      elif after == "_":
        self._at += 1
        kinds, values = set(self.kinds), set(self.values)
        self._argument()
        self.kinds, self.values = kinds, values
      elif after == "!":
        self._at += 1
        if value > _Value.UNIT:
          self.kinds.add("factorial")
          value = _Value.SYMBOL
      elif after == "'":
        self._at += 1
        if token in _OPENING:
          self.kinds.add("derivative")
      else:
        return value

  def _power(self, base: str, value: _Value) -> _Value:
    exponent = self._argument()
    if base in ("e", "i"):
      self.kinds.add("exponential")
    if exponent <= _Value.UNIT or value <= _Value.UNIT:
      return value
    if value not in _NUMBERS or exponent not in _NUMBERS:
      return max(value, exponent)
    if base == "10" and exponent is _Value.INTEGER:
      return _Value.POWER_OF_TEN
    if exponent in (_Value.FRACTION, _Value.DECIMAL):
      self.kinds.add("root")
      return _Value.CONSTANT
    self.kinds.add("power")
    return _Value.NUMBER

  def _argument(self) -> _Value:
    """Reads what a command, a power or a subscript applies to."""
    while self._peek() in _SIGNS:
      self._at += 1
    if self._at >= len(self._tokens) or self._peek() in _CLOSING:
      return _Value.NOTHING
    return self._primary(*self._tokens[self._at])

  def _primary(self, kind: str, token: str) -> _Value:
    """Reads a single value, brackets or a command, from this token on."""
    self._depth += 1
    if self._depth > _MAX_DEPTH:
      raise _TooDeepError
    value = self._one(kind, token)
    self._depth -= 1
    return value

  def _one(self, kind: str, token: str) -> _Value:
    self._at += 1
    if kind == "number":
      value = _Value.DECIMAL if "." in token else _Value.INTEGER
      self.values.add(value)
      return value
    if token in _OPENING and kind in ("char", "command"):
      return self._group()
    if kind == "command" and token == "{":
      return self._group()
    if kind == "command":
      return self._command(token)
    if token in _UNITS:
      return self._unit(token)
    if kind == "word":
      return self._word(token)
    return _Value.UNIT

  def _unit(self, token: str) -> _Value:
    if token == "%":
      self.values.add(_Value.DECIMAL)
    return _Value.UNIT

  def _command(self, token: str) -> _Value:
    if token in _TEXT_COMMANDS:
      self._words += 1
      value = self._argument()
      self._words -= 1
      return value
    if token == "frac":
      return self._fraction()
    if token == "sqrt":
      return self._root()
    if token == "binom":
      self.kinds.add("binomial")
      self._argument()
      self._argument()
      return self._symbol()
    if token in _OVER_DIGITS:
      return self._argument()
    if token in _UNITS:
      return self._unit(token)
    if token == "pi":
      self.kinds.add("pi")
      return _Value.CONSTANT
    if token in _NAMED:
      self.kinds.add(_NAMED[token])
    return self._symbol()

  def _fraction(self) -> _Value:
    is_above = self._is_differential()
    above = self._short_argument()
    is_below = self._is_differential()
    below = self._short_argument()
    if is_above and is_below:
      self.kinds.add("derivative")
    return self._quotient(above, below)

  def _is_differential(self) -> bool:
    r"""Returns whether an argument begins with d, as in \frac{dy}{dx}."""
    place = 0
    while self._peek(place) == "{" or self._peek(place) in _TEXT_COMMANDS:
      place += 1
    token = self._peek(place)
    return token in _DIFFERENTIALS or (token[:1] == "d" and len(token) == 2)

  def _short_argument(self) -> _Value:
    r"""Reads an argument of \frac, whose digits do not need braces: \frac12."""
    kind, token = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
    if kind == "number" and len(token) > 1 and token.isdigit():
      self._tokens[self._at] = ("number", token[1:])
      return _Value.INTEGER
    return self._argument()

  def _root(self) -> _Value:
    if self._peek() == "[":
      self._at += 1
      self._group()
    value = self._argument()
    if value in _NUMBERS or value is _Value.CONSTANT:
      self.kinds.add("root")
      return _Value.CONSTANT
    return value

  def _word(self, token: str) -> _Value:
    after = self._peek()
    if token in _NAMED and (self._words or self._is_applied(after)):
      if token == "sqrt":
        return self._root()
      self.kinds.add(_NAMED[token])
      return self._symbol()
    if token == "pi":
      self.kinds.add("pi")
      return _Value.CONSTANT
    if self._words and len(token) > 1:
      return _Value.UNIT
    if self._letters_are_units and len(token) == 1 and after not in _RELATIONS:
      self._letters[token] += 1
      if self._letters[token] > 1:  # x+5-x.
        self.kinds.add("symbols")
    return self._symbol()

  def _is_applied(self, after: str) -> bool:
    return bool(after) and (after in ("(", "[", "{", "_", "^", "\\") or after[0].isdigit())

  def _symbol(self) -> _Value:
    return _Value.UNIT if self._letters_are_units else _Value.SYMBOL
