"""Adapters on a real SGLang server: loaded beside each other, proven, routed to, unloaded."""

import asyncio
import dataclasses
import itertools
import json
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.building import sync_check
from grpo_jax.building.sync_check import SyncCheck
from grpo_jax.engines import probe, served_adapter
from grpo_jax.engines.probe import WrongWeights
from grpo_jax.engines.server import FleetError
from grpo_jax.http.failures import Refused
from grpo_jax.models import lora
from grpo_jax.models.products import LowRank
from tests.engines import faulty_proxy, proofs, sglang_fixtures, tiny
from tests.engines.conftest import answers
from tests.engines.faulty_proxy import FaultyProxy
from tests.engines.processes import eventually
from tests.engines.sglang_fixtures import collect

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

CONFIG = tiny.config(intermediate_size=64)  # see `sglang_servers.refuse_padded`.
OPTIONS = lora.AdapterOptions(rank=4, alpha=8.0)
LOAD, GENERATE, MODELS = "/load_lora_adapter", "/generate", "/v1/models"
PATIENCE = {"health_every_s": 1.0, "health_timeout_s": 20.0, "control_timeout_s": 60.0}
PATIENCE["start_timeout_s"] = 60.0


def weights(seed, *, options=OPTIONS, strength=0.3):
  """Returns a base, rounded to bfloat16, with a random adapter that matters."""
  base = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), tiny.params(CONFIG))
  keys = iter(jax.random.split(jax.random.key(seed), 100))
  leaves = lora.tree(CONFIG, options)
  drawn = lambda leaf: jax.random.normal(next(keys), leaf.shape) * strength
  adapter = {
    name: {part: drawn(leaf) for part, leaf in parts.items()} for name, parts in leaves.items()
  }
  return lora.join(base, adapter, options.scale)


def merged(params):
  own = {
    name: lora.merged(x) if isinstance(x, LowRank) else x for name, x in params["layers"].items()
  }
  return {**params, "layers": own}


def check(generations, requests, *, version, params):
  """Checks that all completions are of one version, and the model's own."""
  assert generations.keys() == {r.request_id for r in requests}
  whole = merged(params)
  for request in requests:
    found = generations[request.request_id]
    assert set(found.weight_versions.tolist()) == {version}
    wanted = tiny.model_logprobs(CONFIG, whole, request.prompt_ids, found.token_ids)
    np.testing.assert_allclose(
      found.logprobs, tiny.of_tokens(wanted, found.token_ids), atol=1e-4, rtol=0
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return sglang_fixtures.write_model(tmp_path_factory.mktemp("sglang") / "model", config=CONFIG)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
  """A server for adapters of a rank that is larger than that of the tests."""
  needed = served_adapter.arguments(lora.AdapterOptions(rank=8))
  server = sglang_fixtures.start(model, tmp_path_factory.mktemp("servers"), arguments=needed)
  try:
    eventually(lambda: answers(server), timeout_s=280.0)
    yield server
  finally:
    server.terminate()
    assert server.wait(60.0)


@pytest.fixture
def proxy(server):
  with FaultyProxy(server.address) as proxy:
    yield proxy


@pytest.fixture
def make(proxy, model, tmp_path):
  """Returns a function that makes an engine which speaks through the proxy."""
  made = []

  def make(*, adapter=OPTIONS, **settings):
    settings = {"addresses": (proxy.address,), "adapter": adapter, **PATIENCE, **settings}
    folder = tmp_path / f"run{len(made)}"
    engine = sglang_fixtures.make(model, folder, version=None, config=CONFIG, **settings)
    made.append(engine)
    return engine

  yield make
  proxy.released.set()
  for engine in made:
    engine.close()


def loaded(server):
  """Returns the folders of the adapters that a server has, by their names."""
  with urllib.request.urlopen(f"{server.address}{MODELS}", timeout=30) as answer:
    models = json.load(answer)["data"]
  return {model["id"]: model["root"] for model in models if model["parent"]}


def versions(server):
  return sorted(int(name.rpartition("-v")[2]) for name in loaded(server))


def test_an_adapter_that_is_dropped_kept_or_applied_twice_is_named(make, monkeypatch):
  """Each of three times; a right one is proven between them."""
  monkeypatch.setattr(sync_check, "_COST_SHARE", 1e9)  # every time, whatever it costs.
  engine, base = make(), lora.base_of(weights(0))
  initial, first = proofs.adapters(base, CONFIG, OPTIONS, scale=0.0, change=0.1)
  scorer = proofs.scorer(CONFIG, jnp.float32, is_merged=False)
  check = SyncCheck(engine, scorer, tokens=96, begins_new=True)
  engine.load_weights(initial, version=0)
  groups = proofs.sampled(engine, proofs.prompts_for(CONFIG, 4), tokens=16)
  proofs.checked(engine, check, initial, first, groups, first, 1)
  versions = itertools.count(2)
  for seed in range(3):
    old, new = proofs.adapters(base, CONFIG, OPTIONS, scale=0.1, change=1e-3, seed=seed)
    faults = {
      "the weights before the update.*requests name an older adapter": old,
      "from the initial weights.*or it drops the adapter": initial,
      "neither the new weights nor .*an adapter is applied that should not be": doubled(new),
    }
    for message, served in faults.items():
      engine.load_weights(old, version=next(versions))
      with pytest.raises(probe.WrongWeights, match=message):
        proofs.checked(engine, check, old, new, groups, served, next(versions))
    engine.load_weights(old, version=next(versions))
    found = proofs.checked(engine, check, old, new, groups, new, next(versions))
    assert found["mismatch/sync_proven"] == 1.0
    assert abs(found["mismatch/sync_share"] - 1.0) < 0.02


def doubled(params):
  """Returns weights whose adapter changes kernels twice as much, as one that was not unloaded."""
  twice = {
    name: dataclasses.replace(x, b=2.0 * x.b) if isinstance(x, LowRank) else x
    for name, x in params["layers"].items()
  }
  return {**params, "layers": twice}


def test_adapters_follow_each_other_and_completions_in_flight_end_on_their_own(make, proxy, server):
  engine = make()
  one, two, three = weights(1), weights(2), weights(3)
  engine.load_weights(one, version=1)
  pauses = proxy.count("/pause_generation")
  assert pauses == 1  # for the base, which is not the model's folder but rounded.
  slow = tiny.groups([[1, 2], [3]], 4, max_tokens=200)
  quick = tiny.groups([[1, 2], [3]], 4, max_tokens=8)

  def publish():
    engine.load_weights(two, version=2)
    assert versions(server) == [1, 2]  # completions of the first are in flight.
    found.update(collect(engine, quick))

  found = {}
  with ThreadPoolExecutor(1) as pool:
    begun = pool.submit(collect, engine, slow)
    eventually(lambda: engine._dispatcher.in_flight == len(slow))
    publish()
    assert not begun.done(), "nothing was in flight: make the completions longer"
    check(begun.result(120), slow, version=1, params=one)
  check(found, quick, version=2, params=two)
  assert proxy.count("/pause_generation") == pauses and proxy.count("/abort_request") == 1
  eventually(lambda: versions(server) == [2], timeout_s=30.0)
  assert engine.metrics()["mismatch/probe_abs_logprob_max"] <= 1e-4

  engine.load_weights(three, version=3)
  eventually(lambda: versions(server) == [3], timeout_s=30.0)
  check(collect(engine, quick), quick, version=3, params=three)
  metrics = engine.metrics()
  assert metrics["engine/retries"] == metrics["engine/restarts"] == 0
  own = lora.tree(CONFIG, OPTIONS).values()
  values = sum(np.prod(leaf.shape) for parts in own for leaf in parts.values())
  assert metrics["perf/sync_bytes"] == 4 * values
  folder, base = (engine._folders.folder / name for name in ("v000003", "base"))
  size = (folder / "adapter_model.safetensors").stat().st_size
  assert metrics["perf/sync_bytes"] < size < 1.3 * metrics["perf/sync_bytes"] + 8192
  assert size < (base / "model.safetensors").stat().st_size
  assert not folder.with_name("v000002").exists()


def test_completions_under_way_end_on_their_own_adapter_while_three_others_are_loaded(make):
  engine = make()
  trees = {version: weights(version) for version in (1, 2, 3, 4)}
  engine.load_weights(trees[1], version=1)
  requests = [
    tiny.request(i, [1 + i % 3, 2], seed=i, max_tokens=20 + 10 * (i % 8)) for i in range(200)
  ]
  marks, loading, found = {40: 2, 80: 3, 120: 4}, [], {}
  load = lambda version: engine.load_weights(trees[version], version=version)

  async def all_of(pool):
    async for generation in engine.generate(requests):
      assert generation.request_id not in found
      found[generation.request_id] = generation
      if (version := marks.get(len(found))) is not None:
        loading.append(pool.submit(load, version))

  with ThreadPoolExecutor(1) as pool:
    asyncio.run(all_of(pool))
    for each in loading:
      each.result(120)
  of = {v: [r for r in requests if found[r.request_id].weight_versions[0] == v] for v in trees}
  assert all(of.values())
  for version, those in of.items():
    mine = {r.request_id: found.pop(r.request_id) for r in those}
    check(mine, those, version=version, params=trees[version])
  assert not found and engine.metrics()["engine/retries"] == 0


def test_a_request_for_a_version_that_is_gone_never_gets_other_weights(make, server):
  """SGLang itself loads an adapter again that was unloaded, from its old path."""
  engine = make()
  engine.load_weights(weights(1), version=1)
  (old,) = loaded(server)
  engine.load_weights(weights(2), version=2)
  eventually(lambda: versions(server) == [2], timeout_s=30.0)
  body = {"input_ids": [1, 2], "lora_path": old, "sampling_params": {"max_new_tokens": 1}}
  request = urllib.request.Request(
    f"{server.address}{GENERATE}", json.dumps(body).encode(), {"Content-Type": "application/json"}
  )
  with pytest.raises(urllib.error.HTTPError) as refused:
    urllib.request.urlopen(request, timeout=60)
  with refused.value as answer:
    assert answer.code == 400
    assert b"Failed to implicitly load" in answer.read()
  assert old not in loaded(server)


def test_a_server_that_lacks_an_adapter_is_asked_again_once_it_has_it(make, proxy):
  engine = make()
  params = weights(1)
  engine.load_weights(params, version=1)
  proxy.fail(GENERATE, faulty_proxy.lacks_adapter, times=3)
  requests = tiny.groups([[1, 2], [3]], 2)
  check(collect(engine, requests), requests, version=1, params=params)
  assert engine.metrics()["engine/retries"] == 3 and engine.metrics()["engine/restarts"] == 0


def test_a_server_that_has_lost_its_adapter_gets_base_and_adapter_before_any_request(
  make, proxy, server
):
  engine = make()
  params = weights(1)
  engine.load_weights(params, version=1)
  (name,) = loaded(server)
  bases = proxy.count("/update_weights_from_disk")
  engine._run(engine._fleet.servers[0].client.unload_adapter(name))
  eventually(lambda: engine.metrics()["engine/restarts"] == 1, timeout_s=30.0)
  requests = tiny.groups([[1, 2], [3]], 2)
  check(collect(engine, requests), requests, version=1, params=params)
  assert proxy.count("/update_weights_from_disk") == bases + 2  # with the question if it can.
  last = max(at for at, (path, _) in enumerate(proxy.seen) if path == LOAD)
  later = [body["lora_path"] for path, body in proxy.seen[last:] if path == GENERATE]
  assert later == [name] * (1 + len(requests))  # the first is the probe.


def test_an_adapter_that_is_loaded_already_is_taken_and_a_failure_is_repaired(make, proxy, server):
  engine = make()
  proxy.fail(LOAD, faulty_proxy.does_it_and_says_400)
  engine.load_weights(weights(1), version=1)
  assert engine.metrics()["engine/restarts"] == 0
  for number, fault in enumerate((faulty_proxy.says_400, faulty_proxy.says_500), start=2):
    proxy.fail(LOAD, fault)
    engine.load_weights(weights(number), version=number)
    assert engine.metrics()["engine/restarts"] == number - 1
    eventually(lambda: versions(server) == [engine.weight_version], timeout_s=30.0)
  with pytest.raises(Refused, match="already loaded"):
    (name,) = loaded(server)
    engine._run(engine._fleet.servers[0].client.load_adapter(name, loaded(server)[name]))


def test_an_adapter_of_other_values_is_seen(make, monkeypatch):
  engine = make()
  sent = served_adapter.completed

  def doubled(params, config):
    adapter, options = sent(params, config)
    adapter["q"]["b"] = adapter["q"]["b"] * 1.1
    return adapter, options

  monkeypatch.setattr(served_adapter, "completed", doubled)
  with pytest.raises(WrongWeights, match="does not sample from the weights"):
    engine.load_weights(weights(1), version=1)


def test_a_server_whose_memory_was_released_gets_the_base_again(make, proxy):
  engine = make(release_memory=True)
  engine.load_weights(weights(1), version=1)
  bases = proxy.count("/update_weights_from_disk")
  engine.release()
  params = weights(2)
  engine.load_weights(params, version=2)
  assert proxy.count("/update_weights_from_disk") == bases + 1
  requests = tiny.groups([[1, 2], [3]], 2)
  check(collect(engine, requests), requests, version=2, params=params)


@pytest.mark.parametrize(
  ("targets", "is_stabilized"),
  [
    (("q",), False),
    (("k", "v"), True),
    (("up",), False),
    (("gate", "o"), True),
    (("down",), False),
  ],
)
def test_every_choice_of_kernels_and_scale_is_served(make, targets, is_stabilized):
  options = lora.AdapterOptions(rank=8, alpha=8.0, targets=targets, rank_stabilized=is_stabilized)
  engine = make(adapter=options)
  params = weights(1, options=options, strength=1.0)
  own = probe.Probe(CONFIG, compute_dtype="float32", num_valid_tokens=CONFIG.vocab_size)
  effect = np.abs(own.logprobs(params) - own.logprobs(lora.base_of(params))).max()
  engine.load_weights(params, version=1)
  assert engine.metrics()["mismatch/probe_abs_logprob_max"] <= 1e-4 < 0.05 < effect


def test_a_server_for_smaller_ranks_is_refused_by_name(make):
  engine = make(adapter=lora.AdapterOptions(rank=16))
  with pytest.raises(FleetError, match="max-lora-rank is 8, but model.lora.rank is 16") as refused:
    engine.load_weights(weights(1, options=lora.AdapterOptions(rank=16)), version=1)
  assert re.search("Start it with --enable-lora --max-lora-rank 16 ", str(refused.value))


def test_adapters_that_a_killed_run_left_are_dropped(make, proxy, server):
  first = make()
  first.load_weights(weights(1), version=1)
  first._loop.call(first._fleet._tasks[0].cancel)  # no more is heard of it.
  left = set(loaded(server))
  second = make()
  second.load_weights(weights(2), version=1)
  assert left and not left & set(loaded(server))
