"""The files of the packages that a grader needs, however pip has installed them."""

from grpo_jax.environments.grading import libraries


def test_files_that_setup_py_has_installed_are_found(tmp_path, monkeypatch):
  """As pip of Debian 12 installs packages without a wheel: egg-info, and no RECORD."""
  info = tmp_path / "oldstyle-1.0.egg-info"
  for folder in (info, tmp_path / "package"):
    folder.mkdir()
  (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: oldstyle\nVersion: 1.0\n")
  (info / "SOURCES.txt").write_text("setup.py\nsrc/module.c\n")
  installed = ["../module.so", "../package/__init__.py", "../__pycache__/x.pyc", "PKG-INFO"]
  (info / "installed-files.txt").write_text("\n".join(installed))
  for file in ("module.so", "package/__init__.py"):
    (tmp_path / file).touch()
  monkeypatch.syspath_prepend(tmp_path)
  roots, files = libraries.needed("oldstyle")
  assert roots == (str(tmp_path.resolve()),)
  assert files == tuple(str(tmp_path.resolve() / name) for name in ("module.so", "package"))
