"""A policy in two parts: a trained difference on a frozen base, through the real update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import batching
from grpo_jax.batching import packing
from grpo_jax.learn import optim, policy, scoring, train_step
from grpo_jax.rl import objectives
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup

V, RANK = 7, 2
BASE = {"w": jnp.linspace(-1.0, 1.0, V), "other": jnp.ones(3)}
# Full weights are w + 2 a·b; only b [RANK] is trained.
A = jnp.asarray(np.random.default_rng(0).normal(size=(V, RANK)), jnp.float32)
DIFFERENCE = policy.Composition(
  split=lambda full, own: (own or {"b": jnp.zeros(RANK)}, {"base": full, "a": A}),
  described=lambda full: pytest.fail("nothing is compiled ahead here"),
  full=lambda own, frozen: {
    **frozen["base"],
    "w": frozen["base"]["w"] + 2 * frozen["a"] @ own["b"],
  },
  base=lambda frozen: frozen["base"],
)


def logprobs(params, batch, with_entropy):
  """Returns log softmax(params["w"]) of the tokens learned from, whatever came before them."""
  tokens = jnp.take_along_axis(batch.tokens, jnp.maximum(batch.loss_places, 0), axis=-1)
  found = jnp.where(batch.loss_places >= 0, jax.nn.log_softmax(params["w"])[tokens], 0)
  return found, (jnp.zeros_like(found) if with_entropy else None)


def minibatches():
  rollouts = tuple(
    Rollout(
      completion_ids=np.asarray(ids),
      loss_mask=np.ones(len(ids), bool),
      behavior_logprobs=np.full(len(ids), -np.log(V), np.float32),
      weight_versions=np.zeros(len(ids), np.int32),
      finish_reason=FinishReason.STOP,
      reward=0.0,
    )
    for ids in ([2, 3], [4])
  )
  group = RolloutGroup(Prompt("0", np.asarray([0, 1]), "none"), rollouts)
  shapes, advantages = (packing.Shape(8, 32, 32),), [np.asarray([-1.0, 1.0], np.float32)]
  return batching.assemble(
    [group], advantages, shapes=shapes, skip_zero_advantage=False
  ).minibatches


def begun(composition, **loss):
  """Returns an update by gradient descent at rate 0.1, a state, and the policy around it."""
  trainable, around = policy.begin(
    {name: jnp.copy(array) for name, array in BASE.items()},
    composition,
    copy=lambda full: jax.tree.map(jnp.copy, full),
  )
  tx, _ = optim.make(10, optimizer="sgd", learning_rate=0.1, max_grad_norm=None, weight_decay=0.0)
  objective = objectives.make(**{"kl_coef": 0.0, **loss})
  update = train_step.make_update(logprobs, tx, objective, report_entropy=False)
  return update, train_step.init(trainable, tx), around


@pytest.mark.long
def test_gradients_are_those_of_what_is_trained():
  whole, state, around = begun(None)
  (of_full, _), *_ = whole.gradients(around.weights(state.params), minibatches()[0])
  update, state, around = begun(DIFFERENCE)
  (found, loss), *_ = update.gradients(around.weights(state.params), minibatches()[0])
  assert set(found) == {"b"}, "nothing else has a gradient, and none is in memory"
  expected = 2 * A.T @ of_full["w"]
  np.testing.assert_allclose(found["b"], expected, rtol=1e-5)
  twice, _ = update.differentiate(
    around.weights(state.params),
    (found, loss),
    minibatches()[0].microbatches[0],
    minibatches()[0].denominators,
  )
  np.testing.assert_allclose(twice[0]["b"], 2 * expected, rtol=1e-5)


@pytest.mark.long
def test_steps_move_the_full_weights_and_leave_the_base():
  update, state, around = begun(DIFFERENCE)
  first, before = minibatches(), around.full(state.params)
  np.testing.assert_array_equal(before["w"], BASE["w"])
  for _ in range(2):  # the second step begins where the first one ended.
    (gradient, _), *_ = update.gradients(around.weights(state.params), first[0])
    expected = np.asarray(state.params["b"] - 0.1 * gradient["b"])
    state, _, seen = update(state, first, weights=around.weights)
    np.testing.assert_allclose(state.params["b"], expected, rtol=1e-6)
  assert np.abs(state.params["b"]).min() > 1e-3
  full = around.full(state.params)
  np.testing.assert_allclose(full["w"], BASE["w"] + 2 * A @ state.params["b"], rtol=1e-6)
  np.testing.assert_array_equal(full["other"], BASE["other"])
  np.testing.assert_array_equal(around.frozen["base"]["w"], BASE["w"])
  own = logprobs({"w": BASE["w"]}, first[0].microbatches[0], False)[0]
  assert np.abs(np.asarray(seen[0][0]) - np.asarray(own)).max() > 1e-2, "the update saw step one"


def test_old_logprobs_are_of_the_full_weights_and_reference_logprobs_of_the_base():
  _, _, around = begun(DIFFERENCE)
  assert around.reference["w"] is around.frozen["base"]["w"], "nothing is copied"
  trained = {"b": jnp.asarray([0.3, -0.2])}
  score, batches = scoring.make_scorer(logprobs), minibatches()
  (scored,) = scoring.with_logprobs(
    batches, score, old_params=around.weights(trained), ref_params=around.reference
  )
  batch = batches[0].microbatches[0]
  changed = {"w": BASE["w"] + 2 * A @ trained["b"]}
  (found,) = scored.microbatches
  np.testing.assert_allclose(found.old_logprobs, logprobs(changed, batch, False)[0], rtol=1e-5)
  np.testing.assert_allclose(found.ref_logprobs, logprobs(BASE, batch, False)[0], rtol=1e-5)
  _, watched = scoring.make_watcher(logprobs)(around.weights(trained), batch)
  np.testing.assert_allclose(watched.logprobs, found.old_logprobs, rtol=1e-5)


def test_without_a_composition_nothing_is_copied_but_the_reference():
  _, state, around = begun(None)
  assert around.weights(state.params) is state.params
  assert around.full(state.params) is state.params
  assert around.reference["w"] is not state.params["w"]
  np.testing.assert_array_equal(around.reference["w"], state.params["w"])
  trainable, without = policy.begin(BASE, None, copy=None)
  assert trainable is BASE and without.reference is None
