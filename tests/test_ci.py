"""The gate: its parts, what it prints, and the workflows and hooks that call it."""

import functools
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import yaml

from tests import mappings
from tests.test_packaging import VERSIONS

ROOT = pathlib.Path(__file__).parents[1]
WORKFLOWS = {
  path.stem: yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/workflows/*")
}
FAKE_MAKE = """#!/bin/sh
echo "make $*" >> {log}
[ "$1" != "$FAILING" ]
"""


@pytest.fixture
def gate(tmp_path):
  """Runs a copy of the gate in an empty folder, with a `make` that only writes down its targets."""
  copy = tmp_path / "repository" / ".ci" / "run"
  copy.parent.mkdir(parents=True)
  shutil.copy(ROOT / ".ci" / "run", copy)
  log = tmp_path / "log"
  log.touch()
  for name, text in (
    ("make", FAKE_MAKE.format(log=log)),
    ("python3.12", ""),  # written by each run.
    ("pyenv", "#!/bin/sh\nexit 1\n"),  # none of pyenv's either.
    *((name, "#!/bin/sh\n") for name in ("bwrap", "shellcheck", "sbatch", "mpirun")),
  ):
    program = tmp_path / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(text)
    program.chmod(0o755)

  def run(*parts, failing="", has_second=False):
    second = tmp_path / "bin" / "python3.12"
    second.write_text(f"#!/bin/sh\nexit {int(not has_second)}\n")
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "FAILING": failing}
    done = subprocess.run([copy, *parts], env=environment, capture_output=True, text=True)
    return done, log.read_text().splitlines()

  return run


def parts_of(done):
  """Returns the names in the table of minutes."""
  table = done.stdout.split("== minutes of each part\n")[1]
  return re.findall(r"^ +\d+\.\d  (.+)$", table, re.MULTILINE)


def test_without_names_all_parts_run_and_their_minutes_are_printed(gate):
  done, targets = gate()
  assert done.returncode == 0, done.stderr
  parts = gate("--list")[0].stdout.split()
  assert parts_of(done) == [*parts[: parts.index("third")], "together"]
  made = [line.split()[1] for line in targets]
  assert sorted(made) == sorted(
    "venv sglang-cpu check test test-long docs quickstart test-processes test-slow test-trackers"
    " test-environments test-sglang aot".split()
  )
  assert made.index("sglang-cpu") < made.index("test"), "servers are installed before tests begin"


def test_parts_run_by_name_and_install_only_what_they_need(gate):
  done, targets = gate("check", "docs")
  assert done.returncode == 0 and parts_of(done) == ["check", "docs", "together"]
  assert targets == ["make check", "make docs"]
  done, targets = gate("install", "test")
  assert targets[2:] == ["make venv", "make test"]


def test_a_part_that_fails_ends_the_gate_and_is_named_with_the_minutes(gate):
  done, targets = gate("check", "docs", "test", failing="docs")
  assert done.returncode != 0 and targets == ["make check", "make docs"]
  assert parts_of(done) == ["check", "docs (failed)", "together"]


def test_a_part_that_fails_beside_others_ends_the_gate(gate):
  done, targets = gate("install", "check", "test", "sglang", failing="sglang-cpu")
  assert done.returncode != 0 and "make test" not in targets


def test_trackers_and_environments_are_tested_beside_the_slow_part_and_can_fail_it(gate):
  done, targets = gate("slow")
  assert done.returncode == 0
  assert sorted(targets) == ["make test-environments", "make test-slow ARGS=", "make test-trackers"]
  for target in ("test-trackers", "test-environments"):
    done, _ = gate("slow", failing=target)
    assert done.returncode != 0 and parts_of(done) == ["slow (failed)", "together"]


def test_what_another_part_runs_is_left_out_only_if_the_gate_runs_that_part(gate):
  gate("long", has_second=True)
  _, apart = gate("slow", has_second=True)
  assert {"make test-long ARGS=", "make test-slow ARGS="} <= set(apart)
  _, targets = gate("long", "slow", "second", has_second=True)
  long, slow = sorted(target for target in targets[len(apart) :] if "ARGS" in target)
  left_out = re.findall("--deselect=([^ :]+)", long)
  assert {"tests/kernels", "tests/rl", "tests/learn"} <= set(left_out)
  notebooks = "tests/notebooks/test_notebooks.py"
  assert notebooks in left_out and all((ROOT / path).exists() for path in left_out)
  (test,) = re.findall(rf"{notebooks}::(\w+)\[quickstart\]", long)
  assert f"def {test}(" in (ROOT / notebooks).read_text()
  day = "tests/scripts/test_gpu_day.py::test_a_tiny_day_runs_to_its_end"
  assert slow == f"make test-slow ARGS=--deselect={day}"


def test_an_unknown_part_is_refused_before_anything_runs(gate):
  done, targets = gate("check", "tests")
  assert done.returncode == 2 and targets == []
  assert "no part 'tests'; there are: install check test" in done.stderr


def calls():
  """Yields (workflow, part, Python versions) for every part that a workflow runs."""
  for name, workflow in WORKFLOWS.items():
    for job in workflow["jobs"].values():
      matrix = job.get("strategy", {}).get("matrix", {})
      for step in job["steps"]:
        if not step.get("run", "").startswith(".ci/run"):
          continue
        words = step["run"].split(maxsplit=1)[1]
        for parts in matrix["parts"] if "matrix.parts" in words else [words]:
          yield from ((name, part, matrix.get("python")) for part in parts.split())


def test_workflows_run_every_part_and_no_other(gate):
  parts = gate("--list")[0].stdout.split()
  found = list(calls())
  assert {part for _, part, _ in found} == set(parts)
  assert [python for _, part, python in found if part == "test"] == [VERSIONS]
  assert {part for name, part, _ in found if name == "newest"} == {"third", "newest"}
  assert "schedule" in WORKFLOWS["newest"][True], "YAML reads `on` as true"


def test_workflows_may_only_read_and_have_an_end():
  for workflow in WORKFLOWS.values():
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 60 for job in workflow["jobs"].values())


def test_hooks_before_a_commit_use_the_versions_of_the_checks():
  (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
  assert local["repo"] == "local"
  entries = {hook["id"]: hook["entry"] for hook in local["hooks"]}
  assert set(entries) == {"ruff-format", "ruff-check", "pyright", "words"}
  assert all(entry.startswith(".venv/bin/") for entry in entries.values())
  for path in re.findall(r"\btests/\S+", " ".join(entries.values())):
    assert (ROOT / path).exists(), path


def test_forms_of_issues_are_complete():
  forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
  assert len(forms) == 3
  for path in forms:
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
      assert form["contact_links"][0]["about"]
      continue
    assert form["name"] and form["description"] and form["body"]
    assert all(field["attributes"]["label"] for field in form["body"])


WITHOUT_BEARTYPE = """
import sys
sys.modules["beartype"] = None  # as if it were not installed.
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
WRONG_TYPE = """
import jax.numpy as jnp
from grpo_jax.rl import kl

def test_integers_where_the_signature_says_float():
  kl._k1(jnp.zeros(3, int))
"""


@pytest.mark.long
def test_tests_are_collected_without_beartype():
  options = ["--collect-only", "-q", "-p", "no:cacheprovider", "tests/test_registry.py"]
  command = [sys.executable, "-c", WITHOUT_BEARTYPE, *options]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0 and "tests/test_registry.py::test" in done.stdout, done.stdout


@pytest.mark.long
def test_stacks_check_the_signatures_of_calls(tmp_path):
  gate = (ROOT / ".ci" / "run").read_text()
  (stack_tests,) = re.findall(r"^stack_tests\(\) \{.*?^\}", gate, re.MULTILINE | re.DOTALL)
  assert '"$SIGNATURES"' in stack_tests
  (option,) = re.findall(r"^SIGNATURES=(.+)$", gate, re.MULTILINE)
  (tmp_path / "test_planted.py").write_text(WRONG_TYPE)
  (tmp_path / "pytest.ini").write_text("[pytest]")
  command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path]
  path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "/usr/bin:/bin"}
  for options, code in (([option], 1), ([], 0)):
    done = subprocess.run([*command, *options], env=path, capture_output=True, text=True)
    assert done.returncode == code, done.stdout
    assert ("TypeCheckError" in done.stdout) == bool(code)


@pytest.mark.skipif(not mappings.count(), reason="the system does not list mappings")
def test_programs_are_forgotten_before_a_worker_has_too_many_mappings():
  before = mappings.count()
  programs = [jax.jit(functools.partial(jnp.add, number)) for number in range(20)]
  for number, program in enumerate(programs):
    program(jnp.zeros(number + 3))
  compiled = mappings.count()
  assert compiled > before + 20

  mappings.forget_programs(most=compiled + 1000)
  assert mappings.count() == pytest.approx(compiled, abs=10)

  mappings.forget_programs(most=before)
  assert mappings.count() < compiled - 20
