"""`configs/math_1b.py` as a newcomer tries it: a tiny Qwen2, files of one's own, two steps."""

import ast
import json
import math
import pathlib
import re

import pytest

import grpo_jax.train  # (main imports it later: its seconds are not this test's.)
from configs import math_1b_async, math_1b_gpu
from grpo_jax import main
from grpo_jax.config import command_line, configuration
from grpo_jax.models import loading, tiny

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = pathlib.Path(__file__).parents[2]


def write_rows(path, problems):
  lines = [{"problem": problem, "expected_answer": "4"} for problem in problems]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return path


@pytest.mark.long
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


def test_the_asynchronous_config_differs_from_that_for_one_gpu_in_where_and_when_it_samples():
  ours, one_gpu = (configuration.fields(each.get_config()) for each in (math_1b_async, math_1b_gpu))
  configuration.check(math_1b_async.get_config(), [grpo_jax.train.validate])
  changed = {name: value for name, value in ours.items() if value != one_gpu[name]}
  assert changed == {
    "engine.sglang.gpus": (1,),
    "engine.sglang.arguments": ("--mem-fraction-static=0.85",),
    "rollout.max_staleness": 2,
  }
  assert ours["loss.importance_correction"] == "token"


def test_the_asynchronous_config_keeps_trainer_and_servers_on_different_gpus():
  text = math_1b_async.__doc__
  found = re.findall(r"CUDA_VISIBLE_DEVICES=(\S+) python", text)
  assert [tuple(map(int, gpus.split(","))) for gpus in found] == [(0,), (0, 1, 2, 3)]
  servers = [math_1b_async.get_config().engine.sglang.gpus]
  servers.append(ast.literal_eval(re.search(r"sglang\.gpus=\"(.*?)\"", text)[1]))
  assert int(re.search(r"sglang\.servers=(\d)", text)[1]) == len(servers[1])
  for trainer, own in zip(found, servers, strict=True):
    assert {int(gpu) for gpu in trainer.split(",")} & {*own} == set()


@pytest.mark.long
def test_steps_of_the_asynchronous_config_are_sampled_ahead(tmp_path):
  """With the embedded sampler in the place of the servers."""
  model = tiny.write(tmp_path / "model", family="qwen2")
  problems = [f"What is {n} + 1?" for n in range(16)]
  arguments = {
    "config": ROOT / "configs" / "math_1b_async.py",
    "workdir": tmp_path / "run",
    "config.engine.name": "jax_sampler",
    "config.engine.max_rows": 16,
    "config.model.path": model,
    "config.data.path": write_rows(tmp_path / "train.jsonl", problems),
    "config.evaluation.data.path": write_rows(tmp_path / "held_out.jsonl", problems[:2]),
    "config.total_steps": 4,
    "config.rollout.prompts_per_step": 2,
    "config.rollout.group_size": 2,
    "config.sampling.max_tokens": 8,
    "config.evaluation.at_end": False,
    "config.logging.sinks": ("jsonl", "console"),
  }
  assert main.main([f"--{name}={value}" for name, value in arguments.items()]) == 0
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  rows = [row for row in map(json.loads, lines) if "rollout/staleness_max" in row]
  # Steps 0, 1 and 2 learn from what the first weights sampled.
  assert [row["rollout/staleness_max"] for row in rows[:3]] == [0, 1, 2]
  assert all(row["rollout/staleness_max"] <= 2 for row in rows) and len(rows) == 4
