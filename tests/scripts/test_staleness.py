"""scripts/staleness.py: which runs it makes, and what it reads from them."""

import json

import pytest

import grpo_jax.train
from grpo_jax.config import command_line, configuration
from scripts import staleness


@pytest.mark.long
def test_the_toy_task_is_valid_with_and_without_sampling_ahead(tmp_path):
  for k in (0, 8):
    flags = [*staleness.toy_flags(tmp_path), f"--config.rollout.max_staleness={k}"]
    config = command_line.parse([*flags, "--config.loss.importance_correction=token"]).config
    configuration.check(config, [grpo_jax.train.validate])
  assert staleness.vowels("", "aeiouxyz", None) == 5 / 8 and staleness.vowels("", "", None) == 0


def test_every_case_is_a_run_in_a_folder_of_its_own(tmp_path, monkeypatch, capsys):
  seen = []

  def train(config, workdir):
    case = (config.rollout.max_staleness, config.loss.importance_correction, config.seed)
    assert config.total_steps == 3
    seen.append((*case, workdir.name))
    workdir.mkdir()
    rows = [
      {"step": 0, "rollout/reward_mean": 0.9},
      {"step": 3, "eval/heldout/reward_mean": case[2] / 8, "eval/heldout/prompts": 4},
    ]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

  monkeypatch.setattr(staleness.train, "train", train)
  words = ["--staleness=0,2", "--seeds=1,3", f"--workdir={tmp_path}", "--config.total_steps=3"]
  assert staleness.main(words) == 0
  cases = [(0, "token"), (2, "token"), (2, "none")]
  expected = [(*case, seed) for case in cases for seed in (1, 3)]
  assert [case[:3] for case in seen] == expected and len({case[3] for case in seen}) == 6
  table = capsys.readouterr().out.splitlines()[-4:]
  assert table[0].split() == ["staleness", "correction", "of", "each", "seed"]
  assert [line.split() for line in table[1:]] == [
    [str(k), correction, "12.5", "37.5", "mean", "25.0"] for k, correction in cases
  ]


@pytest.mark.parametrize(
  "rows, found",
  [
    ([{"eval/a/accuracy": 0.25, "eval/a/reward_mean": 0.75}, {"time/step_s": 1}], [25]),
    ([{"eval/a/reward_mean": 0.5}, {"eval/a/reward_mean": 1.0}], [50, 100]),
  ],
)
def test_the_accuracy_of_an_evaluation_counts_if_there_is_one(rows, found, tmp_path):
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  assert staleness.outcomes(tmp_path) == found
