"""Whole runs that train the distribution that top-k, top-p and min-p leave."""

import json
import logging

import jax
import pytest

import configs.base
from grpo_jax import train

pytestmark = pytest.mark.slow

FILTERS = {"sampling.top_k": 40, "sampling.top_p": 0.8, "sampling.min_p": 0.01}


def run(model, folder, **options):
  """Trains for two steps in folder/run and returns its metrics, with all programs compiled."""
  folder.mkdir()
  rows = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(9)]
  (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  config = configs.base.get_config()
  config.environments = {"own": {"module": "function", "path": "tests.rewards.vowels"}}
  settings = {
    "total_steps": 2,
    "model.path": str(model),
    "model.compute_dtype": "float32",
    "data.path": str(folder / "rows.jsonl"),
    "data.environment": "own",
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 8,
    "rollout.max_tokens": 96,
    "sampling.max_tokens": 8,
    "engine.max_rows": 16,
    "batching.row_tokens": 128,
    "batching.microbatch_tokens": 128,
    "learn.minibatches": 2,
    "learn.report_all_every_steps": 1,
    "learn.report_kl_every_steps": 1,
    "optim.learning_rate": 0.03,
    "evaluation.every_steps": 0,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "logging.sinks": ("jsonl", "console"),
    **FILTERS,
    **{name.replace("__", "."): value for name, value in options.items()},
  }
  config.update_from_flattened_dict(settings)
  assert not list(train.validate(config))
  train.train(config, folder / "run")
  found = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
  return [line for line in found if "weight_version" in line]


@pytest.fixture(autouse=True)
def first_device(monkeypatch):
  first = jax.devices()[:1]
  monkeypatch.setattr(jax, "devices", lambda *_: first)


def test_the_trainer_and_the_sampler_have_the_same_truncated_distribution(model, tmp_path, caplog):
  with caplog.at_level(logging.WARNING):
    lines = run(model, tmp_path / "truncated", sampling__logprobs="truncated")
  assert "truncated distribution" not in caplog.text
  for line in lines:
    assert line["all/abs_logprob_max"] < 1e-5
    assert line["all/outside_truncation_share"] == 0.0
  # Old logprobs are of the truncated distribution, and so is the ratio of the first minibatch.
  assert lines[0]["mismatch/abs_logprob_max"] < 1e-5
  # The reference's are not: the policy is the reference, and its KL is zero.
  assert lines[0]["all/kl_to_initial"] == pytest.approx(0.0, abs=1e-6)
  assert lines[1]["all/kl_to_initial"] > 1e-4
  assert lines[1]["perf/compilations"] == 0.0


def test_without_the_option_the_run_warns_once(model, tmp_path, caplog):
  with caplog.at_level(logging.WARNING):
    run(model, tmp_path / "full")
  [warning] = [x for x in caplog.messages if "truncated distribution" in x]
  assert "sampling.top_k=40, sampling.top_p=0.8, sampling.min_p=0.01" in warning
  assert "sampling.logprobs='truncated'" in warning
