"""`configs/gdpo_math.py` on a tiny model, with an engine that writes completions of all kinds."""

import json
import pathlib

import numpy as np
import pytest

from grpo_jax import train
from grpo_jax.building import online
from grpo_jax.config import command_line, configuration
from grpo_jax.engines.fake import FakeEngine

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_device")

TEXTS = (
  "<think>a</think>\n<answer>18</answer>",
  "18",
  "17",
  "<think>a</think>\n<answer>x</answer>",
)


def test_the_config_has_three_components_and_their_weights():
  command = command_line.parse([f"--config={ROOT / 'configs' / 'gdpo_math.py'}"])
  configuration.check(command.config, [train.validate])
  assert command.config.advantages.estimator == "gdpo"
  assert len(command.config.advantages.weights) == 3
  assert command.config.environments.math.to_dict() == {"module": "math_multi_reward"}


@pytest.mark.slow
def test_a_run_learns_from_each_component(model, tmp_path, monkeypatch):
  def scripted_engine(config, folder, tokenizer, workdir):
    script = lambda r: [*tokenizer.encode(TEXTS[r.seed % 4]).tolist(), *tokenizer.stop_ids]
    return FakeEngine(np.zeros((tokenizer.vocab_size, tokenizer.vocab_size)), script=script)

  monkeypatch.setattr(online, "_engine", scripted_engine)
  rows = tmp_path / "rows.jsonl"
  lines = [{"question": f"{i} + {18 - i}", "answer": f"easy\n#### {18}"} for i in range(8)]
  rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
  held_out = [{**line, "question": f"{line['question']} + 0"} for line in lines]
  (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(x) + "\n" for x in held_out))
  options = {
    "config": ROOT / "configs" / "gdpo_math.py",
    "config.model.path": model,
    "config.model.compute_dtype": "float32",
    "config.data.path": rows,
    "config.data.system_prompt": "s",
    "config.evaluation.data.path": tmp_path / "held_out.jsonl",
    "config.total_steps": 1,
    "config.rollout.prompts_per_step": 2,
    "config.rollout.group_size": 8,
    "config.rollout.max_tokens": 256,
    "config.sampling.max_tokens": 64,
    "config.batching.row_tokens": 512,
    "config.learn.report_kl_every_steps": 0,
    "config.logging.sinks": ("jsonl", "console"),
  }
  command = command_line.parse([f"--{name}={value}" for name, value in options.items()])
  configuration.check(command.config, [train.validate])
  train.train(command.config, tmp_path / "run")
  found = {}
  for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
    found |= json.loads(line)
  rewards = {name: found[f"env/math/reward/{name}"] for name in ("correct", "format", "integer")}
  assert all(0 < value < 1 for value in rewards.values()), rewards
  assert found["rollout/reward_mean"] == pytest.approx(sum(rewards.values()))
  assert found["train/grad_norm"] > 0
  assert 0 < found["eval/heldout/accuracy"] < 1
