"""The configs of the two conversations, and a group of environments, run on a tiny model."""

import json
import pathlib

import numpy as np
import pytest

import configs.base
import grpo_jax.train  # noqa: F401  (main imports it later: its seconds are not this test's.)
from grpo_jax import main, metrics, report, train
from grpo_jax.rollouts import rollout
from tests.data.small_templates import SMALL

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = pathlib.Path(__file__).parents[2]
LETTERS = tuple("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")  # a random model's stop.


def run_config(name: str, workdir: pathlib.Path, model: pathlib.Path, **overrides) -> list[dict]:
  """Runs a config of two prompts × two completions a step; returns the rows of its metrics."""
  settings = {
    "model.path": model,
    "model.compute_dtype": "float32",
    "mesh.data": 1,
    "mesh.fsdp": 1,
    "total_steps": 2,
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "sampling.max_tokens": 12,
    "sampling.stop_strings": LETTERS,
    "evaluation.at_start": False,
    "evaluation.num_prompts": 2,
    "logging.sinks": ("jsonl", "console"),
    "learn.report_all_every_steps": 0,
    "learn.report_kl_every_steps": 0,
    **overrides,
  }
  arguments = [f"--config.{key}={value}" for key, value in settings.items()]
  assert main.main([f"--config={ROOT / 'configs' / name}", f"--workdir={workdir}", *arguments]) == 0
  return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def rollouts(workdir: pathlib.Path) -> list[dict]:
  files = sorted((workdir / "rollouts").iterdir())
  return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.long
def test_the_sliding_puzzle_runs_turn_by_turn_and_learns_from_sampled_tokens_only(
  tmp_path, model, monkeypatch
):
  """With a template that rewrites earlier turns, as that of Qwen3 does."""
  template = tmp_path / "template.jinja"
  template.write_text(SMALL["drops_thoughts"])
  groups, schedules = rollout.groups, []

  def recorded(*args, schedule="rounds", **options):
    schedules.append(schedule)
    return groups(*args, schedule=schedule, **options)

  monkeypatch.setattr(rollout, "groups", recorded)
  rows = run_config(
    "sliding_puzzle.py",
    tmp_path,
    model,
    **{
      "model.chat_template": template,
      "model.chat_template_args": {"enable_thinking": False},
      "data.max_prompt_tokens": 1024,
      "data.task_args.size": 2,
      "rollout.max_turns": 2,
      "rollout.max_tokens": 1200,
      "batching.row_tokens": 1280,
      "batching.row_buckets": (1280,),
      "rollout.schedule": "free",
      "batching.skip_zero_advantage": False,
      "loss.kl_coef": 0.0,
      "environments.sliding_puzzle.max_moves": 9,
    },
  )
  assert schedules == ["free"] * 3  # two steps and an evaluation.
  first = rows[0]
  assert 1.0 < first["rollout/turns_mean"] <= 2.0
  assert first["rollout/turn/02/reached_share"] > 0.0
  assert first["env/sliding_puzzle/unreadable_turns"] > 0.0
  assert first["rollout/turn_limit_share"] > 0.0
  assert not metrics.unknown({name for row in rows for name in row if name != "step"})
  records = rollouts(tmp_path)
  assert len(records) == 8
  for record in records:
    log, mask = record["turn_log"], record["loss_mask"]
    expected = [
      part for t in log for part in [1] * t["sampled_tokens"] + [0] * t["environment_tokens"]
    ]
    assert mask == expected and len(log) == record["turns"]
    texts = np.asarray(record["token_texts"])
    written = "".join(texts[np.asarray(mask) == 0])
    assert written.count("<environment>") == record["turns"] - 1
    # The template's message around each observation, and nothing learned from it.
    assert written.count("<|im_start|>user\n") == record["turns"] - 1
    assert written.count("<think>\n\n</think>\n\n") == record["turns"] - 1
    assert "".join(texts).count("<|im_end|>\n<|im_start|>user\n") == record["turns"] - 1
    known = [v is not None for v in record["policy_logprobs"]]
    assert known == [bool(m) for m in mask]
    assert all(b == 0.0 for b, m in zip(record["behavior_logprobs"], mask, strict=True) if not m)
  # What the trainer computes on the interleaved tokens is what the engine sampled from.
  assert max(row["mismatch/abs_logprob_max"] for row in rows[:2]) < 1e-4
  counted = sum(sum(record["loss_mask"]) for record in records if record["step"] == 0)
  assert first["batch/loss_tokens"] == counted
  assert "turns" in report.write(tmp_path).read_text()


@pytest.mark.long
def test_a_template_that_cannot_write_the_answers_is_refused_before_the_run(
  tmp_path, model, capsys
):
  template = tmp_path / "alternating.jinja"
  template.write_text(SMALL["alternates"])
  settings = {
    "model.path": model,
    "model.chat_template": template,
    "environments.sliding_puzzle.observation_role": "tool",
    "rollout.max_turns": 2,
    "rollout.max_tokens": 1200,
    "batching.row_tokens": 1280,
    "batching.row_buckets": (1280,),
  }
  options = [f"--config.{key}={value}" for key, value in settings.items()]
  file = f"--config={ROOT / 'configs' / 'sliding_puzzle.py'}"
  assert main.main([file, f"--workdir={tmp_path}", *options]) == 2
  error = " ".join(capsys.readouterr().err.split())
  assert "environments.sliding_puzzle: " in error and "alternating.jinja" in error
  assert "a message of role 'tool': it fails: line 1: TemplateError: roles must alt" in error
  assert not (tmp_path / "rollouts").exists()


@pytest.mark.long
def test_tool_use_runs_with_a_tiny_model(tmp_path, model):
  rows = run_config(
    "tool_use.py",
    tmp_path,
    model,
    **{
      "data.max_prompt_tokens": 640,
      "batching.row_tokens": 1024,
      "batching.row_buckets": (1024,),
      "batching.microbatch_tokens": 1024,
      "evaluation.at_end": False,
    },
  )
  assert rows[0]["env/tool_use/calls"] == 0.0  # it writes at random.
  assert {"env/tool_use/accuracy", "env/tool_use/has_answer"} <= set(rows[0])
  assert len(rows) == 2
  assert not metrics.unknown({name for row in rows for name in row if name != "step"})


@pytest.mark.long
def test_a_group_of_environments_scores_each_row_by_its_own_and_survives_a_broken_one(
  tmp_path, model, capsys
):
  path = tmp_path / "rows.jsonl"
  rows = [{"problem": f"say {i}", "expected_answer": str(10**6 + i)} for i in range(8)]
  for row, name in zip(rows, ["math", "words", "words", "broken"] * 2, strict=True):
    row |= {"task_name": name} if name != "math" else {}
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  held_out = [{**row, "problem": f"name {i}"} for i, row in enumerate(rows)]
  other = tmp_path / "held_out.jsonl"
  other.write_text("".join(json.dumps(row) + "\n" for row in held_out))
  config = configs.base.get_config()
  config.environments = {
    "math": {"module": "math", "answer": "last_number"},
    "words": {"module": "function", "path": "tests.rewards.vowels"},
    "broken": {"module": "function", "path": "tests.rewards.broken"},
  }
  settings = {
    "total_steps": 2,
    "model.path": str(model),
    "model.compute_dtype": "float32",
    "mesh.data": 1,
    "data.path": str(path),
    "evaluation.data.path": str(other),
    "data.shuffle": False,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 2,
    "rollout.max_error_share": 0.25,
    "sampling.max_tokens": 8,
    "batching.row_tokens": 128,
    "batching.microbatch_tokens": 128,  # one shape, which is compiled once.
    "rollout.max_tokens": 128,
    "evaluation.num_prompts": 3,
    "evaluation.at_start": False,
    "logging.sinks": ("jsonl", "console"),
    "learn.report_all_every_steps": 0,
    "learn.report_kl_every_steps": 0,
  }
  config.update_from_flattened_dict(settings)
  train.train(config, tmp_path / "run")

  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  first, second, last = map(json.loads, lines)
  for row in (first, second):
    assert row["env/math/completions"] == row["env/broken/completions"] == 2.0
    assert row["env/words/completions"] == 4.0
    assert row["env/math/accuracy"] == row["env/math/failed_share"] == 0.0
    assert row["env/broken/failed_share"] == 1.0 and row["env/broken/reward_mean"] is None
    assert row["rollout/errors/LookupError"] == 2.0 and row["filter/too_few_scored"] == 1.0
    assert row["batch/loss_tokens"] > 0
  assert {"eval/heldout/math/accuracy", "eval/heldout/words/reward_mean"} <= set(last)
  assert "eval/heldout/words/accuracy" not in last  # a function gives rewards, not verdicts.
  printed = capsys.readouterr().out
  assert "failed  2 of 8 completions: LookupError: this reward is broken; rows:0:3 (broken)" in (
    printed
  )
  by_environment = {r["environment"]: r["error"].split("\n")[0] for r in rollouts(tmp_path / "run")}
  assert by_environment == {
    "math": "",
    "words": "",
    "broken": "LookupError: this reward is broken",
  }
  page = (tmp_path / "run" / "report.html").read_text()
  assert "Attempts that failed in the whole run, by kind: LookupError 4." in page
