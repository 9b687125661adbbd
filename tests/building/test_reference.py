"""A reference policy that follows the policy: when it moves, and what a checkpoint holds of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs.base
from grpo_jax import train
from grpo_jax.building import computation, phases, restoring
from grpo_jax.config import run_options
from grpo_jax.config.configuration import ConfigError, typed
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.learn import policy, sharding
from grpo_jax.models import loading
from grpo_jax.run_folder import checkpointing, stored_leaves, stored_steps
from grpo_jax.run_folder.loggers import SilentLogger
from grpo_jax.types import TrainState


def config_of(**settings):
  config = configs.base.get_config()
  given = {name.replace("__", "."): value for name, value in settings.items()}
  config.update_from_flattened_dict({"model.compute_dtype": "float32", **given})
  return config


def made_of(config, model, **options):
  mesh = sharding.make_mesh(data=1, devices=jax.devices()[:1])
  objective = run_options.objective(typed(config))
  return computation.make(typed(config), loading.read_config(model), mesh, objective, **options)


# --- by hand ---


def test_mixing_by_hand():
  reference, full = {"w": jnp.asarray([1.0, -2.0])}, {"w": jnp.asarray([2.0, 2.0])}
  mixed = policy.followed(reference, full, share=0.25)
  np.testing.assert_array_equal(mixed["w"], [1.25, -1.0])
  copied = jax.jit(policy.followed, static_argnames="share")(reference, full, share=1.0)
  np.testing.assert_array_equal(copied["w"], full["w"])


@pytest.fixture
def update():
  """An update every 2 steps that notes what it was given."""
  return phases.ReferenceUpdate(2, lambda reference, full: (reference, full))


def stepped(state, update, made, before=lambda: None):
  """Returns the state after a step without minibatches, and its metrics."""
  new, metrics, _ = phases.learn(
    state,
    (),
    before,
    update=made.update,
    policy=policy.Policy(),
    logger=SilentLogger(),
    reference=update,
  )
  return new, metrics


def test_the_reference_moves_every_few_steps_even_if_nothing_was_learned(update, frozen):
  state, called = TrainState(jnp.int32(0), "θ", "o", "r"), []
  ages, references = [], []
  for _ in range(4):
    state, metrics = stepped(state, update, frozen, before=lambda: called.append(1))
    ages.append(metrics["train/reference_age"].value())
    references.append(state.reference)
  assert ages == [0, 1, 0, 1]
  assert references == ["r", ("r", "θ"), ("r", "θ"), (("r", "θ"), "θ")]
  assert len(called) == 2  # the old reference is donated, so the keeper must let go of it.


def test_a_frozen_reference_is_not_in_the_state(frozen):
  state, metrics = stepped(TrainState(jnp.int32(1), "θ", "o"), None, frozen)
  assert state.reference is None and "train/reference_age" not in metrics
  assert policy.Policy("frozen").reference_of(state) == "frozen"
  assert policy.Policy().reference_of(dataclasses.replace(state, reference="r")) == "r"


# --- what cannot work ---


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"reference__update_every_steps": 5, "loss__kl_coef": 0.0}, "needs loss.kl_coef > 0"),
    ({"reference__mixup": 0.6}, "reference.mixup=0.6 would never be read"),
    ({"reference__update_every_steps": 5, "reference__mixup": 0.0}, "mixup must be"),
    ({"reference__update_every_steps": -1}, "update_every_steps must be"),
  ],
)
def test_options_that_cannot_work_are_named(settings, message):
  complaints = list(train.validate(config_of(**settings)))
  assert [x for x in complaints if message in x], complaints


def test_a_frozen_base_is_a_reference_that_cannot_move(model):
  config = config_of(reference__update_every_steps=5, model__lora__rank=2)
  with pytest.raises(
    ConfigError, match="the reference of a policy with a frozen base is that base"
  ):
    made_of(config, model)


# --- checkpoints ---


@pytest.fixture(scope="module")
def frozen(model):
  return made_of(config_of(), model)


@pytest.fixture(scope="module")
def moving(model):
  return made_of(config_of(reference__update_every_steps=2, reference__mixup=0.5), model)


def params_of(model):
  return loading.load(model).params


def restored(checkpoints, made, model):
  """Restores a run, as a build does, whose initial weights are those of the model."""
  trainable, _ = made.begin(params_of(model))
  found = restoring.restore(
    checkpoints, trainable, made, lambda state, extra: None, lambda: params_of(model)
  )
  return found.state


def saved(checkpoints, state):
  position = {"stream": {}, "skipped": 0, "evaluated": {}}
  checkpoints.save(int(state.step), dict(vars(state)), position)
  checkpoints.wait()
  info = stored_steps.folder(checkpoints.directory, int(state.step)) / "info.json"
  return stored_leaves.read(info).leaves


def moved(state, made):
  """Returns the state two steps later, with other weights, and the reference that follows."""
  params = jax.tree.map(lambda x: x + 1, state.params)
  state = dataclasses.replace(state, step=state.step + 2, params=params)
  follow = phases.ReferenceUpdate(2, made.follow) if made.follow else lambda x: x
  return follow(state)


def assert_equal(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_moving_reference_is_saved_and_restored(moving, model, tmp_path):
  with checkpointing.open(tmp_path, keep_last=None) as checkpoints:
    start = restored(checkpoints, moving, model)
    assert_equal(start.reference, start.params)
    assert not any(
      a is b
      for a, b in zip(jax.tree.leaves(start.reference), jax.tree.leaves(start.params), strict=True)
    )
    initial = jax.tree.map(np.asarray, start.params)
    state = moved(start, moving)
    assert_equal(state.reference, jax.tree.map(lambda x: 0.5 * x + 0.5 * (x + 1), initial))
    names = saved(checkpoints, state)
    assert {n for n in names if n.startswith("reference.")} == {
      n.replace("params.", "reference.") for n in names if n.startswith("params.")
    }
    again = restored(checkpoints, moving, model)
    assert_equal(dict(vars(again)), dict(vars(state)))


def test_a_frozen_reference_leaves_checkpoints_as_they_were(frozen, moving, model, tmp_path):
  with checkpointing.open(tmp_path, keep_last=None) as checkpoints:
    state = restored(checkpoints, frozen, model)
    assert state.reference is None
    state = moved(state, frozen)
    names = saved(checkpoints, state)
    assert {name.partition(".")[0] for name in names} == {"step", "params", "opt_state"}
    assert restored(checkpoints, frozen, model).reference is None
    later = restored(checkpoints, moving, model)  # the option was turned on in between.
    assert_equal(later.reference, params_of(model))
    assert_equal(later.params, state.params)


def test_a_reference_that_has_moved_stays_where_it_is(frozen, moving, model, tmp_path):
  with checkpointing.open(tmp_path, keep_last=None) as checkpoints:
    state = moved(restored(checkpoints, moving, model), moving)
    saved(checkpoints, state)
    later = restored(checkpoints, frozen, model)  # the option was turned off.
    assert_equal(later.reference, state.reference)
    without_kl = made_of(config_of(loss__kl_coef=0.0), model)
    assert restored(checkpoints, without_kl, model).reference is None


def test_a_damaged_reference_is_not_continued_from():
  tree = {"params": {"w": np.ones(2)}, "reference": {"w": np.asarray([1.0, np.nan])}}
  reason = restoring.refusal(None, ByteTokenizer(), lambda: None, tree, {})
  assert reason is not None and "not finite" in reason
