"""Run folders at URLs: who may use one, what is copied and fetched, and what a death leaves."""

import concurrent.futures
import json
import pathlib
import shutil

import numpy as np
import pytest

from grpo_jax import interrupts
from grpo_jax.files import local_paths, remote
from grpo_jax.run_folder import checkpoint_errors, checkpointing, folder_lock, url_runs, workdirs
from tests.run_folder.faulty_storage import Died

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
  """Returns a function that moves to the machine of this name; the first one is "first"."""
  monkeypatch.setattr(url_runs, "ATTEMPTS", 1)

  def choose(name):
    monkeypatch.setenv("GRPO_JAX_CACHE", str(tmp_path / "machines" / name))

  choose("first")
  return choose


@pytest.fixture
def there(tmp_path):
  return tmp_path / "there"


@pytest.fixture
def url(there):
  return f"file://{there}"


def state_of(step):
  rng = np.random.default_rng(step)
  return {"step": np.asarray(step, np.int32), "w": rng.standard_normal((3, 5)).astype(np.float32)}


def saved(folder, *steps, keep_last=2):
  """Writes the metrics and the rollouts of these steps, and their checkpoints."""
  (folder / "config.json").write_text("{}")
  (folder / "rollouts").mkdir(exist_ok=True)
  with checkpointing.open(workdirs.checkpoints(folder), keep_last=keep_last) as checkpoints:
    for step in steps:
      with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step - 1}) + "\n")
      (folder / "rollouts" / f"step_{step - 1:06d}.jsonl").write_text(f"{step}\n")
      checkpoints.save(step, state_of(step), {"cursor": step})


def restored(folder):
  """Returns the step that a run would continue from, after comparing its state bit for bit."""
  with checkpointing.open(workdirs.checkpoints(folder)) as checkpoints:
    found = checkpoints.restore_latest(state_of(0))
  if found is None:
    return 0
  state, extra = found
  step = extra["cursor"]
  assert {n: x.tobytes() for n, x in state.items()} == {
    n: x.tobytes() for n, x in state_of(step).items()
  }
  return step


def names_in(folder):
  return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def finished(url):
  """A run of two checkpoints at the URL that has ended; returns its local folder."""
  with workdirs.opened(url) as folder:
    saved(folder, 1, 2)
    for name in ("export/config.json", "export/model.safetensors", "weights/w", "servers/0.log"):
      (folder / name).parent.mkdir(exist_ok=True)
      (folder / name).write_text(name)
    (folder / "half.tmp").write_text("")
  return folder


# --- what is where ---


def test_at_the_end_the_url_holds_everything_and_no_lock(finished, there):
  others = {name for name in names_in(there) if not name.startswith("checkpoints/")}
  assert others == {
    *("config.json", "metrics.jsonl", "copy.json", "servers/0.log"),
    *("rollouts/step_000000.jsonl", "rollouts/step_000001.jsonl"),
    *("export/config.json", "export/model.safetensors"),
  }
  assert not (finished / "checkpoints").exists()
  for step in (1, 2):
    folder = there / "checkpoints" / f"step_{step:08d}"
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    sizes = {n: (folder / n).stat().st_size for n in names_in(folder) - {"manifest.json"}}
    assert {name: entry["bytes"] for name, entry in listed.items()} == sizes


def test_an_empty_machine_continues_and_older_checkpoints_are_deleted(finished, url, machine):
  machine("second")
  with workdirs.opened(url) as folder:
    assert folder != finished
    assert names_in(folder) - {".lock", ".copy.json"} == {
      *("config.json", "metrics.jsonl"),
      *("rollouts/step_000000.jsonl", "rollouts/step_000001.jsonl"),
    }
    assert (folder / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    assert restored(folder) == 2
    saved(folder, 3)
    assert workdirs.steps(folder) == [2, 3]


def test_the_machine_that_was_ahead_keeps_its_files_and_another_one_is_fetched_again(
  finished, url, machine
):
  (finished / "metrics.jsonl").write_text("newer than the URL\n")
  with workdirs.opened(url) as folder:
    assert (folder / "metrics.jsonl").read_text() == "newer than the URL\n"
  machine("second")
  with workdirs.opened(url) as folder:
    assert (folder / "metrics.jsonl").read_text() == "newer than the URL\n"
    (folder / "metrics.jsonl").write_text("of the second\n")
    (folder / "rollouts" / "step_000001.jsonl").unlink()
  machine("first")
  (finished / "stale").write_text("")
  with workdirs.opened(url) as folder:
    assert folder == finished and not (folder / "stale").exists()
    assert (folder / "metrics.jsonl").read_text() == "of the second\n"


def test_a_file_that_the_run_removes_disappears_at_the_url(finished, url, there):
  with workdirs.opened(url) as folder:
    (folder / "more").write_text("1")
    run = workdirs._at_urls[folder]
    run.copy()
    assert (there / "more").read_text() == "1"
    (there / "of_somebody_else").write_text("")
    (folder / "config.json").unlink()
  (finished / "more").unlink()
  with workdirs.opened(url):
    pass
  assert names_in(there).isdisjoint({"more", "config.json"})
  assert (there / "of_somebody_else").is_file()


def test_a_run_that_was_copied_there_by_hand_continues(there, url, tmp_path):
  folder = tmp_path / "local"
  folder.mkdir()
  saved(folder, 1, 2)
  shutil.copytree(folder, there)
  with workdirs.opened(url) as copy:
    assert restored(copy) == 2 and (copy / "metrics.jsonl").is_file()


def test_a_checkpoint_of_a_url_is_one_of_a_disk(finished, there):
  assert restored(there) == 2  # as a local run folder: digests are not listed, sizes are.
  (there / "checkpoints" / "step_00000002" / "info.json").write_text("{}")
  assert restored(there) == 1


# --- two runs ---


def test_a_second_run_is_refused_and_says_how_to_take_over(url, there, machine):
  with workdirs.opened(url):
    machine("second")
    with pytest.raises(folder_lock.UnusableFolder) as error:
      workdirs.opened(url).__enter__()
    said = str(error.value)
    assert f"{url} is in use by process" in said and "\n" not in said
    assert f"If that run has ended, remove its lock: rm {there}/lock.json" in said


def test_a_run_whose_lock_was_removed_writes_nothing_more(finished, url, there, machine):
  first = workdirs.opened(url)
  folder = first.__enter__()
  (there / "lock.json").unlink()
  machine("second")
  with workdirs.opened(url) as second:
    with pytest.raises(checkpoint_errors.CheckpointError, match="was taken over by process"):
      saved(folder, 5)
    (folder / "stray").write_text("")
    with pytest.raises(url_runs.Taken, match="nothing more of this run is written there"):
      first.__exit__(None, None, None)
    assert (there / "lock.json").is_file() and not (there / "stray").exists()
    assert workdirs.steps(second) == [1, 2]


def test_a_run_that_died_continues_on_its_machine_and_needs_its_lock_removed_elsewhere(
  url, there, machine
):
  died = workdirs.opened(url)
  folder = died.__enter__()
  saved(folder, 1)
  (folder / ".lock").unlink()  # the system gives the lock of a dead process free.
  with workdirs.opened(url) as again:
    assert again == folder and restored(again) == 1
  with pytest.raises(url_runs.Taken):
    died.__exit__(None, None, None)


def test_one_of_many_that_create_a_file_succeeds(url):
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    made = [pool.submit(remote.RemoteFolder(url).create, "lock", b"%d" % n) for n in range(32)]
  outcomes = [each.result() for each in made]
  assert outcomes.count(True) == 1
  assert remote.RemoteFolder(url).read("lock") == b"%d" % outcomes.index(True)


def test_a_url_with_other_files_and_a_lock_that_cannot_be_read(there, url):
  there.mkdir()
  (there / "thesis.tex").write_text("")
  with pytest.raises(
    folder_lock.UnusableFolder, match=r"not of a run, such as thesis.tex: name a new folder"
  ):
    workdirs.opened(url).__enter__()
  assert names_in(there) == {"thesis.tex"}
  (there / "lock.json").write_text("half")
  with pytest.raises(folder_lock.UnusableFolder, match=r"in use by an unknown run"):
    workdirs.opened(url).__enter__()


# --- deaths and failures ---


class Deaths:
  """Has the calls of the storage end the process, or fail, from one call on."""

  def __init__(self, monkeypatch):
    self.calls, self.at, self.kind, self.lasts = 0, -1, Died, True
    real = remote.RemoteFolder._call

    def call(place, what, name, act):
      number, self.calls = self.calls, self.calls + 1
      if number == self.at or (self.lasts and 0 <= self.at < number):
        if number == self.at and number % 2:  # after its effect.
          real(place, what, name, act)
        raise self.kind("planned")
      return real(place, what, name, act)

    monkeypatch.setattr(remote.RemoteFolder, "_call", call)


@pytest.mark.long
def test_whenever_a_run_dies_its_newest_checkpoint_and_all_before_it_are_at_the_url(
  url, there, machine, monkeypatch
):
  monkeypatch.setattr(
    remote.RemoteFolder, "each", lambda _, act, names: [act(name) for name in names]
  )
  deaths = Deaths(monkeypatch)
  number, seen = 0, set()
  while True:
    shutil.rmtree(there, ignore_errors=True)
    deaths.calls, deaths.at = 0, number
    machine(f"first-{number}")
    try:
      with workdirs.opened(url) as folder:
        saved(folder, 1, 2, keep_last=1)
      break
    except (Died, checkpoint_errors.CheckpointError):
      pass
    deaths.at = -1
    (there / "lock.json").unlink(missing_ok=True)
    machine(f"second-{number}")
    with workdirs.opened(url) as folder:
      step = restored(folder)
      seen.add(step)
      if step:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        assert len(lines) >= step, number
        assert (folder / "rollouts" / f"step_{step - 1:06d}.jsonl").is_file()
      assert workdirs.steps(folder) == ([step] if step else []) or step == 2, number
    number += 3  # odd: in turn before and after the effect of a call.
  assert number > 20 and seen == {0, 1, 2}


def test_a_url_that_cannot_be_reached_at_the_end_is_completed_by_the_same_command(
  url, there, monkeypatch
):
  deaths = Deaths(monkeypatch)
  deaths.kind = remote.RemoteError
  with pytest.raises(url_runs.NotCopied) as error:
    with workdirs.opened(url) as folder:
      (folder / "config.json").write_text("{}")
      deaths.at = deaths.calls
  said = str(error.value)
  assert f"It is in {folder}; the same command on this machine copies it" in said
  deaths.at = -1
  with workdirs.opened(url):
    pass
  assert (there / "config.json").read_text() == "{}" and not (there / "lock.json").exists()


def test_a_pass_that_fails_warns_and_is_repeated(url, there, monkeypatch, caplog):
  monkeypatch.setattr(url_runs, "EVERY_S", 0.01)
  deaths = Deaths(monkeypatch)
  deaths.kind, deaths.lasts = remote.RemoteError, False
  with workdirs.opened(url) as folder:
    deaths.at = deaths.calls + 2
    while deaths.calls < deaths.at + 3:
      pass
    (folder / "config.json").write_text("{}")
    while not (there / "config.json").exists():
      pass
  assert f"{url} is not up to date, and is tried again" in caplog.text


def test_a_signal_waits_until_the_url_is_complete(url, there):
  with interrupts.Flag() as stop, workdirs.opened(url, stop=stop) as folder:
    (folder / "config.json").write_text("{}")
    stop._finish()  # as its thread does after the checkpoint.
    assert (there / "config.json").is_file() and not (there / "lock.json").exists()


def test_a_checkpoint_that_is_incomplete_is_left_out_and_one_that_cannot_be_read_is_not(
  finished, url, there, machine, caplog
):
  newest = there / "checkpoints" / "step_00000002"
  arrays = newest / "state" / "manifest.ocdbt"
  content = arrays.read_bytes()
  with workdirs.opened(url) as folder:
    arrays.write_bytes(bytes(len(content)))
    with pytest.raises(checkpoint_errors.CheckpointError) as error:
      restored(folder)
    assert f"they are damaged: remove {newest}/manifest.json" in str(error.value)
    arrays.write_bytes(content[:-1])
    assert restored(folder) == 1
    assert "step_00000002 cannot be used: state/manifest.ocdbt has" in caplog.text
    arrays.write_bytes(content)
    (newest / "manifest.json").unlink()
    assert restored(folder) == 1 and not newest.exists()


def test_a_network_that_fails_is_not_a_damaged_checkpoint(finished, url, monkeypatch):
  with workdirs.opened(url) as folder:
    deaths = Deaths(monkeypatch)
    deaths.kind, deaths.lasts = remote.RemoteError, False
    for number in range(20):
      deaths.calls, deaths.at = 0, number
      try:
        assert restored(folder) == 2
      except checkpoint_errors.CheckpointError as error:
        assert "planned" in str(error)
      if deaths.calls <= number:
        break
    assert number > 4
    deaths.at = -1


# --- URLs ---


@pytest.mark.parametrize(
  ("url", "message"),
  [
    ("s3://bucket/run", "Orbax writes checkpoints to gs:// only; name a folder of a disk"),
    ("https://host/run", "Orbax writes checkpoints to gs:// only"),
    ("memory://run", "Orbax writes checkpoints to gs:// only"),
    ("file://run", "an absolute path is needed: file:///FOLDER"),
    ("gs://", "a bucket or folder is missing after gs://"),
  ],
)
def test_a_url_that_no_run_can_write_is_refused_by_one_line(url, message):
  with pytest.raises(folder_lock.UnusableFolder) as error:
    workdirs.check(url)
  assert str(error.value).startswith(f"--workdir={url}: {message}")


def test_the_local_folder_follows_from_the_url(tmp_path):
  folder = url_runs.local_folder("gs://bucket/runs/first/")
  assert folder == url_runs.local_folder("gs://bucket/runs/first")
  assert folder.name.startswith("first-") and folder != url_runs.local_folder("gs://b/runs/first")
  assert folder.parent == tmp_path / "machines" / "first" / "runs"
  assert local_paths.is_url("gs://bucket/run") and not local_paths.is_url("gs:/bucket")
  assert not local_paths.is_url(pathlib.Path("gs://bucket/run"))
