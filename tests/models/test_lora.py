"""LoRA's kernels: targets, initialisers, and what a model computes with them, in every place."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.learn import sharding
from grpo_jax.models import classifier, layers, leaves, lora, quantized, rotary, transformer
from grpo_jax.models.placement import MeshPlacement
from grpo_jax.models.products import LowRank, Products
from tests.models import tiny

# Every width is different; 2 and 4 devices split all of them.
CONFIG = tiny.config(
  hidden_size=48, intermediate_size=40, num_heads=4, num_kv_heads=2, num_layers=2
)
OPTIONS = lora.AdapterOptions(rank=3, alpha=6.0)
KERNELS = tuple(lora.MODULES)


@functools.cache
def base():
  return tiny.random_params(CONFIG)


def adapter(options=OPTIONS, seed=1):
  """Returns an adapter whose every entry is random, B too."""
  rng, leaves = np.random.default_rng(seed), lora.tree(CONFIG, options)
  return jax.tree.map(
    lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.1, "float32"), leaves
  )


def joined(options=OPTIONS, **parts):
  return lora.join(parts.get("base", base()), parts.get("adapter", adapter(options)), options.scale)


def merged(weights):
  stack = {
    name: lora.merged(x) if isinstance(x, LowRank) else quantized.dequantized(x)
    for name, x in weights["layers"].items()
  }
  return {**weights, "layers": stack}


def hidden(weights, inputs=None, **options):
  function = functools.partial(transformer.hidden_states, config=CONFIG, **options)
  inputs = packed() if inputs is None else inputs
  return jax.jit(lambda w: function(w, tokens=inputs[0], positions=inputs[1], **ids(inputs)))(
    weights
  )


def ids(inputs):
  return dict(zip(("segment_ids", "branch_ids"), inputs[2:], strict=False))


def packed():
  """Returns four rows of a prompt of 4 tokens and two completions of 3 after it, and padding."""
  rng = np.random.default_rng(2)
  row = lambda *values: jnp.broadcast_to(jnp.asarray(values, jnp.int32), (4, 12))
  return (
    jnp.asarray(rng.integers(0, CONFIG.vocab_size, (4, 12)), jnp.int32),
    row(0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 0, 0),
    row(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0),
    row(0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0),
  )


# Targets, options, initialisers.


@pytest.mark.parametrize(
  ("patterns", "expected"),
  [
    (["all"], KERNELS),
    (["v", "q"], ("q", "v")),
    (["q_proj", "self_attn.o_proj"], ("q", "o")),
    (["mlp.*"], ("gate", "up", "down")),
    (["*_proj"], KERNELS),
    (["self_attn.[qkv]_proj", "down"], ("q", "k", "v", "down")),
    (["q", "all", "q"], KERNELS),
  ],
)
def test_targets_are_names_or_patterns(patterns, expected):
  assert lora.targets(patterns) == expected


@pytest.mark.parametrize(
  ("patterns", "message"),
  [
    ([], "at least one kernel, got none"),
    (["qq"], "'qq' is not the name of a kernel"),
    (["q", "embed_tokens"], "'embed_tokens' is not the name"),
    (["Q_PROJ"], "'Q_PROJ' is not the name"),
    (["mlp"], "'mlp' is not the name"),
    ([""], "'' is not the name"),
    (["lm_head"], r"valid are all, q, k, .*, q_proj, .* and patterns such as 'mlp\.\*'"),
  ],
)
def test_targets_that_name_nothing_are_refused(patterns, message):
  with pytest.raises(ValueError, match=message):
    lora.targets(patterns)


def test_scale_is_alpha_over_rank_or_over_its_root():
  assert lora.AdapterOptions(rank=16, alpha=32.0).scale == 2.0
  assert lora.AdapterOptions(rank=16, alpha=32.0, rank_stabilized=True).scale == 8.0


def test_a_is_drawn_and_b_is_zero():
  config = dataclasses.replace(CONFIG, hidden_size=200, intermediate_size=320, num_layers=4)
  options = lora.AdapterOptions(rank=16, targets=("q", "down"))
  found = lora.init(jax.random.key(0), config, options)
  assert set(found) == {"q", "down"}
  for kernel, inputs in (("q", 200), ("down", 320)):
    a, b = np.asarray(found[kernel]["a"]), np.asarray(found[kernel]["b"])
    assert a.shape == (4, inputs, 16) and a.dtype == b.dtype == np.float32
    assert not b.any()
    assert np.var(a) == pytest.approx(1 / (3 * inputs), rel=0.06)
    assert 0.98 / inputs**0.5 <= np.abs(a).max() <= 1 / inputs**0.5
  assert not np.array_equal(found["q"]["a"], found["down"]["a"][:, :200])


def test_kaiming_is_torchs_with_a_of_root_5():
  import torch

  theirs = torch.empty(16, 200)  # PEFT's A: [r, i].
  torch.nn.init.kaiming_uniform_(theirs, a=5**0.5, generator=torch.Generator().manual_seed(0))
  options = lora.AdapterOptions(rank=16, targets=("q",))
  config = dataclasses.replace(CONFIG, hidden_size=200)
  ours = np.asarray(lora.init(jax.random.key(0), config, options)["q"]["a"])
  assert np.abs(ours).max() == pytest.approx(float(theirs.abs().max()), rel=0.01)
  assert np.std(ours) == pytest.approx(float(theirs.std()), rel=0.03)


# Values on one device.


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_an_adapter_of_zeros_changes_nothing_bit_for_bit(dtype, remat):
  settings = {"products": Products(jnp.dtype(dtype)), "remat": remat}
  weights = joined(adapter=lora.init(jax.random.key(0), CONFIG, OPTIONS))
  np.testing.assert_array_equal(hidden(weights, **settings), hidden(base(), **settings))


def subsets():
  """Returns every choice of kernels."""
  sizes = range(1, len(KERNELS) + 1)
  return [*itertools.chain(*(itertools.combinations(KERNELS, size) for size in sizes))]


def test_every_subset_of_targets_has_adapters_of_its_kernels_only():
  everything = leaves.tree(CONFIG)
  for subset in subsets():
    described = lora.tree(CONFIG, dataclasses.replace(OPTIONS, targets=subset))
    assert {*described} == {*subset}
    stack = lora.join(everything, described, OPTIONS.scale)["layers"]
    for name, leaf in everything["layers"].items():
      is_adapted = isinstance(stack[name], LowRank)
      assert (
        is_adapted == (name in subset) and (stack[name].base if is_adapted else stack[name]) is leaf
      )


# Every switch of the families, and fewer heads of keys than of queries.
EVERY_SWITCH = dataclasses.replace(
  CONFIG,
  num_layers=1,
  qkv_bias=True,
  o_bias=True,
  mlp_bias=True,
  qk_norm=True,
  post_norms=True,
  norm_offset=1.0,
  activation="gelu_tanh",
  query_scalar=21.0,
)


@functools.cache
def one_layer():
  """Returns a layer's parameters."""
  stack = tiny.random_params(EVERY_SWITCH)["layers"]
  return {name: np.asarray(x[0]) for name, x in stack.items()}


def of_layer(kernels):
  """Returns the output of that layer with other kernels; attention is a product of heads."""
  x = np.random.default_rng(4).normal(size=(1, 3, 48)).astype(np.float32)
  cos, sin = rotary.angles(jnp.arange(3)[None], EVERY_SWITCH)
  of_heads = lambda y: jnp.repeat(y, 2, axis=2)
  attend = lambda q, k, v: (q * of_heads(k) + of_heads(v), None)
  params = jax.tree.map(jnp.asarray, {**one_layer(), **kernels})
  return layers.block(params, jnp.asarray(x), cos, sin, attend, config=EVERY_SWITCH)[0]


@pytest.mark.long
def test_unmerged_is_merged_for_every_subset_of_targets():
  frozen, rng = {name: one_layer()[name] for name in KERNELS}, np.random.default_rng(5)
  gaussian = lambda *shape: 0.1 * rng.normal(size=shape).astype(np.float32)
  drawn = {name: (gaussian(len(w), 60), gaussian(60, w.shape[1])) for name, w in frozen.items()}
  found, merged = [], []
  for subset in subsets():
    rank, scale = ((1, 6.0), (3, 2.0), (60, -0.5))[len(subset) % 3]  # 60 is above every width.
    own = {name: (drawn[name][0][:, :rank], drawn[name][1][:rank]) for name in subset}
    found.append(of_layer({name: LowRank(frozen[name], *own[name], scale) for name in subset}))
    whole = {name: frozen[name] + scale * a @ b for name, (a, b) in own.items()}
    merged.append({**frozen, **whole})
  assert len(found) == 127
  stacked = jax.tree.map(lambda *kernels: np.stack(kernels), *merged)
  expected = jax.jit(lambda each: jax.lax.map(of_layer, each))(stacked)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
  flat = np.reshape(found, (127, -1))
  nearest = [np.abs(np.delete(flat, i, axis=0) - x).max(axis=1).min() for i, x in enumerate(flat)]
  assert min(nearest) > 1e-2 * np.abs(expected).max(), "every adapter has an effect of its own"


@pytest.mark.long
def test_unmerged_is_merged_in_a_whole_model():
  whole, seen = hidden(base()), []
  for targets in (("all",), ("k",), ("q", "v", "o", "up", "down")):
    options = dataclasses.replace(OPTIONS, targets=targets, rank_stabilized=len(targets) == 5)
    weights = joined(options)
    found, expected = hidden(weights), hidden(merged(weights))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert np.abs(found - whole).max() > 1e-2, "the adapter has an effect"
    seen.append(np.asarray(found).tobytes())
  assert len({*seen}) == len(seen)


@pytest.mark.long
def test_every_entry_takes_kernels_with_adapters():
  weights = joined()
  tokens, positions, segments, _ = packed()
  plain = tokens, positions, (segments > 0).astype(jnp.int32)
  states, cache = transformer.prefill(weights, CONFIG, *plain)
  expected, of_merged = transformer.prefill(merged(weights), CONFIG, *plain)
  np.testing.assert_allclose(states, expected, atol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), cache, of_merged)
  score, lengths = jnp.ones((1, 48)), jnp.full(4, 10)
  of = lambda body: classifier.scores(
    {"body": body, "score": score}, CONFIG, tokens, lengths, lengths - 1
  )
  np.testing.assert_allclose(of(weights), of(merged(weights)), rtol=1e-4)


def test_join_and_base_of_copy_nothing():
  weights = joined()
  assert lora.base_of(weights) == base() or all(
    a is b
    for a, b in zip(jax.tree.leaves(lora.base_of(weights)), jax.tree.leaves(base()), strict=True)
  )
  kernel = weights["layers"]["q"]
  assert kernel.base is base()["layers"]["q"] and kernel.shape == base()["layers"]["q"].shape


# Gradients.


def gradients(weights, inputs=None, **options):
  """Returns the gradients of the adapter, for a loss that every hidden state of a token enters."""
  own = {
    name: {"a": x.a, "b": x.b} for name, x in weights["layers"].items() if isinstance(x, LowRank)
  }
  scale = next(x.scale for x in weights["layers"].values() if isinstance(x, LowRank))
  inputs = packed() if inputs is None else inputs
  direction = np.random.default_rng(3).normal(size=(inputs[0].shape[0] * 12, 48)).astype("float32")
  direction = direction.reshape(-1, 12, 48)[:, : inputs[0].shape[1]]

  def loss(own, frozen):
    states = transformer.hidden_states(
      lora.join(frozen, own, scale), CONFIG, *map(jnp.asarray, inputs), **options
    )
    real = (jnp.asarray(inputs[2]) > 0)[:, :, None]
    return jnp.sum(jnp.where(real, states * direction, 0))

  return jax.jit(jax.grad(loss))(own, lora.base_of(weights))


@functools.cache
def expected_gradients():
  """Returns the gradients through merged kernels: ∂/∂A = s ∂/∂W Bᵀ, ∂/∂B = s Aᵀ ∂/∂W."""
  weights = joined()

  def loss(own):
    return jax.tree.map(lambda x: x, merged(lora.join(base(), own, OPTIONS.scale)))

  own = adapter()
  whole, pull = jax.vjp(loss, own)
  inputs = packed()
  direction = np.random.default_rng(3).normal(size=(48, 48)).astype("float32").reshape(-1, 12, 48)

  def of_whole(whole):
    states = transformer.hidden_states(whole, CONFIG, *map(jnp.asarray, inputs))
    return jnp.sum(jnp.where((jnp.asarray(inputs[2]) > 0)[:, :, None], states * direction, 0))

  del weights
  return pull(jax.jit(jax.grad(of_whole))(whole))[0]


def assert_close(found, expected, tolerance):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_gradients_are_those_through_merged_kernels(remat):
  assert_close(gradients(joined(), remat=remat), expected_gradients(), 2e-5)


@pytest.mark.long
def test_a_mesh_computes_what_one_device_does():
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  place = lambda tree, axes: jax.device_put(tree, sharding.param_shardings(axes, mesh, shapes=tree))
  axes = jax.tree.map(lambda leaf: leaf.axes, lora.tree(CONFIG, OPTIONS))
  weights = joined(
    base=place(base(), transformer.logical_axes(CONFIG)), adapter=place(adapter(), axes)
  )
  products = Products(placement=MeshPlacement(mesh))
  inputs = sharding.put(packed(), mesh)
  found = hidden(weights, inputs, products=products)
  np.testing.assert_allclose(found, hidden(joined()), atol=1e-5)
  of_mesh = gradients(weights, inputs, products=products)
  assert_close(of_mesh, expected_gradients(), 2e-5)
