"""Runs whose losses choose tokens or completions over a step, and whose baseline is greedy."""

import json

import numpy as np
import pytest

from grpo_jax import train
from grpo_jax.building import computation, online
from grpo_jax.compilation import programs
from grpo_jax.config import base
from grpo_jax.engines.fake import FakeEngine

JOBS = computation.Computation.jobs  # other tests take them away.
RUNS = {
  "clip_cov": {
    "loss__loss": "clip_cov",
    "loss__clip_cov_ratio": 0.1,
    "loss__clip_cov_lb": 0.01,
    "loss__seq_logprob_error_threshold": 1e30,
    "learn__minibatches": 2,
  },
  "prime_rl": {
    "loss__loss": "dppo_tv",
    "loss__use_behavior_logprobs": True,
    "loss__dppo_kl_tau": 1e-3,
    "loss__top_entropy_share": 0.25,
    "advantages__estimator": "remax",
  },
  "interpolated": {
    "loss__old_logprobs": "interpolated",
    "loss__importance_correction": "token",
    "learn__minibatches": 2,
    "rollout__max_staleness": 1,
  },
}


@pytest.fixture(scope="module", autouse=True)
def scripted(one_device):
  """Answers of some letters, which differ in every attempt; the greedy one is the last."""

  def engine(config, folder, tokenizer, workdir):
    def script(request):
      row, _, attempt = request.request_id.rpartition(":")[2].partition("#")
      number = int(attempt.partition(".")[0])
      assert (request.sampling.temperature == 0) == (number == 4)
      letters = "xyaexio"[: (int(row) + number * 3) % 7] + "u"
      return [*tokenizer.encode(letters).tolist(), *tokenizer.stop_ids]

    return FakeEngine(np.zeros((tokenizer.vocab_size, tokenizer.vocab_size)), script=script)

  del one_device
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(online, "_engine", engine)
    yield


def run(name, model, folder):
  rows = [{"problem": f"{i} + 1", "expected_answer": str(i)} for i in range(20)]
  path = folder / "rows.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  settings = {
    "total_steps": 2,
    "model__path": str(model),
    "model__compute_dtype": "float32",
    "data__path": str(path),
    "data__environment": "own",
    "rollout__prompts_per_step": 2,
    "rollout__group_size": 4,
    "rollout__max_tokens": 64,
    "sampling__max_tokens": 16,
    "batching__row_tokens": 64,
    "batching__row_buckets": (64,),
    "loss__kl_coef": 0.0,
    "optim__learning_rate": 1e-2,
    "evaluation__every_steps": 0,
    "evaluation__at_start": False,
    "evaluation__at_end": False,
    "learn__report_all_every_steps": 0,
    "learn__report_kl_every_steps": 0,
    "checkpoint__every_steps": 0,
    "checkpoint__keep_best": 0,
    "logging__sinks": ("jsonl", "console"),
    **RUNS[name],
  }
  config = base.get_config()
  config.environments = {"own": {"module": "function", "path": "tests.rewards.vowels"}}
  config.update_from_flattened_dict({k.replace("__", "."): v for k, v in settings.items()})
  assert not list(train.validate(config))
  train.train(config, folder / "run")
  lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines], json.loads((folder / "run/config.json").read_text())


def watched(monkeypatch):
  """Returns a dict that gets, for each program, whether its calls were compiled ahead."""
  called = {}
  find = programs.Program._executable

  def executable(self, *arguments):
    found = find(self, *arguments)
    called.setdefault(self.name, []).append(found is not None)
    return found

  monkeypatch.setattr(computation.Computation, "jobs", JOBS)
  monkeypatch.setattr(programs.Program, "_executable", executable)
  return called


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip_cov", "prime_rl"])
def test_a_run_chooses_tokens_and_compiles_nothing_late(name, model, tmp_path, monkeypatch):
  called = watched(monkeypatch) if name == "clip_cov" else {}
  steps, config = run(name, model, tmp_path)
  assert len(steps) == 2 and config["batching"]["skip_zero_advantage"] is False
  for step in steps:
    assert step["batch/computed_token_share"] == 1.0 and step["train/skipped_share"] == 0.0
    assert 0 < step["train/selected_share"] <= 0.35
  if name == "clip_cov":
    for program in ("scores of the selection", "screening", "score", "update", "optimizer"):
      assert called[program] and all(called[program]), program
    assert all(step["mismatch/seq_logprob_error_masked_share"] == 0 for step in steps)
    assert all(step["mismatch/seq_logprob_error_max"] > 1 for step in steps)
  else:
    assert all(0 <= step["rollout/greedy_reward_mean"] <= 1 for step in steps)
    assert all(step["train/ratio_max"] != 1 for step in steps)  # to the engine's policy.


@pytest.mark.slow
def test_a_run_interpolates_old_logprobs_without_a_scoring_pass(model, tmp_path, monkeypatch):
  called = watched(monkeypatch)
  steps, _ = run("interpolated", model, tmp_path)
  assert "score" not in called and len(called["update"]) == 4 and all(called["update"])
  for age, step in enumerate(steps):  # step 1 learns from what version 0 sampled.
    shares = [step[f"staleness/{ages}/share"] for ages in ("0", "1", "2_3")]
    assert shares == [age == 0, age == 1, 0]
    assert step["rollout/staleness_max"] == age and step["rollout/mixed_versions_share"] == 0.0
    assert step[f"staleness/{age}/reward"] == pytest.approx(step["rollout/reward_mean"])
    assert step[f"staleness/{1 - age}/reward"] is None
  first = steps[0]  # ρ = π/μ there, since α = 0.
  assert first["staleness/0/ratio"] == pytest.approx(first["train/ratio_mean"])
