"""Every request is delivered once, whatever the servers do with it."""

import asyncio
import itertools
import random
import time

import pytest

from grpo_jax.engines import dispatch
from grpo_jax.engines.dispatch import CompletionJob, Dispatcher
from grpo_jax.engines.generate_call import GenerateCall
from grpo_jax.engines.server import FleetError, Server
from grpo_jax.engines.sglang_client import Client
from grpo_jax.http.failures import Overloaded, Refused, Unanswered
from tests.engines import tiny


def answer_to(body):
  """Returns what a server says: the seed of the request, as one token."""
  return {
    "meta_info": {
      "id": body["rid"],
      "finish_reason": {"type": "length", "length": 1},
      "completion_tokens": 1,
      "weight_version": "4",
      "output_token_logprobs": [[-1.0, body["sampling_params"]["sampling_seed"], None]],
    }
  }


class ScriptedClient(Client):
  """Answers when it is let, and as it is told to."""

  def __init__(self, behave):
    self.address = "http://nowhere"
    self.behave = behave
    self.bodies = []

  async def generate(self, body, *, read, limit):
    self.bodies.append(body)
    return read(await self.behave(body))


class ScriptedServer(Server):
  """Healthy again at once, each time that it is doubted."""

  def __init__(self, index, behave, dispatcher):
    super().__init__(index)
    self._client = ScriptedClient(behave)
    self.version = 4
    self.doubts = 0
    self._dispatcher = dispatcher

  def doubt(self):
    self.doubts += 1
    asyncio.get_running_loop().call_soon(self._dispatcher.opened, self)


async def answers(body):
  await asyncio.sleep(0)
  return answer_to(body)


async def until(is_so):
  """Waits for what must come, however slow the machine is."""
  async with asyncio.timeout(20.0):
    while not is_so():
      await asyncio.sleep(0.001)


async def hangs(body):
  await asyncio.Event().wait()


def fails(error):
  async def fail(body):
    raise error

  return fail


def dispatcher_of(*behaviours, in_flight=4, max_attempts=5):
  dispatcher = Dispatcher(
    servers=len(behaviours), in_flight=in_flight, max_attempts=max_attempts, vocab_size=61,
    seeded=True,
  )  # fmt: skip
  servers = [ScriptedServer(i, b, dispatcher) for i, b in enumerate(behaviours)]
  for server in servers:
    dispatcher.opened(server)
  return dispatcher, servers


def requests(count, prompt=(1, 2)):
  return [tiny.request(i, prompt, seed=i, max_tokens=1) for i in range(count)]


async def collect(dispatcher, wanted):
  """Returns what comes, as (request id, its token), in order of arrival."""
  call = GenerateCall(wanted, None)
  dispatcher.submit([CompletionJob(request, call) for request in wanted])
  return [(g.request_id, int(g.token_ids[0])) async for g in call.stream()]


def run(coroutine):
  return asyncio.run(asyncio.wait_for(coroutine, 30))


def once_each(count):
  return [(str(i), i) for i in range(count)]


def test_every_request_gets_its_own_answer_once():
  async def go():
    dispatcher, servers = dispatcher_of(answers, answers)
    found = await collect(dispatcher, requests(40))
    assert sorted(found) == sorted(once_each(40))
    assert dispatcher.in_flight == 0
    return servers

  first, other = run(go())
  assert len(first.client.bodies) + len(other.client.bodies) == 40


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_lost_or_doubled_while_servers_fail_and_come_back(seed):
  chance = random.Random(seed)
  troubles = [
    lambda body: Unanswered("no answer"),
    lambda body: {**answer_to(body), "meta_info": None},
    lambda body: {"meta_info": {"finish_reason": {"type": "abort", "message": "lost"}}},
  ]

  async def sometimes(body):
    for _ in range(chance.randrange(3)):
      await asyncio.sleep(0)
    if chance.random() < 0.4:
      trouble = chance.choice(troubles)(body)
      if isinstance(trouble, Exception):
        raise trouble
      return trouble
    return answer_to(body)

  async def go():
    dispatcher, servers = dispatcher_of(sometimes, sometimes, sometimes, max_attempts=1000)

    async def disturb():
      while True:
        server = chance.choice(servers)
        dispatcher.closed(server)
        await asyncio.sleep(0.001)
        dispatcher.opened(server)

    disturbing = asyncio.create_task(disturb())
    both = await asyncio.gather(
      collect(dispatcher, requests(50)), collect(dispatcher, requests(50, (3,)))
    )
    disturbing.cancel()
    assert [sorted(found) for found in both] == [sorted(once_each(50))] * 2
    assert dispatcher.retries > 0 and dispatcher.in_flight == 0

  run(go())


def test_requests_under_way_at_a_server_that_is_lost_go_to_another():
  async def go():
    dispatcher, (lost, other) = dispatcher_of(hangs, hangs)
    found = asyncio.create_task(collect(dispatcher, requests(6)))
    await until(lambda: lost.client.bodies and other.client.bodies)
    other.client.behave = answers
    for server in (lost, other):
      dispatcher.closed(server)
    dispatcher.opened(other)
    assert sorted(await found) == once_each(6)
    assert dispatcher.retries == 0  # the requests did nothing wrong.
    names = [b["rid"] for server in (lost, other) for b in server.client.bodies]
    assert len(set(names)) == len(names)  # SGLang takes a name once in its life.

  run(go())


def test_a_refused_request_fails_its_call_at_once_and_no_other():
  async def refuses_prompt_9(body):
    if body["input_ids"] == [9]:
      raise Refused("http://nowhere/generate: answered 400: too long", status=400)
    return answer_to(body)

  async def go():
    dispatcher, (server,) = dispatcher_of(refuses_prompt_9, in_flight=8)
    bad, good = await asyncio.gather(
      collect(dispatcher, requests(1, (9,))), collect(dispatcher, requests(5)),
      return_exceptions=True,
    )  # fmt: skip
    assert isinstance(bad, FleetError) and "request '0'" in str(bad) and "too long" in str(bad)
    assert sorted(good) == once_each(5)
    assert sum(b["input_ids"] == [9] for b in server.client.bodies) == 1 and server.doubts == 0

  run(go())


def test_a_request_that_servers_always_fail_is_given_up():
  async def go():
    dispatcher, servers = dispatcher_of(
      fails(Unanswered("it said 500")), fails(Unanswered("it said 500")), max_attempts=3
    )
    with pytest.raises(FleetError, match="request '0' failed 3 times; the last: it said 500"):
      await collect(dispatcher, requests(1))
    assert sum(len(s.client.bodies) for s in servers) == 3 == dispatcher.retries

  run(go())


def test_an_overloaded_server_is_asked_again_after_a_pause_and_not_doubted(monkeypatch):
  monkeypatch.setattr(dispatch, "_FIRST_PAUSE_S", 0.02)
  moments = []

  async def overloaded_twice(body):
    moments.append(time.monotonic())
    if len(moments) <= 2:
      raise Overloaded("answered 429", retry_after_s=0.1 if len(moments) == 1 else 0.0)
    return answer_to(body)

  async def go(behave):
    dispatcher, (server,) = dispatcher_of(behave, max_attempts=3)
    found = await collect(dispatcher, requests(1))
    return found, dispatcher.retries, server.doubts

  assert run(go(overloaded_twice)) == (once_each(1), 2, 0)
  first, second = (later - before for before, later in itertools.pairwise(moments))
  assert first >= 0.1 and second >= 0.04  # as the server asked; doubled.
  with pytest.raises(FleetError, match="failed 3 times; the last: answered 429"):
    run(go(fails(Overloaded("answered 429"))))


def test_a_server_that_failed_gets_nothing_before_its_health_was_looked_at():
  async def go():
    dispatcher, (server,) = dispatcher_of(fails(Unanswered("cut")), in_flight=1)
    server.doubt = lambda: None  # nobody looks.
    found = asyncio.create_task(collect(dispatcher, requests(3)))
    await until(lambda: server.client.bodies and not dispatcher.in_flight)
    await asyncio.sleep(0.02)
    assert len(server.client.bodies) == 1
    server.client.behave = answers
    dispatcher.opened(server)
    assert sorted(await found) == once_each(3)

  run(go())


def test_a_caller_that_leaves_frees_its_places():
  async def go():
    dispatcher, (server,) = dispatcher_of(hangs, in_flight=4)
    left = GenerateCall(requests(20), None)
    dispatcher.submit([CompletionJob(request, left) for request in left.requests])
    await until(lambda: len(server.client.bodies) == 4)
    assert dispatcher.in_flight == 4
    dispatcher.leave(left)
    server.client.behave = answers
    assert sorted(await collect(dispatcher, requests(9))) == once_each(9)
    assert len(server.client.bodies) == 4 + 9

  run(go())


def test_the_end_of_a_call_does_not_look_through_the_jobs_of_all_others(monkeypatch):
  async def go():
    dispatcher, _ = dispatcher_of(answers)
    call = GenerateCall(requests(3), None)
    dispatcher.submit([CompletionJob(request, call) for request in call.requests])
    assert len([each async for each in call.stream()]) == 3
    monkeypatch.setattr(dispatcher._placement, "drop", lambda _: pytest.fail("looked at all jobs"))
    dispatcher.leave(call)

  run(go())


def test_a_fleet_that_cannot_be_healed_fails_all_calls_and_later_ones():
  async def go():
    dispatcher, _ = dispatcher_of(hangs, in_flight=2)
    calls = [asyncio.create_task(collect(dispatcher, requests(4))) for _ in range(2)]
    await until(lambda: dispatcher.in_flight == 2)
    dispatcher.failed(FleetError("all is lost"))
    calls.append(asyncio.create_task(collect(dispatcher, requests(1))))
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(error) for error in found] == ["all is lost"] * 3
    assert dispatcher.in_flight == 0

  run(go())


def test_an_error_of_our_own_fails_the_call_instead_of_hanging_it():
  async def go():
    dispatcher, _ = dispatcher_of(fails(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
      await collect(dispatcher, requests(2))

  run(go())


# --- adapters, which requests name ----------------------------------------------------------------


async def versions_of(dispatcher, wanted):
  call = GenerateCall(wanted, None)
  dispatcher.submit([CompletionJob(request, call) for request in wanted])
  return {int(g.request_id): g.weight_versions.tolist() async for g in call.stream()}


def gives(server, version):
  """Has a server use the adapter of a version."""
  server.version, server.adapter = version, f"v{version}"


def test_tokens_are_of_the_adapter_that_their_request_named_whatever_is_loaded_meanwhile():
  may_end = asyncio.Event()

  async def slowly(body):
    await may_end.wait()
    return answer_to(body)  # which reports version 4, that of the base.

  async def go():
    dispatcher, (server,) = dispatcher_of(slowly)
    assert dispatcher.oldest() is None
    gives(server, 7)
    first = asyncio.create_task(versions_of(dispatcher, requests(1)))
    await until(lambda: len(server.client.bodies) == 1)
    gives(server, 8)
    second = asyncio.create_task(versions_of(dispatcher, requests(2)[1:]))
    await until(lambda: len(server.client.bodies) == 2)
    assert dispatcher.oldest() == 7
    may_end.set()
    assert (await first, await second) == ({0: [7]}, {1: [8]})
    assert [body["lora_path"] for body in server.client.bodies] == ["v7", "v8"]
    assert dispatcher.oldest() is None

  run(go())


@pytest.mark.parametrize(
  "said",
  [
    "Failed to implicitly load LoRA adapter v7: No such file or directory",
    "Got LoRA adapter that has never been loaded: v7",
    "The following requested LoRA adapters are not loaded: v7",
  ],
)
def test_a_server_without_the_adapter_is_doubted_and_the_request_sent_again(said):
  async def go():
    dispatcher, (server,) = dispatcher_of(answers)
    gives(server, 7)
    refused = fails(Refused(f"http://nowhere/generate: answered 400: {said}", status=400))

    async def at_first(body):
      server.client.behave = answers
      return await refused(body)

    server.client.behave = at_first
    assert await versions_of(dispatcher, requests(1)) == {0: [7]}
    assert (server.doubts, dispatcher.retries) == (1, 1)
    server.adapter = None  # without an adapter such a refusal is one as any other.
    server.client.behave = refused
    with pytest.raises(FleetError, match="answered 400"):
      await versions_of(dispatcher, requests(1))

  run(go())
