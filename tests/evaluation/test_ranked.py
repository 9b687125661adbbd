"""Recorded groups under a model: which files they are, and their numbers worked by hand."""

import json

import numpy as np
import pytest

from grpo_jax.config import base
from grpo_jax.config.configuration import ConfigError, typed
from grpo_jax.data import groups
from grpo_jax.evaluation import choosing, ranked
from grpo_jax.offline.ranking import Ranked
from grpo_jax.offline.recorded_groups import Scored
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup


def scored(logprobs, rewards, kind=None):
  """A group whose responses have two sampled tokens each, both with the given logprob."""
  prompt = Prompt("p", np.arange(3), "none", {}, "text")
  values = [np.asarray([value, value], np.float32) for value in logprobs]
  rollouts = tuple(
    Rollout(
      completion_ids=np.asarray([1, 2]),
      loss_mask=np.asarray([True, True]),
      behavior_logprobs=each,
      weight_versions=np.zeros(2, int),
      reward=reward,
      text="",
      finish_reason=FinishReason.STOP,
    )
    for each, reward in zip(values, rewards, strict=True)
  )
  ranks = Ranked(np.asarray(logprobs, float), np.asarray(rewards, float), kind)
  return Scored(RolloutGroup(prompt, rollouts), values, ranks)


def test_numbers_of_three_groups_by_hand():
  found = ranked.describe(
    "set",
    [
      scored([-1.0, -2.0, -3.0], [1.0, 0.5, 0.0], "a"),  # in order.
      scored([-3.0, -1.0], [1.0, 0.0], "b"),  # reversed.
      scored([-2.0, -4.0], [0.5, 0.5], "b"),  # no order.
    ],
    seed=0,
  )
  value = {name: one.value for name, one in found.estimates.items()}
  assert value["accuracy"] == 0.5 and found.estimates["accuracy"].error == pytest.approx(0.5)
  assert (value["a/accuracy"], value["b/accuracy"], value["consistency"]) == (1.0, 0.0, 0.0)
  assert value["logprob"] == pytest.approx((-2 - 2 - 3) / 3)
  assert value["reward_mean"] == pytest.approx(0.5)
  # Of 21 pairs 9 have different rewards; -1 1, -2 .5, -3 0, -3 1, -1 0, -2 .5, -4 .5.
  scores, rewards = [-1, -2, -3, -3, -1, -2, -4], [1, 0.5, 0, 1, 0, 0.5, 0.5]
  pairs = [(i, j) for i in range(7) for j in range(i)]
  signs = [np.sign((scores[i] - scores[j]) * (rewards[i] - rewards[j])) for i, j in pairs]
  untied = [sum(x[i] != x[j] for i, j in pairs) for x in (scores, rewards)]
  assert value["rank_correlation"] == pytest.approx(sum(signs) / np.sqrt(np.prod(untied)))
  assert found.counts["without_order"] == 1 and found.counts["responses"] == 7


def test_groups_of_one_response_are_described():
  one = [scored([x], [r]) for x, r in [(-1.0, 1.0), (-2.0, 0.0), (-3.0, 0.0)]]
  found = ranked.describe("set", one, seed=0)
  assert "accuracy" not in found.estimates and found.counts["without_order"] == 3
  assert found.estimates["rank_correlation"].value == pytest.approx(2 / np.sqrt(3 * 2))
  assert found.estimates["reward_mean"].value == pytest.approx(1 / 3)
  same = ranked.describe("set", [scored([-1.0], [1.0]), scored([-2.0], [1.0])], seed=0)
  assert "rank_correlation" not in same.estimates, "all rewards are equal"


RECORDED = [
  {"prompt": "a", "group": [{"response": "b", "rank": 1}]},
  {"input": "a", "output": "b", "reward": 1.0},
  {"prompt_ids": [1], "completion_ids": [1], "loss_mask": [1], "behavior_logprobs": [0.0]},
  {"responses_create_params": {"input": "a"}, "response": {"output": []}, "reward": 1.0},
]
PROBLEMS = [
  {"problem": "a", "expected_answer": "b"},
  {"problem": "a", "input": "", "output": "b"},
  {"responses_create_params": {"input": "a"}, "expected_answer": "b"},
  {"messages": []},
]


def test_the_kind_of_a_row_follows_from_its_fields():
  assert [groups.is_recorded(row) for row in RECORDED + PROBLEMS] == [True] * 4 + [False] * 4


def test_the_mode_of_an_evaluation_follows_from_its_sets(tmp_path):
  paths = {}
  for name, row in {"ranked": RECORDED[0], "problems": PROBLEMS[0]}.items():
    paths[name] = tmp_path / f"{name}.jsonl"
    paths[name].write_text(json.dumps(row) + "\n")
  config = base.get_config()
  config.checkpoint.best_metric = "eval/heldout/accuracy"
  for name, mode in {"ranked": "offline", "problems": "online"}.items():
    chosen = choosing.with_sets(typed(config), [str(paths[name])])
    assert chosen.mode == mode and chosen.checkpoint.best_metric is None
  assert choosing.with_sets(typed(config), ["HelpSteer3"]).mode == "offline"
  with pytest.raises(
    ConfigError, match="ranked holds recorded .* problems problems, .*two commands"
  ):
    choosing.with_sets(typed(config), [str(path) for path in paths.values()])
