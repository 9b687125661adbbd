"""Real compilation for H100s and TPUs, none of which is here: `make aot`.

The kernels, and the whole update on a mesh of eight devices.

The compilers are large and live in environments of their own; AOT_TARGET says which of them this
process has ("h100" or "tpu"). Without it everything here is skipped.
"""

import collections
import functools
import importlib
import json
import os
import re

import aot
import pytest
from grpo_kernels.linear_logprobs import core, reference
from test_cross_lowering import MODELS, TOKENS, passes, structs

from grpo_jax.commands import cli
from grpo_plan import architectures, asking, compiling, programs, search, topologies

TARGET = os.environ.get("AOT_TARGET")
pytestmark = [
  pytest.mark.aot,
  pytest.mark.skipif(
    not TARGET, reason="the compilers for H100 and TPU are not in this Python; `make aot`"
  ),
]
on_h100 = pytest.mark.skipif(TARGET != "h100", reason="needs the compiler for H100; `make aot`")
on_tpu = pytest.mark.skipif(TARGET != "tpu", reason="needs the compiler for TPU; `make aot`")

MIB, GIB = 2**20, 2**30
# (implementation, pass) → model → the most temporary memory at N = 16384 in bf16.
BOUNDS = {
  ("mosaic_gpu", "forward"): dict.fromkeys(MODELS, 1 * MIB),
  ("mosaic_gpu", "value_and_grad"): {"Qwen2.5-1.5B": 0.6 * GIB, "Llama-3-8B": 0.85 * GIB},
  ("xla_chunked", "forward"): dict.fromkeys(MODELS, 0.7 * GIB),
  ("xla_chunked", "value_and_grad"): dict.fromkeys(MODELS, 1.1 * GIB),
}
PASSES = ("forward", "value_and_grad")
models = pytest.mark.parametrize("model", list(MODELS))
both_passes = pytest.mark.parametrize("which", PASSES)


@functools.cache
def compiled(target, name, model, which, *, head_layout="vd", with_entropy=True):
  """Compiles one implementation at the size of one model, once."""
  implementation = importlib.import_module(f"grpo_kernels.linear_logprobs.{name}")
  if name == "pallas_tpu":  # its tiles depend on the chip, which this process does not have.
    device = topologies.devices(topologies.parse(target))[0]
    implementation = implementation.PallasTpu(device_kind=device.device_kind)
  operate = core.entry(implementation)
  function = passes(operate, head_layout=head_layout, with_entropy=with_entropy)[which]
  made = aot.compile_for(target, function, structs(*MODELS[model], head_layout))
  options = "" if with_entropy else ", without entropy"
  said = f"{made.temporary_bytes / MIB:.3f} MiB, {made.kernels}"
  print(f"{target} {name} {model} {head_layout}{options} {which}: {said}")
  return made


def assert_holds_no_logits(made, model):
  """Fails where a program names an array with as many elements as all logits have."""
  vocabulary = MODELS[model][1]
  elements, shape = aot.largest_array(made.hlo)
  assert elements < TOKENS * vocabulary, f"[{shape}]"
  for a, b in ((TOKENS, vocabulary), (vocabulary, TOKENS)):
    assert f"[{a},{b}]" not in made.hlo


@on_h100
@both_passes
@models
def test_memory_of_the_kernel_on_an_h100(model, which):
  made = compiled("h100", "mosaic_gpu", model, which)
  assert_holds_no_logits(made, model)
  bound = BOUNDS["mosaic_gpu", which].get(model, 1 * GIB)
  assert made.temporary_bytes <= bound, f"{made.temporary_bytes / GIB:.3f} GiB"


@on_h100
@both_passes
@pytest.mark.parametrize("model", list(BOUNDS["mosaic_gpu", "value_and_grad"]))
def test_memory_of_the_chunked_form_on_an_h100(model, which):
  made = compiled("h100", "xla_chunked", model, which)
  assert_holds_no_logits(made, model)
  bound = BOUNDS["xla_chunked", which][model]
  assert made.temporary_bytes <= bound, f"{made.temporary_bytes / GIB:.3f} GiB"


@on_h100
def test_no_register_spills_on_an_h100():
  made = [compiled("h100", "mosaic_gpu", model, "value_and_grad") for model in MODELS]
  for options in ({"with_entropy": False}, {"head_layout": "dv"}):
    made.append(compiled("h100", "mosaic_gpu", "Qwen2.5-1.5B", "value_and_grad", **options))
  for one in made:
    assert len({kernel.name for kernel in one.kernels}) == 2  # one of each pass.
    assert [kernel for kernel in one.kernels if kernel.spilled_bytes] == []
    # What is left of 64 Ki registers for each of 384 threads.
    assert max(kernel.registers for kernel in one.kernels) <= 168


@on_tpu
@pytest.mark.parametrize("model", list(BOUNDS["mosaic_gpu", "value_and_grad"]))
@pytest.mark.parametrize("target", ["v5e:2x2", "v6e:2x2"])
def test_kernels_compile_for_a_tpu(target, model):
  made = compiled(target, "pallas_tpu", model, "value_and_grad")  # which holds the forward pass.
  assert "tpu_custom_call" in made.hlo
  assert_holds_no_logits(made, model)
  assert made.temporary_bytes <= BOUNDS["mosaic_gpu", "value_and_grad"][model]  # no more there.


def test_logits_would_be_seen():
  target = "h100" if TARGET == "h100" else "v5e:2x2"
  made = aot.compile_for(
    target, passes(reference.linear_logprobs)["forward"], structs(*MODELS["SmolLM2-135M"])
  )
  assert aot.largest_array(made.hlo)[0] >= TOKENS * 49152
  assert made.temporary_bytes > 1 * GIB


def run_on(machine, sizes, folder, *options):
  """Returns the run of configs/math_1b.py with a model of these sizes, which servers sample."""
  (folder / "given.json").write_text(json.dumps(sizes))
  options = ["--config=configs/math_1b.py", "--config.engine.name=sglang", *options]
  config = asking.config_of(options)
  model, _ = asking.model_of(config, str(folder / "given.json"), folder)
  return asking.run_of(config, model, topologies.parse(machine), folder)


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


def whole_run_fits(machine):
  """Compiles what a run of configs/math_1b.py compiles; returns whether it fits."""
  options = ["--config=configs/math_1b.py", "--no-search", "--no-cache"]
  return cli.run(["plan", f"--topology={machine}", *options]) == 0


@on_h100
def test_math_1b_fits_one_h100():
  assert whole_run_fits("h100")


@on_tpu
@pytest.mark.skipif(
  "AOT_WHOLE" not in os.environ, reason="minutes of compilation; `AOT_WHOLE=1 make aot`"
)
def test_math_1b_fits_eight_v5es():
  assert whole_run_fits("v5e-8")


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
  command = ["plan", "--config=configs/math_1b.py", f"--topology={machine}", *options]
  assert cli.run([*command, f"--model-config={sizes}", f"--json={answer}"]) == 0
  found = json.loads(answer.read_text())
  names = {one["name"].partition(" ")[0] for one in found["programs"]}
  assert {"update", "sampling", "reading", "copying", "optimizer"} <= names
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
  adapted, whole = update("--config.model.lora.rank=8"), update()
  print(machine, is_tied, sorted(computed(whole, shapes)))
  assert re.search(r"\[2176,256\]|\[256,2176\]", adapted), "the head is an argument"
  assert not computed(adapted, shapes)
  assert computed(whole, shapes), "the gradient of a trained head would be seen"
