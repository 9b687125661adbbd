"""A run of two processes that learns from recorded groups equals one of one process."""

import json

import numpy as np
import pytest

from grpo_jax.models import tiny
from tests import several

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

CONFIG = """
import configs.base

def get_config():
  config = configs.base.get_config()
  config.update_from_flattened_dict(SETTINGS)
  config.environments = {"own": {"module": "function", "path": "tests.rewards.variety"}}
  return config
"""

SETTINGS = {
  "mode": "offline",
  "total_steps": 3,
  "model.compute_dtype": "float32",
  "model.chat_template": "plain",
  "mesh.data": 1,
  "mesh.fsdp": 2,
  "mesh.tensor": 2,
  "data.environment": "own",
  "data.max_prompt_tokens": 32,
  "offline.rewards": "environment",
  "rollout.prompts_per_step": 3,
  "batching.row_tokens": 64,
  "batching.microbatch_tokens": 256,
  "loss.kl_coef": 0.01,
  "loss.importance_correction": "token",
  "optim.learning_rate": 3e-3,
  "evaluation.every_steps": 2,
  "checkpoint.every_steps": 2,
  "logging.sinks": ("jsonl", "console"),
  "learn.report_all_every_steps": 2,
  "learn.report_kl_every_steps": 2,
}


def write_input(folder):
  """Writes a model, groups whose responses have no logprobs, and a config; returns its path."""
  model = tiny.write(folder / "model")
  rng = np.random.default_rng(0)
  rows = [
    {
      "prompt": f"say {i}",
      "group": [{"response": "".join(rng.choice([*"aeiouxyz"], 6)), "rank": n} for n in (1, 2, 3)],
    }
    for i in range(12)
  ]
  data = folder / "rows.jsonl"
  data.write_text("".join(json.dumps(row) + "\n" for row in rows))
  other = folder / "held_out.jsonl"
  other.write_text("".join(json.dumps({**row, "prompt": "?"}) + "\n" for row in rows))
  paths = {"model.path": model, "data.path": data, "evaluation.data.path": other}
  settings = SETTINGS | {name: str(path) for name, path in paths.items()}
  config = folder / "config.py"
  config.write_text(CONFIG.replace("SETTINGS", repr(settings)))
  return config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """The folders of a run of one process with four devices and of one of two with two each."""
  folder = tmp_path_factory.mktemp("offline")
  config = write_input(folder)
  sizes = {"one": (1, 4), "two": (2, 2)}
  started = {
    name: several.start(config, folder / name, processes=processes, devices=devices)
    for name, (processes, devices) in sizes.items()
  }
  try:
    for run in started.values():
      assert set(run.wait()) == {0}, "\n".join(log.read_text()[-3000:] for log in run.logs)
  finally:
    for run in started.values():
      run.kill()
  return folder / "one", folder / "two"


def reported(workdir):
  """Returns the metrics of every step that do not depend on time and memory."""
  left_out = ("perf/", "time/", "hosts/", "tokens_per_s")
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return [
    {name: value for name, value in row.items() if not name.startswith(left_out)} for row in rows
  ]


def test_the_weights_are_the_same_bytes(runs):
  one, two = (run / "export" / "model.safetensors" for run in runs)
  assert one.read_bytes() == two.read_bytes()


def test_the_metrics_are_the_same(runs):
  one, two = map(reported, runs)
  assert [row.keys() for row in one] == [row.keys() for row in two]
  assert json.dumps(one) == json.dumps(two)  # NaN is NaN.
  assert any("train/rank_accuracy" in row for row in one)


def test_behavior_logprobs_are_scored_together_and_written_once(runs):
  one, two = (sorted((run / "behavior_logprobs").iterdir()) for run in runs)
  assert [path.name for path in one] == [path.name for path in two]
  assert len(one) == 4  # three steps and done.json.
  for first, second in zip(one, two, strict=True):
    assert first.read_bytes() == second.read_bytes()


def test_nothing_is_compiled_after_the_first_step(runs):
  for run in runs:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    later = [row["perf/compilations"] for row in rows if row["step"] > 0]
    assert later
    assert not any(later)
