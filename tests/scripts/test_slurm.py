"""The Slurm script under a real Slurm, and mpirun's: two nodes on this machine, the tiny model.

One run has four lives: stopped as before a time limit, one of its processes killed, cancelled, and
continued with Open MPI.
"""

import json
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests import several
from tests.scripts import slurm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
LAUNCH = several.ROOT / "scripts" / "launch"
MISSING = slurm_cluster.missing()
NO_MPI = "" if shutil.which("mpirun") else "no mpirun: apt-get install openmpi-bin"


class Run:
  """A run of two processes with two devices each."""

  def __init__(self, folder):
    self.folder, self.log = folder / "run", folder / "log"
    self.arguments = [
      f"--config={several.write_input(folder / 'input')}",
      f"--workdir={self.folder}",
      "--config.total_steps=1000",
      "--config.evaluation.every_steps=0",
      "--config.checkpoint.every_steps=5",
      "--config.distributed.heartbeat_s=10",
    ]
    self.variables = {
      "JAX_PLATFORMS": "cpu",
      "JAX_NUM_CPU_DEVICES": "2",
      "PYTHONPATH": f"{several.PYTHONPATH}:{several.ROOT / 'tests'}",
      "VENV": sys.prefix,
    }

  def steps(self):
    """Returns the steps in metrics.jsonl."""
    path = self.folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines]

  def saved(self):
    """Returns the number of steps in the newest checkpoint."""
    return max(int(path.name[5:]) for path in (self.folder / "checkpoints").glob("step_*"))

  def wait_for_steps(self, is_alive, number=3, timeout=150):
    """Waits until this many more steps are done."""
    wanted, deadline = len(self.steps()) + number, time.monotonic() + timeout
    while len(self.steps()) < wanted:
      assert is_alive() and time.monotonic() < deadline, self.log.read_text()
      time.sleep(0.1)

  def process(self, number):
    """Returns one of the processes."""
    for each in psutil.process_iter(["cmdline"]):
      words = each.info["cmdline"] or []
      if f"--workdir={self.folder}" in words and "python" in words[0]:
        if each.environ()["SLURM_PROCID"] == str(number):
          return each
    raise AssertionError(f"process {number} does not run")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return Run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory, run):
  if MISSING:
    pytest.skip(MISSING)
  with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as cluster:
    cluster.environment.update(run.variables)
    yield cluster


def test_a_job_that_is_stopped_or_loses_a_process_is_queued_again_and_continues(slurm, run):
  job = slurm.run(
    *("sbatch", "--parsable", "--nodes=2", f"--output={run.log}"),
    *(LAUNCH / "slurm.sbatch", *run.arguments),
    cwd=several.ROOT,
  )
  is_alive = lambda: slurm.field(job, "JobState") not in slurm_cluster.ENDED

  run.wait_for_steps(is_alive)
  slurm.run("scancel", "--signal=TERM", job)  # as --signal=TERM@120 does, to all tasks.
  _wait(lambda: slurm.field(job, "Restarts") == "1", run)
  assert "exit code 143: the job is queued again" in run.log.read_text()
  assert run.saved() == len(run.steps()), "the steps until the signal are in a checkpoint"

  run.wait_for_steps(is_alive)
  run.process(1).send_signal(signal.SIGKILL)
  _wait(lambda: slurm.field(job, "Restarts") == "2", run)
  assert "exit code 137: the job is queued again" in run.log.read_text()

  run.wait_for_steps(is_alive)
  slurm.run("scancel", job)
  assert slurm.wait(job, "CANCELLED", "PENDING", "COMPLETED") == "CANCELLED"
  _wait(lambda: not _processes(run), run)
  assert run.saved() == len(run.steps()), "the steps until scancel are in a checkpoint"
  assert run.steps() == list(range(len(run.steps())))

  log = run.log.read_text()
  assert [f"2 processes, restart {life}" in log for life in range(4)] == [True, True, True, False]
  assert log.count("devices: 4 x cpu") == 3


@pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
def test_open_mpis_processes_find_each_other_and_save_at_sigterm(run):
  before = len(run.steps())
  with run.log.open("w") as log:
    started = subprocess.Popen(
      [LAUNCH / "mpirun.sh", "-n", "2", "--allow-run-as-root", "--oversubscribe", "--"]
      + run.arguments,
      env=slurm_cluster.without_slurm() | run.variables,
      stdout=log,
      stderr=log,
    )
  try:
    run.wait_for_steps(lambda: started.poll() is None)
    started.send_signal(signal.SIGTERM)
    code = started.wait(60)
  finally:
    started.kill()
  log = run.log.read_text()
  assert code == 143 and "devices: 4 x cpu" in log, log
  assert run.saved() == len(run.steps()) >= before + 3
  assert run.steps() == list(range(len(run.steps())))


def _processes(run):
  words = f"--workdir={run.folder}"
  return [
    each for each in psutil.process_iter(["cmdline"]) if words in (each.info["cmdline"] or [])
  ]


def _wait(is_so, run, timeout=90):
  deadline = time.monotonic() + timeout
  while not is_so():
    assert time.monotonic() < deadline, run.log.read_text()
    time.sleep(0.2)
