"""A real server behind a proxy that spoils some answers: all completions come, once, and right."""

import asyncio
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from grpo_jax.engines.probe import WrongWeights
from grpo_jax.engines.server import FleetError
from grpo_jax.engines.transfer import TransferError
from grpo_jax.models import lora
from tests.engines import faulty_proxy, sglang_fixtures, tiny
from tests.engines.faulty_proxy import FaultyProxy
from tests.engines.processes import eventually
from tests.engines.sglang_fixtures import check, collect, processes_in

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = tiny.config()
PATIENCE = {"health_every_s": 1.0, "health_timeout_s": 20.0, "control_timeout_s": 60.0}


@pytest.fixture
def proxy(sglang_server):
  with FaultyProxy(sglang_server.address) as proxy:
    yield proxy


@pytest.fixture
def make(proxy, sglang_model, tmp_path):
  """Returns a function that makes an engine which speaks through the proxy."""
  made = []

  def make(**settings):
    number = len(made)
    made.append(
      sglang_fixtures.make(
        sglang_model,
        tmp_path / f"run{number}",
        **{"addresses": (proxy.address,), **PATIENCE, **settings},
      )
    )
    return made[-1]

  yield make
  proxy.released.set()
  for engine in made:
    engine.close()


@pytest.mark.parametrize("fault", faulty_proxy.BAD_ANSWERS, ids=lambda fault: fault.__name__)
def test_a_bad_answer_is_asked_for_again_and_comes_once(proxy, make, fault):
  engine = make()
  requests = tiny.groups([[1, 2], [3], [4, 5, 6]], 4)
  proxy.fail("/generate", fault, times=3)
  generations = collect(engine, requests)
  check(generations, requests)
  assert engine.metrics()["engine/retries"] == 3 and engine.metrics()["engine/restarts"] == 0
  asked = [body["rid"] for path, body in proxy.seen if path == "/generate"]
  assert len(asked) == len(set(asked)) == 1 + 12 + 3  # with the probe.


def test_an_answer_that_is_always_bad_stops_the_run_and_says_what_came(proxy, make):
  engine = make(max_attempts=3)
  proxy.fail("/generate", faulty_proxy.says_no_json, times=100)
  with pytest.raises(FleetError, match="failed 3 times; the last: .*Bad gateway"):
    tiny.run(engine, [tiny.request("x", [1])])


def test_what_is_refused_is_never_asked_again_and_the_engine_continues(proxy, make):
  engine = make()
  before = proxy.count("/generate")
  proxy.fail("/generate", faulty_proxy.says_400)
  with pytest.raises(FleetError, match="request 'x': .*answered 400: .*prompt is too long"):
    tiny.run(engine, [tiny.request("x", [1])])
  assert proxy.count("/generate") == before + 1
  assert engine.metrics()["engine/retries"] == 0
  requests = tiny.groups([[1]], 2)
  check(tiny.run(engine, requests), requests)


@pytest.mark.parametrize(
  ("path", "fault"),
  [
    ("/pause_generation", faulty_proxy.says_500),
    ("/update_weights_from_disk", faulty_proxy.says_half),
    ("/update_weights_from_disk", faulty_proxy.hangs_up),
    ("/continue_generation", faulty_proxy.says_500),
    ("/generate", faulty_proxy.says_something_else),  # the probe.
  ],
)
def test_a_change_of_weights_that_goes_wrong_is_made_again(proxy, make, path, fault):
  engine = make()
  proxy.fail(path, fault)
  engine.load_weights(tiny.params(CONFIG, 1), version=4)
  assert engine.metrics()["engine/restarts"] == 1
  requests = tiny.groups([[1, 2]], 4)
  check(tiny.run(engine, requests), requests, version=4, seed=1)


def test_a_change_of_weights_that_hangs_is_given_up_in_time_and_made_again(proxy, make):
  engine = make(control_timeout_s=5.0)
  proxy.fail("/update_weights_from_disk", faulty_proxy.hangs)
  began = time.monotonic()
  engine.load_weights(tiny.params(CONFIG, 1), version=4)
  assert 5.0 < time.monotonic() - began < 60.0
  requests = tiny.groups([[1, 2]], 4)
  check(tiny.run(engine, requests), requests, version=4, seed=1)


def test_refused_weights_stop_the_run_and_leave_the_server_answering(proxy, make, sglang_server):
  engine = make()
  proxy.fail("/update_weights_from_disk", faulty_proxy.says_400)
  with pytest.raises(FleetError, match="answered 400.*engine.sglang.weights_folder"):
    engine.load_weights(tiny.params(CONFIG, 1), version=4)
  assert proxy.count("/update_weights_from_disk") == 2 + 1  # with the look at start-up.
  assert ask(sglang_server.address)["meta_info"]["completion_tokens"] == 2  # it is not paused.


def ask(address):
  """Generates two tokens without an engine."""
  body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
  request = urllib.request.Request(
    f"{address}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
  )
  with urllib.request.urlopen(request, timeout=60) as response:
    return json.load(response)


def test_a_server_with_other_weights_than_were_sent_stops_the_run(proxy, make, sglang_model):
  engine = make()

  def swap(path, body):
    if path == "/update_weights_from_disk":
      return {**body, "model_path": str(sglang_model)}  # of the right shapes, and an old version.
    return body

  proxy.rewrite = swap
  with pytest.raises(WrongWeights, match=r"14 of 14 tensors .* are those of version 3\."):
    engine.load_weights(tiny.params(CONFIG, 1), version=4)
  with pytest.raises(WrongWeights):
    tiny.run(engine, [tiny.request("x", [1])])


def test_a_server_that_lost_the_weights_gets_them_again(proxy, make, sglang_server, sglang_model):
  """Somebody restarts it: it serves what it was started with."""
  engine = make()
  body = {"model_path": str(sglang_model), "weight_version": "default", "flush_cache": True}
  request = urllib.request.Request(
    f"{sglang_server.address}/update_weights_from_disk",
    json.dumps(body).encode(),
    {"Content-Type": "application/json"},
  )
  with urllib.request.urlopen(request, timeout=60) as response:
    assert json.load(response)["success"]
  eventually(lambda: engine.metrics()["engine/restarts"] == 1)
  requests = tiny.groups([[1, 2]], 4)
  check(tiny.run(engine, requests), requests)


def test_requests_in_flight_continue_while_weights_change(make):
  """What was sampled says by which weights; nothing is lost."""
  engine = make()
  first = tiny.request("first", [1, 2], max_tokens=1)  # the others have far to go then.
  requests = [first, *tiny.groups([[1, 2], [3]], 16, max_tokens=200)]

  async def change_meanwhile():
    loop, change, found = asyncio.get_running_loop(), None, []
    load = lambda: engine.load_weights(tiny.params(CONFIG, 1), version=4)
    async for generation in engine.generate(requests):
      change = change or loop.run_in_executor(None, load)
      found.append(generation)
    await change
    return found

  found = asyncio.run(change_meanwhile())
  assert sorted(g.request_id for g in found) == sorted(r.request_id for r in requests)
  versions = [g.weight_versions.tolist() for g in found]
  assert all(v == sorted(v) and set(v) <= {3, 4} for v in versions)
  assert any(len(set(v)) == 2 for v in versions), "no completion saw the change"
  by_id = {r.request_id: r for r in requests}
  for generation in found:
    ids, prompt = generation.token_ids, by_id[generation.request_id].prompt_ids
    begun = generation.weight_versions == 3
    wanted = tiny.model_logprobs(CONFIG, tiny.params(CONFIG, 0), prompt, ids)
    np.testing.assert_allclose(
      generation.logprobs[begun], tiny.of_tokens(wanted, ids)[begun], atol=1e-4
    )
    wanted = tiny.model_logprobs(CONFIG, tiny.params(CONFIG, 1), prompt, ids)
    np.testing.assert_allclose(
      generation.logprobs[~begun], tiny.of_tokens(wanted, ids)[~begun], atol=1e-4
    )


def test_a_server_without_adapters_is_refused_for_them(make):
  options = lora.AdapterOptions(rank=4)
  engine = make(version=None, adapter=options)
  adapter = lora.init(jax.random.key(0), CONFIG, options)
  with pytest.raises(FleetError, match="LoRA is off there. Start it with --enable-lora"):
    engine.load_weights(lora.join(tiny.params(CONFIG), adapter, options.scale), version=0)


def test_memory_is_given_back_and_taken_again(make):
  engine = make(release_memory=True)
  engine.release()
  engine.load_weights(tiny.params(CONFIG, 1), version=4)
  requests = tiny.groups([[1, 2]], 4)
  check(tiny.run(engine, requests), requests, version=4, seed=1)
  engine.release()
  engine.load_weights(tiny.params(CONFIG, 0), version=5)
  check(tiny.run(engine, requests), requests, version=5)


# --- the disk -----------------------------------------------------------------------------------


def test_a_full_disk_stops_the_change_of_weights_and_no_sampling(make, small_disk):
  engine = make(weights_folder=str(small_disk / "w"))
  ballast = small_disk / "ballast"
  ballast.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 50_000))
  with pytest.raises(TransferError, match="version 4 .*No space left on device"):
    engine.load_weights(tiny.params(CONFIG, 1), version=4)
  requests = tiny.groups([[1, 2]], 4)
  assert engine.weight_version == 3
  check(tiny.run(engine, requests), requests)
  ballast.unlink()
  engine.load_weights(tiny.params(CONFIG, 1), version=4)
  check(tiny.run(engine, requests), requests, version=4, seed=1)


# --- processes that stop and die ----------------------------------------------------------------


def test_a_scheduler_that_hangs_is_noticed_and_the_server_used_again_when_it_is_back(
  make, sglang_server
):
  engine = make(health_timeout_s=3.0, control_timeout_s=20.0, start_timeout_s=120.0)
  (scheduler,) = processes_in(sglang_server.log.parent, "sglang::scheduler")
  requests = tiny.groups([[1, 2], [3]], 8, max_tokens=100)
  with ThreadPoolExecutor(1) as pool:
    scheduler.suspend()
    try:
      generating = pool.submit(collect, engine, requests)
      eventually(lambda: engine.metrics()["engine/restarts"] >= 1)  # it is given up.
    finally:
      scheduler.resume()
    check(generating.result(120), requests)


# A trainer that dies while its server is paused: the proxy never answers the change of weights.
TRAINER = """
import pathlib, sys
from tests.engines import sglang_fixtures, tiny
model, workdir, address = sys.argv[1:]
engine = sglang_fixtures.make(pathlib.Path(model), pathlib.Path(workdir), addresses=(address,))
print("first", flush=True)
input()
engine.load_weights(tiny.params(tiny.config(), 1), version=4)
"""


def test_the_next_trainer_can_use_a_server_whose_trainer_was_killed_while_it_was_paused(
  proxy, make, sglang_model, sglang_server, tmp_path
):
  trainer = subprocess.Popen(
    [sys.executable, "-c", TRAINER, sglang_model, tmp_path / "dead", proxy.address],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'packages'}"},
    cwd=ROOT,
  )
  try:
    assert any(b"first" in line for line in iter(trainer.stdout.readline, b""))
    proxy.fail("/update_weights_from_disk", faulty_proxy.hangs)
    loads = proxy.count("/update_weights_from_disk")
    trainer.stdin.write(b"go on\n")
    trainer.stdin.flush()
    eventually(lambda: proxy.count("/update_weights_from_disk") > loads)
  finally:
    trainer.send_signal(signal.SIGKILL)
    trainer.communicate()
  assert proxy.seen[-1][0] != "/continue_generation"
  engine = make(version=7)
  requests = tiny.groups([[1, 2]], 4)
  check(tiny.run(engine, requests), requests, version=7)
