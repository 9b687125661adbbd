"""A real server that gets new weights while completions are under way."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.engines import sglang_fixtures, tiny
from tests.engines.faulty_proxy import FaultyProxy

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

CONFIG = tiny.config()
FIRST, LAST = 3, 6  # versions; the weights of version v have the seed v - FIRST.
PROMPT = [(7 * i + 3) % tiny.VOCABULARY for i in range(40)]


@pytest.fixture
def proxy(sglang_server):
  with FaultyProxy(sglang_server.address) as proxy:
    yield proxy


@pytest.fixture
def make(proxy, sglang_model, tmp_path):
  """Returns a function that makes an engine which speaks through the proxy."""
  made = []

  def make(**settings):
    options = {"addresses": (proxy.address,), "control_timeout_s": 60.0, **settings}
    made.append(sglang_fixtures.make(sglang_model, tmp_path / f"run{len(made)}", **options))
    return made[-1]

  yield make
  proxy.released.set()
  for engine in made:
    engine.close()


def requests_of(count):
  """Returns completions of several lengths, in groups of eight with prompts of several lengths."""
  return [
    tiny.request(i, PROMPT[: 4 + i // 8], seed=i, max_tokens=20 + 30 * (i % 5))
    for i in range(count)
  ]


def differences(generation, request):
  """Returns |logprob - that of the trainer's program with the weights of its version|, a token."""
  ids, versions = generation.token_ids, generation.weight_versions
  found = np.full(len(ids), np.nan)
  for version in set(versions.tolist()):
    tree = tiny.params(CONFIG, version - FIRST)
    of_model = tiny.model_logprobs(CONFIG, tree, request.prompt_ids, ids)
    of_version = np.abs(generation.logprobs - tiny.of_tokens(of_model, ids))
    found[versions == version] = of_version[versions == version]
  return found


def sampled_meanwhile(engine, requests):
  """Returns the completions of four calls, during which the weights change three times.

  A call begins with each change, and the server is given the weights when the first completion of
  the call has come: the version before has then sampled something, however long everything takes,
  and the other completions are under way.
  """
  found, publish = {}, engine._fleet.publish

  def change(version):
    engine.load_weights(tiny.params(CONFIG, version - FIRST), version=version)

  async def call(requests, first):
    async for generation in engine.generate(requests):
      assert generation.request_id not in found
      found[generation.request_id] = generation
      first.set()

  async def calls(pool, patch):
    begun, size = [], len(requests) // 4
    for k in range(4):
      first = threading.Event()

      async def publish_later(weights, first=first):
        assert await asyncio.to_thread(first.wait, 100.0)
        await publish(weights)

      patch.setattr(engine._fleet, "publish", publish_later)
      last = k == LAST - FIRST
      mine = requests[k * size :] if last else requests[k * size : (k + 1) * size]
      begun.append(asyncio.create_task(call(mine, first)))
      if not last:
        await asyncio.get_running_loop().run_in_executor(pool, change, FIRST + k + 1)
    await asyncio.gather(*begun)

  with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
    asyncio.run(calls(pool, patch))
  assert found.keys() == {request.request_id for request in requests}
  return found


def check_versions(found):
  """Checks that versions never decrease and that all of them sampled something."""
  versions = [generation.weight_versions for generation in found.values()]
  assert all((np.diff(each) >= 0).all() for each in versions)
  assert {v for each in versions for v in each.tolist()} == {*range(FIRST, LAST + 1)}
  return [len({*each.tolist()}) for each in versions]


def largest(found, requests):
  return max(differences(found[r.request_id], r).max() for r in requests)


def later_is_exact(engine):
  """Checks completions of prompts that the server has met under older weights."""
  requests = requests_of(40)
  found = {g.request_id: g for g in tiny.run(engine, requests).values()}
  assert all((g.weight_versions == LAST).all() for g in found.values())
  return largest(found, requests) <= 1e-4


def test_retracted_completions_continue_as_the_model_of_each_tokens_version(make, record_property):
  engine, requests = make(), requests_of(200)
  found = sampled_meanwhile(engine, requests)
  assert sum(count > 1 for count in check_versions(found)) > 20
  difference = largest(found, requests)
  record_property("largest difference", float(difference))
  assert difference <= 1e-4
  assert later_is_exact(engine)
  metrics = engine.metrics()
  assert metrics["engine/retries"] == metrics["engine/restarts"] == 0


def test_a_server_that_cannot_clear_its_cache_loses_its_requests_and_is_given_weights_again(
  make, proxy
):
  engine, requests = make(), requests_of(40)

  def does_it_and_keeps_the_cache(handler, body):
    handler.upstream(body)
    said = b'{"success":false,"message":"Weights were updated, but the cache was not flushed"}'
    handler.say(400, said)

  proxy.fail("/update_weights_from_disk", does_it_and_keeps_the_cache)
  loads = proxy.count("/update_weights_from_disk")
  found = sampled_meanwhile(engine, requests)
  assert proxy.count("/update_weights_from_disk") == loads + 5  # with the question if it can.
  assert largest(found, requests) <= 1e-4
  assert engine.metrics()["engine/restarts"] == 1
