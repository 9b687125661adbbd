"""A teacher's advantages: by hand, against NeMo RL's numbers, and against the exact gradient."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.rl import distillation, objectives
from grpo_jax.rl.aggregate import local_denominators
from grpo_jax.rl.distillation import Distillation
from grpo_jax.types import LossTokens

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "nemo_rl_opd.json"
MASK = jnp.asarray([[True, True, True, False]])
TEACHER = jnp.asarray([[-1.0, -5.0, -0.5, jnp.nan]])
OLD = jnp.asarray([[-2.0, -1.0, -0.5, jnp.nan]])
REWARDED = jnp.asarray([[3.0, 3.0, 3.0, jnp.nan]])


def tokens(teacher, **fields):
  if teacher is not None:
    fields = {"mask": jnp.ones(teacher.shape, bool), "advantages": 0 * teacher, **fields}
  return LossTokens(sequence_ids=None, teacher_logprobs=teacher, **fields)


def loss_of(objective, teacher, **fields):
  """Returns the loss as a function of the policy's logprobs."""
  given = tokens(teacher, **fields)

  def loss(policy):
    return objective(policy, None, given, local_denominators(given.mask))

  return loss


def test_advantages_by_hand():
  taught = distillation.token_advantages(TEACHER, OLD, MASK)
  np.testing.assert_array_equal(taught, [[1.0, -4.0, 0.0, 0.0]])
  bounded = distillation.token_advantages(TEACHER, OLD, MASK, clamp=1.5)
  np.testing.assert_array_equal(bounded, [[1.0, -1.5, 0.0, 0.0]])
  both = Distillation(coef=2.0, reward_coef=0.5, clamp=1.5)
  mixed = distillation.mixed(REWARDED, TEACHER, OLD, MASK, both)
  np.testing.assert_array_equal(mixed, [[3.5, -1.5, 1.5, 0.0]])


def test_metrics_by_hand():
  found = distillation.metrics(TEACHER, OLD, MASK, Distillation(clamp=1.5))
  assert found["teacher/kl"].value() == pytest.approx((-1.0 + 4.0 + 0.0) / 3)
  assert found["teacher/clamped_share"].value() == pytest.approx(1 / 3)
  assert "teacher/clamped_share" not in distillation.metrics(TEACHER, OLD, MASK, Distillation())


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text())["cases"], ids=lambda x: x["name"])
def test_agrees_with_nemo_rl(case):
  teacher, old = jnp.asarray(case["teacher"]), jnp.asarray(case["prev"])
  mask = jnp.asarray(case["mask"], bool)
  found = distillation.mixed(jnp.ones_like(old), teacher, old, mask, Distillation())
  np.testing.assert_allclose(found, case["advantages"], rtol=2e-6, atol=1e-6)
  gap = distillation.metrics(teacher, old, mask, Distillation())["teacher/kl"]
  assert gap.value() == pytest.approx(-case["gap_mean"], rel=1e-5)


@pytest.mark.parametrize("loss", ["reinforce", "clipped", "cispo"])
def test_the_mean_gradient_is_that_of_the_reverse_kl(loss):
  """Over all tokens of a vocabulary, each weighted by the probability of sampling it."""
  rng = np.random.default_rng(0)
  logits, teacher = rng.normal(size=(2, 7))
  teacher = jax.nn.log_softmax(jnp.asarray(teacher))
  objective = objectives.make(loss=loss, kl_coef=0.0, distillation=Distillation())

  def reverse_kl(logits):
    policy = jax.nn.log_softmax(logits)
    return (jnp.exp(policy) * (policy - teacher)).sum()

  def sampled(logits, token):
    logprob = jax.nn.log_softmax(logits)[token]
    return loss_of(objective, teacher[token].reshape(1, 1))(logprob.reshape(1, 1))[0]

  logits = jnp.asarray(logits)
  probabilities = jax.nn.softmax(logits)
  gradient = jax.jit(jax.grad(sampled))
  gradients = np.stack([gradient(logits, token) for token in range(7)])
  expected = jax.jit(jax.grad(reverse_kl))(logits)
  np.testing.assert_allclose(probabilities @ gradients, expected, rtol=1e-4, atol=1e-6)


def test_a_teacher_that_equals_the_policy_teaches_nothing():
  policy = jnp.asarray([[-1.0, -2.5, -0.1]])
  objective = objectives.make(kl_coef=0.0, distillation=Distillation())
  compute = jax.jit(jax.value_and_grad(loss_of(objective, policy), has_aux=True))
  (loss, metrics), gradient = compute(policy)
  assert float(loss) == 0 and not np.asarray(gradient).any()
  assert metrics["teacher/kl"].value() == 0


@pytest.mark.long
def test_later_updates_compare_with_the_policy_that_sampled():
  """The advantage is that of π_old, and only the ratio is the live policy's."""
  policy, old, teacher = (jnp.full((1, 1), x) for x in (-0.9, -1.0, -0.5))
  objective = objectives.make(loss="reinforce", kl_coef=0.0, distillation=Distillation())
  assert objective.needs_old
  loss, metrics = loss_of(objective, teacher, old_logprobs=old)(policy)
  assert float(loss) == pytest.approx(-0.5 * -0.9)
  assert metrics["teacher/kl"].value() == pytest.approx(-0.5)


def test_rewards_are_not_read_unless_asked_for():
  policy, teacher = jnp.full((1, 2), -1.0), jnp.full((1, 2), -1.0)
  both = objectives.make(kl_coef=0.0, distillation=Distillation(reward_coef=1.0))
  alone = objectives.make(kl_coef=0.0, distillation=Distillation())
  rewarded = jnp.asarray([[2.0, 2.0]])

  def gradient(objective):
    loss = loss_of(objective, teacher, advantages=rewarded)
    return jax.jit(jax.grad(lambda x: loss(x)[0]))(policy)

  np.testing.assert_allclose(gradient(both), [[-1.0, -1.0]])
  assert not np.asarray(gradient(alone)).any()


def test_what_is_missing_or_wrong_is_named():
  objective = objectives.make(kl_coef=0.0, distillation=Distillation())
  with pytest.raises(ValueError, match="distillation needs teacher_logprobs"):
    loss_of(objective, None, mask=MASK, advantages=REWARDED)(OLD)
  with pytest.raises(
    ValueError, match=r"^teacher: coef must be a finite number > 0, got 0.0; clamp"
  ):
    Distillation(coef=0.0, clamp=-1.0)


def test_a_policy_that_samples_comes_to_equal_its_teacher():
  rng = np.random.default_rng(0)
  teacher = jax.nn.log_softmax(jnp.asarray(rng.normal(size=7) * 2))
  objective = objectives.make(loss="reinforce", kl_coef=0.0, distillation=Distillation(clamp=5.0))

  @jax.jit
  def gradient(logits, sampled):
    def loss(logits):
      policy = jax.nn.log_softmax(logits)[sampled]
      return loss_of(objective, teacher[sampled])(policy)[0]

    return jax.grad(loss)(logits)

  def distance(logits):
    policy = jax.nn.log_softmax(logits)
    return float((jnp.exp(policy) * (policy - teacher)).sum())

  logits = jnp.zeros(7)
  before = distance(logits)
  for _ in range(60):
    weights = np.exp(np.asarray(logits, np.float64))
    sampled = rng.choice(7, size=(1, 256), p=weights / weights.sum())
    logits = logits - 1.0 * gradient(logits, sampled)
  assert before > 0.5 and distance(logits) < 0.02 * before
