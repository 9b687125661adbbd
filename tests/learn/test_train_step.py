"""The update: several optimizer steps, skipped steps, what it reports and refuses.

A linear "model" stands in for the transformer: logprobs of a batch are those of
a softmax over one table, so that gradients can be worked out by hand.
"""

import dataclasses
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import batching
from grpo_jax.batching import packing
from grpo_jax.compilation import programs
from grpo_jax.learn import optim, scoring, train_step
from grpo_jax.rl import objectives
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup

V = 7


def logprobs(params, batch, with_entropy):
  """Returns log softmax(params["w"]) of the tokens learned from, whatever came before them."""
  table = jax.nn.log_softmax(params["w"])
  is_real = batch.loss_places >= 0
  tokens = jnp.take_along_axis(batch.tokens, jnp.maximum(batch.loss_places, 0), axis=-1)
  entropy = jnp.broadcast_to(-jnp.sum(jnp.exp(table) * table), tokens.shape)
  return jnp.where(is_real, table[tokens], 0), (entropy if with_entropy else None)


def groups(*completions):
  """Returns groups of two completions each, given as token lists."""
  made = []
  for i, pair in enumerate(completions):
    rollouts = tuple(
      Rollout(
        completion_ids=np.asarray(ids),
        loss_mask=np.ones(len(ids), bool),
        behavior_logprobs=np.full(len(ids), -np.log(V), np.float32),
        weight_versions=np.zeros(len(ids), np.int32),
        finish_reason=FinishReason.STOP,
        reward=float(r),
      )
      for r, ids in enumerate(pair)
    )
    made.append(RolloutGroup(Prompt(str(i), np.asarray([0, 1]), "none"), rollouts))
  return made


def assembled(made, *, advantages=(-1.0, 1.0), shape=None, **options):
  values = [np.asarray(advantages, np.float32) for _ in made]
  return batching.assemble(
    made,
    values,
    shapes=(shape or packing.Shape(8, 32, 32),),
    **({"skip_zero_advantage": False} | options),
  ).minibatches


def trainer(*, epochs=1, optimizer="sgd", rate=0.1, loss=None, **options):
  tx, schedule = optim.make(
    10,
    optimizer=optimizer,
    learning_rate=rate,
    max_grad_norm=None,
    schedule="linear",
    weight_decay=0.0,
  )
  objective = objectives.make(**({"kl_coef": 0.0} | (loss or {})))
  update = train_step.make_update(
    logprobs,
    tx,
    objective,
    epochs=epochs,
    schedule=schedule,
    **({"report_entropy": False} | options),
  )
  state = train_step.init({"w": jnp.zeros(V)}, tx)
  return update, state


def values(metrics):
  return {name: metric.value() for name, metric in metrics.items()}


def test_one_step_is_the_closed_form():
  # On policy the loss is -Σ A log π / n; with w = 0, ∂log π(t)/∂w = onehot(t) - 1/V.
  # Tokens 2 3 have A = -1, token 4 has A = 1, n = 3.
  update, state = trainer()
  state, metrics, _ = update(state, assembled(groups([[2, 3], [4]])))
  onehot = np.eye(V)
  gradient = -(-(onehot[2] - 1 / V) - (onehot[3] - 1 / V) + (onehot[4] - 1 / V)) / 3
  np.testing.assert_allclose(state.params["w"], -0.1 * gradient, atol=1e-7)
  got = values(metrics)
  assert got["train/grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
  assert got["train/loss"] == pytest.approx(1 / 3, rel=1e-5)  # -(−1 −1 + 1) / 3 at ratio 1.
  assert got["train/skipped_share"] == 0.0
  assert got["train/learning_rate"] == pytest.approx(0.1)
  assert int(state.step) == 1


@pytest.mark.long
def test_epochs_and_minibatches_use_old_logprobs_scored_once():
  # Two groups are two minibatches, two epochs are four optimizer steps. The oracle
  # keeps log π_old fixed at the uniform policy: with a ratio, and clipped.
  made = groups([[2, 3], [4]], [[4, 4], [5]])
  update, state = trainer(epochs=2, rate=2.0)
  minibatches = assembled(made, minibatches=2)
  assert len(minibatches) == 2
  score = scoring.make_scorer(logprobs)
  minibatches = scoring.with_logprobs(minibatches, score, old_params=state.params)
  state, metrics, _ = update(state, minibatches)

  def loss(w, group, old):
    table, total, n = jax.nn.log_softmax(w), 0.0, 0
    for advantage, r in zip((-1.0, 1.0), group.rollouts, strict=True):
      own = table[r.completion_ids]
      ratio = jnp.exp(own - (jax.lax.stop_gradient(own) if old is None else old))
      clipped = jnp.clip(ratio, 0.8, 1.2)
      total -= jnp.minimum(ratio * advantage, clipped * advantage).sum()
      n += len(r.completion_ids)
    return total / n

  def by_hand(scored_once):
    w, losses = jnp.zeros(V), []
    for count in range(4):
      old = -np.log(V) if scored_once else None
      value, gradient = jax.value_and_grad(loss)(w, made[count % 2], old)
      losses.append(value)
      w = w - 2.0 * (1 - count / 10) * gradient
    return w, np.mean(losses)

  expected, mean_loss = by_hand(scored_once=True)
  np.testing.assert_allclose(state.params["w"], expected, atol=1e-5)
  assert np.abs(by_hand(scored_once=False)[0] - expected).max() > 0.1  # the test can tell.
  got = values(metrics)
  assert got["train/loss"] == pytest.approx(float(mean_loss), abs=1e-5)
  assert got["train/learning_rate"] == pytest.approx(2.0 * (1 - 1.5 / 10))
  assert int(state.step) == 1


@pytest.mark.long
def test_update_returns_the_logprobs_of_the_first_epoch():
  minibatches = assembled(groups([[2, 3], [4]], [[4, 4], [5]]), minibatches=2)
  update, state = trainer(epochs=2, rate=2.0, loss={"loss": "reinforce"})
  after_one, fresh = trainer(rate=2.0, loss={"loss": "reinforce"})
  _, _, seen = update(state, minibatches)
  np.testing.assert_allclose(seen[0][0][0, :3], -np.log(V), rtol=1e-6)
  fresh, *_ = after_one(fresh, minibatches[:1])
  second = scoring.make_scorer(logprobs)(fresh.params, minibatches[1].microbatches[0])
  np.testing.assert_allclose(seen[1][0], second, rtol=1e-6)
  assert [len(of_minibatch) for of_minibatch in seen] == [1, 1]


def test_several_optimizer_steps_refuse_to_go_without_old_logprobs():
  minibatches = assembled(groups([[2, 3], [4]], [[4, 4], [5]]), minibatches=2)
  update, state = trainer()
  with pytest.raises(ValueError, match="2 optimizer steps on one batch need old_logprobs"):
    update(state, minibatches)
  update, state = trainer(epochs=3)
  with pytest.raises(ValueError, match="3 optimizer steps"):
    update(state, minibatches[:1])
  update, state = trainer(epochs=3, loss={"loss": "reinforce"})
  update(state, minibatches[:1])  # has no ratio, needs none.


def test_no_minibatch_is_refused():
  update, state = trainer()
  with pytest.raises(ValueError, match="nothing to learn from"):
    update(state, ())


def broken(minibatches):
  """Returns the minibatches with an advantage that makes loss and gradients NaN."""
  first, *rest = minibatches
  batch = first.microbatches[0]
  bad = dataclasses.replace(batch, advantages=jnp.full_like(batch.advantages, jnp.nan))
  return [dataclasses.replace(first, microbatches=(bad, *first.microbatches[1:])), *rest]


def test_step_with_non_finite_gradients_changes_nothing_and_is_counted():
  update, state = trainer(optimizer="adamw")
  good = assembled(groups([[2, 3], [4]]))
  state, *_ = update(state, good)
  before = jax.device_get((state.params, state.opt_state))
  state, metrics, _ = update(state, broken(good))
  after = jax.device_get((state.params, state.opt_state))
  jax.tree.map(np.testing.assert_array_equal, after, before)
  assert int(state.step) == 2
  got = values(metrics)
  assert got["train/skipped_share"] == 1.0
  assert np.isnan(got["train/loss"])  # nothing was counted.
  state, metrics, _ = update(state, good)
  assert values(metrics)["train/skipped_share"] == 0.0
  assert int(optim.steps_done(state.opt_state)) == 2


@pytest.mark.long
def test_one_bad_minibatch_of_two_is_skipped_alone():
  minibatches = assembled(groups([[2, 3], [4]], [[4, 4], [5]]), minibatches=2)
  score = scoring.make_scorer(logprobs)
  update, state = trainer()
  minibatches = scoring.with_logprobs(minibatches, score, old_params=state.params)
  state, metrics, _ = update(state, broken(minibatches))
  assert values(metrics)["train/skipped_share"] == 0.5
  alone, fresh = trainer()
  fresh, *_ = alone(fresh, minibatches[1:])
  np.testing.assert_array_equal(state.params["w"], fresh.params["w"])


def test_skipped_steps_in_a_row_stop_the_run():
  skipped, done = {"train/skipped_share": 1.0}, {"train/skipped_share": 0.5}
  count = train_step.skipped_in_a_row(0, skipped, limit=3)
  count = train_step.skipped_in_a_row(count, skipped, limit=3)
  assert count == 2
  assert train_step.skipped_in_a_row(count, done, limit=3) == 0
  with pytest.raises(train_step.NonFiniteGradients, match="3 training steps in a row"):
    train_step.skipped_in_a_row(count, skipped, limit=3)


def test_state_is_donated():
  update, state = trainer(optimizer="adamw")
  old = state.params["w"]
  update(state, assembled(groups([[2, 3], [4]])))
  assert old.is_deleted()


def test_only_the_sum_of_gradients_lies_in_memory_while_others_are_computed(monkeypatch):
  update, state = trainer(epochs=2)
  made, alive, call = [], [], programs.Program.__call__

  def watched(program, *arguments):
    found = call(program, *arguments)
    if program is update.apply:
      return found
    alive.append(sum(x() is not None and not x().is_deleted() for x in made))
    made.append(weakref.ref(jax.tree.leaves(found)[0]))  # of the gradients.
    return found

  minibatches = assembled(groups(*[[[2, 3], [4]]] * 3), shape=packing.Shape(1, 8, 8))
  score = scoring.make_scorer(logprobs)
  minibatches = scoring.with_logprobs(minibatches, score, old_params=state.params)
  monkeypatch.setattr(programs.Program, "__call__", watched)
  update(state, minibatches)
  # Beside the new one, when they start and for each of three microbatches.
  assert alive == [0, 0, 0, 0] * 2


def test_one_more_microbatch_compiles_nothing_again():
  update, state = trainer()
  pairs = [[[2, 3], [4]]] * 6
  many = {"shape": packing.Shape(1, 8, 8)}
  state, *_ = update(state, assembled(groups(*pairs[:3]), **many))
  compiled = (
    update.differentiate.jitted._cache_size(),
    update.start.jitted._cache_size(),
    update.apply.jitted._cache_size(),
  )
  state, *_ = update(state, assembled(groups(*pairs), **many))
  assert compiled == (1, 1, 1)  # differentiate, start, apply.
  assert compiled == (
    update.differentiate.jitted._cache_size(),
    update.start.jitted._cache_size(),
    update.apply.jitted._cache_size(),
  )


@pytest.mark.long
def test_metrics_of_microbatches_are_those_of_the_whole():
  made = groups([[2, 3], [4]], [[4, 4, 1], [5]])
  whole, parts = trainer(report_entropy=True), trainer(report_entropy=True)
  _, one, _ = whole[0](whole[1], assembled(made))
  _, two, _ = parts[0](parts[1], assembled(made, shape=packing.Shape(1, 8, 8)))
  one, two = values(one), values(two)
  assert "train/entropy" in one
  assert one.keys() == two.keys()
  for name, value in one.items():
    np.testing.assert_allclose(two[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_entropy_is_reported_only_if_asked_for():
  update, state = trainer()
  assert "train/entropy" not in update(state, assembled(groups([[2, 3], [4]])))[1]


def test_scorer_gives_the_logprobs_of_the_given_parameters():
  minibatches = assembled(groups([[2, 3], [4]]))
  score = scoring.make_scorer(logprobs)
  reference = {"w": jnp.arange(V, dtype=jnp.float32)}
  scored = scoring.with_logprobs(minibatches, score, ref_params=reference)
  batch = scored[0].microbatches[0]
  assert batch.old_logprobs is None
  table = jax.nn.log_softmax(reference["w"])
  np.testing.assert_allclose(batch.ref_logprobs[0, :3], table[np.asarray([2, 3, 4])], rtol=1e-6)
