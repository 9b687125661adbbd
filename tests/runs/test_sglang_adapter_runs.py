"""A run that gives its SGLang server adapters; the server is killed in the midst of a sync."""

import json
import os
import signal
import subprocess
import time

import psutil
import pytest

from grpo_jax.models import lora, tiny
from grpo_jax.models.loading import read_config
from tests.engines.processes import eventually
from tests.engines.sglang_fixtures import processes_in, server_python
from tests.runs.test_sglang_runs import command, leftovers, steps_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

STEPS = 5
OPTIONS = lora.AdapterOptions(rank=4, alpha=16.0, rank_stabilized=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A tiny model, its data and a config."""
  folder = tmp_path_factory.mktemp("input")
  rows = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(8)]
  (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  (folder / "config.py").write_text(
    f"""
import configs.base

def get_config():
  config = configs.base.get_config()
  config.total_steps = {STEPS}
  config.model.path = {str(tiny.write(folder / "model"))!r}
  config.model.compute_dtype = "float32"
  config.model.lora.rank = {OPTIONS.rank}
  config.model.lora.alpha = {OPTIONS.alpha}
  config.model.lora.rank_stabilized = True
  config.model.lora.sync = "adapter"
  config.data.path = {str(folder / "rows.jsonl")!r}
  config.data.environment = "own"
  config.environments = {{"own": {{"module": "function", "path": "tests.rewards.vowels"}}}}
  config.engine.max_rows = 32
  config.engine.sglang.device = "cpu"
  config.engine.sglang.python = {str(server_python())!r}
  config.engine.sglang.weights_folder = {str(folder / "weights")!r}
  config.rollout.prompts_per_step = 4
  config.rollout.group_size = 8
  config.sampling.max_tokens = 12
  config.rollout.max_tokens = 96
  config.batching.row_tokens = 256
  config.optim.learning_rate = 3e-2
  config.evaluation.at_start = False
  return config
"""
  )
  return folder


def stop_in_a_sync(weights, guard, *, is_over):
  """Stops the server that computes while a version is on its way to it; returns the version.

  The folder of the version before is discarded once all servers have the next one.
  """
  named = lambda p: "sglang::scheduler" in " ".join(p.cmdline())
  (scheduler,) = [p for p in guard.children(recursive=True) if named(p)]
  for version in range(1, STEPS):
    while not (found := [*weights.glob(f"run-*/v{version:06d}")]):
      assert not is_over(), "the run ended before its server was stopped"
      time.sleep(0.0005)
    scheduler.suspend()
    time.sleep(0.3)  # what it has answered arrives.
    if (found[0].parent / f"v{version - 1:06d}").exists():
      return version
    scheduler.resume()
  raise AssertionError("every sync was over before the server stopped")


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
  """The folder of a run, and the version whose sync met a server that was killed."""
  workdir = tmp_path_factory.mktemp("adapters")
  process = subprocess.Popen(**command(folder, workdir, "sglang"))
  ended = lambda: process.poll() is not None
  try:
    eventually(lambda: ended() or steps_of(workdir), timeout_s=600.0)
    (guard,) = processes_in(workdir / "servers", "server_0.log")
    version = stop_in_a_sync(folder / "weights", psutil.Process(guard.pid), is_over=ended)
    for server in guard.children():
      os.kill(server.pid, signal.SIGKILL)
    assert process.wait(600) == 0
  finally:
    process.kill()
    process.wait()
  return workdir, version


def test_the_server_samples_from_what_is_trained_at_every_step(run):
  workdir, _ = run
  steps = steps_of(workdir)
  assert [step["weight_version"] for step in steps] == [*range(STEPS)]
  for step in steps:
    assert step["mismatch/abs_logprob_max"] <= 1e-4
    assert step["mismatch/probe_abs_logprob_max"] <= 1e-4
  assert steps[0]["mismatch/sync_proven"] == steps[1]["mismatch/sync_proven"] == 1
  assert (steps[0]["engine/restarts"], steps[-1]["engine/restarts"]) == (0, 1)


def test_tokens_are_of_the_adapter_of_their_step(run):
  workdir, _ = run
  for number in range(STEPS):
    lines = (workdir / "rollouts" / f"step_{number:06d}.jsonl").read_text().splitlines()
    rollouts = [json.loads(line) for line in lines]
    assert len(rollouts) == 4 * 8
    assert {v for rollout in rollouts for v in rollout["weight_versions"]} == {number}


def test_a_sync_is_of_the_size_of_the_adapter(folder, run):
  workdir, _ = run
  own = lora.tree(read_config(folder / "model"), OPTIONS).values()
  sizes = [leaf.shape for parts in own for leaf in parts.values()]
  wanted = 4 * sum(layers * rows * columns for layers, rows, columns in sizes)
  assert {step["perf/sync_bytes"] for step in steps_of(workdir)} == {wanted}
  assert wanted < (workdir / "export" / "model.safetensors").stat().st_size / 4


def test_it_leaves_no_server_and_no_adapter(folder, run):
  workdir, _ = run
  assert not leftovers(folder, workdir)
