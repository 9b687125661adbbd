"""`configs/math_1b.py` as a newcomer tries it, with a tiny Qwen2 in place of the model."""

import ast
import json
import math
import pathlib
import re

import pytest

import grpo_jax.train  # (main imports it later: its seconds are not this test's.)
from configs import math_1b, math_1b_async, math_1b_gpu, math_8b
from grpo_jax import main
from grpo_jax.config import command_line, configuration
from grpo_jax.models import loading, tiny
from tests import hub

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = pathlib.Path(__file__).parents[2]


def write_rows(path, problems):
  lines = [{"problem": problem, "expected_answer": "4"} for problem in problems]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return path


@pytest.mark.long
def test_the_command_of_the_readme_needs_nothing_but_a_hub(tmp_path, monkeypatch, noticed):
  """Sizes and a tiny model are all that differs; some prompts are too long."""
  model = tiny.write(tmp_path / "model", family="qwen2")
  problems = [f"What is {n} + 4?{' ' * (n % 2)}" * (1 + 60 * (n % 2)) for n in range(40)]
  rows = [{"problem": each, "expected_answer": "4"} for each in problems]
  hub.rows_file(tmp_path / "data" / "data" / "train_1M-00000-of-00001.parquet", rows)
  hub.rows_file(tmp_path / "data" / "data" / "train-00000-of-00001.parquet", rows[:1])
  arguments = {
    "config": "configs/math_1b.py",
    "workdir": tmp_path / "run",
    "config.total_steps": 2,
    "config.rollout.prompts_per_step": 4,
    "config.rollout.group_size": 2,
    "config.sampling.max_tokens": 8,
    "config.evaluation.num_prompts": 2,
  }
  monkeypatch.chdir(ROOT)
  monkeypatch.setenv("GRPO_JAX_CACHE", str(tmp_path / "cache"))
  sets = {"nvidia/OpenMathInstruct-2": tmp_path / "data"}
  models = {"Qwen/Qwen2.5-1.5B-Instruct": model}
  with hub.used(monkeypatch, tmp_path / "hub", models=models, datasets=sets) as asked:
    assert main.main([f"--{name}={value}" for name, value in arguments.items()]) == 0
  data, *weights = asked.fetched  # the rows first, and of the other split nothing.
  assert data == "datasets/nvidia/OpenMathInstruct-2/data/train_1M-00000-of-00001.parquet"
  assert all(file.startswith("Qwen/") for file in weights) and len(weights) == 5

  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  first, second, end = (json.loads(line) for line in lines)
  assert all(math.isfinite(row["train/loss"]) for row in (first, second))
  # The run ends within its warm-up of 50 steps.
  rates = [row["train/learning_rate"] for row in (first, second)]
  assert rates == pytest.approx([5e-6 / 51, 2 * 5e-6 / 51])
  cut = [row.get("data/overlong_prompts", 0.0) for row in (first, second)]
  assert sum(cut) > 0
  assert [row.get("rollout/errors/no_room", 0.0) for row in (first, second)] == [2 * n for n in cut]
  assert end["eval/heldout/prompts"] == 2.0
  asked_for = lambda folder: {
    json.loads(line)["prompt_id"]
    for file in (tmp_path / "run" / folder).rglob("*.jsonl")
    for line in file.read_text().splitlines()
  }
  assert asked_for("evaluations").isdisjoint(asked_for("rollouts"))
  assert loading.load(tmp_path / "run" / "export").config.family == "qwen2"


def test_without_a_network_one_line_says_what_was_needed_and_what_to_give(
  tmp_path, monkeypatch, capsys
):
  from huggingface_hub import constants

  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
  command = ["--config=math_1b", f"--workdir={tmp_path / 'run'}"]
  assert main.main(command) == 2
  said = capsys.readouterr().err.splitlines()[-1]
  assert said == (
    "error: the Hugging Face hub cannot be used: HF_HUB_OFFLINE is set. This run needs the dataset"
    " OpenMathInstruct-2 and the model Qwen/Qwen2.5-1.5B-Instruct from it; without it, give"
    " --config.data.path=FILE (a copy, or your rows in its columns) and --config.model.path=FOLDER"
    " (a Hugging Face folder)"
  )
  own = write_rows(tmp_path / "rows.jsonl", [f"What is {n} + 1?" for n in range(40)])
  assert main.main([*command, f"--config.data.path={own}"]) == 2
  said = capsys.readouterr().err.splitlines()[-1]
  assert "needs the model Qwen/Qwen2.5-1.5B-Instruct from it; without it, give --config.mod" in said


@pytest.mark.long
def test_a_step_of_the_config_for_8b_needs_only_paths_and_sizes(tmp_path):
  model = tiny.write(tmp_path / "model", family="llama")
  problems = ["What is 1 + 3?", "What is 2 + 2?", "What is 3 + 1?", "What is 4 + 0?"]
  arguments = {
    "config": "math_8b",
    "workdir": tmp_path / "run",
    "config.model.path": model,
    "config.data.split_validation_size": 0,
    "config.data.path": write_rows(tmp_path / "train.jsonl", problems),
    "config.evaluation.data.path": write_rows(tmp_path / "held_out.jsonl", problems[:2]),
    "config.total_steps": 1,
    "config.rollout.prompts_per_step": 4,
    "config.rollout.group_size": 2,
    "config.rollout.max_tokens": 256,
    "config.data.max_prompt_tokens": 240,
    "config.sampling.max_tokens": 8,
    "config.evaluation.at_end": False,
  }
  assert main.main([f"--{name}={value}" for name, value in arguments.items()]) == 0
  (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
  assert math.isfinite(row["train/loss"]) and 0 < row["train/learning_rate"] < 3e-7
  assert loading.load(tmp_path / "run" / "export").config.family == "llama"


def test_the_config_for_8b_has_the_sizes_of_nemo_rl_and_differs_in_nothing_else():
  ours, small = (configuration.plain_fields(each.get_config()) for each in (math_8b, math_1b))
  configuration.check(math_8b.get_config(), [grpo_jax.train.validate])
  assert {name: value for name, value in ours.items() if value != small[name]} == {
    "model.path": "meta-llama/Llama-3.1-8B-Instruct",
    "rollout.prompts_per_step": 64,
    "rollout.group_size": 32,
    "rollout.max_tokens": 4096,
    "sampling.max_tokens": 4096,
    "learn.minibatches": 64 * 32 // 512,  # train_global_batch_size.
    "optim.learning_rate": 3e-7,
    "optim.warmup_steps": 13 * 4,  # NeMo RL counts steps, and this program updates.
  }


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
