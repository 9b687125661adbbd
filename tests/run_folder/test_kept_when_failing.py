"""What was learned outlives what stops a run: a broken row, an engine that cannot be healed."""

import json

import pytest

from grpo_jax import main
from grpo_jax.engines import jax_sampler
from grpo_jax.engines.base import EngineFailure
from grpo_jax.models import tiny

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def arguments(tmp_path):
  rows = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(8)]
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  settings = {
    "config": "configs/base.py",
    "workdir": tmp_path / "run",
    "config.total_steps": 4,
    "config.model.path": tiny.write(tmp_path / "model"),
    "config.model.compute_dtype": "float32",
    "config.data.path": tmp_path / "rows.jsonl",
    "config.data.shuffle": False,
    "config.environments.math.workers": 1,
    "config.rollout.prompts_per_step": 2,
    "config.rollout.group_size": 2,
    "config.rollout.max_tokens": 64,
    "config.sampling.max_tokens": 4,
    "config.batching.row_tokens": 128,
    "config.evaluation.at_start": False,
    "config.evaluation.at_end": False,
    "config.evaluation.every_steps": 0,
    "config.checkpoint.every_steps": 0,
    "config.logging.sinks": ("jsonl", "console"),
    "config.learn.report_all_every_steps": 0,
    "config.learn.report_kl_every_steps": 0,
  }
  return [f"--{name}={value}" for name, value in settings.items()]


def checkpoints_of(tmp_path):
  folders = (tmp_path / "run" / "checkpoints").glob("step_*")
  return sorted(int(folder.name.removeprefix("step_")) for folder in folders)


def steps_of(tmp_path):
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line)["step"] for line in lines]


@pytest.mark.slow
def test_a_broken_row_costs_no_learned_step_and_a_repaired_file_continues(
  tmp_path, arguments, capsys
):
  file = tmp_path / "rows.jsonl"
  lines = file.read_text().splitlines()
  file.write_text("\n".join([*lines[:5], "{broken", *lines[6:]]) + "\n")
  assert main.main(arguments) == 1
  reported = capsys.readouterr().err
  assert f"error: {file}:6: " in reported and f"--workdir={tmp_path / 'run'} continues" in reported
  assert "Traceback" not in reported
  assert checkpoints_of(tmp_path) == [2] and steps_of(tmp_path) == [0, 1]

  file.write_text("\n".join(lines) + "\n")
  assert main.main(arguments) == 0
  assert steps_of(tmp_path)[:4] == [0, 1, 2, 3]


@pytest.mark.long
def test_an_engine_that_takes_no_weights_costs_no_learned_step(
  tmp_path, arguments, monkeypatch, capsys
):
  load = jax_sampler.JaxSampler.load_weights

  def failing(self, params, *, version):
    if version == 3:
      raise EngineFailure("the disk of the weights is full")
    load(self, params, version=version)

  with monkeypatch.context() as patch:
    patch.setattr(jax_sampler.JaxSampler, "load_weights", failing)
    assert main.main(arguments) == 1
  assert "error: the disk of the weights is full" in capsys.readouterr().err
  # The step that could not be handed over is told, and saved.
  assert checkpoints_of(tmp_path) == [3] and steps_of(tmp_path) == [0, 1, 2]

  assert main.main(arguments) == 0
  assert steps_of(tmp_path)[:4] == [0, 1, 2, 3]
