"""`configs/dapo_math.py` on a tiny Qwen2 with files of one's own: each of its parts acts."""

import json
import math

import numpy as np
import pytest

import configs.dapo_math
from grpo_jax import train
from grpo_jax.models import tiny

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.mark.slow
def test_two_steps_shape_rewards_draw_more_prompts_and_keep_the_surplus(tmp_path):
  model = tiny.write(tmp_path / "model", family="qwen2")
  rows = tmp_path / "rows.jsonl"
  lines = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(40)]
  rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
  config = configs.dapo_math.get_config()
  # A reward that a random model can get, and that gives a third of the prompts no signal.
  reward = {"module": "function", "path": "tests.rewards.vowels_of_some"}
  config.environments = {"own": reward}
  settings = {
    "model.path": str(model),
    "model.compute_dtype": "float32",
    "data.path": str(rows),
    "data.prompt_template": "{}",
    "data.environment": "own",
    "evaluation.data.path": str(rows),
    "evaluation.at_end": False,
    "total_steps": 2,
    "rollout.prompts_per_step": 4,
    "dynamic_sampling.prompts_per_round": 9,
    "rollout.group_size": 8,
    "rollout.max_tokens": 64,
    "sampling.max_tokens": 16,
    "sampling.stop_strings": tuple("stnrlSTNRL"),  # so that not all are truncated.
    "batching.row_tokens": 256,
    "batching.row_buckets": (256,),
    "learn.minibatches": 2,
    "optim.learning_rate": 1e-3,
    "shaping.scale_from": (0.0, 0.5),
    "shaping.overlong_buffer_tokens": 8,
    "logging.sinks": ("jsonl", "console"),
    "learn.report_all_every_steps": 0,
    "learn.report_kl_every_steps": 0,
  }
  config.update_from_flattened_dict(settings)
  assert not list(train.validate(config))
  train.train(config, tmp_path / "run")

  folder = tmp_path / "run"
  steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
  assert len(steps) == 2
  for step, reported in enumerate(steps):
    assert math.isfinite(reported["train/loss"]) and reported["batch/optimizer_steps"] == 2.0
    assert reported["rollout/prompts"] == 4.0 and reported["rollout/no_signal_share"] == 0.0
    assert reported["dynamic_sampling/limit_reached"] == 0.0
    assert 0 < reported["shaping/overlong_share"] < 1
    file = folder / "rollouts" / f"step_{step:06d}.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
      penalty = min(max((sum(record["loss_mask"]) - 8) / 8, 0), 1)
      expected = min(record["reward"], 0.5) / 0.5 * 2 - 1 - penalty
      assert record["shaped_reward"] == pytest.approx(expected)
    shaped = np.asarray([record["shaped_reward"] for record in records])
    assert reported["shaping/reward_mean"] == pytest.approx(shaped.mean())
  assert steps[0]["dynamic_sampling/discarded/no_signal"] > 0
  assert steps[1]["dynamic_sampling/from_surplus"] == steps[0]["dynamic_sampling/surplus"] > 0
