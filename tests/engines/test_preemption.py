"""Completions that are put back into the queue because the cache has no room for all rows."""

import dataclasses

import jax
import numpy as np
import pytest

from grpo_jax.compilation.programs import OutOfMemory
from grpo_jax.engines import (
  kv_cache,
  sampler_inputs,
  sampler_programs,
  sampler_sizes,
  scheduling,
)
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.learn import sharding
from grpo_jax.models import transformer
from grpo_jax.models.config import LayerKind
from grpo_jax.models.mixture import Mixture
from grpo_jax.models.products import Products
from tests.engines import tiny, updates

# One layer keeps a window that is shorter than a block; the other one has experts of all tokens.
KINDS = (LayerKind(20), LayerKind())
CONFIG = tiny.config("qwen3", layer_kinds=KINDS, mixture=Mixture(4, 2, 12, normalised=True))
PROMPTS = [[5, 9, 2], list(range(40)) * 2, [7]]


def options_of(config=CONFIG, **settings):
  return sampler_inputs.ProgramOptions(config, Products(), chunk=4, **settings)


def requests_of(least, most):
  """Returns nine completions of unequal limits."""
  rng = np.random.default_rng(0)
  return [
    tiny.request(f"{p}.{g}", ids, seed=10 * p + g, max_tokens=int(rng.integers(least, most)))
    for p, ids in enumerate(PROMPTS)
    for g in range(3)
  ]


def bounded(rows, *, config=CONFIG, **settings):
  """Returns a sampler with memory for 64 columns of each of its rows."""
  room = rows * kv_cache.row_bytes(64, options_of(config))
  sizes = {"prompt_tokens": 80, "completion_tokens": 140, "group_size": 3, "sampled_bytes": room}
  return tiny.sampler(config, max_rows=rows, **sizes, **settings)


def blocks_of(engine):
  assert engine._session is not None
  return engine._session._sizes.blocks


@pytest.mark.parametrize("form", ["ring", "rows"])
@pytest.mark.long
def test_a_completion_that_waited_for_memory_is_the_same(form):
  requests, settings = requests_of(70, 110), {"form": form, "record_experts": True}
  with tiny.sampler(CONFIG, max_rows=9, group_size=3, **settings) as engine:
    wanted = tiny.run(engine, requests)
    assert engine.stats.preemptions == 0 and "engine/preemptions" not in engine.metrics()
  with bounded(9, **settings) as engine:
    found = tiny.run(engine, requests)
    assert engine.metrics()["engine/preemptions"] == engine.stats.preemptions >= 3
    assert engine.stats.sampled_tokens == sum(len(x.token_ids) for x in wanted.values())
    assert blocks_of(engine) == 2
    tiny.run(engine, tiny.groups(PROMPTS, 3, max_tokens=2))  # these need all rows.
    assert blocks_of(engine) == 1
  for name, generation in wanted.items():
    same = found[name]
    assert same.token_ids.tolist() == generation.token_ids.tolist()
    assert same.weight_versions.tolist() == generation.weight_versions.tolist()
    assert same.finish_reason is generation.finish_reason
    np.testing.assert_allclose(same.logprobs, generation.logprobs, atol=2e-5)
    np.testing.assert_array_equal(same.prompt_experts, generation.prompt_experts)
    np.testing.assert_array_equal(same.experts, generation.experts)


@pytest.mark.long
def test_new_weights_that_come_while_completions_wait_read_them_too():
  config = tiny.config(num_layers=1)
  requests, trees = requests_of(100, 140), [tiny.params(config, seed) for seed in range(3)]
  engine = bounded(9, config=config, version=0)
  found = updates.run(engine, requests, trees[1:], (5, 24))
  assert engine.stats.preemptions > 3
  wanted = updates.trainer_logprobs(config, trees, requests, found)
  assert updates.mismatch(found, wanted) < 1e-5
  assert {int(v) for x in found.values() for v in x.weight_versions} == {0, 1, 2}


@pytest.mark.long
def test_devices_that_divide_rows_and_heads_keep_within_the_memory_of_each():
  config = tiny.config(vocab_size=64, num_layers=1)
  requests, tree = tiny.groups(PROMPTS[:2], 4, max_tokens=80), tiny.params(config)
  with tiny.sampler(config) as engine:
    wanted = tiny.run(engine, requests)
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  shardings = sharding.param_shardings(transformer.logical_axes(config), mesh, shapes=tree)
  # Two of eight rows on each device, and one of two heads.
  room = 2 * kv_cache.row_bytes(64, options_of(config)) // 2
  with JaxSampler(config, max_rows=8, chunk_tokens=4, sampled_bytes=room) as engine:
    engine.load_weights(jax.device_put(tree, shardings), version=1)
    rows = [engine._sizes.rows_of(blocks, engine._options) for blocks in (1, 2, 3)]
    assert rows == [8, 4, 0] and engine._sizes.longest(engine._options) == 128
    found = tiny.run(engine, requests)
    assert engine.stats.preemptions == 4
  for name, generation in wanted.items():
    assert found[name].token_ids.tolist() == generation.token_ids.tolist()
    np.testing.assert_allclose(found[name].logprobs, generation.logprobs, atol=2e-5)


def test_the_youngest_are_put_back_and_groups_stay_together():
  active = [
    scheduling.RunningCompletion(tiny.request(i, [1]), None, b"", token_ids=[0] * tokens)
    for i, tokens in enumerate([5, 3, 3, 3, 9])
  ]
  names = lambda count: [c.request.request_id for c in scheduling.youngest(active, count)]
  assert names(2) == ["3", "2"] and names(4) == ["3", "2", "1", "0"] and names(-1) == []
  assert scheduling.longest(active, 4) == 12 and scheduling.longest([], 4) == 0


def test_longer_completions_leave_fewer_rows_of_the_same_memory():
  options = options_of()
  of_token = kv_cache.token_bytes(options)
  room = 16 * kv_cache.row_bytes(64, options)
  sizes = sampler_sizes.unplanned(16, form="rows")
  assert sizes.rows_of(50, options) == 16 and sizes.longest(options) is None
  sizes = dataclasses.replace(sizes, sampled_bytes=room)
  # The layer with a window keeps 64 columns of every row.
  for blocks in (1, 2, 3, 8):
    row = 64 * (of_token[20] + blocks * of_token[None])
    assert sizes.rows_of(blocks, options) == min(room // row, 16)
  most = (sizes.longest(options) or 0) // 64
  assert sizes.rows_of(most, options) == 1 and sizes.rows_of(most + 1, options) == 0
  assert sizes.blocks_of(100, options) == 2 and sizes.blocks_of(64 * most, options) == most


@pytest.mark.parametrize("form", ["ring", "rows"])
def test_the_first_cache_has_room_for_all_rows_whatever_is_planned(form):
  options, limits = options_of(form=form), {"prompt_tokens": 30, "long_prompts": 8, "form": form}
  settings = {**limits, "token_bytes": kv_cache.token_bytes(options), "whole_caches": True}
  planned = lambda tokens, room: sampler_sizes.planned(
    16, **settings, completion_tokens=tokens, sampled_bytes=room
  )
  room = 16 * kv_cache.row_bytes(640, options) + 15
  within = planned(5000, room).within(options)
  assert within.blocks * within.columns == 640 and within.rows_of(within.blocks, options) == 16
  assert within.blocks_of(4600, options) * within.columns == (5120 if form == "rows" else 5056)
  assert planned(640, room).within(options) == planned(640, room)
  least = planned(5000, 1000 + kv_cache.row_bytes(64, options)).within(options)
  assert least.blocks * least.columns == 64 and least.rows_of(least.blocks, options) == 1


@pytest.mark.parametrize("form", ["ring", "rows"])
def test_a_cache_grows_a_layer_at_a_time(form, monkeypatch):
  """Old and new columns of all layers together would be half as much again as the new cache."""
  options, in_memory = options_of(tiny.config(num_layers=3), form=form), []
  own = sampler_programs.empty_own(2, 5, 24, options)
  old, one = {x.shape for x in own[0]}, sampler_programs._grown

  def grown(*arguments):
    found = one(*arguments)
    in_memory.append(sum(x.shape in old for x in jax.live_arrays()))
    return found

  monkeypatch.setattr(sampler_programs, "_grown", grown)
  sampler_programs.grow(own, {4: scheduling.regrown(2, 4, 1)}, 4, 24, options)
  assert in_memory == [6, 4, 2] and not old & {x.shape for x in jax.tree.leaves(own)}


def test_a_completion_for_which_no_memory_suffices_is_refused_by_name():
  engine = bounded(2, config=tiny.config(num_layers=1))
  requests = [tiny.request("fits", [1, 2], max_tokens=128)]
  with pytest.raises(ValueError, match="'long': max_tokens 129 exceeds 128, the tokens of the lon"):
    engine.generate([*requests, tiny.request("long", [1, 2], max_tokens=129)])


def test_a_longest_completion_without_a_row_is_refused_before_anything_is_compiled():
  config = tiny.config(num_layers=1)
  sizes = {"prompt_tokens": 8, "completion_tokens": 200, "max_rows": 2}
  room = kv_cache.row_bytes(192, options_of(config))
  engine = tiny.sampler(config, **sizes, sampled_bytes=room)
  with pytest.raises(OutOfMemory, match="holds no completion of 200 tokens, whose keys and values"):
    engine.programs(tiny.params(config))
  assert tiny.sampler(config, **sizes, sampled_bytes=room * 2).programs(tiny.params(config))
