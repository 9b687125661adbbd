"""Analyses one update: seconds, share of the machine's ceiling, time by kind of operation.

  PYTHONPATH=.:kernels:packages python scripts/benchmark/profile_update.py --model DIR --workload w1

The update is that of `ours-all` in compare.py (every completion computed), on a batch with the
lengths of the workload and random tokens; nothing is sampled. Compiled programs are cached, so that
the second call takes less than a minute. CPU only: traces of other backends have another form.
"""

import argparse
import pathlib
import resource
import sys
import tempfile
import time
from typing import Any

import ceiling
import jax
import numpy as np
import ours
import summary
import trace_kinds
import workload as workloads

from grpo_jax import batching
from grpo_jax.batching import packing
from grpo_jax.building import computation, policy_model
from grpo_jax.commands import cli
from grpo_jax.compilation import programs
from grpo_jax.config import batching_options, run_options
from grpo_jax.config.configuration import typed
from grpo_jax.learn import operations, sharding, train_step
from grpo_jax.learn.policy import Policy
from grpo_jax.models import loading, sources
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.options import REMATS
from grpo_jax.types import FinishReason, Minibatch, Prompt, Rollout, RolloutGroup, TrainState

PROMPT_TOKENS = 38  # length of nearly all of the benchmark's prompts.
AT_LIMIT = 0.6  # share of completions that are cut at the limit; the others have any length.


def parse() -> argparse.Namespace:
  """Reads the command line."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--model", type=pathlib.Path, required=True, help="Hugging Face folder")
  parser.add_argument("--workload", choices=sorted(workloads.PRESETS), default="w1")
  parser.add_argument("--shape", help="ROWS,ROW_TOKENS,LOSS_TOKENS of microbatches")
  parser.add_argument("--repeats", type=int, default=3, help="updates that are timed")
  parser.add_argument("--override", action="append", default=[], metavar="SECTION.FIELD=VALUE")
  parser.add_argument("--largest", type=int, default=0, help="number of operations to list singly")
  return parser.parse_args()


def groups_of(workload: workloads.Workload, vocabulary: int) -> list[RolloutGroup]:
  """Returns groups with lengths like those of the workload, and random tokens and rewards."""
  rng = np.random.default_rng(0)

  def rollout() -> Rollout:
    is_cut = rng.random() < AT_LIMIT
    length = workload.completion if is_cut else int(rng.integers(1, workload.completion + 1))
    return Rollout(
      rng.integers(0, vocabulary, length).astype(np.int32),
      np.ones(length, bool),
      -3 * rng.random(length).astype(np.float32),
      np.zeros(length, np.int32),
      FinishReason.LENGTH if is_cut else FinishReason.STOP,
      float(rng.random()),
    )

  def group(number: int) -> RolloutGroup:
    ids = rng.integers(0, vocabulary, PROMPT_TOKENS).astype(np.int32)
    prompt = Prompt(str(number), ids, "benchmark")
    return RolloutGroup(prompt, tuple(rollout() for _ in range(workload.group)))

  return [group(number) for number in range(workload.prompts)]


def make_update(
  config: Any, folder: pathlib.Path, sizes: ModelConfig
) -> tuple[train_step.Update, TrainState, Policy]:
  """Makes the update as a run does on one device, the state before its first step, the policy."""
  objective = run_options.objective(typed(config))
  mesh = sharding.make_mesh(data=1, devices=jax.devices()[:1])
  made = computation.make(typed(config), sizes, mesh, objective)
  trainable, policy = made.begin(policy_model.load(loading.read_facts(folder), made.read).params)
  state = train_step.init(trainable, made.tx, shardings=made.trainable_shardings)
  return made.update, state, policy


def once(
  update: train_step.Update, state: TrainState, policy: Policy, minibatch: Minibatch
) -> tuple[TrainState, float, float]:
  """Runs one optimizer step; returns the state, and the seconds of gradients and optimizer."""
  begin = time.perf_counter()
  (grads, loss), _, _ = update.gradients(policy.weights(state.params), minibatch)
  jax.block_until_ready(grads)
  between = time.perf_counter()
  params, opt_state, _ = update.apply(state.params, state.opt_state, grads, loss)
  del grads
  jax.block_until_ready(params)
  state = TrainState(state.step + 1, params, opt_state)
  return state, between - begin, time.perf_counter() - between


def describe(model: Any) -> dict[str, Any]:
  """Returns the sizes that `summary.useful_work` reads, with the names of a config.json."""
  return {
    "hidden_size": model.hidden_size,
    "num_attention_heads": model.num_heads,
    "num_key_value_heads": model.num_kv_heads,
    "head_dim": model.head_dim,
    "num_hidden_layers": model.num_layers,
    "intermediate_size": model.intermediate_size,
    "vocab_size": model.vocab_size,
  }


def main() -> None:
  """Profiles one update and prints the result."""
  options = parse()
  preset: dict[str, Any] = dict(workloads.PRESETS[options.workload])
  workload = workloads.Workload(
    model=str(options.model),
    problems="none.jsonl",
    overrides=("batching.skip_zero_advantage=False", *options.override),
    **preset,
  )
  config: Any = ours.make_config(workload)
  if jax.config.values["jax_compilation_cache_dir"] is None:
    jax.config.update("jax_compilation_cache_dir", str(sources.default_cache() / "xla"))
  # The parts of the update are recognised by names, which would otherwise be those of the run that
  # compiled the program.
  jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
  sizes = loading.read_config(options.model)
  groups = groups_of(workload, sizes.vocab_size)
  cost = operations.update_cost(sizes, remat=config.model.remat or REMATS[0])
  shapes = batching_options.plan(typed(config), cost=cost, replicas=1)
  if options.shape:
    shapes = (packing.Shape(*map(int, options.shape.split(","))),)
  advantages = [group.rewards - group.rewards.mean() for group in groups]
  assembled = batching.assemble(
    groups, advantages, shapes=shapes, cost=cost, skip_zero_advantage=False
  )
  minibatch = jax.device_put(assembled.minibatches[0])
  update, state, policy = make_update(config, options.model, sizes)

  tokens = sum(len(r.completion_ids) for group in groups for r in group.rollouts)
  step = {"prompt_tokens": PROMPT_TOKENS * len(groups), "completion_tokens": tokens}
  run = {"workload": {"prompts": workload.prompts, "group": workload.group}}
  useful = summary.useful_work(step, run, describe(sizes)).update
  for batch in minibatch.microbatches:
    print(f"microbatch {batch.tokens.shape}, learned from: {batch.loss_places.shape}")
  first = minibatch.microbatches[0]
  weights = policy.weights(state.params)
  sums = programs.abstract(update.start(state.params))
  lowered = update.differentiate.lower(weights, sums, first, minibatch.denominators)
  compiled = lowered.compile()
  temporaries = compiled.memory_analysis().temp_size_in_bytes
  print(f"{tokens} completion tokens, {useful:.0f} GFLOP of useful work")
  print(f"temporaries of the gradients: {temporaries / 2**20:.0f} MiB")

  state, *_ = once(update, state, policy, minibatch)
  best = max(ceiling.measure(2048)[name] for name in ("numpy_float32", "jax_float32"))
  for _ in range(options.repeats):
    cpu, faults = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    state, gradients_s, optimizer_s = once(update, state, policy, minibatch)
    cpu = time.process_time() - cpu
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    rate = useful / (gradients_s + optimizer_s)
    print(
      f"gradients {gradients_s:.2f} s, optimizer {optimizer_s:.2f} s: {rate:.0f} GFLOP/s,"
      f" {rate / best:.0%} of {best:.0f}; CPU time {cpu:.1f} s, {faults / 1000:.0f}k pages touched"
    )

  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      once(update, state, policy, minibatch)
    by_operation, nothing = trace_kinds.seconds(trace_kinds.load(folder, "cpu"))
  program = trace_kinds.read(compiled.as_text())
  print("\n".join(trace_kinds.table(program, by_operation, nothing)))
  largest = sorted(by_operation.items(), key=lambda item: -item[1])[: options.largest]
  for name, took in largest:
    print(f"{1000 * took:6.0f} ms  {name}  {program.definitions.get(name, '')[:160]}")


if __name__ == "__main__":
  sys.exit(cli.reported(lambda _: main(), []))
