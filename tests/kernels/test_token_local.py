"""One sweep gives loss, logprobs and gradients of two passes, with three large dots for four."""

import functools
import math
import re

import conformance
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.linear_logprobs import linear_logprobs, sharded, token_local
from grpo_kernels.linear_logprobs.token_local import linear_objective
from jax.sharding import Mesh


def clipped(logprobs, entropy, data, constants):
  """A token-local loss with everything: a ratio that is clipped, a weight, an entropy bonus."""
  ratio = jnp.exp(logprobs - data["old"])
  surrogate = jnp.minimum(
    ratio * data["advantages"], jnp.clip(ratio, 0.8, 1.2) * data["advantages"]
  )
  bonus = 0.0 if entropy is None else constants["bonus"] * entropy
  kept = jnp.where(data["mask"], surrogate + bonus, 0.0)
  return -jnp.sum(kept) / constants["tokens"]


def case(n, v, *, d=12, head_layout="vd", dtype="float32", seed=0):
  """Returns hidden, head and targets; per-token data whose ratios are clipped here and there."""
  inputs = conformance.random_case(n, d, v, dtype=dtype, head_layout=head_layout, seed=seed)
  rng = np.random.default_rng(seed)
  none = {"temperature": 1.0, "g": np.zeros(n), "g_entropy": np.zeros(n)}
  near = conformance.oracle(*inputs, head_layout=head_layout, **none).outcome.logprobs
  data = {
    "old": (near + 0.3 * rng.standard_normal(n)).astype(np.float32),
    "advantages": rng.standard_normal(n).astype(np.float32),
    "mask": rng.random(n) < 0.8,
  }
  return inputs, data, {"bonus": 0.3, "tokens": float(max(n, 1))}


def two_passes(objective, data, constants, **settings):
  """Returns the same loss by `linear_logprobs`, as a function of hidden, head and targets."""

  def f(hidden, head, targets):
    logprobs, entropy = linear_logprobs(hidden, head, targets, return_entropy=True, **settings)
    return objective(logprobs, entropy, data, constants), (logprobs, entropy)

  return f


def one_sweep(objective, data, constants, **settings):
  def f(hidden, head, targets):
    loss, logprobs, entropy = linear_objective(
      hidden, head, targets, objective, data, constants, return_entropy=True, **settings
    )
    return loss, (logprobs, entropy)

  return f


def differentiate(f, inputs):
  """Returns (loss, (logprobs, entropy)), (d_hidden, d_head)."""
  return jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(*inputs)


def assert_same(got, expected, tolerance):
  """Compares arrays relative to their largest entry; losses, which cancel, to 1."""
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert a.dtype == b.dtype
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.abs(b).max() > 0
    size = np.abs(b).max() if b.ndim else 1.0
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * size)


@pytest.mark.long
@pytest.mark.parametrize(
  ("n", "v", "temperature", "head_layout", "chunk", "dtype"),
  [
    (40, 301, 0.3, "vd", 8, "float32"),  # chunks that divide N,
    (41, 301, 1.0, "dv", 8, "float32"),  # that leave one token over,
    (41, 301, 1.0, "dv", 8, "bfloat16"),
    (13, 1009, 1.7, "vd", 5, "float32"),
    (13, 1009, 1.7, "vd", 5, "bfloat16"),
    (13, 300, 1.0, "dv", 50, "float32"),  # that hold more than all,
    (1, 97, 1.0, "vd", None, "float32"),
  ],
)
def test_loss_and_gradients_are_those_of_two_passes(n, v, temperature, head_layout, chunk, dtype):
  inputs, data, constants = case(n, v, head_layout=head_layout, dtype=dtype)
  data["mask"][0] = True
  settings = {"head_layout": head_layout, "temperature": temperature}
  got = differentiate(one_sweep(clipped, data, constants, token_chunk=chunk, **settings), inputs)
  expected = differentiate(two_passes(clipped, data, constants, **settings), inputs)
  # In bf16 both round S and the gradients once: equal but for ties that fall the other way.
  assert_same(got[0], expected[0], 2e-6)
  assert_same(got[1], expected[1], 5e-6 if dtype == "float32" else 8e-3)


def test_some_tokens_are_clipped_and_some_are_not():
  (hidden, head, targets), data, _ = case(40, 301)
  ratio = np.exp(np.asarray(jax.jit(linear_logprobs)(hidden, head, targets)) - data["old"])
  active = np.where(data["advantages"] > 0, ratio > 1.2, ratio < 0.8)
  assert 5 < active.sum() < 35  # the cases above see both.


@pytest.mark.parametrize("live", [1, 19, 24, 40])
def test_chunks_behind_the_last_live_token_are_not_computed(live):
  inputs, data, constants = case(40, 301)
  data["mask"][0] = True
  data["mask"] &= np.arange(40) < live
  expected = differentiate(one_sweep(clipped, data, constants, token_chunk=8), inputs)
  computed = -(-live // 8) * 8
  hidden = np.array(inputs[0])
  hidden[computed:] = np.nan
  poisoned = (hidden, *inputs[1:])
  f = one_sweep(clipped, data, constants, token_chunk=8, live=jnp.int32(live))
  (loss, of_tokens), gradients = differentiate(f, poisoned)
  assert_same((loss, gradients), (expected[0][0], expected[1]), 1e-6)
  for got, wanted in zip(of_tokens, expected[0][1], strict=True):
    np.testing.assert_allclose(got[:computed], wanted[:computed], rtol=1e-5)
    assert not got[computed:].any()


def test_live_tokens_are_not_counted_on_a_mesh():
  (hidden, head, targets), data, constants = case(8, 97)
  mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("data", "tensor"))
  split = sharded.Partition(mesh, vocab_axis=None, token_axes=("data",))
  with pytest.raises(ValueError, match="live"):
    linear_objective(
      hidden, head, targets, clipped, data, constants, partition=split, live=jnp.int32(3)
    )


@pytest.mark.long
def test_gradients_are_scaled_by_what_depends_on_the_loss():
  inputs, data, constants = case(21, 301)
  f = one_sweep(clipped, data, constants, token_chunk=8)
  thrice = lambda *a: (jnp.sin(3.0 * f(*a)[0]), None)
  (_, _), got = differentiate(thrice, inputs)
  (loss, _), plain = differentiate(f, inputs)
  scale = 3.0 * math.cos(3.0 * float(loss))
  scaled = jax.tree.map(lambda x: np.float32(scale) * np.asarray(x), plain)
  assert_same(got, scaled, 2e-6)


def test_logprobs_and_data_carry_no_gradient():
  (hidden, head, targets), data, constants = case(21, 301)

  def f(hidden, head, advantages):
    loss, logprobs, entropy = linear_objective(
      hidden, head, targets, clipped, {**data, "advantages": advantages}, constants,
      return_entropy=True,
    )  # fmt: skip
    return logprobs.sum() + entropy.sum() + 0.0 * loss

  for gradient in jax.jit(jax.grad(f, argnums=(0, 1, 2)))(hidden, head, data["advantages"]):
    assert not np.asarray(gradient).any()


@pytest.mark.long
def test_entropy_without_a_place_in_the_loss_costs_no_gradient():
  inputs, data, constants = case(21, 301)
  of_logprobs = lambda logprobs, _, *rest: clipped(logprobs, None, *rest)
  lean = one_sweep(of_logprobs, data, constants, differentiate_entropy=False)
  full = one_sweep(of_logprobs, data, constants)
  assert_same(differentiate(lean, inputs), differentiate(full, inputs), 1e-6)
  flops = lambda f: (
    jax.jit(jax.grad(lambda *a: f(*a)[0], argnums=(0, 1))).lower(*inputs).compile().cost_analysis()
  )
  assert flops(lean)["flops"] < flops(full)["flops"]


def test_without_entropy_the_objective_gets_none():
  (hidden, head, targets), data, constants = case(21, 301)
  seen = []

  def f(logprobs, entropy, data, constants):
    seen.append(entropy)
    return clipped(logprobs, entropy, data, constants)

  give = lambda hidden: linear_objective(hidden, head, targets, f, data, constants)
  _, _, entropy = jax.eval_shape(give, hidden)
  assert entropy is None
  assert seen and all(e is None for e in seen)


def test_loss_alone_computes_no_gradient():
  inputs, data, constants = case(40, 301)
  f = one_sweep(clipped, data, constants, token_chunk=8)
  expected, _ = differentiate(f, inputs)
  assert_same(jax.jit(f)(*inputs), expected, 1e-6)
  assert dot_operations(jax.make_jaxpr(f)(*inputs).jaxpr) == 2 * 40 * 12 * 301


def test_targets_outside_the_vocabulary_have_nan_and_no_gradient():
  (hidden, head, targets), data, constants = case(12, 301)
  wrong = np.array(targets)
  wrong[3], data["mask"][3] = 301, False
  f = jax.jit(
    jax.value_and_grad(
      one_sweep(clipped, data, constants, token_chunk=4), argnums=(0, 1), has_aux=True
    )
  )
  (loss, (logprobs, _)), (d_hidden, d_head) = jax.device_get(f(hidden, head, wrong))
  assert np.isnan(logprobs[3]) and np.isfinite(logprobs).sum() == 11
  assert np.isfinite(loss) and np.isfinite(d_hidden).all() and np.isfinite(d_head).all()
  (expected, _), gradients = jax.device_get(f(hidden, head, targets))
  np.testing.assert_array_equal(loss, expected)
  keep = np.arange(12) != 3
  np.testing.assert_array_equal(d_hidden[keep], gradients[0][keep])


@pytest.mark.parametrize("n", [0, 1])
def test_no_token_and_one(n):
  inputs, data, constants = case(n, 97)
  (loss, (logprobs, entropy)), (d_hidden, d_head) = differentiate(
    one_sweep(clipped, data, constants), inputs
  )
  assert logprobs.shape == entropy.shape == (n,)
  assert d_hidden.shape == (n, 12)
  assert bool(np.asarray(d_head).any()) == bool(n and data["mask"].any())
  assert np.isfinite(loss)


def dot_operations(jaxpr):
  """Counts the operations of all dots, those of a scan's body as often as it runs."""
  total = 0
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      ((contracted, _), _), lhs = eqn.params["dimension_numbers"], eqn.invars[0].aval
      width = math.prod(lhs.shape[axis] for axis in contracted)
      total += 2 * width * math.prod(eqn.outvars[0].aval.shape)
      continue
    times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    total += times * sum(
      dot_operations(inner) for inner in jax.extend.core.jaxprs_in_params(eqn.params)
    )
  return total


def test_one_sweep_needs_three_quarters_of_the_operations():
  n, d, v = 40, 12, 301
  inputs, data, constants = case(n, v)
  count = lambda f: dot_operations(
    jax.make_jaxpr(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(*inputs).jaxpr
  )
  assert count(two_passes(clipped, data, constants)) == 8 * n * d * v
  assert count(one_sweep(clipped, data, constants, token_chunk=8)) == 6 * n * d * v
  assert count(one_sweep(clipped, data, constants, token_chunk=7)) == 6 * n * d * v


@pytest.mark.long
def test_no_buffer_of_tokens_by_vocabulary_is_compiled():
  inputs, data, constants = case(77, 1009)

  def shapes(f):
    text = (
      jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))
      .lower(*inputs)
      .compile()
      .as_text()
    )
    found = {tuple(map(int, s.split(","))) for s in re.findall(r"\w\d+\[([\d,]+)\]", text)}
    return {tuple(sorted(shape)) for shape in found if 1009 in shape}

  materialised = two_passes(clipped, data, constants, implementation="reference")
  assert (77, 1009) in shapes(materialised)  # so it would be seen.
  for chunk in (None, 13):
    of_sweep = shapes(one_sweep(clipped, data, constants, token_chunk=chunk))
    largest = max(math.prod(shape) for shape in of_sweep)
    assert largest == (chunk or 39) * 1009  # one chunk; the head has 12 · 1009.


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("vocabulary", [97, 49152, 151936])
@pytest.mark.parametrize("tokens", [1, 500, 16384])
def test_chunks_are_a_small_part_of_the_tokens(tokens, vocabulary, platform):
  chunk = token_local.chunk_size(tokens, vocabulary, platform)
  least = token_local.MIN_TOKENS[platform]
  assert 0 < chunk <= -(-tokens // (4 if tokens >= 4 * least else 2))
  assert chunk * vocabulary <= max(token_local.MAX_LOGITS[platform], least * vocabulary)


@pytest.mark.long
@pytest.mark.parametrize(
  ("sizes", "v"),
  [
    ((8, 1), 301),
    ((2, 4), 301),  # the vocabulary is padded.
    ((4, 2), 304),
    ((1, 8), 5),  # three devices have no column.
  ],
  ids=str,
)
def test_a_mesh_changes_nothing(sizes, v):
  inputs, data, constants = case(16, v)
  mesh = Mesh(np.asarray(jax.devices()).reshape(sizes), ("rows", "vocab"))
  part = sharded.Partition(mesh, vocab_axis="vocab", token_axes=("rows",))
  got = differentiate(one_sweep(clipped, data, constants, token_chunk=3, partition=part), inputs)
  expected = differentiate(one_sweep(clipped, data, constants, token_chunk=3), inputs)
  assert_same(got, expected, 3e-6)
  alone = jax.jit(one_sweep(clipped, data, constants, partition=part))(*inputs)
  assert_same(alone, expected[0], 3e-6)


def test_tokens_that_do_not_divide_over_the_mesh_are_refused():
  inputs, data, constants = case(7, 31)
  mesh = Mesh(np.asarray(jax.devices()), ("rows",))
  part = sharded.Partition(mesh, token_axes=("rows",))
  with pytest.raises(ValueError, match="7 tokens cannot be split evenly over 8 parts"):
    one_sweep(clipped, data, constants, partition=part)(*inputs)
  with pytest.raises(ValueError, match="'vd' or 'dv'"):
    one_sweep(clipped, data, constants, head_layout="dd")(*inputs)


@pytest.mark.long
def test_same_bits_twice():
  inputs, data, constants = case(40, 301, dtype="bfloat16")
  f = functools.partial(differentiate, one_sweep(clipped, data, constants, token_chunk=16), inputs)
  jax.tree.map(np.testing.assert_array_equal, f(), f())
