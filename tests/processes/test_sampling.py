"""Sampling by real processes: two and four against one with the same number of devices."""

import pathlib
import pickle

import numpy as np
import pytest

from tests import several

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

# Inputs and outputs of q, k, v, o, gate, up, down; two layers, rank 2, float32.
KERNELS = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 40), (32, 40), (40, 32)]
PROGRAM = pathlib.Path(__file__).with_name("sampling_program.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
  """Returns what each process of one, two and four has found."""
  folder = tmp_path_factory.mktemp("sampling")
  return {count: [*of_processes(folder, count)] for count in (1, 2, 4)}


def of_processes(folder, count):
  started = several.start_python(
    lambda address, index: [PROGRAM, folder, address, count, index],
    folder / str(count),
    processes=count,
  )
  started.succeed(200)
  for i in range(count):
    yield pickle.loads((folder / f"{count}.{i}.pickle").read_bytes())


@pytest.mark.parametrize("count", [2, 4])
def test_the_groups_are_those_of_one_process(found, count):
  ((alone),) = found[1]
  for each in found[count]:
    assert each["groups"]["groups"] == found[count][0]["groups"]["groups"]
    for one, other in zip(each["groups"]["groups"], alone["groups"]["groups"], strict=True):
      assert one[:2] == other[:2]
      for logprobs, wanted in zip(one[2], other[2], strict=True):
        np.testing.assert_allclose(logprobs, wanted, atol=1e-5)


def test_a_copy_of_the_weights_is_split_over_the_devices_of_its_process(found):
  of_device = {count: found[count][0]["groups"]["bytes"] for count in found}
  # Devices of a process: four, two, one. The layers are split over all of them; embedding and head,
  # whose vocabulary is odd, only along "fsdp", which is within a process if there is one.
  layers = 2 * (of_device[4] - of_device[2])
  rest = of_device[4] - layers
  assert layers > 0.4 * of_device[4] and of_device[1] == layers // 4 + rest // 2
  assert [each["groups"]["late"] for each in (*found[2], *found[4])] == [0] * 6


def test_a_sync_copies_the_adapter_only(found):
  exchanged = {count: found[count][0]["groups"]["exchanged"] for count in found}
  # Whole on the devices of one, two and four processes; "tensor" splits B, and "fsdp" A.
  adapter = sum(2 * 4 * 2 * (i + o) for i, o in KERNELS)
  assert exchanged[4] == adapter
  assert exchanged[1] < 4 * adapter and exchanged[2] <= 2 * adapter


@pytest.mark.parametrize("count", [2, 4])
def test_exchanges_arrive_whole_or_name_what_and_who(found, count):
  for index, each in enumerate(found[count]):
    assert [ok for length, ok in each.items() if isinstance(length, int)] == [True] * 3
    assert each["early"] and each["forgotten"] and each["keys"] == []
    last = index == count - 1
    assert each["damaged"].startswith("DamagedError: " if last else "OtherProcessError: process")
    words = f"the groups of step 4: what process {count - 1} of {count} received from process 0"
    assert words in each["damaged"]
  late = found[count][0]["late"]
  missing = ", ".join(f"process {i} of {count}" for i in range(1, count))
  assert late.startswith("ProcessesError: waited ")
  assert late.endswith(f" for the groups of step 9 of {missing}")
