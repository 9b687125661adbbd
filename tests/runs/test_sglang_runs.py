"""Whole runs with a real SGLang server that they launch: learning, killed, and going on."""

import json
import math
import os
import signal
import subprocess
import sys

import pytest

from grpo_jax.models import tiny
from tests import several
from tests.engines.processes import eventually
from tests.engines.sglang_fixtures import processes_in, server_python

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A tiny model, its data and a config."""
  folder = tmp_path_factory.mktemp("input")
  rows = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(12)]
  (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))
  (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[8:]))
  (folder / "config.py").write_text(
    f"""
import configs.base

def get_config():
  config = configs.base.get_config()
  config.total_steps = {STEPS}
  config.model.path = {str(tiny.write(folder / "model"))!r}
  config.model.compute_dtype = "float32"
  config.data.path = {str(folder / "rows.jsonl")!r}
  config.evaluation.data.path = {str(folder / "held_out.jsonl")!r}
  config.data.environment = "own"
  config.environments = {{"own": {{"module": "function", "path": "tests.rewards.vowels"}}}}
  config.engine.max_rows = 32
  config.engine.sglang.device = "cpu"
  config.engine.sglang.python = {str(server_python())!r}
  config.engine.sglang.weights_folder = {str(folder / "weights")!r}
  config.rollout.prompts_per_step = 8
  config.rollout.group_size = 16
  config.sampling.max_tokens = 12
  config.rollout.max_tokens = 96
  config.batching.row_tokens = 256
  config.batching.row_buckets = (256,)
  config.batching.microbatch_tokens = 1024
  config.learn.report_kl_every_steps = 0
  config.optim.learning_rate = 1e-3
  config.evaluation.every_steps = 2
  config.evaluation.at_start = False
  config.evaluation.num_prompts = 4
  config.checkpoint.every_steps = 1
  return config
"""
  )
  return folder


def command(folder, workdir, engine):
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  environment["PYTHONPATH"] = several.PYTHONPATH
  words = [
    *(sys.executable, "-m", "grpo_jax.main", f"--config={folder / 'config.py'}"),
    *(f"--workdir={workdir}", f"--config.engine.name={engine}"),
  ]
  return {"args": words, "cwd": several.ROOT, "env": environment, "text": True}


def steps_of(workdir):
  """Returns the metrics of the steps of training, in the order in which they were written."""
  file = workdir / "metrics.jsonl"
  lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
  return [line for line in lines if "weight_version" in line]


def leftovers(folder, workdir):
  """Returns processes of servers, and folders of weights."""
  return [*processes_in(workdir / "servers"), *(folder / "weights").glob("run-*")]


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
  """The folder of a run that was killed after two steps and started again."""
  workdir = tmp_path_factory.mktemp("sglang")
  process = subprocess.Popen(**command(folder, workdir, "sglang"), stdout=subprocess.DEVNULL)

  def has_made_two_steps():
    assert process.poll() is None, "the run ended before it was killed"
    return len(steps_of(workdir)) == 2

  try:
    eventually(has_made_two_steps, timeout_s=600.0)
    assert len(leftovers(folder, workdir)) >= 2  # a server, and weights.
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait()
  eventually(lambda: not leftovers(folder, workdir), timeout_s=60.0)
  again = subprocess.run(**command(folder, workdir, "sglang"), stdout=subprocess.PIPE, timeout=600)
  assert again.returncode == 0
  assert "continuing at step" in again.stdout
  return workdir


def test_weight_versions_rise_by_one_also_where_the_run_was_killed(run):
  assert [step["weight_version"] for step in steps_of(run)] == [*range(STEPS)]
  for number in range(STEPS):
    lines = (run / "rollouts" / f"step_{number:06d}.jsonl").read_text().splitlines()
    rollouts = [json.loads(line) for line in lines]
    assert len(rollouts) == 8 * 16
    assert {v for rollout in rollouts for v in rollout["weight_versions"]} == {number}


def test_the_server_samples_from_the_trainer_s_weights_at_every_step(run):
  for step in steps_of(run):
    assert step["mismatch/abs_logprob_max"] <= 2e-4
    assert step["mismatch/probe_abs_logprob_max"] <= 2e-4
    if "mismatch/sync_proven" in step:
      assert step["mismatch/sync_proven"] == 1 and abs(step["mismatch/sync_share"] - 1) < 0.02
    assert step["engine/restarts"] == step["engine/retries"] == 0


def test_the_first_updates_are_proven_to_have_arrived(run):
  proven = [step["step"] for step in steps_of(run) if "mismatch/sync_proven" in step]
  assert proven[:2] == [0, 1]  # later ones only if they are cheap beside the steps.


def test_time_of_the_sync_is_reported_and_short(run):
  for step in steps_of(run):
    assert 0 < step["time/sync_s"] < 10
    parts = [step[f"perf/sync_{part}_s"] for part in ("gather", "write", "load", "flush", "probe")]
    assert min(parts) > 0 and step["time/sync_s"] >= sum(parts)


def test_run_leaves_what_tools_rely_on_and_no_server(folder, run):
  evaluated = [line for line in (run / "metrics.jsonl").read_text().splitlines() if "eval/" in line]
  assert len(evaluated) >= 2
  assert (run / "export" / "model.safetensors").exists() and (run / "report.html").exists()
  assert (run / "servers" / "server_0.log").exists()
  assert not leftovers(folder, run)


def test_embedded_sampler_learns_the_same(folder, run, tmp_path):
  subprocess.run(**command(folder, tmp_path, "jax_sampler"), check=True, stdout=subprocess.DEVNULL)
  for ours, embedded in zip(steps_of(run), steps_of(tmp_path), strict=True):
    mean, other = ours["rollout/reward_mean"], embedded["rollout/reward_mean"]
    # 1024 letters, a few per cent of which are vowels: five standard errors of a difference.
    letters, share = 8 * 16 * 8, max(mean, other, 0.01)
    assert abs(mean - other) < 5 * math.sqrt(2 * share * (1 - share) / letters)
