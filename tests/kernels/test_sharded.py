"""The op over a mesh of eight devices is the op of one: values, both gradients, any N and V."""

import functools
import re

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.linear_logprobs import core, linear_logprobs, sharded, xla_chunked
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TOLERANCE = 1e-6  # relative to the largest entry; what another order of float32 sums may change.


@functools.cache
def partition(sizes):
  """Returns a partition over data, fsdp and tensor axes of these sizes."""
  devices = np.asarray(jax.devices()[: np.prod(sizes)]).reshape(sizes)
  mesh = Mesh(devices, ("data", "fsdp", "tensor"))
  vocab_axis = "tensor" if sizes[2] > 1 else None
  return sharded.Partition(mesh, vocab_axis=vocab_axis, token_axes=("data", "fsdp"))


def over(sizes, *, implementation=None, **settings):
  """Returns the op over a mesh, as a function of hidden, head and targets."""
  return functools.partial(
    sharded.linear_logprobs,
    partition=partition(sizes),
    implementation=implementation,
    return_entropy=True,
    **settings,
  )


def placed(sizes, hidden, head, targets, *, head_layout="vd"):
  """Puts the three where nothing has to move, if the axes divide them."""
  mesh = partition(sizes).mesh
  of_head = PartitionSpec(*("tensor" if axis == "v" else None for axis in head_layout))
  specs = PartitionSpec(("data", "fsdp")), of_head, PartitionSpec(("data", "fsdp"))
  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  return [put(x, spec) for x, spec in zip((hidden, head, targets), specs, strict=True)]


def with_gradients(op, hidden, head, targets, cotangents):
  """Returns (logprobs, entropy), (d_hidden, d_head)."""

  @jax.jit
  def f(hidden, head, targets, cotangents):
    outputs, pull = jax.vjp(lambda h, w: op(h, w, targets), hidden, head)
    return outputs, pull(cotangents)

  return f(hidden, head, targets, cotangents)


def assert_equal(got, expected, tolerance=TOLERANCE):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert a.dtype == b.dtype
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.abs(b).max() > 0
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def case(n, v, *, d=16, head_layout="vd", dtype="float32"):
  inputs = conformance.random_case(n, d, v, dtype=dtype, head_layout=head_layout, scale=1.0)
  g, g_entropy = conformance.cotangents(n)
  return inputs, tuple(jnp.asarray(x.astype(np.float32)) for x in (g, g_entropy))


@pytest.mark.long
@pytest.mark.parametrize(
  ("sizes", "head_layout", "n", "v"),
  [
    ((1, 1, 8), "vd", 16, 1024),  # both divide.
    ((1, 1, 8), "dv", 7, 1009),  # a prime V.
    ((1, 1, 8), "vd", 3, 5),  # three devices have no column.
    ((2, 1, 4), "vd", 7, 301),  # N is padded as well.
    ((2, 1, 4), "dv", 16, 1024),
    ((2, 2, 2), "vd", 16, 1009),
    ((2, 2, 2), "dv", 1, 5),  # three parts have no token.
    ((4, 2, 1), "vd", 7, 301),  # the vocabulary is whole.
  ],
)
def test_values_and_gradients_are_those_of_one_device(sizes, head_layout, n, v):
  inputs, cotangents = case(n, v, head_layout=head_layout)
  settings = {"head_layout": head_layout, "temperature": 0.7}
  one = functools.partial(linear_logprobs, return_entropy=True, **settings)
  expected = with_gradients(one, *inputs, cotangents)
  assert_equal(with_gradients(over(sizes, **settings), *inputs, cotangents), expected)


@pytest.mark.parametrize(
  ("sizes", "head_layout"), [((2, 1, 4), "vd"), ((2, 2, 2), "dv")], ids=["vd", "dv"]
)
def test_arrays_that_lie_split_give_the_same_and_stay_split(sizes, head_layout):
  inputs, cotangents = case(16, 1024, head_layout=head_layout)
  settings = {"head_layout": head_layout}
  one = functools.partial(linear_logprobs, return_entropy=True, **settings)
  expected = with_gradients(one, *inputs, cotangents)
  split = placed(sizes, *inputs, head_layout=head_layout)
  got = with_gradients(over(sizes, **settings), *split, cotangents)
  assert_equal(got, expected)
  d_hidden, d_head = got[1]
  assert d_head.sharding.is_equivalent_to(split[1].sharding, 2)
  assert d_hidden.sharding.is_equivalent_to(split[0].sharding, 2)


def test_a_part_without_a_token_or_column_gives_no_nan():
  inputs, cotangents = case(1, 3)
  got = with_gradients(over((4, 1, 2)), *inputs, cotangents)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))


@pytest.mark.long
def test_bfloat16_is_as_near_to_float64_as_on_one_device():
  (hidden, head, targets), (g, g_entropy) = case(16, 1009, dtype="bfloat16")
  op = over((2, 1, 4))
  operate = lambda h, w, t, *, return_entropy: op(h, w, t)
  got = conformance.differentiate(operate, hidden, head, targets, g, g_entropy)
  exact = conformance.oracle(
    hidden, head, targets, head_layout="vd", temperature=1.0, g=g, g_entropy=g_entropy
  )
  conformance.assert_conforms(got, exact, conformance.TOLERANCES["gradient bfloat16"])


# The interpreter of Hopper kernels simulates one device: the next test does without a mesh.
@pytest.mark.long
@pytest.mark.parametrize("name", conformance.parametrised("xla_chunked", "pallas_tpu"))
def test_every_implementation_runs_inside_a_part(name):
  # 299 columns over two devices: 150 and 149.
  (hidden, head, targets), cotangents = case(8, 299, d=64, dtype="bfloat16")
  over_two = core.entry(sharded.Sharded(conformance.module(name), partition((1, 1, 2))))
  alone = core.entry(conformance.module(name))
  options = {"return_entropy": True, "interpret": conformance.interpreted(name)}
  got = with_gradients(functools.partial(over_two, **options), hidden, head, targets, cotangents)
  expected = with_gradients(functools.partial(alone, **options), hidden, head, targets, cotangents)
  assert_equal(got[0], expected[0], 2e-6)
  assert_equal(got[1], expected[1], 8e-3)  # a bf16 rounding of the gradients themselves.


@pytest.mark.long
@pytest.mark.parametrize("name", conformance.TWO_PASSES)
def test_parts_of_the_vocabulary_add_up_by_hand(name):
  # What a mesh does, one part after the other: 140 columns, and 139 with one of padding.
  (hidden, head, targets), (g, g_entropy) = case(8, 279, d=64, dtype="bfloat16")
  module, size = conformance.module(name), 140
  padded, whole = np.pad(np.asarray(head), ((0, 1), (0, 0))), np.asarray(targets)
  settings = core.Settings(with_entropy=True, interpret=conformance.interpreted(name))
  parts = [(padded[i : i + size], whole - i, np.int32(min(size, 279 - i))) for i in (0, size)]
  statistics = jax.jit(functools.partial(module.statistics, settings))
  gradients = jax.jit(functools.partial(module.gradients, settings))
  found = [jax.device_get(statistics(hidden, *part)) for part in parts]
  largest = np.maximum(*[f.largest for f in found])
  scales = [np.exp(f.largest - largest) for f in found]
  total = sum(s * f.total for s, f in zip(scales, found, strict=True))
  moment = sum(
    s * (f.moment + f.total * (f.largest - largest)) for s, f in zip(scales, found, strict=True)
  )
  target = sum(f.target for f in found)
  of_all = core.Statistics(largest, total, moment, target)
  logprobs, entropy = jax.jit(functools.partial(core.outputs, settings))(of_all)
  of_all = (largest, np.log(total)), entropy, g, g_entropy
  (d_hidden, d_first), (more, d_last) = [
    jax.device_get(gradients(hidden, *part, *of_all)) for part in parts
  ]
  assert not d_last[-1].any()  # padding has no gradient.
  got = (logprobs, entropy), (d_hidden + more, np.concatenate([d_first, d_last[:-1]]))
  one = functools.partial(linear_logprobs, return_entropy=True)
  expected = with_gradients(one, hidden, head, targets, (g, g_entropy))
  assert_equal(got[0], expected[0], 2e-6)
  for mine, wanted in zip(got[1], expected[1], strict=True):
    assert_equal(mine, np.asarray(wanted).astype(mine.dtype), 8e-3)


@pytest.mark.long
def test_entropy_that_nothing_depends_on_changes_no_gradient():
  inputs, (g, _) = case(16, 301)
  pair = with_gradients(lambda *a: over((2, 2, 2))(*a)[0], *inputs, g)
  alone = with_gradients(
    lambda *a: sharded.linear_logprobs(*a, partition=partition((2, 2, 2))), *inputs, g
  )
  assert_equal(pair, alone, 0)


@pytest.mark.long
def test_targets_outside_the_vocabulary_give_nan_and_touch_no_other():
  # 301 columns over 8 devices are padded to 304: 302 is a column of padding.
  (hidden, head, targets), _ = case(8, 301)
  f = jax.jit(lambda t: over((1, 1, 8))(hidden, head, t)[0])
  wrong = targets.at[2:5].set(jnp.asarray([301, 302, -1]))
  assert np.isnan(f(wrong)[2:5]).all()
  keep = np.asarray([0, 1, 5, 6, 7])
  np.testing.assert_array_equal(f(wrong)[keep], f(targets)[keep])


def test_no_token_gives_nothing():
  hidden, head, targets = conformance.random_case(0, 8, 301, dtype="float32")
  logprobs, entropy = over((2, 2, 2))(hidden, head, targets)
  assert logprobs.shape == entropy.shape == (0,)


def test_head_and_logits_are_never_gathered():
  # Primes, so that a product of them in a shape is no accident.
  n, d, v, sizes = 2 * 29, 23, 4 * 101, (2, 1, 4)
  inputs, cotangents = case(n, v, d=d)
  f = jax.jit(
    lambda h, w, t, c: jax.vjp(lambda h, w: over(sizes)(h, w, t), h, w)[1](c),
  )
  per_token = NamedSharding(partition(sizes).mesh, PartitionSpec(("data", "fsdp")))
  text = f.lower(*placed(sizes, *inputs), jax.device_put(cotangents, per_token)).compile().as_text()
  shapes = {tuple(map(int, s.split(","))) for s in re.findall(r"\w\d+\[([\d,]+)\]", text)}
  assert (v // 4, d) in shapes  # each device has its part, so the search would find the whole,
  assert not [shape for shape in shapes if v in shape]  # and none has more than its part.
  assert "all-gather" not in text
  assert "all-to-all" not in text


def test_reductions_are_two_forward_and_one_for_each_gradient():
  inputs, cotangents = case(16, 1024)
  sizes = (2, 1, 4)
  forward = jax.make_jaxpr(over(sizes))(*inputs)
  both = jax.make_jaxpr(
    lambda h, w, t: jax.vjp(lambda h, w: over(sizes)(h, w, t), h, w)[1](cotangents)
  )(*inputs)
  count = lambda jaxpr: (str(jaxpr).count(" psum"), str(jaxpr).count(" pmax"))
  assert count(forward) == (1, 1)
  assert count(both) == (3, 1)


def test_named_implementation_that_cannot_run_on_the_mesh_raises():
  (hidden, head, targets), _ = case(8, 301)
  with pytest.raises(NotImplementedError, match="runs on tpu; this process computes on cpu"):
    over((1, 1, 8), implementation="pallas_tpu")(hidden, head, targets)
  with pytest.raises(ValueError, match="above 0"):
    over((1, 1, 8), temperature=0.0)(hidden, head, targets)


def test_reference_is_partitioned_by_the_compiler():
  inputs, cotangents = case(16, 301)
  one = functools.partial(linear_logprobs, return_entropy=True)
  expected = with_gradients(one, *inputs, cotangents)
  got = with_gradients(over((2, 1, 4), implementation="reference"), *inputs, cotangents)
  assert_equal(got, expected, 2e-6)


def test_statistics_of_no_column_are_finite():
  hidden, head, targets = conformance.random_case(3, 8, 40, dtype="float32")
  settings = core.Settings(with_entropy=True)
  found = xla_chunked.statistics(settings, hidden, head, targets, jnp.int32(0))
  np.testing.assert_array_equal(found.largest, np.full(3, core.LOWEST, np.float32))
  for of_sum in (found.total, found.moment, found.target):
    np.testing.assert_array_equal(of_sum, np.zeros(3))


@pytest.mark.parametrize("columns", [1, 17, 39])
def test_columns_behind_the_last_real_one_count_for_nothing(columns):
  hidden, head, targets = conformance.random_case(3, 8, 40, dtype="float32")
  settings = core.Settings(with_entropy=True, vocab_chunk=16)
  targets, head = np.minimum(targets, columns - 1), np.asarray(head)
  wild = head.copy()
  wild[columns:] = 1e30  # whatever stands there.
  statistics = jax.jit(functools.partial(xla_chunked.statistics, settings))
  got = statistics(hidden, wild, targets, jnp.int32(columns))
  expected = statistics(hidden, head[:columns], targets, None)
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
