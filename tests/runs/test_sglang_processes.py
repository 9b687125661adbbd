"""A run of two processes that launch a real SGLang server each, against one process and server."""

import json

import pytest

from tests import several
from tests.engines.sglang_fixtures import processes_in, server_python

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

STEPS = 2
PROMPTS, ATTEMPTS = 4, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """The folder of both runs."""
  return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def runs(folder):
  """Returns the run folders: of two processes with a device each, and of one with two."""
  config = several.write_input(folder / "input")
  settings = {
    "engine.name": "sglang",
    "engine.max_rows": 16,
    "engine.sglang.device": "cpu",
    "engine.sglang.python": server_python(),
    "engine.sglang.weights_folder": folder / "weights",
    "mesh.data": 1,
    "mesh.fsdp": 2,
    "total_steps": STEPS,
    "evaluation.every_steps": 0,
    "evaluation.at_end": False,
    "checkpoint.every_steps": 0,
  }
  arguments = [f"--config.{name}={value}" for name, value in settings.items()]
  started = {
    count: several.start(
      config, folder / f"of_{count}", arguments, processes=count, devices=2 // count
    )
    for count in (2, 1)
  }
  try:
    for count, run in started.items():
      codes = run.wait(400)
      assert codes == [0] * count, "\n".join(run.text(index)[-4000:] for index in range(count))
  finally:
    for run in started.values():
      run.kill()
  return folder / "of_2", folder / "of_1"


def steps_of(workdir):
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return [line for line in lines if "weight_version" in line]


def rollouts_of(workdir):
  files = sorted((workdir / "rollouts").glob("step_*.jsonl"))
  return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_each_process_has_started_a_server_and_left_none(folder, runs):
  several_of, _ = runs
  logs = sorted(path.name for path in (several_of / "servers").glob("*.log"))
  assert logs == ["server_0.log", "server_1.log"]
  assert not processes_in(several_of / "servers")
  assert not list((folder / "weights").glob("run-*"))


def test_both_servers_sample_from_the_trainer_s_weights_of_each_step(runs):
  several_of, _ = runs
  steps = steps_of(several_of)
  assert [step["weight_version"] for step in steps] == [*range(STEPS)]
  for step in steps:
    assert step["mismatch/abs_logprob_max"] <= 2e-4
    assert 0 < step["mismatch/probe_abs_logprob_max"] <= 2e-4
    assert step["mismatch/sync_proven"] == 1
    assert step["engine/restarts"] == step["engine/retries"] == 0
  versions = [set(rollout["weight_versions"]) for rollout in rollouts_of(several_of)]
  per_step = PROMPTS * ATTEMPTS
  assert versions == [{0}] * per_step + [{1}] * per_step


def test_two_processes_sample_what_one_does(runs):
  keys = ("prompt_ids", "completion_ids", "reward", "finish_reason")
  several_of, one = ([[r[k] for k in keys] for r in rollouts_of(run)] for run in runs)
  assert several_of == one and len(one) == STEPS * PROMPTS * ATTEMPTS
