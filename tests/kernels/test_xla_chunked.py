"""What is particular to the chunked form: the size of a chunk, and that nothing is [N, V]."""

import functools

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.linear_logprobs import core, linear_logprobs, xla_chunked


@pytest.mark.parametrize("chunk", [1, 64, 100, 301, 1000])
def test_chunk_size_changes_nothing(chunk):
  hidden, head, targets = conformance.random_case(6, 8, 301, dtype="float32")
  entry = core.entry(xla_chunked)

  def loss(hidden, head, chunk):
    outputs = entry(hidden, head, targets, return_entropy=True, vocab_chunk=chunk)
    return sum(x.sum() for x in outputs)

  got, expected = (
    jax.jit(jax.value_and_grad(functools.partial(loss, chunk=c), argnums=(0, 1)))(hidden, head)
    for c in (chunk, None)
  )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


@pytest.mark.parametrize("vocabulary", [97, 1009, 49152, 151936])
@pytest.mark.parametrize("tokens", [1, 500, 16384])
def test_chunk_is_a_part_of_the_vocabulary_only(tokens, vocabulary):
  assert 0 < xla_chunked.chunk_size(tokens, vocabulary) <= -(-vocabulary // 4) + 127


def test_no_buffer_of_tokens_by_vocabulary_is_compiled():
  hidden, head, targets = conformance.random_case(77, 16, 1009, dtype="float32")

  def hlo(implementation):
    f = lambda h, w: linear_logprobs(h, w, targets, implementation=implementation).sum()
    return jax.jit(jax.value_and_grad(f, argnums=(0, 1))).lower(hidden, head).compile().as_text()

  assert "[77,1009]" in hlo("reference")  # so the string would be seen.
  assert "[77,1009]" not in hlo("xla_chunked")
  assert "[1009,77]" not in hlo("xla_chunked")


@pytest.mark.parametrize(("head_layout", "vocab_axis"), [("vd", 0), ("dv", 1)])
def test_head_split_over_devices_by_the_compiler_gives_the_same(head_layout, vocab_axis):
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 4), ("rows", "vocab"))
  spec = [None, None]
  spec[vocab_axis] = "vocab"
  place = lambda x, *names: jax.device_put(
    x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*names))
  )
  hidden, head, targets = conformance.random_case(
    6, 8, 1004, dtype="float32", head_layout=head_layout
  )
  loss = lambda h, w, t: linear_logprobs(h, w, t, head_layout=head_layout).sum()
  f = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
  expected = f(hidden, head, targets)
  got = f(place(hidden, "rows"), place(head, *spec), place(targets, "rows"))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


def test_entropy_is_not_computed_unless_asked():
  hidden, head, targets = conformance.random_case(5, 8, 301, dtype="float32")

  def flops(return_entropy):
    f = lambda h, w: linear_logprobs(h, w, targets, return_entropy=return_entropy)
    return jax.jit(f).lower(hidden, head).compile().cost_analysis()["flops"]

  assert flops(False) < flops(True)


def test_gradient_of_the_head_is_written_in_its_own_dtype():
  hidden, head, targets = conformance.random_case(5, 8, 301, dtype="bfloat16")
  loss = lambda w: linear_logprobs(hidden.astype(jnp.float32), w, targets).sum()
  assert jax.eval_shape(jax.grad(loss), head).dtype == jnp.bfloat16
