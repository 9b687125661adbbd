"""All completions are measured, whatever the update computes; drift by hand; device memory."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.batching import packing
from grpo_jax.learn import group_scoring, monitoring, scoring, sharding
from grpo_jax.rl import aggregate, objectives
from grpo_jax.rl.logprobs import gather_loss_tokens
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup

V = 7


def logprobs(params, batch, with_entropy):
  """A policy without a context: softmax(params) for every token."""
  table = jax.nn.log_softmax(params)
  tokens = jnp.take_along_axis(batch.tokens, jnp.maximum(batch.loss_places, 0), axis=-1)
  entropy = jnp.broadcast_to(-jnp.sum(jnp.exp(table) * table), tokens.shape)
  return jnp.where(batch.loss_places >= 0, table[tokens], 0), entropy if with_entropy else None


def a_group(*completions, reward=1.0, weight=1.0) -> RolloutGroup:
  """A group of equal rewards: nothing in it is learned from."""
  rollouts = tuple(
    Rollout(
      completion_ids=np.asarray(ids),
      loss_mask=np.ones(len(ids), bool),
      behavior_logprobs=np.full(len(ids), -2.0, np.float32),
      weight_versions=np.zeros(len(ids), np.int32),
      finish_reason=FinishReason.STOP,
      reward=reward,
    )
    for ids in completions
  )
  return RolloutGroup(Prompt("p", np.asarray([0, 1]), "none", weight=weight), rollouts)


def a_monitor(initial=None, *, all_every=10, kl_every=10, fields=None, **options):
  mesh = sharding.make_mesh(data=1, devices=jax.devices()[:1])
  shapes = (packing.Shape(8, 32, 32),)
  scorer = group_scoring.GroupScorer(scoring.make_scorer(logprobs), mesh, 8, shapes)
  objective = objectives.make(**{"kl_coef": 0.0, **options})
  return monitoring.Monitor(
    scoring.make_watcher(logprobs),
    monitoring.make_drift(objective),
    monitoring.make_mismatch(objective),
    scorer,
    initial or (lambda: jnp.zeros(V)),
    frees_initial=True,
    all_every_steps=all_every,
    kl_every_steps=kl_every,
    **{"total_steps": 100, "warn": print, **(fields or {})},
  )


POLICY = jnp.asarray([0.0, 1.0, 0.0, 2.0, 0.0, 0.0, -1.0])
GROUPS = [a_group([2, 3], [4]), a_group([5, 6, 1], reward=float("nan")), a_group([3], weight=0.0)]


def test_all_completions_are_measured_also_those_that_teach_nothing():
  found = a_monitor()(10, POLICY, GROUPS)
  table = np.asarray(jax.nn.log_softmax(POLICY), np.float64)
  sampled = table[[2, 3, 4, 5, 6, 1, 3]]
  distance = np.abs(sampled + 2.0)
  assert found["all/entropy"] == pytest.approx(-(np.exp(table) * table).sum(), rel=1e-5)
  assert found["all/abs_logprob_mean"] == pytest.approx(distance.mean(), rel=1e-5)
  assert found["all/abs_logprob_max"] == pytest.approx(distance.max(), rel=1e-5)
  assert found["all/covered_token_share"] == 1.0
  # k3 of the policy and the uniform distribution at the tokens that were sampled.
  log_ratio = -np.log(V) - sampled
  expected = (np.exp(log_ratio) - 1 - log_ratio).mean()
  assert found["all/kl_to_initial"] == pytest.approx(expected, rel=1e-5) and expected > 0.1
  assert found["train/kl_to_reference"] == found["all/kl_to_initial"]  # of the default loss.


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"kl_estimator": "k1", "kl_input_clamp": 1.0},
    {"kl_estimator": "k2", "kl_output_clamp": 0.5, "kl_weight": "none"},
    {"aggregation": "sequence_mean"},
    {"aggregation": "constant_length", "max_completion_tokens": 5},
    {"use_on_policy_kl_approximation": True},
  ],
)
@pytest.mark.long
def test_the_drift_without_a_kl_in_the_loss_is_what_a_loss_with_it_reports(options):
  initial = jnp.linspace(0.0, 1.0, V)
  monitor = a_monitor(lambda: initial + 0.0, **options)
  found = monitor(10, POLICY, GROUPS)["train/kl_to_reference"]
  loss = objectives.make(**{"kl_coef": 0.1, **options})
  (batch,), _ = monitor.scorer.batches(GROUPS)
  policy, _ = logprobs(POLICY, batch, False)
  reference, _ = logprobs(initial, batch, False)
  tokens = gather_loss_tokens(batch)
  tokens = dataclasses.replace(tokens, ref_logprobs=reference)
  counts = aggregate.local_denominators(tokens.mask, tokens.sequence_ids)
  _, reported = loss(policy, None, tokens, counts)
  assert found == pytest.approx(reported["train/kl_to_reference"].value(), rel=1e-6)
  assert abs(found) > 1e-3
  with_kl = a_monitor(lambda: initial + 0.0, **{**options, "kl_coef": 0.1})
  assert "train/kl_to_reference" not in with_kl(10, POLICY, GROUPS)  # the update reports it.


def test_a_step_whose_update_computes_nothing_still_compares_engine_and_trainer():
  """By hand, over all completions, with the ages of their tokens; whatever truncation there is."""
  truncated = {
    "importance_correction": "token",
    "importance_truncation": "tis",
    "importance_high": 0.5,
  }
  monitor = a_monitor(all_every=0, kl_every=0, fields={"has_ages": True}, **truncated)
  assert monitor(3, POLICY, GROUPS) == {}
  found = monitor(3, POLICY, GROUPS, is_learned=False)
  table = np.asarray(jax.nn.log_softmax(POLICY), np.float64)
  sampled = table[[2, 3, 4, 5, 6, 1, 3]]
  ratio = np.exp(sampled + 2.0)
  expected = {
    "mismatch/abs_logprob_mean": np.abs(sampled + 2.0).mean(),
    "mismatch/token_mult_prob_error": np.exp(np.abs(sampled + 2.0)).mean(),
    "mismatch/sampling_importance_ratio": ratio.mean(),
    "mismatch/sampling_importance_ratio_max": ratio.max(),
    "mismatch/gen_kl_error": (ratio - 1 - sampled - 2.0).mean(),
    "mismatch/out_of_bounds_share": (ratio > 0.5).mean(),
    "staleness/2_3/share": 1.0,  # sampled by version 0, in step 3.
    "staleness/2_3/ratio": ratio.mean(),
    "train/approx_entropy": -(ratio * sampled).mean(),
    "train/entropy": -(np.exp(table) * table).sum(),
  }
  assert ratio.mean() > 0.6
  for name, value in expected.items():
    assert found[name] == pytest.approx(value, rel=1e-5), name
  assert not [name for name in found if name.startswith("all/")]
  without_ages = a_monitor(all_every=0, kl_every=0)(3, POLICY, GROUPS, is_learned=False)
  assert not [name for name in without_ages if name.startswith("staleness/")]


@pytest.mark.long
def test_a_run_that_begins_with_an_adapter_begins_at_a_distance_from_the_initial_weights():
  begun = a_monitor(fields={"begins_apart": True})(0, POLICY, GROUPS)
  later = a_monitor()(10, POLICY, GROUPS)
  assert begun["all/kl_to_initial"] == later["all/kl_to_initial"] > 0.1
  assert begun["train/kl_to_reference"] == begun["all/kl_to_initial"]
  assert a_monitor()(0, POLICY, GROUPS)["all/kl_to_initial"] == 0.0


def test_what_does_not_fit_in_a_row_is_not_covered():
  long = a_group(list(range(5)) * 8)
  found = a_monitor()(10, POLICY, [*GROUPS, long])
  assert found["all/covered_token_share"] == pytest.approx(7 / 47)


def test_steps_are_due_by_their_options_and_the_last_one_always():
  def due(**options):
    monitor = a_monitor(fields={"total_steps": 14}, **options)
    kinds = {}
    for step in range(14):
      found = monitor(step, POLICY, GROUPS)
      kinds[step] = ("all/entropy" in found, "all/kl_to_initial" in found)
    return {step: kind for step, kind in kinds.items() if any(kind)}

  assert due() == {0: (True, True), 10: (True, True), 13: (True, True)}
  assert due(all_every=0, kl_every=6) == {step: (False, True) for step in (0, 6, 12, 13)}
  assert due(all_every=0, kl_every=0) == {}


@pytest.mark.long
def test_the_initial_weights_are_read_when_they_are_needed_and_freed():
  read = []

  def load():
    read.append(jnp.zeros(V) + 0.0)
    return read[-1]

  monitor = a_monitor(load)
  assert monitor(0, POLICY, GROUPS)["all/kl_to_initial"] == 0.0 and not read
  assert monitor(10, POLICY, GROUPS)["all/kl_to_initial"] > 0
  assert len(read) == 1 and read[0].is_deleted()
  reference = jnp.zeros(V)
  initial, frees = monitoring.make_initial(load, reference)
  assert initial() is reference and not frees and len(read) == 1


def test_initial_weights_that_are_gone_cost_the_figure_and_not_the_run():
  reported = []

  def gone():
    raise FileNotFoundError("/models/a/config.json")

  found = a_monitor(gone, fields={"warn": reported.append})(10, POLICY, GROUPS)
  assert "all/entropy" in found and "all/kl_to_initial" not in found
  assert reported == [
    "all/kl_to_initial cannot be measured: cannot read the initial weights: /models/a/config.json"
  ]


def test_computed_tokens_are_a_share_of_all_sampled_ones():
  known = [np.asarray([0.1, 0.2]), np.asarray([np.nan])]
  assert monitoring.token_shares(GROUPS[:1], [known], 7) == pytest.approx(2 / 7)


def device(number, stats):
  return types.SimpleNamespace(id=number, memory_stats=lambda: stats)


def test_device_memory_is_of_each_device_and_of_the_fullest():
  gib = 2**30
  devices = [
    device(0, {"bytes_in_use": 2 * gib, "peak_bytes_in_use": 3 * gib, "bytes_limit": 16 * gib}),
    device(1, {"bytes_in_use": gib, "peak_bytes_in_use": 5 * gib, "bytes_limit": 16 * gib}),
  ]
  assert monitoring.device_memory(devices) == {
    "perf/device_gib": 2.0,
    "perf/device/0/gib": 2.0,
    "perf/device/1/gib": 1.0,
    "perf/device_peak_gib": 5.0,
    "perf/device_limit_gib": 16.0,
    "perf/device/0/peak_gib": 3.0,
    "perf/device/1/peak_gib": 5.0,
  }
  assert monitoring.device_memory([device(0, None), device(1, {})]) == {}
  assert monitoring.device_memory([device(3, {"bytes_in_use": gib}), device(4, None)]) == {
    "perf/device_gib": 1.0,
    "perf/device/3/gib": 1.0,
  }
  assert monitoring.device_memory(jax.devices("cpu")) == {}  # counts nothing.
