"""Weights of completions: what they contribute to every loss, and to what it is divided by."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.rl import aggregate, distillation, objective_options, objectives
from grpo_jax.types import LossTokens

# Every loss with its own reduction, every term, and each reduction, correction and mask once.
EVERY_TERM = {"kl_coef": 0.1, "entropy_coef": 0.05}
OBJECTIVES = {
  **{name: {"loss": name, **EVERY_TERM} for name in objective_options.LOSSES},
  "dppo_tv": {"loss": "dppo_tv", "dppo_kl_tau": 0.1, **EVERY_TERM},
  "constant length": {"aggregation": "constant_length", "max_completion_tokens": 5, **EVERY_TERM},
  "sequences": {
    "aggregation": "sequence_mean",
    "off_policy_mask_threshold": 0.05,
    "importance_correction": "sequence",
    "importance_truncation": "tis",
    "importance_high": 1.5,
    **EVERY_TERM,
  },
  "errors": {"seq_logprob_error_threshold": 1.3, "top_entropy_share": 0.5, **EVERY_TERM},
  "teacher": {"distillation": distillation.Distillation(coef=0.7, reward_coef=0.5), **EVERY_TERM},
}
# Three rows of up to three completions, and a copy of each row, whose mask is False as a rule.
IDS = np.tile([[0, 0, 0, 1, 1, 0], [0, 1, 1, 1, 2, 0], [0, 0, 1, 1, 1, 1]], (2, 1))
REAL = np.asarray([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 1, 1], *[[0] * 6] * 3]) > 0
COPY = np.roll(REAL, 3, axis=0)


def tokens(weights=1.0, mask=REAL):
  """Returns policy, entropy and tokens of one shape; `weights` of each completion, or of all."""
  rng = np.random.default_rng(0)
  twice = lambda values: np.tile(values, (2, 1))
  policy = -rng.exponential(size=(3, 6))
  near = lambda: jnp.asarray(twice(policy + 0.2 * rng.normal(size=(3, 6))), jnp.float32)
  advantages = np.take_along_axis(rng.normal(size=(3, 3)), IDS[:3], 1)
  made = LossTokens(
    mask=jnp.asarray(mask),
    sequence_ids=jnp.asarray(IDS, jnp.int32),
    advantages=jnp.asarray(twice(advantages), jnp.float32),
    behavior_logprobs=near(),
    old_logprobs=near(),
    ref_logprobs=near(),
    teacher_logprobs=near(),
    selected=jnp.asarray(twice(rng.random((3, 6)) < 0.4)),
    kept=jnp.asarray(mask & (IDS != 2)),
    weights=jnp.asarray(np.take_along_axis(np.broadcast_to(weights, (6, 3)), IDS, 1), jnp.float32),
  )
  entropy = jnp.asarray(twice(rng.exponential(size=(3, 6))), jnp.float32)
  return jnp.asarray(twice(policy), jnp.float32), entropy, made


def counted(objective, found):
  mask = found.mask & found.kept if objective.drops_by_error else found.mask
  return aggregate.local_denominators(mask, found.sequence_ids, found.weights)


@functools.cache
def program(objective):
  """Returns the compiled (policy, entropy, tokens, counts) → loss, metrics, gradients."""

  def share(policy, entropy, found, counts):
    return objective(policy, entropy, found, counts)

  gradients = jax.value_and_grad(share, (0, 1), has_aux=True)
  return jax.jit(gradients, compiler_options={"xla_backend_optimization_level": 0})


def evaluated(objective, policy, entropy, found, denominators=None):
  """Returns loss, gradient in the logprobs and in the entropy, and metrics."""
  counts = counted(objective, found) if denominators is None else denominators
  (loss, metrics), gradients = program(objective)(policy, entropy, found, counts)
  return [np.asarray(x, np.float64) for x in (loss, *gradients)], metrics


def close(got, expected):
  return all(np.allclose(a, b, rtol=2e-5, atol=1e-6) for a, b in zip(got, expected, strict=True))


@pytest.mark.long
def test_weights_scale_what_completions_contribute_and_what_it_is_divided_by():
  """Equal weights change nothing; 2: the completion twice; 0: without it; parts add up."""
  wrong = []
  for name, options in OBJECTIVES.items():
    objective = objectives.make(**options)
    plain, metrics = evaluated(objective, *tokens())
    assert np.abs(plain[1]).max() > 1e-3, f"{name} has no gradient: the test is blind"
    halves, of_halves = evaluated(objective, *tokens(0.5))
    wrong += [] if close(halves, plain) else [f"{name}: half of all"]
    same = [np.allclose(float(of_halves[k]), float(metrics[k]), rtol=1e-5) for k in metrics]
    wrong += [] if all(same) else [f"{name}: metrics"]

    double, _ = evaluated(objective, *tokens([[1.0, 2.0, 1.0]]))
    again, _ = evaluated(objective, *tokens(mask=REAL | (COPY & (IDS == 1))))
    again[1:] = [np.tile(x[:3] + x[3:], (2, 1)) * (np.arange(6) < 3)[:, None] for x in again[1:]]
    wrong += [] if close(double, again) else [f"{name}: twice"]

    none, _ = evaluated(objective, *tokens([[1.0, 0.0, 1.0]]))
    without, _ = evaluated(objective, *tokens(mask=REAL & (IDS != 1)))
    wrong += [] if close(none, without) else [f"{name}: zero"]

    weights = [[2.0, 0.25, 1.0], [1.5, 0.5, 3.0], [1.0, 0.75, 1.0]] * 2
    whole = tokens(weights)
    counts = counted(objective, whole[2])
    expected, of_whole = evaluated(objective, *whole, counts)
    first = np.arange(6)[:, None] < 1
    parts = [
      evaluated(objective, *tokens(weights, mask=REAL & rows), counts) for rows in (first, ~first)
    ]
    sums = [a + b for a, b in zip(parts[0][0], parts[1][0], strict=True)]
    merged = parts[0][1]["train/loss"].merge(parts[1][1]["train/loss"])
    adds_up = np.allclose(float(merged), float(of_whole["train/loss"]), rtol=1e-5)
    wrong += [] if close(sums, expected) and adds_up else [f"{name}: parts"]
  assert not wrong


@pytest.mark.long
def test_the_loss_of_weighted_completions_by_hand():
  """Two completions of 2 and 1 tokens, weights ½ and 2, ratio 1: ℓ = -Â, KL and entropy apart."""
  logprobs = jnp.asarray([[-1.0, -2.0], [-3.0, 0.0]])
  found = LossTokens(
    mask=jnp.asarray([[True, True], [True, False]]),
    sequence_ids=None,
    advantages=jnp.asarray([[1.0, 1.0], [-2.0, 9.0]]),
    ref_logprobs=logprobs - jnp.log(2.0),  # k1 of every token is log 2.
    weights=jnp.asarray([[0.5, 0.5], [2.0, 9.0]]),
  )
  entropy = jnp.asarray([[1.0, 3.0], [5.0, 9.0]])
  policy = {
    "token_mean": (0.5 * (-1 - 1) + 2 * 2) / 3,
    "sequence_mean": (0.5 * -1 + 2 * 2) / 2.5,
    "constant_length": (0.5 * (-1 - 1) + 2 * 2) / (2.5 * 4),
  }
  spread = {
    "token_mean": (0.5 * 4 + 2 * 5) / 3,
    "sequence_mean": (0.5 * 2 + 2 * 5) / 2.5,
    "constant_length": (0.5 * 4 + 2 * 5) / (2.5 * 4),
  }
  mean = {"token_mean": 1.0, "sequence_mean": 1.0, "constant_length": 3.0 / (2.5 * 4)}
  for reduction, expected in policy.items():
    length = {"max_completion_tokens": 4} if reduction == "constant_length" else {}
    options = {"kl_coef": 0.1, "kl_estimator": "k1", "kl_weight": "none", "entropy_coef": 0.2}
    objective = objectives.make(aggregation=reduction, **options, **length)
    (loss, *_), metrics = evaluated(objective, logprobs, entropy, found)
    penalty = np.log(2) * mean[reduction]
    np.testing.assert_allclose(
      loss, expected + 0.1 * penalty - 0.2 * spread[reduction], rtol=1e-6, err_msg=reduction
    )
    assert float(metrics["train/entropy"]) == 3.0  # every token once.
  bare = dataclasses.replace(found, weights=None)
  ones = dataclasses.replace(found, weights=jnp.ones_like(entropy))
  both = [evaluated(objective, logprobs, entropy, each)[0] for each in (bare, ones)]
  for got, expected in zip(*both, strict=True):
    np.testing.assert_array_equal(got, expected)
