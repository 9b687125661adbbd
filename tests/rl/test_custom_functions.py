"""A user's loss and advantages: what they are given, what is refused, and what it is equal to."""

import dataclasses
import functools
import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.errors import ExpectedFailure
from grpo_jax.rl import advantages, custom_functions, estimators, losses, objectives
from grpo_jax.types import Denominators, LossTokens
from tests.rl import own_methods


def value_and_gradient(objective):
  policy, old, tokens = custom_functions._loss_example(2, 8)
  whole = lambda x: objective(x, None, tokens, Denominators(14.0, 4.0))[0]
  return jax.value_and_grad(whole)(policy)


@pytest.mark.long
@pytest.mark.parametrize(
  ("mine", "name"),
  [
    (own_methods.clipped, "clipped"),
    (losses.clipped_surrogate, "clipped"),
    (losses.gspo, "gspo"),
    (losses.cispo, "cispo"),
    (losses.sapo, "sapo"),
    (losses.reinforce, "reinforce"),
  ],
)
def test_a_copy_of_a_loss_is_equal_to_it(mine, name):
  built_in = objectives.make(loss=name, kl_coef=0.0)
  made = objectives.make(loss=mine, kl_coef=0.0, aggregation=built_in.options.aggregation)
  assert made.is_token_local == built_in.is_token_local
  assert made.needs_old == built_in.needs_old
  if built_in.options.is_clipped:
    assert made.options.clip_bounds == built_in.options.clip_bounds
  for a, b in zip(value_and_gradient(made), value_and_gradient(built_in), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.long
def test_options_of_the_section_reach_the_loss():
  loss = own_methods.clipped
  made = objectives.make(loss=loss, kl_coef=0.0, clip_low=0.0, clip_high=0.0)
  same = objectives.make(loss="clipped", kl_coef=0.0, clip_low=0.0, clip_high=0.0)
  np.testing.assert_array_equal(value_and_gradient(made)[1], value_and_gradient(same)[1])
  assert made != objectives.make(loss=loss, kl_coef=0.0) == objectives.make(loss=loss, kl_coef=0.0)
  assert hash(made) is not None


def test_a_loss_that_acts_without_advantage_is_known():
  quiet = functools.partial(own_methods.with_args, other=0.0)
  loud = functools.partial(own_methods.with_args, other=0.1)
  assert not objectives.make(loss=quiet, kl_coef=0.0).acts_without_advantage
  assert objectives.make(loss=quiet, kl_coef=0.1).acts_without_advantage
  assert objectives.make(loss=loud, kl_coef=0.0).acts_without_advantage


@pytest.mark.parametrize(
  ("loss", "message"),
  [
    ("scalar", r"must return float32 \[2, 8\], the shape of policy_logprobs, got float32 \[\]"),
    ("half", r"must return float32 \[2, 8\], .* got bfloat16"),
    ("pair", "must return an array, got tuple"),
    ("infinite", "the (result|gradient) is not finite on a small example"),
    ("without_gradient", "has no gradient with respect to policy_logprobs"),
    ("branching", "cannot be compiled: .*own_methods.py:68: TracerBoolConversionError"),
    ("raising", "cannot be compiled: .*own_methods.py:72: KeyError"),
    ("nameless", "must take policy_logprobs; it takes: logprobs, advantages"),
    ("with_args", "needs other, which it is not given"),
    ("mixing", "takes neither mask nor sequence_ids, .* depends on others"),
    ("by_row", "mixes the completions of a row"),
    ("impure", "is not pure: two calls with the same arrays differ"),
  ],
)
def test_a_loss_that_breaks_a_rule_is_refused_in_one_line(loss, message):
  with pytest.raises(ValueError, match=message) as error:
    objectives.make(loss=getattr(own_methods, loss), kl_coef=0.0)
  assert f"own_methods.{loss}" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"clip_low": 0.1}, "clip_low=0.1 would never be read"),
    ({"dual_clip": 3.0}, "dual_clip=3.0 would never be read"),
    ({"sapo_temperature_positive": 2.0}, "sapo_temperature_positive=2.0 would never be read"),
    ({"loss": 3}, "loss must be the name of a loss, or a function, got 3"),
  ],
)
def test_options_that_a_loss_does_not_take_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    objectives.make(**({"loss": own_methods.by_completion, "kl_coef": 0.0} | options))


@pytest.mark.long
def test_a_copy_of_an_estimator_is_equal_to_it():
  rewards, mask, components = custom_functions._rewards_example(5, 4, 2)
  for mine, name, options in (
    (own_methods.group_mean, "grpo", {"eps": 0.1}),
    (own_methods.group_mean, "grpo", {"clip_high": 0.5}),
    (advantages.group_relative, "rloo", {"baseline": "leave_one_out", "scale": "none"}),
    (advantages.rloo, "rloo", {}),
  ):
    expected = estimators.make(name, **options)(rewards, mask)
    np.testing.assert_array_equal(estimators.make(mine, **options)(rewards, mask), expected)
  of_components = estimators.make(own_methods.of_components)
  assert of_components.by_component
  np.testing.assert_allclose(
    of_components(rewards, mask, components), np.where(mask, rewards - 1.0, 0.0), atol=1e-6
  )


@pytest.mark.long
def test_a_reward_that_is_not_finite_never_reaches_the_users_function():
  rewards = jnp.asarray([[1.0, jnp.nan, 0.0, jnp.inf]])
  made = estimators.make(own_methods.group_mean)(rewards, jnp.ones((1, 4), bool))
  expected = estimators.make("grpo")(rewards, jnp.ones((1, 4), bool))
  np.testing.assert_array_equal(made, expected)
  assert np.isfinite(made).all()


@pytest.mark.parametrize(
  ("function", "message"),
  [
    ("of_padding", "depend on attempts whose mask is False"),
    ("zero", "are 0 for groups of different rewards"),
    ("by_prompt", r"must return float32 \[5, 4\], the shape of rewards, got float32 \[5\]"),
    ("not_a_number", "the result is not finite"),
    ("clipped", "must take rewards, mask"),
  ],
)
def test_advantages_that_break_a_rule_are_refused_in_one_line(function, message):
  with pytest.raises(ValueError, match=message) as error:
    estimators.make(getattr(own_methods, function))
  assert f"own_methods.{function}" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.long
def test_options_that_advantages_do_not_take_are_refused():
  for options in ({"scale": "none"}, {"ddof": 0}, {"baseline": "none"}, {"weights": (1.0, 2.0)}):
    with pytest.raises(ValueError, match="would never be read: .*group_mean does not take it"):
      estimators.make(own_methods.group_mean, **options)
  every = {f.name: f.default for f in dataclasses.fields(estimators.Estimator)}
  usual = {name: every[name] for name in ("ddof", "eps", "weights", "clip_low", "clip_high")}
  assert estimators.make(own_methods.group_mean, baseline=None, scale=None, **usual)


def test_every_array_that_a_loss_may_name_is_documented_and_given():
  names = "policy_logprobs advantages old_logprobs behavior_logprobs mask sequence_ids".split()
  assert sorted(names) == sorted(custom_functions.LOSS_ARRAYS)
  seen = {}

  def loss(policy_logprobs, advantages, old_logprobs, behavior_logprobs, mask, sequence_ids):
    seen.update(mask=mask.dtype, ids=sequence_ids.dtype)
    return -advantages * (policy_logprobs - old_logprobs) + 0.0 * behavior_logprobs

  assert list(inspect.signature(loss).parameters) == names
  objectives.make(loss=loss, kl_coef=0.0)
  assert seen == {"mask": jnp.bool_, "ids": jnp.int32}


WIDE = {
  "raises": lambda logprobs: 1 / 0,
  "exits": lambda logprobs: sys.exit(3),
  "cuts": lambda logprobs: logprobs[:, :3],
}
LINE = WIDE["raises"].__code__.co_firstlineno


@pytest.mark.parametrize(
  "kind, message",
  [
    ("raises", f"failed on arrays .2, 20.: .*test_custom_functions.py:{LINE}: ZeroDivisionError"),
    ("exits", "failed on arrays .2, 20.: .*: SystemExit: 3"),
    ("cuts", "must return an array .2, 20.*got .2, 3."),
  ],
)
def test_a_loss_that_fails_on_the_data_of_a_run_is_an_expected_failure(kind, message):
  """The check at the start calls functions on small examples only."""

  def loss(policy_logprobs, advantages):
    wide = policy_logprobs.shape[1] > 12
    return WIDE[kind](policy_logprobs) if wide else -advantages * policy_logprobs

  objective = objectives.make(loss=loss, kl_coef=0.0)
  array = jnp.zeros((2, 20))
  mask = jnp.ones((2, 20), bool)
  tokens = LossTokens(mask, None, array, None, array, None)
  with pytest.raises(custom_functions.CustomFunctionError, match=message) as found:
    objective(array, None, tokens, Denominators(40.0, 2.0))
  assert isinstance(found.value, ExpectedFailure)


@pytest.mark.long
def test_advantages_that_fail_on_the_data_of_a_run_are_an_expected_failure():
  def mine(rewards, mask):
    return own_methods.group_mean(rewards, mask) if rewards.size < 40 else 1 / 0

  make = estimators.make(mine)
  line = mine.__code__.co_firstlineno + 1
  with pytest.raises(
    custom_functions.CustomFunctionError,
    match=f"failed on arrays .8, 8.: .*test_custom_functions.py:{line}: ZeroDivisionError",
  ):
    make(jnp.zeros((8, 8)), jnp.ones((8, 8), bool))
