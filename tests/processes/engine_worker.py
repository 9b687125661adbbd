"""One of two processes whose engines use fake SGLang servers; writes what it saw as JSON.

python engine_worker.py ADDRESS INDEX FOLDER
"""

import contextlib
import errno
import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.request

import jax
import numpy as np

import configs.base
from grpo_jax import batching, engines, processes
from grpo_jax.batching import packing
from grpo_jax.building import distillation_teacher, weights_spec
from grpo_jax.config.configuration import typed
from grpo_jax.engines import base, probe
from grpo_jax.learn import sharding
from grpo_jax.models import lora, safetensors
from grpo_jax.models.leaves import stored
from grpo_jax.processes import arrays, starting
from tests import several
from tests.engines import tiny
from tests.environments import scripted_server
from tests.equivalence import equivalence_case

SERVER = pathlib.Path(__file__).with_name("fake_sglang.py")
CONFIG = tiny.config()


def spread(seed):
  """Returns weights that are spread over both processes."""
  mesh = sharding.make_mesh(data=1, fsdp=2, tensor=2)
  put = lambda x, of: jax.make_array_from_callback(x.shape, of, lambda i: np.asarray(x)[i])
  return jax.tree.map(put, tiny.params(CONFIG, seed), weights_spec.shardings_of(CONFIG, mesh))


@jax.jit
def fake_logprobs(embedding, tokens):
  return -jax.numpy.abs(embedding[tokens[0, 1:]].sum(-1))


@jax.jit
def fake_logprobs_with_adapter(embedding, b, tokens):
  return fake_logprobs(embedding, tokens) - jax.numpy.abs(b).max()


def make(folder, name, fault="none", **settings):
  """Makes an engine that launches one server, or uses those of `addresses`."""
  return engines.make(
    "sglang",
    config=CONFIG,
    source_directory=folder / "model",
    workdir=folder / name,
    **{
      "command": (sys.executable, str(SERVER), "{port}", fault),
      "weights_folder": str(folder / name / "weights"),
      "device": "cpu",
      "start_timeout_s": 30.0,
      **settings,
    },
  )


def failure(work):
  """Returns the kind and message of an error, and whether a run records and saves before it."""
  try:
    work()
  except Exception as error:
    is_of_all = getattr(error, "is_of_all_processes", False)
    return [type(error).__name__, str(error), is_of_all and isinstance(error, base.EngineFailure)]
  return None


def sampled(engine, n=12):
  """Returns the tokens and versions of `n` requests, whose seeds depend on the process."""
  requests = [
    tiny.request(i, [3, 4, i], seed=100 * processes.index() + i, max_tokens=2) for i in range(n)
  ]
  found = tiny.run(engine, requests)
  return [[found[str(i)].token_ids.tolist(), found[str(i)].weight_versions.tolist()]
          for i in range(n)]  # fmt: skip


def version_of(engine):
  """Returns what is in the folder of the newest version."""
  folder = engine._folder
  read = safetensors.open_folder(folder)
  wanted = tiny.params(CONFIG, engine.weight_version)
  for tensor in stored(CONFIG):
    values = wanted
    for key in tensor.path:
      values = values[key]
    values = np.asarray(values if tensor.layer is None else values[tensor.layer])
    values = values.T if tensor.leaf.is_kernel else values
    np.testing.assert_array_equal(read.read(tensor.name), values)
  files = [file.name for file in folder.iterdir() if file.suffix == ".safetensors"]
  return [str(folder), sorted(files)]


def asked(address):
  with urllib.request.urlopen(f"{address}/asked", timeout=30) as answer:
    return json.loads(answer.read())


def own_servers(folder):
  """Weights of three versions, of which one cannot be written; a server that dies."""
  found = {}
  with make(folder, "own") as engine:
    engine.load_weights(spread(0), version=0)
    found["first"] = version_of(engine)
    found["sampled"] = sampled(engine)
    found["address"] = engine._fleet.addresses
    engine.load_weights(spread(1), version=1)
    found["second"] = version_of(engine)
    write = safetensors.write_file
    if processes.index() == 1:
      full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
      safetensors.write_file = lambda *arguments: (_ for _ in ()).throw(full)
    found["full"] = failure(lambda: engine.load_weights(spread(2), version=2))
    safetensors.write_file = write
    if processes.index() == 1:
      os.kill(engine._fleet.servers[0].process.pid, 9)
      while engine._fleet.servers[0].process is not None:
        time.sleep(0.01)
    found["again"] = sampled(engine)
    engine.load_weights(spread(3), version=3)
    found["fourth"] = version_of(engine)
    found["folders"] = sorted(p.name for p in engine._folders.folder.iterdir())
    found["metrics"] = engine.metrics()
    processes.barrier("metrics", timeout_s=120)
  processes.barrier("closed", timeout_s=120)
  found["left"] = [p.name for p in (folder / "own" / "weights").iterdir() if p.is_dir()]
  found["logs"] = sorted(p.name for p in (folder / "own" / "servers").iterdir())
  return found


def separate_folders(folder):
  """Processes that do not see each other's folders."""
  mine = folder / "separate" / f"weights-{processes.index()}"
  with make(folder, "separate", weights_folder=str(mine)) as engine:
    engine.load_weights(spread(0), version=0)
    return version_of(engine)


def failures(folder):
  """What both processes raise if the server of process 1 fails."""
  is_one = processes.index() == 1
  found = {}
  with make(folder, "stale", "stale" if is_one else "none") as engine:
    engine.load_weights(spread(0), version=0)
    found["stale"] = failure(lambda: engine.load_weights(spread(1), version=1))
  with make(folder, "broken", "broken" if is_one else "late") as engine:
    began = time.monotonic()
    found["broken"] = failure(lambda: engine.load_weights(spread(0), version=0))
    found["broken after"] = time.monotonic() - began
  command = ("no-such-program" if is_one else sys.executable, str(SERVER), "{port}", "none")
  found["missing"] = failure(lambda: make(folder, "missing", command=command))
  port = processes.broadcast(several.free_port())
  with make(folder, "ports", port=port) as engine:
    engine.load_weights(spread(0), version=0)
    found["ports"] = [port, *engine._fleet.addresses]
  found["gpus"] = failure(lambda: make(folder, "gpus", device="cuda", gpus=(0,)))
  return found


def given_servers(folder):
  """Two servers that the run was given, one for each process; that of process 1 is restarted."""
  ports = processes.exchange(several.free_port(), what="the ports of the servers")
  addresses = tuple(f"http://127.0.0.1:{port}" for port in ports)
  me = processes.index()
  serve = lambda: subprocess.Popen([sys.executable, SERVER, str(ports[me]), "none"])
  server, found = serve(), {}
  try:
    options = {"addresses": addresses, "health_every_s": 0.3, "max_rows": 6}
    with make(folder, "given", command=None, **options) as engine:
      engine.load_weights(spread(0), version=0)
      engine.load_weights(spread(1), version=1)
      found["addresses"] = [addresses, engine._fleet.addresses]
      found["sampled"] = sampled(engine, 40)
      found["asked"] = asked(addresses[me])
      if me == 1:
        server.kill()
        server.wait()
        server = serve()
      found["again"] = sampled(engine)
      found["asked again"] = asked(addresses[me])
      engine.load_weights(spread(2), version=2)
      found["metrics"] = engine.metrics()
      found["files"] = version_of(engine)
      processes.barrier("given", timeout_s=120)
  finally:
    server.kill()
  return found


def with_adapter(version):
  """Returns weights with an adapter of the queries, both spread over the processes."""
  options = lora.AdapterOptions(rank=2, targets=("q",))
  mesh = sharding.make_mesh(data=1, fsdp=2, tensor=2)
  tree = lora.tree(CONFIG, options)
  places = sharding.param_shardings(jax.tree.map(lambda x: x.axes, tree), mesh, shapes=tree)

  def spread_out(leaf, place):
    values = np.full(leaf.shape, version, np.float32)
    return jax.make_array_from_callback(leaf.shape, place, lambda i: values[i])

  adapter = jax.tree.map(spread_out, tree, places)
  return options, lora.join(spread(0), adapter, options.scale)


def given_adapters(folder):
  """A server of each process that the run was given, and that is given adapters."""
  ports = processes.exchange(several.free_port(), what="the ports of the servers")
  addresses = tuple(f"http://127.0.0.1:{port}" for port in ports)
  address = addresses[processes.index()]
  server = subprocess.Popen([sys.executable, SERVER, str(ports[processes.index()]), "none"])
  own, found = probe._logprobs, {}
  probe._logprobs = lambda params, tokens, *settings: fake_logprobs_with_adapter(
    params["embed"], params["layers"]["q"].b, tokens
  )
  try:
    options, _ = with_adapter(1)
    with make(folder, "adapters", command=None, addresses=addresses, adapter=options) as engine:
      for version in (1, 2, 3):
        engine.load_weights(with_adapter(version)[1], version=version)
        found[f"sampled {version}"] = sampled(engine)
      found["probe"] = engine.metrics()["mismatch/probe_abs_logprob_max"]
      while asked(address).get("/unload_lora_adapter", 0) < 2:
        time.sleep(0.05)
      found["asked"] = asked(address)
      found["folders"] = sorted(p.name for p in engine._folders.folder.iterdir())
      processes.barrier("looked at adapters", timeout_s=120)
  finally:
    probe._logprobs = own
    server.kill()
  return found


def teacher_servers(folder):
  """Logprobs of a teacher's server of each process, and one that fails on process 1 only."""
  del folder
  rng = np.random.default_rng(0)
  sizes = ((5, (7, 3)), (9, (6, 1)), (4, (8,)))
  groups = [
    equivalence_case.group(rng, f"p{a}", a, b, vocabulary=256, reward=0.0, turns=True)
    for a, b in sizes
  ]
  zeros = [np.zeros(len(group.rollouts), np.float32) for group in groups]
  shapes = (packing.Shape(6, 48, 48),)
  made = batching.assemble(groups, zeros, shapes=shapes, skip_zero_advantage=False)
  mesh = sharding.make_mesh(data=1, fsdp=2, tensor=2)
  is_failing = False

  def respond(handler, server):
    body = json.loads(handler.body)
    ids, first = body["input_ids"], body["logprob_start_len"]
    entries = [[-sum(ids[: at + 1]) / 7, ids[at], None] for at in range(first, len(ids))]
    entries[0][0] = None
    content = {} if is_failing else {"meta_info": {"input_token_logprobs": entries}}
    scripted_server.answer(content)(handler, server)

  with scripted_server.serving(respond) as server, contextlib.ExitStack() as stack:
    config = configs.base.get_config()
    config.teacher.urls, config.teacher.retries = (server.url,), 0
    score = distillation_teacher.at_servers(
      typed(config), mesh=mesh, vocab_size=259, stack=stack, stop=False
    )
    placed = sharding.put(made.minibatches, mesh)
    values = arrays.fetch(score(placed))
    of_each = [x for of in batching.per_rollout(made, values, groups) for x in of]
    rows = [
      ([*g.prompt.token_ids, *r.completion_ids], len(g.prompt.token_ids), r.loss_mask)
      for g in groups
      for r in g.rollouts
    ]
    for found, (ids, first, mask) in zip(of_each, rows, strict=True):
      wanted = -np.cumsum(ids)[first:] / 7
      np.testing.assert_allclose(found[mask], wanted[mask], rtol=1e-6)
    asked = len(server.requests) - 1  # without the check at the start.
    is_failing = processes.index() == 1
    failed = failure(lambda: score(placed))
  return {"asked": asked, "rows": len(rows), "failed": failed}


def main(address, index, folder):
  place = {"coordinator": address, "processes": 2, "index": int(index)}
  starting.start({**place, "join_s": 60.0, "heartbeat_s": 60.0, "wait_s": 120.0})
  own = probe.Probe(CONFIG, compute_dtype="float32", num_valid_tokens=CONFIG.vocab_size)
  of_many = arrays.fetch(own.logprobs(spread(0)))
  difference = np.abs(of_many - np.asarray(probe._logprobs(
    tiny.params(CONFIG, 0), np.asarray(own.ids)[None], CONFIG, own._products,
    own._matmul_precision, own._attention))).max()  # fmt: skip
  found = {"probe": float(difference)}
  probe._logprobs = lambda params, tokens, *settings: fake_logprobs(params["embed"], tokens)
  cases = (
    *(own_servers, separate_folders, failures, given_servers, given_adapters),
    teacher_servers,
  )
  for case in cases:
    began = time.monotonic()
    found[case.__name__] = case(pathlib.Path(folder))
    print(case.__name__, round(time.monotonic() - began, 1), time.process_time(), flush=True)
  pathlib.Path(folder, f"found-{index}.json").write_text(json.dumps(found))
  starting.finish(0)


if __name__ == "__main__":
  main(*sys.argv[1:])
