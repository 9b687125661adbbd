"""The embedded sampler on a frozen base with an adapter: merged with it, and apart from it."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.learn import sharding
from grpo_jax.models import lora, transformer
from grpo_jax.models.products import Adapters, Products
from tests.engines import tiny

OPTIONS = lora.Options(rank=4, alpha=8.0)
PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9]]


def base_of(config, dtype=jnp.float32):
  """Returns a frozen base: kernels and embeddings in `dtype`, norms and biases in float32."""
  is_small = lambda path: "norm" in str(path) or "bias" in str(path)
  cast = lambda path, x: x if is_small(path) else x.astype(dtype)
  return jax.tree_util.tree_map_with_path(cast, tiny.params(config))


def adapter_of(config, options=OPTIONS, *, seed=0, size=0.2):
  """Returns an adapter whose B are not 0."""
  found = lora.init(jax.random.key(seed), config, options)
  for i, parts in enumerate(found.values()):
    key = jax.random.fold_in(jax.random.key(seed), i)
    parts["b"] = size * jax.random.normal(key, parts["b"].shape)
  return found


def joined(config, options=OPTIONS, *, dtype=jnp.float32, **drawn):
  return lora.join(base_of(config, dtype), adapter_of(config, options, **drawn), options.scale)


def sampler(config, **settings):
  return JaxSampler(config, **{"max_rows": 8, "chunk_tokens": 4, "unmerged": True, **settings})


def sampled(engine):
  return tiny.run(engine, tiny.groups(PROMPTS, 2, max_tokens=9))


def mismatch(config, tree, generations, products=None):
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


def leaves(engine):
  return jax.tree.leaves(engine._weights.layers)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logprobs_are_those_of_the_trainer(family):
  config = tiny.config(family)
  tree = joined(config)
  for unmerged in (True, False):
    with sampler(config, unmerged=unmerged) as engine:
      engine.load_weights(tree, version=1)
      assert mismatch(config, tree, sampled(engine)) < 1e-5


@pytest.mark.parametrize("targets", [("q", "v"), ("k", "o", "up"), ("down",)], ids=str)
def test_some_kernels_have_no_adapter(targets):
  config, options = tiny.config(), lora.Options(rank=3, targets=targets)
  tree = joined(config, options)
  with sampler(config) as engine:
    engine.load_weights(tree, version=1)
    found = sampled(engine)
  assert mismatch(config, tree, found) < 1e-5
  assert mismatch(config, lora.base_of(tree), found) > 1e-2


def test_in_bfloat16_an_adapter_apart_is_as_close_to_the_trainer_as_full_training():
  config, products = tiny.config(), Products(jnp.bfloat16)
  full = base_of(config)
  tree = joined(config, dtype=jnp.bfloat16)
  with sampler(config, compute_dtype=jnp.bfloat16) as engine:
    engine.load_weights(full, version=1)
    today = mismatch(config, full, sampled(engine), products)
    engine.load_weights(tree, version=2)
    unmerged = mismatch(config, tree, sampled(engine), products)
  with sampler(config, compute_dtype=jnp.bfloat16, unmerged=False) as engine:
    engine.load_weights(tree, version=2)
    merged = mismatch(config, tree, sampled(engine), products)
  assert unmerged < 2 * today < merged


def test_an_adapter_of_zeros_samples_what_the_base_does():
  config = tiny.config()
  tree = lora.join(base_of(config), lora.init(jax.random.key(0), config, OPTIONS), OPTIONS.scale)
  with sampler(config) as engine:
    engine.load_weights(lora.base_of(tree), version=1)
    base = sampled(engine)
    engine.load_weights(tree, version=2)
    found = sampled(engine)
  for name, wanted in base.items():
    assert found[name].token_ids.tolist() == wanted.token_ids.tolist()
    assert found[name].logprobs.tolist() == wanted.logprobs.tolist()


def test_a_sync_copies_the_adapter_only_and_samples_from_it():
  config = tiny.config()
  base = base_of(config)
  adapters = [adapter_of(config, seed=seed) for seed in range(3)]
  bytes_of_adapter = sum(x.nbytes for x in jax.tree.leaves(adapters[0]))
  with sampler(config) as engine:
    for version, adapter in enumerate(adapters):
      tree = lora.join(base, adapter, OPTIONS.scale)
      before = leaves(engine) if version else []
      engine.release()
      engine.load_weights(tree, version=version)
      found = sampled(engine)
      assert mismatch(config, tree, found) < 1e-5
      assert {v for g in found.values() for v in g.weight_versions} == {version}
      exchanged = engine.metrics()["lora/exchanged_bytes"]
      if version:
        assert all(one is other for one, other in zip(before, leaves(engine), strict=True))
        assert exchanged == bytes_of_adapter
        stale = lora.join(base, adapters[version - 1], OPTIONS.scale)
        assert mismatch(config, stale, found) > 1e-2
      else:
        assert exchanged > bytes_of_adapter
    other = lora.join(jax.tree.map(jnp.copy, base), adapters[0], OPTIONS.scale)
    engine.load_weights(other, version=3)  # copied again: it may be another base.
    assert all(one is not new for one, new in zip(before, leaves(engine), strict=True))


def test_the_update_may_donate_the_adapter():
  config = tiny.config()
  tree, kept = joined(config), joined(config)
  with sampler(config) as engine:
    engine.load_weights(tree, version=1)
    for kernel in tree["layers"].values():
      if hasattr(kernel, "a"):
        kernel.a.delete()
        kernel.b.delete()
    assert mismatch(config, kept, sampled(engine)) < 1e-5


def test_without_a_copy_of_the_base_nothing_is_held_after_close():
  config = tiny.config()
  engine = sampler(config)
  engine.load_weights(joined(config), version=1)
  engine.release()
  assert engine._weights is None and engine._kept is not None
  engine.close()
  assert engine._weights is None and engine._kept is None


def test_a_forgotten_scale_is_seen(monkeypatch):
  config = tiny.config()
  tree = joined(config)
  added = Products._adapted

  def forgotten(self, adapters, found, x):
    plain = Adapters(adapters.a, adapters.b, adapters.kernels, scale=1.0)
    return added(self, plain, found, x)

  monkeypatch.setattr(Products, "_adapted", forgotten)
  with sampler(config) as engine:
    engine.load_weights(tree, version=1)
    assert mismatch(config, tree, sampled(engine)) > 1e-2


PLANNED = {"prompt_tokens": 8, "completion_tokens": 9, "group_size": 2}


def test_nothing_is_compiled_after_the_first_load():
  config = tiny.config()
  trees = [joined(config, seed=seed) for seed in range(2)]
  with sampler(config, **PLANNED) as engine:
    for job in engine.programs(trees[0]):
      job()
    weights, _ = engine.described(trees[0])
    engine.load_weights(trees[0], version=1)
    is_like = lambda x, like: (
      (x.shape, x.dtype, x.sharding) == (like.shape, like.dtype, like.sharding)
    )
    assert all(map(is_like, jax.tree.leaves(engine._weights), jax.tree.leaves(weights)))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
      lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    sampled(engine)
    engine.release()
    engine.load_weights(trees[1], version=2)
    sampled(engine)
  assert compiled == []


MESHES = [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 1, "fsdp": 2, "tensor": 4}]


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape.values())))
def test_on_a_mesh_the_sampler_agrees_with_one_device(shape):
  config = tiny.config(vocab_size=64)
  tree = joined(config)
  mesh = sharding.make_mesh(**shape)
  axes = transformer.logical_axes(config)
  base = lora.base_of(tree)
  base = jax.device_put(base, sharding.param_shardings(axes, mesh, shapes=base))
  of_adapter = lora.tree(config, OPTIONS)
  adapter_axes = jax.tree.map(lambda leaf: leaf.axes, of_adapter)
  placed = sharding.param_shardings(adapter_axes, mesh, shapes=of_adapter)
  adapter = jax.device_put(adapter_of(config), placed)
  with sampler(config, **PLANNED) as split:
    spread = lora.join(base, adapter, OPTIONS.scale)
    described, _ = split.described(spread)
    split.load_weights(spread, version=1)
    for x, like in zip(jax.tree.leaves(split._weights), jax.tree.leaves(described), strict=True):
      assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
    assert mismatch(config, tree, sampled(split)) < 1e-5


def relative(config, size):
  """Returns kernels q whose adapter has this size relative to the base, which is bfloat16."""
  key = jax.random.key(0)
  base = (0.02 * jax.random.normal(key, (1, 1024, 1024))).astype(jnp.bfloat16)
  a, b = (
    jax.random.normal(jax.random.fold_in(key, i), s)
    for i, s in enumerate([(1, 1024, 8), (1, 8, 1024)])
  )
  scale = size * jnp.linalg.norm(base.astype(jnp.float32)) / jnp.linalg.norm(a[0] @ b[0])
  return {"q": lora.LowRank(base, a, b * scale, 1.0)}


def test_the_share_that_survives_rounding():
  # The figures were computed with NumPy: W ~ N(0, 0.02²), Δ of rank 8, 1024².
  for size, wanted in ((1e-4, 0.07), (1e-3, 0.55), (3e-3, 0.93), (1e-2, 1.0)):
    share = lora.merged_share(relative(None, size), jnp.bfloat16)
    assert float(share) == pytest.approx(wanted, abs=0.01)
    assert float(lora.merged_share(relative(None, size), jnp.float32)) == pytest.approx(1, abs=1e-3)
  assert float(lora.merged_share(relative(None, 0.0), jnp.bfloat16)) == 1.0


def test_a_run_that_merges_in_bfloat16_reports_the_share_and_warns_once(caplog):
  config = tiny.config()
  small, large = (joined(config, dtype=jnp.bfloat16, size=size) for size in (1e-4, 1.0))
  with (
    caplog.at_level(logging.WARNING),
    sampler(config, compute_dtype=jnp.bfloat16, unmerged=False) as engine,
  ):
    engine.load_weights(large, version=1)
    assert engine.metrics()["lora/merged_share"] > 0.9 and not caplog.messages
    for version in (2, 3):
      engine.load_weights(small, version=version)
      assert engine.metrics()["lora/merged_share"] < 0.5
    (message,) = caplog.messages
    assert "model.lora.sync='adapter'" in message and "bfloat16" in message
  for settings in ({"compute_dtype": jnp.bfloat16}, {"unmerged": False}):
    with sampler(config, **settings) as engine:
      engine.load_weights(small, version=1)
      assert "lora/merged_share" not in engine.metrics()
      engine.load_weights(lora.base_of(small), version=2)
      assert engine.metrics() == {}
