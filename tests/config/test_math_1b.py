"""`configs/math_1b.py` as a newcomer tries it: a tiny Qwen2, files of one's own, two steps."""

import json
import math
import pathlib

import pytest

import grpo_jax.train  # (main imports it later: its seconds are not this test's.)
from grpo_jax import main
from grpo_jax.config import command_line, configuration
from grpo_jax.models import loading, tiny

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = pathlib.Path(__file__).parents[2]


def write_rows(path, problems):
  lines = [{"problem": problem, "expected_answer": "4"} for problem in problems]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return path


def test_two_steps_need_only_paths_and_sizes_even_with_a_prompt_that_is_too_long(tmp_path):
  model = tiny.write(tmp_path / "model", family="qwen2")
  problems = ["What is 1 + 3?", "What is 2 + 2?", "What is 3 + 1?", "What is 2 + 2? " * 40]
  arguments = {
    "config": ROOT / "configs" / "math_1b.py",
    "workdir": tmp_path / "run",
    "config.model.path": model,
    "config.data.kind": "jsonl",
    "config.data.path": write_rows(tmp_path / "train.jsonl", problems),
    "config.evaluation.data.path": write_rows(tmp_path / "held_out.jsonl", problems[:2]),
    "config.total_steps": 2,
    "config.rollout.prompts_per_step": 4,
    "config.rollout.group_size": 2,
    "config.sampling.max_tokens": 8,
    "config.evaluation.at_end": False,
  }
  assert main.main([f"--{name}={value}" for name, value in arguments.items()]) == 0

  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  first, second = (json.loads(line) for line in lines)
  assert all(math.isfinite(row["train/loss"]) for row in (first, second))
  # The run ends within its warm-up of 50 steps.
  rates = [row["train/learning_rate"] for row in (first, second)]
  assert rates == pytest.approx([5e-6 / 51, 2 * 5e-6 / 51])
  assert [row["data/overlong_prompts"] for row in (first, second)] == [1.0, 1.0]
  assert [row["rollout/errors/no_room"] for row in (first, second)] == [2.0, 2.0]
  assert loading.load(tmp_path / "run" / "export").config.family == "qwen2"


def test_the_config_for_one_gpu_is_valid_and_differs_in_the_engine():
  command = command_line.parse([f"--config={ROOT / 'configs' / 'math_1b_gpu.py'}"])
  configuration.check(command.config, [grpo_jax.train.validate])
  assert command.config.engine.name == "sglang"
  assert command.config.loss.importance_truncation == "tis"
