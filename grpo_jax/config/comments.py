"""Reads the comments of configuration files, by the field that they explain."""

import ast
import io
import pathlib
import sys
import tokenize
from collections.abc import Iterator

from grpo_jax.config import configuration

_HERE = pathlib.Path(__file__).parent  # holds the base configuration.


def read(file: pathlib.Path) -> dict[str, str]:
  """Returns the comment of every field that a configuration file assigns.

  The configuration files that it begins from come first, and their comments take precedence: files
  that it imports from its own folder (`import configs.base`), `grpo_jax.config.base`, any already
  imported module with a `get_config()`, and what it loads (`configuration.load("math_1b")`).

  Args:
    file: Python file with `get_config()`.

  Returns:
    Comments by the dotted name of a field or section, "" for one without a comment, in the order
    in which the fields are assigned.
  """
  return _read(file.resolve(), set())


def _read(file: pathlib.Path, seen: set[pathlib.Path]) -> dict[str, str]:
  if file in seen or not file.is_file():
    return {}
  seen.add(file)
  text = file.read_text(encoding="utf-8")
  tree = ast.parse(text)
  found: dict[str, str] = {}
  for neighbour in _imported(tree, file):
    found |= {n: c for n, c in _read(neighbour, seen).items() if not found.get(n)}
  comments = _comments(text)
  for name, node in _fields(tree):
    comment = comments.get(node.end_lineno or 0) or _above(comments, text, node.lineno)
    found[name] = found.get(name) or comment
  return found


def _imported(tree: ast.Module, file: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the configuration files that a file imports."""
  folders = {file.parent.name: file.parent, "grpo_jax.config": _HERE}
  for node in ast.walk(tree):
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "load":
      of = [str(each.value) for each in node.args[:1] if isinstance(each, ast.Constant)]
      yield from (configuration.place(name.partition(":")[0]) for name in of)
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and node.module:
      names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    for name in names:
      package, _, module = name.rpartition(".")
      loaded = sys.modules.get(name)
      if package in folders:
        yield folders[package] / f"{module}.py"
      elif loaded is not None and hasattr(loaded, "get_config") and loaded.__file__:
        yield pathlib.Path(loaded.__file__)


def _comments(text: str) -> dict[int, str]:
  """Returns the comments of a file by the numbers of their lines."""
  tokens = tokenize.generate_tokens(io.StringIO(text).readline)
  return {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}


def _above(comments: dict[int, str], text: str, line: int) -> str:
  """Returns the comment on the lines directly above a line."""
  lines = text.splitlines()
  found = []
  while (line := line - 1) in comments and lines[line - 1].lstrip().startswith("#"):
    found.insert(0, comments[line])
  return " ".join(found)


def _fields(tree: ast.Module) -> Iterator[tuple[str, ast.stmt | ast.keyword]]:
  """Yields the dotted names of fields assigned below a name `config`, and their nodes."""
  aliases = {"config": ""}
  assignments = (n for n in ast.walk(tree) if isinstance(n, ast.Assign | ast.AnnAssign))
  for node in sorted(assignments, key=lambda node: node.lineno):
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [name for target in targets if (name := _dotted(target, aliases))]
    for target in targets:
      if isinstance(target, ast.Name) and names:
        aliases[target.id] = names[0]
    for name in names:
      yield name, node
      for keyword in _keywords(node.value):
        yield f"{name}.{keyword.arg}", keyword


def _dotted(target: ast.expr, aliases: dict[str, str]) -> str:
  """Returns the name of the field that an assignment sets, or ""."""
  parts: list[str] = []
  while isinstance(target, ast.Attribute):
    parts.insert(0, target.attr)
    target = target.value
  if not parts or not isinstance(target, ast.Name) or target.id not in aliases:
    return ""
  return ".".join(filter(None, [aliases[target.id], *parts]))


def _keywords(value: ast.expr | None) -> list[ast.keyword]:
  """Returns the arguments of `dict(...)` and `ConfigDict(dict(...))`."""
  if not isinstance(value, ast.Call):
    return []
  inner = value.args[0] if value.args else value
  return [k for k in inner.keywords if k.arg] if isinstance(inner, ast.Call) else []
