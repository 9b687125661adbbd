"""Advantages against numbers worked by hand, slow loops and invariances; golden cases apart."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.metrics import scored_groups
from grpo_jax.rl import advantages, estimators

NAN = float("nan")


@pytest.fixture
def rewards():
  return np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)


def _jit(function):
  """Compiles once instead of once an operation: most of these tests' time."""
  return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def _several(function, options):
  """Compiles once for several options: each is one value of the dictionary that is returned."""
  return _jit(lambda *given: {name: function(*given, **of) for name, of in options.items()})


def _relative(rewards, **options):
  return _jit(functools.partial(advantages.group_relative, **options))(rewards)


def _spread(rewards, **options):
  return _jit(functools.partial(advantages.baseline_and_spread, **options))(rewards)


def _array(rows):
  return np.asarray(rows, np.float32)


BY_HAND = {
  # mean 1/4, unbiased std 1/2.
  "grpo": ({}, [1.5, -0.5, -0.5, -0.5]),
  # biased std sqrt(3)/4.
  "biased": ({"ddof": 0}, [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
  "dr_grpo": ({"scale": "none"}, [0.75, -0.25, -0.25, -0.25]),
  # leave one out: the others' mean is 0 or 1/3, their std 0 (left unscaled) or 1/sqrt(3).
  "nemo_rl": ({"baseline": "leave_one_out"}, [1.0, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
  "rloo": ({"baseline": "leave_one_out", "scale": "none"}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
  "raw": ({"baseline": "none", "scale": "none"}, [1.0, 0.0, 0.0, 0.0]),
  "eps": ({"eps": 0.5}, [0.75, -0.25, -0.25, -0.25]),  # added to the standard deviation.
}


@pytest.mark.long
def test_group_relative_matches_values_worked_by_hand():
  options = {name: {"eps": 0.0, **given} for name, (given, _) in BY_HAND.items()}
  got = _several(advantages.group_relative, options)(_array([[1, 0, 0, 0]]))
  for name, (_, expected) in BY_HAND.items():
    np.testing.assert_allclose(got[name], [expected], rtol=1e-6, err_msg=name)


@pytest.mark.long
def test_batch_std_is_over_all_rewards_of_the_batch():
  # rewards 0, 2, 1, 1: mean 1, unbiased variance 2/3.
  got = _relative(_array([[0, 2], [1, 1]]), scale="batch_std", eps=0.0)
  np.testing.assert_allclose(got, [[-(1.5**0.5), 1.5**0.5], [0, 0]], rtol=1e-6)


def test_rloo_is_the_mean_of_the_others(rewards):
  expected = np.empty(rewards.shape)
  for p, group in enumerate(rewards):
    for i, reward in enumerate(group):
      expected[p, i] = reward - np.delete(group, i).mean()
  np.testing.assert_allclose(_jit(advantages.rloo)(rewards), expected, rtol=1e-5, atol=1e-6)


def test_leave_one_out_std_is_that_of_the_others(rewards):
  _, got = _spread(rewards, baseline="leave_one_out")
  expected = [[np.delete(g, i).std(ddof=1) for i in range(5)] for g in rewards]
  np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.long
def test_spread_of_equal_others_is_zero_in_nemo_rls_known_bad_case():
  group = _array([[1.0] + [0.15] * 15])
  baseline, spread = _spread(group, baseline="leave_one_out")
  assert spread[0, 0] == 0.0
  got = _relative(group, baseline="leave_one_out")
  assert got[0, 0] == group[0, 0] - baseline[0, 0]
  np.testing.assert_allclose(got[0, 0], 0.85, rtol=1e-6)


def _odd_one_out(rng):
  """Returns a group of equal, non-dyadic rewards in which one differs; at any place."""
  group = np.full(rng.integers(3, 33), rng.uniform(-100, 100), np.float32)
  group[rng.integers(len(group))] = rng.uniform(-100, 100)
  return group


@pytest.mark.parametrize("noise", [0, 1], ids=["equal", "equal_but_for_rounding"])
@pytest.mark.long
def test_no_group_that_is_equal_once_one_is_left_out_explodes(noise):
  rng = np.random.default_rng(1)
  estimate = _jit(lambda r, m: advantages.group_relative(r, m, baseline="leave_one_out"))
  spreads = _jit(lambda r, m: advantages.baseline_and_spread(r, m, baseline="leave_one_out"))
  for _ in range(150):
    group = _odd_one_out(rng)
    odd = int(np.argmin([np.ptp(np.delete(group, i)) for i in range(len(group))]))
    if noise:
      group = np.where(rng.random(len(group)) < 0.5, np.nextafter(group, np.float32(1e9)), group)
    padded = np.full((1, 32), np.nan, np.float32)
    padded[0, : len(group)] = group
    mask = np.arange(32)[None, :] < len(group)
    got = estimate(jnp.asarray(padded), jnp.asarray(mask))
    assert spreads(jnp.asarray(padded), jnp.asarray(mask))[1][0, odd] == 0.0
    assert np.abs(got).max() <= 250, group  # no larger than the rewards' own range, 200.
    assert (got[0, len(group) :] == 0).all()


@pytest.mark.long
def test_equal_rewards_give_exactly_zero():
  rng = np.random.default_rng(2)
  values = np.concatenate([rng.uniform(-1e3, 1e3, 60), rng.uniform(0, 1, 60)]).astype(np.float32)
  options = {
    f"{baseline}, {scale}": {"baseline": baseline, "scale": scale}
    for baseline in ("group_mean", "leave_one_out")
    for scale in ("group_std", "none")
  }
  group = np.broadcast_to(values[:, None], (120, 7))
  for name, got in _several(advantages.group_relative, options)(group).items():
    np.testing.assert_array_equal(got, np.zeros((120, 7)), err_msg=name)


ALL = [name for name in estimators.ESTIMATORS if name != "gdpo"]
COMPARING = [name for name in ALL if name not in ("reinforce_pp", "remax")]


@functools.cache
def _compiled():
  """Returns (rewards, mask) → {estimator: advantages}, compiled once for all tests of a shape."""
  made = {n: estimators.make(n, **({"pass_k": 2} if n == "pass_at_k" else {})) for n in ALL}

  def estimate(rewards, mask):
    lengths = 1 + 10 * jnp.abs(jnp.nan_to_num(rewards, posinf=0.0) % 1)
    greedy = jnp.full(rewards.shape[:1], 0.3)
    return {n: one(rewards, mask, lengths=lengths, greedy=greedy) for n, one in made.items()}

  return _jit(estimate)


def _estimates(rewards, mask):
  """Returns the advantages by each estimator; lengths follow from rewards, greedy ones are 0.3."""
  return jax.device_get(_compiled()(rewards, mask))


@pytest.mark.long
def test_shifting_all_rewards_changes_nothing(rewards):
  mask = np.ones_like(rewards, bool)
  got, expected = _estimates(rewards + 7, mask), _estimates(rewards, mask)
  for name in COMPARING:
    if name != "maxrl":
      np.testing.assert_allclose(got[name], expected[name], atol=1e-4, err_msg=name)


@pytest.mark.long
def test_order_within_and_among_groups_carries_no_meaning(rewards):
  mask = np.ones_like(rewards, bool)
  got, expected = _estimates(rewards[[2, 0, 1]][:, ::-1], mask), _estimates(rewards, mask)
  for name in ALL:
    mixed = expected[name][[2, 0, 1]][:, ::-1]
    np.testing.assert_allclose(got[name], mixed, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("value", [NAN, np.inf, 5.0], ids=["nan", "inf", "masked"])
def test_an_attempt_that_does_not_count_leaves_no_trace(value, rewards):
  padded = np.concatenate([rewards, np.full((3, 2), value, np.float32)], axis=1)
  mask = np.ones((3, 7), bool)
  if value == 5.0:
    mask[:, 5:] = False
  got, expected = _estimates(padded, mask), _estimates(rewards, mask[:, :5])
  for name in ALL:
    of, wanted = got[name], expected[name]
    np.testing.assert_allclose(of[:, :5], wanted, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(of[:, 5:], np.zeros((3, 2)), err_msg=name)


@pytest.mark.long
def test_an_only_attempt_and_an_empty_group_have_advantage_zero():
  group = np.full((3, 5), NAN, np.float32)
  group[0, 0], group[2] = 3.0, [1.0, 2.0, 4.0, 0.0, 3.0]
  counts = np.ones((3, 5), bool)
  counts[2] = False
  got = _estimates(group, counts)
  single = _estimates(_array([[3.0]]), np.ones((1, 1), bool))
  for name in COMPARING:
    np.testing.assert_array_equal(got[name], np.zeros((3, 5)), err_msg=name)
    np.testing.assert_array_equal(single[name], [[0.0]], err_msg=name)


@pytest.mark.long
def test_two_attempts_left_one_out_keep_their_difference():
  got = _relative(_array([[1, 0]]), baseline="leave_one_out")
  np.testing.assert_array_equal(got, [[1.0, -1.0]])


def _best_of_sets(rewards, k):
  """The advantages of pass@k by their definition: all sets of k attempts."""
  sets = list(itertools.combinations(range(len(rewards)), k))
  best = np.asarray([max(rewards[i] for i in chosen) for chosen in sets])
  with_one = [
    np.mean([b for chosen, b in zip(sets, best, strict=True) if i in chosen])
    for i in range(len(rewards))
  ]
  centred = np.asarray(with_one) - best.mean()
  return centred / (best.std() + 1e-6) if best.std() > 1e-12 else centred * 0


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_pass_at_k_equals_all_sets_enumerated(k):
  rng = np.random.default_rng(k)
  groups = [rng.integers(0, 2, 6), rng.integers(0, 3, 6), rng.normal(size=6), np.ones(6)]
  groups += [np.asarray([1, 0, 0, 0, 0, 0]), np.asarray([1, 1, 1, 1, 1, 0])]
  rows = np.full((len(groups) + 1, 8), NAN, np.float32)
  rows[:-1, [0, 1, 3, 4, 6, 7]] = np.stack(groups)  # the others were not scored.
  rows[-1, :2] = 1.0, 0.0
  got = np.asarray(_jit(functools.partial(advantages.pass_at_k, k=k))(rows))
  assert (got[:-1, [2, 5]] == 0).all()
  for row, group in zip(got[:-1, [0, 1, 3, 4, 6, 7]], groups, strict=True):
    np.testing.assert_allclose(row, _best_of_sets(group, k), rtol=2e-5, atol=2e-6)
  if k > 2:
    assert (got[-1] == 0).all()  # too few attempts.


@_jit
def _new_baselines(rewards, lengths, greedy):
  return {
    "pass_at_k": advantages.pass_at_k(rewards, k=2, eps=0.0),
    "maxrl": advantages.maxrl(rewards),
    "opo": advantages.opo(rewards, lengths),
    "remax": advantages.remax(rewards, greedy),
  }


@pytest.mark.long
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e38])
def test_pass_at_k_and_the_new_baselines_take_rewards_of_any_size(size):
  rewards, lengths = np.float32(size) * _array([[1.0, 0.0, 0.5]]), _array([[1.0, 2.0, 5.0]])
  got = jax.device_get(_new_baselines(rewards, lengths, _array([2 * size])))
  got |= {name: got[name] / size for name in ("opo", "remax")}
  expected = {
    "pass_at_k": [[2**-0.5, -(2**-1.5), -(2**-1.5)]],  # best of two: 1, 1 and 0.5.
    "maxrl": [[1.0, -1.0, 0.0]],
    "opo": [[1 - 3.5 / 8, -3.5 / 8, 0.5 - 3.5 / 8]],
    "remax": [[-1.0, -2.0, -1.5]],
  }
  for name, values in got.items():
    np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_maxrl_weighs_a_rare_success_by_its_rarity_and_is_silent_without_one():
  got = _jit(advantages.maxrl)(_array([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [-1, 1, -1, 0]]))
  expected = [[3.0, -1.0, -1.0, -1.0], [0.0] * 4, [0.0] * 4, [0.0] * 4]  # the last mean is below 0.
  np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_remax_learns_from_one_attempt_and_from_equal_ones():
  remax = _jit(advantages.remax)
  got = remax(_array([[1.0], [0.0]]), _array([0.0, 0.0]))
  np.testing.assert_array_equal(got, [[1.0], [0.0]])
  got = remax(_array([[1.0, 1.0], [1.0, 0.0]]), _array([0.0, NAN]))
  np.testing.assert_array_equal(got, [[1.0, 1.0], [0.0, 0.0]])  # without a baseline, nothing.


@pytest.mark.long
@pytest.mark.parametrize(
  "baseline, given, message",
  [
    ("length_weighted", {}, "needs lengths"),
    ("greedy", {}, "needs greedy"),
    ("greedy", {"greedy": [1.0]}, r"greedy must have the shape \(2,\), got \(1,\)"),
    ("length_weighted", {"lengths": [1.0, 2.0]}, r"lengths must have the shape"),
  ],
)
def test_what_a_baseline_needs_is_named(baseline, given, message):
  with pytest.raises(ValueError, match=message):
    advantages.group_relative([[1, 0], [0, 1]], baseline=baseline, **given)


@pytest.mark.long
def test_gdpo_matches_values_worked_by_hand():
  # a = [1,0], b = [0,4]: each normalises to ±1/sqrt(2); 2a + b = ±1/sqrt(2); whitened the same.
  components = _array([[[1, 0]], [[0, 4]]])
  got = _jit(functools.partial(advantages.gdpo, weights=(2.0, 1.0), eps=0.0))(components)
  np.testing.assert_allclose(got, [[0.5**0.5, -(0.5**0.5)]], rtol=1e-6)


@pytest.mark.long
def test_gdpo_lets_a_missing_component_drop_out_for_that_attempt_alone():
  components = _array([[[1, 0, 0.5, 0]], [[0, 1, NAN, 1]]])
  got = _jit(advantages.gdpo)(components)
  assert np.isfinite(got).all()
  a = advantages.grpo(_array([[1, 0, 0.5, 0]]))
  b = np.insert(_jit(advantages.grpo)(_array([[0, 1, 1]])), 2, 0, axis=1)
  total = np.asarray(a) + b
  expected = (total - total.mean()) / total.std(ddof=1)
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
  nothing = _jit(advantages.gdpo)(_array([[[1, 0, NAN]], [[0, 1, NAN]]]))
  assert nothing[0, 2] == 0.0


def test_gdpo_refuses_one_component_and_a_wrong_number_of_weights():
  with pytest.raises(ValueError, match="at least 2"):
    advantages.gdpo(jnp.ones((1, 2, 2)))
  with pytest.raises(ValueError, match="3 weights for 2"):
    advantages.gdpo(jnp.ones((2, 2, 2)), weights=(1.0, 1.0, 1.0))
  with pytest.raises(ValueError, match="components"):
    estimators.make("gdpo")(jnp.ones((1, 2)), jnp.ones((1, 2), bool))


def test_whitening_has_mean_zero_and_variance_one_over_tokens():
  x = np.random.default_rng(3).normal(3, 2, size=(4, 6)).astype(np.float32)
  mask = np.random.default_rng(4).random((4, 6)) < 0.7
  white = np.asarray(_jit(advantages.whiten)(np.where(mask, x, np.nan), mask))
  kept = white[mask]
  np.testing.assert_allclose([kept.mean(), kept.var()], [0.0, 1.0], atol=1e-5)
  assert (white[~mask] == 0).all()


def test_whitening_by_counts_equals_whitening_the_tokens_themselves():
  per_attempt = _array([[1.0, -2.0, 0.5]])
  counts = _array([[3, 1, 2]])
  tokens = np.repeat(per_attempt, [3, 1, 2], axis=1)
  white = np.asarray(_jit(advantages.whiten)(tokens, np.ones_like(tokens, bool)))
  expected = white[0, [0, 3, 4]]
  got = _jit(functools.partial(advantages.whiten, counts=counts))(
    per_attempt, np.ones((1, 3), bool)
  )
  np.testing.assert_allclose(got[0], expected, rtol=1e-6)


@pytest.mark.parametrize("any_token", [True, False])
def test_whitening_equal_or_no_tokens_gives_exact_zeros(any_token):
  x = np.full((2, 3), 0.15, np.float32)
  got = _jit(functools.partial(advantages.whiten, floor=0.0))(x, np.full((2, 3), any_token))
  np.testing.assert_array_equal(got, np.zeros((2, 3)))


def test_kl_in_reward_is_taken_off_each_token():
  # d = log 2 everywhere: k1 = log 2.
  old, ref = np.log(_array([[0.5, 0.5]])), np.log(_array([[0.25, NAN]]))
  subtract = _jit(functools.partial(advantages.subtract_kl, kl_coef=0.5, estimator="k1"))
  got = subtract(_array([[1.0, NAN]]), old, ref, np.asarray([[True, False]]))
  np.testing.assert_allclose(got, [[1 - 0.5 * np.log(2), 0.0]], rtol=1e-6)


@pytest.mark.long
def test_clipping_is_the_last_step():
  made = estimators.make("grpo", clip_low=-0.4, clip_high=1.0, eps=0.0)
  got = made(jnp.asarray([[1.0, 0, 0, 0]]), jnp.ones((1, 4), bool))
  np.testing.assert_allclose(got, [[1.0, -0.4, -0.4, -0.4]])
  assert estimators.make("reinforce_pp", clip_high=0.1).needs_whitening


@pytest.mark.parametrize(
  "estimator, options, message",
  [
    ("gpro", {}, "did you mean 'grpo'"),
    ("grpo", {"clip_low": float("nan")}, "clip_low must be a finite number"),
    ("gdpo", {"weights": []}, "weights must be a list that is not empty"),
    ("gdpo", {"weights": (float("nan"), 1.0)}, "weights must be a list"),
    ("gdpo", {"weights": "12"}, "weights must be a list"),
    ("gdpo", {"weights": ("1", "2")}, "weights must be a list"),
    ("gdpo", {"weights": (0.0, 0.0)}, "must not all be 0"),
    ("grpo", {"eps": float("inf")}, "eps must be a finite number"),
    ("grpo", {"eps": "1e-6"}, "eps must be a finite number"),
    ("grpo", {"ddof": True}, "ddof must be an integer"),
    ("dr_grpo", {"eps": 1e-3}, "eps=0.001 would never be read"),
    ("rloo", {"ddof": 0}, "ddof=0 would never be read"),
    ("reinforce++", {}, "here it is 'reinforce_pp'"),
    ("grpo", {"basline": "none"}, "did you mean 'baseline'"),
    ("grpo", {"baseline": "leave_one"}, "leave_one_out"),
    ("grpo", {"scale": "std"}, "group_std"),
    ("grpo", {"weights": (1.0, 2.0)}, "components"),
    ("gdpo", {"scale": "none"}, "each component"),
    ("grpo", {"eps": -1.0}, "eps"),
    ("grpo", {"ddof": 3}, "ddof"),
    ("grpo", {"clip_low": 1.0, "clip_high": -1.0}, "clip_low"),
    ("max_rl", {}, "here it is 'maxrl'"),
    ("maxrl", {"eps": 1e-4}, "divides by the mean reward alone"),
    ("opo", {"ddof": 0}, "ddof=0 would never be read"),
    ("pass_at_k", {}, "needs pass_k"),
    ("pass_at_k", {"pass_k": 0}, "pass_k must be"),
    ("pass_at_k", {"pass_k": 2, "baseline": "none"}, "its own baseline"),
    ("pass_at_k", {"pass_k": 2, "scale": "batch_std"}, "'group_std' or 'none'"),
    ("pass_at_k", {"pass_k": 2, "ddof": 0}, "ddof=0 would never be read"),
    ("grpo", {"pass_k": 2}, "pass_k=2 is for 'pass_at_k'"),
    ("gdpo", {"baseline": "greedy"}, "within its group"),
    ("reinforce_pp", {"scale": "group_mean"}, "whitens over the batch"),
  ],
)
def test_estimators_refuse_what_makes_no_sense(estimator, options, message):
  with pytest.raises(ValueError, match=message):
    estimators.make(estimator, **options)


LARGEST = float(np.finfo(np.float32).max)
SIZES = [
  [1e20, -1e20, 0.0],
  [3e38, -3e38, 0.0, 1.0],
  [LARGEST, -LARGEST],
  [1e-30, 0.0, 0.0],
  [2e-37, 3e-37],
  [1e6, 1e6 + 1],
]
NAMES = {
  "grpo": {},
  "loo": {"baseline": "leave_one_out"},
  "rloo": {"baseline": "leave_one_out", "scale": "none"},
  "batch": {"scale": "batch_std"},
  "plain": {"baseline": "none"},
}


def _expected(rewards, *, baseline="group_mean", scale="group_std"):
  """By the definition, in the float64 of NumPy; held to what float32 can be."""
  r = np.asarray(rewards, np.float32).astype(np.float64)
  others = [np.delete(r, i) for i in range(r.size)]
  is_loo = baseline == "leave_one_out"
  centre = (
    [o.mean() for o in others] if is_loo else [0.0 if baseline == "none" else r.mean()] * r.size
  )
  sets = others if is_loo and scale == "group_std" else [r] * r.size
  spread = [s.std(ddof=1) if s.size > 1 else 0.0 for s in sets]
  result = []
  for value, b, s in zip(r, centre, spread, strict=True):
    result.append((value - b) / (s + 1e-6) if s > 0 and scale != "none" else value - b)
  return np.clip(result, -LARGEST, LARGEST)


@pytest.mark.long
def test_rewards_of_any_size_give_the_advantages_of_the_formula():
  rows = np.full((len(SIZES), 4), NAN, np.float32)
  for row, rewards in zip(rows, SIZES, strict=True):
    row[: len(rewards)] = rewards
  estimates = _several(advantages.group_relative, NAMES)
  for rewards, row in zip(SIZES, rows, strict=True):
    for name, estimate in estimates(row[None]).items():
      got = np.asarray(estimate)[0, : len(rewards)]
      expected = _expected(rewards, **NAMES[name])
      assert (got != 0).any(), (name, rewards)
      atol = 1e-6 * np.abs(expected).max()  # sums of large and small numbers cancel.
      np.testing.assert_allclose(got, expected, rtol=1e-5, atol=atol, err_msg=f"{name} {rewards}")
    assert scored_groups.differs(np.asarray(rewards, np.float32))


@pytest.mark.long
def test_whitening_and_gdpo_take_rewards_of_any_size():
  whiten = _jit(functools.partial(advantages.whiten, floor=0.0))
  estimate = _jit(functools.partial(advantages.gdpo, eps=0.0))
  for size in (1e20, 3e38, 1e-25):
    x = size * np.asarray([[1.0, -1.0, 0.5, 0.25]], np.float32)
    expected = (x / size - x.mean() / size) / (x / size).std()
    white = whiten(x, np.ones((1, 4), bool))
    np.testing.assert_allclose(white, expected, rtol=1e-5, err_msg=f"{size}")
    gdpo = np.asarray(estimate(np.stack([x, x[:, ::-1]])))
    assert np.isfinite(gdpo).all() and gdpo.std(ddof=1) == pytest.approx(1.0), size


@pytest.mark.long
def test_equal_rewards_have_no_signal_whatever_their_size():
  grpo, dr_grpo, rloo = map(_jit, (advantages.grpo, advantages.dr_grpo, advantages.rloo))
  for value in (0.1, 1e20, 3e38, 1e-30, 1e-42, -7.0):
    rewards = np.asarray([value, value, NAN, value], np.float32)
    assert not scored_groups.differs(rewards)
    np.testing.assert_array_equal(grpo(rewards), np.zeros(4))
  neighbours = np.nextafter(np.float32(0.3), np.float32([0.0, 1.0]))
  assert not scored_groups.differs(neighbours)
  for function in (grpo, dr_grpo, rloo):
    np.testing.assert_array_equal(function(neighbours), np.zeros(2))
  assert not scored_groups.differs(np.asarray([1e-42, 0.0], np.float32))  # as accelerators have it.


@pytest.mark.parametrize(
  "rewards",
  [
    [[1, 0, 0, 1]],
    [[True, False, False, True]],
    np.asarray([[1, 0, 0, 1]]),
    np.asarray([[1, 0, 0, 1]], np.float64),
    np.asarray([[True, False, False, True]]),
    jnp.asarray([[1, 0, 0, 1]], jnp.int8),
    [jnp.asarray([1.0, 0.0, 0.0, 1.0])],
    ((1.0, 0.0, 0.0, 1.0),),
  ],
)
def test_rewards_come_as_arrays_and_lists_of_any_number_type(rewards):
  expected = advantages.grpo(_array([[1.0, 0.0, 0.0, 1.0]]))
  for mask in (None, [[1, 1, 1, 1]], [[True] * 4], np.ones((1, 4)), jnp.ones((1, 4), jnp.int32)):
    np.testing.assert_allclose(advantages.grpo(rewards, mask), expected)
  assert advantages.rloo(rewards).shape == advantages.dr_grpo(rewards).shape == (1, 4)


@pytest.mark.long
def test_the_rewards_of_one_prompt_need_no_second_axis():
  for function in (advantages.grpo, advantages.dr_grpo, advantages.rloo):
    one = function([1, 0, 0, 1], [1, 1, 0, 1])
    np.testing.assert_array_equal(one, function([[1, 0, 0, 1]], [[1, 1, 0, 1]])[0])
    assert one.shape == (4,)
  gdpo = advantages.gdpo([[1, 0, 0], [0, 1, 0]])
  np.testing.assert_allclose(gdpo, advantages.gdpo([[[1, 0, 0]], [[0, 1, 0]]])[0])


@pytest.mark.parametrize(
  "rewards, mask, message",
  [
    (1.0, None, r"rewards must have the shape \[P, G\].*got \(\)"),
    (np.zeros((1, 2, 3)), None, r"got \(1, 2, 3\)"),
    ([[1.0, 2.0], [1.0]], None, "lists of one length"),
    ([["a", "b"]], None, "rewards must be an array of numbers"),
    ([[None, 1.0]], None, "rewards must be an array of numbers"),
    ([[1j, 1.0]], None, "rewards must be an array of numbers"),
    ([[1.0, 2.0]], [[True]], r"mask must have the shape \(1, 2\)"),
    ([[1.0, 2.0]], [[0.5, 1.0]], "mask must be booleans, or 0 and 1"),
    ([[1.0, 2.0]], [["x", "y"]], "mask must be an array of numbers"),
  ],
)
def test_what_is_not_an_array_of_rewards_is_refused_in_one_line(rewards, mask, message):
  with pytest.raises(ValueError, match=message) as caught:
    advantages.grpo(rewards, mask)
  assert "\n" not in str(caught.value)


@pytest.mark.long
def test_advantages_still_trace():
  rewards, mask = jnp.asarray([[1, 0, 0, 1], [0, 0, 0, 1]]), jnp.ones((2, 4))
  expected = advantages.grpo(rewards, mask)
  np.testing.assert_allclose(jax.jit(advantages.grpo)(rewards, mask), expected, rtol=1e-6)
  np.testing.assert_allclose(jax.vmap(advantages.grpo)(rewards, mask), expected, rtol=1e-6)
  slope = jax.grad(lambda r: (advantages.grpo(r) * jnp.arange(4.0)[None]).sum())
  assert jnp.isfinite(slope(rewards.astype(float))).all()
  assert jnp.isfinite(slope(jnp.ones((2, 4)))).all()
  low, high = jnp.float32(-0.5), jnp.float32(0.5)
  clip = jax.jit(lambda x, low, high: advantages.clip(x, low=low, high=high))
  np.testing.assert_array_equal(clip(expected, low, high), jnp.clip(expected, -0.5, 0.5))


def test_a_clip_of_reversed_bounds_is_refused():
  for low, high in ((2.0, -1.0), (NAN, 1.0), (0.0, NAN)):
    with pytest.raises(ValueError, match="low must not exceed high"):
      advantages.clip(jnp.ones(3), low=low, high=high)
