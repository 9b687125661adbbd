"""What becomes of servers that cannot be started; the real ones: test_sglang_faults.py."""

import asyncio
import sys
import time

import psutil
import pytest

from grpo_jax import engines
from grpo_jax.engines import server_process, sglang_servers
from grpo_jax.engines.fleet import Fleet
from grpo_jax.engines.server import FleetError, FleetOptions, Server
from grpo_jax.engines.sglang_options import SGLangOptions
from grpo_jax.models import lora
from tests import side_by_side
from tests.engines import sglang_fixtures, tiny


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
