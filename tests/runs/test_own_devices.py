"""A run whose sampler has devices of its own learns what a run on one device learns."""

import json

import jax
import pytest

import configs.base
from grpo_jax import train

OF_TIME = ("time/", "perf/", "memory/", "host/")


def metrics(model, folder, count, **changes):
  """Trains two steps on the first devices; returns the metrics of each step."""
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
    "optim.learning_rate": 0.02,
    "evaluation.every_steps": 0,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "checkpoint.every_steps": 0,
    "logging.sinks": ("jsonl", "console"),
    **changes,
  }
  config.update_from_flattened_dict(settings)
  first = jax.devices()[:count]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, "devices", lambda *_: first)
    train.train(config, folder / "run")
  lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
  return [line for line in lines if "weight_version" in line]


@pytest.mark.long
def test_a_run_with_a_device_for_the_sampler_learns_the_same(model, tmp_path):
  wanted = metrics(model, tmp_path / "one", 1)
  found = metrics(model, tmp_path / "two", 2, **{"engine.devices": (0,)})
  assert len(wanted) == len(found) == 2
  compared = 0
  for one, other in zip(wanted, found, strict=True):
    assert one.keys() == other.keys()
    for name, value in one.items():
      if isinstance(value, float) and not name.startswith(OF_TIME):
        assert other[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
        compared += 1
  assert compared > 40
