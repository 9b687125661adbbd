"""Servers that the engine launched are killed and stopped: completions come once, then it heals."""

import dataclasses
import json
import os
import pathlib
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from grpo_jax.engines import launching
from grpo_jax.engines.server import FleetError
from grpo_jax.engines.server_process import API_KEY_VARIABLE, ServerError
from grpo_jax.engines.sglang_client import Timeouts
from tests.engines import sglang_fixtures, tiny
from tests.engines.processes import eventually
from tests.engines.sglang_fixtures import check, collect, processes_in

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

CONFIG = tiny.config()
PATIENCE = {"health_every_s": 1.0, "health_timeout_s": 20.0, "control_timeout_s": 30.0}
KEY = "key-of-these-servers-0123456789"
START_S = 600.0  # for a server, or two at a time, on a busy machine.


class Servers:
  """An engine with servers of its own, and their processes."""

  def __init__(self, engine, workdir):
    self.engine, self.workdir = engine, workdir

  @property
  def restarts(self):
    return self.engine.metrics()["engine/restarts"]

  def main(self, index):
    """Returns the process that speaks HTTP."""
    guards = processes_in(self.workdir / "servers", f"server_{index}.log")
    return guards[0].children()[0] if guards and guards[0].children() else None

  def scheduler(self, index):
    """Returns the process that computes."""
    named = lambda p: "sglang::scheduler" in " ".join(p.cmdline())
    (found,) = [p for p in self.main(index).children(recursive=True) if named(p)]
    return found

  def version(self, index):
    """Returns the version that a server says it has; None if it does not answer."""
    main = self.main(index)
    command = main.cmdline() if main else []
    if "--port" not in command:
      return None
    address = f"http://127.0.0.1:{command[command.index('--port') + 1]}"
    try:
      return ask(f"{address}/model_info", key=KEY)["weight_version"]
    except OSError:
      return None

  def is_underway(self, index):
    """Returns a condition: some of a server's completions have ended, and others have not."""
    most = 0

    def condition():
      nonlocal most
      running = [*self.engine._dispatcher._running.values()]
      left = sum(each.index == index for each in running)
      most = max(most, left)
      return 0 < left < most

    return condition

  def wait_until_healed(self, version, *, restarts):
    """Waits for restarts of servers, and until both are sent requests and have the newest weights.

    A server reports its version before it has proven that it computes with the new weights. Until
    then the groups of a call all go to the other server, and stay there.
    """
    eventually(lambda: self.restarts >= restarts, timeout_s=120.0)
    places = self.engine._dispatcher._placement._places.values()
    newest = [str(version)] * 2
    is_healed = lambda: (
      [self.version(i) for i in range(2)] == newest and all(place.is_open for place in places)
    )
    eventually(is_healed, timeout_s=START_S)


def ask(url, *, key=""):
  request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
  with urllib.request.urlopen(request, timeout=30) as response:
    return json.load(response)


@pytest.fixture(scope="module")
def servers(sglang_model, tmp_path_factory):
  """Two servers, which the tests of this file damage one after the other."""
  workdir = tmp_path_factory.mktemp("launched")
  settings = {**PATIENCE, "max_restarts": 20, "start_timeout_s": START_S}
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv(API_KEY_VARIABLE, KEY)  # else it is random, and nobody here could ask.
    engine = sglang_fixtures.make(sglang_model, workdir, servers=2, **settings)
  yield Servers(engine, workdir)
  engine.close()


def requests_of(size):
  """Returns four groups, of which some end long before others.

  The groups are new ones each time, so that both servers are given some of them. Otherwise they
  would stay with the server that alone was up when an earlier test sent them.
  """
  prompts, call = {10: [1, 2], 60: [3], 120: [4, 5, 6], 200: [7, 8]}, uuid.uuid4().hex
  requests = [
    tiny.request(f"{length}.{i}", ids, seed=1000 * length + i, max_tokens=length)
    for length, ids in prompts.items()
    for i in range(size)
  ]
  name = lambda request: f"{call}.{request.request_id.partition('.')[0]}"
  return [dataclasses.replace(request, group=name(request)) for request in requests]


def test_a_server_killed_while_it_generates_loses_and_doubles_nothing(servers):
  requests, before = requests_of(8), servers.restarts
  found = collect(servers.engine, requests, after_first=servers.main(0).kill)
  check(found, requests)
  assert servers.engine.metrics()["engine/retries"] > 0  # it had some of them.
  servers.wait_until_healed(3, restarts=before + 1)
  check(collect(servers.engine, requests), requests)


def test_servers_killed_and_stopped_while_idle_are_replaced_and_requests_wait(servers):
  requests, before = requests_of(2), servers.restarts
  servers.scheduler(0).kill()
  stopped = servers.main(1)
  stopped.suspend()
  eventually(lambda: servers.restarts >= before + 2, timeout_s=120.0)
  assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE
  check(collect(servers.engine, requests), requests)
  servers.wait_until_healed(3, restarts=before + 2)


def check_versions(found, requests, seeds):
  """Checks that each token is of the model of its version, and that versions never decrease."""
  assert found.keys() == {request.request_id for request in requests}
  for request in requests:
    generation = found[request.request_id]
    ids, versions = generation.token_ids, generation.weight_versions
    assert len(ids) == request.sampling.max_tokens and (np.diff(versions) >= 0).all()
    for version in {*versions.tolist()}:
      tree = tiny.params(CONFIG, seeds[version])
      wanted = tiny.of_tokens(tiny.model_logprobs(CONFIG, tree, request.prompt_ids, ids), ids)
      mine = versions == version
      np.testing.assert_allclose(generation.logprobs[mine], wanted[mine], atol=1e-4)


def is_called(monkeypatch, owner, name):
  """Returns an event that is set when a method is called."""
  event, method = threading.Event(), getattr(owner, name)

  def called(*args, **kwargs):
    event.set()
    return method(*args, **kwargs)

  monkeypatch.setattr(owner, name, called)
  return event


@pytest.mark.parametrize("fault", ["killed", "hung"])
def test_a_server_lost_while_weights_change_is_replaced_with_the_newest(
  servers, monkeypatch, fault
):
  """Each of both servers has completions under way."""
  old = servers.engine.weight_version
  requests, before = requests_of(16), servers.restarts
  for server in servers.engine._fleet.servers if fault == "hung" else ():
    monkeypatch.setattr(server.client, "_timeouts", Timeouts(control_s=8.0, health_s=20.0))
  pausing = is_called(monkeypatch, servers.engine._fleet.servers[1].client, "pause")
  schedulers = [servers.scheduler(i) for i in range(2)]
  with ThreadPoolExecutor(2) as pool:
    sampling = pool.submit(collect, servers.engine, requests)
    eventually(servers.is_underway(1), every_s=0.005)
    for scheduler in schedulers:
      scheduler.suspend()
    seed = old + 1 - 3
    change = lambda: servers.engine.load_weights(tiny.params(CONFIG, seed), version=old + 1)
    loading = pool.submit(change)
    assert pausing.wait(60.0)
    time.sleep(0.5)  # until the request has arrived.
    schedulers[1].resume()  # the other stays as it is, so that the change cannot end there.
    eventually(lambda: servers.version(1) == str(old + 1))
    assert not loading.done() and not sampling.done()
    if fault == "killed":
      servers.main(0).kill()
    loading.result(START_S)
    found = sampling.result(START_S)
  check_versions(found, requests, {old: seed - 1, old + 1: seed})
  assert any(len({*g.weight_versions.tolist()}) == 2 for g in found.values())
  servers.wait_until_healed(old + 1, restarts=before + 1)
  requests = requests_of(2)
  check(collect(servers.engine, requests), requests, version=old + 1, seed=seed)


def test_closing_the_engine_leaves_no_process_and_no_weights(servers):
  assert processes_in(servers.workdir / "servers")
  servers.engine.close()
  assert not processes_in(servers.workdir / "servers")
  assert not list((servers.workdir / "weights").glob("run-*"))


def test_a_port_that_is_taken_is_reported_before_anything_starts(sglang_model, tmp_path):
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(ServerError, match=f"port {port} is taken by process {os.getpid()}"):
      sglang_fixtures.make(sglang_model, tmp_path, port=port)


# --- a server that dies again and again, and the key of its API ---------------------------------

# The first start finds its port taken meanwhile, the second serves, all later ones fail.
COMMAND = """
starts=$(cat starts 2>/dev/null || echo 0)
echo $((starts + 1)) > starts
case $starts in
  0) echo "[Errno 98] error while attempting to bind on address: address already in use"; exit 1;;
  1) exec "$@";;
  *) echo "the GPU has fallen off the bus"; exit 79;;
esac
"""


def test_a_server_that_dies_again_and_again_stops_the_run_and_no_key_is_seen(
  sglang_model, tmp_path, monkeypatch
):
  key = "key-of-this-test-0123456789"
  monkeypatch.setenv(API_KEY_VARIABLE, key)
  serve = (
    *(str(sglang_fixtures.server_python()), str(launching.SERVER_SIDE / "serve.py")),
    *("--model-path", "{model_path}", "--host", "{host}", "--port", "{port}"),
    *("--device", "cpu", "--context-length", "256", "--max-running-requests", "64"),
    "--enable-deterministic-inference",
  )
  settings = {**PATIENCE, "max_restarts": 3, "start_timeout_s": START_S, "host": "0.0.0.0"}
  command = ("sh", "-c", COMMAND, "sh", *serve)
  with sglang_fixtures.make(sglang_model, tmp_path, command=command, **settings) as engine:
    assert engine.metrics()["engine/restarts"] == 1  # the port.
    requests = requests_of(1)
    check(collect(engine, requests), requests)

    server = Servers(engine, tmp_path)
    words = server.main(0).cmdline()
    address = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
    assert ask(f"{address}/model_info", key=key)["weight_version"] == "3"
    for wrong in ("", "another"):
      with pytest.raises(urllib.error.HTTPError) as refused:
        ask(f"{address}/model_info", key=wrong)
      with refused.value as answer:
        assert answer.code == 401
    assert not seen_in_processes(key)
    assert not [f for f in tmp_path.rglob("*") if f.is_file() and key.encode() in f.read_bytes()]

    server.main(0).kill()
    with pytest.raises(FleetError) as stopped:
      collect(engine, requests)
    message = str(stopped.value)
    assert "was lost 4 times" in message and "engine.sglang.max_restarts" in message
    assert "exited with code 79" in message and "the GPU has fallen off the bus" in message
    assert key not in message
    with pytest.raises(FleetError, match="fallen off the bus"):
      engine.load_weights(tiny.params(CONFIG, 1), version=4)


def seen_in_processes(key):
  """Returns the command lines in which the key is seen."""
  lines = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
  return [line for line in lines if any(key in word for word in line)]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_server_has_a_key_even_if_none_was_given(sglang_model, tmp_path, monkeypatch, host):
  monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
  given = "import os; open('given', 'w').write(os.environ[%r]); os.kill(os.getpid(), 9)"
  command = (str(sglang_fixtures.server_python()), "-c", given % API_KEY_VARIABLE)
  with pytest.raises(FleetError, match=signal.SIGKILL.name):
    sglang_fixtures.make(sglang_model, tmp_path, command=command, host=host)
  assert len((tmp_path / "servers" / "given").read_text()) >= 32
  assert not pathlib.Path("given").exists()
