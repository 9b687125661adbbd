"""Old logprobs interpolated from versions: AReaL's numbers, closed forms, what is refused."""

import dataclasses
import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.rl import distillation, masks, objectives, proximal, staleness
from grpo_jax.types import Denominators, LossTokens

GOLDEN = json.loads(
  (pathlib.Path(__file__).parents[1] / "golden" / "areal_decoupled.json").read_text()
)["cases"]
# AReaL's rejection sampling by the token's ratio; its clamp is TIS and its mask is IcePop.
OPTIONS = {
  "uncapped": {},
  "clamp_1.5": {"importance_truncation": "tis", "importance_high": 1.5},
  "mask_1.5": {"importance_truncation": "icepop", "importance_high": 1.5},
  "dual_clip": {"dual_clip": 1.3, "clip_high": 0.28},
}
DECOUPLED = {"kl_coef": 0.0, "importance_correction": "token"}
INTERPOLATED = {**DECOUPLED, "old_logprobs": "interpolated"}
TINY = np.float32(1e-6)


def _tokens(case):
  """Returns log πθ and the tokens of a golden case; `old_logprobs` are the scored ones."""
  versions, step = np.asarray(case["versions"]), case["step"]
  ages = np.stack([staleness.ages(row, step) for row in versions])
  floats = lambda name: jnp.asarray(np.asarray(case[name]), jnp.float32)
  tokens = LossTokens(
    mask=jnp.asarray(case["mask"]),
    sequence_ids=None,
    advantages=floats("advantages"),
    behavior_logprobs=floats("behavior"),
    old_logprobs=floats("scored"),
    ages=jnp.asarray(ages),
  )
  return floats("policy"), tokens


@functools.cache
def _compiled(objective):
  """Returns loss, metrics and gradient; compiled once for all cases of an objective."""
  share = lambda policy, tokens, count: objective(policy, None, tokens, count)
  return jax.jit(jax.value_and_grad(share, has_aux=True))


def _evaluated(objective, policy, tokens):
  count = Denominators(float(np.asarray(tokens.mask).sum()), 1.0)
  (loss, metrics), gradient = _compiled(objective)(policy, tokens, count)
  return float(loss), {k: v.value() for k, v in metrics.items()}, np.asarray(gradient)


@pytest.mark.parametrize("case", GOLDEN)
def test_interpolation_is_that_of_areal(case):
  policy, tokens = _tokens(case)
  known = policy, tokens.behavior_logprobs
  got = proximal.interpolated(*known, tokens.ages)
  np.testing.assert_allclose(got, case["interpolated"], rtol=1e-6, atol=TINY)
  assert np.unique(np.asarray(tokens.ages)).tolist() == [-1, *range(9)]
  # AReaL's trainer calls it with the version that the step began with: one step younger.
  younger = proximal.interpolated(*known, jnp.maximum(tokens.ages - 1, -1))
  np.testing.assert_allclose(younger, case["interpolated_by_trainer"], rtol=1e-6, atol=TINY)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["scored", "interpolated"])
def test_decoupled_loss_is_that_of_areal(kind, options):
  """Versions rise within completions; `scored` is AReaL's "recompute"."""
  objective = objectives.make(**DECOUPLED, **OPTIONS[options], old_logprobs=kind)
  for case in GOLDEN:
    policy, tokens = _tokens(case)
    if kind == "interpolated":
      tokens = dataclasses.replace(tokens, old_logprobs=None)
    loss, _, gradient = _evaluated(objective, policy, tokens)
    wanted = case["results"][f"{kind}/{options}"]
    np.testing.assert_allclose(loss, wanted["loss"], rtol=2e-6, atol=TINY)
    np.testing.assert_allclose(gradient, wanted["grad"], rtol=2e-5, atol=TINY)
    assert np.abs(gradient).max() > 0.01
  assert set(case["results"]) == {f"{k}/{o}" for k in ("scored", "interpolated") for o in OPTIONS}


def test_host_and_device_interpolate_alike():
  policy, tokens = _tokens(GOLDEN[0])
  known = policy, tokens.behavior_logprobs, tokens.ages
  on_host = proximal.interpolated(*map(np.asarray, known))
  assert type(on_host) is np.ndarray and on_host.dtype == np.float32
  np.testing.assert_allclose(on_host, proximal.interpolated(*known), rtol=1e-6)


def test_share_of_the_way_by_hand():
  ages = jnp.asarray([-1, 0, 1, 2, 3, 9])
  np.testing.assert_allclose(proximal.shares(ages), [0, 0, 1 / 2, 2 / 3, 3 / 4, 9 / 10], rtol=1e-7)


@pytest.mark.long
def test_steps_of_equal_size_are_interpolated_exactly():
  """With log π of version v equal to a + b v, and πθ the policy that the step makes."""
  step, versions = 7, np.asarray([7, 6, 5, 3, 0])
  of = lambda version: -2.0 + 0.05 * np.asarray(version, np.float32)
  ages = jnp.asarray(staleness.ages(versions, step))
  policy = jnp.full(versions.shape, of(step + 1))
  got = proximal.interpolated(policy, jnp.asarray(of(versions)), ages)
  np.testing.assert_allclose(got, np.full(versions.shape, of(step)), rtol=1e-6)


def test_tokens_of_the_newest_weights_keep_the_logprobs_of_the_engine():
  """Also if the policy gives the token no probability at all."""
  policy = jnp.asarray([-jnp.inf, -1.0, -jnp.inf])
  behavior = jnp.asarray([-0.5, -0.5, -0.5])
  got = proximal.interpolated(policy, behavior, jnp.asarray([0, 0, -1]))
  np.testing.assert_array_equal(got, behavior)


def test_what_is_interpolated_has_no_gradient():
  of = lambda policy: proximal.interpolated(policy, jnp.full(3, -2.0), jnp.asarray([0, 1, 7])).sum()
  np.testing.assert_array_equal(jax.grad(of)(jnp.full(3, -1.0)), 0)


def test_gradient_within_the_clip_is_that_of_one_ratio_to_the_engine():
  """w ρ = (π/μ)^α (π/μ)^(1-α) = π/μ, whatever α; outside the clip of ρ alone it is 0."""
  behavior = jnp.full((1, 4), -2.0)
  policy = behavior + jnp.asarray([[0.1, 0.1, 0.5, 0.5]])
  tokens = LossTokens(
    mask=jnp.ones((1, 4), bool),
    sequence_ids=None,
    advantages=jnp.ones((1, 4)),
    behavior_logprobs=behavior,
    ages=jnp.asarray([[0, 3, 0, 3]]),
  )
  _, metrics, gradient = _evaluated(objectives.make(**INTERPOLATED), policy, tokens)
  # ρ: e^0.1, e^0.025, e^0.5 > 1.2 (clipped), e^0.125 < 1.2.
  expected = -np.exp([0.1, 0.1, 0.5, 0.5]) * [1, 1, 0, 1] / 4
  np.testing.assert_allclose(gradient[0], expected, rtol=1e-5)
  assert metrics["train/clip_high_share"] == 0.25
  np.testing.assert_allclose(metrics["train/ratio_max"], np.exp(0.5), rtol=1e-5)
  ratios = np.exp([0.1, 0.1, 0.5, 0.5])  # of policy and engine, whatever the loss uses for π_old.
  np.testing.assert_allclose(metrics["mismatch/sampling_importance_ratio"], ratios.mean(), 1e-5)
  weights = np.exp([0, 0.075, 0, 0.375])
  share = weights.sum() ** 2 / (4 * np.square(weights).sum())
  np.testing.assert_allclose(metrics["mismatch/effective_sample_share"], share, 1e-5)


def test_mismatch_is_measured_on_the_policy_and_not_on_what_is_interpolated():
  """Interpolated logprobs of new tokens are the engine's: they would show no mismatch at all."""
  policy, tokens = _tokens(GOLDEN[0])
  tokens = dataclasses.replace(tokens, ages=jnp.zeros_like(tokens.ages))
  got = _evaluated(objectives.make(**INTERPOLATED), policy, tokens)[1]
  as_policy = dataclasses.replace(tokens, old_logprobs=policy)
  expected = _evaluated(objectives.make(**DECOUPLED), policy, as_policy)[1]
  assert got["mismatch/abs_logprob_max"] > 0.1
  for name, value in expected.items():
    if name.startswith("staleness/") or "logprob" in name or "kl_error" in name:
      np.testing.assert_array_equal(got[name], value, err_msg=name)


def test_objective_says_that_it_needs_ages_and_no_scoring():
  scored, made = objectives.make(**DECOUPLED), objectives.make(**INTERPOLATED)
  assert (scored.needs_old, scored.needs_ages) == (True, False)
  assert (made.needs_old, made.needs_ages) == (False, True)
  assert made.is_token_local and made.reads_old and not made.acts_without_advantage


def test_scored_old_logprobs_are_not_read():
  policy, tokens = _tokens(GOLDEN[0])
  objective = objectives.make(**INTERPOLATED)
  without = dataclasses.replace(tokens, old_logprobs=None)
  got, expected = (_evaluated(objective, policy, each) for each in (tokens, without))
  assert got[0] == expected[0]
  np.testing.assert_array_equal(got[2], expected[2])


@pytest.mark.parametrize("name", ["ages", "behavior_logprobs"])
def test_a_missing_input_is_named(name):
  policy, tokens = _tokens(GOLDEN[0])
  with pytest.raises(ValueError, match=f"old_logprobs='interpolated' needs .*{name}"):
    _evaluated(
      objectives.make(kl_coef=0.0, old_logprobs="interpolated"),
      policy,
      dataclasses.replace(tokens, **{name: None}),
    )


@pytest.mark.parametrize(
  "options, message",
  [
    ({"force_on_policy_ratio": True}, "set one of the two"),
    ({"use_behavior_logprobs": True}, "set one of the two"),
    ({"kl_in_reward": True, "kl_coef": 0.1}, "kl_in_reward needs old logprobs before the update"),
    ({"seq_logprob_error_threshold": 2.0}, "needs old_logprobs='scored'"),
    ({"loss": "reinforce"}, "old_logprobs='interpolated' would never be read"),
    ({"loss": lambda policy_logprobs, advantages: -advantages * policy_logprobs}, "never be read"),
  ],
)
def test_options_that_interpolation_excludes_are_refused_with_the_reason(options, message):
  with pytest.raises(ValueError, match=message):
    objectives.make(**({"kl_coef": 0.0, "old_logprobs": "interpolated"} | options))


@pytest.mark.parametrize(
  "options",
  [
    {"importance_correction": "token"},
    {"kl_weight": "old", "kl_coef": 0.1},
    {"distillation": distillation.Distillation(coef=1.0)},
  ],
)
def test_what_reads_old_logprobs_may_have_them_interpolated(options):
  loss = {"loss": "reinforce", "kl_coef": 0.0, "old_logprobs": "interpolated"}
  assert objectives.make(**(loss | options)).needs_ages


@pytest.mark.parametrize("given, meant", [("recompute", "scored"), ("loglinear", "interpolated")])
def test_names_of_areal_are_recognised(given, meant):
  with pytest.raises(ValueError, match=f"here it is '{meant}'"):
    objectives.make(old_logprobs=given)


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_junk_under_the_mask_changes_nothing(junk):
  policy, tokens = _tokens(GOLDEN[1])
  objective = objectives.make(**INTERPOLATED, loss="gmpo", aggregation="sequence_mean")
  filled = lambda x: masks.fill(x, tokens.mask, junk)
  spoilt = dataclasses.replace(
    tokens,
    behavior_logprobs=filled(tokens.behavior_logprobs),
    ages=jnp.where(tokens.mask, tokens.ages, 1 << 30),
  )
  got = _evaluated(objective, filled(policy), spoilt)
  expected = _evaluated(objective, policy, tokens)
  assert got[0] == expected[0]
  for (name, value), wanted in zip(got[1].items(), expected[1].values(), strict=True):
    np.testing.assert_array_equal(value, wanted, err_msg=name)
  np.testing.assert_array_equal(got[2], np.where(tokens.mask, expected[2], 0))


def test_ages_by_hand():
  versions = np.asarray([-1, 0, 3, 5], np.int32)
  np.testing.assert_array_equal(staleness.ages(versions, 5), [-1, 5, 2, 0])
  assert staleness.ages(versions[:0], 5).shape == (0,)
  with pytest.raises(ValueError, match="of step 4 .* at most version 4, got version 5"):
    staleness.ages(versions, 4)


def test_ranges_hold_every_known_age_once():
  held = lambda age: [r.name for r in staleness.RANGES if r.first <= age <= r.last]
  assert all(len(held(age)) == 1 for age in itertools.chain(range(40), [10**9]))
  assert held(staleness.UNKNOWN) == []
  assert [held(age)[0] for age in (0, 1, 3, 4, 8)] == ["0", "1", "2_3", "4_7", "8_plus"]
