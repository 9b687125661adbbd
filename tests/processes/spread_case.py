"""What a run computes on the devices of one or several processes.

python spread_case.py MODEL RESULT ADDRESS PROCESSES INDEX CASE...   is one process of several; the
each writes what it computed to RESULT.INDEX.npz, and checks that no program of all processes is
compiled after the first step has begun and that JAX compares no arrays of the processes.
"""

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from ml_collections import ConfigDict

import configs.base
from grpo_jax import batching, metrics
from grpo_jax.batching import packing
from grpo_jax.building import computation, distillation_teacher, phases, policy_model
from grpo_jax.config import run_options
from grpo_jax.config.configuration import typed
from grpo_jax.learn import monitoring, policy, sharding, train_step
from grpo_jax.learn.group_scoring import GroupScorer
from grpo_jax.models import loading, parameter_reading
from grpo_jax.processes import arrays, starting
from grpo_jax.run_folder import loggers
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup

SHAPE = packing.Shape(8, 64, 64)


@dataclasses.dataclass(frozen=True)
class Case:
  """A mesh ("data", "fsdp", "tensor"), settings of a config, and what else there is."""

  sizes: tuple[int, int, int]
  settings: Mapping[str, Any]
  is_taught: bool = False
  context: int = 1  # devices over which the places of a row are divided.


BASE = {
  "total_steps": 10,
  "model.compute_dtype": "float32",
  "batching.row_tokens": 64,
  "rollout.prompts_per_step": 4,
  "rollout.group_size": 4,
  "sampling.max_tokens": 24,
  "data.max_prompt_tokens": 16,
  "optim.learning_rate": 1e-2,
  "optim.max_grad_norm": 0.5,
  "optim.warmup_steps": 0,
  "learn.report_all_every_steps": 0,
  "learn.report_kl_every_steps": 0,
}

# Adam would make much of entries whose gradient is rounding.
SGD = {"optim.optimizer": "sgd", "optim.learning_rate": 0.1, "optim.weight_decay": 0.0}

LORA = {"model.lora.rank": 2, "model.lora.alpha": 4.0, "model.lora.base_dtype": "float32"}

CASES = {
  # Two minibatches, so old logprobs; a reference; an entropy bonus; everything is monitored.
  "minibatches": Case(
    (1, 2, 2),
    {
      "loss.kl_coef": 0.1,
      "loss.entropy_coef": 0.05,
      "learn.minibatches": 2,
      "learn.report_all_every_steps": 1,
      "learn.report_kl_every_steps": 1,
    },
  ),
  # Completions are left out by their errors; advantages are whitened last, less the KL.
  "whitened": Case(
    (2, 1, 2),
    {
      "advantages.estimator": "reinforce_pp",
      "loss.kl_coef": 0.1,
      "loss.kl_in_reward": True,
      "loss.seq_logprob_error_threshold": 1.6,
    },
  ),
  # An adapter of all kernels on a frozen base, under the distribution that top-k leaves.
  "adapter": Case(
    (1, 2, 2),
    {
      **LORA,
      "loss.kl_coef": 0.1,
      "learn.report_kl_every_steps": 1,
      "sampling.logprobs": "truncated",
      "sampling.top_k": 40,
    },
  ),
  # Tokens are chosen among all of the step, also at random; the reference follows the policy.
  "chosen": Case(
    (2, 2, 1),
    {**SGD, "loss.loss": "clip_cov", "loss.kl_coef": 0.1, "reference.update_every_steps": 1},
  ),
  # One sweep over the head, with a teacher in the trainer.
  "taught": Case(
    (1, 4, 1), {**SGD, "loss.kl_coef": 0.0, "teacher.reward_coef": 1.0}, is_taught=True
  ),
  # An adapter on rows that are divided over the processes, with one ratio for each completion.
  "divided": Case(
    (1, 1, 2),
    {
      **SGD,
      **LORA,
      "optim.learning_rate": 10.0,  # gradients of B are small.
      "loss.loss": "gspo",
      "loss.kl_coef": 0.1,
      "learn.minibatches": 2,
      "learn.report_all_every_steps": 1,
    },
    context=2,
  ),
  # A part of each row in each of four processes, and one sweep over the head.
  "parts": Case((1, 1, 1), {**SGD, "loss.kl_coef": 0.0}, context=4),
  "replicas": Case((4, 1, 1), {**SGD, "loss.kl_coef": 0.1, "learn.epochs": 2}),
}


def groups() -> list[RolloutGroup]:
  """Returns groups of unequal sizes and lengths; most of a group fits in a row."""
  rng = np.random.default_rng(0)
  shapes = [(5, (7, 3, 11, 2)), (9, (4, 6, 9)), (2, (8, 8)), (6, (2, 9, 5, 24))]

  def rollout(length: int) -> Rollout:
    return Rollout(
      completion_ids=rng.integers(0, 256, length),
      loss_mask=np.ones(length, bool),
      behavior_logprobs=(-5.5 - rng.random(length)).astype(np.float32),
      weight_versions=np.zeros(length, np.int32),
      finish_reason=FinishReason.STOP,
      reward=float(rng.random()),
    )

  return [
    RolloutGroup(Prompt(f"p{i}", rng.integers(0, 256, size), "none"), tuple(map(rollout, lengths)))
    for i, (size, lengths) in enumerate(shapes)
  ]


def measured(
  case: Case,
  model: pathlib.Path,
  devices: Sequence[Any],
  *,
  ahead: bool = False,
  shape: packing.Shape = SHAPE,
) -> dict[str, np.ndarray]:
  """Returns everything that two training steps compute, as whole arrays.

  Args:
    case: Mesh and settings.
    model: Folder of a tiny model.
    devices: Devices of all processes.
    ahead: Whether all programs are compiled before the first step, and none later.
    shape: Shape of the microbatches.
  """
  edited = configs.base.get_config()
  path = str(model)
  taught = {"teacher.path": path} if case.is_taught else {}
  edited.update_from_flattened_dict({**BASE, "model.path": path, **case.settings, **taught})
  config = typed(edited)
  sizes = dict(zip(sharding.AXES, case.sizes, strict=True))
  mesh = sharding.make_mesh(**sizes, context=case.context, devices=devices)
  of_teacher = distillation_teacher.find(config, model, mesh)
  made = dataclasses.replace(
    computation.make(
      config,
      loading.read_config(model),
      mesh,
      run_options.objective(config),
      teacher=of_teacher and of_teacher.config,
    ),
    shapes=(shape,),
  )
  if ahead:
    for job in made.jobs():
      if not job.name.startswith("tensor of the export"):
        job()
    for compiling in arrays.gathers(made.full).values():  # of the weights that are compared.
      compiling()
  with none_compiled() if ahead else contextlib.nullcontext():
    return trained(made, of_teacher, model)


def trained(made: computation.Computation, of_teacher: Any, model: pathlib.Path) -> dict[str, Any]:
  """Takes two training steps with the programs of a run; returns what they compute."""
  read = lambda: policy_model.load(loading.read_facts(model), made.read).params
  with counting_values() as sizes:
    initial = read()
  trainable, owner = made.begin(initial)
  shardings = policy.shardings_of(made.state.params)
  state = train_step.init(trainable, made.tx, shardings=shardings, initializer=made.initialize)
  if made.follow is not None:
    state = dataclasses.replace(state, reference=made.copy(state.params))
  learning = made.config.learn
  scorer = GroupScorer(made.score, made.mesh, 4, made.shapes, made.cost)
  monitor = monitoring.Monitor(
    *(made.watch, made.drift, made.mismatch, scorer, read),
    frees_initial=True,
    all_every_steps=learning.report_all_every_steps,
    kl_every_steps=learning.report_kl_every_steps,
    total_steps=10,
    warn=print,
  )
  learn = phases.ReferenceUpdate(1, made.follow) if made.follow is not None else None
  found: dict[str, Any] = {"values read": sum(sizes)}
  for step in range(2):
    rewarded, logger = groups(), loggers.SilentLogger()
    advantages = [group.rewards - group.rewards.mean() for group in rewarded]
    batch = batching.assemble(
      rewarded,
      [each.astype(np.float32) for each in advantages],
      shapes=made.shapes,
      cost=made.cost,
      minibatches=made.config.learn.minibatches,
      share_prefixes=made.config.batching.share_prefixes,
      pack=made.config.batching.pack,
      skip_zero_advantage=False,
      parts=sharding.row_parts(made.mesh),
    )
    minibatches = phases.score(
      *(state, batch),
      scorer=made.score,
      old_scorer=made.score_old,
      needs_old=made.needs_old,
      needs_ref=made.objective.needs_ref,
      policy=owner,
      estimator=made.estimator,
      options=made.objective.options,
      mesh=made.mesh,
      logger=logger,
      teacher=distillation_teacher.in_trainer(of_teacher, made.teacher),
    )
    watched = monitor(step, owner.weights(state.params), rewarded)
    state, learned, logprobs = phases.learn(
      *(state, minibatches, lambda: None),
      update=made.update,
      policy=owner,
      logger=logger,
      reference=learn,
      measure=made.measure,
    )
    values = {**watched, **metrics.to_floats(learned)}
    per_rollout = batching.per_rollout(batch, arrays.fetch(logprobs), rewarded)
    found |= {f"{step}/metric/{name}": value for name, value in values.items()}
    found[f"{step}/logprobs"] = np.concatenate([x for of in per_rollout for x in of])
  weights = arrays.fetch(owner.full(state.params))
  for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
    found[f"weights/{jax.tree_util.keystr(path)}"] = leaf
  return {name: np.asarray(value) for name, value in found.items()}


@contextlib.contextmanager
def none_compiled() -> Iterator[None]:
  """Raises AssertionError if programs of all processes are compiled within the block."""
  compiled: list[str] = []
  real = compiler.compile_or_get_cached

  def watched(backend: Any, module: Any, devices: np.ndarray, *args: Any, **named: Any) -> Any:
    if len({device.process_index for device in devices.flat}) > 1:
      compiled.append(str(module.operation.attributes["sym_name"]))
    return real(backend, module, devices, *args, **named)

  compiler.compile_or_get_cached = watched
  try:
    yield
  finally:
    compiler.compile_or_get_cached = real
  assert not compiled, f"compiled late: {compiled}"


@contextlib.contextmanager
def counting_values() -> Iterator[list[int]]:
  """Yields the sizes of the parts of matrices that this process reads within the block."""
  sizes, real = [], parameter_reading._read_part

  def watched(*arguments: Any) -> np.ndarray:
    part = real(*arguments)
    sizes.append(part.size if part.ndim > 2 or part.size > 1000 else 0)
    return part

  parameter_reading._read_part = watched
  try:
    yield sizes
  finally:
    parameter_reading._read_part = real


def _compare_nothing(*_: Any, **__: Any) -> None:
  raise AssertionError("JAX compares an array of all processes by a hidden all-gather")


def main(model: str, result: str, address: str, processes: str, index: str, *names: str) -> None:
  """Joins the others, computes the cases, and writes the result."""
  from jax.experimental import multihost_utils

  multihost_utils.assert_equal = _compare_nothing
  options = ConfigDict(
    dict(
      coordinator=address,
      processes=int(processes),
      index=int(index),
      join_s=60,
      heartbeat_s=60,
      wait_s=120,
    )
  )
  starting.start(options)
  found: dict[str, Any] = {}
  for name in names:
    part = measured(CASES[name], pathlib.Path(model), jax.devices(), ahead=True)
    found |= {f"{name}/{key}": value for key, value in part.items()}
    print("done", name, flush=True)
  np.savez(f"{result}.{index}.npz", **found)
  starting.finish(0)


if __name__ == "__main__":
  jax.config.update("jax_numpy_rank_promotion", "raise")
  jax.config.update("jax_default_matmul_precision", "highest")
  main(*sys.argv[1:])
