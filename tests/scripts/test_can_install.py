"""What a machine lacks to install the package is one line, before pip downloads anything."""

import os
import pathlib
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
import venv

import pytest

from grpo_jax.commands import diagnosis

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "can_install.py"


@pytest.fixture
def script():
  """The names of the script; what a test puts in there, the script's functions see."""
  found = runpy.run_path(str(SCRIPT))
  return found["complaint"].__globals__


@pytest.fixture
def bare(tmp_path):
  """A Python without packages and without pip, in an environment without a compiler."""
  venv.create(tmp_path / "bare", with_pip=False)
  environment = {**os.environ, "CC": "/no/gcc", "PYTHONPATH": sysconfig.get_path("purelib")}
  offline = {"PIP_NO_INDEX": "1", "PIP_CACHE_DIR": str(tmp_path / "cache"), "PIP_FIND_LINKS": ""}
  return tmp_path / "bare" / "bin" / "python", environment | offline


def test_its_bounds_are_those_of_the_package_and_the_constraints(script):
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert project["requires-python"] == ">=" + ".".join(map(str, script["OLDEST"]))
  assert script["NEWEST_TESTED"] == diagnosis.NEWEST_PYTHON
  for minor in range(script["OLDEST"][1], script["NEWEST_TESTED"][1] + 1):
    pinned = (ROOT / "constraints" / f"py3{minor}.txt").read_text().split()
    assert script["NEEDS_COMPILER"] in pinned


def test_an_old_python_is_named_with_one_that_is_there(script, monkeypatch):
  monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
  monkeypatch.setitem(script, "_succeeds", lambda words: words[0] == "python3.12")
  said = script["complaint"]()
  assert re.fullmatch(
    r"grpo_jax needs Python >= 3.11, and \S+ is 3.10; take python3.12: make PYTHON=python3.12 .*",
    said,
  )
  monkeypatch.setitem(script, "_succeeds", lambda words: False)
  monkeypatch.setattr(script["shutil"], "which", lambda name: name == "apt-get" or None)
  assert "apt-get install build-essential python3.11 " in script["complaint"]()


def test_a_compiler_that_does_not_compile_is_missing(script, monkeypatch, tmp_path):
  monkeypatch.setitem(script, "has_without_compiler", lambda: False)
  wanted = "missing: a C compiler with Python.h, which pycosat==0.6.6 needs; to get it: "
  monkeypatch.delenv("CONDA_PREFIX", raising=False)
  monkeypatch.setenv("CC", "/no/gcc -pthread")
  for manager, command in (
    ("apt-get", "apt-get install build-essential"),
    ("dnf", "dnf install gcc "),
    ("none", "your system's packages of gcc"),
  ):
    monkeypatch.setattr(script["shutil"], "which", lambda name, has=manager: name == has or None)
    monkeypatch.setitem(script, "_real", lambda program: "")
    assert script["complaint"]().startswith(wanted + command)
  monkeypatch.setenv("CONDA_PREFIX", "/conda")
  assert "conda install" in script["complaint"]()
  (tmp_path / "cc").write_text("#!/bin/sh\necho no Python.h >&2\nexit 1\n")
  (tmp_path / "cc").chmod(0o755)
  monkeypatch.setenv("CC", str(tmp_path / "cc"))
  assert script["complaint"]().startswith(wanted)
  monkeypatch.setitem(script, "has_without_compiler", lambda: True)
  assert script["complaint"]() == ""


def test_no_compiler_is_needed_where_pip_has_the_package_already(script, monkeypatch, tmp_path):
  printed = {}
  monkeypatch.setitem(script, "_printed", lambda *words: printed.get(words[0], ""))
  monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
  assert not script["has_without_compiler"]()
  printed["cache"] = " - pycosat-0.6.6-cp{}{}-cp3-linux.whl".format(*sys.version_info[:2])
  assert script["has_without_compiler"]()
  printed["cache"] = " - pycosat-0.6.6-cp27-cp27-linux.whl"
  assert not script["has_without_compiler"]()
  (tmp_path / "pycosat-0.6.6.dist-info").mkdir()
  assert script["has_without_compiler"]()


def test_make_says_it_before_anything_is_made(bare, tmp_path):
  python, environment = bare
  folder = tmp_path / "venv"
  done = subprocess.run(
    ["make", "quickstart", f"PYTHON={python}", f"VENV={folder}"],
    **dict(cwd=ROOT, env=environment, capture_output=True, text=True),
  )
  assert done.returncode and done.stderr.startswith("missing: a C compiler"), done
  assert not folder.exists()


@pytest.mark.long
def test_pip_says_it_unless_it_leaves_the_dependencies_out(bare, tmp_path):
  pytest.importorskip("setuptools")
  python, environment = bare
  for words, is_refused in (
    ("pip install -e .", True),
    ("pip wheel .", True),
    ("pip wheel --no-deps .", False),
    ("python -m build", False),
  ):
    # The parent's words are all that setup.py sees of pip.
    script = f'"{python}" setup.py --quiet dist_info --output-dir "{tmp_path}" 2>&1; exit $?'
    done = subprocess.run(
      ["bash", "-c", script, *words.split()],
      **dict(cwd=ROOT, env=environment, capture_output=True, text=True),
    )
    refused = "error: missing: a C compiler with Python.h" in done.stdout
    assert (refused, done.returncode) == (is_refused, int(is_refused)), (words, done.stdout)
