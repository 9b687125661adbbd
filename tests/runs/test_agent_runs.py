"""Runs of the program with an agent's environment, on a tiny model."""

import json
import pathlib

import numpy as np
import pytest

import grpo_jax.train  # noqa: F401  (main imports it later: its seconds are not this test's.)
from grpo_jax import main, metrics

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = pathlib.Path(__file__).parents[2]
TEMPLATE = (
  "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
  "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
  "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def config(tmp_path, model):
  """A config of 2 prompts × 2 attempts a step: an agent's rows, and one that is scored directly."""
  rows = [{"problem": f"say {i}", "expected_answer": str(i)} for i in range(8)]
  for row in rows[1::4]:
    row["task_name"] = "words"
  path = tmp_path / "rows.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  held_out = [{**row, "problem": f"name {i}"} for i, row in enumerate(rows)]
  other = tmp_path / "held_out.jsonl"
  other.write_text("".join(json.dumps(row) + "\n" for row in held_out))
  file = tmp_path / "config.py"
  settings = {
    "total_steps": 2,
    "model.path": str(model),
    "model.compute_dtype": "float32",
    "model.chat_template": TEMPLATE,
    "mesh.data": 1,
    "data.path": str(path),
    "evaluation.data.path": str(other),
    "data.shuffle": False,
    "data.environment": "agent",
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "rollout.max_tokens": 768,
    "sampling.max_tokens": 8,
    "batching.skip_zero_advantage": False,
    "evaluation.num_prompts": 2,
    "evaluation.at_start": False,
    "logging.sinks": ("jsonl", "console"),
    "learn.report_all_every_steps": 0,
    "learn.report_kl_every_steps": 0,
  }
  file.write_text(
    "import configs.base\n"
    "def get_config():\n"
    "  config = configs.base.get_config()\n"
    "  config.environments = {\n"
    "    'agent': {'module': 'tests.conversing.Measuring', 'system': 'You measure.'},\n"
    "    'words': {'module': 'function', 'path': 'tests.rewards.vowels'},\n"
    "  }\n"
    f"  config.update_from_flattened_dict({settings!r})\n"
    "  return config\n"
  )
  return file


def run(config, workdir, *arguments):
  assert main.main([f"--config={config}", f"--workdir={workdir}", *arguments]) == 0
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  files = sorted((workdir / "rollouts").iterdir())
  return rows, [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_an_agent_is_trained_beside_an_ordinary_environment_and_evaluated(tmp_path, config):
  rows, records = run(config, tmp_path / "run")
  assert not metrics.unknown({name for row in rows for name in row if name != "step"})
  agents = [record for record in records if record["environment"] == "agent"]
  assert len(agents) == 6 and len(records) == 8
  assert not any(record["error"] for record in records)
  for record in agents:
    mask, texts = np.asarray(record["loss_mask"]), np.asarray(record["token_texts"])
    assert record["turns"] == 2 and len(record["turn_log"]) == 2
    assert [bool(m) for m in mask] == [v is not None for v in record["policy_logprobs"]]
    assert record["prompt"].startswith("<|im_start|>tools\n[{")
    assert "<|im_start|>system\nYou measure.<|im_end|>" in record["prompt"]
    written = "".join(texts[mask == 0])
    assert written.count("<|im_start|>tool\n") == 1 and record["prompt"].endswith("assistant\n")
    expected = [
      part
      for turn in record["turn_log"]
      for part in [1] * turn["sampled_tokens"] + [0] * turn["environment_tokens"]
    ]
    assert mask.tolist() == expected
  # What the trainer computes on the stitched tokens is what the engine sampled from.
  trained = [row for row in rows if "mismatch/abs_logprob_max" in row]
  assert len(trained) == 2
  assert max(row["mismatch/abs_logprob_max"] for row in trained) < 1e-4
  assert trained[1]["env/agent/endpoint_requests"] == 2.0
  assert trained[1]["env/agent/endpoint_tokens_left_out"] == 0.0
  assert "eval/heldout/accuracy" in rows[-1]
  options = ["--config.total_steps=1", "--config.evaluation.at_end=False"]
  _, again = run(config, tmp_path / "again", *options)
  keys = ("prompt_ids", "completion_ids", "behavior_logprobs", "reward")
  begun = records[: len(again)]
  assert [[r[k] for k in keys] for r in again] == [[r[k] for k in keys] for r in begun]
  # The shapes that are compiled ahead have room for conversations.
  settings = json.loads((tmp_path / "run" / "config.json").read_text())
  assert settings["rollout"]["conversations"] is True
