"""What `help()` says of the mathematics: every argument of the functions that take several."""

import ast
import pathlib
import re

import pytest

RL = pathlib.Path(__file__).parents[2] / "grpo_jax" / "rl"
FEW = 2  # arguments that a sentence can explain.


def public_functions():
  for path in sorted(RL.glob("*.py")):
    for node in ast.parse(path.read_text()).body:
      if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
        yield pytest.param(node, id=f"{path.stem}.{node.name}")


def parameters(function):
  given = function.args
  return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


@pytest.mark.parametrize("function", list(public_functions()))
def test_public_functions_explain_their_arguments(function):
  text = ast.get_docstring(function)
  assert text, "no docstring"
  if len(parameters(function)) <= FEW:
    return
  sections = re.split(r"^(Args|Returns|Raises|Reference):$", text, flags=re.MULTILINE)
  by_name = dict(zip(sections[1::2], sections[2::2], strict=True))
  assert "Args" in by_name
  assert "Returns" in by_name or text.startswith("Returns ")
  explained = re.findall(r"^ *([*\w, ]+): \S", by_name["Args"], re.MULTILINE)
  names = {name.strip() for line in explained for name in line.split(",")}
  assert {*parameters(function)} <= names
  order = [name for name in sections[1::2]]
  assert order == sorted(order, key=["Args", "Returns", "Raises", "Reference"].index)
