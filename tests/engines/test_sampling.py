"""Sampling from given logits: against float64 definitions, and against expected frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.linear_logprobs import linear_logprobs, reference

from grpo_jax.engines import sampling


def probabilities_of(logits, temperature=1.0):
  scaled = np.asarray(logits, np.float64) / temperature
  weights = np.exp(scaled - scaled.max(-1, keepdims=True))
  return weights / weights.sum(-1, keepdims=True)


def kept_by_definition(p, top_k, top_p, min_p):
  """The plain definition for distinct probabilities: rank, cut, renormalise, cut, cut."""
  ranked = np.argsort(-p)
  ranked = ranked[: top_k or len(p)]
  within = p[ranked] / p[ranked].sum()
  if top_p < 1:
    before = np.cumsum(within) - within
    ranked = ranked[before < top_p]
  return {int(i) for i in ranked if p[i] >= min_p * p.max()}


def sample(logits, uniforms, temperature=1.0, **options):
  rows = len(uniforms)
  logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (rows, np.shape(logits)[-1]))
  temperature = jnp.full(rows, temperature, jnp.float32)
  drawn = sampling.sample(
    logits, jnp.asarray(uniforms, jnp.float32), temperature=temperature, **options
  )
  return tuple(np.asarray(x) for x in drawn)


def sample_in_one_pass(logits, uniforms, temperature=1.0, **options):
  rows = len(uniforms)
  logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (rows, np.shape(logits)[-1]))
  given = logits, jnp.asarray(uniforms, jnp.float32)
  temperature = jnp.full(rows, temperature, jnp.float32)
  drawn = sampling.sample_in_one_pass(*given, temperature=temperature, **options)
  return tuple(np.asarray(x) for x in drawn)


def filters(rows, top_k=0, top_p=1.0, min_p=0.0):
  full = lambda value, dtype: jnp.full(rows, value, dtype)
  return full(top_k, jnp.int32), full(top_p, jnp.float32), full(min_p, jnp.float32)


@pytest.mark.parametrize("draw", [sample, sample_in_one_pass])
@pytest.mark.parametrize("vocabulary", [1, 7, 256, 257, 1000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_sample_inverts_the_cumulative_distribution_of_float64(draw, vocabulary, temperature):
  rng = np.random.default_rng(vocabulary)
  logits = rng.normal(size=vocabulary).astype(np.float32) * 3
  uniforms = rng.random(500).astype(np.float32)
  p = probabilities_of(logits, temperature)
  ends = np.cumsum(p)
  tokens, logprobs = draw(logits, uniforms, temperature)
  low, high = ends[tokens] - p[tokens], ends[tokens]
  assert (low - 1e-6 <= uniforms).all() and (uniforms <= high + 1e-6).all()
  np.testing.assert_allclose(logprobs, np.log(p[tokens]), atol=2e-5)


@pytest.mark.long
def test_rows_are_sampled_each_from_its_own_logits_at_its_own_temperature():
  rng = np.random.default_rng(8)
  logits = rng.normal(size=(40, 300)).astype(np.float32) * np.linspace(0.1, 4, 40)[:, None]
  logits = logits.astype(np.float32)
  uniforms = rng.random(40).astype(np.float32)
  temperature = rng.uniform(0.2, 2, 40).astype(np.float32)
  tokens, logprobs = sampling.sample(
    jnp.asarray(logits), jnp.asarray(uniforms), temperature=jnp.asarray(temperature)
  )
  p = probabilities_of(logits, temperature[:, None])
  assert np.asarray(tokens).tolist() == (np.cumsum(p, axis=1) <= uniforms[:, None]).sum(1).tolist()
  wanted = np.log(p[np.arange(40), np.asarray(tokens)])
  np.testing.assert_allclose(np.asarray(logprobs), wanted, atol=2e-5)


@pytest.mark.long
def test_sample_follows_the_distribution_by_chi_square():
  logits = np.random.default_rng(3).normal(size=40).astype(np.float32) * 1.5
  count = 20_000
  seeds = jnp.stack([jnp.zeros(count, jnp.uint32), jnp.arange(count, dtype=jnp.uint32)], axis=1)
  uniforms = sampling.uniforms(seeds, jnp.zeros(count, jnp.int32))
  tokens, _ = sample(logits, uniforms)
  expected = probabilities_of(logits) * count
  observed = np.bincount(tokens, minlength=40)
  often = expected >= 5
  statistic = ((observed - expected)[often] ** 2 / expected[often]).sum()
  assert statistic < 73  # the 99.9% quantile at 40 degrees of freedom is 73.4.


def test_uniforms_of_the_indices_of_one_seed_are_uniform_and_differ_between_seeds():
  indices = jnp.arange(4000)
  of_seed = lambda high, low: np.asarray(
    sampling.uniforms(jnp.broadcast_to(jnp.asarray([high, low], jnp.uint32), (4000, 2)), indices)
  )
  one, two, three = of_seed(0, 1), of_seed(0, 2), of_seed(1, 1)
  observed = np.histogram(one, bins=20, range=(0, 1))[0]
  assert ((observed - 200) ** 2 / 200).sum() < 43.8  # 99.9% at 19 degrees of freedom.
  for other in (two, three):
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.06  # 3.8 standard errors.


@pytest.mark.long
@pytest.mark.parametrize("draw", [sample, sample_in_one_pass])
@pytest.mark.parametrize("edge", [0.0, float(np.nextafter(np.float32(1), np.float32(0)))])
def test_sample_never_draws_a_token_of_probability_zero(draw, edge):
  logits = np.full(600, -np.inf, np.float32)
  logits[[3, 300, 511]] = [0.0, -1.0, 0.5]
  tokens, _ = draw(logits, [edge] * 2)
  assert tokens[0] == (3 if edge == 0 else 511)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("report_truncated", [False, True])
def test_one_pass_draws_the_same_tokens_with_the_same_logprobs(temperature, report_truncated):
  rng = np.random.default_rng(5)
  # The highest logits are ties in two blocks; logits this large lose bits to any other shift.
  logits = (200 + 4 * rng.normal(size=(64, 700))).astype(np.float32)
  logits[:, [400, 100, 600]] = 220.0
  given = jnp.asarray(logits), jnp.asarray(rng.random(64), jnp.float32)
  settings = {"temperature": jnp.full(64, temperature), "report_truncated": report_truncated}
  for num_valid in (None, 650, 700):
    tokens, logprobs = sampling.sample(*given, num_valid=num_valid, **settings)
    found, logprobs_found = sampling.sample_in_one_pass(*given, num_valid=num_valid, **settings)
    assert found.tolist() == tokens.tolist() and found.dtype == tokens.dtype
    np.testing.assert_allclose(logprobs_found, logprobs, rtol=0, atol=3e-6)
  if temperature == 0:
    assert set(found.tolist()) == {100}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_pass_over_logits_that_are_not_finite_has_no_finite_logprob(bad):
  logits = np.zeros(600, np.float32)
  logits[300] = bad
  for wrong in (logits, np.full(600, bad), np.full(600, -np.inf)):
    assert not np.isfinite(sample_in_one_pass(wrong, [0.1, 0.9])[1]).any()


@pytest.mark.long
def test_invert_cdf_lands_on_positive_weights_for_every_uniform():
  rng = np.random.default_rng(0)
  weights = rng.random((1, 768)).astype(np.float32) ** 20
  weights[weights < 0.5] = 0
  uniforms = np.linspace(0, 1, 3000, endpoint=False, dtype=np.float32)
  tokens = sampling.invert_cdf(
    jnp.repeat(jnp.asarray(weights), 3000, axis=0), jnp.asarray(uniforms)
  )
  tokens = np.asarray(tokens)
  assert (weights[0, tokens] > 0).all()
  assert set(tokens) == set(np.nonzero(weights[0])[0])
  assert (np.diff(tokens) >= 0).all()


@pytest.mark.parametrize("top_k", [0, 1, 5, 50, 1000])
@pytest.mark.parametrize(("top_p", "min_p"), [(1.0, 0.0), (0.5, 0.0), (0.9, 0.02), (1.0, 0.1)])
def test_keep_equals_the_plain_definition(top_k, top_p, min_p):
  rng = np.random.default_rng(top_k + 7)
  logits = rng.normal(size=(6, 300)).astype(np.float32) * 2
  weights = jnp.exp(jnp.asarray(logits) - jnp.max(jnp.asarray(logits), axis=1, keepdims=True))
  kept = np.asarray(sampling.keep(weights, *filters(6, top_k, top_p, min_p)))
  for row in range(6):
    p = probabilities_of(logits[row])
    assert set(np.nonzero(kept[row])[0]) == kept_by_definition(p, top_k, top_p, min_p)


@pytest.mark.long
def test_keep_keeps_all_that_are_as_likely_as_the_last_kept():
  weights = jnp.asarray([[1.0, 0.5, 0.5, 0.5, 0.25]])
  assert np.asarray(sampling.keep(weights, *filters(1, top_k=2))).tolist() == [[1, 1, 1, 1, 0]]
  # 1 / 2.75 = 0.36 < 0.5, so one of the three equals is needed, and all are kept.
  assert np.asarray(sampling.keep(weights, *filters(1, top_p=0.5))).tolist() == [[1, 1, 1, 1, 0]]


@pytest.mark.long
def test_sample_draws_only_kept_tokens_and_all_of_them():
  logits = np.random.default_rng(5).normal(size=300).astype(np.float32)
  uniforms = np.linspace(0, 1, 4000, endpoint=False, dtype=np.float32)
  tokens, _ = sample(logits, uniforms, filters=filters(4000, top_k=20, top_p=0.8))
  assert set(tokens.tolist()) == kept_by_definition(probabilities_of(logits), 20, 0.8, 0.0)


@pytest.mark.long
def test_logprobs_are_of_the_whole_vocabulary_unless_truncated_ones_are_asked_for():
  logits = np.log(np.asarray([0.5, 0.3, 0.15, 0.05], np.float32))
  options = {"filters": filters(1, top_k=2)}
  token, whole = sample(logits, [0.0], **options)
  _, truncated = sample(logits, [0.0], report_truncated=True, **options)
  assert token[0] == 0
  np.testing.assert_allclose([whole[0], truncated[0]], np.log([0.5, 0.5 / 0.8]), atol=1e-6)


@pytest.mark.long
def test_temperature_zero_takes_the_first_most_likely_token_with_its_logprob_at_temperature_one():
  logits = np.zeros(700, np.float32)
  logits[[400, 650]] = 2.0
  tokens, logprobs = sample(logits, [0.0, 0.99], temperature=0.0)
  assert tokens.tolist() == [400, 400]
  np.testing.assert_allclose(logprobs, np.log(probabilities_of(logits)[400]), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("draw", [sample, sample_in_one_pass])
def test_padding_of_the_vocabulary_is_never_sampled_but_stays_in_the_normaliser(draw):
  logits = np.asarray([0.0, 0.0, 1.0, 5.0], np.float32)
  uniforms = np.linspace(0, 1, 100, endpoint=False)
  tokens, logprobs = draw(logits, uniforms, num_valid=3)
  assert set(tokens.tolist()) == {0, 1, 2}
  np.testing.assert_allclose(logprobs, np.log(probabilities_of(logits))[tokens], atol=1e-5)
  assert draw(logits, [0.5], temperature=0.0, num_valid=3)[0][0] == 2


def test_sample_without_filters_compiles_no_sort_and_no_bisection():
  shapes = jnp.zeros((4, 512)), jnp.zeros(4)
  draw = lambda logits, u: sampling.sample(logits, u, temperature=jnp.ones(4))
  text = jax.jit(draw).lower(*shapes).as_text()
  assert "stablehlo.sort" not in text and "stablehlo.while" not in text


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_logprobs_are_those_of_the_fused_head_for_the_same_hidden_states(dtype, temperature):
  # The trainer's and the scorer's path; only the order of the sum over the vocabulary differs.
  rng = np.random.default_rng(0)
  hidden = jnp.asarray(rng.standard_normal((50, 32)), dtype)
  head = jnp.asarray(rng.standard_normal((777, 32)), dtype)
  tokens, logprobs = sampling.sample(
    reference.dot(hidden, head, head_layout="vd"),
    jnp.asarray(rng.random(50), jnp.float32),
    temperature=jnp.full(50, temperature, jnp.float32),
  )
  wanted = linear_logprobs(hidden, head, tokens, temperature=temperature)
  assert np.abs(wanted).max() > 5
  np.testing.assert_allclose(logprobs, wanted, rtol=0, atol=1e-5)
