"""A signal to one process of a run ends all at the same step, with a checkpoint and one code.

What ends a process that waits in a collective is in test_failing_processes.py.
"""

import os
import signal
import time

import pytest

from tests import quick_compilation, several

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
  environment = {"XLA_FLAGS": quick_compilation.FLAGS}
  run = several.start(config, workdir, arguments, devices=1, environment=environment, **options)
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


def test_a_signal_to_one_process_stops_both_at_the_same_step(config, tmp_path):
  run = started(config, tmp_path / "run", until="/100000 ")
  os.kill(run.processes[1].pid, signal.SIGTERM)
  codes, seconds = ended(run, 60)
  assert codes == [143, 143], run.text(0) + run.text(1)
  assert seconds < 30
  assert "stopped; the same command with --workdir=" in run.text(0), run.text(0)
  assert step_saved(tmp_path / "run") > "step_00000000"
