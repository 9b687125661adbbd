"""Two processes that sample ahead of learning: the same as one, stopped and continued by others."""

import json
import os
import signal
import time

import pytest

from grpo_jax import metrics
from tests import quick_compilation, several

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

ROWS = 11


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  """Returns a function that starts a run in a folder, with a layout."""
  config = several.write_input(tmp_path_factory.mktemp("input"), rows=ROWS)

  def started(workdir, layout, *more):
    processes, devices = layout
    arguments = [
      *("--config.mesh.fsdp=2", "--config.mesh.tensor=2"),
      *("--config.evaluation.at_end=False", "--config.logging.sinks=jsonl,console"),
      *("--config.distributed.heartbeat_s=5", "--config.checkpoint.keep_last=None"),
      *more,
    ]
    environment = {"XLA_FLAGS": quick_compilation.FLAGS}
    sizes = {"processes": processes, "devices": devices, "environment": environment}
    return several.start(config, workdir, arguments, **sizes)

  return started


def lines_of(workdir):
  file = workdir / "metrics.jsonl"
  return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def recorded(workdir):
  """Returns the metrics that do not depend on how the sampler's weights are split."""
  of_layout = ("mismatch", "entropy", "staleness/", "all/")
  reported = [metrics.reproducible(line) for line in lines_of(workdir)]
  return [
    {k: v for k, v in t.items() if not any(name in k for name in of_layout)} for t in reported
  ]


def exported(workdir):
  return {path.name: path.read_bytes() for path in (workdir / "export").iterdir()}


def wait_for_steps(run, workdir, count):
  until = time.monotonic() + 240
  while len(lines_of(workdir)) < count and time.monotonic() < until:
    assert run.processes[0].poll() is None, run.text(0)
    time.sleep(0.02)


def test_one_step_ahead_two_processes_learn_what_one_learns_wherever_they_are_killed(
  start, tmp_path
):
  # Without a correction: logprobs depend on the layout.
  more = ("--config.total_steps=4", "--config.rollout.max_staleness=1")
  start(tmp_path / "one", (1, 4), *more).succeed()
  broken = start(tmp_path / "two", (2, 2), *more)
  try:
    wait_for_steps(broken, tmp_path / "two", 2)
    os.killpg(broken.processes[1].pid, signal.SIGKILL)
    codes = broken.wait()
  finally:
    broken.kill()
  assert codes[0] not in (0, None), "process 0 ends when process 1 has died"
  start(tmp_path / "two", (2, 2), *more).succeed()
  assert recorded(tmp_path / "two") == recorded(tmp_path / "one")
  assert exported(tmp_path / "two") == exported(tmp_path / "one")
  steps = [line for line in lines_of(tmp_path / "two") if "weight_version" in line]
  assert [line["rollout/staleness_max"] for line in steps] == [0, 1, 1, 1]


def test_in_flight_two_processes_that_are_stopped_are_continued_by_four(start, tmp_path):
  workdir = tmp_path / "run"
  more = (
    *("--config.total_steps=50", "--config.data.epochs=2", "--config.rollout.max_staleness=2"),
    "--config.evaluation.every_steps=0",
    "--config.loss.importance_correction=token",
  )
  run = start(workdir, (2, 2), *more)
  try:
    wait_for_steps(run, workdir, 2)
    run.processes[1].send_signal(signal.SIGTERM)
    codes = run.wait()
  finally:
    run.kill()
  assert codes == [143, 143], run.text(0) + run.text(1)
  done = len(lines_of(workdir))
  start(workdir, (4, 1), *more).succeed()
  steps = lines_of(workdir)
  assert 2 <= done < len(steps) == -(-2 * ROWS // 4)
  assert all(step["rollout/staleness_max"] <= 2 for step in steps)
  learned = [prompts_of(file) for file in sorted((workdir / "rollouts").glob("step_*.jsonl"))]
  flat = [name.partition(":")[2] for names in learned for name in names]
  assert sorted(flat) == sorted(f"{epoch}:{row}" for epoch in range(2) for row in range(ROWS))


def prompts_of(file):
  lines = file.read_text().splitlines()
  return list(dict.fromkeys(json.loads(line)["prompt_id"] for line in lines))
