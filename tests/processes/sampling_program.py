"""A process of tests/processes/test_sampling.py: FOLDER ADDRESS COUNT INDEX.

It samples with weights on a mesh of all devices, through the stream of a run, and writes what all
processes hold to FOLDER/COUNT.INDEX.pickle.
"""

import contextlib
import pathlib
import pickle
import sys

import jax
import numpy as np
from scripted_engine import TOKENIZER

from grpo_jax import processes
from grpo_jax.data.byte_tokenizer import END
from grpo_jax.engines.base import SamplingParams
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.environments.base import SingleTurn
from grpo_jax.learn import sharding
from grpo_jax.models import lora, transformer
from grpo_jax.processes import bulk, exchanges, watchdog
from grpo_jax.rollouts import stream
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.rollouts.rollout import AttemptLimits
from grpo_jax.types import Prompt
from tests.engines import tiny

DEVICES = 4  # of all processes.
TASKS = [
  Prompt(f"set:0:{i}", TOKENIZER.encode(text), "env", {}, text)
  for i, text in enumerate(("a", "bcd", "ef", "ghijk", "l"))
]


def main(folder: pathlib.Path, address: str, count: int, index: int) -> None:
  jax.config.update("jax_num_cpu_devices", DEVICES // count)
  if count > 1:
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(address, num_processes=count, process_id=index)
  found = {"groups": sampled(), **(exchanged() if count > 1 else {})}
  (folder / f"{count}.{index}.pickle").write_bytes(pickle.dumps(found))
  if count > 1:
    processes.barrier("end", timeout_s=60)
    jax.distributed.shutdown()


def sampled():
  """Returns the groups of a step, with greedy attempts, and how the weights are split."""
  config = tiny.config(vocab_size=TOKENIZER.vocab_size)
  tree = jax.tree.map(np.asarray, tiny.params(config))
  mesh = sharding.make_mesh(data=1, fsdp=2, tensor=2)
  placed = sharding.param_shardings(transformer.logical_axes(config), mesh, shapes=tree)
  put = lambda x, at: jax.make_array_from_callback(x.shape, at, lambda part: x[part])
  params = jax.tree.map(put, tree, placed)
  with (
    LoopThread() as loop,
    JaxSampler(config, max_rows=4, prompt_tokens=8, completion_tokens=10, unmerged=True) as engine,
  ):
    engine.load_weights(params, version=2)
    of_device = bytes_of_device(engine._weights)
    earlier, params = (with_adapter(config, params, seed) for seed in (1, 0))
    for job in engine.programs(params):
      job()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
      lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    engine.load_weights(earlier, version=2)
    engine.release()
    engine.load_weights(params, version=3)
    exchanged = engine.metrics()["perf/sync_bytes"]
    late = len(compiled) if processes.count() > 1 else 0
    sample = stream.RolloutSampler(
      engine=engine,
      environments={"env": lambda prompt: SingleTurn(lambda p, text: float(len(text)), prompt)},
      tokenizer=TOKENIZER,
      group_size=3,
      sampling=SamplingParams(max_tokens=10, stop_ids=(END,)),
      seed=3,
      limits=AttemptLimits(),
      progress=lambda *_: contextlib.nullcontext(lambda count: None),
      loop=loop,
      with_greedy=True,
    )
    groups = sample(TASKS, 5)
    engine.release()
    assert engine._weights is None
  shown = [
    (
      group.prompt.prompt_id,
      [
        (r.completion_ids.tolist(), r.reward, r.finish_reason.value, r.text, r.turns)
        for r in (*group.rollouts, group.greedy)
      ],
      [r.behavior_logprobs.tolist() for r in group.rollouts],
    )
    for group in groups
  ]
  return {"groups": shown, "bytes": of_device, "exchanged": exchanged, "late": late}


def bytes_of_device(weights):
  return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(weights))


def with_adapter(config, base, seed):
  """Returns weights with an adapter, which is split as that of a run."""
  options = lora.AdapterOptions(rank=2, alpha=4.0)
  tree, mesh = lora.tree(config, options), base["embed"].sharding.mesh
  axes = jax.tree.map(lambda leaf: leaf.axes, tree)
  placed = sharding.param_shardings(axes, mesh, shapes=tree)
  draw = lambda leaf: np.random.default_rng([seed, *leaf.shape]).normal(0, 0.2, leaf.shape)
  arrays = jax.tree.map(lambda leaf: draw(leaf).astype(np.float32), tree)
  put = lambda x, at: jax.make_array_from_callback(x.shape, at, lambda part: x[part])
  return lora.join(base, jax.tree.map(put, arrays, placed), options.scale)


def exchanged():
  """Returns what exchanges of bytes ended in, and the keys that they left in the store."""
  me, count = processes.index(), processes.count()
  bulk.prepare()
  data = lambda length: np.random.default_rng([length, me]).bytes(length + me)
  outcomes = {}
  for length in (0, bulk.SMALL, 3 * bulk.PIECE):
    received = bulk.exchange_bytes(data(length), what="it")
    wanted = [np.random.default_rng([length, i]).bytes(length + i) for i in range(count)]
    outcomes[length] = [bytes(each) for each in received] == wanted
  outcomes["damaged"] = damaged(data(3 * bulk.PIECE))
  early = exchanges.EndedEarly()
  if me == 1:
    early.announce()
  processes.together(lambda: None, what="all announced")
  exchanges.LOOK_S = 0.0
  outcomes["early"] = bool(early)
  processes.together(lambda: None, what="all looked")
  early.forget()
  processes.together(lambda: None, what="it is forgotten")
  outcomes["forgotten"] = not exchanges._is_set(early._key)
  early.forget()  # also if there is nothing to forget.
  keys = [key for key, _ in watchdog.client().key_value_dir_get_bytes("grpo_jax/")]
  outcomes["keys"] = [key for key in keys if "ended_early" in key or "bulk" in key]
  if me == 0:
    outcomes["late"] = error_of(
      lambda: bulk.exchange_bytes(b"x", what="the groups of step 9", timeout_s=0.3)
    )
  return outcomes


def damaged(data):
  """Returns the error of an exchange of which a bit changes on the way to the last process."""
  piece = bulk._exchanged_piece

  def changed(own):
    found = piece(own)
    if processes.index() == processes.count() - 1:
      found[0, 5] ^= 1
    return found

  bulk._exchanged_piece = changed
  try:
    return error_of(lambda: bulk.exchange_bytes(data, what="the groups of step 4"))
  finally:
    bulk._exchanged_piece = piece


def error_of(work):
  try:
    work()
  except Exception as error:
    return f"{type(error).__name__}: {error}"
  return ""


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
