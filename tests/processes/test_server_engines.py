"""SGLang engines of two processes, which start servers or are given some."""

import json
import re

import pytest

from tests import several
from tests.engines import sglang_fixtures

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

WORKER = several.ROOT / "tests" / "processes" / "engine_worker.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("engines")
  sglang_fixtures.write_model(folder / "model")
  return folder


@pytest.fixture(scope="module")
def found(folder):
  """Returns what each of two processes saw."""
  started = several.start_python(
    lambda address, index: [WORKER, address, index, folder], folder / "worker", devices=2
  )
  started.succeed(200)
  return [json.loads((folder / f"found-{index}.json").read_text()) for index in range(2)]


def test_the_probe_of_weights_on_both_processes_is_that_of_whole_weights(found):
  assert max(each["probe"] for each in found) < 1e-5


def test_each_process_starts_and_uses_a_server_of_its_own(found):
  first, second = (each["own_servers"] for each in found)
  assert len({*first["address"], *second["address"]}) == 2
  assert first["logs"] == ["server_0.log", "server_1.log"]
  for index, each in enumerate((first, second)):
    assert each["sampled"] == [
      [[(100 * index + i) % 50, (100 * index + i + 1) % 50], [0, 0]] for i in range(12)
    ]


def test_processes_that_see_the_same_folder_write_one_copy_together(found):
  both = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
  for version in ("first", "second", "fourth"):  # the worker compares all values.
    first, second = (each["own_servers"][version] for each in found)
    assert first == second and first[1] == both


def test_processes_with_separate_folders_write_a_copy_each(found):
  first, second = (each["separate_folders"] for each in found)
  assert first[0] != second[0]
  assert first[1] == second[1] == ["model.safetensors"]


def test_a_full_disk_on_one_process_is_an_error_of_both_and_the_next_version_is_written(found):
  first, second = (each["own_servers"]["full"] for each in found)
  assert second[0] == first[0] == "TransferError"
  assert "version 2 of the weights could not be written" in second[1]
  assert first[1].startswith("process 1 of 2 (") and first[1].endswith(second[1])
  assert found[0]["own_servers"]["folders"] == [".lock", ".spare", "v000003"]


def test_a_lost_server_is_replaced_by_its_own_process_and_counted_once(found):
  first, second = (each["own_servers"] for each in found)
  assert {tuple(versions) for _, versions in first["again"] + second["again"]} == {(1, 1)}
  assert first["metrics"] == second["metrics"]
  assert first["metrics"]["engine/restarts"] == 1
  assert first["metrics"]["mismatch/probe_abs_logprob_max"] < 1e-5


def test_nothing_is_left(found, folder):
  assert [each["own_servers"]["left"] for each in found] == [[], []]
  assert not [p for p in folder.rglob(".process-*")]
  assert not sglang_fixtures.processes_in(folder, "fake_sglang.py")
  for name in ("own", "stale", "broken", "ports"):
    assert not sglang_fixtures.processes_in(folder / name / "servers")


@pytest.mark.parametrize(
  ("case", "kinds", "message"),
  [
    ("stale", ["EngineFailure", "WrongWeights"], "server 1 at .* does not sample from the weights"),
    ("broken", ["EngineFailure", "FleetError"], "server 1 .* could not be started"),
  ],
)
def test_a_server_of_one_process_that_fails_ends_both_with_its_message(found, case, kinds, message):
  results = [each["failures"][case] for each in found]
  assert [kind for kind, _, _ in results] == kinds
  assert all(is_recorded for _, _, is_recorded in results)
  assert re.search(message, results[1][1])
  assert results[0][1].startswith("process 1 of 2 (") and results[0][1].endswith(results[1][1])


def test_a_process_does_not_wait_for_its_server_once_another_one_has_failed(found):
  assert max(each["failures"]["broken after"] for each in found) < 15  # it takes a minute.


def test_a_host_without_servers_is_found_before_the_run_begins(found):
  kinds, messages, _ = zip(*(each["failures"]["missing"] for each in found), strict=True)
  assert kinds == ("ServerError", "ServerError")
  assert "there is no program 'no-such-program'" in messages[0]
  assert "process 1 of 2" in messages[0]


def test_ports_and_gpus_of_a_host_are_divided_among_its_processes(found):
  for index, each in enumerate(found):
    port, address = each["failures"]["ports"]
    assert address == f"http://127.0.0.1:{port + index}"
  kinds, messages, _ = zip(*(each["failures"]["gpus"] for each in found), strict=True)
  assert kinds == ("ServerError", "ServerError")
  needed = "1 servers of 1 GPUs, after 1 of other processes on this host, need 2"
  assert all(needed in message for message in messages)


def test_given_servers_are_divided_among_the_processes_which_give_them_weights(found):
  for index, each in enumerate(each["given_servers"] for each in found):
    addresses, own = each["addresses"]
    assert own == [addresses[index]]
    assert [tokens for tokens, _ in each["sampled"]] == [
      [(100 * index + i) % 50, (100 * index + i + 1) % 50] for i in range(40)
    ]
    asked = each["asked"]
    assert asked["/update_weights_from_disk"] == asked["/pause_generation"] == 2
    assert asked["/generate"] == 40 + 2  # completions, and a probe of each version.
    assert asked["/abort_request"] == 1  # what an earlier run left.
    assert asked["most"] <= 6
  first, second = (each["given_servers"] for each in found)
  assert first["files"] == second["files"]


def test_a_given_server_that_restarts_gets_its_weights_from_its_own_process(found):
  first, second = (each["given_servers"] for each in found)
  assert {tuple(versions) for _, versions in first["again"] + second["again"]} == {(1, 1)}
  assert second["asked again"]["/update_weights_from_disk"] == 1
  assert first["asked again"]["/update_weights_from_disk"] == 2  # as before: it was not restarted.
  assert first["metrics"] == second["metrics"]
  assert first["metrics"]["engine/restarts"] == 1
  assert first["metrics"]["mismatch/probe_abs_logprob_max"] < 1e-5


def test_adapters_are_written_once_and_loaded_and_unloaded_by_the_process_of_each_server(found):
  first, second = (each["given_adapters"] for each in found)
  for each in (first, second):
    for version in (1, 2, 3):
      assert {tuple(of) for _, of in each[f"sampled {version}"]} == {(version, version)}
    assert each["probe"] < 1e-4
    asked = each["asked"]
    assert asked["/load_lora_adapter"] == 3 and asked["/unload_lora_adapter"] == 2
    assert asked["/update_weights_from_disk"] == asked["/pause_generation"] == 1  # the base.
    assert asked["/generate"] == 3 * (12 + 1)  # completions, and a probe of each version.
  assert first["folders"] == second["folders"] == [".lock", "base", "v000003"]


def test_a_teacher_s_servers_are_asked_once_for_each_completion_by_one_of_the_processes(found):
  first, second = (each["teacher_servers"] for each in found)  # the worker compares all values.
  assert (first["asked"], second["asked"]) == (3, 2) and first["rows"] == 5
  assert first["failed"][0] == second["failed"][0] == "ScoringError"
  message = "a completion was not scored in up to 1 tries"
  assert second["failed"][1].startswith(f"teacher.urls: {message}")
  assert first["failed"][1].startswith("teacher.urls: process 1 of 2 (")
  assert message in first["failed"][1]
