"""The embedded sampler on a frozen base with an adapter: merged with it, and apart from it."""

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.learn import sharding
from grpo_jax.models import lora, quantized, transformer
from grpo_jax.models.products import LowRank, Products
from tests.engines import tiny

OPTIONS = lora.AdapterOptions(rank=4, alpha=8.0)
CONFIG = tiny.config(vocab_size=64)
ONE_LAYER = tiny.config(vocab_size=64, num_layers=1)
PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9]]
PLANNED = {"max_rows": 4, "prompt_tokens": 8, "completion_tokens": 9, "group_size": 2}


@functools.cache
def base_of(dtype=jnp.float32, config=CONFIG):
  """Returns a frozen base: kernels and embeddings in `dtype`, norms in float32."""
  cast = lambda path, x: x if "norm" in str(path) else x.astype(dtype)
  return jax.tree_util.tree_map_with_path(cast, tiny.params(config))


def adapter_of(options=OPTIONS, config=CONFIG, *, seed=0, size=0.2):
  """Returns an adapter whose B are not 0."""
  found = lora.init(jax.random.key(seed), config, options)
  for i, parts in enumerate(found.values()):
    key = jax.random.fold_in(jax.random.key(seed), i)
    parts["b"] = size * jax.random.normal(key, parts["b"].shape)
  return found


def joined(base=None, options=OPTIONS, config=CONFIG, **drawn):
  base = base or base_of(config=config)
  return lora.join(base, adapter_of(options, config, **drawn), options.scale)


def sampler(config=CONFIG, **settings):
  return JaxSampler(config, **{**PLANNED, "chunk_tokens": 4, "unmerged": True, **settings})


def sampled(engine, tree, *, version=1):
  engine.load_weights(tree, version=version)
  return tiny.run(engine, tiny.groups(PROMPTS, 2, max_tokens=9))


@pytest.fixture(scope="module")
def unmerged():
  with sampler() as engine:
    for job in engine.programs(joined()):
      job()
    yield engine


def mismatch(tree, generations, products=None, config=CONFIG):
  """Returns the largest |logprob when sampled - the trainer's| of all tokens."""
  differences = []
  for name, found in generations.items():
    prompt, ids = PROMPTS[int(name.split(".")[0])], found.token_ids
    logprobs = trainer_logprobs(config, tree, prompt, ids, products or Products())
    differences.append(np.abs(found.logprobs - tiny.of_tokens(logprobs, ids)).max())
  return max(differences)


def trainer_logprobs(config, tree, prompt, completion, products):
  """Returns the log-softmax of every completion token, [n V], as the trainer computes it."""
  ids = np.concatenate([prompt, completion]).astype(np.int32)
  padded = np.pad(ids, (0, 32 - len(ids)))[None]
  segment_ids = (np.arange(32) < len(ids)).astype(np.int32)[None]
  logits = trainer_logits(config, tree, padded, segment_ids, products)
  return np.asarray(jax.nn.log_softmax(logits[len(prompt) - 1 : len(ids) - 1], axis=-1))


@functools.partial(jax.jit, static_argnums=(0, 4))
def trainer_logits(config, tree, ids, segment_ids, products):
  positions = jnp.arange(ids.shape[1])[None]
  hidden = transformer.hidden_states(tree, config, ids, positions, segment_ids, products=products)
  head, layout = transformer.head(tree, config)
  return products.contract("td,dv->tv", hidden[0], head.T if layout == "vd" else head)


@pytest.mark.long
def test_logprobs_of_an_adapter_apart_are_those_of_the_trainer(unmerged):
  tree = joined()
  found = sampled(unmerged, tree)
  assert mismatch(tree, found) < 1e-5
  # Faults that this must see: a forgotten scale, the adapter of another version, and none.
  for faulty in (
    lora.join(base_of(), adapter_of(), 1.0),
    joined(seed=1),
    lora.base_of(tree),
  ):
    assert mismatch(faulty, found) > 1e-2


@pytest.mark.long
def test_logprobs_of_merged_weights_are_those_of_the_trainer():
  tree = joined(config=ONE_LAYER)
  with sampler(ONE_LAYER, unmerged=False) as engine:
    assert mismatch(tree, sampled(engine, tree), config=ONE_LAYER) < 1e-5
    engine.release()
    assert engine._weight_sync._kept is None


@pytest.mark.long
def test_in_bfloat16_an_adapter_apart_is_closer_to_the_trainer_than_merged_weights():
  base, products = base_of(jnp.bfloat16, ONE_LAYER), Products(jnp.bfloat16)
  tree = joined(base, config=ONE_LAYER)
  with sampler(ONE_LAYER, compute_dtype=jnp.bfloat16) as engine:
    found = sampled(engine, tree)
  assert mismatch(tree, found, products, ONE_LAYER) < 1e-4
  merged = lambda x: lora.merged(x).astype(jnp.bfloat16) if isinstance(x, LowRank) else x
  rounded = {**base, "layers": {name: merged(x) for name, x in tree["layers"].items()}}
  assert mismatch(rounded, found, products, ONE_LAYER) > 1e-3  # what an engine would see.


@pytest.mark.long
def test_an_adapter_of_zeros_samples_what_the_base_does(unmerged):
  zeros = lora.join(base_of(), lora.init(jax.random.key(0), CONFIG, OPTIONS), OPTIONS.scale)
  found, wanted = sampled(unmerged, zeros), sampled(unmerged, base_of())
  for name, generation in wanted.items():
    assert found[name].token_ids.tolist() == generation.token_ids.tolist()
    assert found[name].logprobs.tolist() == generation.logprobs.tolist()


@pytest.mark.long
def test_a_sync_copies_the_adapter_only_and_samples_from_it(unmerged):
  adapters = [adapter_of(seed=seed) for seed in range(3)]
  bytes_of_adapter = sum(x.nbytes for x in jax.tree.leaves(adapters[0]))
  unmerged.load_weights(joined(jax.tree.map(jnp.copy, base_of())), version=1)
  assert unmerged.metrics()["perf/sync_bytes"] > 4 * bytes_of_adapter  # another base.
  base, copies, stale = base_of(), None, None
  sampled(unmerged, joined(seed=3))
  described, _ = unmerged.described(joined())
  assert_like(unmerged._weights, described)
  compiled = []
  listen = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
  jax.monitoring.register_event_duration_secs_listener(listen)
  for version, adapter in enumerate(adapters):
    tree = lora.join(base, adapter, OPTIONS.scale)
    compiled.clear()
    found = sampled(unmerged, tree, version=version)
    assert compiled == []
    assert mismatch(tree, found) < 1e-5
    assert {v for g in found.values() for v in g.weight_versions} == {version}
    own = jax.tree.leaves(unmerged._weights.layers)
    if stale is not None:
      assert all(map(operator.is_, own, copies))
      assert unmerged.metrics()["perf/sync_bytes"] == bytes_of_adapter
      assert mismatch(stale, found) > 1e-2
    copies, stale = own, tree
    unmerged.release()
    assert unmerged._weights is None


@pytest.mark.long
def test_the_update_may_donate_the_adapter(unmerged):
  tree, kept = joined(), joined()
  unmerged.load_weights(tree, version=1)
  for kernel in tree["layers"].values():
    if isinstance(kernel, LowRank):
      kernel.a.delete()
      kernel.b.delete()
  found = tiny.run(unmerged, tiny.groups(PROMPTS, 2, max_tokens=9))
  assert mismatch(kept, found) < 1e-5


@pytest.mark.long
def test_a_closed_sampler_holds_nothing_of_a_base():
  engine = sampler()
  engine.load_weights(joined(), version=1)
  assert engine._weight_sync._kept is not None
  engine.close()
  assert engine._weight_sync._kept is None and engine._weights is None


def assert_like(weights, described):
  """Asserts shapes, dtypes and shardings."""
  for x, like in zip(jax.tree.leaves(weights), jax.tree.leaves(described), strict=True):
    assert (x.shape, x.dtype) == (like.shape, like.dtype)
    assert x.sharding.is_equivalent_to(like.sharding, x.ndim)


@pytest.mark.long
def test_on_a_mesh_some_kernels_have_an_adapter():
  options = lora.AdapterOptions(rank=3, targets=("q", "v", "o", "up", "down"))
  tree = joined(options=options, config=ONE_LAYER)
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  put = lambda x, axes, shapes: jax.device_put(
    x, sharding.param_shardings(axes, mesh, shapes=shapes)
  )
  of_adapter = lora.tree(ONE_LAYER, options)
  adapter_axes = jax.tree.map(lambda leaf: leaf.axes, of_adapter)
  whole = lora.base_of(tree)
  base = put(whole, transformer.logical_axes(ONE_LAYER), whole)
  split = lora.join(
    base, put(adapter_of(options, ONE_LAYER), adapter_axes, of_adapter), options.scale
  )
  with sampler(ONE_LAYER) as engine:
    described, _ = engine.described(split)
    found = sampled(engine, split)
    assert_like(engine._weights, described)
    down = engine._weights.adapters[0]["adapters of down"]
    assert down.a.sharding.shard_shape(down.a.shape) == (3, 20)  # "tensor" splits its input.
  assert mismatch(tree, found, config=ONE_LAYER) < 1e-5
  assert mismatch(whole, found, config=ONE_LAYER) > 1e-2


def kernels_with(size):
  """Returns a kernel in bfloat16 with an adapter of this size relative to it."""
  key = jax.random.key(0)
  draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape)
  base = (0.02 * draw(0, 1, 1024, 1024)).astype(jnp.bfloat16)
  a, b = draw(1, 1, 1024, 8), draw(2, 1, 8, 1024)
  norm = jnp.linalg.norm
  scale = size * norm(base[0].astype(jnp.float32)) / norm(a[0] @ b[0])
  return {"q": LowRank(base, a, scale * b, 1.0)}


@pytest.mark.long
def test_the_share_that_survives_rounding():
  # Computed with NumPy: W ~ N(0, 0.02²) in bfloat16, Δ of rank 8, 1024².
  for size, wanted in ((1e-4, 0.07), (1e-3, 0.55), (1e-2, 1.0)):
    share = lora.merged_share(kernels_with(size), jnp.bfloat16)
    assert float(share) == pytest.approx(wanted, abs=0.01)
  assert float(lora.merged_share(kernels_with(1e-4), jnp.float32)) == pytest.approx(1, abs=1e-3)
  assert float(lora.merged_share(kernels_with(0.0), jnp.bfloat16)) == 1.0
  assert np.isnan(lora.merged_share(kernels_with(np.nan), jnp.bfloat16))
  # The weights before and after are both rounded: 1 + 2⁻⁹ and 1 + 3 · 2⁻¹⁰ are 1 in bfloat16.
  of_one = lambda x: jnp.full((1, 1, 1), x, jnp.float32)
  kernel = LowRank(of_one(1 + 2**-9), of_one(1), of_one(2**-11), 2.0)
  assert float(lora.merged_share({"q": kernel}, jnp.bfloat16)) == 0.0


@pytest.mark.long
def test_a_sampler_that_merges_in_bfloat16_reports_the_share_and_warns_once(caplog):
  small, large = (joined(base_of(jnp.bfloat16), size=size) for size in (1e-4, 1.0))
  with sampler(compute_dtype=jnp.bfloat16, unmerged=False) as engine:
    engine.load_weights(large, version=1)
    assert engine.metrics()["lora/merged_share"] > 0.9 and not caplog.messages
    for version in (2, 3):
      engine.load_weights(small, version=version)
      assert engine.metrics()["lora/merged_share"] < 0.5
    (message,) = caplog.messages
    assert "model.lora.sync='adapter'" in message and "bfloat16" in message
  for settings in ({"compute_dtype": jnp.bfloat16}, {"unmerged": False}):
    with sampler(**settings) as engine:
      engine.load_weights(small, version=1)
      assert "lora/merged_share" not in engine.metrics()
      engine.load_weights(lora.base_of(small), version=2)
      assert "lora/merged_share" not in engine.metrics()


def quantized_base(tree, **forms):
  """Returns a base with int8 kernels, except those of other forms."""

  def kernel(name, x):
    codes = quantized.quantize(np.asarray(x), forms.get(name, quantized.Int8))
    return jax.tree.map(jnp.asarray, codes)

  stack = {name: kernel(name, x) if x.ndim == 3 else x for name, x in tree["layers"].items()}
  return {**tree, "layers": stack}


@pytest.mark.long
def test_a_quantised_base_is_the_trainers_own(unmerged):
  tree = joined(quantized_base(base_of(), o=quantized.Nf4))
  found = sampled(unmerged, tree)
  assert mismatch(tree, found) < 1e-5
  assert mismatch(joined(), found) > 1e-2  # another base.
  weights = unmerged._weights
  own = jax.tree.leaves(lora.base_of(tree)["layers"])
  held = jax.tree.leaves(weights.quantized)
  assert len(held) == 14 and all(any(x is other for other in own) for x in held)
  assert {x.ndim for x in jax.tree.leaves(weights.layers)} == {1}  # norms.


@pytest.mark.long
def test_a_quantised_base_is_dequantised_a_layer_at_a_time():
  config = tiny.config(num_layers=3, hidden_size=128, intermediate_size=256)
  tree = quantized_base(tiny.params(config))
  of_layer = sum(4 * math.prod(x.shape[1:]) for x in tree["layers"].values() if len(x.shape) == 3)
  with JaxSampler(config, **PLANNED, unmerged=True) as engine:
    (sampling,) = [job for job in engine.programs(tree) if job.name == "sampling 4 rows"]
    memory = sampling.run().memory_analysis()
  assert memory.temp_size_in_bytes < 2 * of_layer
