"""What `help()` says of the mathematics: every argument of the functions that take several."""

import ast
import pathlib
import re

RL = pathlib.Path(__file__).parents[2] / "grpo_jax" / "rl"
FEW = 2  # arguments that a sentence can explain.
ORDER = ["Args", "Returns", "Raises", "Reference"]


def public_functions():
  for path in sorted(RL.glob("*.py")):
    for node in ast.parse(path.read_text()).body:
      if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
        yield f"{path.stem}.{node.name}", node


def parameters(function):
  given = function.args
  return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def complaints(function):
  text = ast.get_docstring(function)
  if not text:
    yield "no docstring"
    return
  if len(parameters(function)) <= FEW:
    return
  sections = re.split(r"^(Args|Returns|Raises|Reference):$", text, flags=re.MULTILINE)
  by_name = dict(zip(sections[1::2], sections[2::2], strict=True))
  if "Returns" not in by_name and not text.startswith("Returns "):
    yield "does not say what it returns"
  explained = re.findall(r"^ *([*\w, ]+): \S", by_name.get("Args", ""), re.MULTILINE)
  names = {name.strip() for line in explained for name in line.split(",")}
  if missing := parameters(function) - names:
    yield f"does not explain {sorted(missing)}"
  if sections[1::2] != [name for name in ORDER if name in by_name]:
    yield f"the order of the sections is {ORDER}"


def test_public_functions_explain_their_arguments():
  assert [(name, what) for name, node in public_functions() for what in complaints(node)] == []
