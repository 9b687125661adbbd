"""One conformance suite for every implementation of linear_logprobs, against float64."""

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import TOLERANCES, operation
from grpo_kernels.linear_logprobs import core

each = pytest.mark.parametrize("name", conformance.ALL)
each_with_two_passes = pytest.mark.parametrize("name", conformance.TWO_PASSES)

DTYPES = {
  "reference": ("float32", "bfloat16"),
  "xla_chunked": ("float32", "bfloat16"),
  "mosaic_gpu": ("bfloat16",),  # wgmma has no float32.
  "pallas_tpu": ("float32", "bfloat16"),
}
# N, D, V, temperature, layout. Sizes are odd or prime, or one off a tile or a chunk. The second
# dtype of an implementation takes the first two.
CASES = {
  "xla": [
    (5, 16, 1009, 0.3, "vd"),
    (7, 12, 1000, 1.7, "dv"),
    (33, 20, 5003, 1.0, "vd"),
    (33, 20, 4096, 0.3, "dv"),
    (9, 12, 4, 1.0, "dv"),
    (3, 8, 1, 1.7, "vd"),
  ],
  # 64 | D is the Hopper kernel's; its tiles are 128 columns wide, the TPU's a multiple of that.
  "mosaic_gpu": [
    (5, 64, 301, 0.3, "vd"),  # one tile of tokens, nearly empty; the last tile of V 45 wide.
    (130, 128, 257, 1.7, "dv"),  # one column beyond two tiles; two steps along D.
    (3, 64, 1, 1.0, "vd"),
  ],
  "pallas_tpu": [
    (5, 16, 301, 0.3, "vd"),
    (130, 136, 1025, 1.7, "dv"),
    (3, 8, 1, 1.0, "vd"),
  ],
}


def cases():
  """Yields every implementation with its dtypes and sizes."""
  for parameter in conformance.ALL:
    name = parameter.values[0]
    sizes_of = CASES.get(name, CASES["xla"])
    for dtype in DTYPES[name]:
      for n, d, v, temperature, layout in sizes_of if dtype == DTYPES[name][0] else sizes_of[:2]:
        label = f"{name}-{dtype}-{n}x{d}x{v}-{temperature}-{layout}"
        values = (name, dtype, n, d, v, temperature, layout)
        yield pytest.param(*values, marks=parameter.marks, id=label)


def dtype_of(name):
  """Returns float32 where an implementation takes it."""
  return DTYPES[name][0]


def sizes(name, n, v):
  """Returns N, D and V; the narrowest D that an implementation takes."""
  return n, (64 if name == "mosaic_gpu" else 8), v


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype", "n", "d", "v", "temperature", "layout"), list(cases()))
def test_values_and_gradients_agree_with_float64(name, dtype, n, d, v, temperature, layout):
  conformance.check(
    operation(name), n, d, v, dtype=dtype, head_layout=layout, temperature=temperature
  )


@pytest.mark.long
@each
def test_targets_on_edges_of_tiles_and_targets_that_repeat(name):
  v = 513
  targets = [0, 0, 1, 63, 64, 127, 128, 128, 255, 256, 257, 383, 384, 511, 512, 512]
  n, d, v = sizes(name, len(targets), v)
  conformance.check(operation(name), n, d, v, dtype=dtype_of(name), targets=targets)


def extreme_logits():
  """Returns hidden, head and targets in bf16 whose logits are exact: sums of few bf16 numbers.

  Only the softmax can err. Rows: a ramp over ±1e3 and its mirror, two heights
  at 1e3, all equal, one logit at 1e3 and the rest at -1e3, and its mirror.
  """
  v = np.arange(701)
  ramp = np.round(np.linspace(-1000, 1000, 701))
  coarse = 8 * np.floor(ramp / 8)
  columns = [
    *(coarse, ramp - coarse),
    *(np.full(701, 1000.0), -0.5 * (v % 2)),
    np.full(701, 250.0),
    np.where(v == 3, 1000.0, -1000.0),
  ]
  head = np.zeros((701, 64))
  head[:, : len(columns)] = np.stack(columns, axis=1)
  rows = [[1, 1], [-1, -1], [0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, -1]]
  hidden = np.zeros((len(rows), 64))
  for i, row in enumerate(rows):
    hidden[i, : len(row)] = row
  return hidden, head, np.asarray([700, 5, 128, 640, 3, 3], np.int32)


@pytest.mark.long
@each
def test_extreme_logits_are_exact(name):
  hidden, head, targets = extreme_logits()
  g, g_entropy = np.ones(len(targets)), np.ones(len(targets))
  settings = {"head_layout": "vd", "temperature": 0.7}
  dtype = jnp.dtype(dtype_of(name))
  given = hidden.astype(dtype), head.astype(dtype), targets
  np.testing.assert_array_equal(np.asarray(given[1], np.float64), head)
  got = conformance.differentiate(operation(name), *given, g, g_entropy, **settings)
  exact = conformance.oracle(hidden, head, targets, g=g, g_entropy=g_entropy, **settings)
  # Logprobs reach -2000, of which float32 resolves 1.2e-4.
  assert np.abs(exact.outcome.logprobs).max() > 1900
  conformance.assert_conforms(
    got, exact, TOLERANCES[f"gradient {dtype}"], value_scale=20, cancels=True
  )
  # Rows whose logprobs are small are held to the plain tolerances.
  small = [0, 2, 3, 4]
  np.testing.assert_allclose(got.logprobs[small], exact.outcome.logprobs[small], atol=2e-5)
  np.testing.assert_allclose(got.entropy, exact.outcome.entropy, atol=5e-5)


@each
def test_probabilities_of_all_targets_sum_to_one(name):
  v = 157
  n, d, v = sizes(name, v, v)
  hidden, head, _ = conformance.random_case(1, d, v, dtype=dtype_of(name))
  every = jnp.arange(v, dtype=jnp.int32)
  logprobs = jax.jit(operation(name))(np.repeat(hidden, n, axis=0), head, every)
  assert np.exp(np.asarray(logprobs, np.float64)).sum() == pytest.approx(1.0, abs=1e-5)
  assert (np.asarray(logprobs) <= 0).all()


@pytest.mark.long
@each
def test_entropy_of_equal_logits_is_log_v_and_its_gradient_nothing(name):
  n, d, v = sizes(name, 2, 389)
  hidden, head = jnp.ones((n, d), dtype_of(name)), jnp.ones((v, d), dtype_of(name))
  targets = jnp.zeros(n, jnp.int32)
  entropy = lambda h: operation(name)(h, head, targets, return_entropy=True)[1]
  value, slope = jax.jit(jax.value_and_grad(lambda h: jnp.sum(entropy(h))))(hidden)
  np.testing.assert_allclose(value, n * np.log(v), atol=2e-5)
  np.testing.assert_allclose(np.asarray(slope, np.float64), 0.0, atol=1e-4)


@pytest.mark.long
@each
def test_order_of_the_vocabulary_and_of_tokens_changes_nothing(name):
  n, d, v = sizes(name, 40, 389)
  given = conformance.random_case(n, d, v, dtype=dtype_of(name))
  hidden, head, targets = map(np.asarray, given)
  rng = np.random.default_rng(2)
  columns, rows = rng.permutation(v), rng.permutation(n)
  moved = np.argsort(columns).astype(np.int32)[targets]
  g, g_entropy = conformance.cotangents(n)
  settings = {"head_layout": "vd", "temperature": 1.0}
  plain = conformance.differentiate(
    operation(name), hidden, head, targets, g, g_entropy, **settings
  )
  other = conformance.differentiate(
    operation(name), hidden[rows], head[columns], moved[rows], g[rows], g_entropy[rows], **settings
  )
  np.testing.assert_allclose(other.logprobs, plain.logprobs[rows], atol=2e-6)
  np.testing.assert_allclose(other.entropy, plain.entropy[rows], atol=5e-6)
  same = TOLERANCES[f"gradient {dtype_of(name)}"]
  for mine, theirs in (
    (other.d_hidden, plain.d_hidden[rows]),
    (other.d_head, plain.d_head[columns]),
  ):
    assert np.linalg.norm(mine - theirs) <= same * np.linalg.norm(theirs)


@pytest.mark.long
@each
def test_repetition_is_bitwise_equal(name):
  n, d, v = sizes(name, 40, 389)
  hidden, head, targets = conformance.random_case(n, d, v, dtype=dtype_of(name))
  run = conformance.compiled(operation(name), head_layout="vd", temperature=1.0)
  of_outputs = tuple(np.asarray(x, np.float32) for x in conformance.cotangents(n))
  once, again = (run(hidden, head, targets, of_outputs) for _ in range(2))
  jax.tree.map(np.testing.assert_array_equal, once, again)


@pytest.mark.long
@each
@pytest.mark.parametrize("n", [0, 1])
def test_no_token_and_one(name, n):
  n, d, v = sizes(name, n, 301)
  if n:
    conformance.check(operation(name), n, d, v, dtype=dtype_of(name))
    return
  hidden, head, targets = conformance.random_case(n, d, v, dtype=dtype_of(name))
  nothing = np.zeros(0)
  settings = {"head_layout": "vd", "temperature": 1.0}
  got = conformance.differentiate(
    operation(name), hidden, head, targets, nothing, nothing, **settings
  )
  assert got.logprobs.shape == got.entropy.shape == (0,)
  assert got.d_hidden.shape == (0, d)
  assert not got.d_head.any()


@pytest.mark.long
@each
def test_tokens_that_do_not_count_touch_no_other(name):
  # A target outside the vocabulary gives NaN; neither it nor a cotangent of 0 leaves a trace.
  n, d, v = sizes(name, 40, 389)
  given = conformance.random_case(n, d, v, dtype=dtype_of(name))
  hidden, head, targets = map(np.asarray, given)
  wrong = targets.copy()
  wrong[1:3] = v, -1
  g, g_entropy = conformance.cotangents(n)
  g_entropy = g_entropy * 0
  g[4] = 0
  settings = {"head_layout": "vd", "temperature": 1.0}
  got = conformance.differentiate(operation(name), hidden, head, wrong, g, g_entropy, **settings)
  assert np.isnan(got.logprobs[1:3]).all()
  assert not got.d_hidden[[1, 2, 4]].any()
  kept = np.asarray([0, *range(3, n)])
  exact = conformance.oracle(
    hidden[kept], head, targets[kept], g=g[kept], g_entropy=g_entropy[kept], **settings
  )
  rest = conformance.Outcome(got.logprobs[kept], got.entropy[kept], got.d_hidden[kept], got.d_head)
  conformance.assert_conforms(rest, exact, TOLERANCES[f"gradient {dtype_of(name)}"])


@pytest.mark.long
@each
def test_without_entropy_logprobs_are_the_same(name):
  n, d, v = sizes(name, 5, 301)
  hidden, head, targets = conformance.random_case(n, d, v, dtype=dtype_of(name))
  alone = jax.jit(lambda h, w: operation(name)(h, w, targets))(hidden, head)
  both = jax.jit(lambda h, w: operation(name)(h, w, targets, return_entropy=True))(hidden, head)
  np.testing.assert_allclose(alone, both[0], rtol=0, atol=2e-6)


@pytest.mark.long
@pytest.mark.parametrize(
  "name", conformance.parametrised("xla_chunked", "pallas_tpu", "mosaic_gpu")
)
def test_float32_head_under_bf16_hidden_keeps_a_float32_gradient(name):
  n, d, v = sizes(name, 40, 301)
  hidden, head, targets = conformance.random_case(n, d, v, dtype="float32")
  loss = lambda w: operation(name)(hidden.astype(jnp.bfloat16), w, targets).sum()
  mixed = jax.jit(jax.grad(loss))(head)
  assert mixed.dtype == jnp.float32
  # Not merely a bf16 result stored wide.
  assert (mixed != mixed.astype(jnp.bfloat16).astype(jnp.float32)).mean() > 0.5


def merged(parts, temperature):
  """Returns the statistics of a whole vocabulary from those of its parts, as devices do."""
  largest = np.max([x.largest for x in parts], axis=0)
  changes = [(x.largest - largest) / temperature for x in parts]
  total = sum(x.total * np.exp(c) for x, c in zip(parts, changes, strict=True))
  moment = sum((x.moment + x.total * c) * np.exp(c) for x, c in zip(parts, changes, strict=True))
  return core.Statistics(largest, total, moment, sum(x.target for x in parts))


@pytest.mark.long
@each_with_two_passes
@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_statistics_of_parts_make_those_of_the_whole(name, layout):
  # The second part is padded with columns that are not real, the third has none that is.
  n, d, v = sizes(name, 7, 301)
  hidden, head, targets = conformance.random_case(n, d, v, dtype=dtype_of(name), head_layout=layout)
  settings = core.Settings(layout, 0.7, True, interpret=conformance.interpreted(name))
  axis = settings.vocab_axis
  first, second = np.split(np.asarray(head), [130], axis=axis)
  shape = list(head.shape)
  shape[axis] = 130
  junk = np.full(shape, 100.0, head.dtype)
  second = np.concatenate([second, junk], axis=axis)
  walk = jax.jit(
    lambda w, t, columns: conformance.module(name).statistics(settings, hidden, w, t, columns)
  )
  parts = [
    walk(first, targets, None),
    walk(second, np.asarray(targets) - 130, jnp.int32(v - 130)),
    walk(second, np.asarray(targets) - v, jnp.int32(0)),
  ]
  parts = [core.Statistics(*(np.asarray(x, np.float64) for x in part)) for part in parts]
  assert (parts[2].largest == core.LOWEST).all()
  assert not np.stack([parts[2].total, parts[2].moment, parts[2].target]).any()
  whole = merged(parts, 0.7)
  zeros = np.zeros(n)
  exact = conformance.oracle(
    hidden, head, targets, head_layout=layout, temperature=0.7, g=zeros, g_entropy=zeros
  ).outcome
  log_total = np.log(whole.total)
  logprobs = (whole.target - whole.largest) / 0.7 - log_total
  np.testing.assert_allclose(logprobs, exact.logprobs, atol=2e-5)
  np.testing.assert_allclose(log_total - whole.moment / whole.total, exact.entropy, atol=5e-5)


@pytest.mark.long
@each_with_two_passes
@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_columns_that_are_not_real_have_no_gradient(name, layout):
  n, d, v = sizes(name, 7, 301)
  hidden, head, targets = conformance.random_case(n, d, v, dtype=dtype_of(name), head_layout=layout)
  settings = core.Settings(layout, 1.0, True, interpret=conformance.interpreted(name))
  axis = settings.vocab_axis
  pad = [(0, 0), (0, 0)]
  pad[axis] = (0, 99)
  padded = jnp.asarray(np.pad(np.asarray(head), pad, constant_values=100.0))
  g, g_entropy = (jnp.asarray(x, jnp.float32) for x in conformance.cotangents(n))
  entry = conformance.module(name)

  @jax.jit
  def walk(columns):
    found = entry.statistics(settings, hidden, padded, targets, columns)
    normaliser = found.largest, jnp.log(found.total)
    entropy = normaliser[1] - found.moment / found.total
    return entry.gradients(
      settings, hidden, padded, targets, columns, normaliser, entropy, g, g_entropy
    )

  d_hidden, d_head = (np.asarray(x, np.float64) for x in walk(jnp.int32(v)))
  assert not np.take(d_head, range(v, v + 99), axis=axis).any()
  exact = conformance.oracle(
    *(hidden, head, targets),
    **{"head_layout": layout, "temperature": 1.0},
    g=np.asarray(g, np.float64),
    g_entropy=np.asarray(g_entropy, np.float64),
  ).outcome
  allowed = TOLERANCES[f"gradient {dtype_of(name)}"]
  assert np.linalg.norm(d_hidden - exact.d_hidden) <= allowed * np.linalg.norm(exact.d_hidden)
  real = np.take(d_head, range(v), axis=axis)
  assert np.linalg.norm(real - exact.d_head) <= allowed * np.linalg.norm(exact.d_head)
