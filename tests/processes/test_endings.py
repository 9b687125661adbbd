"""What ends one process of a run ends all: how soon, with which message, code and checkpoint."""

import os
import signal
import time

import pytest

from tests import several

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

HEARTBEAT_S = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  """The config of a run that lasts until something ends it."""
  path = several.write_input(tmp_path_factory.mktemp("input"))
  path.write_text(
    path.read_text().replace(
      "  return config",
      f"""  config.total_steps = 100_000
  config.evaluation.every_steps = 0
  config.checkpoint.every_steps = 100_000
  config.distributed.heartbeat_s = {HEARTBEAT_S}.0
  config.distributed.wait_s = 60.0
  return config""",
    )
  )
  return path


def started(config, workdir, arguments=(), *, until="  1/", **options):
  """Returns a run of two processes once process 0 has printed a string."""
  run = several.start(config, workdir, arguments, devices=1, **options)
  deadline = time.monotonic() + 120
  while until not in run.text(0):
    assert time.monotonic() < deadline and all(p.poll() is None for p in run.processes), run.text(
      0
    ) + run.text(1)
    time.sleep(0.05)
  return run


def ended(run, timeout):
  """Returns the exit codes and the seconds that all took."""
  began = time.monotonic()
  codes = run.wait(timeout)
  return codes, time.monotonic() - began


def step_saved(workdir):
  return max(path.name for path in (workdir / "checkpoints").glob("step_*"))


def test_a_signal_to_any_process_stops_both_at_the_same_step(config, tmp_path):
  before = "step_00000000"
  for victim, code in ((1, signal.SIGTERM), (0, signal.SIGINT)):
    run = started(config, tmp_path / "run", until="/100000 ")
    os.kill(run.processes[victim].pid, code)
    codes, seconds = ended(run, 60)
    assert codes == [128 + code] * 2, run.text(0) + run.text(1)
    assert seconds < 30
    assert "stopped; the same command with --workdir=" in run.text(0), run.text(0)
    assert step_saved(tmp_path / "run") > before
    before = step_saved(tmp_path / "run")


@pytest.mark.parametrize(
  ("victim", "code"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_a_process_that_is_lost_ends_the_other_and_is_named(config, tmp_path, victim, code):
  run = started(config, tmp_path / "run")
  os.kill(run.processes[victim].pid, code)
  other = 1 - victim
  began = time.monotonic()
  assert run.processes[other].wait(HEARTBEAT_S + 20) == 1, run.text(other)
  assert time.monotonic() - began < HEARTBEAT_S + 15
  run.kill()
  text = run.text(other)
  assert f"error: process {victim} of 2 (" in text, text
  assert "continues" in text
