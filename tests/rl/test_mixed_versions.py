"""Completions whose tokens were sampled by several versions of the weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.rl import diagnostics, importance, objective_options, objectives, policy_terms
from grpo_jax.types import Denominators, LossTokens

V = 5  # actions.


def _tables(steps=3, places=6, seed=0):
  """Returns log π of every version: [version, place, action]."""
  rng = np.random.default_rng(seed)
  moves = np.cumsum(0.4 * rng.normal(size=(steps + 1, places, V)), axis=0)
  return np.asarray(jax.nn.log_softmax(jnp.asarray(moves, jnp.float32)))


def test_each_token_is_weighed_by_the_policy_of_its_own_version():
  """L = -1/N Σ w min(ρÂ, clip(ρ)Â) with w = π_old/μ and μ of version v(t); by hand."""
  tables = _tables()
  actions, versions = np.asarray([0, 3, 1, 4, 2, 2]), np.asarray([0, 0, 1, 1, 2, 3])
  places = np.arange(6)
  old = tables[3]
  rng = np.random.default_rng(5)
  policy = old[places, actions] + np.asarray([0.1, -0.3, 0.3, -0.05, 0.0, 0.4], np.float32)
  behavior = tables[versions, places, actions]
  advantages = rng.normal(size=6).astype(np.float32)
  row = lambda x: jnp.asarray(x[None])
  tokens = LossTokens(
    mask=jnp.ones((1, 6), bool),
    sequence_ids=None,
    advantages=row(advantages),
    behavior_logprobs=row(behavior),
    old_logprobs=row(old[places, actions]),
  )
  objective = objectives.make(kl_coef=0.0, importance_correction="token")
  share = lambda p: objective(p, None, tokens, Denominators(6.0, 1.0))[0]
  loss, gradient = jax.jit(jax.value_and_grad(share))(row(policy))
  w = np.exp(old[places, actions]) / np.exp(behavior)
  ratio = np.exp(policy - old[places, actions])
  surrogate = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
  is_clipped = surrogate != ratio * advantages
  assert 0 < is_clipped.sum() < 6 and w[5] == pytest.approx(1) and np.abs(w[:5] - 1).min() > 0.01
  np.testing.assert_allclose(loss, -(w * surrogate).mean(), rtol=1e-5)
  expected = -w * ratio * advantages * ~is_clipped / 6
  np.testing.assert_allclose(gradient[0], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("correction", ["token", "none"])
@pytest.mark.long
def test_the_correction_makes_the_gradient_of_mixed_versions_that_of_the_old_policy(correction):
  """Expected over all actions of every place, each place under the version that sampled it."""
  tables = _tables()
  versions = np.asarray([0, 0, 1, 1, 2, 3])
  old, behavior = tables[3], tables[versions, np.arange(6)]  # [place, action].
  rewards = np.random.default_rng(1).normal(size=(6, V)).astype(np.float32)
  objective = objectives.make(kl_coef=0.0, importance_correction=correction)

  def expected_gradient(sampled_from):
    """One completion per action; each place weighs its action by the probability of it."""
    chances = np.exp(sampled_from).T  # [action, place].

    def share(theta):
      policy = jax.nn.log_softmax(theta).T
      tokens = LossTokens(
        mask=jnp.ones((V, 6), bool),
        sequence_ids=None,
        advantages=jnp.asarray(rewards.T * chances),
        behavior_logprobs=jnp.asarray(sampled_from.T),
        old_logprobs=jnp.asarray(old.T),
      )
      return objective(policy, None, tokens, Denominators(6.0, 1.0))[0]

    return np.asarray(jax.grad(share)(jnp.asarray(old)))

  wanted, got = expected_gradient(old), expected_gradient(behavior)
  assert np.abs(wanted).max() > 0.01
  difference = np.abs(got - wanted).max()
  assert difference < 1e-6 if correction == "token" else difference > 1e-3


def _tokens(seed=0, shape=(3, 10)):
  rng = np.random.default_rng(seed)
  near = lambda x: jnp.asarray(np.minimum(x + 0.3 * rng.normal(size=shape), -1e-3), jnp.float32)
  policy = -rng.exponential(size=shape)
  tokens = LossTokens(
    mask=jnp.asarray(rng.random(shape) < 0.8),
    sequence_ids=jnp.asarray(np.sort(rng.integers(0, 3, shape), axis=1), jnp.int32),
    advantages=jnp.asarray(rng.normal(size=shape), jnp.float32),
    behavior_logprobs=near(policy),
    old_logprobs=near(policy),
    ref_logprobs=near(policy),
    selected=jnp.asarray(rng.random(shape) < 0.4),
  )
  marks = (tokens.old_logprobs, tokens.behavior_logprobs, tokens.mask, tokens.sequence_ids)
  kept = importance.seq_logprob_error_mask(*marks, threshold=1.4)
  return near(policy), dataclasses.replace(tokens, kept=kept)


CORRECTIONS = {
  **{level: {"importance_correction": level} for level in importance.LEVELS},
  "tis": {
    **{"importance_correction": "token", "importance_truncation": "tis"},
    "importance_high": 1.2,
  },
  "icepop": {
    **{"importance_correction": "token", "importance_truncation": "icepop"},
    **{"importance_low": 0.8, "importance_high": 1.2},
  },
  "seq_mask": {
    **{"importance_correction": "token", "importance_truncation": "seq_mask"},
    **{"importance_low": 0.9, "importance_high": 1.1},
  },
  "opsm": {"off_policy_mask_threshold": 0.05},
  "error": {"seq_logprob_error_threshold": 1.4},
  "behavior": {"use_behavior_logprobs": True},
  "kl": {"kl_coef": 0.1, "use_on_policy_kl_approximation": True},
}
EVERY = [
  *({"loss": loss, "importance_correction": "token"} for loss in policy_terms.POLICY_LOSSES),
  *CORRECTIONS.values(),
]


def _ages(seed, like):
  """Ages that fall along each row, as in completions that take new weights under way."""
  ages = np.random.default_rng(seed).integers(-1, 10, like.shape)
  return jnp.asarray(-np.sort(-ages, axis=1), jnp.int32)


def _evaluated(objective, policy, tokens, compiled=lambda function: function):
  share = lambda p: objective(p, None, tokens, Denominators(20.0, 6.0))
  (loss, metrics), gradient = compiled(jax.value_and_grad(share, has_aux=True))(policy)
  return loss, gradient, {name: metric.value() for name, metric in metrics.items()}


@pytest.mark.long
@pytest.mark.parametrize("options", EVERY, ids=lambda o: "-".join(map(str, o.values())))
def test_versions_enter_through_the_logprobs_of_the_engine_alone(options):
  """Bit for bit the same with the ages of tokens, with others, and without."""
  policy, tokens = _tokens()
  objective = objectives.make(**({"kl_coef": 0.0} | options))
  assert options.get("loss", "clipped") in objective_options.LOSSES
  expected = _evaluated(objective, policy, tokens)
  assert np.abs(expected[1]).max() > 0 and not any(n.startswith("staleness/") for n in expected[2])
  for seed in (0, 1):
    aged = dataclasses.replace(tokens, ages=_ages(seed, tokens.mask))
    got = _evaluated(objective, policy, aged)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])
    for name, value in expected[2].items():
      np.testing.assert_array_equal(got[2][name], value, err_msg=name)
    assert {name.partition("/")[0] for name in got[2].keys() - expected[2].keys()} == {"staleness"}


INTERPOLATING = [
  options
  for options in EVERY
  if not {"seq_logprob_error_threshold", "use_behavior_logprobs"} & options.keys()
]


@pytest.mark.long
@pytest.mark.parametrize("options", INTERPOLATING, ids=lambda o: "-".join(map(str, o.values())))
def test_interpolated_old_logprobs_equal_the_same_numbers_scored(options):
  """Every loss and correction: ages matter only through what is interpolated from them."""
  policy, tokens = _tokens()
  ages = np.asarray(_ages(0, tokens.mask))
  known = np.maximum(ages, 0)
  share = (known / (known + 1)).astype(np.float32)
  behavior = tokens.behavior_logprobs
  by_hand = dataclasses.replace(tokens, old_logprobs=behavior + share * (policy - behavior))
  expected = _evaluated(objectives.make(**({"kl_coef": 0.0} | options)), policy, by_hand)
  aged = dataclasses.replace(tokens, old_logprobs=None, ages=jnp.asarray(ages))
  made = objectives.make(**({"kl_coef": 0.0, "old_logprobs": "interpolated"} | options))
  got = _evaluated(made, policy, aged)
  np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(got[1], expected[1], rtol=1e-5, atol=1e-6)
  other = _evaluated(made, policy, dataclasses.replace(aged, ages=_ages(1, tokens.mask)))
  assert abs(other[2]["train/ratio_mean"] - got[2]["train/ratio_mean"]) > 1e-4


@pytest.mark.long
def test_metrics_by_age_are_those_worked_by_hand():
  """Ages 0 0 1 | 2 3 -1, and a masked token of age 1; w = 1/2, 2, 4/5, 1/4, 3/4, 5."""
  weights = np.asarray([[0.5, 2.0, 0.8, 9.0], [0.25, 0.75, 5.0, 9.0]], np.float32)
  old = jnp.asarray(np.log(weights * 0.1))
  tokens = LossTokens(
    mask=jnp.asarray([[True, True, True, False]] * 2),
    sequence_ids=None,
    advantages=jnp.ones((2, 4)),
    behavior_logprobs=jnp.full((2, 4), np.log(0.1), jnp.float32),
    old_logprobs=old,
    ages=jnp.asarray([[0, 0, 1, 1], [2, 3, -1, 1]]),
  )
  # A truncation changes the weights of the loss, not these.
  options = {"importance_truncation": "tis", "importance_high": 1.0}
  objective = objectives.make(kl_coef=0.0, importance_correction="token", **options)
  found = _evaluated(objective, old, tokens, compiled=jax.jit)[2]
  given = (old, tokens.behavior_logprobs, tokens.ages, tokens.mask)
  alone = jax.jit(diagnostics.by_staleness)(*given)
  expected = {
    "0": (2 / 6, 1.25, 2.5**2 / (2 * 4.25)),
    "1": (1 / 6, 0.8, 1.0),
    "2_3": (2 / 6, 0.5, 1.0 / (2 * 0.625)),
    "4_7": (0, np.nan, np.nan),
    "8_plus": (0, np.nan, np.nan),
  }
  for ages, values in expected.items():
    got = [found[f"staleness/{ages}/{name}"] for name in ("share", "ratio", "ess")]
    np.testing.assert_allclose(got, values, rtol=1e-5, err_msg=ages)
    got = [alone[f"staleness/{ages}/{name}"].value() for name in ("share", "ratio", "ess")]
    np.testing.assert_allclose(got, values, rtol=1e-5, err_msg=ages)
  assert len([name for name in found if name.startswith("staleness/")]) == 15
