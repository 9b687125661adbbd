"""Logprobs under top-k, top-p and min-p: the plain definition, its gradient, meshes, chunks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.linear_logprobs import linear_logprobs, reference, truncated
from grpo_kernels.linear_logprobs.sharded import Partition
from grpo_kernels.truncation import Truncation

from grpo_jax.learn import sharding

TOKENS, WIDTH, VOCABULARY = 13, 8, 45
TEMPERATURE = 0.7
FILTERS = {
  "top_k": Truncation(top_k=7),
  "top_p": Truncation(top_p=0.8),
  "min_p": Truncation(min_p=0.05),
  "all": Truncation(top_k=9, top_p=0.9, min_p=0.02),
  "joint": Truncation(top_k=9, top_p=0.9, is_joint=True),
  "valid": Truncation(top_k=7, num_valid=31),
}


def inputs(layout="vd", seed=0):
  rng = np.random.default_rng(seed)
  hidden = jnp.asarray(rng.normal(size=(TOKENS, WIDTH)) * 0.6, jnp.float32)
  head = jnp.asarray(rng.normal(size=(VOCABULARY, WIDTH)), jnp.float32)
  # Some of them are likely and some are not, so some are outside.
  ranks = jnp.asarray([0, 1, 2, 8, 0, 1, 20, 0, 2, 12, 0, 1, 40])
  targets = jnp.argsort(-hidden @ head.T, axis=1)[jnp.arange(TOKENS), ranks]
  return hidden, head if layout == "vd" else head.T, targets.astype(jnp.int32)


def kept_by_definition(probabilities, t):
  """Returns the set of tokens that the filters keep; float64, sorting."""
  valid = probabilities[: t.num_valid]
  order = np.argsort(-valid)
  in_k = order[: t.top_k or None]
  counted = order if t.is_joint else in_k
  before = np.cumsum(valid[counted]) - valid[counted]
  in_p = counted[before < t.top_p * valid[counted].sum()]
  return {v for v in in_p if v in in_k and valid[v] >= t.min_p * valid.max()}


def by_definition(hidden, head, targets, t):
  """Returns logprobs, entropy, full logprobs and whether the filters leave the target out."""
  logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / TEMPERATURE
  found = []
  for row, target in zip(logits, np.asarray(targets), strict=True):
    p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    kept = kept_by_definition(p, t)
    among = p[sorted(kept | {int(target)})]
    q = among / among.sum()
    logprob = np.log(p[target] / among.sum())
    found.append((logprob, -(q * np.log(q)).sum(), np.log(p[target]), target not in kept))
  return [np.asarray(values) for values in zip(*found, strict=True)]


def scores(hidden, head, targets, t, **options):
  options = {"temperature": TEMPERATURE, "return_entropy": True} | options
  return truncated.linear_logprobs(hidden, head, targets, t, **options)


@pytest.mark.long
@pytest.mark.parametrize("name", FILTERS)
def test_scores_are_those_of_the_definition_whatever_is_computed_at_once(name):
  hidden, head, targets = inputs()
  if name == "valid":
    targets = targets % 31
  wanted = by_definition(hidden, head, targets, FILTERS[name])
  assert 2 < wanted[3].sum() < TOKENS - 2  # some targets are outside.
  for options in ({}, {"tokens_at_once": 4}):
    measure = functools.partial(scores, t=FILTERS[name], **options)
    found = jax.jit(measure)(hidden, head, targets)
    np.testing.assert_allclose(found.logprobs, wanted[0], atol=2e-6)
    np.testing.assert_allclose(np.asarray(found.entropy), wanted[1], atol=2e-6)
    np.testing.assert_allclose(found.full, wanted[2], atol=2e-6)
    np.testing.assert_array_equal(found.is_outside, wanted[3])


def plain(hidden, head, targets, kept, layout):
  """Returns the scores of given sets of tokens as one formula, for automatic differentiation."""
  logits = reference.dot(hidden, head, head_layout=layout) / TEMPERATURE
  among = jax.nn.log_softmax(jnp.where(kept, logits, -jnp.inf), axis=1)
  at = lambda table: jnp.take_along_axis(table, targets[:, None], axis=1)[:, 0]
  entropy = -jnp.sum(jnp.where(kept, jnp.exp(among) * jnp.where(kept, among, 0), 0), axis=1)
  return at(among), entropy, at(jax.nn.log_softmax(logits, axis=1))


@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_gradients_are_those_of_the_softmax_over_a_constant_set(layout):
  hidden, head, targets = inputs(layout)
  t = FILTERS["all"]
  logits = np.asarray(reference.dot(hidden, head, head_layout=layout), np.float64) / TEMPERATURE
  kept = np.zeros(logits.shape, bool)
  for row in range(TOKENS):
    p = np.exp(logits[row] - logits[row].max())
    kept[row, [*kept_by_definition(p / p.sum(), t), int(targets[row])]] = True
  weights = np.random.default_rng(1).normal(size=(3, TOKENS)).astype(np.float32)
  total = lambda found: sum(jnp.sum(w * x) for w, x in zip(weights, found, strict=True))

  def ours(hidden, head):
    found = scores(hidden, head, targets, t, head_layout=layout, tokens_at_once=5)
    return total((found.logprobs, found.entropy, found.full))

  found = jax.jit(jax.grad(ours, argnums=(0, 1)))(hidden, head)
  theirs = lambda h, w: total(plain(h, w, targets, jnp.asarray(kept), layout))
  for got, wanted in zip(
    found, jax.jit(jax.grad(theirs, argnums=(0, 1)))(hidden, head), strict=True
  ):
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.long
def test_filters_that_keep_all_give_the_full_softmax():
  hidden, head, targets = inputs()
  found = scores(hidden, head, targets, Truncation())
  logprobs, entropy = linear_logprobs(
    hidden, head, targets, temperature=TEMPERATURE, return_entropy=True
  )
  np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-6)
  np.testing.assert_allclose(found.full, logprobs, atol=1e-6)
  np.testing.assert_allclose(np.asarray(found.entropy), entropy, atol=1e-6)
  assert not found.is_outside.any()


@pytest.mark.long
def test_tokens_as_likely_as_the_last_one_are_kept_too():
  head = jnp.asarray([[3.0], [1.0], [1.0], [0.0]])
  found = scores(jnp.ones((3, 1)), head, jnp.asarray([0, 1, 2]), Truncation(top_k=2))
  assert not found.is_outside.any() and found.logprobs[1] == found.logprobs[2]


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "layout"), [((2, 1, 2), "vd"), ((1, 2, 2), "dv")])
def test_a_mesh_changes_no_score_and_no_gradient(sizes, layout):
  hidden, head, targets = inputs(layout)
  of_axes = dict(zip(sharding.AXES, sizes, strict=True))
  mesh = sharding.make_mesh(**of_axes, devices=jax.devices()[:4])
  partition = sharding.head_partition(mesh)
  assert isinstance(partition, Partition)
  weights = np.random.default_rng(1).normal(size=(3, TOKENS)).astype(np.float32)

  def total(hidden, head, partition):
    found = scores(
      hidden,
      head,
      targets,
      FILTERS["all"],
      head_layout=layout,
      partition=partition,
      tokens_at_once=3,
    )
    values = (found.logprobs, found.entropy, found.full)
    return sum(jnp.sum(w * x) for w, x in zip(weights, values, strict=True)), found

  differentiate = jax.jit(
    jax.grad(total, argnums=(0, 1), has_aux=True), static_argnames="partition"
  )
  (found, of_mesh), (wanted, alone) = (differentiate(hidden, head, p) for p in (partition, None))
  for got, want in zip([*found, *of_mesh], [*wanted, *alone], strict=True):
    assert np.isfinite(want).all()
    np.testing.assert_allclose(np.asarray(got, float), np.asarray(want, float), atol=1e-5)


@pytest.mark.slow
def test_bfloat16_states_give_gradients_in_their_dtypes():
  hidden, head, targets = inputs()
  low = hidden.astype(jnp.bfloat16)
  total = lambda h, w: scores(h, w, targets, FILTERS["all"]).logprobs.sum()
  of_hidden, of_head = jax.grad(total, argnums=(0, 1))(low, head)
  assert (of_hidden.dtype, of_head.dtype) == (jnp.bfloat16, jnp.float32)
  exact = jax.grad(total, argnums=1)(hidden, head)
  assert np.abs(of_head - exact).max() < 0.05 * np.abs(exact).max()


def test_logits_of_all_tokens_never_exist_at_once():
  tokens, vocabulary = 8192, 16384
  shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((tokens, WIDTH), (vocabulary, WIDTH))]
  targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

  def total(hidden, head, targets):
    return scores(hidden, head, targets, Truncation(top_p=0.9)).logprobs.sum()

  compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*shapes, targets).compile()
  memory: Any = compiled.memory_analysis()
  assert memory.temp_size_in_bytes < 4 * 4 * truncated.MAX_LOGITS < 4 * tokens * vocabulary
