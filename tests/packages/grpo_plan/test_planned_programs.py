"""Which arrays lie beside which program, from a config and a model's sizes."""

import jax
import numpy as np
import pytest

from grpo_jax.building import arrays_in_memory, computation
from grpo_jax.compilation.programs import CompileJob
from grpo_jax.engines import sampler_sizes
from grpo_jax.models import leaves, loading
from grpo_plan import plan_request, programs, topologies

CONFIG = "--config=configs/math_1b.py"
SMALL = {
  "drift",
  "empty gradients",
  "optimizer state",
  "copy of the weights",
  "tensor of the export",
  "advantages",
}


def make(model, scratch, *overrides):
  """Returns a run of a tiny model on eight simulated devices."""
  config = plan_request.config_of([CONFIG, *overrides])
  sizes, _ = plan_request.model_of(config, str(model), scratch)
  return plan_request.run_of(config, sizes, topologies.parse("cpu:8"), scratch)


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
  return make(model, tmp_path_factory.mktemp("scratch"))


@pytest.fixture
def arrays_of(model, tmp_path, monkeypatch):
  """A function from overrides to the arrays of a run that samples elsewhere; nothing is traced."""
  monkeypatch.setattr(computation.Computation, "jobs", lambda self: [])
  return lambda *overrides: make(model, tmp_path, "--config.engine.name=sglang", *overrides).arrays


def parameters(folder):
  """Returns the number of a model's parameters."""
  return sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(leaves.tree(loading.look(folder))))


def test_weights_moments_and_reference_are_split_over_the_devices(run, model):
  arrays, count = run.arrays, parameters(model)
  assert arrays.weights == arrays.reference == arrays.sums == 4 * count / 8
  assert arrays.optimizer == pytest.approx(2 * arrays.weights, abs=64)  # and some counters.
  assert arrays.initial == 0


def test_sampler_keeps_layers_and_head_in_bfloat16_and_its_caches(run, model):
  config = loading.look(model)
  embed = config.vocab_size * config.hidden_size
  norms = 2 * config.num_layers * config.hidden_size + config.hidden_size
  kernels = parameters(model) - embed - norms
  head = embed if config.tie_embeddings else 0
  assert run.arrays.sampler == pytest.approx(2 * (kernels + head) / 8, rel=0.02)
  token = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
  assert run.cache_token == {None: token}
  ring, pages = 64 * 512 * token / 8, 64 * 64 * token  # pages stand on every device.
  assert run.arrays.caches == ring + pages


def test_every_program_of_the_run_is_counted_or_known_to_be_small(run):
  names = [job.name for job in run.jobs]
  others = {
    arrays_in_memory.COPYING,
    arrays_in_memory.COPYING_ADAPTER,
    "teacher",
    "proof of new weights",
    "reading completions again",
    "growing keys and values",
  }  # of several hosts, or with one, or with servers, or where memory is short.
  needed = set(programs.PROGRAMS) - others
  assert {programs.program_of(name) for name in names} - {None} == needed
  for name in names:
    assert programs.program_of(name) or any(name.startswith(small) for small in SMALL), name


def test_loss_without_kl_has_no_reference_but_reads_the_initial_weights(arrays_of):
  arrays = arrays_of("--config.loss.kl_coef=0")
  assert (arrays.reference, arrays.initial) == (0, arrays.weights)
  off = ("--config.loss.kl_coef=0", "--config.learn.report_kl_every_steps=0")
  assert arrays_of(*off).initial == 0


def test_mesh_of_the_config_decides_what_a_device_holds(arrays_of, run):
  arrays = arrays_of("--config.mesh.data=8", "--config.mesh.fsdp=1")
  assert arrays.weights == 8 * run.arrays.weights
  assert (arrays.sampler, arrays.caches) == (0, 0)  # SGLang's servers are not counted.


@pytest.mark.parametrize(("keeps_caches", "kept"), [(False, 0), (True, 1000)])
def test_arrays_beside_each_program(keeps_caches, kept):
  arrays = arrays_in_memory.Arrays(
    1, 2, reference=10, sampler=100, caches=1000, initial=10**4, gradients=10**5, teacher=10**6,
    keeps_caches=keeps_caches,
  )  # fmt: skip
  assert {name: arrays.beside(name) - 10**6 for name in programs.PROGRAMS} == {
    arrays_in_memory.COPYING: 13,
    arrays_in_memory.COPYING_ADAPTER: 13,
    "reading prompts": 1113,
    "sampling": 1113,
    "reading completions again": 1113,
    "growing keys and values": 1113,
    "score": 1113,
    "teacher": 1113,
    "proof of new weights": 1113,
    "watch": 10013 + kept,
    "update": 100013 + kept,
    "optimizer": 100013 + kept,
  }


def test_a_sampler_that_samples_while_the_trainer_learns_frees_nothing():
  arrays = arrays_in_memory.Arrays(
    1, 2, sampler=100, caches=1000, gradients=10**5, keeps_sampler=True
  )
  beside = [arrays.beside(name) for name in ("sampling", "watch", "update", "optimizer")]
  assert beside == [1103, 1103, 101103, 101103]


def test_a_run_that_samples_ahead_plans_own_copies_of_embedding_and_norm(
  model, tmp_path, monkeypatch
):
  monkeypatch.setattr(computation.Computation, "jobs", lambda self: [])
  now, ahead = (make(model, tmp_path, f"--config.rollout.max_staleness={k}").arrays for k in (0, 1))
  config = loading.look(model)
  assert (now.keeps_sampler, ahead.keeps_sampler) == (False, True)
  own = 4 * config.hidden_size * (config.vocab_size + 1)  # float32, as the trainer's.
  assert own / 8 <= ahead.sampler - now.sampler <= own


def test_largest_shape_of_each_program_is_compiled_first():
  names = ["update 1 × 448 (448)", "update 3 × 2304 (2304)", "update 4 × 448 (999999)"]
  names += ["optimizer", "optimizer state", "sampling 8 rows", "sampling 64 rows"]
  jobs = [CompileJob(name, lambda: None) for name in [*names, "drift 8 × 9 (9)"]]
  large, small = ([job.name for job in found] for found in (
    programs.largest(jobs), programs.smaller(jobs)))  # fmt: skip
  assert large == [names[1], "optimizer", "sampling 64 rows"]
  assert small == [names[0], names[2], "sampling 8 rows"]


def test_a_cache_that_grows_is_compiled_and_counted_where_it_is_largest(
  run, model, tmp_path, monkeypatch
):
  monkeypatch.setattr(computation.Computation, "jobs", lambda self: [])
  of_token, began = sum(run.cache_token.values()), [job.name for job in run.jobs]
  half = make(model, tmp_path, f"--config.engine.cache_gib={64 * 256 * of_token / 8 / 2**30}")
  names = [job.name for job in programs.largest(half.jobs)]
  assert "sampling 32 rows × 512 columns" in names and "sampling 64 rows" not in names
  assert "reading completions again 32 rows × 512 columns" in names
  assert run.arrays.caches - half.arrays.caches == 64 * 256 * of_token / 8
  assert not any("columns" in name for name in began)  # its cache begins with all that it needs.

  monkeypatch.setattr(sampler_sizes, "_CACHE_BYTES", 64 * 128 * of_token)
  grown = make(model, tmp_path)
  assert run.arrays.caches - grown.arrays.caches == 0
  of_sampler = [job for job in programs.largest(grown.jobs) if "columns" in job.name]
  shape = "64 rows × 512 columns"
  assert [job.name for job in of_sampler] == [
    f"sampling {shape}",
    f"growing keys and values {shape}",
  ]
  assert {programs.mesh_of(grown, job) for job in of_sampler} == {grown.sampler_mesh}
  longer, _ = of_sampler[1].lower().out_info
  assert longer.shape[0] * longer.shape[-1] == 512


def test_of_programs_of_a_cache_that_grows_the_larger_ones_are_compiled():
  names = ["sampling 64 rows", "sampling 64 rows × 900 columns", "sampling 9 rows × 5000 columns"]
  names += ["reading completions again 1024 tokens", "reading prompts 1024 tokens"]
  jobs = [CompileJob(name, lambda: None) for name in names]
  assert [job.name for job in programs.largest(jobs)] == names[1:]
  assert [job.name for job in programs.smaller(jobs)] == names[:1]
  placed = [(jax.ShapeDtypeStruct((size,), np.int8), [size]) for size in (1, 5, 4)]
  decisive = lambda some: [jobs for _, (jobs,) in programs._decisive(some)]
  assert decisive(placed) == [5, 4] and decisive(placed[:2]) == [5] and decisive([]) == []


def test_an_adapter_is_what_has_gradients_and_moments(arrays_of, run, model):
  arrays = arrays_of("--config.model.lora.rank=2", "--config.model.lora.base_dtype=bfloat16")
  of_layer, config = leaves.layer(loading.look(model)), loading.look(model)
  kernels = [leaf.shape for leaf in of_layer.values() if leaf.kind == "kernel"]
  whole = 4 * config.num_layers * sum(2 * (i + o) for i, o in kernels)
  assert whole / 8 <= arrays.sums == arrays.adapter <= whole
  assert arrays.optimizer == pytest.approx(2 * arrays.adapter, abs=64)
  norms = 2 * config.num_layers * config.hidden_size + config.hidden_size
  base = (2 * (parameters(model) - norms) + 4 * norms) / 8
  assert arrays.weights - arrays.adapter == pytest.approx(base, rel=0.02)
  assert (arrays.reference, arrays.initial) == (0, 0), "the base is the reference"
  quantized = arrays_of("--config.model.lora.rank=2", "--config.model.lora.base_dtype=int8")
  assert quantized.weights < arrays.weights and quantized.adapter == arrays.adapter
