"""A plan of a run that adapts the experts of a mixture: operations, and memory of the sampler."""

import math

import pytest

from grpo_jax.building import arrays_in_memory, memory_choices
from grpo_jax.learn import update_memory
from grpo_jax.models import leaves, tiny
from grpo_plan import plan_request, topologies, workload

LENGTHS = workload.Lengths(64, 128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tiny.write(tmp_path_factory.mktemp("models") / "mixture", family="qwen3_moe")


def run_with(folder, scratch, targets):
  options = [
    "--config=configs/math_1b.py",
    "--config.rollout.prompts_per_step=4",
    "--config.model.lora.rank=8",
    f"--config.model.lora.targets={targets}",
  ]
  config = plan_request.config_of(options)
  sizes, _ = plan_request.model_of(config, str(folder), scratch)
  return plan_request.run_of(config, sizes, topologies.parse("cpu:1"), scratch)


@pytest.fixture(scope="module")
def adapted(folder, tmp_path_factory):
  """A run with adapters of experts and attention, and one with those of attention."""
  scratch = tmp_path_factory.mktemp("scratch")
  targets = "('all',)", "('q','k','v','o')"
  return tuple(run_with(folder, scratch, each) for each in targets)


def sizes_of(model, names):
  of_layer = leaves.layer(model)
  return {name: of_layer[name].shape for name in names}


@pytest.mark.long
def test_experts_have_gradients_and_are_merged_in_every_microbatch(adapted):
  run, plain = adapted
  model, mixture = run.model, run.model.mixture
  used = leaves.used_by_token(model)
  experts = sizes_of(model, leaves.EXPERTS).values()
  of_token = mixture.experts_per_token * sum(math.prod(shape[1:]) for shape in experts)
  attention = sum(8 * sum(shape) for shape in sizes_of(model, "qkvo").values())
  place = lambda weights: 2 * model.num_layers * weights
  assert run.config.model.remat == "full"
  assert workload.update_cost(plain).place == pytest.approx(place(3 * used + 4 * attention))
  assert workload.update_cost(run).place == pytest.approx(
    place(3 * used + of_token + 4 * attention)
  )
  each = place(8 * sum(math.prod(shape) for shape in experts))
  assert (workload.merging(run), workload.merging(plain)) == (each, 0)
  rows = workload.operations(run, LENGTHS, workload.update_cost(run))
  (update,) = [x for x in workload.of_step(run, LENGTHS, hosts=1) if x.phase == "update"]
  assert update.operations == pytest.approx(rows + update.calls * 4 * each)


@pytest.mark.long
def test_the_samplers_merged_experts_are_freed_and_its_base_is_not(adapted):
  for run, names in zip(adapted, (leaves.EXPERTS, ()), strict=True):
    model = run.model
    merged = 2 * math.prod(sizes_of(model, leaves.EXPERTS)["expert_gate"]) * 3  # in bfloat16.
    of_kind = {"kernel": 2, "experts": 0 if names else 2}  # bytes; 4: norms, routers.
    of_layer = leaves.layer(model).values()
    kept = sum(of_kind.get(leaf.kind, 4) * math.prod(leaf.shape) for leaf in of_layer)
    assert run.arrays.kept == model.num_layers * kept
    adapters = 2 * sum(8 * sum(shape) for shape in sizes_of(model, "qkvo").values())
    of_adapter = model.num_layers * (adapters + (merged if names else 0))
    assert run.arrays.sampler - run.arrays.kept == of_adapter
    held = arrays_in_memory.held_by(run.made)
    found = memory_choices._with_sampler(run.config, run.made.full, run.made.mesh, held)
    assert found.sampler - found.kept == of_adapter
    assert found.kept == pytest.approx(run.arrays.kept, rel=0.2)  # norms and routers are larger.


def test_an_update_has_room_for_merged_experts_in_float32(adapted):
  replica, plain = (memory_choices._replica(run.made) for run in adapted)
  experts = sum(math.prod(x) for x in sizes_of(adapted[0].model, leaves.EXPERTS).values())
  of = lambda each: update_memory.of_update(each, "none").layer
  of_rows = (replica.kept_of_layer - plain.kept_of_layer) // 2
  assert of(replica) - of(plain) == 4 * experts + of_rows
