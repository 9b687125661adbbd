"""The configs of the guides on recorded groups, as a newcomer tries them, on a tiny model."""

import json
import math
import pathlib

import pytest

import grpo_jax.train  # noqa: F401  (main imports it later: its seconds are not this test's.)
from grpo_jax import main
from grpo_jax.models import loading, tiny

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return tiny.write(tmp_path_factory.mktemp("model") / "tiny", family="qwen2")


def run(workdir, config, model, **options):
  """Runs two steps from the command line; returns the lines of metrics.jsonl."""
  small = {
    "model.path": model,
    "model.compute_dtype": "float32",
    "total_steps": 2,
    "rollout.prompts_per_step": 4,
    "batching.row_tokens": 256,
    "rollout.max_tokens": 192,
    "evaluation.every_steps": 0,
    "logging.tensorboard": False,
  }
  arguments = [f"--config={ROOT / 'configs' / config}", f"--workdir={workdir}"]
  arguments += [f"--config.{name}={value}" for name, value in (small | options).items()]
  assert main.main(arguments) == 0
  assert loading.load(workdir / "export").config.family == "qwen2"
  return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_the_tutorials_file_of_ranked_groups_is_learned_from(model, tmp_path):
  def groups(first, last):
    return [
      {
        "prompt": f"Your instruction {i}",
        "group": [{"response": f"option {i}{n}", "rank": n} for n in (1, 2, 3)],
      }
      for i in range(first, last)
    ]

  (tmp_path / "train.json").write_text(json.dumps(groups(0, 8)))
  (tmp_path / "val.json").write_text(json.dumps(groups(8, 12)))
  rows = run(
    tmp_path / "run",
    "offline_ranked.py",
    model,
    **{
      "data.path": tmp_path / "train.json",
      "evaluation.data.path": tmp_path / "val.json",
    },
  )
  before, after = rows[0], rows[-1]
  assert before["eval/heldout/groups"] == after["eval/heldout/groups"] == 4
  assert 0 <= before["eval/heldout/accuracy"] <= 1 and 0 <= after["eval/heldout/accuracy"] <= 1
  for row in rows[:2]:
    assert row["rollout/reward_mean"] == 0.5 and row["rollout/completions"] == 12
    assert math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0
    assert row["train/kl_to_reference"] >= -1e-6


def rollouts():
  """Four tasks, three rollouts of each, in NeMo Gym's shape."""
  return [
    {
      "responses_create_params": {"input": [{"role": "user", "content": f"task {task}"}]},
      "response": {
        "output": [
          {"type": "message", "role": "assistant", "content": [{"text": f"try {attempt}"}]}
        ]
      },
      "reward": float(attempt == 2),
      "expected_answer": str(task),
      "_ng_task_index": task,
      "_ng_rollout_index": attempt,
      "agent_ref": {"name": "agent"},
    }
    for task in range(5)
    for attempt in range(3)
  ]


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_rollouts_of_nemo_gym_are_learned_from_or_sampled_anew(mode, model, tmp_path):
  path = tmp_path / "rollouts.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rollouts()))
  options = {"data.path": path}
  if mode == "online":
    options |= {"rollout.group_size": 2, "sampling.max_tokens": 4, "engine.max_rows": 8}
    options |= {"evaluation.at_start": False, "evaluation.at_end": False}
  rows = run(tmp_path / "run", f"nemo_gym.py:{mode}", model, **options)
  assert rows[0]["rollout/prompts"] == 4
  assert rows[0]["rollout/completions"] == (12 if mode == "offline" else 8)
  if mode == "offline":
    assert rows[0]["rollout/reward_mean"] == pytest.approx(1 / 3)
    assert rows[0]["eval/heldout/groups"] == 1  # one of five is split off.
    assert rows[0]["eval/heldout/agent/groups"] == 1
    assert rows[1]["train/grad_norm"] > 0
