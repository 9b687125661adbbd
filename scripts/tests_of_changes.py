"""Prints the tests of what changed, for `make test CHANGED=1`.

Usage:
  python scripts/tests_of_changes.py          since this branch left origin/main, or, if there is
                                              no such branch, since the last commit
  python scripts/tests_of_changes.py COMMIT   since COMMIT

What is not committed counts in both cases.

The package is divided into rooms: modules and folders directly under grpo_jax, as well as configs,
kernels and each folder of packages. A change in a room is tested by the tests of that room and of
the rooms that import it directly, and by all other test files that import it, themselves or by a
helper. CI runs the rest.
Where it is not clear what a file has an effect on, as with pyproject.toml, everything is printed.
"""

import argparse
import ast
import functools
import pathlib
import subprocess
import sys
from collections.abc import Collection, Sequence

ROOT = pathlib.Path(__file__).parents[1]
EVERYTHING = ["tests"]
# They look at every file of the project, and take seconds.
OF_CODE = ["tests/test_architecture.py", "tests/test_errors.py", "tests/test_words.py"]
OF_TEXT = [
  *(f"tests/test_{name}.py" for name in ("architecture_page", "documentation", "documented_code")),
  *(f"tests/test_{name}.py" for name in ("guides", "site", "words")),
]
# Folder -> what is imported from it, and the folder of its tests.
TOP_LEVEL = {"configs": ("configs", "tests/config"), "kernels": ("grpo_kernels", "tests/kernels")}


def main(argv: Sequence[str]) -> int:
  """Prints the test files and folders, one a line; none if nothing changed."""
  parser = argparse.ArgumentParser(description="Prints the tests of what changed.")
  parser.add_argument("since", nargs="?", default="", help="commit to compare with")
  changed = changed_since(parser.parse_args(argv).since or _where_the_branch_began())
  if not changed:
    print("nothing changed", file=sys.stderr)
  for name in tests_of(changed):
    print(name)
  return 0


def changed_since(commit: str) -> list[str]:
  """Returns the files that differ from a commit, with new ones that git does not ignore.

  Raises:
    SystemExit: Git does not know the commit.
  """
  tracked = _git("diff", "-z", "--name-only", "--no-renames", commit, "--")
  return sorted({*tracked, *_git("ls-files", "-z", "--others", "--exclude-standard")})


def tests_of(changed: Sequence[str], root: pathlib.Path = ROOT) -> list[str]:
  """Returns the test files and folders for changed files.

  Args:
    changed: Paths relative to `root`. Files that are gone count, too.
    root: Folder of the project.

  Returns:
    Sorted paths relative to `root`, without those that lie in another of them; `EVERYTHING` where
    it is not clear what a changed file has an effect on.
  """
  imports = _of_tests(root)
  tests = [*imports]
  importing = lambda module: [path for path in tests if _uses(imports[path], module)]
  found: set[str] = set()
  for name in changed:
    path = pathlib.PurePosixPath(name)
    top, inner = path.parts[0], path.with_suffix("").parts
    if top == "grpo_jax" and len(path.parts) > 1 and path.suffix == ".py":
      found |= {*OF_CODE, *_of_room(inner[1], root), *importing(f"grpo_jax.{inner[1]}")}
    elif top in TOP_LEVEL:
      module, folder = TOP_LEVEL[top]
      found |= {*OF_CODE, folder, *importing(module)}
      found |= {f"tests/{room}" for room in _importers(module, root)}
    elif top == "packages" and len(path.parts) > 2:
      found |= {*OF_CODE, f"tests/packages/{inner[1]}", *importing(inner[1])}
      found |= {f"tests/{room}" for room in _importers(inner[1], root)}
    elif top == "tests" and _is_test(name):
      found |= {"tests/test_words.py", *([name] if (root / name).exists() else [])}
    elif top == "tests" and len(inner) > 1 and path.suffix == ".py" and path.stem != "conftest":
      found |= {*importing(".".join(inner)), *([f"tests/{inner[1]}"] if len(inner) > 2 else [])}
    elif top in ("scripts", "notebooks"):
      found |= {f"tests/{top}", *OF_CODE, *importing(".".join(inner))}
      found |= {test for test in tests if path.name in (root / test).read_text()}
    elif path.suffix in (".md", ".rst"):
      found |= {*OF_TEXT, *(test for test in tests if path.name in (root / test).read_text())}
    else:
      print(f"{name} may have an effect on everything", file=sys.stderr)
      return EVERYTHING
  folders = {name for name in found if not name.endswith(".py") and (root / name).is_dir()}
  files = {name for name in found if (root / name).is_file()}
  is_inside = lambda name: any(name.startswith(f"{folder}/") for folder in folders)
  return sorted({*folders, *(name for name in files if not is_inside(name))})


def _of_room(room: str, root: pathlib.Path) -> set[str]:
  """Returns the folders and files with the tests of a room, and of the rooms that import it."""
  names = {room, *_importers(f"grpo_jax.{room}", root)}
  return {f"tests/{name}" for name in names} | {f"tests/test_{name}.py" for name in names}


def _importers(module: str, root: pathlib.Path) -> set[str]:
  """Returns the rooms, and the packages as packages/NAME, that import something of a module."""
  found = set()
  for path in [*_files(root, "grpo_jax"), *_files(root, "packages")]:
    if _uses(_imports(root / path), module):
      top, room, *_ = pathlib.PurePosixPath(path).with_suffix("").parts
      found.add(room if top == "grpo_jax" else f"packages/{room}")
  return found


def _files(root: pathlib.Path, folder: str) -> list[str]:
  return sorted(path.relative_to(root).as_posix() for path in (root / folder).rglob("*.py"))


def _is_test(name: str) -> bool:
  path = pathlib.PurePosixPath(name)
  return path.name.startswith("test_") and path.suffix == ".py"


@functools.cache
def _imports(path: pathlib.Path) -> frozenset[str]:
  """Returns the dotted names of what a file imports, wherever in it.

  Raises:
    SystemExit: The file is not Python.
  """
  found: set[str] = set()
  try:
    tree = ast.parse(path.read_text(encoding="utf-8"))
  except SyntaxError as error:
    sys.exit(f"{path}:{error.lineno}: {error.msg}")
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      found |= {f"{node.module}.{alias.name}" for alias in node.names}
  return frozenset(found)


@functools.cache
def _of_tests(root: pathlib.Path) -> dict[str, frozenset[str]]:
  """Returns what each test file imports, with what the helpers in tests/ import that it uses.

  A helper in the same folder may be imported without the names of its folders.
  """
  imports = {path: _imports(root / path) for path in _files(root, "tests")}
  module = lambda path: path.removesuffix(".py").replace("/", ".")
  helpers = {module(path): path for path in imports if not _is_test(path)}

  def helpers_of(path: str) -> set[str]:
    folder = module(path.rpartition("/")[0])
    names = {*imports[path], *(f"{folder}.{name}" for name in imports[path])}
    return {name for name in helpers if _uses(names, name)}

  found = {}
  for path in filter(_is_test, imports):
    reached: set[str] = set()
    waiting = helpers_of(path)
    while waiting:
      reached |= waiting
      waiting = set[str]().union(*(helpers_of(helpers[name]) for name in waiting)) - reached
    found[path] = imports[path].union(reached, *(imports[helpers[name]] for name in reached))
  return found


def _uses(imported: Collection[str], module: str) -> bool:
  return any(name == module or name.startswith(f"{module}.") for name in imported)


def _where_the_branch_began() -> str:
  found = subprocess.run(
    ["git", "merge-base", "HEAD", "origin/main"], cwd=ROOT, capture_output=True, text=True
  )
  return found.stdout.strip() or "HEAD"


def _git(*words: str) -> list[str]:
  found = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
  if found.returncode:
    sys.exit(f"git {' '.join(words)}: {found.stderr.strip()}")
  return [name for name in found.stdout.split("\0") if name]  # with -z no name is quoted.


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
