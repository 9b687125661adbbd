"""Runs whose reward comes from a reward model, or from a server: a few steps, tiny models."""

import json
import pathlib
import re

import numpy as np
import pytest
import torch
import transformers

import configs.base
from grpo_jax import main, train
from grpo_jax.models import tiny
from tests.environments.scripted_server import answer, echo, serving

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = pathlib.Path(__file__).parents[2]
PROBLEMS = ["Say something.", "What is up?", "Who are you?", "Go on."]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """Returns a folder with a policy, a reward model of another family, and rows."""
  folder = tmp_path_factory.mktemp("made")
  tiny.write(folder / "policy", family="qwen2")
  tiny.write_reward_model(folder / "rewarder", family="qwen3", seed=1)
  rows = [json.dumps({"problem": problem}) + "\n" for problem in PROBLEMS]
  (folder / "rows.jsonl").write_text("".join(rows))
  return folder


def run(made, workdir, *, config="reward_model", **settings) -> int:
  """Trains for two steps; a__b=1 sets config.a.b."""
  arguments = {
    "model__path": made / "policy",
    "model__compute_dtype": "float32",
    "data__path": made / "rows.jsonl",
    "total_steps": 2,
    "rollout__prompts_per_step": 4,
    "rollout__group_size": 4,
    "sampling__max_tokens": 8,
    "batching__row_tokens": 256,
    "batching__row_buckets": "(256,)",
    "batching__microbatch_tokens": 256,
    "loss__kl_coef": 0.0,
    "evaluation__every_steps": 0,
    "evaluation__at_start": False,
    "evaluation__at_end": False,
    "logging__sinks": ("jsonl", "console"),
    "learn__report_all_every_steps": 0,
    "learn__report_kl_every_steps": 0,
    **settings,
  }
  file = config if isinstance(config, pathlib.Path) else ROOT / "configs" / f"{config}.py"
  words = [f"--config.{name.replace('__', '.')}={value}" for name, value in arguments.items()]
  return main.main([f"--config={file}", f"--workdir={workdir}", *words])


def lines(file):
  return [json.loads(line) for line in file.read_text().splitlines()]


OF_TINY = {
  "environments__reward_model__compute_dtype": "float32",
  "environments__reward_model__scale": 0.5,
}


@pytest.mark.slow
def test_the_config_trains_on_transformers_logits_and_repeats_itself(made, tmp_path):
  settings = {**OF_TINY, "environments__reward_model__path": made / "rewarder"}
  assert run(made, tmp_path / "run", **settings) == 0
  first, second = lines(tmp_path / "run" / "metrics.jsonl")
  assert first["rollout/failed_share"] == 0.0 and first["rollout/reward_group_std_mean"] > 0
  assert first["rollout/reward_mean"] == pytest.approx(0.5 * first["env/reward_model/score"])
  assert 0 < first["perf/env/reward_model/batches"] < first["perf/env/reward_model/calls"]
  assert second["train/grad_norm"] > 0

  # What was logged is what transformers says of the same words.
  tokenizer = transformers.AutoTokenizer.from_pretrained(made / "rewarder")
  model = transformers.AutoModelForSequenceClassification.from_pretrained(made / "rewarder").eval()
  for row in lines(tmp_path / "run" / "rollouts" / "step_000000.jsonl")[:6]:
    problem = next(p for p in PROBLEMS if p in row["prompt"])
    chat = [
      {"role": "user", "content": problem},
      {"role": "assistant", "content": row["completion"]},
    ]
    ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=False)
    with torch.no_grad():
      logit = float(model(ids).logits[0, 0])
    assert row["reward"] == pytest.approx(0.5 * logit, rel=1e-3, abs=1e-4)

  # In whatever order threads finish, the rewards are the same to the last bit.
  assert run(made, tmp_path / "again", **settings) == 0
  rewards = [
    np.asarray([row["reward"] for row in lines(tmp_path / name / "rollouts" / "step_000001.jsonl")])
    for name in ("run", "again")
  ]
  np.testing.assert_array_equal(*rewards)


def test_a_wrong_reward_model_ends_the_run_before_the_policy_is_loaded(made, tmp_path, capsys):
  settings = {**OF_TINY, "environments__reward_model__path": made / "policy"}
  assert run(made, tmp_path / "run", **settings) != 0
  assert "not a supported sequence classifier" in capsys.readouterr().err
  assert not (tmp_path / "run" / "metrics.jsonl").exists()


CONFIG = """
import configs.reward_model

def get_config():
  config = configs.reward_model.get_config()
  config.environments = dict(
    judge=dict(module="reward_endpoint", url="{url}", format="json", {settings})
  )
  config.data.environment = "judge"
  return config
"""


def run_with_server(made, folder, url, settings) -> int:
  file = folder / "own_config.py"
  file.write_text(CONFIG.format(url=url, settings=settings))
  return run(made, folder / "run", config=file)


@pytest.mark.long
def test_a_run_outlives_a_server_that_stumbles_and_hides_the_key(made, tmp_path, monkeypatch):
  monkeypatch.setenv("JUDGE_KEY", "sk-secret-0123456789")
  bad = answer({"error": "busy"}, 503)
  settings = "backoff_s=0.01, api_key_env='JUDGE_KEY'"
  with serving(bad, echo, bad, bad, echo) as server:
    assert run_with_server(made, tmp_path, server.url, settings) == 0
    assert {h["Authorization"] for _, h, _ in server.requests} == {"Bearer sk-secret-0123456789"}
  last = lines(tmp_path / "run" / "metrics.jsonl")[-1]
  assert last["perf/env/judge/endpoint_retries"] == 3.0
  files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
  assert not [path for path in files if b"sk-secret" in path.read_bytes()]


@pytest.mark.long
def test_a_server_that_is_gone_stops_the_run_with_the_reason(made, tmp_path, capsys):
  settings = "backoff_s=0.0, retries=1, max_failed_calls=4, concurrency=2"
  with serving(answer({"error": "gone for good"}, 500)) as server:
    assert run_with_server(made, tmp_path, server.url, settings) == main.FAILED
    # Of 16 attempts, 4 were asked for and 1 was on its way, in two tries each.
    assert 8 <= len(server.requests) <= 10
  reported = capsys.readouterr().err
  assert re.search("error: 16 of 16 attempts could not be scored.*gone for good", reported)


@pytest.mark.parametrize(("module", "default"), [("reward_endpoint", 50), ("code", 20)])
def test_the_default_time_of_a_score_is_compared_with_that_of_its_attempt_too(module, default):
  config = configs.base.get_config()
  config.environments = dict(own=dict(module=module))
  config.data.environment = "own"
  assert not list(train.validate(config))
  config.rollout.environment_timeout_s = float(default)
  (complaint,) = train.validate(config)
  assert f"environments.own.total_timeout_s={default} must be less than" in complaint


def test_a_score_that_may_take_longer_than_its_attempt_is_refused(made, tmp_path, capsys):
  settings = "total_timeout_s=90.0"
  assert run_with_server(made, tmp_path, "http://127.0.0.1:9", settings) != 0
  said = capsys.readouterr().err
  assert "environments.judge.total_timeout_s=90" in said
  assert "rollout.environment_timeout_s" in said
