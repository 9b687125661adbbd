"""The embedded sampler on devices of its own, beside those of the trainer in one process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.learn import sharding
from grpo_jax.models import leaves, lora, quantized
from grpo_jax.models.products import LowRank
from tests.engines import test_jax_sampler_lora, tiny, updates
from tests.engines.test_jax_sampler import counted_compilations, texts

CONFIG = tiny.config(vocab_size=64, num_layers=1)
ONE_LAYER = tiny.config("qwen2", vocab_size=64, num_layers=1)
EXPERTS = tiny.config("qwen3_moe", vocab_size=64, num_layers=2)
REQUESTS = tiny.groups([[1, 2, 3], [5, 6, 7, 8], [9]], 4, stop_ids=(11,), max_tokens=20)
PLANNED = {"prompt_tokens": 8, "completion_tokens": 20, "group_size": 4}
MESH = {"data": 2, "fsdp": 2}


def sampler(model_config=CONFIG, numbers=None, **settings):
  devices = None if numbers is None else [jax.devices()[i] for i in numbers]
  settings = {"max_rows": 16, "chunk_tokens": 4, **PLANNED, **settings}
  return JaxSampler(model_config, devices=devices, **settings)


def placed(tree, shape=None, model_config=CONFIG):
  """Returns parameters on a mesh of the first devices; on the first alone without a shape."""
  if shape is None:
    return jax.device_put(tree, jax.devices()[0])
  count = int(np.prod(list(shape.values())))
  mesh = sharding.make_mesh(**shape, devices=jax.devices()[:count])
  rules = lambda leaf, x: _placed(leaf.axes, x, mesh)
  return jax.tree.map(rules, leaves.tree(model_config), tree)


def _placed(axes, x, mesh):
  put = lambda x, axes: jax.device_put(x, sharding.param_shardings(axes, mesh, shapes=x))
  if not isinstance(x, LowRank):
    return jax.tree.map(lambda x: put(x, axes), x)
  layers, inner, outer = axes
  a, b = put(x.a, (layers, inner, None)), put(x.b, (layers, None, outer))
  return LowRank(_placed(axes, x.base, mesh), a, b, x.scale)


def sampled(engine, trees, chunks=(1, 3)):
  """Returns what an engine samples while two updates come, and closes it."""
  with engine:
    engine.load_weights(trees[0], version=0)
    return updates.run(engine, REQUESTS, trees[1:], chunks)


def where(tree):
  return {device.id for x in jax.tree.leaves(tree) for device in x.sharding.device_set}


def buffers(arrays):
  """Returns where arrays are in memory: a part of one that is an array, too, has no other place."""
  shards = [shard for x in arrays for shard in x.addressable_shards]
  return {(shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in shards}


def adapted(seed, base=None):
  whole = test_jax_sampler_lora.base_of(config=ONE_LAYER)
  if base is not None:
    names = [name for name, x in whole["layers"].items() if x.ndim == 3]
    whole = test_jax_sampler_lora.quantized_base(whole, **dict.fromkeys(names, base))
  return test_jax_sampler_lora.joined(whole, config=ONE_LAYER, seed=seed)


def adapted_experts(seed):
  options, base = test_jax_sampler_lora.OPTIONS, test_jax_sampler_lora.base_of(config=EXPERTS)
  return test_jax_sampler_lora.joined(base, options, EXPERTS, seed=seed)


CASES = {
  # Adapters of attention stay apart, those of experts are merged.
  "experts": (EXPERTS, {"unmerged": True}, adapted_experts),
  "tied": (CONFIG, {}, None),
  "bfloat16": (ONE_LAYER, {"compute_dtype": "bfloat16"}, None),
  "merged": (ONE_LAYER, {"unmerged": False}, adapted),
  "nf4": (ONE_LAYER, {}, lambda seed: adapted(seed, quantized.Nf4)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_on_another_device_everything_is_the_same_bit_for_bit(name, monkeypatch):
  model_config, settings, make = CASES[name]
  monkeypatch.setattr(test_jax_sampler_lora, "ONE_LAYER", ONE_LAYER)
  make = make or (lambda seed: tiny.params(model_config, seed))
  trees = [make(seed) for seed in range(3)]
  wanted = sampled(sampler(model_config, **settings), trees)
  found = sampled(sampler(model_config, (5,), **settings), [placed(tree) for tree in trees])
  for key, generation in wanted.items():
    assert found[key].token_ids.tolist() == generation.token_ids.tolist()
    assert found[key].logprobs.tolist() == generation.logprobs.tolist()
    assert found[key].weight_versions.tolist() == generation.weight_versions.tolist()
  assert len({v for x in found.values() for v in x.weight_versions.tolist()}) == 3


@pytest.mark.long
@pytest.mark.parametrize("numbers", [(4, 5, 6), (7, 4, 6, 5), (6,), (4, 5)], ids=str)
def test_on_devices_of_its_own_it_samples_the_tokens_of_one_device(numbers):
  trees = [tiny.params(CONFIG, seed) for seed in range(3)]
  wanted = sampled(sampler(), trees)
  found = sampled(sampler(numbers=numbers), [placed(tree, MESH) for tree in trees])
  assert texts(found) == texts(wanted)
  for key, generation in wanted.items():
    np.testing.assert_allclose(found[key].logprobs, generation.logprobs, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("base", [None, quantized.Int8], ids=["float32", "int8"])
def test_an_adapter_spread_over_a_mesh_moves_to_split_devices(base, monkeypatch):
  monkeypatch.setattr(test_jax_sampler_lora, "ONE_LAYER", ONE_LAYER)
  trees = [adapted(seed, base) for seed in range(3)]
  wanted = sampled(sampler(ONE_LAYER, unmerged=True), trees)
  spread = [placed(tree, MESH, ONE_LAYER) for tree in trees]
  frozen = lora.base_of(spread[0])
  for tree in spread[1:]:  # as in a run, whose base is the same arrays always.
    for name, x in frozen["layers"].items():
      of = tree["layers"][name]
      tree["layers"][name] = LowRank(x, of.a, of.b, of.scale) if isinstance(of, LowRank) else x
    tree.update({name: x for name, x in frozen.items() if name != "layers"})
  engine = sampler(ONE_LAYER, (4, 5), unmerged=True)
  found = sampled(engine, spread)
  assert texts(found) == texts(wanted)
  for key, generation in wanted.items():
    np.testing.assert_allclose(found[key].logprobs, generation.logprobs, atol=1e-5)
  # The last updates brought the adapter only, a copy for each device of what is not split.
  kernels = [x for x in trees[0]["layers"].values() if isinstance(x, LowRank)]
  adapter = sum(x.a.nbytes + x.b.nbytes for x in kernels)
  assert adapter <= engine.metrics()["perf/sync_bytes"] <= 2 * adapter


@pytest.mark.long
def test_weights_and_caches_are_on_the_samplers_devices_and_split_over_them():
  tree = placed(tiny.params(CONFIG), MESH)
  before = buffers(jax.live_arrays())
  with sampler(numbers=(4, 5), in_flight_updates=True) as engine:
    engine.load_weights(tree, version=0)
    described, _ = engine.described(tree)
    test_jax_sampler_lora.assert_like(engine._weights, described)
    tiny.run(engine, REQUESTS)
    session = engine._session
    assert where(engine._weights) == where(session._own) == where(session._prompts) == {4, 5}
    assert {device for device, _ in buffers(jax.live_arrays()) - before} == {4, 5}
    layer = engine._weights.layers[0]
    q = jax.tree.leaves(layer["q"])[0]
    assert q.sharding.shard_shape(q.shape) == (16, 32)
    embed = engine._weights.embed
    assert embed.sharding.shard_shape(embed.shape) == (32, 32)


@pytest.mark.long
def test_caches_of_a_single_device_are_made_there():
  with sampler(numbers=(6,)) as engine:
    engine.load_weights(placed(tiny.params(CONFIG)), version=0)
    held = jax.live_arrays()
    known = {id(x) for x in held}
    tiny.run(engine, REQUESTS)
    made = [x for x in jax.live_arrays() if id(x) not in known]
    assert made and where(made) == {6}


@pytest.mark.parametrize("numbers", [(6,), (4, 5)], ids=str)
@pytest.mark.long
def test_nothing_is_compiled_after_the_first_load(numbers):
  trees = [placed(tiny.params(CONFIG, seed), MESH) for seed in range(3)]
  with sampler(numbers=numbers, in_flight_updates=True) as engine:
    jobs = engine.programs(trees[0])
    assert len(jobs) == 5
    for job in jobs:
      job()
    with engine._at_home():  # as the updates below, which come in the sampler's thread.
      engine.load_weights(trees[0], version=0)
    tiny.run(engine, tiny.groups([[1, 2]], 2, max_tokens=2))  # makes the caches.
    with counted_compilations() as compiled:
      updates.run(engine, REQUESTS, trees[1:], (1, 3))
    assert compiled == []


@pytest.mark.long
def test_the_trainer_may_delete_its_weights_as_soon_as_they_are_loaded():
  trees = [tiny.params(CONFIG, seed) for seed in range(3)]
  wanted = sampled(sampler(), trees)
  with sampler(numbers=(4, 5)) as engine:

    def load(version):
      own = jax.tree.map(jnp.copy, placed(trees[version], MESH))
      engine.load_weights(own, version=version)
      for x in jax.tree.leaves(own):
        x.delete()

    load(0)
    with updates.before_chunks({1: lambda: load(1), 3: lambda: load(2)}):
      assert texts(tiny.run(engine, REQUESTS)) == texts(wanted)


@pytest.mark.long
def test_a_layer_at_a_time_leaves_the_trainers_devices():
  deep = tiny.config(vocab_size=64, num_layers=8)
  tree = placed(tiny.params(deep), MESH, deep)
  held = jax.live_arrays()
  known, most, of_all = {id(x) for x in held}, 0, 0
  with sampler(deep, (4,)) as engine:
    gathering = engine._weight_sync._gathering_of(tree)
    move = gathering._moved

    def moved(arrays, like):
      nonlocal most, of_all
      new = [x for x in jax.live_arrays() if id(x) not in known and 4 not in where(x)]
      most = max(most, sum(x.nbytes for x in new))
      of_all += sum(x.nbytes for x in jax.tree.leaves(arrays))
      return move(arrays, like)

    gathering._moved = moved
    engine.load_weights(tree, version=0)
  assert 0 < most < 0.3 * of_all  # a layer is an eighth of the layers, and the embedding beside.


def test_devices_with_parameters_are_refused():
  with (
    sampler(numbers=(3, 4)) as engine,
    pytest.raises(ValueError, match=r"these devices have parameters: \[CpuDevice\(id=3\)\]"),
  ):
    engine.load_weights(placed(tiny.params(CONFIG), MESH), version=0)
