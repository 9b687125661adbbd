"""New weights while the embedded sampler has unfinished completions."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.engines import sampler_programs, sampler_sizes
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.learn import sharding
from grpo_jax.models import leaves, quantized, transformer
from grpo_jax.models.config import LayerKind, Rope
from grpo_jax.models.products import LowRank, Products
from grpo_plan import hlo_collectives
from tests.engines import described, test_jax_sampler_lora, tiny, updates
from tests.engines.sglang_fixtures import decode
from tests.engines.test_jax_sampler import counted_compilations, texts

CONFIG = tiny.config(num_layers=1)  # enough where the depth does not matter.


def requests_of(lengths, size, *, seed=0, most=90, **sampling):
  """Returns `size` completions of unequal limits for random prompts of these lengths."""
  rng = np.random.default_rng(seed)
  return [
    tiny.request(
      f"{p}.{g}",
      prompt,
      seed=1000 * p + g,
      **{"max_tokens": int(rng.integers(3, most)), **sampling},
    )
    for p, prompt in enumerate([rng.integers(0, 61, n) for n in lengths])
    for g in range(size)
  ]


def sampler(model_config=CONFIG, **settings):
  return tiny.sampler(model_config, version=0, **{"max_rows": 16, "chunk_tokens": 4, **settings})


def weights(count, model_config=CONFIG):
  return [tiny.params(model_config, seed) for seed in range(count)]


@pytest.mark.parametrize("form", ["ring", "rows"])
@pytest.mark.long
def test_every_token_has_the_logprob_of_its_version(form):
  """200 completions of prompts of one token, of one page and of several; five updates.

  Two of the updates come one chunk after the other.
  """
  requests = requests_of((1, 2, 70, 130, 5, 64, 65, 30, 3, 100), 20)
  model_config = tiny.config(num_layers=2)
  trees = weights(6, model_config)
  engine = sampler(model_config, form=form)
  generations = updates.run(engine, requests, trees[1:], (3, 40, 41, 90, 140))
  assert len(generations) == 200
  wanted = updates.trainer_logprobs(model_config, trees, requests, generations)
  versions = [x.weight_versions for x in generations.values()]
  assert all((np.diff(of_tokens) >= 0).all() for of_tokens in versions)
  assert {int(v) for of_tokens in versions for v in of_tokens} == set(range(6))
  assert sum(len(set(of_tokens.tolist())) > 1 for of_tokens in versions) > 40
  assert updates.mismatch(generations, wanted) < 1e-5
  assert engine.stats.recomputed_tokens > 1000


SETTINGS = {
  "greedy": {"temperature": 0.0},
  "sampled": {"stop_ids": (11,), "stop_strings": (".7.", "12")},
  "filtered": {"top_p": 0.9, "temperature": 0.7},
}


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_weights_that_do_not_change_change_no_completion(name):
  requests = requests_of((3, 70, 1), 8, max_tokens=40, **SETTINGS[name])
  undisturbed = sampler(decode=decode, warn_of_truncation=False)
  wanted = tiny.run(undisturbed, requests)
  engine = sampler(decode=decode, warn_of_truncation=False)
  found = updates.run(engine, requests, [tiny.params(CONFIG)] * 3, (2, 3, 6))
  assert engine.stats.recomputed_tokens > 500
  assert engine.stats.sampled_tokens == undisturbed.stats.sampled_tokens
  for key, generation in wanted.items():
    assert found[key].token_ids.tolist() == generation.token_ids.tolist()
    assert found[key].finish_reason is generation.finish_reason
    assert found[key].matched_stop == generation.matched_stop
    np.testing.assert_allclose(found[key].logprobs, generation.logprobs, atol=1e-5)
  reasons = {x.matched_stop for x in wanted.values()}
  assert len(reasons) > 1 or name != "sampled"


@pytest.mark.long
def test_an_update_reads_each_prompt_once_and_each_sampled_token_once():
  engine = sampler()
  requests = tiny.groups([[1, 2, 3, 4, 5], [6], [7, 7, 7]], 4, max_tokens=30)
  updates.run(engine, requests, weights(2)[1:], (0,))
  # After the first chunk of 4: prompts without their last tokens, and 12 rows of 4 tokens.
  assert engine.stats.recomputed_tokens == 4 + 0 + 2 + 12 * 4
  assert engine.stats.prefilled_tokens == 4 + 2 and engine.stats.prefilled_prompts == 2


@pytest.mark.long
def test_of_two_updates_between_two_chunks_the_first_samples_nothing():
  requests, trees = tiny.groups([[1, 2], [3]], 4, max_tokens=20), weights(3)
  engine = sampler()

  def both():
    engine.load_weights(trees[1], version=1)
    engine.load_weights(trees[2], version=2)

  with updates.before_chunks({1: both}):
    found = tiny.run(engine, requests)
  assert {v for x in found.values() for v in x.weight_versions.tolist()} == {0, 2}
  wanted = updates.trainer_logprobs(CONFIG, trees, requests, found)
  assert updates.mismatch(found, wanted) < 1e-5


@pytest.mark.long
def test_new_weights_of_the_same_version_are_seen():
  requests, trees = tiny.groups([[1, 2, 3], [3]], 4, max_tokens=20), weights(2)
  engine = sampler()
  with updates.before_chunks({1: lambda: engine.load_weights(trees[1], version=0)}):
    found = tiny.run(engine, requests)
  wanted = updates.trainer_logprobs(CONFIG, trees, requests, found)
  after = {name: x.logprobs[8:] - wanted[name][1, 8:] for name, x in found.items()}
  assert max(np.abs(x).max() for x in after.values()) < 1e-5


@pytest.mark.long
def test_what_is_compiled_ahead_serves_updates_in_flight():
  """Also in a ring that has gone round, with fewer pages than all rows need, and as rows move."""
  sizes = {"prompt_tokens": 129, "completion_tokens": 70, "group_size": 4, "long_prompts": 2}
  engine = sampler(in_flight_updates=True, **sizes)
  trees = weights(6)
  jobs = engine.programs(trees[0])
  assert len(jobs) == 4
  for job in jobs:
    job()
  tiny.run(engine, tiny.groups([[1, 2]], 2, max_tokens=2))  # makes the caches.
  requests = requests_of((129, 128, 1, 66) * 30, 1, most=70)
  engine.load_weights(trees[0], version=0)
  with counted_compilations() as compiled:
    generations = updates.run(engine, requests, trees[1:], (1, 20, 45, 70, 90))
  assert compiled == []
  assert engine.stats.decode_steps > 2 * engine._sizes.blocks * engine._sizes.columns
  wanted = updates.trainer_logprobs(CONFIG, trees, requests, generations)
  assert updates.mismatch(generations, wanted) < 1e-5
  assert len(sampler(**sizes).programs(trees[0])) == 3


@pytest.mark.long
def test_where_layers_differ_windows_reach_over_prompt_and_completion():
  kinds = (LayerKind(5), LayerKind(100, None), LayerKind(40, 1))
  options = {"num_layers": 3, "further_ropes": (Rope(77.0),), "embedding_scale": 2.0}
  named = {"activation": "gelu_tanh", "norm_offset": 1.0, "post_norms": True}
  model_config = tiny.config("qwen2", layer_kinds=kinds, **options, **named)
  requests = requests_of((90, 2, 30), 4, max_tokens=70)
  trees = weights(3, model_config)
  found = updates.run(sampler(model_config), requests, trees[1:], (1, 15))
  wanted = updates.trainer_logprobs(model_config, trees, requests, found)
  assert updates.mismatch(found, wanted) < 2e-5


@pytest.mark.long
def test_in_bfloat16_a_recomputed_cache_is_as_near_to_the_trainer_as_one_of_these_weights():
  model_config = tiny.config("qwen2")
  requests, trees = requests_of((3, 20), 4, max_tokens=24), weights(2, model_config)

  def distance(generations):
    found = []
    for request in requests:
      x = generations[request.request_id]
      at = x.weight_versions == 1
      given = (model_config, trees[1], request.prompt_ids, x.token_ids)
      wanted = tiny.model_logprobs(*given, products=Products("bfloat16"))
      found.append(np.abs(x.logprobs - tiny.of_tokens(wanted, x.token_ids))[at])
    return np.concatenate(found).mean()

  settings = {"compute_dtype": "bfloat16"}
  update = (requests, trees[1:], (2,))
  unbroken = sampler(model_config, **settings)
  unbroken.load_weights(trees[1], version=1)
  rounding = distance(tiny.run(unbroken, requests))
  assert 0 < rounding < 3e-3
  assert distance(updates.run(sampler(model_config, **settings), *update)) < 2 * rounding


BASES = {"float32": None, "int8": quantized.Int8, "nf4": quantized.Nf4}


@pytest.mark.long
@pytest.mark.parametrize("base", BASES)
def test_an_adapter_that_changes_under_way(base):
  case = test_jax_sampler_lora
  whole = case.base_of(config=case.ONE_LAYER)
  if BASES[base] is not None:
    names = [name for name, x in whole["layers"].items() if x.ndim == 3]
    whole = case.quantized_base(whole, **dict.fromkeys(names, BASES[base]))
  trees = [case.joined(whole, config=case.ONE_LAYER, seed=seed) for seed in range(3)]
  engine = case.sampler(case.ONE_LAYER, in_flight_updates=True, copy_weights=True)
  engine.load_weights(trees[0], version=0)

  def update(version):
    own = joined_again(trees[version])
    engine.load_weights(own, version=version)
    for kernel in own["layers"].values():  # the trainer's next update donates its adapter.
      if isinstance(kernel, LowRank):
        kernel.a.delete()
        kernel.b.delete()

  with updates.before_chunks({0: lambda: update(1), 1: lambda: update(2)}):
    found = tiny.run(engine, tiny.groups(case.PROMPTS, 2, max_tokens=9))
  for name, x in found.items():
    prompt = case.PROMPTS[int(name.split(".")[0])]
    assert x.weight_versions.tolist() == [0] * 4 + [1] * 4 + [2]
    for version, tree in enumerate(trees):
      given = (case.ONE_LAYER, tree, prompt, x.token_ids, Products())
      wanted = tiny.of_tokens(case.trainer_logprobs(*given), x.token_ids)
      mine = x.weight_versions == version
      np.testing.assert_allclose(x.logprobs[mine], wanted[mine], atol=1e-5)
  assert engine.metrics()["perf/sync_bytes"] == sum(
    x.nbytes for x in jax.tree.leaves(case.adapter_of(config=case.ONE_LAYER))
  )
  engine.close()


def joined_again(tree):
  """Returns the tree with copies of its adapter."""
  copy = lambda x: LowRank(x.base, jnp.copy(x.a), jnp.copy(x.b), x.scale)
  stack = {k: copy(x) if isinstance(x, LowRank) else x for k, x in tree["layers"].items()}
  return {**tree, "layers": stack}


@pytest.mark.long
def test_a_trainer_may_delete_its_weights_as_soon_as_they_are_loaded():
  requests = requests_of((3, 70), 4, max_tokens=30)
  trees = weights(3)
  wanted = updates.run(sampler(), requests, trees[1:], (1, 3))
  engine = sampler(copy_weights=True)
  copies = [jax.tree.map(jnp.copy, tree) for tree in trees]
  engine.load_weights(copies[0], version=0)
  delete = lambda tree: [x.delete() for x in jax.tree.leaves(tree)]
  delete(copies[0])

  def update(version):
    engine.load_weights(copies[version], version=version)
    delete(copies[version])

  with updates.before_chunks({1: lambda: update(1), 3: lambda: update(2)}):
    found = tiny.run(engine, requests)
  assert texts(found) == texts(wanted)
  for name, generation in wanted.items():
    assert found[name].logprobs.tolist() == generation.logprobs.tolist()


@pytest.mark.long
@pytest.mark.parametrize("shape", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 1, "fsdp": 8}])
def test_on_a_mesh_an_update_in_flight_gives_the_tokens_of_one_device(shape):
  model_config = tiny.config(vocab_size=64, num_layers=1)
  trees = [tiny.params(model_config, seed) for seed in range(3)]
  mesh = sharding.make_mesh(**shape)
  axes = transformer.logical_axes(model_config)
  place = lambda tree: jax.device_put(tree, sharding.param_shardings(axes, mesh, shapes=tree))
  requests = tiny.groups([[1, 2, 3], [5, 6, 7, 8]], 4, stop_ids=(11,), max_tokens=20)

  def sampled(trees):
    engine = JaxSampler(model_config, max_rows=8, chunk_tokens=4)
    engine.load_weights(trees[0], version=0)
    return updates.run(engine, requests, trees[1:], (0, 2))

  wanted, got = sampled(trees), sampled([place(tree) for tree in trees])
  assert texts(got) == texts(wanted)
  for name, generation in wanted.items():
    np.testing.assert_allclose(got[name].logprobs, generation.logprobs, atol=1e-5)


SIZES = sampler_sizes.SamplerSizes(
  16, prefill=48, page=16, columns=16, blocks=2, table=3, pages=12, is_planned=True
)


@pytest.mark.long
@pytest.mark.parametrize("shape", [{"data": 2, "fsdp": 4}, {"data": 1, "fsdp": 4, "tensor": 2}])
def test_on_a_mesh_the_ring_stays_where_it_is_as_completions_are_read_again(shape):
  wide = {"hidden_size": 80, "intermediate_size": 208, "num_heads": 8, "head_dim": 10}
  model_config = tiny.config(vocab_size=64, **wide)
  mesh = sharding.make_mesh(**shape)
  shapes = leaves.tree(model_config)
  lies = sharding.param_shardings(transformer.logical_axes(model_config), mesh, shapes=shapes)
  place = lambda x, at: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=at)
  given = described.described(model_config, jax.tree.map(place, shapes, lies), rows=16, sizes=SIZES)
  sampled = sampler_programs.Programs().jobs(
    given.decode[0], given.options, SIZES, reads_again=True
  )
  (job,) = [job for job in sampled if job.name.startswith("reading completions again")]
  found = hlo_collectives.collectives(job.run().as_text(), devices=8)
  moved = {array.shape for one in found for array in one.arrays}
  ring = given.decode[2][0][0].shape
  # Of the rows that a call reads again, those that other devices have, and never the ring. Kernels
  # are gathered, too: they have no axis of a head's 10 dimensions beside one of 16 columns.
  cached = {shape for shape in moved if 10 in shape and 16 in shape}
  assert cached and max(map(np.prod, cached)) < np.prod(ring) / 2


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_request_that_comes_during_a_load_is_served(in_flight, monkeypatch):
  """By the old weights meanwhile if updates are planned in flight, otherwise by the new ones."""
  engine = sampler(in_flight_updates=in_flight)
  begun, may_end = threading.Event(), threading.Event()
  copied = engine._weight_sync.copied

  def slowly(*arguments):
    begun.set()
    assert may_end.wait(60)
    return copied(*arguments)

  monkeypatch.setattr(engine._weight_sync, "copied", slowly)
  tree, found = tiny.params(CONFIG, 1), []
  load = threading.Thread(target=engine.load_weights, args=(tree,), kwargs={"version": 1})
  ask = lambda: found.append(tiny.run(engine, [tiny.request("x", [1, 2])])["x"])
  asking = threading.Thread(target=ask)
  load.start()
  assert begun.wait(60)
  asking.start()
  asking.join(60 if in_flight else 0.3)
  assert bool(found) == in_flight
  may_end.set()
  load.join()
  asking.join()
  assert set(found[0].weight_versions.tolist()) == {0 if in_flight else 1}
  assert engine.weight_version == 1
  engine.close()


def test_an_engine_that_is_closed_during_a_load_stays_closed(monkeypatch):
  engine = sampler(in_flight_updates=True)
  copied = engine._weight_sync.copied

  def closed(*arguments):
    engine.close()
    return copied(*arguments)

  monkeypatch.setattr(engine._weight_sync, "copied", closed)
  with pytest.raises(RuntimeError, match="closed"):
    engine.load_weights(tiny.params(CONFIG), version=1)
  assert engine._weights is None


@pytest.mark.long
def test_an_idle_sampler_holds_no_weights_of_before():
  engine = sampler(prompt_tokens=8, completion_tokens=16)
  tiny.run(engine, [tiny.request("x", [1, 2])])
  assert engine._session is not None and engine._session._weights is None
