"""`configs/code_humaneval.py` as a newcomer tries it: a tiny Qwen2, a few problems, two steps."""

import json
import math
import pathlib

import jax
import pytest

import grpo_jax.train  # noqa: F401  (main imports it later: its seconds are not this test's.)
from grpo_jax import main
from grpo_jax.models import tiny
from tests import sandboxes

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
  """The suite has eight devices; a run takes all there are, this one takes one."""
  first = jax.devices()[:1]
  monkeypatch.setattr(jax, "devices", lambda *_: first)


def write_rows(path, count):
  row = lambda i: {
    "task_id": f"Own/{i}",
    "prompt": f'def add(x):\n  """Adds {i}."""\n',
    "entry_point": "add",
    "canonical_solution": f"  return x + {i}\n",
    "test": f"def check(candidate):\n  assert candidate(1) == {1 + i}\n",
  }
  path.write_text("".join(json.dumps(row(i)) + "\n" for i in range(count)))
  return path


def run(folder, **more):
  """Runs the config on a tiny model and own problems; returns the exit code."""
  arguments = {
    "config": ROOT / "configs" / "code_humaneval.py",
    "workdir": folder / "run",
    "config.model.path": folder / "model",
    "config.data.path": write_rows(folder / "train.jsonl", 4),
    "config.evaluation.data.path": write_rows(folder / "held_out.jsonl", 2),
    **more,
  }
  return main.main([f"--{name}={value}" for name, value in arguments.items()])


def test_two_steps_are_scored_by_running_programs(tmp_path):
  tiny.write(tmp_path / "model", family="qwen2")
  settings = {
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
    "config.evaluation.at_start": False,
  }
  assert run(tmp_path, **settings) == 0

  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  *steps, last = [json.loads(line) for line in lines]
  assert len(steps) == 2 and all(math.isfinite(row["train/loss"]) for row in steps)
  outcomes = ("accuracy", "wrong", "compile_error", "timeout", "over_limit", "crash")
  for row in steps:
    no_code = 1 - row["env/code/has_code"]
    assert sum(row[f"env/code/{name}"] for name in outcomes) + no_code == pytest.approx(1.0)
  assert steps[-1]["perf/env/code/sandboxes"] >= 1.0
  assert 0.0 <= last["eval/heldout/accuracy"] <= 1.0


def test_where_there_is_no_bubblewrap_one_line_says_so_before_the_model_is_read(
  tmp_path, monkeypatch, capsys
):
  for weights in tiny.write(tmp_path / "model", family="qwen2").glob("*.safetensors"):
    weights.unlink()
  monkeypatch.setenv("PATH", "/nonexistent")
  assert run(tmp_path) == main.WRONG_USE
  (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
  for word in ("environments: ", "no program bwrap", "sandbox='landlock'", "docs/code_env"):
    assert word in line
