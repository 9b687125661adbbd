"""Two processes that sample ahead of learning: the same as one, stopped and continued by others.

One of the runs is of a dense model, the other of a mixture whose experts are replayed.
"""

import json
import os
import signal
import time

import pytest

from grpo_jax import metrics
from grpo_jax.run_folder import attached_bytes
from tests import quick_compilation, several

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

ROWS = 11


@pytest.fixture
def start(tmp_path):
  """Returns a function that starts a run in a folder, with a family of models and a layout."""

  def started(workdir, family, layout, *more):
    folder, (processes, devices) = tmp_path / "input", layout
    config = folder / "config.py"
    if not config.exists():
      several.write_input(folder, rows=ROWS, family=family)
    arguments = [
      "--config.mesh.tensor=2",
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


def experts_under_way(workdir):
  """Returns the recorded experts of all groups that a checkpoint has ready, by step and group."""
  found = {}
  for folder in sorted((workdir / "checkpoints").glob("step_*")):
    stored = json.loads((folder / "info.json").read_text())["extra"]["stream"]["ahead"]["ready"]
    attached = (folder / attached_bytes.FILE).read_bytes() if stored else b""
    for number, group in attached_bytes.put_back(stored, attached):
      experts = [group["prompt_experts"], *(each["experts"] for each in group["rollouts"])]
      found[folder.name, number] = [each["values"] for each in experts]
  return found


def test_one_step_ahead_two_processes_learn_what_one_learns_wherever_they_are_killed(
  start, tmp_path
):
  """A mixture, whose experts are divided over the processes; it goes where its sampler went."""
  # Without a correction: logprobs depend on the layout.
  more = (
    *("--config.total_steps=4", "--config.rollout.max_staleness=1"),
    *("--config.mesh.expert=2", "--config.loss.router_replay=True"),
  )
  start(tmp_path / "one", "qwen3_moe", (1, 4), *more).succeed()
  broken = start(tmp_path / "two", "qwen3_moe", (2, 2), *more)
  try:
    wait_for_steps(broken, tmp_path / "two", 2)
    os.killpg(broken.processes[1].pid, signal.SIGKILL)
    codes = broken.wait()
  finally:
    broken.kill()
  assert codes[0] not in (0, None), "process 0 ends when process 1 has died"
  start(tmp_path / "two", "qwen3_moe", (2, 2), *more).succeed()
  assert recorded(tmp_path / "two") == recorded(tmp_path / "one")
  assert exported(tmp_path / "two") == exported(tmp_path / "one")
  steps = [line for line in lines_of(tmp_path / "two") if "weight_version" in line]
  assert [line["rollout/staleness_max"] for line in steps] == [0, 1, 1, 1]
  for line in steps:  # all but the last token of each attempt.
    assert 0.9 < line["router/replayed_share"] < 1
  assert steps[0]["mismatch/abs_logprob_max"] < 1e-5
  assert steps[0]["router/changed_share"] == 0 < steps[-1]["router/changed_share"]
  of_one, of_two = (experts_under_way(tmp_path / name) for name in ("one", "two"))
  assert len(of_one) == 3 * 4 and of_one == of_two


def test_in_flight_two_processes_that_are_stopped_are_continued_by_four(start, tmp_path):
  workdir = tmp_path / "run"
  more = (
    *("--config.total_steps=50", "--config.data.epochs=2", "--config.rollout.max_staleness=2"),
    *("--config.mesh.fsdp=2", "--config.evaluation.every_steps=0"),
    "--config.loss.importance_correction=token",
  )
  run = start(workdir, "llama", (2, 2), *more)
  try:
    wait_for_steps(run, workdir, 2)
    run.processes[1].send_signal(signal.SIGTERM)
    codes = run.wait()
  finally:
    run.kill()
  assert codes == [143, 143], run.text(0) + run.text(1)
  done = len(lines_of(workdir))
  start(workdir, "llama", (4, 1), *more).succeed()
  steps = lines_of(workdir)
  assert 2 <= done < len(steps) == -(-2 * ROWS // 4)
  assert all(step["rollout/staleness_max"] <= 2 for step in steps)
  learned = [prompts_of(file) for file in sorted((workdir / "rollouts").glob("step_*.jsonl"))]
  flat = [name.partition(":")[2] for names in learned for name in names]
  assert sorted(flat) == sorted(f"{epoch}:{row}" for epoch in range(2) for row in range(ROWS))


def prompts_of(file):
  lines = file.read_text().splitlines()
  return list(dict.fromkeys(json.loads(line)["prompt_id"] for line in lines))
