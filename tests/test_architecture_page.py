"""docs/architecture.md: every path and name on it exists, and its floors are those of the test."""

import ast
import functools
import pathlib
import re
import xml.etree.ElementTree

from tests.test_architecture import FLOORS, PACKAGE, ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
CODE = re.findall(r"`([^`\n]+)`", PAGE)
PATH = re.compile(r"\.?[\w.]+(/[\w.]+)*/?(:\w+)?")


def paths():
  """Returns the paths that the page names, in their order."""
  found = [text for text in CODE if PATH.fullmatch(text) and ("/" in text or ".py" in text)]
  made = {"config.json", "metrics.jsonl", "report.html", "train/ratio_mean"}  # by a run.
  return [text for text in dict.fromkeys(found) if text not in made]


def place(path):
  """Returns the file or folder that a path of the page means."""
  top = path.split("/")[0]
  in_root = top in (
    "grpo_jax",
    "kernels",
    "packages",
    "configs",
    "scripts",
    "tests",
    "docs",
    "notebooks",
    ".ci",
  )
  return (ROOT if in_root else PACKAGE) / path


@functools.cache
def names(path):
  """Returns the names that a module defines or imports at its top."""
  found = set()
  for node in ast.parse(path.read_text()).body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      found.add(node.name)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
      targets = node.targets if isinstance(node, ast.Assign) else [node.target]
      found |= {target.id for target in targets if isinstance(target, ast.Name)}
  return found


def test_what_the_page_names_exists():
  missing = []
  for text in paths():
    path, _, name = text.partition(":")
    if not place(path).exists() or (name and name not in names(place(path))):
      missing.append(text)
  assert missing == []


def test_other_pages_name_files_that_exist():
  top = r"(?:grpo_jax|kernels|packages|configs|scripts|tests|docs|constraints)"
  missing = []
  pages = {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {ROOT / "CHANGELOG.md"}
  for page in sorted(pages):
    for named in re.findall(rf"(?<![\w/.:-])({top}/[\w./-]*[a-z0-9/])(?![\w-])", page.read_text()):
      of_another = page.parent != ROOT and named.startswith("docs/")  # documentation of a library.
      if not of_another and not re.search(r"[A-Z]{4}", named) and not (ROOT / named).exists():
        missing.append(f"{page.name}: {named}")
  assert missing == []


def test_the_page_names_enough():
  assert len(paths()) > 80
  tasks = PAGE.split("## I want to …")[1].splitlines()[4:]
  assert len(tasks) > 15
  for row in tasks:
    assert re.search(r"\| [^|]+ \| [^|]+ \| `tests/[^|]+` \|$", row), row


def test_the_floors_are_those_of_the_code():
  floors: dict[int, set[str]] = {}
  for number, room in re.findall(r"^\| (\d*) +\| `(\w+)` \|", PAGE.replace("|  |", "|   |"), re.M):
    current = int(number) if number else min(floors)
    floors.setdefault(current, set()).add(room)
  assert [floors[number] for number in sorted(floors)] == FLOORS


def test_the_figure_names_rooms_that_exist():
  figure = xml.etree.ElementTree.parse(ROOT / "docs" / "images" / "architecture.svg")
  bold = [
    e.text for e in figure.iter("{http://www.w3.org/2000/svg}text") if e.get("fill") == "#223"
  ]
  assert len(bold) > 10
  rooms = set().union(*FLOORS)
  assert {text for text in bold if text not in rooms} == {"kernels/"}
  for text in bold:
    folder = PACKAGE / str(text)
    assert text == "kernels/" or folder.is_dir() or pathlib.Path(f"{folder}.py").exists()
