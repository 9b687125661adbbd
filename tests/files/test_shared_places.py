"""Folders and locks that others can reach: what is not ours is not used, emptied or followed."""

import os
import pathlib

import jax
import pytest

from grpo_jax.building import kept_programs
from grpo_jax.engines.transfer import TransferError, WeightFolders
from grpo_jax.files import shared_places
from grpo_jax.files.shared_places import NotOurs
from grpo_jax.models import sources
from grpo_jax.run_folder import folder_lock
from tests.engines import tiny

ANOTHER_USER = 12345


@pytest.fixture
def as_another_user(monkeypatch):
  """What was made until now belongs to another user than this one."""
  monkeypatch.setattr(os, "getuid", lambda: ANOTHER_USER)


def folders(root):
  return WeightFolders(root, tiny.config(), source_directory=None, dtype="float32")


def test_a_folder_is_made_private_and_found_again(tmp_path):
  made = shared_places.private_folder(tmp_path / "a" / "b")
  assert made.stat().st_mode & 0o777 == 0o700
  assert shared_places.private_folder(made) == made


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o1777, 0o702])
def test_a_folder_that_others_may_write_is_refused(tmp_path, mode):
  place = tmp_path / "place"
  place.mkdir()
  place.chmod(mode)
  with pytest.raises(NotOurs, match=rf"can be written by other users \(mode {mode:03o}\)"):
    shared_places.private_folder(place)
  with pytest.raises(TransferError, match="other users.*; engine.sglang.weights_folder can name"):
    folders(place)
  assert list(place.iterdir()) == []


@pytest.mark.usefixtures("as_another_user")
def test_a_folder_of_another_user_is_refused(tmp_path):
  with pytest.raises(NotOurs, match=f"belongs to user .*, but this is user {ANOTHER_USER}"):
    shared_places.private_folder(tmp_path)
  with pytest.raises(TransferError, match=f"this is user {ANOTHER_USER}"):
    folders(tmp_path)


def test_a_link_does_not_count_as_a_folder(tmp_path):
  (tmp_path / "elsewhere").mkdir(mode=0o700)
  (tmp_path / "link").symlink_to("elsewhere")
  (tmp_path / "nowhere").symlink_to("missing")
  (tmp_path / "file").write_text("")
  for name, message in (("link", "a link"), ("nowhere", "a link"), ("file", "not a folder")):
    with pytest.raises(NotOurs, match=f"{name} is {message}"):
      shared_places.private_folder(tmp_path / name)
    with pytest.raises(TransferError, match="no folder for weights can be made in"):
      folders(tmp_path / name)
  assert list((tmp_path / "elsewhere").iterdir()) == [] and not (tmp_path / "missing").exists()


def lock_of_weights(place):
  folders(place).close()


def lock_of_run_folder(place):
  folder_lock.claimed(place).close()


def lock_of_model_cache(place):
  with sources._lock(place / "model"):
    pass


LOCKS = [
  (lock_of_weights, ".lock", TransferError),
  (lock_of_run_folder, ".lock", folder_lock.UnusableFolder),
  (lock_of_model_cache, ".model.lock", NotOurs),
]


@pytest.mark.parametrize(
  ("take", "name", "error"), LOCKS, ids=["weights", "run-folder", "model-cache"]
)
def test_no_lock_empties_a_file_or_follows_a_link(tmp_path, take, name, error):
  precious = tmp_path / "bashrc"
  precious.write_text("precious")
  place = tmp_path / "place"
  place.mkdir(mode=0o700)
  for make in (
    lambda lock: lock.symlink_to(precious),
    lambda lock: os.link(precious, lock),
    lambda lock: os.mkfifo(lock),
    lambda lock: lock.symlink_to(tmp_path / "missing"),
  ):
    make(place / name)
    with pytest.raises(error, match=": remove it"):
      take(place)
    (place / name).unlink()
  assert precious.read_text() == "precious" and not (tmp_path / "missing").exists()
  take(place)


def test_what_dead_runs_left_gives_no_access_to_other_files(tmp_path):
  """As the folder was before it was ours alone."""
  root, victim = tmp_path / "root", tmp_path / "victim"
  for folder in (root / "run-a", victim):
    folder.mkdir(mode=0o700, parents=True)
  root.chmod(0o700)
  (victim / "bashrc").write_text("precious")
  (root / "run-a" / ".lock").symlink_to(victim / "bashrc")
  (root / "run-b").symlink_to(victim)
  folders(root).close()
  assert [p.name for p in victim.iterdir()] == ["bashrc"]
  assert (victim / "bashrc").read_text() == "precious"


def test_the_content_of_a_lock_stays_until_it_is_held(tmp_path):
  with folder_lock.claimed(tmp_path / "w"):
    with pytest.raises(
      folder_lock.UnusableFolder, match=rf"in use by another run \(process {os.getpid()}\)"
    ):
      folder_lock.claimed(tmp_path / "w")
    assert (tmp_path / "w" / ".lock").read_text() == f"{os.getpid()}\n"


@pytest.mark.usefixtures("as_another_user")
def test_a_run_folder_and_a_model_cache_may_be_shared(tmp_path):
  (tmp_path / ".lock").write_text("1\n")
  lock_of_run_folder(tmp_path)
  lock_of_model_cache(tmp_path)
  with pytest.raises(NotOurs, match="not a plain file of user"):
    shared_places.open_lock(tmp_path / ".lock")


@pytest.fixture
def cache_options():
  """JAX's options of its cache, which are as before after the test."""
  names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
  before = {name: jax.config.values[name] for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.mark.usefixtures("cache_options")
def test_compiled_programs_are_not_read_from_a_folder_that_others_may_write(
  tmp_path, monkeypatch, caplog
):
  monkeypatch.setenv("GRPO_JAX_CACHE", str(tmp_path / "cache"))
  jax.config.update("jax_compilation_cache_dir", None)
  kept_programs.keep()
  assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "cache" / "xla")
  pathlib.Path(tmp_path / "cache" / "xla").chmod(0o777)
  jax.config.update("jax_compilation_cache_dir", None)
  kept_programs.keep()
  assert jax.config.values["jax_compilation_cache_dir"] is None
  assert "compiled programs are not kept" in caplog.text and "chmod go-w" in caplog.text


@pytest.mark.usefixtures("cache_options")
@pytest.mark.parametrize("is_there", [True, False])
def test_a_cache_that_cannot_be_written_is_reported_once(tmp_path, monkeypatch, caplog, is_there):
  place = tmp_path if is_there else tmp_path / "file" / "cache"
  (tmp_path / "file").write_text("")

  def refuse(dir):
    raise OSError(30, "Read-only file system", dir)

  monkeypatch.setattr(kept_programs.tempfile, "TemporaryFile", refuse)
  jax.config.update("jax_compilation_cache_dir", str(place))
  kept_programs.keep()
  assert jax.config.values["jax_compilation_cache_dir"] == (str(place) if is_there else None)
  assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == float("inf")
  assert caplog.text.count("compiled programs are not kept") == 1 and str(place) in caplog.text
