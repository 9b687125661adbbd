"""What becomes of servers that cannot be started; the real ones: test_sglang_faults.py."""

import asyncio
import pathlib
import sys
import time

import numpy as np
import psutil
import pytest

from grpo_jax import engines
from grpo_jax.engines import server_process, sglang_servers
from grpo_jax.engines.fleet import Fleet
from grpo_jax.engines.prompt_scoring import Passage
from grpo_jax.engines.server import (
  CHECKSUM,
  FLUSH,
  LOAD,
  PROBE,
  Adapter,
  FleetError,
  FleetOptions,
  Server,
  WeightsVersion,
)
from grpo_jax.engines.sglang_options import SGLangOptions
from grpo_jax.http.failures import Refused, Unanswered
from grpo_jax.models import lora
from tests import side_by_side
from tests.engines import sglang_fixtures, simulated, tiny

ROOT = pathlib.Path("/weights")


@pytest.fixture
def make(tmp_path):
  """Returns a function that makes an engine which launches `command`."""
  model = sglang_fixtures.write_model(tmp_path / "model")

  def make(*command, **settings):
    return engines.make(
      "sglang",
      config=tiny.config(),
      source_directory=model,
      workdir=tmp_path / "run",
      weights_folder=str(tmp_path / "weights"),
      **{"device": "cpu", "command": command or None, **settings},
    )

  return make


def load(engine):
  engine.load_weights(tiny.params(tiny.config()), version=0)


def test_a_server_that_cannot_start_stops_the_run_with_what_it_said(make):
  with make(sys.executable, "-c", "print('no such model'); raise SystemExit(3)") as engine:
    with pytest.raises(FleetError, match="server 0 at .* could not be started") as caught:
      load(engine)
    assert "exited with code 3" in str(caught.value) and "no such model" in str(caught.value)


def test_a_server_that_never_answers_stops_the_run_in_time(make):
  began = time.monotonic()
  with make(sys.executable, "-c", "input()", start_timeout_s=1.0) as engine:
    with pytest.raises(FleetError, match="could not be started"):
      load(engine)
  assert time.monotonic() - began < 30


@pytest.mark.long
def test_an_address_where_nobody_listens_stops_the_run_and_says_why(make):
  with make(addresses=("http://127.0.0.1:9",), start_timeout_s=1.0) as engine:
    with pytest.raises(FleetError, match=r"not healthy within 1 s \(.*127.0.0.1:9.*Connect"):
      load(engine)


def test_a_model_that_sglang_pads_on_a_cpu_is_refused_for_adapters(make, monkeypatch):
  monkeypatch.setattr(server_process, "check", lambda *arguments, **options: None)
  with pytest.raises(ValueError, match="intermediate_size to a multiple of 32, .* it is 40"):
    make(adapter=lora.AdapterOptions(rank=2))
  make(sys.executable, "-c", "input()", adapter=lora.AdapterOptions(rank=2)).close()


def test_given_servers_are_divided_among_the_processes_of_a_run():
  divided = side_by_side.Room(3).run(lambda index: [*sglang_servers._share(7)])
  assert divided == [[0, 1], [2, 3], [4, 5, 6]]
  assert [*sglang_servers._share(7)] == [*range(7)]


def test_each_process_needs_a_server_of_its_own():
  config = tiny.config()
  two = SGLangOptions(addresses=("http://a:1", "http://b:1"))
  assert side_by_side.Room(2).run(lambda index: sglang_servers.refuse(two, config)) == [None, None]
  for error in side_by_side.Room(3).run(lambda index: sglang_servers.refuse(two, config)):
    with pytest.raises(ValueError, match="has 2 servers for 3 processes: each process needs"):
      raise error


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"addresses": ("localhost:30000",)}, "'http://host:port', got 'localhost:30000'"),
  ],
)
def test_options_without_meaning_are_refused_at_once(make, settings, message):
  with pytest.raises(ValueError, match=message):
    make(**settings)


def test_closing_an_engine_whose_server_just_starts_leaves_no_process(make):
  marker = "import time; time.sleep(1000)  # of this test"
  make(sys.executable, "-c", marker).close()
  commands = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
  assert not [command for command in commands if marker in command]


def test_an_error_of_our_own_stops_the_run_instead_of_hanging_it(make, monkeypatch):
  def fail(*arguments, **options):
    raise ZeroDivisionError("a bug")

  monkeypatch.setattr(Server, "bring_up", fail)
  with make(addresses=("http://127.0.0.1:9",)) as engine:
    with pytest.raises(ZeroDivisionError, match="a bug"):
      load(engine)


class Scores:
  """A client of a server that scores each token as its id; or it is wrong: its first answer is
  then an error, if it has one, and the next one is garbled.
  """

  address = "http://a"

  def __init__(self, version="4", wrong=None):
    self.version, self.wrong, self.asked = version, wrong, []

  async def score(self, body, *, read, limit):
    self.asked.append(body)
    if isinstance(self.wrong, Exception) and len(self.asked) % 2:
      raise self.wrong
    ids = body["input_ids"][body["logprob_start_len"] :]
    entries = [[None if at == 0 else -float(i), i, None] for at, i in enumerate(ids)]
    wrong = [[None, 3, None]] if self.wrong else entries
    meta = {"input_token_logprobs": wrong, "weight_version": self.version}
    return read({"meta_info": meta})


@pytest.mark.parametrize(
  "broken",
  [
    Scores(wrong=Unanswered("timed out")),
    Scores(wrong=Refused("answered 500", status=500)),
    Scores(wrong=True),
    Scores(version="3"),
  ],
  ids=["silent and garbled", "refuses and garbles", "garbled", "restarted"],
)
def test_all_servers_score_passages_and_those_that_do_not_are_looked_at(broken):
  passages = [Passage(np.asarray([3, 1, 2, 5]), 2), Passage(np.asarray([4, 9]), 1)]
  clients = [Scores(), broken, Scores()]

  async def score():
    fleet = Fleet(FleetOptions(addresses=("a", "b", "c", "d"), first=5), None)
    for server, client in zip(fleet.servers, clients, strict=False):
      server._client, server.is_up, server.version = client, True, 4
    fleet.servers[3].is_up = False
    fleet._weights = WeightsVersion(4, None, (), None)
    found = await fleet.score(passages)
    return found, [server.is_doubted for server in fleet.servers]

  found, doubted = asyncio.run(score())
  assert doubted == [False, True, False, False]
  assert {name: [x.tolist() for x in own] for name, own in found.items()} == {
    5: [[-2.0, -5.0], [-9.0]],
    7: [[-2.0, -5.0], [-9.0]],
  }


@pytest.mark.parametrize("moments", range(5))
def test_a_fleet_is_closed_also_while_one_of_its_servers_is_looked_at(monkeypatch, moments):
  async def comes_up(self, *arguments, **options):
    self.is_up = self.has_been_up = True

  class Nobody:
    def opened(self, server):
      pass

    closed = failed = opened

    def oldest(self):
      return None

  monkeypatch.setattr(Server, "bring_up", comes_up)

  async def close():
    fleet = Fleet(FleetOptions(addresses=("http://127.0.0.1:9",)), Nobody())
    await fleet.start()
    await asyncio.sleep(0.05)
    fleet.servers[0].woken.set()
    for _ in range(moments):
      await asyncio.sleep(0)
    closing = asyncio.create_task(fleet.close())
    done, _ = await asyncio.wait({closing}, timeout=5)
    assert done

  asyncio.run(close())


class SlowClient:
  """A server whose calls take seconds of virtual time, given by the name of each call."""

  def __init__(self, **seconds):
    self.seconds = seconds

  def __getattr__(self, call):
    return lambda *arguments, **options: asyncio.sleep(self.seconds.get(call, 0.0))


@pytest.mark.parametrize("gives_adapter", (False, True))
def test_the_parts_of_a_sync_are_those_of_the_slowest_server(monkeypatch, gives_adapter):
  async def prove(server, weights, tolerance):
    await asyncio.sleep(5.0)
    return 0.0

  async def main():
    made = Fleet(FleetOptions(servers=2), None)
    fast, slow = made.servers
    fast._client = SlowClient(pause=1.0, load=3.0, resume=7.0, checksums=0.5)
    slow._client = SlowClient(
      pause=0.5, load=4.0, resume=0.5, load_adapter=2.0, resume_weights=10.0, resume_cache=20.0
    )
    adapter = Adapter("a", ROOT, "base") if gives_adapter else None
    weights = WeightsVersion(3, ROOT, (), np.zeros(0), adapter)
    for _ in range(2):  # not the sum of both.
      for server in made.servers:
        server._base, server.tensors._client = None, server._client
        await server.update(weights, tolerance=1.0)
    first = made.sync_times()
    slow.is_asleep = True
    await slow.update(weights, tolerance=1.0)
    woken = made.sync_times()
    for server in made.servers:
      await server.update(weights, tolerance=1.0)
    await made._http.close()
    return first, woken, made.sync_times()

  monkeypatch.setattr(Server, "_prove", prove)
  load = 6.0 if gives_adapter else 4.0  # with its base.
  first, woken, last = simulated.run(main(), monkeypatch)
  compared = 0.0 if gives_adapter else 0.5
  assert first == {LOAD: load, FLUSH: 8.0, CHECKSUM: compared, PROBE: 5.0}
  assert woken == {LOAD: load, FLUSH: 31.0, CHECKSUM: compared, PROBE: 5.0}
  assert last == ({LOAD: 2.0, FLUSH: 0.0, CHECKSUM: 0.0, PROBE: 5.0} if gives_adapter else first)
