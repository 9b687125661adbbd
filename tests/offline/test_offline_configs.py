"""The configs of the guides on recorded groups, as a newcomer tries them, on a tiny model."""

import json
import math
import pathlib

import pytest

import grpo_jax.train  # noqa: F401  (main imports it later: its seconds are not this test's.)
from grpo_jax import main
from grpo_jax.models import loading, tiny

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = pathlib.Path(__file__).parents[2]


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
    "batching.row_buckets": (256,),
    "batching.microbatch_tokens": 256,
    "rollout.max_tokens": 192,
    "evaluation.every_steps": 0,
    "logging.sinks": ("jsonl", "console"),
  }
  arguments = [f"--config={ROOT / 'configs' / config}", f"--workdir={workdir}"]
  arguments += [f"--config.{name}={value}" for name, value in (small | options).items()]
  assert main.main(arguments) == 0
  assert loading.load(workdir / "export").config.family == "qwen2"
  return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
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


def asked(text, **fields):
  """A row of NeMo Gym: what was asked, and one answer."""
  content = [{"type": "output_text", "text": "an answer"}]
  return {
    "responses_create_params": {"input": [{"role": "user", "content": text}], "tools": []},
    "response": {"output": [{"type": "message", "role": "assistant", "content": content}]},
    **fields,
  }


# The fields that NeMo Gym's environments write besides, and the shape of its guide.
SINGLES = {
  "blackjack": [
    asked(f"Your hand: {i}", reward=2.0 * (i % 2) - 1, _ng_task_index=0, info={"value": i})
    for i in range(4)
  ],
  "code_gen": [
    asked(f"program {i}", reward=float(i % 2), result=[-2], metadata={"expected": "1"})
    for i in range(4)
  ],
  "instruction_following": [
    asked(f"write {i}", reward=float(i % 2), instruction_id_list=["count:n"], kwargs=[{"N": 3}])
    for i in range(4)
  ],
  "reasoning_gym": [
    asked(f"puzzle {i}", reward=float(i % 2), task_name="knights_knaves", score=0.0)
    for i in range(4)
  ],
  "guide": [{"input": f"ask {i}", "output": "an answer", "reward": i % 2} for i in range(4)],
}


def written(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


@pytest.mark.long
@pytest.mark.parametrize("estimator", ["reinforce_pp", "grpo"])
def test_files_of_single_responses_are_learned_from_or_it_is_said(
  estimator, model, tmp_path, capsys
):
  rows = [row for rows in zip(*SINGLES.values(), strict=True) for row in rows]
  options = {"data.path": written(tmp_path / "rollouts.jsonl", rows)}
  if estimator != "reinforce_pp":  # that of the config.
    options |= {"advantages.estimator": estimator, "loss.kl_coef": 0.0}
  reported = run(tmp_path / "run", "nemo_gym.py", model, **options)
  printed = capsys.readouterr().out
  assert "20 recorded groups, 20 of them with one response" in printed
  assert "accuracy" not in printed  # nothing was ranked.
  steps = [row for row in reported if "rollout/prompts" in row]
  if estimator == "reinforce_pp":
    assert [row["signal/lost_share"] for row in steps] == [0.0, 0.0]
    assert all(row["train/grad_norm"] > 0 for row in steps)
    assert steps[1]["all/kl_to_initial"] > 0.0 == steps[0]["all/kl_to_initial"]
    assert "NOTHING" not in printed
    return
  assert [row["signal/lost/group_of_one"] for row in steps] == [4.0, 4.0]
  assert "NOTHING IS LEARNED FROM THESE 20" in printed and "Step 0: NOTHING TO" in printed
  page = (tmp_path / "run" / "report.html").read_text()
  assert "Steps 0 to 1: NOTHING TO LEARN FROM" in page
  # What nothing is learned from is measured all the same, and says of what it is.
  assert (
    steps[0]["train/entropy"] == pytest.approx(steps[0]["all/entropy"])
    and steps[0]["all/entropy"] > 1.0
  )
  assert steps[0]["all/covered_token_share"] == 1.0 and steps[0]["batch/computed_token_share"] == 0


NO_SERVER = "http://127.0.0.1:9"


@pytest.mark.parametrize("name", [name for name in SINGLES if name != "guide"])
@pytest.mark.parametrize(
  "environment, reason",
  [
    ("math", "needs expected_answer"),
    ("nemo_gym", f"NeMo Gym's resources server {NO_SERVER} cannot be used"),
  ],
)
def test_online_a_file_that_no_environment_scores_is_refused_before_anything_is_sampled(
  name, environment, reason, model, tmp_path, capsys
):
  path = written(tmp_path / "rollouts.jsonl", SINGLES[name])
  config = f"--config={ROOT / 'configs' / 'nemo_gym.py:online'}"
  options = {"model.path": model, "data.path": path, "data.environment": environment}
  options |= {"environments.nemo_gym.url": NO_SERVER, "environments.nemo_gym.backoff_s": 0.0}
  arguments = [f"--config.{key}={value}" for key, value in options.items()]
  assert main.main([config, f"--workdir={tmp_path / 'run'}", *arguments]) == 2
  reported = capsys.readouterr().err
  assert f"environment '{environment}' accepts none of the 3 prompts that were tried" in reported
  assert reason in reported and "which must run at environments.nemo_gym.url" in reported
  assert "data.environment='nemo_gym'" in reported and "mode='offline'" in reported
  assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("mode", ["offline", "online"])
@pytest.mark.long
def test_rollouts_of_nemo_gym_are_learned_from_or_sampled_again(mode, model, tmp_path):
  path = tmp_path / "rollouts.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rollouts()))
  options = {"data.path": path}
  if mode == "online":
    options |= {"data.environment": "math"}
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
