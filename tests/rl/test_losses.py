"""Policy losses, KL and sequence losses: worked numbers, closed-form gradients, invariances."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.rl import covariance_losses, dppo, kl, losses, sequence_losses


def _logprobs(seed, shape=(2, 6)):
  return jnp.asarray(-np.random.default_rng(seed).exponential(size=shape), jnp.float32)


def _advantages(seed=9, shape=(2, 6)):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _grad(function, x):
  return jax.jit(jax.grad(lambda y: function(y).sum()))(x)


MASK = jnp.asarray([[True] * 5 + [False], [True, False] * 3])
IDS = jnp.asarray([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]])


@pytest.mark.parametrize(
  "ratio, advantage, loss, slope",
  [
    (1.5, 1.0, -1.2, 0.0),
    (0.5, 1.0, -0.5, -0.5),
    (1.5, -1.0, 1.5, 1.5),
    (0.5, -1.0, 0.8, 0.0),
    (4.0, -1.0, 3.0, 0.0),
  ],
  ids=["up_clipped", "down_free", "up_free", "down_clipped", "dual_clipped"],
)
def test_clipped_surrogate_clips_only_what_would_overshoot(ratio, advantage, loss, slope):
  """The gradient in log πθ is -ρ Â, or 0 where the clip is active."""

  def of(policy):
    return losses.clipped_surrogate(
      policy, jnp.zeros((1,)), jnp.full((1,), advantage), dual_clip=3.0
    )

  policy = jnp.log(jnp.full((1,), ratio))
  np.testing.assert_allclose(of(policy), [loss], rtol=1e-6)
  np.testing.assert_allclose(_grad(of, policy), [slope], rtol=1e-6)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_on_a_bound_is_not_clipped(advantage):
  """With both clips 0 the on-policy ratio lies on both bounds: the gradient stays whole."""
  policy, sign = jnp.zeros((1,)), jnp.full((1,), advantage)
  grad = _grad(
    lambda p: losses.clipped_surrogate(p, policy, sign, clip_low=0.0, clip_high=0.0), policy
  )
  np.testing.assert_allclose(grad, -sign)


@pytest.mark.parametrize("loss", [losses.clipped_surrogate, losses.cispo, losses.sapo])
def test_on_policy_gradient_is_that_of_reinforce(loss):
  policy, advantages = _logprobs(0), _advantages()
  grad = _grad(lambda p: loss(p, policy, advantages), policy)
  np.testing.assert_allclose(grad, -advantages, rtol=1e-6)
  np.testing.assert_allclose(
    _grad(lambda p: losses.reinforce(p, advantages), policy), -advantages, rtol=1e-6
  )


def test_a_huge_log_ratio_gives_neither_infinite_losses_nor_nan_gradients():
  policy, old = jnp.asarray([-1.0, -500.0]), jnp.asarray([-500.0, -1.0])
  for advantages in (jnp.asarray([1.0, 1.0]), jnp.asarray([0.0, 0.0]), jnp.asarray([-1.0, -1.0])):
    loss, grad = jax.value_and_grad(
      lambda p, a=advantages: losses.clipped_surrogate(p, old, a).sum()
    )(policy)
    assert np.isfinite(loss) and np.isfinite(grad).all()


def test_cispo_keeps_the_gradient_of_clipped_tokens():
  # ρ = 8 is clipped to 1 + 4 = 5; TRL writes that bound as epsilon_high = 5.
  policy, old, advantages = jnp.log(jnp.asarray([0.8])), jnp.log(jnp.asarray([0.1])), jnp.ones(1)
  grad = _grad(lambda p: losses.cispo(p, old, advantages, clip_low=1.0, clip_high=4.0), policy)
  np.testing.assert_allclose(grad, [-5.0], rtol=1e-6)


def test_sapo_gradient_is_the_closed_form():
  policy, old, advantages = _logprobs(0), _logprobs(1), _advantages()
  ratio = np.exp(np.asarray(policy - old))
  tau = np.where(np.asarray(advantages) > 0, 1.0, 1.05)
  gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
  expected = -4 * gate * (1 - gate) * ratio * np.asarray(advantages)
  np.testing.assert_allclose(
    _grad(lambda p: losses.sapo(p, old, advantages), policy), expected, rtol=1e-4, atol=1e-6
  )


@pytest.mark.parametrize(
  "old, new, advantage, kept",
  [
    (0.5, 0.71, 1.0, False),  # rose by 0.21.
    (0.5, 0.69, 1.0, True),
    (0.5, 0.71, -1.0, True),
    (0.5, 0.29, -1.0, False),  # fell by 0.21.
    (0.5, 0.29, 1.0, True),
    (1e-3, 1e-1, 1.0, True),  # a ratio of 100, which PPO would clip.
    (0.99, 0.7, -1.0, False),
  ],
)
def test_dppo_keeps_tokens_by_how_far_their_probability_moved(old, new, advantage, kept):
  arrays = [jnp.asarray([x], jnp.float32) for x in (np.log(new), np.log(old), advantage)]
  assert dppo.within_tv(*arrays)[0] == kept
  grad = _grad(lambda p: dppo.dppo_tv(p, *arrays[1:]), arrays[0])
  np.testing.assert_allclose(grad, [-kept * new / old * advantage], rtol=1e-5)


def test_dppo_kl_keeps_tokens_by_the_binary_divergence():
  old, new = np.asarray([0.5, 0.5, 0.9, 0.9]), np.asarray([0.66, 0.65, 0.96, 0.99])
  divergence = old * np.log(old / new) + (1 - old) * np.log((1 - old) / (1 - new))
  np.testing.assert_array_equal(divergence > 0.05, [True, False, False, True])
  given = [jnp.asarray(np.log(x), jnp.float32) for x in (new, old)]
  kept = dppo.within_kl(*given, jnp.ones(4))
  np.testing.assert_array_equal(kept, divergence <= 0.05)
  assert dppo.within_kl(*given, -jnp.ones(4)).all()  # they rose: the loss pushes them back.
  # A token that became certain is not infinitely far from one that nearly was.
  certain = jnp.asarray([0.0]), jnp.log(jnp.asarray([1 - 1e-6]))
  assert dppo.within_kl(*certain, jnp.ones(1)).all()


def test_dppo_gradient_is_the_closed_form_below_and_above_the_cap():
  policy, old, advantages = _logprobs(0), _logprobs(1), _advantages()
  log_ratio = np.asarray(policy - old)
  for cap in (None, 1.5):
    loss = functools.partial(dppo.dppo_tv, ratio_cap=cap, kl_tau=0.1)
    keep = np.asarray(dppo.within_tv(policy, old, advantages))
    ratio = np.exp(log_ratio) if cap is None else np.minimum(np.exp(log_ratio), cap)
    assert (~keep).any() and (np.exp(log_ratio) > 1.5).any()
    expected = -1.0 * keep * ratio * advantages + 0.2 * log_ratio
    got = _grad(lambda p, loss=loss: loss(p, old, advantages), policy)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_covariance_losses_have_the_closed_form_gradients():
  policy, old, advantages = _logprobs(0), _logprobs(1), _advantages()
  selected = ODD(policy.shape)
  log_ratio = np.asarray(policy - old)
  plain = -np.exp(log_ratio) * advantages
  got = _grad(
    lambda p: covariance_losses.kl_cov(p, old, advantages, selected, kl_cov_coef=0.5), policy
  )
  np.testing.assert_allclose(got, plain + 0.5 * selected * np.sign(log_ratio), rtol=1e-5)
  at_rest = _grad(lambda p: covariance_losses.kl_cov(p, policy, advantages, selected), policy)
  np.testing.assert_allclose(at_rest, -advantages, rtol=1e-6)  # the first update of a batch.
  of_clipped = lambda p: losses.clipped_surrogate(p, old, advantages)
  got = _grad(lambda p: covariance_losses.clip_cov(p, old, advantages, selected), policy)
  np.testing.assert_array_equal(got, np.where(selected, 0, _grad(of_clipped, policy)))


def test_forced_on_policy_ratio_is_one_with_the_gradient_of_the_logprob():
  policy = _logprobs(0)
  np.testing.assert_array_equal(losses.on_policy_ratio(policy), np.ones((2, 6)))
  np.testing.assert_array_equal(_grad(losses.on_policy_ratio, policy), np.ones((2, 6)))


def _slow_sequence_ratios(policy, old):
  expected = np.zeros((2, 6))
  for b in range(2):
    for i in set(np.asarray(IDS[b]).tolist()):
      at = np.asarray(MASK[b] & (IDS[b] == i))
      expected[b, at] = np.exp(np.mean(np.asarray(policy - old)[b, at]))
  return expected


@pytest.mark.parametrize("form", [losses.sequence_ratio, losses.sequence_ratio_token_form])
def test_sequence_ratio_is_the_geometric_mean_within_each_sequence(form):
  policy, old = _logprobs(0), _logprobs(1)
  got = np.where(MASK, form(policy, old, MASK, IDS), 0)
  np.testing.assert_allclose(got, _slow_sequence_ratios(policy, old), rtol=1e-5)


@pytest.mark.long
def test_the_two_gradients_of_gspo_agree_on_equal_advantages_and_differ_on_others():
  policy, old = _logprobs(0), _logprobs(1)

  def gradient(token_form, advantages):
    def total(p):
      per_token = losses.gspo(
        p, old, advantages, MASK, IDS, clip_low=1.0, clip_high=1e3, token_form=token_form
      )
      return jnp.where(MASK, per_token, 0).sum()

    return jax.grad(total)(policy)

  per_sequence = jnp.asarray([[1.0, 1, 1, -2, -2, -2], [0.5, 0.5, 2, 2, -1, -1]])
  np.testing.assert_allclose(gradient(False, per_sequence), gradient(True, per_sequence), rtol=1e-5)
  # Advantages by token: the token form weighs each token by its own, the other by their sum.
  by_token = _advantages()
  ratios = _slow_sequence_ratios(policy, old)
  np.testing.assert_allclose(
    gradient(True, by_token), np.where(MASK, -ratios * by_token, 0), rtol=1e-5, atol=1e-7
  )
  assert np.abs(gradient(False, by_token) - gradient(True, by_token)).max() > 0.1


SEQUENCE_LOSSES = [losses.gspo, sequence_losses.gmpo, sequence_losses.luspo, sequence_losses.vespo]


@pytest.mark.parametrize("loss", SEQUENCE_LOSSES)
def test_packed_sequences_equal_one_sequence_a_row_whatever_masked_places_hold(loss):
  policy, old, advantages = _logprobs(0), _logprobs(1), _advantages()

  def total(p, o, a, mask, ids):
    return jnp.where(mask, loss(p, o, a, mask, ids), 0).sum()

  rows = jnp.ones((2, 6), bool)
  differentiate = jax.jit(jax.value_and_grad(total))
  expected, expected_grad = differentiate(policy, old, advantages, rows, None)
  junk = jnp.full((1, 4), jnp.nan)
  packed = [jnp.concatenate([x.reshape(1, -1), junk], axis=1) for x in (policy, old, advantages)]
  mask = jnp.arange(16)[None] < 12
  ids = jnp.asarray([[0] * 6 + [1] * 6 + [0] * 4])
  got, grad = jax.device_get(differentiate(*packed, mask, ids))
  np.testing.assert_allclose(got, expected, rtol=1e-5)
  np.testing.assert_allclose(grad[0, :12].reshape(2, 6), expected_grad, rtol=1e-4, atol=1e-6)
  np.testing.assert_array_equal(grad[0, 12:], np.zeros(4))


def test_kl_estimators_match_values_worked_by_hand():
  # πθ = 1/2, π_ref = 1/4: d = log 2.
  policy, ref = jnp.log(jnp.asarray([0.5])), jnp.log(jnp.asarray([0.25]))
  np.testing.assert_allclose(kl.kl_k1(policy, ref), [np.log(2)], rtol=1e-6)
  np.testing.assert_allclose(kl.kl_k2(policy, ref), [np.log(2) ** 2 / 2], rtol=1e-6)
  np.testing.assert_allclose(kl.kl_k3(policy, ref), [0.5 - 1 + np.log(2)], rtol=1e-5)


def test_k3_is_nonnegative_and_zero_at_equality():
  policy, ref = _logprobs(2), _logprobs(3)
  assert (losses.kl_k3(policy, ref) > 0).all()
  np.testing.assert_array_equal(losses.kl_k3(policy, policy), np.zeros((2, 6)))


GRADIENTS = {  # of d, by estimator: without a weight, and with the score-function weight.
  "k1": (lambda d: np.ones_like(d), lambda d: d + 1),
  "k2": (lambda d: d, lambda d: d**2 / 2 + d),
  "k3": (lambda d: 1 - np.exp(-d), lambda d: d),
}


@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "score"])
@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
def test_kl_gradients_are_the_documented_ones(estimator, is_weighted):
  policy, ref = _logprobs(2), _logprobs(3)
  grad = _grad(
    lambda p: kl.kl_penalty(p, ref, p if is_weighted else None, estimator=estimator), policy
  )
  expected = GRADIENTS[estimator][is_weighted](np.asarray(policy - ref))
  np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("estimator, is_weighted", [("k1", True), ("k2", False), ("k3", True)])
def test_mean_gradient_over_the_policy_is_the_gradient_of_the_divergence(estimator, is_weighted):
  """Exact over a vocabulary of 5: Σₐ πθ(a) ∇ℓ(a) = ∇KL(πθ ‖ π_ref)."""
  logits, ref = _advantages(0, (5,)), jax.nn.log_softmax(_advantages(1, (5,)))

  def divergence(z):
    policy = jax.nn.log_softmax(z)
    return (jnp.exp(policy) * (policy - ref)).sum()

  def surrogate(z):
    policy = jax.nn.log_softmax(z)
    penalty = kl.kl_penalty(policy, ref, policy if is_weighted else None, estimator=estimator)
    return (jax.lax.stop_gradient(jnp.exp(policy)) * penalty).sum()

  np.testing.assert_allclose(
    jax.grad(surrogate)(logits), jax.grad(divergence)(logits), rtol=1e-4, atol=1e-6
  )


def test_on_policy_approximation_weighs_by_the_ratio_to_the_engine():
  policy, ref, behavior = _logprobs(0), _logprobs(1), _logprobs(2)
  got = kl.kl_penalty(policy, ref, behavior, estimator="k3")
  expected = np.exp(np.asarray(policy - behavior)) * np.asarray(kl.kl_k3(policy, ref))
  np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_kl_clamps_hold_values_and_stop_gradients():
  policy, ref = jnp.asarray([-1.0, -1.0, -1.0]), jnp.asarray([-50.0, 4.0, -1.5])

  def penalty(p):
    return kl.kl_penalty(p, ref, p, estimator="k3", input_clamp=20.0, output_clamp=10.0)

  # d = 49 is held at 20 and k3 = 19 at 10; d = -5: k3 = e⁵ - 6 at 10; d = 0.5 is free.
  np.testing.assert_allclose(penalty(policy), [10.0, 10.0, np.exp(-0.5) - 0.5], rtol=1e-5)
  np.testing.assert_allclose(_grad(penalty, policy), [0.0, 0.0, 0.5], rtol=1e-5)


def test_an_input_clamp_stops_the_gradient_of_the_weight_too():
  policy, ref = jnp.asarray([-1.0]), jnp.asarray([-4.0])
  grad = _grad(lambda p: kl.kl_penalty(p, ref, p, estimator="k3", input_clamp=2.0), policy)
  np.testing.assert_array_equal(grad, [0.0])


@pytest.mark.long
def test_a_weight_that_is_not_finite_counts_as_zero_without_a_nan_gradient():
  policy, ref, behavior = jnp.asarray([-1.0]), jnp.asarray([-1.5]), jnp.asarray([-500.0])
  value, grad = jax.value_and_grad(
    lambda p: kl.kl_penalty(p, ref, behavior, estimator="k3", input_clamp=20.0).sum()
  )(policy)
  assert value == 0.0 and grad[0] == 0.0


def test_an_unknown_kl_estimator_is_refused():
  with pytest.raises(ValueError, match="k4"):
    kl.kl_penalty(jnp.zeros(1), jnp.zeros(1), estimator="k4")


def test_entropy_bonus_rewards_entropy():
  np.testing.assert_array_equal(losses.entropy_bonus(jnp.asarray([0.5, 2.0])), [-0.5, -2.0])


FAR = [0.0, 1.0, -1.0, 25.0, -25.0, 87.0, -89.0, 100.0, -100.0, -300.0, 1e4, -1e4, 1e38, -1e38]
FAR += [math.inf, -math.inf]


@pytest.mark.parametrize("sampled_from", [None, "policy", "old"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("clamps", [(None, 10.0), (20.0, 10.0)])
def test_a_clamped_kl_has_no_gradient_whatever_the_log_ratio(clamps, estimator, sampled_from):
  """log πθ is held at 0 and the reference moves away, so that only the difference is large."""
  input_clamp, output_clamp = clamps
  ref = -jnp.asarray(FAR, jnp.float32)
  policy = jnp.zeros(len(FAR))
  old = {"policy": policy, "old": jnp.full(len(FAR), -0.5), None: None}[sampled_from]
  penalty = lambda p: kl.kl_penalty(
    p, ref, old, estimator=estimator, input_clamp=input_clamp, output_clamp=output_clamp
  )
  values, slopes = penalty(policy), jax.grad(lambda p: penalty(p).sum())(policy)
  assert jnp.isfinite(values).all() and (jnp.abs(values) <= 10).all()
  assert jnp.isfinite(slopes).all()
  np.testing.assert_array_equal(slopes[jnp.abs(values) == 10], 0)
  assert slopes[1] != 0
  if estimator == "k3":
    np.testing.assert_array_equal(values[jnp.asarray(FAR) < -80], 10)


ODD = lambda shape: jnp.broadcast_to(jnp.arange(shape[-1]) % 2 == 1, shape)
TERMS = {
  "dppo_tv": lambda p, old, a, mask: dppo.dppo_tv(p, old, a, kl_tau=0.1),
  "dppo_kl": lambda p, old, a, mask: dppo.dppo_kl(p, old, a, kl_tau=0.1),
  "dppo_capped": lambda p, old, a, mask: dppo.dppo_tv(p, old, a, ratio_cap=3.0),
  "clip_cov": lambda p, old, a, mask: covariance_losses.clip_cov(p, old, a, ODD(p.shape)),
  "kl_cov": lambda p, old, a, mask: covariance_losses.kl_cov(p, old, a, ODD(p.shape)),
  "clipped": lambda p, old, a, mask: losses.clipped_surrogate(p, old, a, dual_clip=3.0),
  "gspo": losses.gspo,
  "gspo_token": functools.partial(losses.gspo, token_form=True),
  "cispo": lambda p, old, a, mask: losses.cispo(p, old, a),
  "sapo": lambda p, old, a, mask: losses.sapo(p, old, a),
  "gmpo": sequence_losses.gmpo,
  "luspo": sequence_losses.luspo,
  "vespo": sequence_losses.vespo,
}


@pytest.mark.parametrize("name", TERMS)
def test_no_policy_loss_has_a_gradient_that_is_not_finite(name):
  """A row for each log-ratio and sign of the advantage; one of its three tokens is far off."""
  far = jnp.asarray([*FAR, *FAR], jnp.float32)[:, None]
  old = jnp.concatenate([jnp.zeros_like(far), -far, jnp.zeros_like(far)], axis=1) - 1
  signs = jnp.repeat(jnp.asarray([1.0, -1.0]), len(FAR))[:, None] * jnp.ones((1, 3))
  mask = jnp.ones(old.shape, bool)
  both = jax.jit(jax.value_and_grad(lambda p: TERMS[name](p, old, signs, mask).sum()))
  value, slope = both(jnp.full(old.shape, -1.0))
  assert jnp.isfinite(value) and jnp.isfinite(slope).all()
