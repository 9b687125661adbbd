"""Where the config ends, which mode is imported, and what one step does not do twice."""

import ast
import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import batching, train
from grpo_jax.batching import packing
from grpo_jax.building import phases
from grpo_jax.building.run import TrainingRun
from grpo_jax.building.schedule import Schedule
from grpo_jax.groups import credit
from grpo_jax.learn import sharding
from grpo_jax.learn.policy import Composed, Composition, Policy
from grpo_jax.rl import estimators, objectives
from grpo_jax.run_folder import loggers
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup, TrainState

ROOT = pathlib.Path(__file__).parents[2]


def test_a_run_reads_the_files_of_its_model_once():
  building = ROOT / "grpo_jax" / "building"
  read = {path.name: path.read_text().count(".read_facts(") for path in building.glob("*.py")}
  assert {name: count for name, count in read.items() if count} == {
    "preparing.py": 1,
    "stored.py": 3,
  }
  for again in (".read_config(", ".read_generation("):
    assert [path.name for path in building.glob("*.py") if again in path.read_text()] == []


ONLINE_BUILD = """
import contextlib, pathlib, sys
import configs.base
from grpo_jax.building import computation, run
from grpo_jax.models import tiny

folder = pathlib.Path(sys.argv[1])
computation.Computation.jobs = lambda self: []  # nothing is compiled ahead.
config = configs.base.get_config()
config.model.path = str(tiny.write(folder / "model"))
config.data.path = str(folder / "rows.jsonl")
config.rollout.max_tokens = 96
config.sampling.max_tokens = 8
config.loss.kl_coef = 0.0
config.logging.sinks = ("jsonl", "console")
config.environments = {"math": {"module": "function", "path": "tests.rewards.vowels"}}
with contextlib.ExitStack() as stack:
  run.build(config, folder / "run", stack)
found = [name for name in sys.modules if name.split(".")[:2] == ["grpo_jax", "offline"]]
print("imported:", found, "grpo_jax.building.offline" in sys.modules)
"""


@pytest.mark.long
def test_an_online_run_imports_nothing_of_the_offline_wing(tmp_path):
  (tmp_path / "rows.jsonl").write_text('{"problem": "1 + 1", "expected_answer": "2"}\n' * 9)
  environment = {
    **os.environ,
    "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'packages'}",
    "JAX_PLATFORMS": "cpu",
  }
  done = subprocess.run(
    [sys.executable, "-c", ONLINE_BUILD, str(tmp_path)],
    env=environment,
    capture_output=True,
    text=True,
  )
  assert "imported: [] False" in done.stdout, done.stderr


def test_the_config_ends_where_the_run_is_built():
  """The loop hands the config to `build` and reads no field of it; the run does not hold it."""
  tree = ast.parse(pathlib.Path(train.__file__).read_text())
  names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "config"]
  (handed_over,) = [
    node
    for node in ast.walk(tree)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "build"
  ]
  assert len(names) == 1 and names[0] is handed_over.args[0]
  assert "config" not in {field.name for field in dataclasses.fields(TrainingRun)}


@pytest.mark.parametrize(
  ("step", "evaluates", "saves"),
  [(0, False, True), (1, False, False), (2, True, False), (3, False, True), (5, True, False)],
)
def test_schedule(step, evaluates, saves):
  schedule = Schedule(5, False, 2, True, 3, 10)
  assert (schedule.evaluates(step), schedule.saves(step)) == (evaluates, saves)


def test_a_schedule_of_zeros_evaluates_and_saves_never():
  schedule = Schedule(5, False, 0, False, 0, 10)
  assert not any(schedule.evaluates(step) or schedule.saves(step) for step in range(6))


# --- REINFORCE++: what is whitened is whitened on the host ---


def a_group(*rewards) -> RolloutGroup:
  attempt = lambda reward: Rollout(
    completion_ids=np.asarray([3, 4], np.int32),
    loss_mask=np.ones(2, bool),
    behavior_logprobs=np.full(2, -1.0, np.float32),
    weight_versions=np.zeros(2, np.int32),
    finish_reason=FinishReason.STOP,
    reward=reward,
  )
  return RolloutGroup(Prompt("p", np.ones(2, np.int32), "math"), tuple(map(attempt, rewards)))


@pytest.mark.parametrize("kl_in_reward", [False, True])
def test_a_batch_is_put_on_the_devices_once(kl_in_reward, monkeypatch):
  estimator = estimators.make(estimator="reinforce_pp")
  kl = {"kl_coef": 0.1, "kl_in_reward": True} if kl_in_reward else {"kl_coef": 0.0}
  groups = [a_group(1.0, 0.0, 0.5)]
  batch = batching.assemble(
    groups,
    credit.advantages_of(groups, estimator),
    shapes=(packing.Shape(1, 16, 16),),
    skip_zero_advantage=False,
  )
  put, arrays = sharding.put, []

  def counted(tree, mesh):
    arrays.extend(leaf for leaf in jax.tree.leaves(tree) if np.ndim(leaf))
    return put(tree, mesh)

  monkeypatch.setattr(sharding, "put", counted)
  (scored,) = phases.score(
    TrainState(jnp.int32(0), -1.0, {}),
    batch,
    scorer=lambda params, batch: params * jnp.ones(batch.loss_places.shape, jnp.float32),
    needs_old=kl_in_reward,
    needs_ref=kl_in_reward,
    policy=Policy(-1.5 if kl_in_reward else None),
    estimator=estimator,
    options=objectives.make(**kl).options,
    mesh=sharding.make_mesh(data=1, devices=jax.devices()[:1]),
    logger=loggers.SilentLogger(),
  )
  (host,) = batch.minibatches[0].microbatches
  own = [leaf for leaf in jax.tree.leaves(host) if np.ndim(leaf)]
  assert all(isinstance(leaf, np.ndarray) for leaf in arrays), "was on a device before"
  assert len(arrays) == len(own) + kl_in_reward  # then the advantages follow the logprobs.
  white = np.asarray(scored.microbatches[0].advantages)[host.loss_mask]
  assert white.mean() == pytest.approx(0, abs=1e-6) and white.std() == pytest.approx(1, abs=0.1)
  assert np.asarray(host.advantages)[host.loss_mask].std() < 0.9, "the batch itself is unchanged"


def test_old_logprobs_are_of_base_and_adapter_and_those_of_the_reference_of_the_base_alone():
  estimator, groups = estimators.make(), [a_group(1.0, 0.0)]
  batch = batching.assemble(
    groups,
    credit.advantages_of(groups, estimator),
    shapes=(packing.Shape(1, 16, 16),),
    skip_zero_advantage=False,
  )
  seen = []

  def scorer(weights, batch):
    seen.append(weights)
    return jnp.full(batch.loss_places.shape, -len(seen), jnp.float32)

  composition = Composition(*[lambda *given: given] * 4)  # nothing of it is called.
  (scored,) = phases.score(
    TrainState(jnp.int32(0), "adapter", {}),
    batch,
    scorer=scorer,
    needs_old=True,
    needs_ref=True,
    policy=Policy("base", "base", composition),
    estimator=estimator,
    options=objectives.make(kl_coef=0.1).options,
    mesh=sharding.make_mesh(data=1, devices=jax.devices()[:1]),
    logger=loggers.SilentLogger(),
  )
  assert seen == [Composed("adapter", "base", composition), "base"]
  (one,) = scored.microbatches
  assert np.all(one.old_logprobs == -1) and np.all(one.ref_logprobs == -2)
