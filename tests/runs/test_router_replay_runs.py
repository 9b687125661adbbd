"""Whole runs on a tiny mixture of experts, one step ahead: what is replayed, and what continues."""

import json

import pytest
from test_ahead_runs import StopWhen, assert_same_end, reported, start

from grpo_jax.building.router_replay import MissingExperts
from grpo_jax.config.configuration import ConfigError
from grpo_jax.engines import sampled_experts
from grpo_jax.models import tiny

pytestmark = [pytest.mark.usefixtures("one_device"), pytest.mark.long]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
  folder = tmp_path_factory.mktemp("input")
  rows = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(23)]
  (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return {
    "total_steps": 3,
    "model.path": str(tiny.write(folder / "model", family="qwen3_moe")),
    "model.compute_dtype": "float32",
    "data.path": str(folder / "rows.jsonl"),
    "data.environment": "own",
    "rollout.prompts_per_step": 3,
    "rollout.group_size": 4,
    "rollout.max_tokens": 96,
    "rollout.max_staleness": 1,
    "sampling.max_tokens": 8,
    "engine.max_rows": 8,
    "batching.row_tokens": 128,
    "batching.microbatch_tokens": 128,  # one shape, which is compiled once.
    "loss.kl_coef": 0.05,  # the reference chooses for itself.
    "loss.importance_correction": "token",
    "loss.router_replay": True,
    "optim.learning_rate": 1e-2,
    "evaluation.data.path": None,
    "checkpoint.every_steps": 1,
    "checkpoint.keep_last": None,
    "learn.report_all_every_steps": 2,
    "learn.report_kl_every_steps": 2,
    "logging.sinks": ("jsonl",),
  }


@pytest.fixture(scope="module")
def first(settings, tmp_path_factory):
  """The folder of a run that nothing disturbed."""
  return start(settings, tmp_path_factory.mktemp("first") / "run")


def steps(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [line for line in map(json.loads, lines) if "weight_version" in line]


def test_a_run_replays_what_its_sampler_chose(first):
  found = steps(first)
  assert len(found) == 3
  for line in found:
    assert 0.7 < line["router/replayed_share"] < 1  # all but the last token of each attempt.
  changed = [line["router/changed_share"] for line in found]
  assert changed[0] < 1e-3 < max(changed[1:]) < 0.5  # by the step that lies between.
  assert found[0]["mismatch/abs_logprob_mean"] < 1e-5


def test_groups_under_way_keep_their_experts_when_a_run_continues(settings, first, tmp_path):
  folder = tmp_path / "run"
  start(settings, folder, stop=StopWhen(folder, 1))
  assert len(steps(folder)) < 3
  info = json.loads(next((folder / "checkpoints").glob("step_*/info.json")).read_text())
  (_, group), *_ = info["extra"]["stream"]["ahead"]["ready"]
  assert group["prompt_experts"]["shape"] == [2, 2]
  start(settings, folder)
  assert_same_end(folder, first)


def test_without_replay_nothing_is_recorded(settings, first, tmp_path):
  folder = start(settings, tmp_path / "run", loss__router_replay=False)
  names = {name for line in steps(folder) for name in line if name.startswith("router/")}
  assert names == {"router/largest_load", "router/load_entropy"}
  assert reported(folder) != reported(first)


def test_replay_without_experts_is_refused_before_the_update(settings, tmp_path):
  dense = str(tiny.write(tmp_path / "dense", family="qwen3"))
  with pytest.raises(ConfigError, match="router_replay=True needs a mixture of experts"):
    start(settings, tmp_path / "run", model__path=dense)


def test_an_engine_without_records_is_refused(settings, tmp_path, monkeypatch):
  monkeypatch.setattr(sampled_experts, "of_completion", lambda *_: {})
  with pytest.raises(MissingExperts, match="attempt 0 of prompt .*has no experts"):
    start(settings, tmp_path / "run")
