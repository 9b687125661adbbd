"""The configs with programs as a newcomer tries them: a tiny Qwen2, a few problems, two steps."""

import json
import math
import pathlib

import pytest

import grpo_jax.train  # noqa: F401  (main imports it later: its seconds are not this test's.)
from grpo_jax import main
from grpo_jax.building import policy_model
from grpo_jax.models import tiny
from tests import sandboxes

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = pathlib.Path(__file__).parents[2]


def code_row(i):
  return {
    "task_id": f"Own/{i}",
    "prompt": f'def add(x):\n  """Adds {i}."""\n',
    "entry_point": "add",
    "canonical_solution": f"  return x + {i}\n",
    "test": f"def check(candidate):\n  assert candidate(1) == {1 + i}\n",
  }


def math_row(i):
  return {"task_name": "math", "problem": f"{i} + 1?", "expected_answer": str(i + 1)}


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def two_steps(tmp_path, config, train, held_out, **changes):
  """Runs a config from the command line with a tiny model; returns the lines of metrics.jsonl."""
  arguments = {
    "config": ROOT / "configs" / config,
    "workdir": tmp_path / "run",
    "config.model.path": tiny.write(tmp_path / "model", family="qwen2"),
    "config.data.path": write(tmp_path / "train.jsonl", train),
    "config.evaluation.data.path": write(tmp_path / "held_out.jsonl", held_out),
    "config.environments.code.sandbox": sandboxes.any_kind(),
    "config.environments.code.code": "raw",  # the tiny model writes no fence.
    "config.total_steps": 2,
    "config.rollout.prompts_per_step": 2,
    "config.rollout.group_size": 2,
    "config.sampling.max_tokens": 8,
    "config.filters.drop_no_signal": False,
    "config.loss.kl_coef": 0.01,  # all rewards are 0: there is nothing else to learn from.
    "config.data.max_prompt_tokens": 256,
    "config.rollout.max_tokens": 288,
    "config.batching.row_tokens": 288,
    **changes,
  }
  assert main.main([f"--{name}={value}" for name, value in arguments.items()]) == 0
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


@pytest.mark.long
def test_two_steps_are_scored_by_running_programs(tmp_path):
  *steps, last = two_steps(
    tmp_path,
    "code_humaneval.py",
    [code_row(i) for i in range(2, 6)],
    [code_row(i) for i in range(2)],
    **{"config.evaluation.at_start": False},
  )
  assert len(steps) == 2 and all(math.isfinite(row["train/loss"]) for row in steps)
  outcomes = ("accuracy", "wrong", "compile_error", "timeout", "over_limit", "crash")
  for row in steps:
    no_code = 1 - row["env/code/has_code"]
    assert sum(row[f"env/code/{name}"] for name in outcomes) + no_code == pytest.approx(1.0)
  assert steps[-1]["perf/env/code/sandboxes"] >= 1.0
  assert 0.0 <= last["eval/heldout/accuracy"] <= 1.0


@pytest.mark.slow
def test_math_and_code_go_to_their_environments_by_the_name_of_their_task(tmp_path):
  rows, held_out = ([{**code_row(i), "task_name": "code"}, math_row(i)] for i in (0, 1))
  found = two_steps(
    tmp_path, "math_and_code.py", rows, held_out, **{"config.evaluation.num_prompts": 2}
  )
  for row in found[1:-1]:  # an epoch a step.
    assert row["env/math/completions"] == row["env/code/completions"] == 2
    assert "env/code/has_code" in row and "env/math/has_code" not in row
  for row in (found[0], found[-1]):
    assert {"eval/heldout/math/accuracy", "eval/heldout/code/accuracy"} <= row.keys()

  rollouts = (tmp_path / "run/rollouts/step_000000.jsonl").read_text()
  prompts = {line["environment"]: line["prompt"] for line in map(json.loads, rollouts.splitlines())}
  assert "1?" in prompts["math"] and "\\boxed{}" in prompts["math"]
  assert "```python" in prompts["code"] and "\\boxed{}" not in prompts["code"]


def test_where_there_is_no_bubblewrap_one_line_says_so_before_the_model_is_read(
  tmp_path, monkeypatch, capsys
):
  model = tiny.write(tmp_path / "model", family="qwen2")
  monkeypatch.setattr(policy_model, "load", None)  # a run that reads the weights ends here.
  rows = write(tmp_path / "rows.jsonl", [code_row(0)])
  arguments = {
    "config": ROOT / "configs" / "code_humaneval.py",
    "workdir": tmp_path / "run",
    "config.model.path": model,
    "config.data.path": rows,
    "config.evaluation.data.path": rows,
  }
  monkeypatch.setenv("PATH", "/nonexistent")
  command = [f"--{name}={value}" for name, value in arguments.items()]
  assert main.main(command) == main.WRONG_USE
  (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
  for word in ("environments: ", "no program bwrap", "sandbox='landlock'", "docs/code_env"):
    assert word in line
