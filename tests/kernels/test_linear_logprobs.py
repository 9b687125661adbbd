"""One conformance suite for every implementation of linear_logprobs, against float64."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels import linear_logprobs as package
from grpo_kernels.linear_logprobs import linear_logprobs, xla_chunked

IMPLEMENTATIONS = sorted(package.IMPLEMENTATIONS)

# Absolute for values, relative in the Euclidean norm for gradients.
TOLERANCES = {
  "logprob": 2e-5,  # float32 rounding of logits of size 10 and of their sum.
  "entropy": 5e-5,  # the same, times log V.
  "gradient float32": 1e-5,
  "gradient bfloat16": 4e-3,  # ∂/∂logits is rounded to bf16 once: 2⁻⁹.
}


def oracle(hidden, head, targets, *, head_layout, temperature, g, g_entropy):
  """Returns logprobs, entropy, d_hidden and d_head in float64, by the closed forms.

  Each gradient comes with its size before cancellation, |S| |W| or |Sᵀ| |h|.
  """
  h, w = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
  w = w if head_layout == "vd" else w.T
  z = h @ w.T / temperature
  shifted = z - z.max(axis=-1, keepdims=True)
  logp = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
  p = np.exp(logp)
  entropy = -(p * logp).sum(axis=-1)
  onehot = np.eye(w.shape[0])[np.asarray(targets)]
  slope = g[:, None] * (onehot - p) - g_entropy[:, None] * p * (logp + entropy[:, None])
  slope /= temperature
  d_hidden = slope @ w, np.abs(slope) @ np.abs(w)
  d_head = slope.T @ h, np.abs(slope).T @ np.abs(h)
  chosen = np.take_along_axis(logp, np.asarray(targets)[:, None], axis=-1)[:, 0]
  if head_layout == "dv":
    d_head = tuple(x.T for x in d_head)
  return chosen, entropy, d_hidden, d_head


def case(n, d, v, *, dtype, head_layout="vd", scale=3.0, seed=0):
  """Returns random hidden [n d], head and targets; logits have a standard deviation of `scale`."""
  rng = np.random.default_rng(seed)
  hidden = rng.standard_normal((n, d)) * scale / np.sqrt(d)
  head = rng.standard_normal((v, d) if head_layout == "vd" else (d, v))
  targets = rng.integers(0, v, n).astype(np.int32)
  return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), jnp.asarray(targets)


def differentiate(implementation, hidden, head, targets, g, g_entropy, **settings):
  """Returns (logprobs, entropy, d_hidden, d_head) of one implementation, as float64."""

  @jax.jit
  def outputs_and_gradients(hidden, head, cotangents):
    f = lambda h, w: linear_logprobs(
      h, w, targets, return_entropy=True, implementation=implementation, **settings
    )
    outputs, pull = jax.vjp(f, hidden, head)
    return outputs, pull(cotangents)

  cotangents = jnp.asarray(g, jnp.float32), jnp.asarray(g_entropy, jnp.float32)
  outputs, gradients = outputs_and_gradients(hidden, head, cotangents)
  assert [x.dtype for x in gradients] == [hidden.dtype, head.dtype]
  return [np.asarray(x, np.float64) for x in (*outputs, *gradients)]


def assert_conforms(got, expected, gradient_tolerance, *, value_scale=1.0, cancels=False):
  logprobs, entropy, d_hidden, d_head = got
  np.testing.assert_allclose(
    logprobs, expected[0], rtol=0, atol=TOLERANCES["logprob"] * value_scale
  )
  np.testing.assert_allclose(entropy, expected[1], rtol=0, atol=TOLERANCES["entropy"] * value_scale)
  for mine, (exact, before_cancelling) in ((d_hidden, expected[2]), (d_head, expected[3])):
    size = np.linalg.norm(before_cancelling if cancels else exact)
    assert np.linalg.norm(mine - exact) <= gradient_tolerance * size + 1e-7


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
  ("n", "d", "v", "temperature", "head_layout"),
  [
    (5, 16, 1009, 0.3, "vd"),
    (7, 12, 1000, 1.7, "dv"),
    (33, 20, 5003, 1.0, "vd"),
    (33, 20, 4096, 0.3, "dv"),
    (9, 12, 4, 1.0, "dv"),
    (3, 8, 1, 1.7, "vd"),
  ],
)
def test_linear_logprobs_and_gradients_agree_with_float64(
  implementation, dtype, n, d, v, temperature, head_layout
):
  hidden, head, targets = case(n, d, v, dtype=dtype, head_layout=head_layout)
  rng = np.random.default_rng(1)
  g, g_entropy = rng.standard_normal(n), rng.standard_normal(n)
  settings = {"head_layout": head_layout, "temperature": temperature}
  got = differentiate(implementation, hidden, head, targets, g, g_entropy, **settings)
  expected = oracle(hidden, head, targets, g=g, g_entropy=g_entropy, **settings)
  assert_conforms(got, expected, TOLERANCES[f"gradient {dtype}"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
  "logits",
  [
    pytest.param(np.arange(-1000.0, 1001.0), id="up-to-1e3"),
    pytest.param(np.where(np.arange(700) % 2, 1000.0, 999.5), id="two-heights-at-1e3"),
    pytest.param(np.full(700, 250.0), id="all-equal"),
    pytest.param(np.where(np.arange(700) == 3, 1000.0, -1000.0), id="one-hot"),
  ],
)
def test_linear_logprobs_is_exact_for_extreme_logits(implementation, logits):
  # Integers and halves: every product and sum below is exact in float32, so
  # that only the softmax can err.
  head = np.stack([logits, np.zeros_like(logits)], axis=1).astype(np.float32)
  hidden = np.asarray([[1.0, 0.0], [-1.0, 0.0], [0.5, 1.0]], np.float32)
  targets = jnp.asarray([3, 0, len(logits) - 1], jnp.int32)
  ones = np.ones(3)
  settings = {"head_layout": "vd", "temperature": 1.0}
  got = differentiate(
    implementation, jnp.asarray(hidden), jnp.asarray(head), targets, ones, ones, **settings
  )
  expected = oracle(hidden, head, targets, g=ones, g_entropy=ones, **settings)
  # Logprobs reach 2000, of which float32 resolves 1.2e-4.
  size = max(1.0, np.abs(expected[0]).max() / 100)
  assert_conforms(got, expected, TOLERANCES["gradient float32"], value_scale=size, cancels=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_entropy_of_equal_logits_is_log_v(implementation):
  _, entropy = linear_logprobs(
    jnp.ones((2, 4)),
    jnp.ones((1013, 4)),
    jnp.zeros(2, jnp.int32),
    return_entropy=True,
    implementation=implementation,
  )
  np.testing.assert_allclose(entropy, np.log(1013), atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_probabilities_of_all_targets_sum_to_one(implementation):
  hidden, head, _ = case(1, 16, 1009, dtype="float32")
  every = jnp.arange(1009, dtype=jnp.int32)
  logprobs = linear_logprobs(
    jnp.repeat(hidden, 1009, axis=0), head, every, implementation=implementation
  )
  assert np.exp(np.asarray(logprobs, np.float64)).sum() == pytest.approx(1.0, abs=1e-5)
  assert (np.asarray(logprobs) <= 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("n", [0, 1])
def test_linear_logprobs_takes_no_token_and_one(implementation, n):
  hidden, head, targets = case(n, 8, 301, dtype="float32")
  g = np.ones(n)
  settings = {"head_layout": "vd", "temperature": 1.0}
  got = differentiate(implementation, hidden, head, targets, g, g, **settings)
  if n:
    expected = oracle(hidden, head, targets, g=g, g_entropy=g, **settings)
    assert_conforms(got, expected, TOLERANCES["gradient float32"])
  else:
    assert got[0].shape == got[1].shape == (0,)
    assert not got[3].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_targets_outside_the_vocabulary_give_nan_and_touch_no_other(implementation):
  hidden, head, targets = case(4, 8, 301, dtype="float32")
  wrong = targets.at[1:3].set(jnp.asarray([301, -1]))
  f = lambda t: np.asarray(linear_logprobs(hidden, head, t, implementation=implementation))
  assert np.isnan(f(wrong)[1:3]).all()
  np.testing.assert_array_equal(f(wrong)[[0, 3]], f(targets)[[0, 3]])


@pytest.mark.parametrize("implementation", sorted({*IMPLEMENTATIONS} - {"reference"}))
def test_float32_head_under_bf16_hidden_keeps_a_float32_gradient(implementation):
  hidden, head, targets = case(40, 8, 301, dtype="float32")
  mixed = jax.grad(
    lambda w: linear_logprobs(
      hidden.astype(jnp.bfloat16), w, targets, implementation=implementation
    ).sum()
  )(head)
  assert mixed.dtype == jnp.float32
  # Not merely a bf16 result stored wide.
  assert (mixed != mixed.astype(jnp.bfloat16).astype(jnp.float32)).mean() > 0.5


@pytest.mark.parametrize("chunk", [1, 64, 100, 301, 1000])
def test_chunk_size_changes_nothing(chunk):
  hidden, head, targets = case(6, 8, 301, dtype="float32")
  f = lambda c: (
    lambda h, w: sum(
      x.sum()
      for x in xla_chunked.linear_logprobs(h, w, targets, return_entropy=True, vocab_chunk=c)
    )
  )
  got = jax.jit(jax.value_and_grad(f(chunk), argnums=(0, 1)))(hidden, head)
  expected = jax.jit(jax.value_and_grad(f(None), argnums=(0, 1)))(hidden, head)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


@pytest.mark.parametrize("vocabulary", [97, 1009, 49152, 151936])
@pytest.mark.parametrize("tokens", [1, 500, 16384])
def test_chunk_size_is_a_part_of_the_vocabulary_only(tokens, vocabulary):
  assert 0 < xla_chunked.chunk_size(tokens, vocabulary) <= -(-vocabulary // 4) + 127


def test_no_buffer_of_tokens_by_vocabulary_is_compiled():
  hidden, head, targets = case(77, 16, 1009, dtype="float32")

  def hlo(implementation):
    f = lambda h, w: linear_logprobs(h, w, targets, implementation=implementation).sum()
    return jax.jit(jax.value_and_grad(f, argnums=(0, 1))).lower(hidden, head).compile().as_text()

  assert "[77,1009]" in hlo("reference")  # so the string would be seen.
  assert "[77,1009]" not in hlo("xla_chunked")
  assert "[1009,77]" not in hlo("xla_chunked")


@pytest.mark.parametrize(("head_layout", "vocab_axis"), [("vd", 0), ("dv", 1)])
def test_head_split_over_devices_gives_the_same(head_layout, vocab_axis):
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 4), ("rows", "vocab"))
  spec = [None, None]
  spec[vocab_axis] = "vocab"
  place = lambda x, *names: jax.device_put(
    x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*names))
  )
  hidden, head, targets = case(6, 8, 1004, dtype="float32", head_layout=head_layout)
  f = jax.jit(
    jax.value_and_grad(
      lambda h, w, t: linear_logprobs(h, w, t, head_layout=head_layout).sum(), argnums=(0, 1)
    )
  )
  expected = f(hidden, head, targets)
  got = f(place(hidden, "rows"), place(head, *spec), place(targets, "rows"))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


def test_entropy_is_not_computed_unless_asked():
  hidden, head, targets = case(5, 8, 301, dtype="float32")

  def flops(return_entropy):
    f = lambda h, w: linear_logprobs(h, w, targets, return_entropy=return_entropy)
    return jax.jit(f).lower(hidden, head).compile().cost_analysis()["flops"]

  assert flops(False) < flops(True)


def test_implementation_is_chosen_by_platform_and_logged_once(caplog):
  package.default_implementation.cache_clear()
  hidden, head, targets = case(2, 8, 31, dtype="float32")
  with caplog.at_level(logging.INFO, "grpo_kernels.linear_logprobs"):
    chosen = linear_logprobs(hidden, head, targets)
    linear_logprobs(hidden, head, targets)
  assert [r.getMessage() for r in caplog.records] == ["linear_logprobs on cpu: xla_chunked"]
  named = linear_logprobs(hidden, head, targets, implementation="xla_chunked")
  np.testing.assert_array_equal(chosen, named)


def test_named_implementation_that_cannot_run_raises_with_the_reason(monkeypatch):
  monkeypatch.setitem(package.IMPLEMENTATIONS, "of_tpu", (lambda *a: None, ("tpu",)))
  hidden, head, targets = case(2, 8, 31, dtype="float32")
  with pytest.raises(NotImplementedError, match="runs on tpu; this process computes on cpu"):
    linear_logprobs(hidden, head, targets, implementation="of_tpu")
  with pytest.raises(ValueError, match="no implementation 'palas'; there are .*xla_chunked"):
    linear_logprobs(hidden, head, targets, implementation="palas")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"head_layout": "vh"}, "'vd' or 'dv'"),
    ({"head_layout": "dv"}, "width 8.*width 31"),
    ({"temperature": 0.0}, "above 0"),
  ],
)
def test_linear_logprobs_refuses_what_makes_no_sense(change, message):
  hidden, head, targets = case(2, 8, 31, dtype="float32")
  with pytest.raises(ValueError, match=message):
    linear_logprobs(hidden, head, targets, **change)
