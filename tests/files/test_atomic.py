"""What appears whole or not at all, and that there is one place for it."""

import ast
import errno
import os
import pathlib

import pytest

from grpo_jax.files import atomic, manifest
from grpo_jax.files.disk import WriteError
from tests import test_architecture as architecture


@pytest.mark.parametrize(
  "content, expected", [("é\n", "é\n".encode()), (b"\xff", b"\xff"), (iter(["a\n", "b"]), b"a\nb")]
)
@pytest.mark.parametrize("is_durable", [False, True])
def test_a_file_is_replaced_by_its_whole_content(tmp_path, content, expected, is_durable):
  file = tmp_path / "a.json"
  file.write_text("old, and longer than the new one")
  content = expected.decode() if not isinstance(content, str | bytes) and is_durable else content
  atomic.replace_file(file, content, is_durable=is_durable)
  assert file.read_bytes() == expected and [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("fails", ["replace", "fsync"])
def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, fails):
  file = tmp_path / "a.json"
  file.write_text("old")

  def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(os, fails, full)
  with pytest.raises(WriteError, match=r"a\.json cannot be written: No space left on device"):
    atomic.replace_file(file, "new", is_durable=True)
  assert file.read_text() == "old" and [*tmp_path.iterdir()] == [file]


def test_a_durable_file_is_flushed_before_it_gets_its_name_and_the_name_after(
  tmp_path, monkeypatch
):
  done = []
  replace, flush = os.replace, atomic.flush
  monkeypatch.setattr(os, "replace", lambda a, b: (done.append("name"), replace(a, b)))
  monkeypatch.setattr(atomic, "flush", lambda path: (done.append(path.name), flush(path)))
  atomic.replace_file(tmp_path / "a.json", "x", is_durable=True)
  assert done == ["a.json.tmp", "name", tmp_path.name]


def test_a_folder_that_cannot_be_filled_leaves_the_old_one(tmp_path):
  target = tmp_path / "export"
  atomic.replace_folder(target, lambda folder: (folder / "weights").write_text("old") and None)

  def fails(folder):
    (folder / "weights").write_text("half")
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    atomic.replace_folder(target, fails)
  assert (target / "weights").read_text() == "old" and [*tmp_path.iterdir()] == [target]


def test_a_lock_is_held_until_its_file_is_closed(tmp_path):
  path = tmp_path / ".lock"
  with open(path, "w") as first, open(path) as second:
    atomic.lock(first)
    assert not atomic.try_lock(second)
    first.close()
    assert atomic.try_lock(second)


def test_a_manifest_compares_sizes_only_where_reading_everything_takes_too_long(tmp_path):
  (tmp_path / "weights").write_text("1234")
  manifest.write(tmp_path)
  (tmp_path / "weights").write_text("4321")
  assert manifest.damage(tmp_path, compares_digests=False) is None
  assert "digest differs" in (manifest.damage(tmp_path) or "")
  (tmp_path / "weights").write_text("123")
  assert "has 3 bytes instead of 4" in (manifest.damage(tmp_path, compares_digests=False) or "")


def calls_in(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Call):
      yield ast.unparse(node.func), node


FILES = [
  path
  for path in [*architecture.FILES, *architecture.SATELLITES]
  if path != pathlib.Path(atomic.__file__) and not architecture.is_standalone(path)
]


@pytest.mark.long
def test_nothing_else_renames_flushes_locks_or_guesses_names():
  wrong = []
  for path in FILES:
    ours = {"os.replace", "os.rename", "os.fsync", "fcntl.flock", "tempfile.mkdtemp"}
    if path.name in ("file_cache.py",):
      ours -= {"tempfile.mkdtemp"}  # a folder that goes with the process.
    if path.name != "names.py":
      ours |= {"difflib.get_close_matches"}
    for name, node in calls_in(path):
      if name in ours or name.endswith(".rename"):
        wrong.append(f"{path.relative_to(architecture.ROOT)}:{node.lineno}: {name}")
  assert wrong == [], "see grpo_jax/files/atomic.py, grpo_jax/values/names.py"
