"""What only the embedded sampler promises: sharing, batches, compilations, weights, failures."""

import asyncio
import contextlib
import dataclasses
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.engines import (
  continuous_batching,
  decoding,
  kv_cache,
  ring_cache,
  sampler_inputs,
  sampler_programs,
  sampler_sizes,
  sampler_weights,
  sampling,
  scheduling,
)
from grpo_jax.engines.prompt_pages import Pool
from grpo_jax.models.config import LayerKind, Rope
from grpo_jax.models.products import Products
from grpo_jax.types import FinishReason
from tests.engines import tiny

CONFIG = tiny.config(num_layers=1)  # the depth is the question of two tests.
PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8], list(range(20, 60)), [9, 9, 9]]


def sampler(model_config=CONFIG, **settings):
  return tiny.sampler(model_config, **settings)


def texts(generations):
  return {name: g.token_ids.tolist() for name, g in generations.items()}


def stats_of(engine, requests):
  """Returns what one call added to the statistics, and its generations."""
  before = dataclasses.asdict(engine.stats)
  generations = tiny.run(engine, requests)
  after = dataclasses.asdict(engine.stats)
  return {name: after[name] - before[name] for name in after}, generations


@pytest.mark.long
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logprobs_equal_the_trainers_for_every_family(family):
  model_config = tiny.config(family, num_layers=2)
  engine = sampler(model_config)
  tree = tiny.params(model_config)
  requests = tiny.groups(PROMPTS[:3], 4, stop_ids=(11,))
  generations = tiny.run(engine, requests)
  for request in requests:
    generation = generations[request.request_id]
    wanted = tiny.model_logprobs(model_config, tree, request.prompt_ids, generation.token_ids)
    wanted = tiny.of_tokens(wanted, generation.token_ids)
    np.testing.assert_allclose(generation.logprobs, wanted, atol=1e-5)


@pytest.mark.parametrize("form", ["ring", "rows"])
@pytest.mark.long
def test_logprobs_equal_the_trainers_where_layers_differ(form):
  """Windows over pages, tiles, the ring and continued prompts; layers without rotary tables."""
  kinds = (LayerKind(5), LayerKind(100, None), LayerKind(70, 1))
  options = {"num_layers": 3, "further_ropes": (Rope(77.0),), "embedding_scale": 2.0}
  named = {"activation": "gelu_tanh", "norm_offset": 1.0, "post_norms": True}
  model_config = tiny.config("qwen2", layer_kinds=kinds, **options, **named)
  engine, tree = sampler(model_config, form=form), tiny.params(model_config)
  prompts = [list(range(90)), [7, 8], [3] * 40 + list(range(50)) * 2, [6]]
  prompts = [[token % 61 for token in prompt] for prompt in prompts]
  requests = [*tiny.groups(prompts, 3), tiny.request("alone", prompts[2][5:])]
  generations = tiny.run(engine, requests)
  for request in requests:
    generation = generations[request.request_id]
    wanted = tiny.model_logprobs(model_config, tree, request.prompt_ids, generation.token_ids)
    wanted = tiny.of_tokens(wanted, generation.token_ids)
    np.testing.assert_allclose(generation.logprobs, wanted, atol=2e-5)


@pytest.mark.long
def test_bfloat16_compute_stays_near_float32_and_repeats_itself():
  engine = sampler(compute_dtype=jnp.bfloat16)
  requests = tiny.groups(PROMPTS[:2], 4)
  generations = tiny.run(engine, requests)
  assert texts(tiny.run(engine, requests)) == texts(generations)
  tree = tiny.params(CONFIG)
  for request in requests:
    generation = generations[request.request_id]
    wanted = tiny.model_logprobs(CONFIG, tree, request.prompt_ids, generation.token_ids)
    wanted = tiny.of_tokens(wanted, generation.token_ids)
    difference = np.abs(generation.logprobs - wanted)
    assert 0 < difference.max() < 0.15  # eight bits of mantissa; not float32 in disguise.


@pytest.mark.long
@pytest.mark.parametrize(
  ("family", "product_dtype", "form"),
  [
    ("qwen2", None, "ring"),
    ("qwen2", "float32", "ring"),
    ("qwen2", None, "rows"),
    ("gemma3_text", None, "ring"),
  ],
)
def test_in_bfloat16_sampler_and_trainer_round_at_the_same_places(family, product_dtype, form):
  model_config = tiny.config(family)
  tree = tiny.params(model_config)
  dtypes = {"compute_dtype": "bfloat16", "product_dtype": product_dtype}
  engine = sampler(model_config, form=form, **dtypes)
  requests = tiny.groups(PROMPTS[:2], 4, max_tokens=24)
  generations = tiny.run(engine, requests)

  def distance(products):
    """The mean distance of the engine's logprobs from the trainer's, in nats."""
    found = []
    for request in requests:
      sampled = generations[request.request_id]
      given = (model_config, tree, request.prompt_ids, sampled.token_ids)
      trainers = tiny.of_tokens(tiny.model_logprobs(*given, products=products), sampled.token_ids)
      found.append(np.abs(sampled.logprobs - trainers))
    return np.concatenate(found).mean()

  others = "float32" if product_dtype is None else None
  assert distance(Products("bfloat16", product_dtype)) < 1e-4  # a flipped bit now and then.
  assert distance(Products("bfloat16", others)) > 2e-3


@pytest.mark.long
def test_first_tokens_follow_the_models_distribution_by_chi_square():
  engine = sampler(max_rows=256)
  requests = tiny.groups([[1, 2, 3]], 2000, max_tokens=1)
  tokens = [int(g.token_ids[0]) for g in tiny.run(engine, requests).values()]
  tree = tiny.params(CONFIG)
  expected = np.exp(tiny.model_logprobs(CONFIG, tree, [1, 2, 3], [0])[0]) * 2000
  observed = np.bincount(tokens, minlength=tiny.VOCABULARY)
  often = expected >= 5
  statistic = ((observed - expected)[often] ** 2 / expected[often]).sum()
  assert statistic < 99.6  # 99.9% at 60 degrees of freedom.


@pytest.mark.parametrize("max_rows", [1, 8, 40])
@pytest.mark.long
def test_completions_do_not_depend_on_what_is_computed_beside_them(max_rows):
  requests = tiny.groups(PROMPTS[1:4], 8, stop_ids=(11, 12), max_tokens=20)
  together = tiny.run(sampler(max_rows=max_rows), requests)
  assert len({len(g.token_ids) for g in together.values()}) > 3  # rows end at different times.
  shuffled = [requests[i] for i in np.random.default_rng(0).permutation(len(requests))]
  assert texts(tiny.run(sampler(), shuffled)) == texts(together)
  alone = sampler()
  for request in requests[::7]:
    name = request.request_id
    assert texts(tiny.run(alone, [request])) == {name: together[name].token_ids.tolist()}


@pytest.mark.long
def test_every_token_is_drawn_with_the_uniform_of_its_seed_and_index():
  engine = sampler()
  tree = tiny.params(CONFIG)
  requests = tiny.groups([[1, 2, 3], [4, 5]], 4, temperature=0.8)
  for name, generation in tiny.run(engine, requests).items():
    request = next(r for r in requests if r.request_id == name)
    logprobs = tiny.model_logprobs(
      CONFIG, tree, request.prompt_ids, generation.token_ids, temperature=0.8
    )
    ends = np.cumsum(np.exp(logprobs.astype(np.float64)), axis=1)
    seeds = jnp.asarray([[0, request.seed]] * len(ends), jnp.uint32)
    uniforms = np.asarray(sampling.uniforms(seeds, jnp.arange(len(ends))))[:, None]
    wanted = (ends <= uniforms).sum(axis=1)
    assert generation.token_ids.tolist() == wanted.tolist()


@pytest.mark.long
def test_more_requests_than_rows_refill_the_rows_that_finish():
  engine = sampler(max_rows=8, chunk_tokens=4)
  lengths = [4, 8, 12, 40] * 10
  requests = [tiny.request(i, [1, 2], seed=i, max_tokens=n) for i, n in enumerate(lengths)]
  added, generations = stats_of(engine, requests)
  assert [len(generations[str(i)].token_ids) for i in range(40)] == lengths
  # Eight at a time without refill would take 5 x 40 steps; 640 tokens fill 8 rows for 80.
  assert 80 <= added["decode_steps"] <= 130
  assert added["sampled_tokens"] == sum(lengths)


@pytest.mark.long
def test_rows_are_compacted_as_completions_finish():
  engine = sampler(max_rows=32, chunk_tokens=64)
  requests = [tiny.request(i, [1, 2], seed=i, max_tokens=4 if i < 26 else 40) for i in range(32)]
  added, _ = stats_of(engine, requests)
  assert added["decode_steps"] == 40
  assert added["row_steps"] == 4 * 32 + 36 * 8


@pytest.mark.long
def test_each_distinct_prompt_is_prefilled_once_for_all_its_completions():
  engine = sampler(max_rows=8)
  requests = tiny.groups(PROMPTS, 20, max_tokens=5)
  # Interleaved, and with far more completions than rows.
  requests = sorted(requests, key=lambda r: int(r.request_id.split(".")[1]))
  added, generations = stats_of(engine, requests)
  assert len(generations) == 100
  assert added["prefilled_prompts"] == sum(len(p) > 1 for p in PROMPTS)
  assert added["prefilled_tokens"] == sum(len(p) - 1 for p in PROMPTS)


def busy_session(sizes, requests, *, group=8):
  """Returns a session that has computed one chunk of the requests, and its weights."""
  options = sampler_inputs.ProgramOptions(CONFIG, Products(), 4, group=group)
  busy = continuous_batching.ContinuousBatcher(
    options,
    sizes=sizes,
    decode_text=None,
    stats=continuous_batching.Stats(),
    programs=sampler_programs.Programs(),
  )
  busy.submit([scheduling.RunningCompletion(r, None, scheduling.prompt_key(r)) for r in requests])
  weights = sampler_weights.split_layers(tiny.params(CONFIG), options)
  busy.advance(weights, 0)
  return busy, weights


@pytest.mark.long
def test_a_prompt_is_kept_once_for_its_group():
  requests = tiny.groups([[1] * 100, [2] * 20], 8)
  busy, weights = busy_session(sampler_sizes.unplanned(16, form="ring"), requests)
  assert sorted(slot.pages for slot in busy._slots.values()) == [((0, 1),), ((2,),)]
  assert busy._prompts[0][0].shape == (4, 2, 64, 8)  # three pages for sixteen rows.
  own = busy._own[0][0]
  assert own.shape == (1, 16, 2, 8, 64)
  busy.advance(weights, 0)
  assert own.is_deleted()  # donated: the next chunk wrote into it.


@contextlib.contextmanager
def counted_compilations():
  """Yields the list of what is compiled within the block."""
  compiled = []

  def listen(event, duration, **details):
    if event == "/jax/core/compile/backend_compile_duration":
      compiled.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield compiled
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.long
def test_compilations_are_bounded_over_many_calls_of_different_lengths():
  engine = sampler(max_rows=16, chunk_tokens=4)

  def calls(start, stop):
    for n in range(start, stop):
      prompts = [[i] * (1 + (7 * n + i) % 15) for i in range(1 + n % 3)]
      tiny.run(engine, tiny.groups(prompts, 1 + n % 5, max_tokens=3 + n % 10))

  with counted_compilations() as compiled:
    calls(0, 30)
    # rows 8, 16 x pages 1, 2, 4: at most 6 decode loops, 3 prefills, and the caches.
    assert len(compiled) <= 15
    first = len(compiled)
    calls(30, 60)
    assert len(compiled) == first


@pytest.mark.parametrize("form", ["ring", "rows"])
@pytest.mark.long
def test_what_is_compiled_ahead_serves_all_requests_within_the_planned_sizes(form):
  sizes = {"prompt_tokens": 150, "completion_tokens": 70, "group_size": 4}
  engine = sampler(max_rows=16, warn_of_truncation=False, form=form, **sizes)
  tree = tiny.params(CONFIG)
  described = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
  )
  jobs = engine.programs(described)
  # 8 rows, 16 rows, and the prefill; on an accelerator the rows with and without filters.
  assert len(jobs) == (3 if form == "ring" else 5)
  for job in jobs:
    job()
  tiny.run(engine, tiny.groups([[1, 2]], 2, max_tokens=2))  # makes the caches.
  calls = [
    tiny.groups([[1] * 149, [2], [3] * 20], 5, max_tokens=70),
    tiny.groups([[i] * (i % 7 + 1) for i in range(40)], 1, max_tokens=5, temperature=0.0),
    tiny.groups([[5] * 64, [6] * 65], 3, max_tokens=30, top_k=3),
    [tiny.request(i, [7] * (20 + i), max_tokens=9, top_p=0.1 * i + 0.1) for i in range(9)],
    tiny.groups([[1, 2]], 3, stop_ids=tuple(range(20, 60))),
  ]
  with counted_compilations() as compiled:
    for requests in calls:
      assert len(tiny.run(engine, requests)) == len(requests)
    engine.load_weights(tiny.params(CONFIG), version=2)
    tiny.run(engine, calls[0])
  assert compiled == []
  # What was not planned for is served, too.
  longer = tiny.groups([[4] * 180], 2, max_tokens=76)
  check_logprobs(engine, longer)


@pytest.mark.parametrize("form", ["ring", "rows"])
@pytest.mark.long
def test_requests_that_were_not_planned_for_grow_the_caches_under_way(form):
  engine = sampler(form=form, max_rows=8, prompt_tokens=20, completion_tokens=16, chunk_tokens=4)
  requests = [tiny.request(0, [1] * 10, max_tokens=60), tiny.request(1, [2] * 9, max_tokens=120)]
  check_logprobs(engine, requests)

  async def both():
    async def collect(requests):
      return {g.request_id: g async for g in engine.generate(requests)}

    first = asyncio.create_task(collect([tiny.request(0, [1] * 10, max_tokens=100)]))
    while engine.stats.decode_steps < 140:
      await asyncio.sleep(0.001)
    return await first | await collect([tiny.request(1, [3] * 90, max_tokens=4)])

  generations = asyncio.run(both())
  for name, prompt in (("0", [1] * 10), ("1", [3] * 90)):
    check_generation(prompt, generations[name])


@pytest.mark.long
def test_prompts_wait_for_room_and_are_all_served():
  sizes = {"prompt_tokens": 129, "completion_tokens": 12, "group_size": 8, "long_prompts": 1}
  engine = sampler(max_rows=8, **sizes)
  requests = tiny.groups([[i] * 129 for i in range(6)], 2)  # eight pages, two for each prompt.
  check_logprobs(engine, requests)
  assert engine.stats.prefilled_prompts == 6


@pytest.mark.parametrize(
  ("group_size", "form"), [(1, "ring"), (3, "ring"), (8, "ring"), (1, "rows"), (3, "rows")]
)
@pytest.mark.long
def test_groups_of_any_size_and_rows_without_group_attend_to_their_own_prompts(group_size, form):
  engine = sampler(max_rows=24, group_size=group_size, form=form)
  lengths = {0: 9, 1: 1, 2: 4, 3: 13}  # completions of a prompt; with uneven ends.
  requests = [
    tiny.request(f"{p}.{g}", [p] * (30 * p + 2), seed=90 * p + g, max_tokens=3 + 4 * g)
    for p, count in lengths.items()
    for g in range(count)
  ]
  check_logprobs(engine, requests)


def check_logprobs(engine, requests):
  """Asserts that an engine answers with the model's logprobs."""
  generations = tiny.run(engine, requests)
  for request in requests:
    generation = generations[request.request_id]
    assert len(generation.token_ids) == request.sampling.max_tokens
    check_generation(request.prompt_ids, generation)


def check_generation(prompt, generation):
  wanted = tiny.model_logprobs(CONFIG, tiny.params(CONFIG), prompt, generation.token_ids)
  wanted = tiny.of_tokens(wanted, generation.token_ids)
  np.testing.assert_allclose(generation.logprobs, wanted, atol=1e-5)


@pytest.mark.long
def test_a_second_identical_call_is_bit_identical_and_independent_of_calls_before():
  requests = tiny.groups(PROMPTS, 5, stop_ids=(11,), max_tokens=30)
  fresh = tiny.run(sampler(), requests)
  used = sampler()
  tiny.run(used, tiny.groups([list(range(60))], 9, max_tokens=100))
  for generations in (tiny.run(used, requests), tiny.run(used, requests)):
    for name, generation in generations.items():
      np.testing.assert_array_equal(generation.token_ids, fresh[name].token_ids)
      np.testing.assert_array_equal(generation.logprobs, fresh[name].logprobs)


@pytest.mark.long
def test_caches_grow_with_the_completions_without_changing_them():
  requests = tiny.groups(PROMPTS[:2], 3, max_tokens=200)
  generations = tiny.run(sampler(), requests)
  tree = tiny.params(CONFIG)
  for request in requests:
    ids = generations[request.request_id].token_ids
    wanted = tiny.model_logprobs(CONFIG, tree, request.prompt_ids, ids)
    got = generations[request.request_id].logprobs
    np.testing.assert_allclose(got, tiny.of_tokens(wanted, ids), atol=1e-5)


@pytest.mark.long
def test_weights_loaded_between_chunks_stamp_the_tokens_that_they_sample():
  engine = sampler(version=1, max_rows=8, chunk_tokens=2)
  other = tiny.params(CONFIG, seed=5)

  async def collect():
    found = {}
    requests = [tiny.request("short", [1], max_tokens=2), tiny.request("long", [1], max_tokens=60)]
    async for generation in engine.generate(requests):
      if generation.request_id == "short":
        engine.load_weights(other, version=2)
      found[generation.request_id] = generation
    return found

  found = asyncio.run(collect())
  versions = found["long"].weight_versions
  assert found["short"].weight_versions.tolist() == [1, 1]
  assert versions[0] == 1 and versions[-1] == 2 and (np.diff(versions) >= 0).all()
  assert engine.weight_version == 2
  fresh = sampler(version=2, seed=5)
  request = [tiny.request("x", [1, 2, 3])]
  assert texts(tiny.run(engine, request)) == texts(tiny.run(fresh, request))


@pytest.mark.long
def test_embedding_and_head_are_the_trainers_arrays_unless_copies_are_asked_for():
  tree = tiny.params(CONFIG)
  options = sampler_inputs.ProgramOptions(CONFIG, Products(), 4)
  weights = sampler_weights.split_layers(tree, options)
  assert weights.embed is tree["embed"] and weights.head is tree["embed"]
  copied = jax.tree.map(jnp.copy, tree)
  engine = sampler(copy_weights=True)
  engine.load_weights(copied, version=2)
  wanted = texts(tiny.run(engine, [tiny.request("x", [1, 2])]))
  for leaf in jax.tree.leaves(copied):
    leaf.delete()  # what a trainer that donates its parameters does.
  assert texts(tiny.run(engine, [tiny.request("x", [1, 2])])) == wanted


@pytest.mark.long
def test_after_release_no_copy_of_the_weights_is_alive():
  tree = tiny.params(CONFIG)
  engine = sampler(prompt_tokens=16, completion_tokens=16)
  before = jax.live_arrays()  # held, so that no later array takes the identity of one of them.
  engine.load_weights(tree, version=2)
  copies = [weakref.ref(array) for array in others(before)]
  tiny.run(engine, [tiny.request("x", [1, 2, 3])])
  engine.release()
  assert copies and still_alive(copies) == []
  caches = sum(array.nbytes for array in others(before))
  sizes, options = engine._sizes, engine._options
  tokens = sizes.rows * sizes.blocks * sizes.columns + sizes.pages * sizes.page
  assert caches <= tokens * sum(kv_cache.token_bytes(options).values())
  engine.close()


def still_alive(arrays):
  """Returns the shapes of the arrays that are alive after a moment; other threads may hold some."""
  for _ in range(50):
    if not (left := [array.shape for ref in arrays if (array := ref()) is not None]):
      break
    time.sleep(0.1)
  return left


def others(held):
  """Returns the arrays that are alive now, without those held."""
  known = {id(array) for array in held}
  return [array for array in jax.live_arrays() if id(array) not in known]


@pytest.mark.long
def test_a_decode_step_updates_its_cache_in_place_and_copies_no_weights():
  wide = tiny.config(hidden_size=128, intermediate_size=512, num_layers=4)
  options = sampler_inputs.ProgramOptions(wide, Products(), 4)
  weights = sampler_weights.split_layers(tiny.params(wide), options)
  prompts, own = kv_cache.empty_pages((16,), 64, options), ring_cache.empty(2, 8, 64, options)
  rows = scheduling.make_rows([], 8, {}, group=8, pools=[Pool(None, table=2)])
  leaves, structure = jax.tree.flatten((weights, prompts, rows))

  def decode(leaves, own):
    weights, prompts, rows = jax.tree.unflatten(structure, leaves)
    return decoding.decode(weights, prompts, own, rows, jnp.int32(0), options)

  memory = jax.jit(decode, donate_argnums=1).lower(leaves, own).compile().memory_analysis()
  assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(own))
  layer_bytes = sum(x.nbytes for x in jax.tree.leaves(weights.layers[0]))
  assert memory.temp_size_in_bytes < layer_bytes  # one layer is 0.9 MiB of float32.


def test_top_p_warns_once_that_another_distribution_is_trained(caplog):
  engine = sampler()
  request = tiny.request("x", [1], top_p=0.9, max_tokens=2)
  tiny.run(engine, [request])
  assert "sampling.top_p=0.9: tokens are sampled from a truncated distribution" in caplog.text
  caplog.clear()
  tiny.run(engine, [request])
  tiny.run(sampler(warn_of_truncation=False), [request])
  truncated = tiny.request("x", [1], top_p=0.9, max_tokens=2, logprobs="truncated")
  tiny.run(sampler(), [truncated])
  greedy = tiny.request("x", [1], top_p=0.9, temperature=0.0, max_tokens=2)
  tiny.run(sampler(), [greedy])
  assert not caplog.text


@pytest.mark.long
def test_truncated_logprobs_are_renormalised_over_the_tokens_kept():
  engine = sampler(report_truncated_logprobs=True, warn_of_truncation=False)
  requests = tiny.groups([[1, 2]], 6, top_k=4)
  tree = tiny.params(CONFIG)
  for generation in tiny.run(engine, requests).values():
    logprobs = tiny.model_logprobs(CONFIG, tree, [1, 2], generation.token_ids)
    mass = np.log(np.sort(np.exp(logprobs), axis=1)[:, -4:].sum(axis=1))
    wanted = tiny.of_tokens(logprobs, generation.token_ids) - mass
    np.testing.assert_allclose(generation.logprobs, wanted, atol=1e-5)


def test_rows_with_and_without_filters_share_a_batch_without_touching_each_other():
  engine = sampler(warn_of_truncation=False)
  plain = [tiny.request(f"plain{i}", [1, 2], seed=i) for i in range(3)]
  filtered = [tiny.request(f"filtered{i}", [1, 2], seed=i, top_k=1) for i in range(3)]
  mixed = texts(tiny.run(engine, plain + filtered))
  assert {**texts(tiny.run(engine, plain)), **texts(tiny.run(engine, filtered))} == mixed
  assert mixed["filtered0"] == mixed["filtered1"]  # top_k = 1 is greedy.


@pytest.mark.long
def test_padding_ids_of_the_vocabulary_are_never_sampled():
  engine = sampler(num_valid_tokens=10)
  generations = tiny.run(engine, tiny.groups([[1, 2]], 8))
  tokens = np.concatenate([g.token_ids for g in generations.values()])
  assert tokens.max() < 10


def test_weights_that_are_not_finite_raise_in_the_caller_and_good_ones_continue():
  engine = sampler()
  tree = tiny.params(CONFIG)
  engine.load_weights(jax.tree.map(lambda x: x * jnp.nan, tree), version=7)
  with pytest.raises(FloatingPointError, match="not finite with weights of version 7"):
    tiny.run(engine, tiny.groups([[1, 2]], 3))
  engine.load_weights(tree, version=8)
  assert len(tiny.run(engine, tiny.groups([[1, 2]], 3))) == 3


def test_an_error_of_the_decoder_reaches_every_call_in_flight():
  def broken(ids):
    raise LookupError("no such id")

  engine = sampler(decode=broken)

  async def both():
    async def collect(requests):
      return [g async for g in engine.generate(requests)]

    bad = tiny.request("bad", [1], stop_strings=("x",))
    return await asyncio.gather(collect([bad]), return_exceptions=True)

  assert [str(error) for error in asyncio.run(both())] == ["no such id"]
  assert len(tiny.run(engine, [tiny.request("good", [1])])) == 1


@pytest.mark.long
def test_cancelling_a_caller_frees_the_rows_for_the_next():
  engine = sampler(max_rows=8, chunk_tokens=2)

  async def cancelled():
    async def collect():
      requests = tiny.groups([[1, 2]], 100, max_tokens=100)
      return [g async for g in engine.generate(requests)]

    task = asyncio.create_task(collect())
    while not engine.stats.decode_steps:
      await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return [g async for g in engine.generate([tiny.request("next", [3], max_tokens=4)])]

  assert [g.request_id for g in asyncio.run(cancelled())] == ["next"]
  assert engine.stats.sampled_tokens < 5000  # of the 10000 that were asked for first.


def test_one_thread_serves_all_calls_and_ends_with_the_engine():
  threads = lambda: {t for t in threading.enumerate() if t.name.startswith("jax_sampler")}
  before = threads()
  engine = sampler()
  tiny.run(engine, tiny.groups([[1, 2]], 3))
  own = threads() - before
  tiny.run(engine, tiny.groups([[1, 2]], 3))
  assert len(own) == 1 and threads() - before == own
  engine.close()
  assert not threads() & own


def test_generate_without_weights_and_bad_settings_are_refused():
  engine = tiny.JaxSampler(CONFIG)
  with pytest.raises(RuntimeError, match="load_weights must be called"):
    engine.generate([tiny.request("x", [1])])
  with pytest.raises(ValueError, match="max_rows and chunk_tokens must be positive: 0"):
    tiny.JaxSampler(CONFIG, max_rows=0)
  with pytest.raises(ValueError, match="num_valid_tokens"):
    tiny.JaxSampler(CONFIG, num_valid_tokens=62)
  with pytest.raises(ValueError, match="need an engine that was given `decode`"):
    sampler().generate([tiny.request("x", [1], stop_strings=("a",))])


def test_length_limit_is_the_models_unless_another_is_given():
  engine = sampler(max_length=10)
  generation = tiny.run(engine, [tiny.request("x", [1, 2], max_tokens=8)])["x"]
  assert len(generation.token_ids) == 8 and generation.finish_reason is FinishReason.LENGTH
  with pytest.raises(ValueError, match="exceeds the limit of 10"):
    engine.generate([tiny.request("x", [1, 2], max_tokens=9)])
