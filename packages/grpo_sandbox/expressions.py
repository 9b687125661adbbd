"""Computes the value of an expression without running it: a replacement for `eval`.

Libraries that grade answers pass the text of a model to `eval`, some through SymPy's parsers.
`guard` substitutes the functions of this module. They walk the syntax tree and know values,
operators and mathematical functions. They know no attributes, no keyword arguments, no strings
other than the names of symbols, and no built-in functions with side effects.
"""

import ast
import operator
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
  ast.Pow: operator.pow,
  ast.LShift: operator.lshift,
  ast.RShift: operator.rshift,
  ast.BitOr: operator.or_,
  ast.BitXor: operator.xor,
  ast.BitAnd: operator.and_,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
  ast.UAdd: operator.pos,
  ast.USub: operator.neg,
  ast.Invert: operator.invert,
}
# Names of SymPy that its parser itself writes around the names and numbers of a text,
_TAKE_TEXT = ("Symbol", "Function", "Integer", "Float", "Rational")
# and functions that are not instances of its class of mathematical functions.
_FUNCTIONS = ("sqrt", "cbrt", "root", "real_root", "Rational", "Mod")
_BUILTINS = (abs, pow, round)


class ExpressionError(ValueError):
  """An expression that is more than values and operators."""


def value(source: str, *_: Any) -> Any:
  """Returns the value of literals and arithmetic; has the signature of `eval`.

  Raises:
    ExpressionError: The text is anything else.
    SyntaxError: The text is not an expression.
  """
  return walked(_tree(source), _no_name, _no_call, strings=True)


def sympy_value(source: str, local_dict: Mapping[str, Any], global_dict: Mapping[str, Any]) -> Any:
  """Returns the value of what SymPy's parser generated from text; signature of `eval_expr`.

  Raises:
    ExpressionError: There is more than numbers, symbols, operators and mathematical functions.
    SyntaxError: The text is not an expression.
  """
  import sympy

  def name(node: ast.Name) -> Any:
    found = local_dict[node.id] if node.id in local_dict else global_dict.get(node.id)
    if not isinstance(found, sympy.Basic):
      raise ExpressionError(f"{node.id!r} is not a value")
    return found

  def call(node: ast.Call) -> Any:
    if node.keywords:
      raise ExpressionError("a function takes no keywords here")
    if isinstance(node.func, ast.Call):  # Function('f')(x).
      function = call(node.func)
      if not isinstance(function, sympy.core.function.UndefinedFunction):
        raise ExpressionError("only functions can be called")
    elif isinstance(node.func, ast.Name):
      text = _text_argument(node)
      if text is not None:
        return getattr(sympy, node.func.id)(text)
      function = _function(global_dict.get(node.func.id))
    else:
      raise ExpressionError("only functions can be called")
    return function(*(walked(argument, name, call) for argument in node.args))

  return walked(_tree(source), name, call)


def walked(
  node: ast.expr,
  name: Callable[[ast.Name], Any],
  call: Callable[[ast.Call], Any],
  *,
  binary: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = _BINARY,
  strings: bool = False,
) -> Any:
  """Returns the value of a node of a syntax tree.

  Args:
    node: Node of the tree of an expression.
    name: Returns the value of a name.
    call: Returns the value of a call.
    binary: Functions of the operators with two operands; others are refused.
    strings: Whether strings are values.

  Raises:
    ExpressionError: There is more than values, operators, names and calls.
  """

  def each(nodes: list[ast.expr]) -> list[Any]:
    return [walked(inner, name, call, binary=binary, strings=strings) for inner in nodes]

  match node:
    case ast.Constant() if strings or not isinstance(node.value, str | bytes):
      return node.value
    case ast.UnaryOp() if type(node.op) in _UNARY:
      return _UNARY[type(node.op)](*each([node.operand]))
    case ast.BinOp() if type(node.op) in binary:
      left, right = each([node.left, node.right])
      if isinstance(left, str | bytes) or isinstance(right, str | bytes):
        raise ExpressionError("strings are not computed with")
      return binary[type(node.op)](left, right)
    case ast.Tuple():
      return tuple(each(node.elts))
    case ast.List():
      return each(node.elts)
    case ast.Set():
      return set(each(node.elts))
    case ast.Dict(keys=keys) if None not in keys:
      return dict(zip(each([k for k in keys if k]), each(node.values), strict=True))
    case ast.Name():
      return name(node)
    case ast.Call():
      return call(node)
  raise ExpressionError("not an arithmetic expression")


def guard(package: str) -> None:
  """Replaces `eval` by functions of this module in SymPy's parser and in a package.

  Args:
    package: Name of a package; only its loaded modules are changed.
  """
  from sympy.parsing import sympy_parser

  sympy_parser.eval_expr = sympy_value
  for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == package and isinstance(module, types.ModuleType):
      vars(module).update(eval=value, exec=_refuse, compile=_refuse, __import__=_refuse)


def _refuse(*_: Any, **__: Any) -> NoReturn:
  raise ExpressionError("text is not run here")


def _tree(source: str) -> ast.expr:
  if not isinstance(source, str):  # already compiled code.
    _refuse()
  return ast.parse(source.strip(), mode="eval").body


def _no_name(node: ast.Name) -> NoReturn:
  raise ExpressionError(f"{node.id!r} is not a value")


def _no_call(node: ast.Call) -> NoReturn:
  raise ExpressionError("functions are not called here")


def _text_argument(node: ast.Call) -> str | None:
  """Returns the text in a call such as Symbol('x') or Float('0.5'); None for other calls.

  Raises:
    ExpressionError: There are strings where none are allowed.
  """
  texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
  if not texts:
    return None
  function = node.func.id if isinstance(node.func, ast.Name) else ""
  if function not in _TAKE_TEXT or len(node.args) != 1:
    raise ExpressionError("a string where a number is expected")
  if function in ("Symbol", "Function") and not texts[0].isidentifier():
    raise ExpressionError(f"{texts[0]!r:.50} is not a name")
  return texts[0]


def _function(found: Any) -> Callable[..., Any]:
  """Returns a function if it may be called with values.

  Raises:
    ExpressionError: The function may not be called.
  """
  import sympy

  allowed = [*_BUILTINS, sympy.Integer, *(getattr(sympy, name) for name in _FUNCTIONS)]
  if any(found is each for each in allowed) or found in (sympy.Max, sympy.Min, sympy.Float):
    return found
  is_function = isinstance(found, sympy.core.function.FunctionClass)
  if not is_function or not found.__module__.startswith("sympy.functions."):
    raise ExpressionError(f"{getattr(found, '__name__', found)!s:.50} is not called here")
  return found
