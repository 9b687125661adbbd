"""A run whose processes are killed at random moments ends as one of two processes left in peace.

By default it is killed once as two processes, once as four and once as one, and continued by two.
GRPO_JAX_KILLS=20 kills two processes twenty times. The moments follow from GRPO_JAX_SEED.

What two processes have written is read by the commands, and continued by one process. A run folder
at a URL is brought to two machines that have nothing.
"""

import json
import os
import random
import shutil
import signal
import time

import pytest

from grpo_jax import metrics
from grpo_jax.commands import cli
from tests import quick_compilation, several
from tests.run_folder.buckets import BUCKETS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

KILLS = int(os.environ.get("GRPO_JAX_KILLS", "0"))
SEED = int(os.environ.get("GRPO_JAX_SEED", "1"))
STEPS = 4
# Numbers of processes, and of the devices of each, of the runs that are killed.
LAYOUTS = [(2, 2)] * KILLS or [(2, 2), (4, 1), (1, 4)]


ARGUMENTS = [
  *("--config.mesh.fsdp=2", "--config.mesh.tensor=2", f"--config.total_steps={STEPS}"),
  *("--config.evaluation.at_end=False", "--config.logging.sinks=jsonl,console"),
  *("--config.distributed.heartbeat_s=5", "--config.checkpoint.keep_last=2"),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  return several.write_input(tmp_path_factory.mktemp("input"))


@pytest.fixture(scope="module")
def make(config):
  """Returns a function that starts a run in a folder, with a layout."""

  def start(workdir, layout=(2, 2), *more):
    processes, devices = layout
    return several.start(
      config,
      workdir,
      [*ARGUMENTS, *more],
      processes=processes,
      devices=devices,
      environment={"XLA_FLAGS": quick_compilation.FLAGS},
    )

  return start


@pytest.fixture(scope="module")
def unbroken(make, tmp_path_factory):
  """The folder of a run that nothing disturbed."""
  workdir = tmp_path_factory.mktemp("unbroken") / "run"
  run = make(workdir)
  assert run.wait() == [0, 0], run.text(0) + run.text(1)
  return workdir


def lines_of(workdir):
  file = workdir / "metrics.jsonl"
  return file.read_text().splitlines() if file.exists() else []


def killed(run, workdir, rng) -> str:
  """Kills one process at a random moment, and the others a little later; returns the moment."""
  steps = len(lines_of(workdir))
  moments = {
    "a checkpoint is written": lambda: any((workdir / "checkpoints").glob("tmp_step_*")),
    "a step is done": lambda: len(lines_of(workdir)) > steps,
    "the processes have met": lambda: "devices:" in run.text(0),
  }
  weights = [3, 2, 1]
  name = rng.choices([*moments], weights)[0]
  victim = rng.choice([1, 1, 1, 0]) if len(run.processes) > 1 else 0
  while not moments[name]() and run.processes[victim].poll() is None:
    time.sleep(0.001)
  time.sleep(rng.uniform(0, 0.05 if name == "a checkpoint is written" else 1.0))
  os.killpg(run.processes[victim].pid, signal.SIGKILL)
  time.sleep(rng.uniform(0, 1.0))
  run.kill()
  return f"process {victim} of {len(run.processes)} when {name}"


def test_a_run_whose_processes_are_killed_ends_bit_for_bit_like_an_unbroken_one(
  make, unbroken, tmp_path
):
  rng = random.Random(SEED)
  workdir = tmp_path / "run"
  moments = []
  for layout in LAYOUTS:
    run = make(workdir, layout)
    try:
      moments.append(killed(run, workdir, rng))
    finally:
      run.kill()
    if (workdir / "export").exists():  # it was done: another one begins.
      check_equal(workdir, unbroken, moments)
      workdir = tmp_path / f"run-{len(moments)}"
  run = make(workdir)
  assert run.wait() == [0, 0], run.text(0) + run.text(1)
  print(*moments, sep="\n")
  check_equal(workdir, unbroken, moments)


def check_equal(workdir, unbroken, moments):
  reported, expected = ([recorded(line) for line in lines_of(run)] for run in (workdir, unbroken))
  assert reported == expected, moments
  assert exported(workdir) == exported(unbroken), moments


def recorded(line):
  """Returns the metrics of a step that do not depend on the layout, or all if it stays."""
  found = metrics.reproducible(json.loads(line))
  of_layout = ("mismatch", "behavior_entropy")  # the sampler splits its weights in another way.
  return {k: v for k, v in found.items() if KILLS or not any(name in k for name in of_layout)}


def exported(workdir):
  return {path.name: path.read_bytes() for path in (workdir / "export").iterdir()}


# --- a run folder at a URL ---

# Each process has a cache of its own, as on a host of its own.
ON_ITS_HOST = """
import os, sys
os.environ["GRPO_JAX_CACHE"] = sys.argv.pop(1)
from grpo_jax import main
main.console()
"""


@pytest.mark.parametrize("scheme", ["file", "gs"])
def test_a_run_at_a_url_that_is_killed_is_continued_bit_for_bit_by_two_empty_hosts(
  scheme, config, unbroken, tmp_path
):
  with BUCKETS[scheme](tmp_path) as bucket:

    def start(attempt):
      caches = [tmp_path / f"{attempt}-{index}" for index in range(2)]
      return several.start_python(
        lambda address, index: [
          *("-c", ON_ITS_HOST, caches[index], f"--config={config}", f"--workdir={bucket.url}"),
          f"--config.distributed.coordinator={address}",
          *("--config.distributed.processes=2", f"--config.distributed.index={index}"),
          *ARGUMENTS,
        ],
        tmp_path / attempt,
        devices=2,
        environment=bucket.environment,
      )

    run = start("first")
    try:
      while not any(name.endswith("/manifest.json") for name in bucket.names()):
        assert run.processes[0].poll() is None, run.text(0)
        time.sleep(0.01)
    finally:
      run.kill()
    refused = start("second")
    assert refused.wait() == [2, 2] and "remove its lock: " in refused.text(0)
    bucket.remove("lock.json")
    run = start("third")
    assert run.wait() == [0, 0], run.text(0) + run.text(1)
    check_equal(bucket.folder(), unbroken, [])
    assert "lock.json" not in bucket.names()
    assert "continuing at step" in run.text(0)


# --- a folder that two processes have written ---


def rows_of(workdir):
  return [json.loads(line) for line in lines_of(workdir)]


def test_the_exported_checkpoint_of_two_processes_is_what_they_have_exported(unbroken, tmp_path):
  assert cli.run(["export", f"{unbroken}:latest", str(tmp_path / "out")]) == 0
  found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
  assert found == exported(unbroken) and "model.safetensors" in found


def test_an_evaluation_of_what_two_processes_learned_equals_theirs(unbroken, tmp_path):
  out = tmp_path / "out"
  assert cli.run(["evaluate", f"--model={unbroken}:latest", f"--workdir={out}"]) == 0
  (model,) = json.loads((out / "metrics.json").read_text())["models"]
  last = rows_of(unbroken)[-1]
  assert last["step"] == STEPS and model["model"] == f"{unbroken}:{STEPS}"
  for name in ("prompts", "reward_mean", "completion_tokens_mean"):
    assert model["metrics"][f"heldout/{name}"] == last[f"eval/heldout/{name}"], name


def test_the_report_of_two_processes_has_all_steps(unbroken, tmp_path):
  copy = shutil.copytree(unbroken, tmp_path / "run")
  (copy / "report.html").unlink()
  assert cli.run(["report", str(copy)]) == 0
  page = (copy / "report.html").read_text()
  assert page == (unbroken / "report.html").read_text()


def test_one_process_continues_what_two_began_and_writes_every_step_once(make, unbroken, tmp_path):
  copy = shutil.copytree(unbroken, tmp_path / "run")
  shutil.rmtree(copy / "checkpoints" / f"step_{STEPS:08d}")  # its last step is made again.
  run = make(copy, (1, 4), f"--config.total_steps={STEPS + 1}")
  assert run.wait() == [0], run.text(0)
  assert f"step {STEPS - 1}" in run.text(0)
  assert [row["step"] for row in rows_of(copy)] == [*range(STEPS + 1)]
  assert all("train/loss" in row for row in rows_of(copy))
  assert lines_of(copy)[: STEPS - 1] == lines_of(unbroken)[: STEPS - 1]
  again, first = (recorded(lines_of(folder)[STEPS - 1]) for folder in (copy, unbroken))
  assert again["train/loss"] and again.items() <= first.items()  # which has more: it was the last.
  rollouts = sorted(path.name for path in (copy / "rollouts").iterdir())
  assert rollouts == [f"step_{step:06d}.jsonl" for step in range(STEPS + 1)]
