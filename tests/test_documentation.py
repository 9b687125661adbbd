"""The commands of README and docs, as they would be copied: files, fields and modules exist."""

import ast
import pathlib
import re
import shlex
import subprocess

import pytest
from ml_collections import ConfigDict

import configs.base
from grpo_jax.config import command_line

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [
  ROOT / "README.md",
  *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "index.md"),
]
ACTIVATE = "source .venv/bin/activate"


def commands(page):
  """Yields the words of every shell command in the code blocks of a page."""
  for block in ("\n" + page.read_text()).split("\n```")[1::2]:
    language, _, text = block.partition("\n")
    if language not in ("", "bash", "sh"):
      continue
    for line in text.replace("\\\n", " ").splitlines():
      try:
        words = shlex.split(line, comments=True)
      except ValueError:  # Python, or a drawing.
        continue
      while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
      if words:
        yield words


ALL = [(page.name, words) for page in PAGES for words in commands(page)]
PYTHON = [(name, words) for name, words in ALL if words[0].rpartition("/")[2] == "python"]
TRAIN = [(name, words[3:]) for name, words in PYTHON if words[1:3] == ["-m", "grpo_jax.main"]]
# The config is a word of its own: grpo-jax train quickstart; the script for TPU VMs passes it on.
BY_NAME = [
  (name, words[2:] if words[0] == "grpo-jax" else words[1:])
  for name, words in ALL
  if words[:2] == ["grpo-jax", "train"] or words[0] == "scripts/start_tpu_vm.sh"
]
TRAIN += [(name, [f"--config={words[0]}", *words[1:]]) for name, words in BY_NAME if words]


@pytest.mark.parametrize("page, arguments", TRAIN, ids=lambda x: x if isinstance(x, str) else "")
def test_documented_runs_have_valid_arguments(page, arguments, monkeypatch):
  monkeypatch.chdir(ROOT)
  arguments = [a for a in arguments if a != "…"]
  if "--config=..." in arguments:
    arguments[arguments.index("--config=...")] = "--config=configs/base.py"
  try:
    command_line.parse(arguments)
  except command_line.HelpWanted:
    pass


def test_documented_scripts_and_modules_exist():
  assert len(TRAIN) > 10 and len(PYTHON) > len(TRAIN)
  for page, words in PYTHON:
    if words[1] == "-m":
      module = ROOT / words[2].replace(".", "/")
      assert not words[2].startswith("grpo") or module.with_suffix(".py").exists(), (page, words)
    elif words[1].endswith(".py"):
      assert (ROOT / words[1]).exists(), (page, words)


def test_readme_activates_the_environment_before_its_first_command_in_it():
  text = (ROOT / "README.md").read_text()
  first = min(text.index(f"\n{word}") for word in ("python -m", "pip install") if word in text)
  assert text.index(ACTIVATE) < first
  install = text[text.index("## Install") :]
  assert install.index("python3 -m venv .venv") < install.index("pip install")


def test_readme_leads_to_every_page_and_to_no_missing_one():
  text = (ROOT / "README.md").read_text()
  linked = {target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target}
  assert [target for target in linked if not (ROOT / target).exists()] == []
  assert {f"docs/{path.name}" for path in PAGES[1:]} - linked == set()


def test_the_first_screen_says_what_never_ran_and_what_a_run_needs():
  head = (ROOT / "README.md").read_text().split("## What you get")[0]
  for words in (
    "## Status",
    "never run",
    "any TPU",
    "one H200",
    "one machine",
    "memory",
    "disk",
    "time",
  ):
    assert words in head
  assert "on GPUs and on TPUs" not in head


def test_make_says_what_it_installs_before_it_does():
  lines = (ROOT / "Makefile").read_text().splitlines()
  installs = [i for i, line in enumerate(lines) if line.startswith("\t$(INSTALL)")]
  assert len(installs) == 4
  assert not [line for line in lines if re.search(r"install .*(--quiet|-q )", line)]
  for i in installs:
    assert any("Installing" in line and "GB" in line for line in lines[i - 2 : i]), lines[i]


def test_make_quickstart_ends_with_how_to_enter_the_environment():
  command = ["make", "-n", "--no-print-directory", "quickstart"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
  assert done.stdout.rstrip().splitlines()[-1].endswith(f'{ACTIVATE}"')


def test_make_compiles_what_it_installs_to_byte_code_on_all_cores():
  text = (ROOT / "Makefile").read_text()
  assert "--no-compile" in next(line for line in text.splitlines() if line.startswith("INSTALL ="))
  lines = text.splitlines()
  after = [lines[i + 1] for i, line in enumerate(lines) if line.startswith("\t$(INSTALL)")]
  assert after == ["\t$(BYTE_CODE)"] * 4


def marked_files(mark):
  """Returns the test files in whose syntax a mark occurs: pytest.mark.MARK."""
  of_mark = lambda node: isinstance(node, ast.Attribute) and node.attr == mark
  found = set()
  for path in (ROOT / "tests").rglob("test_*.py"):
    text = path.read_text()
    nodes = filter(of_mark, ast.walk(ast.parse(text))) if mark in text else ()
    if any(ast.unparse(node.value).endswith("mark") for node in nodes):
      found.add(str(path.relative_to(ROOT)))
  return found


@pytest.mark.parametrize("mark", ["slow", "sglang"])
def test_make_collects_the_files_that_hold_tests_of_a_mark_and_no_others(mark):
  def files(*arguments):
    command = ["make", "-n", f"test-{mark}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(re.findall(r"tests/\S+\.py", done.stdout))

  assert files() == marked_files(mark) != set()
  assert files("ARGS=tests/test_x.py") == {"tests/test_x.py"}


def fields(section, prefix=""):
  """Yields the dotted name of every field of a config."""
  for name, value in section.items(preserve_field_references=True):
    if isinstance(value, ConfigDict) and len(value):
      yield from fields(value, f"{prefix}{name}.")
    else:
      yield prefix + name


def test_every_field_of_a_config_is_documented():
  pages = "\n".join(page.read_text() for page in (*ROOT.glob("docs/*.md"), ROOT / "README.md"))
  words = set(re.findall(r"\w+", pages))
  names = list(fields(configs.base.get_config()))
  assert len(names) > 200
  assert [name for name in names if name.rpartition(".")[2] not in words] == []
  of_models = {name for name in names if name.startswith("model.") and "dtype" in name}
  assert of_models == {"model.compute_dtype", "model.product_dtype", "model.lora.base_dtype"}
  assert all(name in (ROOT / "docs" / "models.md").read_text() for name in of_models)


def test_nothing_is_installed_by_a_name_that_no_index_has():
  """pip would fail, or install what somebody else calls so."""
  pages = [*PAGES, *(ROOT / "notebooks").glob("*.py"), *(ROOT / "configs").glob("*.py")]
  bare = re.compile(
    r"""pip install [^\n`]*?['"]?(?<!/)grpo[-_]jax(\[[\w,-]*\])?['"]?(?! @)(?=[\s'"`]|$)"""
  )
  found = [(page.name, match[0]) for page in pages for match in bare.finditer(page.read_text())]
  assert found == []
