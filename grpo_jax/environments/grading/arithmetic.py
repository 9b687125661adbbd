"""Evaluates an arithmetic expression that a model wrote, in bounded time and memory. Pure.

It uses Python's grammar, but allows only numbers, + - * / // % **, parentheses and a few
functions; nothing is ever executed. Whole numbers are exact, up to `_MAX_BITS` bits.
"""

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any, NoReturn

from grpo_sandbox import expressions
from grpo_sandbox.expressions import ExpressionError

Number = int | float

_MAX_CHARS = 300
_MAX_BITS = 1024  # size of a whole number, intermediate results included.
_MAX_DIGITS = 30  # places that `round` may be asked for.

# All that an expression may contain. A number directly before a letter is invalid in Python too.
_TOKENS = re.compile(
  r"(?:\s+|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])|[a-z]+[0-9]*(?!\w)|[-+*/%(),])*"
)


def evaluate(expression: str) -> Number:
  """Returns the value of an expression such as "(3 + 4) * 12 / 7".

  Raises:
    ExpressionError: The expression is not arithmetic, or its value is too large or not a number.
      The model sees the message.
  """
  expression = expression.strip()
  if not expression:
    raise ExpressionError("the expression is empty")
  if len(expression) > _MAX_CHARS:
    raise ExpressionError(f"the expression is longer than {_MAX_CHARS} characters")
  fitting = _TOKENS.match(expression)
  end = fitting.end() if fitting else 0
  if end < len(expression):
    raise ExpressionError(f"cannot read {expression[end : end + 10]!r}")
  try:
    tree = ast.parse(expression, mode="eval").body
    return _number(expressions.walked(tree, _unknown, _call, binary=_OPERATORS))
  except (SyntaxError, TypeError) as error:  # such as -(1, 2).
    raise ExpressionError("not an arithmetic expression") from error
  except (RecursionError, MemoryError) as error:
    raise ExpressionError("the expression is nested too deeply") from error


def shown(value: Number) -> str:
  """Returns the value as text: whole numbers in full, others in at most 12 digits."""
  if isinstance(value, float) and (not value.is_integer() or abs(value) >= 1e15):
    return f"{value:.12g}"
  return str(int(value))


def _number(value: Any) -> Number:
  """Returns a value if it is a number in bounds."""
  if isinstance(value, tuple):
    raise ExpressionError("unexpected ',': numbers are written without it")
  if isinstance(value, int):
    if value.bit_length() > _MAX_BITS:
      raise ExpressionError("the result is too large")
  elif not isinstance(value, float) or not math.isfinite(value):
    raise ExpressionError("the result is not a number")
  return value


def _bounded(function: Callable[..., Any]) -> Callable[..., Number]:
  """Returns a function that takes and gives numbers in bounds only."""

  def bounded(*values: Any) -> Number:
    try:
      return _number(function(*map(_number, values)))
    except ZeroDivisionError as error:
      raise ExpressionError("division by zero") from error
    except OverflowError as error:
      raise ExpressionError("the result is too large") from error

  return bounded


def _unknown(node: ast.Name) -> NoReturn:
  raise ExpressionError(f"{node.id!r} is not known; there are: {', '.join(_FUNCTIONS)}")


def _call(node: ast.Call) -> Number:
  if not isinstance(node.func, ast.Name) or node.keywords:
    raise ExpressionError("not an arithmetic expression")
  if node.func.id not in _FUNCTIONS:
    _unknown(node.func)
  values = (expressions.walked(each, _unknown, _call, binary=_OPERATORS) for each in node.args)
  try:
    return _bounded(_FUNCTIONS[node.func.id])(*values)
  except ExpressionError:
    raise
  except (TypeError, ValueError) as error:
    raise ExpressionError(f"{node.func.id} cannot be applied: {error}") from error


def _power(base: Number, exponent: Number) -> Number:
  """Returns base ** exponent; raises before computing it if it would be too large."""
  if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
    if base not in (-1, 0, 1) and exponent * (base.bit_length() - 1) > _MAX_BITS:
      raise ExpressionError("the result is too large")
    return base**exponent
  value = float(base) ** float(exponent)
  if isinstance(value, complex):
    raise ExpressionError("the result is not a real number")
  return value


def _rounded(value: Number, digits: Number = 0) -> Number:
  if not isinstance(digits, int) or abs(digits) > _MAX_DIGITS:
    raise ValueError(f"digits must be a whole number of at most {_MAX_DIGITS}")
  return round(value, digits) if digits else round(value)


def _root(value: Number) -> Number:
  if value < 0:
    raise ValueError("the root of a negative number is not real")
  root = math.isqrt(value) if isinstance(value, int) else 0
  return root if isinstance(value, int) and root * root == value else math.sqrt(value)


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
  ast.Add: _bounded(operator.add),
  ast.Sub: _bounded(operator.sub),
  ast.Mult: _bounded(operator.mul),
  ast.Div: _bounded(operator.truediv),
  ast.FloorDiv: _bounded(operator.floordiv),
  ast.Mod: _bounded(operator.mod),
  ast.Pow: _bounded(_power),
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
  "abs": abs,
  "ceil": math.ceil,
  "floor": math.floor,
  "max": lambda first, *more: max(first, *more) if more else first,
  "min": lambda first, *more: min(first, *more) if more else first,
  "round": _rounded,
  "sqrt": _root,
}
