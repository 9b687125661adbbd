"""Metrics: estimators, exact merging, what is told of rollouts, and the table."""

import dataclasses
import itertools
import math
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import metrics
from grpo_jax.metrics import scored_groups
from grpo_jax.report import figures
from grpo_jax.run_folder import console
from grpo_jax.types import (
  EffectiveSampleShare,
  FinishReason,
  Maximum,
  Mean,
  Minimum,
  Prompt,
  Rollout,
  RolloutGroup,
)

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def a_rollout(reward=0.0, tokens=3, finish=FinishReason.STOP, version=0, **fields) -> Rollout:
  return Rollout(
    completion_ids=np.arange(tokens, dtype=np.int32),
    loss_mask=np.ones(tokens, bool),
    behavior_logprobs=np.full(tokens, -0.5, np.float32),
    weight_versions=np.full(tokens, version, np.int32),
    finish_reason=finish,
    reward=reward,
    **fields,
  )


def a_group(*rollouts, prompt_id="p", environment="math") -> RolloutGroup:
  return RolloutGroup(Prompt(prompt_id, np.arange(5, dtype=np.int32), environment), rollouts)


@pytest.mark.parametrize(("n", "c", "k"), [(5, c, k) for c in range(6) for k in range(1, 6)])
def test_pass_at_k_is_the_share_of_draws_with_a_solution(n, c, k):
  draws = list(itertools.combinations(range(n), k))
  expected = sum(min(draw) < c for draw in draws) / len(draws)  # samples 0..c-1 solve it.
  assert scored_groups.pass_at_k(n, c, k) == pytest.approx(expected, rel=1e-15)


def test_pass_at_k_keeps_its_digits_when_it_is_tiny_and_when_samples_are_many():
  # One of n solves it: 1 - C(n-1,k)/C(n,k) = k/n, here far below the rounding of "1 - ...".
  assert scored_groups.pass_at_k(10**17, 1, 3) == pytest.approx(3e-17, rel=1e-15, abs=0)
  assert scored_groups.pass_at_k(2000, 1000, 1000) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_refuses_more_attempts_than_samples(n, c, k):
  with pytest.raises(ValueError, match="1 <= k <= n"):
    scored_groups.pass_at_k(n, c, k)


def test_merging_parts_of_unequal_size_gives_the_value_of_the_whole():
  values, cut = np.asarray([1.0, 2.0, 4.0, 9.0]), 1
  weights = np.asarray([0.5, 1.0, 1.5, 3.0])

  def measured(x, w):
    return {
      "mean": Mean(jnp.sum(x), jnp.asarray(float(len(x)))),
      "max": Maximum(jnp.max(x)),
      "min": Minimum(jnp.min(x)),
      "ess": EffectiveSampleShare(jnp.sum(w), jnp.sum(w * w), jnp.asarray(float(len(w)))),
    }

  parts = [measured(values[:cut], weights[:cut]), measured(values[cut:], weights[cut:])]
  found = metrics.to_floats(metrics.merge(parts))
  # ESS: (0.5 + 1 + 1.5 + 3)² / (4 · (0.25 + 1 + 2.25 + 9)) = 36 / 50.
  assert found == pytest.approx({"mean": 4.0, "max": 9.0, "min": 1.0, "ess": 0.72})
  assert all(type(value) is float for value in found.values())


def test_merging_keeps_names_that_only_some_parts_have():
  merged = metrics.merge([{"a": Mean(1.0, 1.0)}, {"b": Mean(4.0, 2.0)}, {"b": Mean(0.0, 2.0)}])
  assert metrics.to_floats(merged) == {"a": 1.0, "b": 1.0}


def test_merging_a_mean_with_a_maximum_names_the_metric():
  with pytest.raises(TypeError, match="'a' is a Mean in one part and a Maximum"):
    metrics.merge([{"a": Mean(1.0, 1.0)}, {"a": Maximum(1.0)}])


def test_rollouts_are_described_without_those_that_could_not_be_scored():
  groups = [
    a_group(a_rollout(1.0, 2), a_rollout(0.0, 8, FinishReason.LENGTH)),
    a_group(a_rollout(1.0, 4), a_rollout(math.nan, 6)),  # one scored reward: no signal.
    a_group(a_rollout(0.5, 4), a_rollout(0.5, 6, FinishReason.ABORT)),
  ]
  found = scored_groups.rollout_metrics(groups, step=3)
  expected = {
    "rollout/prompts": 3,
    "rollout/completions": 6,
    "rollout/reward_mean": 3.0 / 5,
    "rollout/reward_std": math.sqrt((0.4**2 * 2 + 0.6**2 + 2 * 0.1**2) / 5),
    "rollout/reward_group_std_mean": 0.5 / 3,
    "rollout/no_signal_share": 2 / 3,
    "rollout/failed_share": 1 / 6,
    "rollout/truncated_share": 1 / 6,
    "rollout/aborted_share": 1 / 6,
    "rollout/prompt_tokens_mean": 5,
    "rollout/completion_tokens_mean": 5,
    "rollout/completion_tokens_stopped_mean": 22 / 5,
    "rollout/staleness_mean": 3,
    "env/math/reward_mean": 3.0 / 5,
  }
  assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_completions_are_equal_by_their_tokens():
  groups = [
    a_group(a_rollout(tokens=2), a_rollout(tokens=2, reward=1.0), a_rollout(tokens=3), a_rollout()),
    a_group(a_rollout(tokens=5), a_rollout(tokens=6)),
    a_group(a_rollout(math.nan, tokens=5)),
  ]
  # 2 of 4 differ, 2 of 2, 1 of 1; equal completions of two prompts are nobody's fault.
  assert scored_groups.rollout_metrics(groups)["rollout/unique_share"] == pytest.approx(2.5 / 3)


def test_rewards_by_length_by_hand():
  groups = [
    a_group(a_rollout(1.0, 2), a_rollout(0.0, 4), a_rollout(0.5, 6), a_rollout(math.nan, 900)),
    a_group(a_rollout(3.0, 11), a_rollout(3.5, 13)),
    a_group(a_rollout(0.1, 20), a_rollout(0.1, 40)),
  ]
  found = scored_groups.rollout_metrics(groups)
  # Deviations: rewards (.5 -.5 0) (-.25 .25) (0 0), lengths (-2 0 2) (-1 1) (-10 10).
  covariance = -1.0 + 0.25 + 0.25
  expected = covariance / math.sqrt((0.5 + 0.125) * (8 + 2 + 200))
  assert found["rollout/reward_length_correlation"] == pytest.approx(expected)
  # Lengths 2 4 6 11 13 20 40: quartiles 5, 11 and 16.5.
  quarters = [found[f"rollout/reward_of_length/{k}"] for k in (1, 2, 3, 4)]
  assert quarters == pytest.approx([0.5, 1.75, 3.5, 0.1])


def test_rewards_by_length_of_equal_ones():
  same = scored_groups.rollout_metrics([a_group(a_rollout(0.1, 3), a_rollout(0.1, 5))])
  assert math.isnan(same["rollout/reward_length_correlation"])
  equal = scored_groups.rollout_metrics([a_group(a_rollout(0.0, 3), a_rollout(1.0, 3))])
  assert math.isnan(equal["rollout/reward_length_correlation"])
  assert equal["rollout/reward_of_length/1"] == 0.5
  assert math.isnan(equal["rollout/reward_of_length/4"])
  longer = scored_groups.rollout_metrics([a_group(a_rollout(0.0, 3), a_rollout(1.0, 5))])
  assert longer["rollout/reward_length_correlation"] == pytest.approx(1.0)


def test_staleness_counts_sampled_tokens_only():
  rollout = Rollout(
    completion_ids=np.arange(4, dtype=np.int32),
    loss_mask=np.asarray([True, False, True, True]),
    behavior_logprobs=np.asarray([-1, 0, -1, -1], np.float32),
    weight_versions=np.asarray([4, -1, 4, 7], np.int32),  # changed in mid-completion.
    finish_reason=FinishReason.ENV_DONE,
    reward=1.0,
  )
  found = scored_groups.rollout_metrics([a_group(rollout)], step=7)
  assert found["rollout/staleness_mean"] == pytest.approx(2.0)
  assert found["rollout/staleness_max"] == 3.0
  assert "rollout/staleness_mean" not in scored_groups.rollout_metrics([a_group(rollout)])


def test_completions_are_described_by_the_age_of_their_oldest_token():
  def sampled_by(reward, *versions):
    rollout = a_rollout(reward, len(versions))
    return dataclasses.replace(rollout, weight_versions=np.asarray(versions, np.int32))

  masked = dataclasses.replace(sampled_by(9.0, 0, 9), loss_mask=np.asarray([False, True]))
  groups = [
    a_group(sampled_by(1.0, 9, 9), sampled_by(0.5, 8, 9), sampled_by(0.0, 8, 8)),
    a_group(sampled_by(4.0, 6, 7, 9), sampled_by(2.0, -1, 7), sampled_by(math.nan, 7, 7)),
    a_group(sampled_by(7.0, -1, -1), masked, sampled_by(0.25, 1, 0)),
  ]
  found = scored_groups.staleness_metrics(groups, step=9)
  assert found["rollout/mixed_versions_share"] == 3 / 8  # one completion has no known version.
  rewards = [found[f"staleness/{ages}/reward"] for ages in ("0", "1", "2_3", "4_7", "8_plus")]
  assert rewards == pytest.approx([5.0, 0.25, 3.0, math.nan, 0.25], nan_ok=True)
  assert not metrics.unknown(found)


@pytest.mark.filterwarnings("error")
def test_nothing_sampled_has_no_age():
  assert all(map(math.isnan, scored_groups.staleness_metrics([], step=3).values()))


def test_environments_are_separate_and_their_own_metrics_are_averaged():
  groups = [
    a_group(a_rollout(1.0, metrics={"accuracy": 1.0}, reward_components={"format": 0.25})),
    a_group(a_rollout(0.0, metrics={"accuracy": 0.0}), environment="math"),
    a_group(a_rollout(-1.0), environment="code"),
  ]
  found = scored_groups.rollout_metrics(groups)
  assert found["env/math/reward_mean"] == 0.5
  assert found["env/code/reward_mean"] == -1.0
  assert found["env/math/accuracy"] == 0.5
  assert found["env/math/reward/format"] == 0.25


@pytest.mark.filterwarnings("error")
def test_nothing_sampled_gives_nan_and_no_warning():
  found = scored_groups.rollout_metrics([], step=0)
  assert found["rollout/completions"] == 0.0
  assert math.isnan(found["rollout/reward_mean"]) and math.isnan(found["rollout/staleness_max"])
  only_failed = scored_groups.rollout_metrics([a_group(a_rollout(math.nan), a_rollout(math.nan))])
  assert only_failed["rollout/failed_share"] == 1.0
  assert only_failed["rollout/no_signal_share"] == 1.0
  assert math.isnan(only_failed["rollout/reward_mean"])


def test_an_evaluation_reports_accuracy_pass_at_k_and_what_failed():
  judged = lambda reward, *more: a_rollout(reward, *more, metrics={"accuracy": float(reward == 1)})
  groups = [
    a_group(judged(1.0), judged(0.0), judged(0.0), a_rollout(math.nan)),
    a_group(judged(0.9), judged(1.0), judged(1.0), judged(0.0, 9, FinishReason.LENGTH)),
  ]
  found = scored_groups.evaluation_metrics(groups, name="heldout", pass_k=(1, 2))
  expected = {
    "eval/heldout/prompts": 2,
    "eval/heldout/accuracy": (1 / 4 + 2 / 4) / 2,
    "eval/heldout/pass@1": (1 / 4 + 2 / 4) / 2,
    # pairs without a solution: C(3,2)/C(4,2) = 3/6 and C(2,2)/C(4,2) = 1/6.
    "eval/heldout/pass@2": (3 / 6 + 5 / 6) / 2,
    "eval/heldout/reward_mean": 3.9 / 7,
    "eval/heldout/failed_share": 1 / 8,
    "eval/heldout/truncated_share": 1 / 8,
  }
  assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_an_environment_that_reports_accuracy_decides_what_is_solved():
  groups = [
    a_group(a_rollout(1.5, metrics={"accuracy": 0.0}), a_rollout(0.1, metrics={"accuracy": 1.0}))
  ]
  assert scored_groups.evaluation_metrics(groups, name="x")["eval/x/accuracy"] == 0.5


def test_accuracy_is_of_the_environments_that_report_it():
  rewarded = a_group(a_rollout(1.0), a_rollout(1.0), environment="reward_model")
  alone = scored_groups.evaluation_metrics([rewarded], name="x")
  assert not [name for name in alone if "accuracy" in name or "pass@" in name]
  assert alone["eval/x/reward_mean"] == 1.0
  judged = a_group(a_rollout(0.0, metrics={"accuracy": 1.0}), a_rollout(math.nan))
  both = scored_groups.evaluation_metrics([rewarded, judged], name="x")
  assert both["eval/x/accuracy"] == both["eval/x/math/accuracy"] == both["eval/x/pass@1"] == 0.5
  assert "eval/x/reward_model/accuracy" not in both


def test_the_entropy_of_the_behavior_is_of_all_sampled_tokens():
  groups = [a_group(a_rollout(1.0, 3), a_rollout(1.0, 5)), a_group(a_rollout(math.nan, 2))]
  assert scored_groups.rollout_metrics(groups)["rollout/behavior_entropy"] == pytest.approx(0.5)


def test_everything_that_the_package_reports_is_in_the_table():
  group = a_group(a_rollout(1.0, metrics={"accuracy": 1.0}, reward_components={"format": 1.0}))
  reported = scored_groups.rollout_metrics([group], step=1) | scored_groups.evaluation_metrics(
    [group], name="held/out"
  )
  assert metrics.unknown(reported) == []
  assert metrics.unknown(["rollout/reward_mean", "rollout/rewards", "b"]) == [
    "b",
    "rollout/rewards",
  ]


def test_every_metric_named_in_the_code_is_in_the_table():
  package = Path(metrics.__file__).parents[1]
  areas = "all|rollout|signal|train|mismatch|batch|data|learn|filter|perf|eval|time"
  literal = re.compile(rf'"((?:{areas})/[a-z][a-z0-9_@]*)"')
  named = {
    name: path.name
    for path in package.rglob("*.py")
    for name in literal.findall(path.read_text(encoding="utf-8"))
  }
  assert len(named) > 40
  assert {name: named[name] for name in metrics.unknown(named)} == {}


def test_what_is_printed_and_drawn_is_in_the_table():
  printed = {name for column in console.COLUMNS for name in column.metrics} - {console.LEFT}
  drawn = [
    c.replace("[!1]*", "4").replace("1?*", "16").replace("*", "x")
    for panel in figures.PANELS
    for c in (*panel.curves.values(), panel.band)
    if c
  ]
  assert metrics.unknown([*printed, *drawn]) == []


def test_the_table_in_the_docs_is_the_table_in_the_code():
  assert metrics.markdown_table() in DOCS.read_text(encoding="utf-8")


def test_no_pattern_of_the_table_hides_a_later_row():
  names = list(metrics.METRICS)
  for name in names:
    probe = name.replace("*", "x7")
    assert metrics.definition(probe) is metrics.METRICS[name], name


def test_what_clock_and_machine_decide_is_left_out_of_a_comparison():
  values = {"time/step_s": 1.0, "perf/tokens_per_s": 2.0, "train/loss": 3.0, "step": 4}
  values |= {"mismatch/sync_share": 1.0}
  assert metrics.reproducible(values) == {"train/loss": 3.0, "step": 4}


def test_lines_that_are_not_records_are_named_and_left_out():
  text = (
    '{"step": 0, "a": 1.0}\n\n[1]\n{"a": 2}\n{"step": 1, "a": nul\n{"step": 2, "a": null}\n{"st'
  )
  rows, broken = metrics.parse_lines(text)
  assert rows == [{"step": 0, "a": 1.0}, {"step": 2, "a": None}]
  assert broken == [3, 4, 5, 7]
