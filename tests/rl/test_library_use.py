"""Public functions in a loop of one's own: wrong shapes and numbers, half precision, infinities."""

import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import grpo_jax.rl
from grpo_jax.rl import aggregate, arrays, distillation, losses, objectives
from grpo_jax.types import Denominators, LossTokens, Maximum, Mean

MODULES = ("advantages", "aggregate", "covariance_losses", "diagnostics", "distillation", "dppo")
MODULES += ("importance", "kl", "losses", "masks", "proximal", "sequence_losses")
SHAPE = (3, 4)
MASK = np.asarray([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]) > 0
RNG = np.random.default_rng(0)
LOGPROBS = {
  f"{name}_logprobs": -RNG.exponential(size=SHAPE)
  for name in ("policy", "old", "behavior", "ref", "teacher")
}
OF_TOKENS = {
  **LOGPROBS,
  "sampled_from": LOGPROBS["policy_logprobs"] + 0.1,
  "advantages": RNG.normal(size=SHAPE),
  "entropy": RNG.exponential(size=SHAPE),
  "losses": RNG.normal(size=SHAPE),
  "ratio": RNG.uniform(0.5, 1.5, SHAPE),
  "clipped": RNG.uniform(0.8, 1.2, SHAPE),
  "weights": RNG.uniform(0.5, 1.5, SHAPE),
  "counts": RNG.uniform(0.5, 1.5, SHAPE),
  "x": RNG.normal(size=SHAPE),
}
MARKS = {
  **{name: MASK for name in ("mask", "completion")},
  **{name: MASK & (RNG.random(SHAPE) < 0.7) for name in ("keep", "selected", "event")},
  "is_in_bounds": MASK,
  "is_sampled": MASK,
  "sequence_ids": np.asarray([[0, 0, 1, 1]] * 3, np.int32),
  "ages": np.asarray([[0, 1, 2, -1]] * 3, np.int32),
}
OF_GROUPS = {
  "rewards": RNG.uniform(size=SHAPE),
  "lengths": RNG.integers(1, 9, SHAPE).astype(float),
  "components": RNG.uniform(size=(2, *SHAPE)),
}
OTHERS = {
  "denominators": Denominators(9.0, 5.0),
  "options": distillation.Distillation(coef=0.5, reward_coef=0.5),
  **{"max_completion_tokens": 7, "k": 2, "share": 0.5, "threshold": 1.5, "high": 1.2},
  **{"kl_coef": 0.1, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
  **{"weights_are_of_sequences": False, "bounds_are_of_sequences": False},
  "greedy": np.asarray([0.5, 0.2, 0.1]),
  **{"stop_ids": (1,), "tokens": np.asarray([[1, 2, 3, 0]] * 3)},
  "per_sequence": np.ones(SHAPE),
}
NOT_ALIKE = ("tokens", "per_sequence", "components")
# These have arguments of the same name that mean something else.
OWN = {
  "gdpo": {"weights": None, "mask": None},
  "loss_mask": {"keep": np.ones(3, bool)},
  "overlong_filter": {"is_truncated": np.asarray([True, False, False])},
  "to_tokens": {"like": np.ones(SHAPE)},
}


def public():
  """Yields the name and the function of everything public that takes arrays of tokens or groups."""
  for module in MODULES:
    found = importlib.import_module(f"grpo_jax.rl.{module}")
    for name, function in vars(found).items():
      is_own = inspect.isfunction(function) and function.__module__ == found.__name__
      if is_own and not name.startswith("_") and name != "check_denominators":
        yield f"{module}.{name}", function


def given(function, dtype=np.float32):
  """Returns valid arguments, by name; those with a default only if they are arrays of tokens."""
  everything = {**OF_TOKENS, **OF_GROUPS, **MARKS, **OTHERS, **OWN.get(function.__name__, {})}
  chosen = {}
  for name, parameter in inspect.signature(function).parameters.items():
    if name in everything and (parameter.default is parameter.empty or name in MARKS):
      chosen[name] = everything[name]
    else:
      assert parameter.default is not parameter.empty, (function, name)
  typed = lambda x: jnp.asarray(x, dtype) if getattr(x, "dtype", None) == np.float64 else x
  return {k: typed(v) if isinstance(v, np.ndarray) else v for k, v in chosen.items()}


def leaves(function, arguments):
  return [np.asarray(x) for x in jax.tree.leaves(function(**arguments))]


@pytest.fixture
def as_users():
  """Switches off the checks of types that only tests have."""
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.long
def test_a_wrong_shape_is_an_error_of_one_line_that_names_the_argument(as_users):
  wrong, count = [], 0
  for name, function in public():
    right = given(function)
    arrays = [k for k, v in right.items() if getattr(v, "ndim", 0) >= 2 and k not in NOT_ALIKE]
    for argument in arrays if len(arrays) > 1 else ():
      array = right[argument]
      count += 1
      for changed in (array[..., :3], array[..., 0]):
        try:
          function(**{**right, argument: changed})
          wrong.append(f"{name}({argument} of shape {changed.shape}) is accepted")
        except Exception as error:
          text = str(error)
          is_named = any(name in text for name in arrays) and str(changed.shape) in text
          is_named = is_named and str(SHAPE) in text and "\n" not in text
          if not is_named or not isinstance(error, ValueError):
            wrong.append(f"{name}({argument}): {type(error).__name__}: {text}")
  assert not wrong, "\n".join(wrong)
  assert count > 80


@pytest.mark.long
def test_half_precision_is_computed_in_float32(as_users):
  wrong, half = [], jnp.float16
  for name, function in public():
    given_half = given(function, half)
    is_half = {k for k, v in given_half.items() if getattr(v, "dtype", None) == half}
    if not is_half:
      continue
    single = {k: v.astype(np.float32) if k in is_half else v for k, v in given_half.items()}
    found, expected = leaves(function, given_half), leaves(function, single)
    for a, b in zip(found, expected, strict=True):
      wrong += [] if a.dtype == b.dtype and np.array_equal(a, b) else [f"{name}: {a.dtype}"]
  assert not wrong
  assert arrays.floats(np.ones(2), "x").dtype == np.float32
  assert arrays.floats(jnp.ones(2, jnp.bfloat16), "x").dtype == np.float32
  many = jnp.ones((1, 80_000), half)  # more than float16 can count.
  counts = aggregate.local_denominators(many > 0)
  assert aggregate.token_mean(many, many > 0, counts) == 1.0


SCORED = {"importance_correction": "token", "kl_coef": 0.0}
INFINITE = {  # what is given, and options whose loss of the token is then exactly 0.
  "interpolated, engine": ("behavior_logprobs", {**SCORED, "old_logprobs": "interpolated"}),
  "scored, engine": ("behavior_logprobs", SCORED),
  "truncated, engine": (
    "behavior_logprobs",
    {**SCORED, "importance_truncation": "tis", "importance_high": 2.0, "importance_low": 0.5},
  ),
  "reinforce, engine": ("behavior_logprobs", {**SCORED, "loss": "reinforce"}),
  "teacher": ("teacher_logprobs", {"kl_coef": 0.0, "distillation": distillation.Distillation()}),
}


@pytest.mark.long
@pytest.mark.parametrize("case", INFINITE)
def test_a_token_that_another_policy_never_writes_has_no_loss_and_leaves_the_others_alone(case):
  name, options = INFINITE[case]
  objective = objectives.make(**options)
  made = LossTokens(
    mask=jnp.asarray(MASK),
    sequence_ids=None,
    advantages=jnp.asarray(OF_TOKENS["advantages"], jnp.float32),
    ages=jnp.asarray([[0, 1, 2, 3]] * 3),
    **{f"{who}_logprobs": jnp.asarray(LOGPROBS[f"{who}_logprobs"], jnp.float32) for who in WHO},
  )
  policy = jnp.asarray(LOGPROBS["policy_logprobs"], jnp.float32)
  counts = aggregate.local_denominators(made.mask)

  def evaluated(tokens):
    share = lambda p: objective(p, None, tokens, counts)[0]
    return jax.value_and_grad(share)(policy)

  for place in ((0, 0), (1, 2)):  # of ages 0 and 2.
    fields = {name: getattr(made, name).at[place].set(-jnp.inf)}
    loss, gradient = evaluated(made.__class__(**{**vars(made), **fields}))
    without = made.mask.at[place].set(False)
    expected, of_others = evaluated(made.__class__(**{**vars(made), "mask": without}))
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, of_others, rtol=1e-6, atol=1e-9)
    assert gradient[place] == 0


@pytest.mark.long
def test_a_token_that_the_policy_never_writes_has_no_loss():
  made = LossTokens(
    mask=jnp.asarray(MASK),
    sequence_ids=None,
    advantages=jnp.asarray(OF_TOKENS["advantages"], jnp.float32),
    ref_logprobs=jnp.asarray(LOGPROBS["ref_logprobs"], jnp.float32),
    selected=jnp.asarray(MASK),
  )
  policy = jnp.asarray(LOGPROBS["policy_logprobs"], jnp.float32)
  counts, wrong = aggregate.local_denominators(made.mask), []
  without = made.__class__(**{**vars(made), "mask": made.mask.at[1, 2].set(False)})
  for name in ("clipped", "gspo_token", "cispo", "vespo"):  # NaN, NaN, ∞, ∞ without the rule.
    objective = objectives.make(loss=name, kl_coef=0.1)
    share = jax.value_and_grad(lambda p, tokens, of=objective: of(p, None, tokens, counts)[0])
    found = share(policy.at[1, 2].set(-jnp.inf), made)
    expected = share(policy, without)
    wrong += [] if all(map(np.array_equal, found, expected)) else [name]
  assert not wrong


WHO = ("old", "behavior", "ref", "teacher")


@pytest.mark.long
def test_other_infinities_leave_loss_and_gradient_finite(as_users):
  """Of the old, the engine's and the reference's logprob of a token, in every function."""
  wrong = []
  for name, function in public():
    right = given(function)
    for argument in [k for k in right if k.removesuffix("_logprobs") in WHO]:
      broken = {**right, argument: right[argument].at[1, 1].set(-jnp.inf)}
      if any(np.isnan(x).any() for x in leaves(function, broken)):
        wrong.append(f"{name}({argument})")
      hidden = {**right, argument: right[argument].at[0, 3].set(jnp.nan)}
      if "mask" in right:
        seen = [x[MASK] if x.shape == SHAPE else x for x in leaves(function, hidden)]
        expected = [x[MASK] if x.shape == SHAPE else x for x in leaves(function, right)]
        same = all(map(np.array_equal, seen, expected))
        wrong += [] if same else [f"{name}({argument}) under the mask"]
  assert not wrong


@pytest.mark.long
def test_numbers_out_of_range_are_an_error_of_one_line_that_names_the_argument(as_users):
  cases = [
    *[("losses.clipped_surrogate", {"clip_low": x}) for x in (-0.2, 1.2, float("nan"), "0.2")],
    *[("losses.clipped_surrogate", {"clip_high": x}) for x in (-0.1, True)],
    *[("losses.clipped_surrogate", {"dual_clip": x}) for x in (0.5, 1.0)],
    *[("losses.gspo", {"clip_low": 2.0}), ("losses.cispo", {"clip_high": -1.0})],
    ("losses.sapo", {"temperature_negative": 0.0}),
    *[("sequence_losses.gmpo", {"clip_low": -0.1}), ("sequence_losses.luspo", {"clip_low": 1.5})],
    *[("dppo.dppo_tv", {"mask_low": -0.1}), ("dppo.masked_loss", {"ratio_cap": 0.0})],
    *[("covariance_losses.clip_cov", {"clip_low": 1.5}), ("kl.kl_penalty", {"input_clamp": 0.0})],
    *[("importance.truncate", {"low": -1.0}), ("importance.truncate", {"low": 2.0, "high": 1.0})],
    *[("importance.seq_logprob_error_mask", {"threshold": 0.5})],
    *[("aggregate.constant_length", {"max_completion_tokens": 0})],
    *[("aggregate.token_mean", {"denominators": 24}), ("masks.until_stop", {"stop_ids": 1})],
    *[("masks.top_entropy", {"share": 0.0}), ("advantages.grpo", {"eps": -1.0})],
    *[("advantages.group_relative", {"ddof": 2}), ("advantages.whiten", {"floor": -1.0})],
    *[("distillation.token_advantages", {"clamp": -1.0})],
  ]
  functions, wrong = dict(public()), []
  for name, changed in cases:
    function = functions[name]
    try:
      function(**{**given(function), **changed})
      wrong.append(f"{name}({changed}) is accepted")
    except ValueError as error:
      named = any(argument in str(error) for argument in changed)
      wrong += [] if named and "\n" not in str(error) else [f"{name}({changed}): {error}"]
  assert not wrong, "\n".join(wrong)


def test_an_objective_names_what_has_another_shape(as_users):
  made = LossTokens(jnp.asarray(MASK), None, jnp.zeros(SHAPE), old_logprobs=jnp.zeros((3, 3)))
  objective = objectives.make(kl_coef=0.0)
  with pytest.raises(
    ValueError, match=r"policy_logprobs \(3, 4\).*LossTokens.old_logprobs \(3, 3\)"
  ):
    objective(jnp.zeros(SHAPE), None, made, Denominators(9.0, 3.0))
  with pytest.raises(ValueError, match="denominators must be types.Denominators"):
    objective(jnp.zeros(SHAPE), None, made, 9.0)


@pytest.mark.long
def test_bounds_may_be_traced_and_numbers_of_numpy_and_jax(as_users):
  args = (jnp.asarray(LOGPROBS["policy_logprobs"]), jnp.asarray(LOGPROBS["old_logprobs"]))
  args += (jnp.asarray(OF_TOKENS["advantages"]),)
  surrogate = lambda low: losses.clipped_surrogate(*args, clip_low=low)
  expected = surrogate(0.3)
  arrays.number("clip_low", np.float32(0.3), low=0, high=1)
  arrays.number("clip_low", jnp.float32(0.3), low=0, high=1)
  np.testing.assert_allclose(jax.jit(surrogate)(0.3), expected, rtol=1e-6)
  np.testing.assert_allclose(jax.vmap(surrogate)(jnp.asarray([0.3]))[0], expected, rtol=1e-6)


def test_metrics_of_an_objective_are_read_as_numbers():
  metric = Mean(jnp.float32(3.0), jnp.float32(4.0))
  assert float(metric) == 0.75 and f"{metric:.1f}" == "0.8" and f"{metric}".startswith("Mean(")
  assert float(Maximum(2.5)) == 2.5 and np.isnan(float(Mean(0.0, 0.0)))


def test_help_shows_an_index_and_every_option():
  index = grpo_jax.rl.__doc__
  found = [module.name for module in pkgutil.iter_modules(grpo_jax.rl.__path__)]
  assert not [name for name in found if name not in index]
  shown = objectives.make.__doc__
  assert "    kl_coef = 0.01: coefficient of the KL" in shown
  options = inspect.signature(objectives.objective_options.ResolvedOptions).parameters
  assert not [name for name in options if f"    {name} = " not in shown]
