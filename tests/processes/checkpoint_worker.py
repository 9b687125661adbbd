"""One of two processes that save and restore checkpoints; writes what it saw as JSON.

python checkpoint_worker.py ADDRESS INDEX FOLDER
"""

import errno
import json
import logging
import os
import pathlib
import resource
import shutil
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax import processes
from grpo_jax.building import weights_spec
from grpo_jax.files import manifest, remote
from grpo_jax.learn import sharding
from grpo_jax.models import export
from grpo_jax.processes import exchanges, starting
from grpo_jax.run_folder import checkpointing, keeper, shared_folder, stored_arrays, url_steps
from grpo_jax.types import TrainState
from tests.engines import tiny

SPECS = {
  "embed": PartitionSpec("fsdp", "tensor"),
  "q": PartitionSpec(None, "fsdp", "tensor"),
  "norm": PartitionSpec(),
  "half": PartitionSpec("tensor"),
}


def values(step):
  """Returns arrays whose every bit follows from the step."""
  rng = np.random.default_rng(step)
  return {
    "embed": rng.standard_normal((16, 8)).astype(np.float32),
    "q": rng.standard_normal((3, 8, 24)).astype(np.float32),
    "norm": np.array([np.nan, -0.0, np.inf, 1e-42], np.float32),
    "half": rng.standard_normal((4, 5)).astype(jnp.bfloat16),
  }


def make_state(step, mesh):
  """Returns a state that is spread over a mesh, beside arrays of one process and of the host."""
  put = lambda value, spec: jax.make_array_from_callback(
    value.shape, NamedSharding(mesh, spec), lambda index: value[index]
  )
  params = {name: put(value, SPECS[name]) for name, value in values(step).items()}
  return {"step": jnp.asarray(step, jnp.int32), "params": params, "host": np.arange(3.0) + step}


def bits(tree):
  """Returns the bytes of what this process has of every leaf."""
  found = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    shards = leaf.addressable_shards if isinstance(leaf, jax.Array) else ()
    parts = [(str(shard.index), np.asarray(shard.data).tobytes().hex()) for shard in shards]
    found[jax.tree_util.keystr(path)] = parts or np.asarray(leaf).tobytes().hex()
  return found


def failure(work):
  """Returns the kind and message of an error; None if there is none."""
  try:
    work()
  except Exception as error:
    return [type(error).__name__, str(error)]
  return None


class Patched:
  """Replaces an attribute on one process within a block."""

  def __init__(self, on, owner, name, value):
    self._is_on = processes.index() == on
    self._arguments = owner, name, value

  def __enter__(self):
    owner, name, value = self._arguments
    self._before = getattr(owner, name)
    if self._is_on:
      setattr(owner, name, value)

  def __exit__(self, *_):
    owner, name, _ = self._arguments
    setattr(owner, name, self._before)


def full(*_, **__):
  raise OSError(errno.ENOSPC, "No space left on device")


def names(folder):
  """Returns the names in a folder, once both processes have come here."""
  processes.exchange(None, what="a look into the folder")
  found = sorted(path.name for path in folder.iterdir())
  processes.exchange(None, what="the end of the look")
  return found


# --- what is tested ---


def saves(folder, mesh):
  """Saves three steps and reads the newest onto two meshes."""
  with checkpointing.open(folder, keep_last=2) as checkpoints:
    is_new = checkpoints.restore_latest(make_state(0, mesh)) is None
    for step in (1, 2, 3):
      checkpoints.save(step, make_state(step, mesh), {"cursor": step})
    checkpoints.wait()
    steps = checkpoints.steps()
  is_equal = []
  for other in (mesh, sharding.make_mesh(data=1, fsdp=4, tensor=1)):
    with checkpointing.open(folder) as checkpoints:
      state, extra = checkpoints.restore_latest(make_state(0, other))
    is_equal.append(bits(state) == bits(make_state(3, other)) and extra == {"cursor": 3})
  return {"is_new": is_new, "steps": steps, "is_equal": is_equal}


def at_url(folder, mesh):
  """Saves three steps at a URL, where Orbax writes from both, and reads the newest."""
  place = remote.RemoteFolder(f"file://{folder}")
  with checkpointing.open(url_steps.AtUrl(place), keep_last=2) as checkpoints:
    for step in (1, 2, 3):
      checkpoints.save(step, make_state(step, mesh), {"cursor": step})
  with checkpointing.open(url_steps.AtUrl(place)) as checkpoints:
    state, extra = checkpoints.restore_latest(make_state(0, mesh))
    steps = checkpoints.steps()
  is_equal = bits(state) == bits(make_state(3, mesh)) and extra == {"cursor": 3}
  written = checkpointing.Checkpoints._written

  def written_and_lost(self, step, writing):
    listed = written(self, step, writing)
    shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}" / "state" / "ocdbt.process_1")
    return listed

  with (
    checkpointing.open(url_steps.AtUrl(place)) as checkpoints,
    Patched(0, checkpointing, "SEEN_S", 0.3),
    Patched(1, checkpointing.Checkpoints, "_written", written_and_lost),
  ):
    checkpoints.save(4, make_state(4, mesh), {})
    error = failure(checkpoints.wait)
    found = {"steps": steps, "is_equal": is_equal, "error": error, "left": checkpoints.steps()}
  return found


def written_by_one(folder, mesh):
  """Restores what the test has written, as one process with another mesh."""
  with checkpointing.open(folder) as checkpoints:
    state, extra = checkpoints.restore_latest(make_state(0, mesh))
    checkpoints.save(9, make_state(9, mesh), {"cursor": 9})
  return {"is_equal": bits(state) == bits(make_state(8, mesh)), "extra": extra}


def full_disks(folder, mesh):
  """Saves while the disk is full for one of the processes, at three moments."""
  found = {}
  with checkpointing.open(folder) as checkpoints:
    save = lambda step: checkpoints.save(step, make_state(step, mesh), {})
    save(1)
    usage = shutil.disk_usage(folder)._replace(free=100)
    with Patched(0, shutil, "disk_usage", lambda path: usage):
      found["room"] = failure(lambda: save(2))
    for process in (0, 1):
      with Patched(process, stored_arrays.Store, "begin", full):
        found[f"begin {process}"] = failure(lambda: save(2))
    found["names"] = names(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if processes.index() == 1:
      resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    save(2)

    def check():
      while checkpoints._pending:
        checkpoints.check()

    found["writing"] = failure(check)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with Patched(0, manifest, "write", full):
      save(3)
      found["manifest"] = failure(checkpoints.wait)
    found["names after"] = names(folder)
    found["again"] = save(2)
  found["steps"] = names(folder)
  return found


def elsewhere(folder, mesh):
  """Saves while the main process does not see what process 1 writes, as on a disk of its own."""
  written = checkpointing.Checkpoints._written

  def written_and_lost(self, step, writing):
    listed = written(self, step, writing)
    shutil.rmtree(folder / f"tmp_step_{step:08d}" / "state" / "ocdbt.process_1")
    return listed

  with (
    checkpointing.open(folder) as checkpoints,
    Patched(0, checkpointing, "SEEN_S", 0.3),
    Patched(1, checkpointing.Checkpoints, "_written", written_and_lost),
  ):
    checkpoints.save(1, make_state(1, mesh), {})
    error = failure(checkpoints.wait)
  return {"error": error, "names": names(folder)}


def three(folder, mesh):
  """Saves three steps, none of which is deleted."""
  with checkpointing.open(folder, keep_last=None) as checkpoints:
    for step in (1, 2, 3):
      checkpoints.save(step, make_state(step, mesh), {"cursor": step})


def verdicts(folder, mesh):
  """Restores while one process alone finds something wrong with the newest step."""
  found = {}
  digested = []
  digest = manifest.digest
  like = make_state(0, mesh)

  def refuse_on(process):
    def refuse(state, extra):
      is_bad = processes.index() == process and extra["cursor"] == 3
      return "no reason" if is_bad else None

    return refuse

  def unreadable(self, into, like):
    raise ValueError("bits are missing") if "00003" in str(into) else KeyError("unexpected")

  def restored(**options):
    with checkpointing.open(folder) as checkpoints:
      return checkpoints.restore_latest(like, **options)[1]["cursor"]

  manifest.digest = lambda path, *rest: digested.append(path.name) or digest(path, *rest)
  found["intact"] = restored()
  manifest.digest = digest
  found["digested"] = digested
  for process in (0, 1):
    found[f"refused {process}"] = restored(refuse=refuse_on(process))
  read = stored_arrays.Store.read
  choose = lambda self, into, like: (unreadable if "00003" in str(into) else read)(self, into, like)
  with Patched(1, stored_arrays.Store, "read", choose):
    found["unreadable 1"] = restored()
  refused = {1: lambda *_: "no reason"}.get(processes.index())
  with checkpointing.open(folder) as checkpoints:
    found["none"] = failure(lambda: checkpoints.restore_latest(like, refuse=refused))
  other = {**like, "params": {**like["params"], "more": like["params"]["norm"]}}
  with checkpointing.open(folder) as checkpoints:
    found["other"] = failure(lambda: checkpoints.restore_latest(other))
  return found


def damaged(folder, mesh):
  """Restores after each file of the newest step was damaged, or removed."""
  found = {}
  newest = folder / "step_00000003"
  for path in sorted(path for path in newest.rglob("*") if path.is_file()):
    content = path.read_bytes()
    processes.exchange(None, what="the damage")
    name = str(path.relative_to(newest))
    for kind in ("flipped", "missing"):
      if processes.is_main():
        harmed = bytes([content[0] ^ 1]) + content[1:]
        path.write_bytes(harmed) if kind == "flipped" else path.unlink()
      processes.exchange(None, what="the damage")
      with checkpointing.open(folder) as checkpoints:
        _, extra = checkpoints.restore_latest(make_state(0, mesh))
        found[f"{name} {kind}"] = extra["cursor"]
    if processes.is_main():
      path.write_bytes(content)
    processes.exchange(None, what="the repair")
  return found


def kept(folder, mesh):
  """Leaves the block of a keeper by several kinds of failures."""
  found = {"notices": []}
  handler = logging.Handler()
  handler.emit = lambda record: found["notices"].append(record.getMessage())
  logging.getLogger("grpo_jax").addHandler(handler)
  me = processes.index()

  def full_on_1():
    if me == 1:
      raise OSError("the disk is full")

  def ending(step, name, work):
    state = make_state(step, mesh)
    train_state = TrainState(step=state["step"], params=state["params"], opt_state=())
    with checkpointing.open(folder / name) as checkpoints:
      run_state = keeper.RunState(train_state, {"at": step})

      def leave():
        with keeper.Keeper(checkpoints, run_state):
          work()

      error = failure(leave)
      found[name] = {"error": error, "steps": checkpoints.steps()}

  keeper.REACH_S = exchanges.AGREED_S = 2.0  # no watch runs here that would shorten them.
  ending(4, "together", lambda: processes.together(full_on_1, what="some work"))
  ending(5, "stopped", lambda: processes.together(stopped_on_1, what="some work"))

  def alone():
    processes.exchange(None, what="the time before the failure")
    full_on_1()
    if me == 0:
      # Process 1 has failed alone; this one is in the middle of something, and comes too late.
      processes.barrier("both", timeout_s=60)
      raise OSError("late")

  if me == 1:
    reach = keeper.processes.all_reach

    def reach_and_report(*arguments, **options):
      is_reached = reach(*arguments, **options)
      processes.barrier("both", timeout_s=60)
      return is_reached

    with Patched(1, keeper.processes, "all_reach", reach_and_report):
      ending(6, "alone", alone)
  else:
    ending(6, "alone", alone)
  ending(6 + me, "other steps", lambda: processes.together(full_on_1, what="some work"))
  return found


def stopped_on_1():
  from grpo_jax.interrupts import Stopped

  if processes.index() == 1:
    raise Stopped


def exports(folder, mesh):
  """Writes an export, and one whose disk is full on the main process."""
  config = tiny.config()
  put = lambda x, of: jax.make_array_from_callback(x.shape, of, lambda i: np.asarray(x)[i])
  own = tiny.params(config)
  if processes.is_main():
    (folder / "alone").mkdir()
    tensors = export.to_write(own, config)
    export.write_files(tensors, config, folder / "alone", source=None, max_shard_bytes=8000)
  params = jax.tree.map(put, own, weights_spec.shardings_of(config, mesh))
  jobs = export.jobs(params, config)
  for job in jobs:
    job()
  events = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: events.append(name) if "backend_compile" in name else None
  )
  export.to_huggingface(params, config, folder / "whole", max_shard_bytes=8000)
  compiled = len(events)
  write_file = export.safetensors.write_file
  number = []

  def full_later(file, tensors):
    number.append(file)
    return full() if len(number) == 3 else write_file(file, tensors)

  with Patched(0, export.safetensors, "write_file", full_later):
    error = failure(
      lambda: export.to_huggingface(params, config, folder / "full", max_shard_bytes=8000)
    )
  return {"error": error, "names": names(folder), "compiled": compiled, "jobs": len(jobs)}


def separate_folders(folder, mesh):
  """Checks a folder that both see, and folders of each process."""
  shared_folder.SEEN_S = 0.5
  own = folder / f"own-{processes.index()}"
  own.mkdir()
  shared = failure(lambda: shared_folder.check(folder))
  separate = failure(lambda: shared_folder.check(own))
  missing = folder if processes.index() == 0 else folder / "missing"
  absent = failure(lambda: shared_folder.check(missing))
  return {"shared": shared, "separate": separate, "absent": absent, "names": names(folder)}


PLACES = {"verdicts": "three", "damaged": "three"}  # of tests that do not begin with a new folder.
TESTS = (
  *(saves, at_url, written_by_one, full_disks, elsewhere, three, verdicts, damaged, kept, exports),
  separate_folders,
)


def main():
  address, index, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
  options = {"coordinator": address, "processes": 2, "index": index}
  options |= {"join_s": 60.0, "heartbeat_s": 30.0, "wait_s": 60.0}
  starting.start(ml_collections.ConfigDict(options))
  mesh = sharding.make_mesh(data=1, fsdp=2, tensor=2)
  found = {}
  for test in TESTS:
    place = folder / PLACES.get(test.__name__, test.__name__)
    if processes.is_main():
      place.mkdir(exist_ok=True)
    processes.exchange(None, what="the folder of the test")
    began = time.monotonic()
    found[test.__name__] = test(place, mesh)
    print(test.__name__, round(time.monotonic() - began, 2), "s", flush=True)
  (folder / f"found-{index}.json").write_text(json.dumps(found))
  starting.finish(0)


if __name__ == "__main__":
  try:
    main()
  except Exception:
    traceback.print_exc()
    os._exit(1)
