"""A process that waits for another one in a collective of the devices learns what became of it."""

import os
import pathlib
import signal
import time

import pytest

from tests import several

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

LOOPING = pathlib.Path(__file__).parent / "looping.py"
HEARTBEAT_S, WAIT_S = 4, 3
# Modes of looping.py in which process 1 leaves by itself; other names have the victim and signal.
SENT = {
  "killed": (1, signal.SIGKILL),
  "main one killed": (0, signal.SIGKILL),
  "suspended": (1, signal.SIGSTOP),
  "main one suspended": (0, signal.SIGSTOP),
}
MODES = ("mistake", "failure", "hanging", "sleeping in pieces", *SENT, "signalled twice", "asked")


def pair(folder, mode):
  """Starts two processes that loop; process 1 ends the loop, or a signal does."""

  def command(address, index):
    options = {"coordinator": address, "processes": 2, "index": index}
    options |= {"heartbeat_s": f"{HEARTBEAT_S}.0", "wait_s": f"{WAIT_S}.0"}
    given = [LOOPING, mode, f"--config={several.ROOT}/configs/quickstart.py"]
    given += ["--workdir=runs/looping"]
    return [*given, *(f"--config.distributed.{name}={value}" for name, value in options.items())]

  return several.start_python(command, folder / mode, devices=1)


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
  """What each mode ended with: exit codes and texts of both, and the seconds until all ended."""
  folder = tmp_path_factory.mktemp("looping")
  found = {}
  for some in (MODES[:4], MODES[4:]):  # side by side, since most of the time is spent waiting.
    runs = {mode: pair(folder, mode) for mode in some}
    try:
      found |= {mode: ended(run, mode) for mode, run in runs.items()}
    finally:
      for run in runs.values():
        run.kill()
  return found


def ended(run, mode):
  deadline = time.monotonic() + 100
  while "looping" not in run.text(1) or "looping" not in run.text(0):
    assert time.monotonic() < deadline, run.text(0) + run.text(1)
    time.sleep(0.05)
  began = time.monotonic()
  victim = None
  if mode in SENT:
    victim, number = SENT[mode]
    os.kill(run.processes[victim].pid, number)
  if mode == "asked":
    os.kill(run.processes[0].pid, signal.SIGINT)
  if mode == "signalled twice":
    for _ in range(2):
      os.kill(run.processes[1].pid, signal.SIGTERM)
      time.sleep(0.3)
  waited = [process for i, process in enumerate(run.processes) if i != victim]
  codes = [process.wait(60) for process in waited]
  seconds = time.monotonic() - began
  run.kill()
  return codes, [run.text(0), run.text(1)], seconds


@pytest.mark.parametrize(
  ("mode", "code", "reason"),
  [
    ("mistake", 1, "error: process 1 of 2 ({host}): ValueError: a wrong line on one host"),
    ("failure", 3, "error: process 1 of 2 ({host}): a disk of one host"),
    ("hanging", 1, "(distributed.wait_s); it is in {looping}"),
    ("sleeping in pieces", 1, "(distributed.wait_s); it is in {looping}"),
  ],
)
def test_a_process_that_fails_or_hangs_ends_both_with_its_reason(ends, mode, code, reason):
  codes, (first, second), seconds = ends[mode]
  assert codes == [code, code], first + second
  assert seconds < WAIT_S + 15
  host = several.socket.gethostname()
  assert reason.format(host=host, looping=LOOPING) in first, first
  assert f"error: process 1 of 2 ({host}): " in first
  assert first.rstrip().endswith("\nthe same command with --workdir=runs/looping continues"), first
  assert first.count("error: ") == 1 and "Traceback" not in first, first
  assert ("Traceback" in second) == (mode == "mistake"), second
  assert "error: process" not in second, second
  assert "JaxRuntimeError" not in first + second


@pytest.mark.parametrize("mode", SENT)
def test_a_process_that_is_lost_ends_the_other_and_is_named(ends, mode):
  codes, texts, seconds = ends[mode]
  victim, _ = SENT[mode]
  text = texts[1 - victim]
  assert codes == [1], text
  assert seconds < HEARTBEAT_S + 15
  last = text.rstrip().splitlines()[-2:]
  assert last[0].startswith(f"error: process {victim} of 2 ("), text
  assert last[1] == "the same command with --workdir=runs/looping continues", text
  assert f"process {1 - victim} of 2" not in text, text
  assert "Traceback" not in text


def test_a_second_signal_ends_both_at_once(ends):
  codes, texts, seconds = ends["signalled twice"]
  assert codes == [143, 143], texts
  assert seconds < 6
  assert "error" not in texts[0] + texts[1], texts
  assert "Traceback" not in texts[0] + texts[1], texts


def test_a_signal_to_the_main_process_stops_both(ends):
  codes, texts, _ = ends["asked"]
  assert codes == [130, 130], texts
  assert "error" not in texts[0] + texts[1] and "Traceback" not in texts[0] + texts[1], texts
