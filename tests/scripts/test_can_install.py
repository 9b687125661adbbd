"""What a Python lacks to install the package is one line, before pip downloads anything."""

import pathlib
import re
import runpy
import subprocess
import sys
import tomllib

import pytest

from grpo_jax.commands import diagnosis

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "can_install.py"


@pytest.fixture
def script():
  """The names of the script; what a test puts in there, the script's functions see."""
  found = runpy.run_path(str(SCRIPT))
  return found["complaint"].__globals__


def test_its_bounds_are_those_of_the_package_and_the_constraints(script):
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert project["requires-python"] == ">=" + ".".join(map(str, script["OLDEST"]))
  assert script["NEWEST_TESTED"] == diagnosis.NEWEST_PYTHON


def test_an_old_python_is_named_with_one_that_is_there(script, monkeypatch):
  monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
  monkeypatch.setitem(script, "_runs", lambda name: name == "python3.12")
  said = script["complaint"]()
  assert re.fullmatch(
    r"grpo_jax needs Python >= 3.11, and \S+ is 3.10; take python3.12: make PYTHON=python3.12 .*",
    said,
  )
  monkeypatch.setitem(script, "_runs", lambda name: False)
  for manager, command in (("apt-get", "python3.11 python3.11-venv "), ("dnf", "python3.12 ")):
    monkeypatch.setattr(script["shutil"], "which", lambda name, has=manager: name == has or None)
    assert f"{manager} install {command}" in script["complaint"]()


def test_a_python_without_venv_is_refused_with_the_package_that_has_it(script, monkeypatch):
  monkeypatch.setattr(
    script["importlib"].util, "find_spec", lambda name: name != "ensurepip" or None
  )
  here = ".".join(map(str, sys.version_info[:2]))
  for manager, command in (("apt-get", f"apt-get install python{here}-venv"), ("dnf", "your sys")):
    monkeypatch.setattr(script["shutil"], "which", lambda name, has=manager: name == has or None)
    assert re.fullmatch(
      rf"missing: the modules venv and ensurepip of \S+; to get them: {command}.*",
      script["complaint"](),
    )


def test_make_says_it_before_anything_is_made(tmp_path):
  old = tmp_path / "python"
  old.write_text('#!/bin/sh\ncase "$1" in *.py) echo too old >&2; exit 1;; *) echo py311;; esac\n')
  old.chmod(0o755)
  folder = tmp_path / "venv"
  done = subprocess.run(
    ["make", "quickstart", f"PYTHON={old}", f"VENV={folder}"],
    **dict(cwd=ROOT, capture_output=True, text=True),
  )
  assert done.returncode and done.stderr.startswith("too old"), done
  assert not folder.exists()


@pytest.mark.parametrize("file, packages", [("Makefile", "-e ."), (".ci/run", "-e . pytest")])
def test_what_a_run_needs_is_never_compiled(file, packages):
  """pip then refuses a package that is published as source only, and the gate with it."""
  lines = (ROOT / file).read_text().replace('"$@" ', "").splitlines()
  (command,) = [line for line in lines if f" {packages}" in line]
  assert f" --only-binary=:all: {packages}" in command
