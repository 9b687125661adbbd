"""Run folders at a URL: who may use one, what is fetched, and how the end of a run waits."""

import contextlib
import json
import pathlib
import shutil
import threading
import time

import pytest

from grpo_jax import interrupts
from grpo_jax.files import local_paths, manifest, remote
from grpo_jax.run_folder import claim, workdirs
from grpo_jax.run_folder.mirrored import copies, fetching, layout, lease, mirror, opening
from tests.run_folder.faulty_storage import FaultyStorage, Plan

URL = "faulty://bucket/run"


pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def storage(monkeypatch, tmp_path):
  FaultyStorage.clear()
  monkeypatch.setattr(mirror, "GIVE_UP_S", 2.0)
  monkeypatch.setenv("GRPO_JAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.setattr(lease, "SETTLE_S", 0.0)
  monkeypatch.setattr(mirror, "EVERY_S", 0.01)
  monkeypatch.setattr(mirror.Mirror, "_until_done", quickly(mirror.Mirror._until_done))
  yield
  FaultyStorage.clear()


def quickly(until_done):
  """Has the thread wait a hundredth of the time between two attempts."""

  def call(self, act):
    wait = self._given_up.wait
    self._given_up.wait = lambda seconds: wait(seconds / 100)
    try:
      until_done(self, act)
    finally:
      self._given_up.wait = wait

  return call


def save(folder, step, text="weights"):
  """Writes a checkpoint, and the line and the rollouts of the step before it."""
  folder.mkdir(exist_ok=True)
  with (folder / "metrics.jsonl").open("a") as file:
    file.write(json.dumps({"step": step - 1}) + "\n")
  (folder / "config.json").write_text("{}")
  (folder / "rollouts").mkdir(exist_ok=True)
  (folder / "rollouts" / f"step_{step - 1:06d}.jsonl").write_text(f"{step}\n")
  made = folder / layout.step_folder(step)
  made.mkdir(parents=True)
  (made / "state").write_text(f"{text} of {step}")
  manifest.write(made)


def stored():
  prefix = "/bucket/run/"
  return {
    path.removeprefix(prefix): file.getvalue()
    for path, file in FaultyStorage.store.items()
    if path.startswith(prefix)
  }


def put(name, content):
  FaultyStorage().pipe_file(f"faulty://bucket/run/{name}", content)


def steps_of(folder):
  return layout.local_steps(folder)


@pytest.fixture
def finished():
  """A run of two checkpoints at the URL; returns its local folder."""
  with workdirs.opened(URL) as folder:
    save(folder, 1)
    save(folder, 2)
    (folder / "report.html").write_text("<p>")
    (folder / "export").mkdir()
    (folder / "export" / "config.json").write_text("{}")
    (folder / "export" / "model.safetensors").write_bytes(b"w")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "weights").mkdir()
    (folder / "weights" / "of_servers").write_text("")
    (folder / "half.tmp").write_text("")
  return folder


def test_the_end_of_the_block_waits_until_everything_is_there(finished):
  assert finished == opening.local_copy(URL)
  assert finished.parent.parent.name == "cache"
  names = {
    *("config.json", "metrics.jsonl", "report.html", "run.json"),
    *("export/config.json", "export/model.safetensors", "adapter/adapter_config.json"),
    *("rollouts/step_000000.jsonl", "rollouts/step_000001.jsonl"),
    *(f"{layout.step_folder(s)}/{n}" for s in (1, 2) for n in ("state", "manifest.json")),
    *(f"{layout.step_folder(s)}/{layout.HISTORY}" for s in (1, 2)),
  }
  assert stored().keys() == names  # no lease and no probe either.


def test_an_empty_machine_gets_the_run_back(finished, tmp_path):
  with workdirs.opened(URL, local=tmp_path / "other") as folder:
    assert steps_of(folder) == [2, 1]
    assert manifest.damage(folder / layout.step_folder(2)) is None
    assert (folder / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    assert (folder / "rollouts" / "step_000001.jsonl").is_file()
    assert not (folder / "export").exists() and not (folder / "adapter").exists()
    assert not (folder / layout.step_folder(2) / layout.HISTORY).exists()
    save(folder, 3)
    shutil.rmtree(folder / layout.step_folder(1))
  assert layout.complete(stored()) == [3, 2]
  assert "export/model.safetensors" in stored()


@pytest.mark.parametrize("is_empty", [True, False], ids=["new-url", "url-with-a-run"])
def test_a_run_that_is_killed_while_it_fetches_need_not_wait_for_its_own_lease(
  is_empty, finished, tmp_path, monkeypatch
):
  """The lease and the local copy have one identity from the first moment on."""
  if is_empty:
    FaultyStorage.clear()
  folder, seen, fetch = tmp_path / "new", [], fetching.fetch

  def watched(*args, **options):
    seen.append((json.loads(stored()["lease.json"])["owner"], copies.read_copy(folder).owner))
    return fetch(*args, **options)

  monkeypatch.setattr(fetching, "fetch", watched)
  with workdirs.opened(URL, local=folder):
    seen.append((json.loads(stored()["lease.json"])["owner"], copies.read_copy(folder).owner))
  assert len({owner for pair in seen for owner in pair}) == 1 and len(seen) >= 1 + (not is_empty)


def test_a_damaged_checkpoint_is_left_out_and_later_replaced(finished, tmp_path, caplog):
  put(f"{layout.step_folder(2)}/state", b"flipped")
  with workdirs.opened(URL, local=tmp_path / "other") as folder:
    assert steps_of(folder) == [1]
    assert "step_00000002 cannot be used: state has" in caplog.text
    save(folder, 2)
  assert stored()[f"{layout.step_folder(2)}/state"] == b"weights of 2"


def test_a_run_never_begins_again_where_no_checkpoint_can_be_used(finished, tmp_path):
  for step in (1, 2):
    put(f"{layout.step_folder(step)}/state", b"flipped")
  with pytest.raises(claim.Unusable, match="no checkpoint can be used") as error:
    with workdirs.opened(URL, local=tmp_path / "other"):
      raise AssertionError
  assert "\n" not in str(error.value)


def test_an_incomplete_checkpoint_is_not_taken_for_complete(finished, tmp_path):
  FaultyStorage().rm_file(f"{URL}/{layout.commit_mark(2)}")
  with workdirs.opened(URL, local=tmp_path / "other") as folder:
    assert steps_of(folder) == [1]


def test_a_local_folder_that_is_ahead_is_taken(finished):
  save(finished, 3)  # the machine died before this was uploaded.
  with workdirs.opened(URL) as folder:
    assert (folder, steps_of(folder)) == (finished, [3, 2, 1])
  assert layout.complete(stored()) == [3, 2, 1]


def test_a_local_folder_whose_newest_checkpoint_is_damaged_gets_the_one_of_the_url(finished):
  (finished / layout.step_folder(2) / "state").write_text("torn")
  with workdirs.opened(URL) as folder:
    assert (folder / layout.step_folder(2) / "state").read_text() == "weights of 2"


def test_a_local_folder_that_is_behind_is_brought_up_to_date(finished, tmp_path):
  with workdirs.opened(URL, local=tmp_path / "other") as folder:
    save(folder, 3)
  with workdirs.opened(URL) as folder:
    assert folder == finished and steps_of(folder) == [3, 2, 1]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3


def use(url, **options):
  with workdirs.opened(url, **options):
    raise AssertionError("it was opened")


def test_two_runs_are_never_mixed(finished, tmp_path):
  other = tmp_path / "other"
  with workdirs.opened("faulty://bucket/another", local=other) as folder:
    save(folder, 1, "other weights")
  with pytest.raises(claim.Unusable, match="holds another run than faulty://bucket/run"):
    use(URL, local=other)
  plain = tmp_path / "plain"
  save(plain, 1)
  with pytest.raises(claim.Unusable, match="holds another run than"):
    use(URL, local=plain)
  with pytest.raises(claim.Unusable, match="needs a --workdir that is a URL"):
    use(plain, local=other)


def test_files_of_something_else_are_neither_mixed_nor_deleted(tmp_path):
  FaultyStorage().pipe_file("faulty://bucket/photos/a.jpg", b"a")
  with pytest.raises(claim.Unusable, match="files that are not of a run, such as a.jpg"):
    use("faulty://bucket/photos")
  (tmp_path / "home").mkdir()
  (tmp_path / "home" / "thesis.txt").write_text("")
  with pytest.raises(claim.Unusable, match="files that are not of a run, such as thesis.txt"):
    use(URL, local=tmp_path / "home")
  assert FaultyStorage.store.keys() == {"/bucket/photos/a.jpg"}


def test_files_that_others_put_beside_a_run_stay(finished):
  put("notes.txt", b"mine")
  with workdirs.opened(URL) as folder:
    save(folder, 3)
  assert stored()["notes.txt"] == b"mine"


def test_a_url_that_was_emptied_does_not_get_an_old_run_back_silently(finished):
  FaultyStorage.store.clear()
  with pytest.raises(claim.Unusable, match="is empty, but .* holds a run that was uploaded there"):
    use(URL)


def test_a_local_run_moves_to_an_empty_url_and_a_copied_one_is_continued(tmp_path):
  plain = tmp_path / "plain"
  save(plain, 1)
  with workdirs.opened(URL, local=plain) as folder:
    assert steps_of(folder) == [1]
  copied = {name: content for name, content in stored().items() if name != layout.RUN}
  FaultyStorage.store.clear()
  for name, content in copied.items():
    put(name, content)
  with workdirs.opened(URL, local=tmp_path / "other") as folder:
    assert steps_of(folder) == [1]


# --- two machines ---


def hold(owner="another machine", **options):
  return lease.Lease(remote.Place(URL), owner, **options)


def test_a_second_machine_is_refused_while_the_first_one_lives(tmp_path, monkeypatch):
  with workdirs.opened(URL):
    beats = iter(range(100))

    def pause(seconds):
      content = json.loads(stored()[layout.LEASE])
      put(layout.LEASE, json.dumps(content | {"time": content["time"] + next(beats)}).encode())

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(lease.Taken, match=r"is in use by another run \(process \d+ on "):
      hold(pause=pause).__enter__()
    with pytest.raises(claim.Unusable, match="is in use by another run"):
      use(URL)  # the same local folder.


def test_a_stale_lease_is_taken_over_and_its_holder_stops_uploading(tmp_path):
  place = remote.Place(URL, attempts=1, workers=1)
  (tmp_path / "w").mkdir()
  with contextlib.ExitStack() as stack:
    first = opening.begun(place, tmp_path / "w", stack)
    now = time.time()
    with hold(clock=lambda: now + lease.STALE_S + 1):
      save(tmp_path / "w", 1)
      with pytest.raises(lease.Taken, match="was taken over by process"):
        first.upload()
      assert layout.complete(stored()) == []
      with pytest.raises(lease.Taken):
        first.upload()


def test_a_lease_that_does_not_change_is_stale_whatever_its_clock_says():
  waited = []
  hold("first", clock=lambda: time.time() + 1e6)._write()
  with hold("second", pause=waited.append):
    assert json.loads(stored()[layout.LEASE])["owner"] == "second"
  assert sum(waited) == lease.STALE_S
  assert layout.LEASE not in stored()


def test_waiting_for_a_lease_ends_when_the_run_is_asked_to_end():
  hold("first")._write()
  with pytest.raises(interrupts.Stopped):
    hold("second", stop=True).__enter__()


# --- failures ---


def test_missing_rights_are_found_at_the_start():
  for call in range(3, 7):
    FaultyStorage.clear()
    FaultyStorage.reset(Plan(call, "dies_before"))
    FaultyStorage.plan.kind = "fails_before"
    with pytest.raises(remote.RemoteError, match="faulty://bucket/run.* cannot be .*planned"):
      place = remote.Place(URL, attempts=1)
      place.files()
      place.read("x")
      place.info("x")
      remote.check_access(place, "probe")
      place.files()


def failing(monkeypatch, *, times):
  """Has every change of the store fail that often."""
  left = [times]
  write = remote.Place._writing

  def writing(self, name, act):
    if name.startswith(layout.CHECKPOINTS) and left[0] > 0:
      left[0] -= 1
      raise remote.RemoteError("faulty://bucket/run cannot be written: no network")
    write(self, name, act)

  monkeypatch.setattr(remote.Place, "_writing", writing)
  return left


def test_an_upload_that_fails_for_long_warns_and_is_tried_again(monkeypatch, caplog):
  monkeypatch.setattr(mirror, "WARN_S", 0.02)
  left = failing(monkeypatch, times=8)
  with workdirs.opened(URL) as folder:
    save(folder, 1)
    for _ in range(500):
      if not left[0]:
        break
      time.sleep(0.01)
  assert layout.complete(stored()) == [1]
  warned = [r for r in caplog.records if "has not been up to date for" in r.getMessage()]
  assert 1 <= len(warned) <= 6 and "no network" in warned[0].getMessage()


def test_a_run_whose_end_could_not_be_uploaded_says_where_it_is(monkeypatch):
  monkeypatch.setattr(mirror, "GIVE_UP_S", 0.05)
  failing(monkeypatch, times=10**9)
  with pytest.raises(mirror.NotUploaded) as error:
    with workdirs.opened(URL) as folder:
      save(folder, 1)
  assert "\n" not in str(error.value)
  assert f"the end of the run: {URL} cannot be written: no network" in str(error.value)
  assert f"It is in {folder}" in str(error.value) and steps_of(folder) == [1]
  monkeypatch.undo()
  monkeypatch.setenv("GRPO_JAX_CACHE", str(folder.parent.parent))
  monkeypatch.setattr(lease, "SETTLE_S", 0.0)
  with workdirs.opened(URL) as folder:
    pass
  assert layout.complete(stored()) == [1]


def test_what_ended_the_run_is_raised_though_the_upload_failed(monkeypatch, caplog):
  monkeypatch.setattr(mirror, "GIVE_UP_S", 0.05)
  failing(monkeypatch, times=10**9)
  with pytest.raises(ZeroDivisionError):
    with workdirs.opened(URL) as folder:
      save(folder, 1)
      raise ZeroDivisionError
  assert "does not hold the end of the run" in caplog.text


def test_a_run_that_is_asked_to_end_is_not_ended_before_the_upload(monkeypatch):
  """The main thread computes; the thread of the signal waits for the upload before it ends it."""
  ended = []
  monkeypatch.setattr(interrupts, "GRACE_S", 0.05)
  monkeypatch.setattr(interrupts.os, "_exit", lambda code: ended.append(layout.complete(stored())))
  with interrupts.Flag() as stop, workdirs.opened(URL, stop=stop) as folder:
    stop.on_signal(lambda: save(folder, 1))
    thread = threading.Thread(target=stop._save_and_end, args=(15,))
    thread.start()
    thread.join()
  assert ended == [[1]]


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_uploaded_whole(tmp_path, monkeypatch):
  place = remote.Place(URL, attempts=1, workers=1)
  folder = tmp_path / "w"
  folder.mkdir()
  with contextlib.ExitStack() as stack:
    mirrored = opening.begun(place, folder, stack)
    save(folder, 1)
    put_file = remote.Place.put

    def put_and_delete(self, source, name):
      shutil.rmtree(folder / layout.step_folder(1), ignore_errors=True)
      put_file(self, source, name)

    monkeypatch.setattr(remote.Place, "put", put_and_delete)
    mirrored.upload()
    assert layout.complete(stored()) == [1]
    monkeypatch.undo()
    save(folder, 2)
    mirrored.upload()
    assert layout.complete(stored()) == [2]
    assert [p.name for p in (folder / layout.SCRATCH).iterdir()] == [copies.NAME]


def test_a_large_file_that_grows_is_uploaded_now_and_then_and_with_each_checkpoint(
  tmp_path, monkeypatch
):
  place = remote.Place(URL, attempts=1, workers=1)
  folder = tmp_path / "w"
  folder.mkdir()
  monkeypatch.setattr(mirror, "_LARGE", 10)
  with contextlib.ExitStack() as stack:
    mirrored = opening.begun(place, folder, stack)

    def grown(to):
      (folder / "events").write_text("e" * to)
      mirrored.upload()
      return len(stored()["events"])

    assert [grown(5), grown(9), grown(20)] == [5, 9, 9]
    monkeypatch.setattr(mirror, "LARGE_EVERY_S", 0.0)
    assert grown(30) == 30
    monkeypatch.undo()
    monkeypatch.setattr(mirror, "_LARGE", 10)
    assert grown(40) == 30
    save(folder, 1)
    assert grown(40) == 40


def test_names_that_lead_elsewhere_are_not_fetched(finished, tmp_path):
  put("../../escaped", b"x")
  FaultyStorage.store["/bucket/run/rollouts/../../escaped"] = FaultyStorage.store[
    "/bucket/run/config.json"
  ]
  with workdirs.opened(URL, local=tmp_path / "a" / "b" / "other"):
    assert not list(tmp_path.rglob("escaped"))


def test_a_file_system_of_this_machine_works_too(tmp_path):
  for url in (f"file://{tmp_path}/there", f"local://{tmp_path}/there"):
    with workdirs.opened(url, local=tmp_path / "here") as folder:
      if not steps_of(folder):
        save(folder, 1)
    assert manifest.damage(tmp_path / "there" / layout.step_folder(1)) is None
  with workdirs.opened(f"file://{tmp_path}/there", local=tmp_path / "again") as folder:
    assert fetching.newest_intact(folder) == 1


def test_only_urls_are_urls():
  assert local_paths.is_url("gs://bucket/run") and not local_paths.is_url("gs:/bucket")
  assert not local_paths.is_url(pathlib.Path("gs://bucket/run"))
