"""Whole programs of a run, compiled for H100s and TPUs, none of which is here: `make aot`."""

import collections
import json
import math
import os
import pathlib
import re
import sys

import aot
import decode_step
import hlo_kernels
import pytest
from aot import TARGET, on_h100, on_tpu
from grpo_kernels.implementations import chip_of

from grpo_jax.commands import cli
from grpo_jax.engines import sampler_memory
from grpo_jax.models.options import REMATS
from grpo_plan import (
  architectures,
  compiling,
  hlo_collectives,
  machines,
  plan,
  plan_request,
  programs,
  search,
  topologies,
)

sys.path.append(str(pathlib.Path(__file__).parents[2] / "scripts"))
import machines as script

pytestmark = aot.MARKS

GIB = 2**30


def run_on(machine, sizes, folder, *options):
  """Returns the run of configs/math_1b.py with a model of these sizes, which servers sample."""
  (folder / "given.json").write_text(json.dumps(sizes))
  options = ["--config=configs/math_1b.py", "--config.engine.name=sglang", *options]
  config = plan_request.config_of(options)
  model, _ = plan_request.model_of(config, str(folder / "given.json"), folder)
  return plan_request.run_of(config, model, topologies.parse(machine), folder)


@on_h100
def test_eight_h100s_exchange_weights_and_gradients_and_hold_no_more_than_that(tmp_path):
  # Two layers: the body of the loop is the same. Rows of 1024, two of them for each device.
  run = run_on("h100:8", architectures.SHAPES["Qwen2.5-1.5B"] | {"num_hidden_layers": 2}, tmp_path)
  found = compiling.compiled(search.job_of(run, "update", 2, 1024, 8), run.mesh, host=run.host)
  print(found)
  layers, table = 2 * 46.8e6, 151936 * 1536  # numbers of weights.
  gathered = 7 / 8 * 2 * (2 * layers + table)
  scattered = 7 / 8 * 4 * (layers + table)  # XLA adds the table's two gradients before.
  moved = collections.Counter()
  for one in found.moved:
    moved[one.kind] += one.bytes
  assert gathered * 0.9 < moved["all-gather"] < 1.3 * gathered + 7 / 8 * 2 * table
  assert scattered * 0.9 < moved["reduce-scatter"] < 1.3 * scattered
  assert sum(moved.values()) < 1.3 * (gathered + scattered)
  assert found.temporaries < 4 * GIB


@on_h100
@pytest.mark.parametrize("remat", REMATS)
def test_arithmetic_of_an_update_is_not_below_what_the_compiler_counts(remat, tmp_path):
  sizes = architectures.SHAPES["Qwen2.5-1.5B"] | {"num_hidden_layers": 4}
  run = run_on("h100", sizes, tmp_path, f"--config.model.remat={remat}")
  assert run.choices is not None and run.choices.learning is not None
  job = next(x for x in programs.largest(run.jobs) if programs.program_of(x.name) == "update")
  found = compiling.compiled(job, run.mesh, host=run.host)
  counted = run.choices.learning.updates[remat].total
  print(
    f"{job.name}, {remat}: {counted / GIB:.2f} GiB by arithmetic, {found.own / GIB:.2f} compiled"
  )
  assert found.own <= counted <= 1.6 * found.own


@on_h100
def test_the_update_of_math_1b_fits_one_h100(tmp_path):
  """Of all programs of the run it takes most memory. Nothing in it has a number for each pair."""
  config = plan_request.config_of(["--config=configs/math_1b.py"])
  topology = topologies.parse("h100")
  model, _ = plan_request.model_of(config, None, tmp_path)
  run = plan_request.run_of(config, model, topology, tmp_path)
  job = next(x for x in programs.largest(run.jobs) if programs.program_of(x.name) == "update")
  with run.assumed():
    lowered = job.lower().as_text()
  length = re.search(r"update 1 × (\d+)", job.name)
  assert length and int(length[1]) > 4096 and not re.search(rf"{length[1]}x{length[1]}x", lowered)
  found = compiling.compiled(job, programs.mesh_of(run, job), host=run.host)
  need = plan.Need("update", run.arrays.beside("update"), found)
  print(f"{job.name}: {need.peak / GIB:.2f} of {topology.chip.usable / GIB:.2f} GiB")
  assert not found.is_refused and need.peak <= topology.chip.usable


@pytest.mark.skipif(
  "AOT_WHOLE" not in os.environ, reason="minutes of compilation; `AOT_WHOLE=1 make aot`"
)
@pytest.mark.parametrize("machine", ["h100"] if TARGET == "h100" else ["v5e-8"])
def test_all_programs_of_math_1b_fit(machine):
  options = ["--config=configs/math_1b.py", "--no-search", "--no-cache"]
  assert cli.run(["plan", f"--topology={machine}", *options]) == 0


SMALL = {
  "architectures": ["Qwen2ForCausalLM"],
  "vocab_size": 2048,
  "hidden_size": 256,
  "intermediate_size": 512,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "rope_theta": 1e6,
  "max_position_embeddings": 4096,
  "tie_word_embeddings": True,
}


@pytest.mark.parametrize("machine", ["2xh100:8"] if TARGET == "h100" else ["v5e-16"])
def test_a_small_run_is_planned_for_several_hosts(machine, tmp_path):
  sizes, answer = tmp_path / "config.json", tmp_path / "plan.json"
  sizes.write_text(json.dumps(SMALL))
  short = ["rollout.max_tokens", "sampling.max_tokens", "data.max_prompt_tokens"]
  options = [f"--config.{name}=128" for name in short]
  options += ["--config.batching.microbatch_tokens=256", "--config.engine.max_rows=8"]
  options += ["--config.loss.kl_coef=0", "--no-search", "--no-cache"]
  expected = {"update", "optimizer"}
  if TARGET == "h100":  # the sampler's programs are compiled for TPUs.
    options.append("--config.engine.name=sglang")
  else:
    expected |= {"sampling", "reading", "copying"}
  command = ["plan", "--config=configs/math_1b.py", f"--topology={machine}", *options]
  assert cli.run([*command, f"--model-config={sizes}", f"--json={answer}"]) == 0
  found = json.loads(answer.read_text())
  names = {one["name"].partition(" ")[0] for one in found["programs"]}
  assert expected <= names
  assert found["topology"]["devices"] == 16 and found["mesh"]["fsdp"] == 16
  moved = {one["kind"]: one["bytes"] for one in found["collectives"] if one["program"] == "update"}
  assert "all-gather" in moved and {"reduce-scatter", "all-reduce"} & {*moved}
  assert found["step_bound_s"] > 0


# Operations that only move or round an array; a fusion is known by what is inside it. A TPU's
# compiler joins slices that it has fetched by a custom call.
MOVES = {"all-gather", "bitcast", "convert", "copy", "fusion", "get-tuple-element", "parameter"}
MOVES |= {"reshape", "slice", "transpose", "tuple", "while", "ConcatBitcast"}


def computed(hlo, shapes):
  """Returns the operations that compute a float array of one of these shapes, moves left out."""
  found = set()
  for line in hlo.splitlines():
    match = re.match(r"\s+(?:ROOT )?%?\S+ = (?P<results>.*?) (?P<name>[a-z][\w-]*)\(", line)
    if match is None:
      continue
    arrays = re.findall(r"\bb?f\d+\[([\d,]+)\]", match["results"])
    if shapes & {tuple(map(int, sizes.split(","))) for sizes in arrays}:
      target = re.search(r'custom_call_target="([^"]*)"', line)
      found.add(target[1] if target else re.sub("-(start|done)$", "", match["name"]))
  return found - MOVES


@pytest.mark.parametrize("machine", ["h100:1"] if TARGET == "h100" else ["v5e-1"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_no_gradient_of_a_frozen_head_exists(machine, is_tied, tmp_path):
  sizes = SMALL | {"vocab_size": 2176, "tie_word_embeddings": is_tied}  # a size of nothing else.
  options = [f"--config.{name}=128" for name in ("rollout.max_tokens", "data.max_prompt_tokens")]
  options += ["--config.sampling.max_tokens=128", "--config.batching.microbatch_tokens=256"]

  def update(*more):
    run = run_on(machine, sizes, tmp_path, *options, *more)
    job = next(x for x in programs.largest(run.jobs) if programs.program_of(x.name) == "update")
    with run.assumed():
      return job.lower().compile().as_text()

  shapes = {(2176, 256), (256, 2176)}
  adapted = update("--config.model.lora.rank=8")
  assert re.search(r"\[2176,256\]|\[256,2176\]", adapted), "the head is an argument"
  assert not computed(adapted, shapes)
  if not is_tied:
    found = computed(update(), shapes)
    print(machine, sorted(found))
    assert found, "the gradient of a trained head would be seen"


@on_h100
def test_the_table_of_machines_has_what_the_compiler_counts():
  """One of its numbers, which is compiled in the least time."""
  cell = "t4:1", "Qwen2.5-1.5B", "LoRA"
  tried = machines.cells()[cell].last
  found = script.attempt(*cell, tried.marks, folder=None)
  assert found.update is not None and tried.update is not None
  print(*cell, f"{found.update / GIB:.2f} GiB, in the table {tried.update / GIB:.2f}")
  assert found.update == pytest.approx(tried.update, rel=0.02)
  assert (found.shape, found.remat, found.rows) == (tried.shape, tried.remat, tried.rows)


@on_h100
@pytest.mark.parametrize("machine", ["t4", "5090"])
def test_a_scorer_is_compiled_for_gpus_of_other_generations(machine, tmp_path):
  """A T4 has no bfloat16 units: XLA computes its products from factors converted to float32."""
  sizes = SMALL | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
  options = [f"--config.{name}=128" for name in ("rollout.max_tokens", "data.max_prompt_tokens")]
  options += ["--config.sampling.max_tokens=128", "--config.batching.microbatch_tokens=256"]
  run = run_on(machine, sizes, tmp_path, *options, "--config.loss.kl_coef=0.01")
  job = next(x for x in run.jobs if programs.program_of(x.name) == "score")
  with run.assumed():
    hlo = job.lower().compile().as_text()
  assert "mosaic_gpu" not in hlo
  # Products by the compiler's own kernels, and by cuBLAS; the dtype of what they return.
  found = re.findall(r" = \(?(\w+)\[\S+(?: \S+)? (?:dot\(|custom-call\(.*__cublas)", hlo)
  print(machine, found)
  assert found and {*found} == ({"f32"} if machine == "t4" else {"f32", "bf16"})


# Rows → bytes of a step over those needed. XLA splits sums of q|k|v, o and down (BUILD_NOTES.md,
# "A decode step, compiled for an H100").
MOVED = {64: 1.30, 256: 1.61, 512: 1.66}


@on_h100
@pytest.mark.parametrize("rows", MOVED)
def test_a_decode_step_on_an_h100_has_few_kernels_and_asks_the_host_nothing(rows):
  """Rows of Qwen2.5-1.5B in groups of 16, prompts of 512 tokens, 256 of 512 tokens sampled."""
  found = [decode_step.compiled("h100:1", rows, layers) for layers in (1, 2)]
  turns = [hlo_kernels.main_loop(one.hlo, apart=one.caches) for one in found]
  of_layer = hlo_kernels.Turn(*(two - one for one, two in zip(*turns, strict=True)))
  nbytes = turns[0].nbytes + (decode_step.LAYERS - 1) * of_layer.nbytes
  weights, cached = decode_step.needed_bytes(rows, live=decode_step.COMPLETION // 2)
  # The kernel reads each row's own tokens, and each prompt once for its rows.
  ratio = (nbytes + cached) / (weights + cached)
  print(
    f"{rows} rows, a layer {of_layer}, one layer and the head {turns[0]}: {ratio:.3f} of needed"
  )
  assert "decode_attention" in found[0].hlo
  assert [one.waits for one in turns] == [0, 0]
  assert of_layer.kernels <= 12 and turns[0].kernels - of_layer.kernels <= 29
  assert ratio <= MOVED[rows]
  config = decode_step.config_of(1)
  head, logits = 2 * config.vocab_size * config.hidden_size, 4 * config.vocab_size * rows
  # Logits are written once and read once.
  assert turns[0].nbytes - of_layer.nbytes < head + 2.1 * logits
  # A copy of the keys and values of a layer would take more than half of what the logits take.
  assert found[1].temporary_bytes < 1.5 * logits


@on_h100
def test_an_h100_writes_into_a_long_cache_in_place():
  """A layer of 64 rows of 31,744 tokens, and of the half of them that half of its memory holds."""
  row = 31744 * 4 * 2 * 128  # of two key/value heads in bfloat16.
  found = decode_step.long_programs("h100:1", 31744, 64 * row)
  found |= decode_step.long_programs("h100:1", 31744, 32 * row)
  for name, (held, own) in found.items():
    print(f"{name}: {held / GIB:.3f} GiB, besides {own / GIB:.3f}")
  taken = lambda name: found[f"{name} columns"]
  held, own = taken("sampling 64 rows × 31744")
  assert held == 64 * row and own < 0.05 * held
  held, own = taken("sampling 32 rows × 31744")
  assert held == 32 * row and own < 0.05 * held
  held, own = taken("reading completions again 32 rows × 31744")
  assert own < 0.05 * held
  assert taken("growing keys and values 64 rows × 31744")[1] < 1.01 * 64 * row
  # What is counted before anything is compiled.
  chip = chip_of(topologies.devices(topologies.parse("h100:1"))[0])
  assert not sampler_memory.copies_cache(chip)


@on_tpu
def test_a_tpu_copies_a_long_cache_before_a_decode_step():
  row = 7936 * 4 * 2 * 128
  found = decode_step.long_programs("v5e-1", 7936, 64 * row)
  print({name: [f"{x / GIB:.3f} GiB" for x in sizes] for name, sizes in found.items()})
  held, own = found["sampling 64 rows × 7936 columns"]
  assert held == 64 * row and held < own < 1.2 * held
  chip = chip_of(topologies.devices(topologies.parse("v5e-1"))[0])
  assert sampler_memory.copies_cache(chip)


@on_h100
def test_eight_h100s_decode_with_the_kernel_and_move_no_cache():
  one = decode_step.compiled("h100:8", 512, 1, whole_caches=True)
  assert hlo_kernels.main_loop(one.hlo).waits == 0 and "decode_attention" in one.hlo
  found = hlo_collectives.collectives(one.hlo, devices=8)
  moved = {array.shape for each in found for array in each.arrays}
  print(sorted(moved))
  logits = 512 // 8 * 151936  # of a device's rows: the most that moves.
  assert max(map(math.prod, moved)) <= logits < max(map(math.prod, one.caches)) / 4


@on_h100
@pytest.mark.parametrize("has_filters", [False, True])
def test_without_the_kernel_a_decode_step_asks_the_host_nothing_either(has_filters):
  options = {"dtype": "float32", "has_filters": has_filters}
  turn = hlo_kernels.main_loop(decode_step.compiled("h100:1", 16, 1, **options).hlo)
  print(turn)
  assert turn.waits == 0


@on_h100
def test_the_cache_of_cpus_would_make_an_h100_wait_in_every_layer():
  """What the two tests above would see if an accelerator had the other form."""
  one = decode_step.compiled("h100:1", 16, 1, form="ring", has_filters=None)
  assert hlo_kernels.main_loop(one.hlo).waits >= 4
