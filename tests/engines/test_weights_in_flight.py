"""New weights while requests are in flight, in virtual time: 1,000 random schedules."""

import asyncio
import collections
import dataclasses
import itertools
import pathlib
import random
import sys

import numpy as np
import pytest

from grpo_jax.engines import fleet
from grpo_jax.engines.dispatch import CompletionJob, Dispatcher
from grpo_jax.engines.fleet import Fleet
from grpo_jax.engines.generate_call import GenerateCall
from grpo_jax.engines.launching import LaunchOptions
from grpo_jax.engines.server import Adapter, FleetOptions, WeightsVersion
from grpo_jax.engines.sglang_client import Timeouts
from grpo_jax.models import lora
from tests.engines import simulated, tiny
from tests.engines.simulated import TICK_S, Simulated, SimulatedClient, SimulatedProcess

TIMEOUTS = Timeouts(generate_s=60.0, control_s=4.0, health_s=3.0)
PROBE = (1, 2, 3)
PROMPTS = ((1,), (2, 3), (4, 5, 6))  # few, so that later requests find prefixes of earlier ones.
LAUNCH = LaunchOptions(python=pathlib.Path(sys.executable), log_folder=pathlib.Path())
KINDS = ("launched", "given", "adapters")
TROUBLE_S = 1000.0  # servers fail at random for so long; then all that was asked for has to come.


@dataclasses.dataclass
class Found:
  """A completion that came."""

  generation: object
  request: object
  least: int  # newest version that had been published when it was asked for.


@dataclasses.dataclass
class Blow:
  """A fault in the midst of an update: before or after a call to the server."""

  call: str
  fault: str
  is_after: bool
  fell: bool = False


class World:
  """Servers, the fleet that uses them, and what happened."""

  def __init__(self, chance, *, kind, servers, patch, is_calm, blow=None):
    self.chance, self.kind, self.is_calm = chance, kind, is_calm
    self.blow = blow  # the one thing that happens to the first server, in a calm schedule.
    self.servers = [Simulated(chance) for _ in range(servers)]
    self.begun = self.published = -1
    self.found = []
    is_launched = kind == "launched"
    options = FleetOptions(
      addresses=() if is_launched else tuple(f"http://{i}" for i in range(servers)),
      servers=servers,
      launch=LAUNCH if is_launched else None,
      adapter=lora.AdapterOptions(rank=2) if kind == "adapters" else None,
      timeouts=TIMEOUTS,
      start_timeout_s=30.0,
      health_every_s=2.0,
      max_restarts=10_000,
    )
    patch.setattr(fleet.ServerProcess, "start", self._start)
    self.dispatcher = Dispatcher(
      servers=servers,
      in_flight=6,
      max_attempts=1 if is_calm and not blow else 10_000,
      vocab_size=61,
      seeded=True,
    )
    self.fleet = Fleet(options, self.dispatcher)
    self.fleet.client = lambda address: None  # `_bring_up` asks for it, see `_up`.
    for server in self.fleet.servers:
      server.bring_up = self._up(server)

  def _start(self, launch, *, index, **options):
    self.servers[index].restart(needs=self.begun)
    return SimulatedProcess(self.servers[index])

  def _up(self, server):
    bring_up = server.bring_up
    client = SimulatedClient(self.servers[server.index], TIMEOUTS)
    if self.blow is not None and server.index == 0:
      setattr(client, self.blow.call, self._struck(getattr(client, self.blow.call)))
    return lambda process, _, *rest, **options: bring_up(process, client, *rest, **options)

  def _struck(self, call):
    """Returns a call to a server that is killed or stopped by it, once, at the second version."""

    async def struck(*arguments, **options):
      blow = self.blow
      is_due = self.begun == 1 and not blow.fell
      blow.fell |= is_due
      if is_due and not blow.is_after:
        getattr(self.servers[0], blow.fault)()
      result = await call(*arguments, **options)
      if is_due and blow.is_after:
        getattr(self.servers[0], blow.fault)()
      return result

    return struck

  async def tick(self):
    while True:
      await asyncio.sleep(TICK_S)
      for server in self.servers:
        server.tick()

  async def publish(self, version):
    """As `SGLangEngine._publish` does it."""
    folder = pathlib.Path(f"weights-{version}")
    adapter = Adapter(f"adapter-{version}", pathlib.Path("base--1"), "base")
    weights = WeightsVersion(
      version,
      folder,
      PROBE,
      np.full(len(PROBE) - 1, -(version + 1.0)),
      adapter if self.kind == "adapters" else None,
    )
    self.begun = version
    await self.fleet.publish(weights)
    self.published = version

  async def ask(self, number):
    """Asks for some completions and keeps what comes."""
    chance = self.chance
    requests = [
      tiny.request(
        f"{number}.{i}",
        chance.choice(PROMPTS),
        seed=chance.randrange(50),
        max_tokens=chance.choice((1, 3, 10, 30, 60)),
      )
      for i in range(chance.randint(1, 8))
    ]
    least = self.published
    call = GenerateCall(requests, None)
    self.dispatcher.submit([CompletionJob(request, call) for request in requests])
    by_id = {request.request_id: request for request in requests}
    async for generation in call.stream():
      request = by_id.pop(generation.request_id)  # each comes once.
      self.found.append(Found(generation, request, least))
    assert not by_id

  async def trouble(self):
    """Kills, stops and restarts servers at random moments, until `TROUBLE_S`."""
    chance, loop = self.chance, asyncio.get_running_loop()
    while loop.time() < TROUBLE_S:
      await asyncio.sleep(chance.expovariate(1 / 4.0))
      server = chance.choice(self.servers)
      what = chance.choice(("kill", "hang", "flush"))
      if what == "flush":
        server.refuses_flush = chance.randint(0, 2)
      elif what == "hang":
        server.hang()
      else:
        server.kill()
      if self.kind != "launched":  # somebody else repairs it.
        await asyncio.sleep(chance.uniform(0.1, 12.0))
        if server.state == "dead":
          server.restart()
        server.wake()

  async def go(self):
    chance = self.chance
    await self.fleet.start()
    self.helpers = [asyncio.create_task(self.tick())]
    await self.publish(0)
    if not self.is_calm:
      self.helpers.append(asyncio.create_task(self.trouble()))
    asking = []

    async def ask_often():
      for number in range(chance.randint(2, 5)):
        asking.append(asyncio.create_task(self.ask(number)))
        await asyncio.sleep(chance.uniform(0.0, 3.0))

    async def publish_often():
      for version in range(1, chance.randint(3, 6)):
        await asyncio.sleep(chance.uniform(0.0, 2.5))
        await self.publish(version)

    async with asyncio.timeout(TROUBLE_S + 500.0):
      await asyncio.gather(ask_often(), publish_often())
      await asyncio.gather(*asking)

  async def end(self):
    await self.fleet.close()
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
      task.cancel()
    await asyncio.gather(*left, return_exceptions=True)

  def check(self):
    """Checks each completion: its tokens, its versions, and what computed them."""
    assert not [flaw for server in self.servers for flaw in server.flaws]
    names = [each.request.request_id for each in self.found]
    assert len(names) == len(set(names))
    assert self.dispatcher.in_flight == 0
    for each in self.found:
      generation, request = each.generation, each.request
      count = request.sampling.max_tokens
      wanted = [(request.seed + i) % 50 for i in range(count)]
      assert generation.token_ids.tolist() == wanted
      versions = generation.weight_versions
      assert (np.diff(versions) >= 0).all() and each.least <= versions[0]
      assert versions[-1] <= self.published
      off = generation.logprobs + (versions + 1.0)
      assert not off.any(), f"{generation.logprobs} are not those of {versions}"
      if self.kind == "adapters":
        assert len(set(versions.tolist())) == 1


def schedule(seed, patch, **fixed):
  """Returns what happened in a random schedule, checked; its kind may be given."""
  chance = random.Random(seed)
  drawn = {"kind": chance.choice(KINDS), "is_calm": False}
  chosen = {**drawn, **fixed}
  worlds = []

  async def go():
    world = World(chance, patch=patch, **{"servers": chance.randint(1, 3), **chosen})
    worlds.append(world)
    try:
      await world.go()
    finally:
      await world.end()

  simulated.run(go(), patch)
  worlds[0].check()
  return worlds[0]


def versions_of(world):
  """Returns how many versions each completion has."""
  return [len(set(each.generation.weight_versions.tolist())) for each in world.found]


HUNDREDS = [0, *(pytest.param(hundred, marks=pytest.mark.slow) for hundred in range(1, 10))]


@pytest.mark.parametrize("hundred", HUNDREDS)
@pytest.mark.long
def test_nothing_is_lost_or_doubled_and_versions_are_true_in_1000_random_schedules(
  hundred, monkeypatch
):
  seen = collections.Counter()
  for seed in range(100 * hundred, 100 * hundred + 100):
    with monkeypatch.context() as patch:
      try:
        world = schedule(seed, patch)
      except BaseException as error:
        error.add_note(f"schedule {seed}")
        raise
    counts = versions_of(world)
    seen["completions"] += len(counts)
    seen["of several versions"] += sum(count > 1 for count in counts)
    seen["retries"] += world.dispatcher.retries
    seen["lost"] += world.fleet.restarts
  assert all(seen[name] > 20 for name in seen), seen


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_servers_answer_each_request_at_the_first_attempt(kind, monkeypatch):
  """New weights cost no attempt."""
  several = 0
  for seed in range(6):
    with monkeypatch.context() as patch:
      world = schedule(seed, patch, kind=kind, is_calm=True)
    assert world.dispatcher.retries == world.fleet.restarts == 0
    several += sum(count > 1 for count in versions_of(world))
  assert (several > 0) == (kind != "adapters")


CALLS = ("pause", "load", "resume", "score")


@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_a_server_lost_at_any_moment_of_an_update_is_replaced_and_nothing_with_it(
  fault, monkeypatch
):
  for number, (call, is_after) in enumerate(itertools.product(CALLS, (False, True))):
    blow = Blow(call, fault, is_after)
    chosen = {"kind": "launched", "servers": 1 + number % 2, "is_calm": True}
    with monkeypatch.context() as patch:
      world = schedule(number, patch, blow=blow, **chosen)
    assert blow.fell and world.fleet.restarts == 1, blow
    assert world.servers[0].weights == world.published
