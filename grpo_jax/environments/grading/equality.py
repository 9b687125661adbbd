r"""Decides with math-verify whether two answers are equal. Run it in a sandbox: it may never end.

math-verify's own time-outs (signals) are off; the process of a call is killed if it takes too
long. Answers are parsed as LaTeX only: the other parser evaluates Python expressions, which
`prepare` also disables in SymPy.

Numbers are compared more strictly than math-verify does, which rounds to six decimal places and
treats what is below 1e-15 as 0, so that all small numbers are equal. Here numbers are exact, with
one exception: a decimal equals a fraction, a root or the like if they differ by at most
`_TOLERANCE` of the larger; if the fraction is a finite decimal, as 1/8 is, the other one must be
that decimal, rounded. Symbols keep their case.
"""

import re
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from math_verify import grader, verify
from math_verify.parser import get_last_eq

from grpo_sandbox import expressions

_TOLERANCE = sympy.Rational(1, 10**6)  # relative.
_DIGITS = 120  # of numbers that are compared.
_ZERO = sympy.Rational(1, 10**100)  # relative size of what two equal numbers may differ by.

_NOTATION = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
_SYMBOLS = ConversionConfig(lowercase_symbols=False)
# The parser adds two numbers side by side, and leaves out primes and the subscripts of numbers.
_MISREAD = re.compile(r"(?<![\w.^])[\d.]+\s+\d|'|\d\s*_")
_COMPLEX = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")  # math-verify does not find it in 2i.
_INEQUALITIES = (sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)
_TRIGONOMETRY = ("\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc")


def equal(gold: str, answer: str, gold_is_percent: bool = False, is_percent: bool = False) -> bool:
  r"""Returns whether `answer` means the same as `gold`; False if one of them cannot be read.

  Args:
    gold: Reference answer without its unit, as `grading.notation` writes it.
    answer: Answer of the model, in the same form.
    gold_is_percent: Whether the unit of `gold` is percent: 50\% equals 50 and 0.5.
    is_percent: Whether the unit of `answer` is.
  """
  is_real = not any(_COMPLEX.search(t) or grader.should_treat_as_complex(t) for t in (gold, answer))
  wanted, found = _parse(gold, is_real), _parse(answer, is_real)
  if wanted is None or found is None:
    return False
  if _are_equal(wanted, found):
    return True
  are_numbers = isinstance(wanted, sympy.Expr) and isinstance(found, sympy.Expr)
  if gold_is_percent == is_percent or not are_numbers:
    return False
  if gold_is_percent:
    return _are_equal(wanted / 100, found)
  return _are_equal(wanted, found / 100)


def _are_equal(wanted: Any, found: Any) -> bool:
  if isinstance(wanted, sympy.MatrixBase) and 1 in wanted.shape:  # a vector, written as a point.
    if isinstance(found, sympy.Interval) and found.is_open:
      found = sympy.Tuple(found.start, found.end)
    if isinstance(found, sympy.Tuple) and len(found) == len(wanted):
      found = sympy.Matrix(*wanted.shape, list(found))
  if _are_inequalities(wanted) != _are_inequalities(found):
    wanted, found = _solutions(wanted), _solutions(found)
  return bool(verify(wanted, found, timeout_seconds=None, allow_set_relation_comp=True))


def _are_inequalities(value: Any) -> bool:
  """Returns whether a value is a list of inequalities of one unknown: x < 2, x > 5."""
  if not isinstance(value, sympy.FiniteSet) or len(value.free_symbols) != 1:
    return False
  return all(isinstance(each, _INEQUALITIES) for each in value.args)


def _solutions(value: Any) -> Any:
  """Returns the union of the solutions of a list of inequalities; other values as they are."""
  if not _are_inequalities(value):
    return value
  return sympy.Union(*(each.as_set() for each in value.args))


def _parse(answer: str, is_real: bool) -> Any:
  """Returns an answer as an object of SymPy, whose symbols are real or not; None: not readable."""
  if _MISREAD.search(answer):
    return None
  text = normalize_latex(answer, _NOTATION)
  for part in dict.fromkeys((text, get_last_eq(text))):  # of a = b = c, at least c.
    try:
      return latex2sympy(
        part,
        is_real=is_real,
        convert_degrees=any(name in part for name in _TRIGONOMETRY),
        normalization_config=None,
        conversion_config=_SYMBOLS,
      )
    except Exception:  # the parser raises this class itself.
      continue
  return None


def _same_number(left: Any, right: Any, *_: Any) -> bool:
  """Returns whether two expressions are the same number; takes the arguments of math-verify's."""
  if isinstance(left, sympy.MatrixBase) or isinstance(right, sympy.MatrixBase):
    left, right = grader.safe_sympy_doit(left), grader.safe_sympy_doit(right)
    if not isinstance(left, sympy.MatrixBase) or not isinstance(right, sympy.MatrixBase):
      return False
    pairs = zip(left.flat(), right.flat(), strict=False)
    return left.shape == right.shape and all(grader.sympy_expr_eq(*pair, 6, 15) for pair in pairs)
  percents = grader.get_pct_val(left, left), grader.get_pct_val(right, right)
  try:
    return _is_close(left, right) or (percents != (left, right) and _is_close(*percents))
  except Exception:  # not numbers.
    return False


def _is_close(left: Any, right: Any) -> bool:
  exact, other = _exact(left), _exact(right)
  if exact.free_symbols or other.free_symbols:
    return sympy.expand(exact - other) == 0
  exact, other = exact.doit(), other.doit()
  written = [
    number.is_Rational and bool(expression.atoms(sympy.Float))
    for number, expression in ((exact, left), (other, right))
  ]
  is_decimal = sum(written) == 1  # and the other one is not.
  if not exact.is_Rational or not other.is_Rational:
    return _differ_by_at_most(_TOLERANCE if is_decimal else _ZERO, exact, other)
  if exact == other or not is_decimal:
    return exact == other
  decimal, fraction = (exact, other) if written[0] else (other, exact)
  difference = abs(decimal - fraction)
  is_rounded = _places(fraction) is None or 2 * difference <= sympy.Rational(1, 10) ** _places(
    decimal
  )
  return is_rounded and difference <= _TOLERANCE * max(abs(decimal), abs(fraction))


def _differ_by_at_most(relative: Any, left: Any, right: Any) -> bool:
  """Compares real and imaginary parts; a part that is negligible beside the other counts as 0."""
  parts = [number.evalf(_DIGITS).as_real_imag() for number in (left, right)]
  size = max(abs(part) for number in parts for part in number)
  for one, other in zip(*parts, strict=True):
    largest = max(abs(one), abs(other))
    if largest > size * _ZERO and abs(one - other) > relative * largest:
      return False
  return bool(size.is_finite) and size > 0


def _exact(expression: Any) -> Any:
  """Returns an expression with its decimals as fractions."""
  decimals = expression.atoms(sympy.Float)
  return expression.xreplace({each: sympy.Rational(str(each)) for each in decimals})


def _places(number: Any) -> int | None:
  """Returns how many decimal places a fraction has; None: infinitely many."""
  below, counts = int(number.q), []
  for prime in (2, 5):
    counts.append(0)
    while below % prime == 0:
      below //= prime
      counts[-1] += 1
  return max(counts) if below == 1 else None


# One answer of each form: the parser's tables fill as it reads, and later processes inherit them.
_FORMS = (
  (r"\frac{1}{2}", "0.5"),
  (r"x^2 - 2x + \sqrt{3}", r"-2 \cdot x + x^{2} + \sqrt[2]{3}"),
  (r"( 3, \frac{\pi}{2})", r"(3, \pi/2)"),
  (r"(-\infty, 2] \cup [3, 5)", r"[3,5) \cup (-\infty,2]"),
  (r"\{1, 2\}", r"\{2, 1\}"),
  (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 4/2 \end{pmatrix}"),
  (r"x = 5\%", r"5^\circ"),
  (r"e^{i\theta} \log 2 \sin x", r"\sin(x) \log(2) e^{i \theta}"),
  (r"x \le 5, y > 3", "10^{-3}"),
)


def prepare() -> None:
  """Disables evaluation of strings in SymPy, replaces math-verify's comparison of numbers, and
  lets the parser read one answer of each form.

  Raises:
    AttributeError: The function that compares numbers is not in math-verify under this name.
  """
  expressions.guard("math_verify")
  assert callable(grader.sympy_numeric_eq)
  grader.sympy_numeric_eq = _same_number
  for gold, answer in _FORMS:
    equal(gold, answer)
