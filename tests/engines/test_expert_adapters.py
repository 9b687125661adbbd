"""Adapters of experts in the embedded sampler: merged at each sync; attention's stay apart."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.engines import merge_rounding
from grpo_jax.learn import served_weights, sharding
from grpo_jax.models import leaves, lora, transformer
from grpo_jax.models.mixture import Mixture
from grpo_jax.models.products import LowRank, Products
from tests.engines import test_jax_sampler_lora as dense
from tests.engines import tiny

MIXTURE = Mixture(4, 2, width=24, normalised=True, shared_width=20)
CONFIG = tiny.config("qwen2_moe", vocab_size=64, num_layers=1, mixture=MIXTURE)
OPTIONS = lora.AdapterOptions(rank=3, alpha=6.0)

mismatch = functools.partial(dense.mismatch, config=CONFIG)
sampler = functools.partial(dense.sampler, CONFIG)


def joined(base=None, **drawn):
  return dense.joined(base, OPTIONS, CONFIG, **drawn)


@pytest.mark.long
def test_every_sync_merges_the_experts_on_a_mesh_and_copies_no_base():
  mesh = sharding.make_mesh(data=1, fsdp=2, expert=2, tensor=2)
  put = lambda x, axes: jax.device_put(x, sharding.param_shardings(axes, mesh, shapes=x))
  axes = jax.tree.map(lambda leaf: leaf.axes, lora.tree(CONFIG, OPTIONS))
  base = put(dense.base_of(config=CONFIG), transformer.logical_axes(CONFIG))
  adapters = [put(dense.adapter_of(OPTIONS, CONFIG, seed=seed), axes) for seed in range(2)]
  split = [lora.join(base, adapter, OPTIONS.scale) for adapter in adapters]
  with sampler() as engine:
    described, _ = engine.described(split[0])
    engine.load_weights(split[0], version=0)
    dense.assert_like(engine._weights, described)
    gate = engine._weights.adapters[0]["expert_gate"]
    assert gate.sharding.shard_shape(gate.shape) == (2, 16, 12)
    assert {*leaves.EXPERTS}.isdisjoint(engine._weights.layers[0])
    own = jax.tree.leaves(engine._weights.layers)
    found = dense.sampled(engine, split[1], version=1)
    assert all(a is b for a, b in zip(own, jax.tree.leaves(engine._weights.layers), strict=True))
    changed = jax.tree.leaves(engine._weights.adapters)
    in_memory = sum(part.data.nbytes for x in changed for part in x.addressable_shards)
    assert engine.metrics()["perf/sync_bytes"] == in_memory
  tree = joined(seed=1)
  assert mismatch(tree, found) < 1e-5
  # Faults that this must see: another scale of one kernel, and the adapter of another version.
  gate = dataclasses.replace(tree["layers"]["expert_gate"], scale=0.5 * OPTIONS.scale)
  assert mismatch({**tree, "layers": {**tree["layers"], "expert_gate": gate}}, found) > 1e-3
  assert mismatch(joined(seed=0), found) > 1e-2


@pytest.mark.long
def test_in_bfloat16_the_trainer_computes_with_the_experts_that_the_sampler_has():
  base, products = dense.base_of(jnp.bfloat16, CONFIG), Products(jnp.bfloat16)
  tree = joined(base)
  with sampler(compute_dtype=jnp.bfloat16) as engine:
    found = dense.sampled(engine, tree)
    weights = engine._weights.adapters[0]
    share = engine.metrics()["lora/merged_share"]
  assert mismatch(tree, found, products) < 1e-4
  assert mismatch(lora.base_of(tree), found, products) > 1e-2
  served = served_weights.rounded(tree, jnp.bfloat16, is_merged=False)["layers"]
  assert isinstance(served["q"], LowRank) and isinstance(served["shared_up"], LowRank)
  for name in leaves.EXPERTS:
    np.testing.assert_array_equal(weights[name], served[name][0])
  assert share == pytest.approx(
    float(lora.merged_share(lora.merged_always(tree["layers"]), jnp.bfloat16)), rel=1e-3
  )


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_low_share_of_experts_is_warned_of_once_as_the_trainer_rounds_them_too(is_apart, caplog):
  tree = joined(dense.base_of(jnp.bfloat16, CONFIG), size=1e-6)
  measured = merge_rounding.MergedShare(jnp.bfloat16)
  for _ in range(2):
    measured.measure(tree, is_apart=is_apart)
  assert measured.metrics()["lora/merged_share"] < 0.1
  (message,) = caplog.messages
  assert "in the update, too" in message and "sync='adapter'" not in message
