"""What an installed package offers besides its modules: types, a command, addresses, a citation."""

import importlib
import pathlib
import tomllib

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import grpo_jax

ROOT = pathlib.Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
VERSIONS = [
  name.rpartition(" ")[2]
  for name in PROJECT["classifiers"]
  if name.startswith("Programming Language :: Python :: 3.")
]


@pytest.mark.parametrize("package, folder", [("grpo_jax", "."), ("grpo_kernels", "kernels")])
def test_type_annotations_are_published(package, folder):
  assert (ROOT / folder / package / "py.typed").exists()
  assert "py.typed" in SETTINGS["tool"]["setuptools"]["package-data"][package]


def test_all_files_that_are_no_modules_are_package_data():
  patterns = SETTINGS["tool"]["setuptools"]["package-data"]
  for package, folder in (("grpo_jax", "."), ("grpo_kernels", "kernels")):
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
  assert {"py311.txt", "py312.txt"} <= {path.name for path in (ROOT / "constraints").iterdir()}


def test_citation_names_this_version_and_this_repository():
  citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
  assert {"cff-version", "message", "title", "authors"} <= set(citation)
  assert str(citation["version"]) == PROJECT["version"] == grpo_jax.__version__
  assert citation["repository-code"] == PROJECT["urls"]["Homepage"]
  assert citation["license"] == PROJECT["license"]
