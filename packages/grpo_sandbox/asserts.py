"""Rewrites test code so that it can be counted: one assertion after another. Pure."""

import ast
import builtins

PASSED, FAILED, FAILURES = "__assert_passed__", "__assert_failed__", "__assert_failures__"


def counted(source: str) -> ast.Module:
  """Returns test code in which every assertion reports its result and the next one still runs.

      try: assert a
      except __assert_failures__: __assert_failed__("a")
      else: __assert_passed__()

  Assertions in the body of a `try` of the test itself are left unchanged: the test may rely on
  what they raise.

  Raises:
    SyntaxError: The source is not Python.
  """
  return ast.fix_missing_locations(_Counted().visit(ast.parse(source)))


class _Counted(ast.NodeTransformer):
  def visit_Assert(self, node: ast.Assert) -> ast.AST:
    report = _call(FAILED, ast.Constant(ast.unparse(node.test)[:200]))
    failures = ast.Name(FAILURES, ast.Load())
    return ast.Try([node], [ast.ExceptHandler(failures, None, [report])], [_call(PASSED)], [])

  def visit_Try(self, node: ast.Try) -> ast.AST:
    for part in (node.handlers, node.orelse, node.finalbody):
      part[:] = [self.visit(statement) for statement in part]
    return node


def does_anything(tree: ast.Module) -> bool:
  """Returns whether code calls something or asserts something."""
  return any(isinstance(node, (ast.Call, ast.Assert)) for node in ast.walk(tree))


def number(tree: ast.Module) -> int:
  """Returns the number of assertions in code."""
  return sum(isinstance(node, ast.Assert) for node in ast.walk(tree))


def free_names(tree: ast.Module) -> set[str]:
  """Returns the names that code reads, without built-in names."""
  read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
  return read - set(dir(builtins)) - {PASSED, FAILED, FAILURES}


def bound_names(source: str) -> set[str]:
  """Returns the names that code defines or assigns at its top level; none if it is not Python."""
  try:
    body = ast.parse(source).body
  except (SyntaxError, ValueError, RecursionError):
    return set()
  targets = [t for n in body if isinstance(n, ast.Assign) for t in n.targets]
  assigned = {t.id for t in targets if isinstance(t, ast.Name)}
  return assigned | {n.name for n in body if isinstance(n, _DEFINITIONS)}


def stubs(tree: ast.Module) -> set[str]:
  """Returns the names of functions and classes that are left to be written.

  These are functions whose body is a docstring, `pass`, `...` or `raise NotImplementedError`, and
  classes with such a method.
  """
  return {n.name for n in tree.body if isinstance(n, _DEFINITIONS) and _is_stub(n)}


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)


def _is_stub(node: ast.stmt) -> bool:
  if isinstance(node, ast.ClassDef):
    return any(_is_stub(child) for child in node.body if isinstance(child, _FUNCTIONS))
  assert isinstance(node, _FUNCTIONS)
  return all(_says_nothing(statement) for statement in node.body)


def _says_nothing(statement: ast.stmt) -> bool:
  if isinstance(statement, ast.Raise):
    return statement.exc is not None and "NotImplementedError" in ast.unparse(statement.exc)
  is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
  return is_constant or isinstance(statement, ast.Pass)


def _call(name: str, *args: ast.expr) -> ast.Expr:
  return ast.Expr(ast.Call(ast.Name(name, ast.Load()), list(args), []))
