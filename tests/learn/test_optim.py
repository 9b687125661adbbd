"""Schedules, clipping, weight decay, optimizers by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax.learn import optim
from tests.rl import own_methods

PARAMS = {
  "layers": {"q": jnp.ones((2, 3)), "q_bias": jnp.ones((2, 3)), "mlp_norm": jnp.ones((2, 3))},
  "final_norm": jnp.ones(3),
  "embed": jnp.ones((4, 3)),
}


def gradients(scale=1.0):
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) * scale), PARAMS)


def stepped(tx, grads, steps=3):
  @jax.jit
  def step(params, state):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params, state = PARAMS, tx.init(PARAMS)
  for _ in range(steps):
    params, state = step(params, state)
  return params, state


def assert_close(a, b):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), a, b)


def test_schedules_by_hand():
  make = lambda name, **kw: [
    float(optim.make_schedule(10, learning_rate=8.0, schedule=name, **kw)(i)) for i in range(12)
  ]
  # Two warm-up steps at 1/3 and 2/3 of 8, then 8 steps of fall.
  warm = [8 / 3, 16 / 3]
  np.testing.assert_allclose(make("constant", warmup_steps=2), warm + [8.0] * 10, rtol=1e-6)
  falling = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0, 0.0]
  np.testing.assert_allclose(make("linear", warmup_steps=2), warm + falling, rtol=1e-6)
  cosine = make("cosine", warmup_steps=2, final_share=0.25)
  np.testing.assert_allclose([cosine[2], cosine[6], cosine[10]], [8.0, 5.0, 2.0], rtol=1e-6)
  for name in optim.SCHEDULES:  # a run that ends within its warm-up.
    np.testing.assert_allclose(make(name, warmup_steps=15), np.arange(1, 13) / 2, rtol=1e-6)


def test_default_is_adamw_after_clipping():
  tx, _ = optim.make(10, learning_rate=0.1, max_grad_norm=0.5, weight_decay=0.3)
  oracle = optax.chain(
    optax.clip_by_global_norm(0.5), optax.adamw(0.1, weight_decay=0.3, mask=optim.decay_mask)
  )
  assert_close(stepped(tx, gradients())[0], stepped(oracle, gradients())[0])


@pytest.mark.parametrize("scale", [0.01, 10.0])
def test_clipping_scales_only_what_is_too_long(scale):
  grads = gradients(scale)
  tx = optim.clip_by_global_norm(1.0)
  clipped, _ = tx.update(grads, tx.init(PARAMS))
  norm = float(optim.global_norm(grads))
  assert_close(clipped, jax.tree.map(lambda g: g * min(1.0, 1.0 / norm), grads))


def test_global_norm_by_hand():
  assert float(optim.global_norm({"a": jnp.asarray([3.0]), "b": jnp.asarray([[0.0, 4.0]])})) == 5.0


def test_clipping_leaves_zero_gradients_zero():
  zeros = jax.tree.map(jnp.zeros_like, PARAMS)
  tx = optim.clip_by_global_norm(1.0)
  assert_close(tx.update(zeros, tx.init(PARAMS))[0], zeros)


def test_weight_decay_spares_norms_and_biases():
  assert optim.decay_mask(PARAMS) == {
    "layers": {"q": True, "q_bias": False, "mlp_norm": False},
    "final_norm": False,
    "embed": True,
  }
  tx, _ = optim.make(10, learning_rate=0.1, weight_decay=0.5)
  zeros = jax.tree.map(jnp.zeros_like, PARAMS)
  params, _ = stepped(tx, zeros, steps=1)
  np.testing.assert_allclose(params["embed"], 0.95, rtol=1e-6)
  np.testing.assert_array_equal(params["final_norm"], 1.0)
  np.testing.assert_array_equal(params["layers"]["q_bias"], 1.0)


@pytest.mark.parametrize("name", ["sgd", "lion", "adafactor", "rmsprop", "adam", "lamb"])
def test_any_optimizer_of_optax_is_taken_by_name(name):
  tx, _ = optim.make(10, optimizer=name, learning_rate=0.1, max_grad_norm=None, weight_decay=0.0)
  kwargs = {"weight_decay": 0.0} if name == "lion" else {}
  oracle = vars(optax)[name](0.1, **kwargs)
  assert_close(stepped(tx, gradients())[0], stepped(oracle, gradients())[0])


def test_options_reach_the_optimizer():
  tx, _ = optim.make(
    10,
    optimizer="sgd",
    learning_rate=0.1,
    max_grad_norm=None,
    weight_decay=0.0,
    options={"momentum": 0.9},
  )
  assert_close(stepped(tx, gradients())[0], stepped(optax.sgd(0.1, momentum=0.9), gradients())[0])


def test_steps_done_counts_updates():
  for schedule in ("constant", "linear"):
    tx, _ = optim.make(10, schedule=schedule)
    assert int(optim.steps_done(tx.init(PARAMS))) == 0
    assert int(optim.steps_done(stepped(tx, gradients(), steps=3)[1])) == 3


def test_a_copy_of_a_schedule_is_equal_to_it():
  given = dict(learning_rate=8.0, warmup_steps=2, final_share=0.25)
  mine = optim.make_schedule(12, schedule=own_methods.cosine, **given)
  same = optim.make_schedule(12, schedule="cosine", **given)
  steps = np.arange(14)
  np.testing.assert_array_equal([mine(i) for i in steps], [same(i) for i in steps])


@pytest.mark.parametrize(
  ("schedule", "message"),
  [
    ("negative", "must return finite rates that are not negative, got -"),
    ("vector", r"must return one float for each step, got float32 \[2\]"),
    ("rateless", r"cannot be computed: .*own_methods.py:\d+: KeyError: 'rate'"),
    ("no_function", "cannot be computed: TypeError: it must return a function of the step"),
    ("zero", "needs rewards, mask, but it receives only"),
  ],
)
def test_a_schedule_that_breaks_a_rule_is_refused_in_one_line(schedule, message):
  with pytest.raises(ValueError, match=message) as error:
    optim.make(10, schedule=getattr(own_methods, schedule))
  assert f"own_methods.{schedule}" in str(error.value) and "\n" not in str(error.value)
  with pytest.raises(ValueError, match="final_share=0.1 would never be read"):
    optim.make(10, schedule=own_methods.falling, final_share=0.1)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"optimizer": "adamv"}, "no optimizer 'adamv'; similar names: .*adamw"),
    ({"optimizer": "chain"}, "no optimizer 'chain'"),
    ({"optimizer": "sgd", "weight_decay": 0.1}, "sgd takes no weight_decay"),
    ({"options": {"beta1": 0.9}}, r"adamw takes no \['beta1'\]; it takes .*'b1'"),
    (
      {"schedule": "cosin"},
      "schedule must be one of 'constant', .*, or .* got 'cosin'",
    ),
    ({"warmup_steps": -1}, "warmup_steps must be an integer >= 0"),
    ({"final_share": 2.0}, "final_share"),
    ({"max_grad_norm": 0.0}, "max_grad_norm must be a finite number > 0"),
  ],
)
def test_make_refuses_what_makes_no_sense(options, message):
  with pytest.raises(ValueError, match=message):
    optim.make(10, **options)
