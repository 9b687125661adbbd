"""Kernels compiled for H100s and TPUs, none of which is here: `make aot`."""

import functools
import importlib
import re

import aot
import pytest
import test_attention_cross_lowering as lowering_of_attention
from aot import TARGET, on_h100, on_tpu
from grpo_kernels import implementations
from grpo_kernels.attention import mosaic_gpu as mosaic_attention
from grpo_kernels.linear_logprobs import core, reference, token_local
from test_cross_lowering import MODELS, PASSES_OF_MODELS, TOKENS, passes, structs, sweep

from grpo_plan import topologies

pytestmark = aot.MARKS

MIB, GIB = 2**20, 2**30
# (implementation, pass) → model → the most temporary memory at N = 16384 in bf16.
BOUNDS = {
  ("mosaic_gpu", "forward"): dict.fromkeys(MODELS, 1 * MIB),
  ("mosaic_gpu", "value_and_grad"): {"Qwen2.5-1.5B": 0.6 * GIB, "Llama-3-8B": 0.85 * GIB},
  ("xla_chunked", "forward"): dict.fromkeys(MODELS, 0.7 * GIB),
  ("xla_chunked", "value_and_grad"): dict.fromkeys(MODELS, 1.1 * GIB),
}


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
@pytest.mark.parametrize(("which", "model"), PASSES_OF_MODELS)
def test_memory_of_the_kernel_on_an_h100(which, model):
  made = compiled("h100", "mosaic_gpu", model, which)
  assert_holds_no_logits(made, model)
  bound = BOUNDS["mosaic_gpu", which].get(model, 1 * GIB)
  assert made.temporary_bytes <= bound, f"{made.temporary_bytes / GIB:.3f} GiB"


@on_h100
@pytest.mark.parametrize(
  ("which", "model"), [("forward", "Qwen2.5-1.5B"), ("value_and_grad", "Llama-3-8B")]
)
def test_memory_of_the_chunked_form_on_an_h100(which, model):
  made = compiled("h100", "xla_chunked", model, which)
  assert_holds_no_logits(made, model)
  bound = BOUNDS["xla_chunked", which][model]
  assert made.temporary_bytes <= bound, f"{made.temporary_bytes / GIB:.3f} GiB"


@functools.cache
def swept(target, model, **options):
  """Compiles the value and gradients of a loss in one sweep."""
  chip = implementations.chip_of(topologies.devices(topologies.parse(target))[0])
  arguments = structs(*MODELS[model], options.get("head_layout", "vd"))
  with implementations.assumed_chip(chip):
    made = aot.compile_for(target, sweep(**options), arguments)
  said = f"{made.temporary_bytes / MIB:.3f} MiB, {made.kernels}"
  print(f"{target} sweep {model} {options}: {said}")
  return made


@on_h100
@pytest.mark.parametrize(
  ("model", "bound", "of_entropy"),
  [("Qwen2.5-1.5B", 2.2, False), ("Llama-3-8B", 2.5, False), ("Qwen2.5-1.5B", 2.45, True)],
)
def test_the_kernel_of_a_sweep_on_an_h100(model, bound, of_entropy):
  made = swept("h100", model, differentiate_entropy=of_entropy)
  assert {kernel.name for kernel in made.kernels} <= {
    "linear_logprobs_numerators_mosaic_gpu_kernel"
  }
  assert "linear_logprobs_numerators" in made.hlo
  assert [kernel for kernel in made.kernels if kernel.spilled_bytes] == []
  assert_holds_no_logits(made, model)
  assert made.temporary_bytes <= bound * GIB, f"{made.temporary_bytes / GIB:.3f} GiB"
  # Numerators are written once, replaced in place at the targets, and read by two products; with a
  # gradient of the entropy, by one pass that computes in float32.
  assert of_entropy or not re.findall(rf"f32\[\d+,{MODELS[model][1]}\]", made.hlo)
  assert of_entropy or not re.findall(
    rf"bf16\[\d+,{MODELS[model][1]}\]\S* (?:copy|convert|multiply)\(", made.hlo
  )


@on_h100
def test_memory_of_a_sweep_in_plain_xla_on_an_h100():
  made = swept("h100", "Qwen2.5-1.5B", implementation="xla_chunked")
  assert made.kernels == []
  assert made.temporary_bytes <= 2.5 * GIB, f"{made.temporary_bytes / GIB:.3f} GiB"


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


# (model, tokens of a row, window): 16384 tokens at each size.
ATTENTION = [
  *((model, 16384, None) for model in lowering_of_attention.MODELS),
  ("Qwen2.5-1.5B", 1024, None),
  ("Qwen3-4B", 16384, 4096),
]


def compiled_attention(model, length, window, which, *, parts=1):
  """Compiles attention at the size of one model, and checks its kernels.

  Args:
    model: Name of the model.
    length: Tokens of a row. Rows have 16384 together, unless they are dealt out in parts.
    window: Window of its layers.
    which: Pass of `lowering_of_attention.passes`.
    parts: Number of parts of a row, one of which is computed, with gradients.
  """
  if parts > 1:
    function, arguments = lowering_of_attention.of_part(
      mosaic_attention, model, length, parts=parts, window=window
    )
  else:
    function = lowering_of_attention.passes(mosaic_attention, window=window)[which]
    arguments = lowering_of_attention.structs(model, length, rows=TOKENS // length)
  made = aot.compile_for("h100", function, arguments)
  kernels = [kernel for kernel in made.kernels if kernel.name.startswith("attention_")]
  said = ", ".join(f"{x.name.split('_mosaic')[0]} {x.registers}" for x in kernels)
  row = f"{length} / {parts} {window}"
  print(f"h100 attention {model} {row} {which}: {made.temporary_bytes / MIB:.1f} MiB")
  print(f"  registers: {said}")
  assert [kernel for kernel in kernels if kernel.spilled_bytes] == []
  assert max(kernel.registers for kernel in kernels) <= 168
  assert not lowering_of_attention.squares_in(made.hlo, length)
  return made, {kernel.name for kernel in kernels}


@on_h100
@pytest.mark.parametrize(("model", "length", "window"), ATTENTION)
def test_attention_spills_no_register_and_holds_no_pairs_on_an_h100(model, length, window):
  made, names = compiled_attention(model, length, window, "value_and_grad")
  assert len(names) == 4  # the output, dQ, dK with dV, and their sums.
  heads, kv_heads, width = lowering_of_attention.MODELS[model]
  parts = 2 * 2 * 4 * TOKENS * kv_heads * width  # of dK and dV; two for each tile of keys.
  output = 2 * TOKENS * heads * width  # in bfloat16.
  assert made.temporary_bytes <= parts + 4 * output + 4 * MIB


@on_h100
@pytest.mark.parametrize(
  ("model", "length", "window"),
  [
    ("SmolLM2-135M", 32768, None),
    ("Qwen2.5-1.5B", 131072, None),
    ("Llama-3-8B", 32768, None),
    ("Qwen3-4B", 32768, 4096),
  ],
)
def test_attention_of_an_eighth_of_a_row_spills_no_register_on_an_h100(model, length, window):
  made, names = compiled_attention(model, length, window, "value_and_grad", parts=8)
  assert len(names) == 4
  heads, kv_heads, width = lowering_of_attention.MODELS[model]
  parts = 2 * 2 * 4 * length * kv_heads * width  # of dK and dV, which are for all keys.
  keys, queries = 4 * length * kv_heads * width, 2 * length // 8 * heads * width
  assert made.temporary_bytes <= parts + 2 * keys + 4 * queries + 4 * MIB


@on_h100
def test_the_forward_pass_of_attention_takes_little_memory_on_an_h100():
  made, names = compiled_attention("Qwen2.5-1.5B", 16384, None, "forward")
  assert len(names) == 1
  output = 2 * TOKENS * 12 * 128
  assert made.temporary_bytes <= 2 * output + 2 * MIB  # scaled queries, and the output.


# The other generation differs in its tiles: its compiler gets the sizes that the configs train.
V5E, V6E = "v5e:2x2", "v6e:2x2"


@on_tpu
@pytest.mark.parametrize(
  ("target", "model"), [(V5E, "Qwen2.5-1.5B"), (V5E, "Llama-3-8B"), (V6E, "Qwen2.5-1.5B")]
)
def test_kernels_compile_for_a_tpu(target, model):
  made = compiled(target, "pallas_tpu", model, "value_and_grad")  # which holds the forward pass.
  assert "tpu_custom_call" in made.hlo
  assert_holds_no_logits(made, model)
  assert made.temporary_bytes <= BOUNDS["mosaic_gpu", "value_and_grad"][model]  # no more there.


def operations_in_memory(hlo, shape):
  """Returns the operations that leave an array of this shape in memory: not within a fusion."""
  computations = [x for x in hlo.split("\n\n") if not x.lstrip().startswith("%fused")]
  found = re.findall(rf"= {re.escape(shape)}\S* ([\w-]+)\(", "\n".join(computations))
  return set(found) - {"parameter", "get-tuple-element"}


@on_tpu
@pytest.mark.parametrize(
  ("target", "model", "head_layout", "bound", "of_entropy"),
  [
    (V5E, "Qwen2.5-1.5B", "vd", 2.2, False),
    (V5E, "Llama-3-8B", "dv", 3.3, False),
    (V5E, "Qwen2.5-1.5B", "vd", 2.2, True),
    (V6E, "Qwen2.5-1.5B", "vd", 2.2, False),
  ],
)
def test_the_kernel_of_a_sweep_on_a_tpu(target, model, head_layout, bound, of_entropy):
  made = swept(target, model, head_layout=head_layout, differentiate_entropy=of_entropy)
  width, vocabulary = MODELS[model]
  assert "linear_logprobs_numerators" in made.hlo
  assert_holds_no_logits(made, model)
  assert made.temporary_bytes <= bound * GIB, f"{made.temporary_bytes / GIB:.3f} GiB"
  # Numerators are written by the kernel, and read and replaced within two products.
  rows = token_local.chunk_size(TOKENS, vocabulary, "tpu", arrays=1)
  assert not operations_in_memory(made.hlo, f"f32[{rows},{vocabulary}]")
  assert operations_in_memory(made.hlo, f"bf16[{rows},{vocabulary}]") <= {"custom-call"}
  for a, b in ((width, vocabulary), (vocabulary, width)):
    assert not operations_in_memory(made.hlo, f"bf16[{a},{b}]") & {"copy", "transpose"}


def test_logits_would_be_seen():
  target = "h100" if TARGET == "h100" else "v5e:2x2"
  made = aot.compile_for(
    target, passes(reference.linear_logprobs)["forward"], structs(*MODELS["SmolLM2-135M"])
  )
  assert aot.largest_array(made.hlo)[0] >= TOKENS * 49152
  assert made.temporary_bytes > 1 * GIB


# --- attention on a TPU ---

# (chip, pass, tokens of a row, model); the value and its gradients contain the forward pass.
ATTENTION_ON_TPU = [
  *((V5E, "value_and_grad", length, "Qwen2.5-1.5B") for length in (1024, 16384)),
  (V5E, "value_and_grad", 16384, "SmolLM2-135M"),
  (V5E, "forward", 16384, "Qwen2.5-1.5B"),
  (V6E, "value_and_grad", 16384, "Qwen2.5-1.5B"),
]


@on_tpu
@pytest.mark.parametrize(("target", "which", "length", "model"), ATTENTION_ON_TPU)
def test_attention_compiles_for_a_tpu(target, which, length, model):
  implementation = importlib.import_module("grpo_kernels.attention.pallas_tpu")
  device = topologies.devices(topologies.parse(target))[0]
  implementation = implementation.PallasTpu(device_kind=device.device_kind)
  function = lowering_of_attention.passes(implementation)[which]
  arguments = lowering_of_attention.structs(model, length, rows=TOKENS // length)
  made = aot.compile_for(target, function, arguments)
  print(f"{target} attention {model} T={length} {which}: {made.temporary_bytes / MIB:.3f} MiB")
  assert "tpu_custom_call" in made.hlo
  assert not re.search(rf"\b{length},{length}\b", made.hlo)
  heads, _, width = lowering_of_attention.MODELS[model]
  queries = 2 * TOKENS * heads * max(width, 128)  # bytes; narrow heads fill 128 lanes.
  # Transposed copies of the queries, the output, its cotangent and that of the queries.
  assert made.temporary_bytes <= (5 if which == "value_and_grad" else 2) * queries
