"""What a step computes and moves, against arithmetic from the model's sizes; rates of the chips."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from grpo_jax.batching import attended, packing
from grpo_jax.building import arrays_in_memory
from grpo_jax.compilation.programs import CompilationError, CompileJob
from grpo_jax.config import configuration
from grpo_jax.learn import operations
from grpo_jax.models import leaves
from grpo_jax.models.config import LayerKind, ModelConfig
from grpo_plan import compiling, plan_request, roofline, topologies, workload
from grpo_plan.chips import CHIPS
from grpo_plan.workload import Lengths, PhaseWork

LENGTHS = Lengths(64, 128)
TINY = ModelConfig("qwen2", 96, 32, 48, 4, 4, 2, 8)


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
  """A run of 4 prompts in groups of 16, of a tiny model on eight simulated devices."""
  scratch = tmp_path_factory.mktemp("scratch")
  config = plan_request.config_of(
    ["--config=configs/math_1b.py", "--config.rollout.prompts_per_step=4"]
  )
  sizes, _ = plan_request.model_of(config, str(model), scratch)
  return plan_request.run_of(config, sizes, topologies.parse("cpu:8"), scratch)


def changed(run, **values):
  """Returns a run with other values of `learn`."""
  values = {f"learn.{name}": value for name, value in values.items()}
  return dataclasses.replace(run, config=configuration.replaced(run.config, values))


def phases(run, hosts=1):
  return {each.phase: each for each in workload.of_step(run, LENGTHS, hosts=hosts)}


def test_a_forward_pass_has_two_operations_a_weight_and_four_a_pair_and_head(run):
  model, cost = run.model, workload.forward_cost(run.model)
  width, inner = model.hidden_size, model.intermediate_size
  heads, parts = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
  weights = model.num_layers * (2 * width * heads + 2 * width * parts + 3 * width * inner)
  assert cost.place == 2 * weights
  assert cost.pair == 4 * model.num_layers * heads
  assert cost.loss_place == 2 * model.vocab_size * width


@pytest.mark.parametrize("window", [1, 50, 64, 100, 150, 192, 1000])
def test_a_sampled_token_sees_its_window(window):
  seen = [min(window, LENGTHS.prompt + n) for n in range(LENGTHS.completion)]
  assert workload._context(LENGTHS, window) == pytest.approx(np.mean(seen), abs=0.51)
  model = dataclasses.replace(TINY, layer_kinds=(LayerKind(window), *[LayerKind()] * 3))
  cost, row = workload.forward_cost(model), [(300, (200, 200))]
  whole = workload.forward_cost(TINY)
  assert cost.pairs(row) == (attended.pairs(row, window) + 3 * attended.pairs(row)) / 4
  assert cost.pairs(row) <= whole.pairs(row) == attended.pairs(row)
  assert operations.update_cost(model).windows == cost.windows


def test_sampling_has_all_completions_of_all_groups(run):
  cost, completions = workload.forward_cost(run.model), 4 * 16
  token = cost.place + cost.loss_place + cost.pair * (64 + 128 / 2)
  assert phases(run)["sampling"].operations == pytest.approx(completions * 128 * token)
  assert phases(run, hosts=4)["sampling"].calls == phases(run)["sampling"].calls  # 64 rows.
  few = dataclasses.replace(run, sizes={**run.sizes, "max_rows": 16})
  assert phases(few)["sampling"].calls == 4 * phases(few, hosts=4)["sampling"].calls
  reading = phases(run)["reading prompts"]
  assert reading.calls == 4 * phases(run, hosts=4)["reading prompts"].calls


def test_groups_of_the_config_are_packed(run, monkeypatch):
  packed = []
  monkeypatch.setattr(packing, "pack", lambda groups, *_, **__: packed.extend(groups) or [])
  workload.microbatches(run, LENGTHS)
  assert packed == [packing.Sizes(64, (128,) * 16)] * 4


def test_epochs_and_minibatches_repeat_the_update(run):
  once, count = phases(run), sum(workload.microbatches(run, LENGTHS).values())
  assert once["update"].calls == once["scoring"].calls == count  # the reference scores once.
  twice = phases(changed(run, epochs=2))
  assert twice["update"].operations == 2 * once["update"].operations
  assert (twice["update"].calls, twice["optimizer"].calls) == (2 * count, 2)
  halves = changed(run, minibatches=2)
  assert phases(halves)["optimizer"].calls == 2
  places = lambda each: sum(
    shape.places * n for shape, n in workload.microbatches(each, LENGTHS).items()
  )
  assert places(halves) >= 4 * (64 + 16 * 128)


def test_an_update_reads_the_weights_three_times_with_full_rematerialisation(run):
  weights = workload.weights_of_layers(run.model) + run.model.vocab_size * run.model.hidden_size
  update = phases(run)["update"]
  assert run.config.model.compute_dtype == "bfloat16" and run.config.model.remat == "full"
  assert update.bytes == update.calls * (3 * 2 * weights + 2 * run.arrays.sums)


@pytest.fixture(scope="module")
def lora_run(model, tmp_path_factory):
  """The run of `run` with an adapter of rank 8."""
  scratch = tmp_path_factory.mktemp("scratch")
  options = ["--config.rollout.prompts_per_step=4", "--config.model.lora.rank=8"]
  config = plan_request.config_of(["--config=configs/math_1b.py", *options])
  sizes, _ = plan_request.model_of(config, str(model), scratch)
  return plan_request.run_of(config, sizes, topologies.parse("cpu:8"), scratch)


def test_an_update_computes_no_gradient_of_a_frozen_base(run, lora_run):
  whole, adapted = workload.update_cost(run), workload.update_cost(lora_run)
  assert whole == run.made.cost
  weights, model = workload.weights_of_layers(run.model), run.model
  of_layer = leaves.layer(model).values()
  kernels = [leaf.shape for leaf in of_layer if leaf.kind == "kernel"]
  adapter = model.num_layers * sum(8 * (i + o) for i, o in kernels)
  # Forward, the same again, and the gradient of the inputs; of A and B also their own gradients.
  assert adapted.place == pytest.approx(2 * (3 * weights + 4 * adapter))
  assert adapted.loss_place == 2 * 2 * model.vocab_size * model.hidden_size
  assert (adapted.pair, adapted.microbatch) == (whole.pair, whole.microbatch)
  shapes = workload.microbatches(lora_run, LENGTHS)
  of_rows = sum(n * s.rows * adapted.row_cost(s.row_tokens, s.loss_tokens)
                for s, n in shapes.items())  # fmt: skip
  groups = lora_run.config.rollout.prompts_per_step
  own = [(LENGTHS.prompt, (LENGTHS.completion,))]
  least = groups * lora_run.config.rollout.group_size * attended.pairs(own) / 2
  attention = phases(lora_run)["update"].operations - of_rows
  assert least * adapted.pair < attention < 4 * least * adapted.pair


def test_only_an_adapter_moves_to_other_hosts_in_each_step(run, lora_run):
  def of_half(run):
    host = Mesh(run.mesh.devices.reshape(2, 4)[:1].reshape(1, 4, 1), run.mesh.axis_names)
    return phases(dataclasses.replace(run, sampler_mesh=host), hosts=2)["weights to the sampler"]

  whole, adapted = of_half(run), of_half(lora_run)
  assert whole.program == arrays_in_memory.COPYING
  assert adapted.program == arrays_in_memory.COPYING_ADAPTER
  assert adapted.bytes == 2 * (lora_run.arrays.sampler - lora_run.arrays.kept)


# Vendors' figures: operations a second in bfloat16, bytes a second of memory and links one way.
RATES = {
  "v4": (275e12, 1.2e12, 300e9),
  "v5e": (197e12, 819e9, 200e9),
  "v5p": (459e12, 2.765e12, 600e9),
  "v6e": (918e12, 1.64e12, 400e9),
  "t4": (8.1e12, 320e9, 16e9),
  "l4": (121e12, 300e9, 32e9),
  "4090": (165.2e12, 1.008e12, 32e9),
  "5090": (209.5e12, 1.792e12, 64e9),
  "a100-40": (312e12, 1.555e12, 300e9),
  "a100": (312e12, 2.039e12, 300e9),
  "h100": (989e12, 3.35e12, 450e9),
  "h200": (989e12, 4.8e12, 450e9),
}


def test_rates_are_those_of_dense_bfloat16_and_of_one_direction():
  assert {name: (c.bfloat16, c.bandwidth, c.link) for name, c in CHIPS.items()} == RATES


def test_the_peak_is_that_of_the_dtype():
  chip, work = CHIPS["h100"], [PhaseWork("update", "update", 1.0, 989e12, 0.0)]
  of = lambda dtype: roofline.phases(work, {}, chip, devices=1, dtype=dtype)[0].compute_s
  assert of("bfloat16") == pytest.approx(1)
  assert of("float32") == pytest.approx(989 / 67)


def job_of(function, **options):
  x = jax.ShapeDtypeStruct((256,), jnp.float32)
  lower = lambda: jax.jit(function, **options).lower(x)
  return CompileJob("update", lambda: None, lower=lower)


def test_results_in_donated_arguments_take_no_memory_of_their_own():
  mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
  kept = compiling.compiled(job_of(jnp.sin), mesh)
  donated = compiling.compiled(job_of(jnp.sin, donate_argnums=0), mesh)
  assert (kept.arguments, kept.outputs, donated.outputs) == (1024, 1024, 0)


def test_answers_are_kept_by_program_and_flags(tmp_path, monkeypatch):
  mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
  ask = lambda function: compiling.compiled(job_of(function), mesh, folder=tmp_path)
  assert ask(jnp.sin) == ask(jnp.sin)
  assert len(list(tmp_path.iterdir())) == 1
  ask(jnp.cos)
  monkeypatch.setenv("XLA_FLAGS", "--xla_of_another_plan")
  ask(jnp.sin)
  assert len(list(tmp_path.iterdir())) == 3


def test_a_product_for_which_there_is_no_triton_kernel_is_compiled_without_triton(tmp_path):
  """As XLA does without a device; a real refusal is passed on."""

  class Lowered:
    def __init__(self, message):
      self.message = message

    def as_text(self):
      return self.message

    def compile(self, compiler_options=None):
      if compiler_options == {"xla_gpu_enable_triton_gemm": False}:
        return jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((256,), jnp.float32)).compile()
      raise jax.errors.JaxRuntimeError(self.message)

  mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
  job = lambda message: CompileJob("update", lambda: None, lower=lambda: Lowered(message))
  ask = lambda message: compiling.compiled(job(message), mesh, folder=tmp_path)
  found = ask("INTERNAL: No supported config found for HLO: %gemm_fusion_dot.24")
  assert found.without_triton and found.arguments == 1024
  assert ask("INTERNAL: No supported config found for HLO: %gemm_fusion_dot.24") == found
  with pytest.raises(CompilationError, match="something else"):
    ask("INTERNAL: something else")


def test_a_program_that_the_compiler_refuses_is_known_by_its_temporaries():
  class Lowered:
    def as_text(self):
      return ""

    def compile(self):
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: HLO temporaries (20.5G of 15.7G)")

  mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
  found = compiling.compiled(CompileJob("update", lambda: None, lower=Lowered), mesh)
  assert (found.is_refused, found.temporaries) == (True, int(20.5 * 2**30))
