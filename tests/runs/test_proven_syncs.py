"""Whole runs whose new weights are proven at the engine, and one that loses them in silence."""

import json
import pathlib

import pytest

import configs.base
from grpo_jax import metrics, train
from grpo_jax.config.configuration import ConfigError
from grpo_jax.engines.base import WrongWeights

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def make_config(model, tmp_path):
  """Returns a function that makes the config of a run of seconds; `a__b=1` sets config.a.b."""
  rows = tmp_path / "rows.jsonl"
  lines = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(12)]
  rows.write_text("".join(json.dumps(line) + "\n" for line in lines))

  def make(**overrides):
    settings = {
      "total_steps": 3,
      "model__path": str(model),
      "model__compute_dtype": "float32",
      "mesh__data": 1,
      "data__path": str(rows),
      "data__environment": "own",
      "rollout__prompts_per_step": 4,
      "rollout__group_size": 8,
      "rollout__max_tokens": 96,
      "sampling__max_tokens": 16,
      "engine__max_rows": 16,
      "batching__row_tokens": 128,
      "batching__microbatch_tokens": 512,
      "loss__kl_coef": 0.0,
      "learn__report_kl_every_steps": 0,
      "optim__learning_rate": 1e-2,
      "evaluation__at_start": False,
      "evaluation__at_end": False,
      "logging__sinks": ("jsonl",),
      **overrides,
    }
    config = configs.base.get_config()
    config.environments = {"own": {"module": "function", "path": "tests.rewards.vowels"}}
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in settings.items()})
    return config

  return make


def metrics_of(workdir: pathlib.Path):
  return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_keeps_old_weights_ends_the_run_at_that_step(make_config, tmp_path, dtype):
  """Its version is right and its logprobs are nearly so; what was learned is saved."""
  settings = {"model__compute_dtype": dtype, "engine__proof_tokens": 512}
  config = make_config(engine__name="tests.stale_engine", **settings)
  with pytest.raises(WrongWeights, match=r"sampler does not .* version 2 .* To do: "):
    train.train(config, tmp_path)
  first, second = (step for step in metrics_of(tmp_path) if "weight_version" in step)
  assert first["mismatch/sync_proven"] == 1.0
  assert abs(first["mismatch/sync_share"] - 1.0) <= max(
    6 * first["mismatch/sync_share_error"], 0.02
  )
  assert second["mismatch/sync_proven"] == 0.0 and abs(second["mismatch/sync_share"]) < 0.02
  assert not metrics.unknown({name for name in second if name != "step"})
  assert {first["step"], second["step"]} == {0, 1}
  steps = [path.name for path in (tmp_path / "checkpoints").iterdir() if "step" in path.name]
  assert sorted(steps)[-1].endswith("2")


@pytest.mark.long
def test_a_proof_changes_nothing_that_is_learned(make_config, tmp_path):
  lines = {}
  for tokens in (0, 256):
    train.train(make_config(engine__proof_tokens=tokens), tmp_path / str(tokens))
    lines[tokens] = metrics_of(tmp_path / str(tokens))
  own = ("mismatch/sync_", "perf/", "time/", "loop/")
  without, proven = (
    [{k: v for k, v in step.items() if not k.startswith(own)} for step in lines[n]]
    for n in (0, 256)
  )
  assert without == proven
  assert "mismatch/sync_proven" in lines[256][0] and "mismatch/sync_proven" not in lines[0][0]


def test_an_engine_that_cannot_score_is_refused(make_config, tmp_path):
  config = make_config(engine__name="tests.calling_engine", engine__proof_tokens=64)
  with pytest.raises(
    ConfigError, match="engine.proof_tokens=64 needs an engine that scores tokens"
  ):
    train.train(config, tmp_path)
