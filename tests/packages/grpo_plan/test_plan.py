"""Plans of a tiny model on simulated devices: accounting, verdict, advice, the command."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels import implementations
from grpo_kernels.implementations import Chip
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.commands import cli
from grpo_jax.config import configuration
from grpo_jax.config.configuration import ConfigError
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_plan import (
  advice,
  compiling,
  hlo_collectives,
  plan,
  plan_request,
  programs,
  report,
  roofline,
  topologies,
  workload,
)
from grpo_plan.chips import CHIPS
from grpo_plan.compiling import Compiled, Moved
from grpo_plan.workload import PhaseWork

GIB = 2**30
CONFIG = ["--config=configs/math_1b.py"]


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
  """A run of a tiny model on eight simulated devices, without compiling."""
  return make(model, tmp_path_factory.mktemp("scratch"), "--config.rollout.prompts_per_step=4")


def make(model, scratch, *overrides, machine="cpu:8"):
  config = plan_request.config_of([*CONFIG, *overrides])
  sizes, _ = plan_request.model_of(config, str(model), scratch)
  return plan_request.run_of(config, sizes, topologies.parse(machine), scratch)


def planned(run, *, room=100 * GIB, own=GIB, refused=(), searches=False, all_shapes=False):
  """Returns a plan whose compiler is a stand-in: every program takes `own` bytes."""
  chip = dataclasses.replace(CHIPS["v5e"], usable=room)
  topology = topologies.Topology("v5e-8", chip, 8)

  def compile_job(job):
    is_refused = programs.program_of(job.name) in refused
    return Compiled(job.name, temporaries=own, is_refused=is_refused)

  assumed = workload.lengths(run.config)
  return plan.make(
    run, topology, compile_job, assumed=assumed, searches=searches, all_shapes=all_shapes
  )


def test_rows_over_several_devices_are_described(model, tmp_path, run):
  sizes = "--config.mesh.fsdp=4", "--config.mesh.context=2"
  divided = planned(make(model, tmp_path, "--config.mesh.data=1", *sizes))
  assert (divided.replicas, divided.parts) == (4, 2)
  assert "on each of 4 replicas of 2 devices;" in report.text(divided, source="here")
  whole = planned(run)
  assert whole.run.mesh.shape["fsdp"] == 8 and whole.parts == 1
  assert divided.run.arrays.always == whole.run.arrays.always  # weights are split by both axes.
  most = max(shape.places for shape in divided.run.made.shapes)
  limit = divided.run.config.batching.microbatch_tokens  # of a device.
  assert 8 * limit // 2 < most <= 8 * limit


def test_traffic_of_a_program_is_that_of_its_collectives():
  """Two all-gathers over "fsdp" in a loop of five, one all-reduce over "data"."""
  mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4, 1), ("data", "fsdp", "tensor"))

  @jax.jit
  @jax.shard_map(mesh=mesh, in_specs=PartitionSpec("fsdp"), out_specs=PartitionSpec())
  def program(x):
    def step(carry, _):
      return carry + jnp.sum(jax.lax.all_gather(jnp.sin(carry) * x, "fsdp")), None

    carry = jax.lax.pcast(jnp.zeros((), jnp.float32), ("fsdp",), to="varying")
    total, _ = jax.lax.scan(step, carry, None, length=5)
    return jax.lax.psum(jax.lax.pmean(total, "fsdp"), ())

  x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
  text = program.lower(x).compile().as_text()
  assert text is not None
  gathers = [each for each in compiling.moved(text, mesh) if each.kind == "all-gather"]
  assert [(each.axes, each.far) for each in gathers] == [("fsdp", 0)]
  assert gathers[0].bytes == 5 * 4 * 64 * 3 / 4
  halves = compiling.moved(text, mesh, place=lambda device: device.id % 2)
  found = next(each for each in halves if each.kind == "all-gather")
  # Of the three others' parts, the two of the other node arrive once for two devices.
  assert found.far == pytest.approx(found.bytes / 3)


def test_collectives_repeated_in_fusions_count_once():
  text = """
%start (p: f32[2]) -> f32[8] {
  ROOT %g = f32[8]{0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
}

%done (p: f32[2]) -> f32[8] {
  ROOT %g = f32[8]{0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (p: f32[2]) -> f32[8] {
  %a = f32[8]{0} fusion(%p), kind=kCustom, calls=%start
  %b = f32[8]{0} fusion(%p), kind=kCustom, calls=%done
  %c = f32[2]{0} reduce-scatter(%b), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %d = f32[2]{0} reduce-scatter(%b), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
}
"""
  kinds = [one.kind for one in hlo_collectives.collectives(text, devices=4)]
  assert kinds == ["all-gather", "reduce-scatter", "reduce-scatter"]


def test_largest_arrays_are_those_in_memory():
  text = """
ENTRY %main (p: f32[512]) -> f32[8] {
  %p = f32[512]{0} parameter(0)
  %fast = f32[256]{0:T(256)S(1)} fusion(%p), kind=kLoop, calls=%f
  %big = (f32[128]{0}, bf16[8]{0}) fusion(%p), kind=kLoop, calls=%f, metadata={op_name="a/dot"}
  %same = f32[128]{0} get-tuple-element(%big), index=0
  ROOT %d = f32[8]{0} negate(%same)
}
"""
  found = hlo_collectives.largest(text)
  assert [(held.array.shape, held.source) for held in found[:2]] == [
    ((128,), "a/dot"),
    ((8,), "negate"),
  ]


def test_operands_of_what_runs_beside_other_work_are_not_made():
  text = """
ENTRY %main (p: bf16[28,64]) -> f32[8] {
  %p = bf16[28,64]{1,0} parameter(0)
  %i = s32[] constant(1)
  %f-start = ((bf16[28,64]{1,0}, s32[]), bf16[1,64]{1,0}, u32[]) fusion-start(%p, %i), kind=kLoop, calls=%f, metadata={op_name="a/dynamic_slice"}
  %f-done = bf16[1,64]{1,0} fusion-done(%f-start)
  %g-start = (bf16[28,64]{1,0}, bf16[28,16]{1,0}) all-gather-start(%p), dimensions={1}
  %g-done = bf16[28,16]{1,0} all-gather-done(%g-start)
  ROOT %d = f32[8]{0} negate(%f-done)
}
"""  # noqa: E501
  found = {held.array.shape: held.source for held in hlo_collectives.largest(text)}
  assert found == {(28, 16): "all-gather", (1, 64): "a/dynamic_slice", (8,): "negate"} | (
    {(): "constant"}
  )


def test_every_program_of_the_run_is_planned(run):
  needs = planned(run).needs
  expected = {"reading prompts", "sampling", "score", "update", "optimizer", "watch"}
  assert {need.program for need in needs} == expected
  update = next(need for need in needs if need.program == "update")
  kept = run.arrays.caches  # as on CPUs.
  assert update.peak == run.arrays.always + run.arrays.sums + kept + GIB


def test_all_shapes_are_compiled_if_asked_for(run):
  names = lambda plan_: [need.compiled.name for need in plan_.needs]
  few, all_ = names(planned(run)), names(planned(run, all_shapes=True))
  expected = {job.name for job in run.jobs if programs.program_of(job.name)}
  assert all_[: len(few)] == few and {*all_} == expected and len(all_) == len(expected) > len(few)


def test_verdict_and_the_exit_of_the_worst_program(run):
  assert planned(run, room=4 * GIB).fits
  plan_ = planned(run, room=GIB)
  assert not plan_.fits
  assert "DOES NOT FIT v5e-8" in report.text(plan_, source="a test")
  refused = planned(run, refused={"update"})
  assert not refused.fits and refused.worst.program == "update"


def test_remedies_follow_from_what_takes_the_memory(run, model, tmp_path):
  assert advice.remedies(planned(run)) == []
  changes = lambda plan_: [each.change for each in advice.remedies(plan_)]
  split = changes(planned(run, room=GIB))
  assert "loss.kl_coef=0" in split and not any("mesh.data=1" in each for each in split)
  copied = make(model, tmp_path, "--config.mesh.data=8", "--config.mesh.fsdp=1",
                "--config.rollout.prompts_per_step=4",
                "--config.loss.kl_coef=0")  # fmt: skip
  found = changes(planned(copied, room=GIB))
  assert "mesh.data=1 mesh.fsdp=8" in found and "loss.kl_coef=0" not in found
  config = configuration.replaced(run.config, {"model.remat": "dots"})
  lowered = dataclasses.replace(run, config=config)
  assert "model.remat=full" in changes(planned(lowered, room=GIB, refused={"update"}))


LORA = ("--config.rollout.prompts_per_step=4", "--config.model.lora.rank=32")


@pytest.fixture(scope="module")
def lora_run(model, tmp_path_factory):
  """The run of `run` with an adapter on a base in bfloat16."""
  return make(model, tmp_path_factory.mktemp("scratch"), *LORA)


@pytest.fixture(scope="module")
def int8_run(model, tmp_path_factory):
  """The run of `lora_run` with a quantised base."""
  options = [*LORA, "--config.model.lora.base_dtype=int8"]
  return make(model, tmp_path_factory.mktemp("scratch"), *options)


@pytest.mark.parametrize("worst", ["update", "sampling"])
def test_an_adapter_saves_what_its_own_plan_says(run, lora_run, worst):
  found = {each.change: each for each in advice.remedies(planned(run, refused={worst}))}
  before, after = run.arrays, lora_run.arrays
  # The head in bfloat16 is the base's own and not a copy; the sampler's adapter is not counted.
  head = before.sampler - after.kept
  assert 0 <= head <= 2 * run.model.vocab_size * run.model.hidden_size
  uncounted = after.sampler - after.kept if worst == "sampling" else 0
  expected = before.beside(worst) - after.beside(worst) - head + uncounted
  assert found["model.lora.rank=32"].saved == pytest.approx(expected, abs=256)  # and counters.
  follows = configuration.replaced(run.config, {"reference.update_every_steps": 5})
  moving = planned(dataclasses.replace(run, config=follows), refused={worst})
  assert "model.lora.rank=32" not in {each.change for each in advice.remedies(moving)}


@pytest.mark.parametrize("worst", ["update", "sampling"])
def test_a_frozen_base_has_remedies_of_its_own(lora_run, int8_run, worst):
  plan_ = planned(lora_run, refused={worst})
  found = {each.change: each for each in advice.remedies(plan_)}
  assert not {"model.lora.rank=32", "loss.kl_coef=0"} & found.keys()
  smaller = found["model.lora.base_dtype=int8"]
  less = lora_run.arrays.beside(worst) - int8_run.arrays.beside(worst)
  assert smaller.saved == pytest.approx(less, rel=0.02)
  assert "model.lora.base_dtype=nf4" not in found, "eight devices would split its blocks"
  sampler, kept = lora_run.arrays.sampling, lora_run.arrays.kept
  assert found["engine.name=sglang"].saved == (kept if worst == "update" else sampler)
  (line,) = (x for x in report.text(plan_, source="a test").splitlines() if "=int8" in x)
  assert "more temporaries" in line and "enough by itself" not in line
  on_each = Mesh(lora_run.mesh.devices.reshape(8, 1, 1), lora_run.mesh.axis_names)
  changes = lambda run: {
    each.change.partition("base_dtype=")[2]: each.saved
    for each in advice.remedies(planned(dataclasses.replace(run, mesh=on_each), refused={worst}))
    if "base_dtype" in each.change
  }
  whole = changes(lora_run)
  assert {*whole} == {"int8", "nf4"} and whole["nf4"] > whole["int8"]
  assert {*changes(int8_run)} == {"nf4"}


def test_a_copy_of_the_base_that_stays_is_named(run, lora_run):
  lines = report.text(planned(lora_run), source="a test").splitlines()
  size = lambda name: [x.split()[-1] for x in lines if x.strip().startswith(f"sampler: {name}")]
  arrays = lora_run.arrays
  assert size("copy of the base, always") == [f"{arrays.kept / GIB:.2f}"]
  assert size("adapter, while") == [f"{(arrays.sampler - arrays.kept) / GIB:.2f}"]
  assert not size("weights")
  assert "copy of the base" not in report.text(planned(run), source="a test")


def test_whole_copies_on_each_device_of_a_host_are_named(run):
  devices = np.asarray(run.mesh.devices.flat[:4])
  on = lambda shape: Mesh(devices.reshape(shape), run.mesh.axis_names)
  whole = dataclasses.replace(run, sampler_mesh=on((4, 1, 1)))
  split = dataclasses.replace(run, sampler_mesh=on((1, 4, 1)))
  plans = [planned(each, room=GIB, refused={"sampling"}) for each in (whole, split)]
  texts = [report.text(each, source="a test") for each in plans]
  assert ["a whole copy" in text for text in texts] == [True, False]
  assert ["mesh.fsdp=4 mesh.tensor=2" in text for text in texts] == [True, False]


@pytest.mark.parametrize(
  ("kind", "groups", "nodes", "share"),
  [
    ("all-gather", "{{0,1,2,3,4,5,6,7}}", 1, 0),
    ("all-gather", "{{0,1,2,3,4,5,6,7}}", 2, 1 / 7),
    ("all-gather", "{{0,1,2,3,4,5,6,7}}", 4, 3 / 7),
    ("all-gather", "{{0,1,2,3},{4,5,6,7}}", 2, 0),
    ("reduce-scatter", "{{0,4},{1,5},{2,6},{3,7}}", 2, 1),
    ("all-to-all", "{{0,1,2,3,4,5,6,7}}", 2, 4 / 7),
  ],
)
def test_the_network_carries_once_what_a_node_shares(kind, groups, nodes, share):
  mesh = Mesh(np.asarray(jax.devices()).reshape(1, 8, 1), ("data", "fsdp", "tensor"))
  text = f"""
ENTRY %main (p: f32[2]) -> f32[8] {{
  ROOT %g = f32[8]{{0}} {kind}(%p), channel_id=7, replica_groups={groups}, dimensions={{0}}
}}
"""
  (found,) = compiling.moved(text, mesh, place=lambda device: device.id * nodes // 8)
  assert found.bytes > 0 and found.far == pytest.approx(found.bytes * share)


def test_a_machine_that_cannot_hold_the_state_says_how_many_could(run):
  plan_ = planned(run, room=run.arrays.always // 2, searches=True)
  assert plan_.microbatch is not None and plan_.microbatch.point is None
  assert any(each.change.startswith("at least") for each in advice.remedies(plan_))


@pytest.mark.parametrize("kl_coef", [0.0, 0.01])
def test_arrays_that_cannot_fit_are_answered_without_compiling(
  model, tmp_path, monkeypatch, kl_coef
):
  monkeypatch.setattr(JaxSampler, "described", None)  # it compiles; a call would fail.
  config = plan_request.config_of([*CONFIG, f"--config.loss.kl_coef={kl_coef}"])
  sizes, _ = plan_request.model_of(config, str(model), tmp_path)
  topology = topologies.parse("cpu:8")
  small = dataclasses.replace(topology, chip=dataclasses.replace(topology.chip, usable=1000))
  run = plan_request.run_of(config, sizes, small, tmp_path)
  made = plan.make(run, small, compile_job=None, assumed=workload.lengths(config))  # pyright: ignore
  count = report.parameters(made)
  held = (20 if kl_coef else 16) * count / 8  # AdamW in float32, with or without a reference.
  assert held > 1000 and made.worst.peak == pytest.approx(held, rel=0.05)
  text = report.text(made, source="here")
  assert not made.fits and "DOES NOT FIT cpu:8: the arrays alone take" in text
  assert "nothing was compiled" in text and "model.lora.rank=32" in text
  assert ("loss.kl_coef=0 " in text) == bool(kl_coef)
  assert report.to_json(made, source="here", arguments=[])["fits"] is False


def test_time_is_the_larger_of_compute_and_memory_plus_traffic():
  chip = CHIPS["h100"]
  moved = (Moved("all-gather", "fsdp", 460e9, 10e9, 1), Moved("all-reduce", "data", 40e9, 40e9, 1))
  work = [PhaseWork("update", "update", 2.0, 16 * 989e12, 3.35e12 * 3)]
  made = {"update": Compiled("update", moved=moved)}
  (phase,) = roofline.phases(work, made, chip, devices=16, dtype="bfloat16")
  assert (phase.compute_s, phase.memory_s) == (pytest.approx(1), pytest.approx(3))
  assert (phase.near_s, phase.far_s) == (pytest.approx(2), pytest.approx(2))
  assert phase.total_s == pytest.approx(7) and phase.bound == "memory"


@pytest.mark.long
def test_both_mesh_sizes_open_make_a_replica_of_each_node(model, tmp_path, monkeypatch):
  devices = lambda topology: jax.devices()[: topology.devices]  # stand-ins for GPUs.
  monkeypatch.setattr(topologies, "devices", devices)
  options = ["--config.engine.name=sglang", "--config.mesh.data=-1", "--config.mesh.fsdp=-1"]
  sizes = lambda machine: dict(make(model, tmp_path, *options, machine=machine).mesh.shape)
  assert sizes("2xh100:4") == {"data": 2, "fsdp": 4, "tensor": 1}
  assert sizes("h100:8") == {"data": 1, "fsdp": 8, "tensor": 1}
  with pytest.raises(ConfigError, match="tensor=8"):
    make(model, tmp_path, *options, "--config.mesh.tensor=8", machine="2xh100:4")


def test_the_sampler_is_planned_for_the_target_and_not_for_this_machine(run, monkeypatch):
  monkeypatch.setattr(implementations, "chip_of", lambda device: Chip("tpu", "TPU v5 lite"))
  on_tpu = programs.described(run.config, run.model, run.mesh)
  assert (run.prefill, on_tpu.prefill) == (160, 1024)  # see `sampler_sizes.unplanned`.


def test_work_grows_with_the_assumed_lengths(run):
  config = run.config
  short, long = workload.lengths(config, completion=64), workload.lengths(config, completion=256)
  assert workload.lengths(config).completion == 256  # half of sampling.max_tokens.
  of = lambda assumed: {each.phase: each for each in workload.of_step(run, assumed, hosts=1)}
  few, many = of(short), of(long)
  assert many["update"].operations > 2 * few["update"].operations
  assert many["sampling"].calls == 4 * few["sampling"].calls
  assert of(short)["sampling"].calls == 4 * 16 / 64 * 64 / 16


@pytest.mark.long
def test_the_command_names_wrong_machines_and_writes_json(model, tmp_path, capsys, monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  answer = lambda job, mesh, **_: Compiled(job.name, temporaries=1)
  monkeypatch.setattr(compiling, "compiled", answer)
  file = tmp_path / "plan.json"
  arguments = ["plan", *CONFIG, f"--model-config={model}"]
  assert cli.run([*arguments, "--topology=v5e-12"]) == 2
  assert "v5e-16" in capsys.readouterr().err
  assert cli.run([*arguments, "--topology=cpu:8", "--config.mesh.fsdp=3"]) == 2
  assert "mesh.fsdp=3" in capsys.readouterr().err
  assert cli.run([*arguments, "--topology=cpu:8", "--no-search", f"--json={file}"]) == 0
  assert "FITS cpu:8" in capsys.readouterr().out
  content = json.loads(file.read_text())
  assert content["fits"] and content["mesh"] == {"data": 1, "fsdp": 8, "tensor": 1}
  assert not (tmp_path / "runs").exists()
