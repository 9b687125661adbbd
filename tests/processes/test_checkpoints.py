"""Checkpoints and exports of two processes: each writes its shards, and both decide alike."""

import json

import pytest

from grpo_jax.files import remote
from grpo_jax.learn import sharding
from grpo_jax.run_folder import checkpointing, url_steps
from tests import quick_compilation, several
from tests.processes import checkpoint_worker

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def mesh_of_one_process():
  return sharding.make_mesh(data=1, fsdp=4, tensor=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("checkpoints")
  with checkpointing.open(folder / "written_by_one") as checkpoints:
    checkpoints.save(8, checkpoint_worker.make_state(8, mesh_of_one_process()), {"cursor": 8})
  return folder


@pytest.fixture(scope="module")
def both(folder):
  """Returns what each of two processes saw."""
  started = several.start_python(
    lambda address, index: [checkpoint_worker.__file__, address, index, folder],
    folder / "worker",
    devices=2,
    environment={"XLA_FLAGS": quick_compilation.FLAGS},
  )
  started.succeed(120)
  return [json.loads((folder / f"found-{index}.json").read_text()) for index in range(2)]


def test_saved_shards_are_restored_bit_for_bit_onto_two_meshes(both):
  for found in both:
    assert found["saves"] == {"is_new": True, "steps": [2, 3], "is_equal": [True, True]}


def test_two_processes_write_a_checkpoint_at_a_url_which_one_process_restores(both, folder):
  for found in both:
    found = found["at_url"]
    assert found["is_equal"] and found["steps"] == found["left"] == [2, 3]
    kind, message = found["error"]
    assert kind == "CheckpointError" and "must share its folder" in message
  mesh = mesh_of_one_process()
  with checkpointing.open(
    url_steps.AtUrl(remote.RemoteFolder(f"file://{folder}/at_url"))
  ) as checkpoints:
    state, extra = checkpoints.restore_latest(checkpoint_worker.make_state(0, mesh))
  assert extra == {"cursor": 3}
  wanted = checkpoint_worker.make_state(3, mesh)
  assert checkpoint_worker.bits(state) == checkpoint_worker.bits(wanted)


def test_one_process_restores_what_two_have_written_and_the_other_way_round(both, folder):
  for found in both:
    assert found["written_by_one"] == {"is_equal": True, "extra": {"cursor": 8}}
  mesh = mesh_of_one_process()
  with checkpointing.open(folder / "written_by_one") as checkpoints:
    state, extra = checkpoints.restore_latest(checkpoint_worker.make_state(0, mesh))
  wanted = checkpoint_worker.make_state(9, mesh)
  assert checkpoint_worker.bits(state) == checkpoint_worker.bits(wanted)
  assert extra == {"cursor": 9}


@pytest.mark.parametrize("moment", ["room", "begin 0", "begin 1", "writing", "manifest"])
def test_a_disk_that_is_full_for_one_process_fails_the_save_on_both(both, moment):
  owner = 1 if moment in ("begin 1", "writing") else 0
  errors = [found["full_disks"][moment] for found in both]
  assert [kind for kind, _ in errors] == ["CheckpointError", "CheckpointError"]
  reason = {"room": "the disk is full", "writing": "File too large"}.get(moment, "No space left")
  assert all(reason in message for _, message in errors), errors
  other = errors[1 - owner][1]
  assert f"process {owner} of 2 (" in other and len(other.splitlines()) == 1


def test_a_failed_save_leaves_nothing_and_can_be_repeated(both):
  for found in both:
    assert found["full_disks"]["names"] == ["step_00000001"]
    assert found["full_disks"]["again"] is True
    assert found["full_disks"]["steps"] == ["step_00000001", "step_00000002"]
  assert both[0]["full_disks"]["names after"] == ["step_00000001"]


def test_a_checkpoint_without_the_shards_of_a_process_is_not_completed(both):
  for found in both:
    kind, message = found["elsewhere"]["error"]
    assert kind == "CheckpointError" and "must share its folder" in message
    assert found["elsewhere"]["names"] == []


def test_each_file_is_digested_by_one_of_the_processes(both, folder):
  listed = json.loads((folder / "three" / "step_00000003" / "manifest.json").read_text())["files"]
  digested = [found["verdicts"]["digested"] for found in both]
  assert sorted(digested[0] + digested[1]) == sorted(name.split("/")[-1] for name in listed)
  assert abs(len(digested[0]) - len(digested[1])) <= 1


@pytest.mark.parametrize("case", ["refused 0", "refused 1", "unreadable 1"])
def test_what_one_process_cannot_use_is_used_by_none(both, case):
  assert both[0]["verdicts"]["intact"] == 3
  assert [found["verdicts"][case] for found in both] == [2, 2]


def test_errors_of_a_restore_are_the_same_on_both(both):
  for name, kind, text in (
    ("none", "CheckpointError", "step_00000001: no reason"),
    ("other", "OtherStateError", "params.more: saved nothing"),
  ):
    errors = [found["verdicts"][name] for found in both]
    assert errors[0] == errors[1]
    assert errors[0][0] == kind and text in errors[0][1]


def test_a_damaged_or_missing_file_is_noticed_by_both_whichever_digests_it(both):
  assert both[0]["damaged"] == both[1]["damaged"]
  # What the manifest says of itself is compared with the files, and the folder has other entries.
  assert {*both[0]["damaged"].values()} == {2}
  assert sum("ocdbt.process_1" in name for name in both[0]["damaged"]) >= 4


@pytest.mark.parametrize(
  ("case", "step", "errors"),
  [
    ("together", 4, [["OtherProcessError", "process 1 of 2"], ["OSError", "the disk is full"]]),
    ("stopped", 5, [None, None]),
  ],
)
def test_what_all_processes_know_of_is_followed_by_a_checkpoint(both, case, step, errors):
  for found, error in zip(both, errors, strict=True):
    ended = found["kept"][case]
    assert ended["steps"] == [step]
    if error is None:
      assert ended["error"] is None
    else:
      assert ended["error"][0] == error[0] and error[1] in ended["error"][1]


@pytest.mark.parametrize("case", ["alone", "other steps"])
def test_nothing_is_saved_if_the_processes_have_not_come_to_the_same_point(both, case):
  for found in both:
    assert found["kept"][case]["steps"] == []
    assert found["kept"][case]["error"] is not None
    notices = found["kept"]["notices"]
    assert sum("have not come to the same point" in line for line in notices) == 2
    assert any("continues at step 0" in line for line in notices)


def test_an_export_is_that_of_one_process_and_compiles_nothing_late(both, folder):
  alone = {path.name: path.read_bytes() for path in (folder / "exports" / "alone").iterdir()}
  whole = {path.name: path.read_bytes() for path in (folder / "exports" / "whole").iterdir()}
  assert len(alone) > 3 and whole == alone
  for found in both:
    assert found["exports"]["jobs"] > 0 and found["exports"]["compiled"] == 0


def test_a_full_disk_during_an_export_ends_both_and_leaves_nothing(both):
  errors = [found["exports"]["error"] for found in both]
  assert errors[0][0] == "WriteError" and "No space left" in errors[0][1]
  assert errors[1][0] == "OtherProcessError" and "process 0 of 2" in errors[1][1]
  assert both[0]["exports"]["names"] == ["alone", "whole"]


def test_a_folder_that_the_processes_do_not_share_is_refused_by_both(both):
  for found in both:
    found = found["separate_folders"]
    assert found["shared"] is None
    for case in ("separate", "absent"):
      kind, message = found[case]
      assert kind == "UnusableFolder" and "not one folder that all processes share" in message
    assert found["names"] == ["own-0", "own-1"]
