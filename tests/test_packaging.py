"""What an installed package offers besides its modules: types, a command, addresses, a citation."""

import importlib
import pathlib
import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import grpo_jax

ROOT = pathlib.Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
# Package -> the folder that it is in.
PACKAGES = {
  "grpo_jax": ".",
  "grpo_kernels": "kernels",
  **{path.parent.name: "packages" for path in sorted((ROOT / "packages").glob("*/__init__.py"))},
}
VERSIONS = [
  name.rpartition(" ")[2]
  for name in PROJECT["classifiers"]
  if name.startswith("Programming Language :: Python :: 3.")
]


@pytest.mark.parametrize("package, folder", PACKAGES.items())
def test_type_annotations_are_published(package, folder):
  assert (ROOT / folder / package / "py.typed").exists()
  assert "py.typed" in SETTINGS["tool"]["setuptools"]["package-data"][package]


def test_all_files_that_are_not_modules_are_package_data():
  patterns = SETTINGS["tool"]["setuptools"]["package-data"]
  for package, folder in PACKAGES.items():
    root = ROOT / folder / package
    files = {
      path.relative_to(root)
      for path in root.rglob("*")
      if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    packed = {
      path.relative_to(root) for pattern in patterns[package] for path in root.glob(pattern)
    }
    assert files <= packed, files - packed


def test_the_console_script_runs_main(monkeypatch, capsys):
  module, _, name = PROJECT["scripts"]["grpo-jax"].partition(":")
  console = getattr(importlib.import_module(module), name)
  monkeypatch.setattr("sys.argv", ["grpo-jax", "--help"])
  with pytest.raises(SystemExit) as ended:
    console()
  assert ended.value.code == 0
  assert "--workdir" in capsys.readouterr().out


def test_python_versions_are_supported_and_each_has_a_tested_stack():
  assert VERSIONS == ["3.11", "3.12", "3.13"]
  for version in VERSIONS:
    assert version in SpecifierSet(PROJECT["requires-python"])
  assert {"py311.txt", "py312.txt", "py313.txt"} <= {
    path.name for path in (ROOT / "constraints").iterdir()
  }


@pytest.mark.parametrize("version", VERSIONS)
def test_the_versions_that_are_tested_are_within_the_bounds(version):
  lines = (ROOT / "constraints" / f"py{version.replace('.', '')}.txt").read_text().splitlines()
  pinned = [line.split("==") for line in lines if "==" in line]
  tested = {canonicalize_name(name): number for name, number in pinned}
  for text in PROJECT["dependencies"]:
    needed = Requirement(text)
    marker = needed.marker
    if marker is None or marker.evaluate({"python_version": version}):
      assert tested[canonicalize_name(needed.name)] in needed.specifier, text


def test_the_newest_stack_pins_what_the_one_before_it_pins():
  before, newest = (
    {line.partition("==")[0] for line in lines if "==" in line}
    for stack in ("py312", "py313")
    if (lines := (ROOT / "constraints" / f"{stack}.txt").read_text().splitlines())
  )
  assert before == newest


def test_the_second_stack_has_the_versions_of_colab_except_those_that_pip_replaces():
  colab, second = (
    {canonicalize_name(name): version for name, _, version in pins if version}
    for stack in ("colab", "py312")
    if (lines := (ROOT / "constraints" / f"{stack}.txt").read_text().splitlines())
    if (pins := [line.partition("==") for line in lines])
  )
  replaced = {name for name, version in colab.items() if second[name] != version}
  needed = [Requirement(text) for text in PROJECT["dependencies"]]
  here = [
    each for each in needed if not each.marker or each.marker.evaluate({"python_version": "3.12"})
  ]
  bounds = {canonicalize_name(each.name): each.specifier for each in here}
  of_jax = {"jaxlib", "numpy"}  # jax 0.11 needs its own jaxlib, and numpy 2.1.
  no_wheel = {"antlr4-python3-runtime"}
  assert replaced == of_jax | no_wheel | {
    name for name in bounds if name in colab and colab[name] not in bounds[name]
  }
  assert {"transformers", "optax", "orbax-checkpoint", "pandas", "ipykernel"} <= set(
    colab
  ) - replaced


def test_the_newest_jax_is_bounded_by_what_is_tested():
  (bound,) = [Requirement(text) for text in PROJECT["dependencies"] if "jax>=0.11" in text]
  tested = (ROOT / "constraints" / "py313.txt").read_text()
  newest = Version(re.search(r"^jax==(.*)$", tested, re.MULTILINE)[1])
  assert newest in bound.specifier
  assert f"{newest.major}.{newest.minor + 1}.0" not in bound.specifier


def test_extras_name_the_cuda_that_jax_names():
  extras = PROJECT["optional-dependencies"]
  assert extras["cuda12"] == ["jax[cuda12]"] and extras["cuda13"] == ["jax[cuda13]"]
  assert extras["cuda"] == ["grpo-jax[cuda12]"]


def test_citation_names_this_version_and_this_repository():
  citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
  assert {"cff-version", "message", "title", "authors"} <= set(citation)
  assert str(citation["version"]) == PROJECT["version"] == grpo_jax.__version__
  assert citation["repository-code"] == PROJECT["urls"]["Homepage"]
  assert citation["license"] == PROJECT["license"]


def test_the_image_copies_files_that_are_there_and_that_its_build_sees():
  seen = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"]
  text = (ROOT / "Dockerfile").read_text()
  copied = [
    path for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for path in line.split()[:-1]
  ]
  assert {"grpo_jax", "kernels", "packages", "configs", "constraints/sglang_cuda.txt"} <= {*copied}
  for path in copied:
    assert (ROOT / path).exists(), path
    assert any(path == each or path.startswith(f"{each}/") for each in seen), path
  assert "bubblewrap" in text and "[cuda13" in text
  servers = (ROOT / "constraints" / "sglang_cuda.txt").read_text()
  assert re.search(r"^nvidia-cuda-runtime==13\.", servers, re.MULTILINE), "the image is for CUDA 13"
