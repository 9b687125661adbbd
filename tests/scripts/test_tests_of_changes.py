"""A change is tested by its room, by the rooms that import it, and by what else imports it."""

import pathlib
import subprocess
import sys

import pytest

from scripts import tests_of_changes
from tests.test_architecture import FLOORS, imports_of

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.long
def test_a_room_is_tested_with_the_rooms_that_import_it():
  found = tests_of_changes.tests_of(["grpo_jax/rl/losses.py"])
  assert {"tests/rl", "tests/groups", "tests/learn", "tests/building"} <= {*found}
  by_a_helper = "tests/equivalence/test_layout_changes_nothing.py"
  assert {"tests/test_architecture.py", by_a_helper} <= {*found}
  assert not {"tests/report", "tests/packages/grpo_sandbox", "tests/http", "tests/notebooks"} & {
    *found
  }


@pytest.mark.long
def test_every_room_has_tests_that_import_it():
  """And no test file that imports a changed room is left out."""
  tests = sorted((ROOT / "tests").rglob("test_*.py"))
  used = {
    path.relative_to(ROOT).as_posix(): {".".join(name.split(".")[:2]) for name in imports_of(path)}
    for path in tests
  }
  rooms = set().union(*FLOORS) - {"__main__"}
  for room in {room for room in rooms if not room.startswith("grpo_")}:
    changed = next(
      path.relative_to(ROOT).as_posix()
      for path in (ROOT / "grpo_jax" / f"{room}.py", *(ROOT / "grpo_jax" / room).glob("*.py"))
      if path.exists()
    )
    found = tests_of_changes.tests_of([changed])
    covered = lambda name, found=found: any(name == f or name.startswith(f"{f}/") for f in found)
    wanted = [name for name, modules in used.items() if f"grpo_jax.{room}" in modules]
    assert wanted, f"no test imports {room}"
    assert [name for name in wanted if not covered(name)] == []


CASES = {
  "a test": (["tests/rl/test_losses.py"], {"tests/rl/test_losses.py", "tests/test_words.py"}),
  "a test that is gone": (["tests/rl/test_gone.py"], {"tests/test_words.py"}),
  "a helper": (["tests/engines/tiny.py"], {"tests/engines", "tests/models/test_rounding.py"}),
  "a page": (["docs/sandbox.md"], {"tests/test_documentation.py", "tests/test_site.py"}),
  "a config": (
    ["configs/math_1b.py"],
    {"tests/config", "tests/runs/test_train.py"},
  ),
  "a kernel": (["kernels/grpo_kernels/tuning.py"], {"tests/kernels", "tests/learn"}),
  "a package": (
    ["packages/grpo_sandbox/launch.py"],
    {"tests/packages/grpo_sandbox", "tests/environments", "tests/commands"},
  ),
  "a script": (["scripts/staleness.py"], {"tests/scripts", "tests/test_architecture.py"}),
  "a notebook": (["notebooks/quickstart.py"], {"tests/notebooks"}),
}


@pytest.mark.long
@pytest.mark.parametrize("changed, among", CASES.values(), ids=CASES)
def test_other_files_have_their_tests(changed, among):
  found = tests_of_changes.tests_of(changed)
  assert among <= {*found} and len(found) < 60
  assert all((ROOT / name).exists() for name in found)


@pytest.mark.long
@pytest.mark.parametrize("name", ["pyproject.toml", "Makefile", "tests/conftest.py", ".ci/run"])
def test_what_has_an_effect_on_everything_is_tested_by_everything(name, capsys):
  found = tests_of_changes.tests_of(["grpo_jax/rl/losses.py", name])
  assert found == ["tests"]
  assert capsys.readouterr().err == f"{name} may have an effect on everything\n"


@pytest.mark.long
def test_a_working_tree_is_compared_with_where_its_branch_began(tmp_path):
  """Committed, changed and new files count; ignored ones do not."""

  def git(*words):
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

  for name in ("scripts", "tests/http", "grpo_jax"):
    (tmp_path / name).mkdir(parents=True)
  script = tmp_path / "scripts" / "tests_of_changes.py"
  script.write_text(pathlib.Path(tests_of_changes.__file__).read_text())
  (tmp_path / "grpo_jax" / "http.py").write_text("")
  (tmp_path / "tests" / "http" / "test_a.py").write_text("from grpo_jax import http\n")
  (tmp_path / ".gitignore").write_text("*.log\n")
  git("init", "-q", "-b", "main")
  git("add", ".")
  git("commit", "-q", "-m", "first")
  run = lambda *words: subprocess.run(
    [sys.executable, str(script), *words], capture_output=True, text=True
  )

  (tmp_path / "made.log").write_text("")
  done = run()
  assert (done.returncode, done.stdout, done.stderr) == (0, "", "nothing changed\n")
  (tmp_path / "grpo_jax" / "http.py").write_text("\nA = (\n")
  assert run().stderr == f"{tmp_path}/grpo_jax/http.py:2: '(' was never closed\n"
  (tmp_path / "grpo_jax" / "http.py").write_text("A = 1\n")
  assert run().stdout == "tests/http\n"
  git("commit", "-q", "-a", "-m", "second")
  assert run().stdout == ""
  assert run("HEAD~1").stdout == "tests/http\n"
  (tmp_path / "docs").mkdir()
  (tmp_path / "docs" / "ü.md").write_text("")
  assert run("HEAD").stdout == "" and run("HEAD").stderr == ""  # no test is of pages here.
  (tmp_path / "docs" / "ü.md").unlink()
  git("update-ref", "refs/remotes/origin/main", "HEAD~1")
  assert run().stdout == "tests/http\n"
  wrong = run("no-such-commit")
  assert wrong.returncode == 1 and "no-such-commit" in wrong.stderr
