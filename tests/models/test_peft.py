"""Adapters as PEFT folders: PEFT's own models, of torch, compute what ours do."""

import dataclasses
import functools
import pathlib
import subprocess
import sys

import jax
import numpy as np
import peft
import pytest
import torch
import transformers

from grpo_jax.models import adapter_files, export, lora, peft_format, safetensors, transformer
from tests.models import tiny

# PEFT 0.21 uses names that transformers 5 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

TOKENS = tiny.tokens((2, 17))
RANK, ALPHA = 3, 5.0


@pytest.fixture(scope="module", params=["gemma3_text", "llama", "qwen2", "qwen3", "smollm3"])
def base(request, tmp_path_factory):
  """The name of a family, and ours of a random model."""
  options = {
    "gemma3_text": {"sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 21},
    "smollm3": {"pad_token_id": 0, "no_rope_layer_interval": 2},
  }.get(request.param, {})
  make = lambda: tiny.hf_model(request.param, **options)
  return make, tiny.saved(make(), tmp_path_factory.mktemp(request.param))


def random_adapter(config, options, seed=1):
  rng = np.random.default_rng(seed)
  draw = lambda leaf: (rng.standard_normal(leaf.shape) * 0.15).astype(np.float32)
  return jax.tree.map(draw, lora.tree(config, options))


def our_logits(loaded, adapter, scale):
  joined = lora.join(loaded.params, adapter, scale)
  return _run(joined, loaded.config)


@functools.partial(tiny.jit, static_argnums=1)
def _run(params, config):
  hidden = transformer.hidden_states(params, config, *tiny.plain(TOKENS))
  head, layout = transformer.head(params, config)
  return hidden @ (head.T if layout == "vd" else head)


@pytest.mark.long
def test_peft_computes_the_logits_of_our_folder(base, tmp_path):
  make, loaded = base
  options = lora.AdapterOptions(RANK, ALPHA, rank_stabilized=True)
  adapter = random_adapter(loaded.config, options)
  adapter_files.write(adapter, loaded.config, options, tmp_path / "adapter", base="base")
  ours = our_logits(loaded, adapter, options.scale)
  model = peft.PeftModel.from_pretrained(make(), tmp_path / "adapter")
  assert tiny.relative_error(ours, tiny.hf_logits(model, TOKENS)) < 1e-5
  with model.disable_adapter():
    assert tiny.relative_error(tiny.hf_logits(model, TOKENS), ours) > 0.1  # the adapter counts.
  merged = model.merge_and_unload()
  assert tiny.relative_error(ours, tiny.hf_logits(merged, TOKENS)) < 1e-5

  joined = lora.join(loaded.params, adapter, options.scale)
  export.to_huggingface(joined, loaded.config, tmp_path / "export")
  exported = safetensors.open_folder(tmp_path / "export")
  theirs = merged.state_dict()
  for name in exported.shapes:
    assert tiny.relative_error(exported.read(name), theirs[name].numpy()) < 1e-6, name


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_peft_adapts_the_attention_of_a_mixture(family, tmp_path):
  sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 7}
  shared = {"shared_expert_intermediate_size": 9} if family == "qwen2_moe" else {}

  def eager(model):  # torch's grouped products need widths that are multiples of 4.
    model.set_experts_implementation("eager")
    return model

  make = lambda: eager(tiny.hf_model(family, **sizes, **shared))
  loaded = tiny.saved(make(), tmp_path / "base")
  options = lora.AdapterOptions(RANK, ALPHA, ("q", "k", "v", "o"))
  adapter = random_adapter(loaded.config, options)
  adapter_files.write(adapter, loaded.config, options, tmp_path / "adapter", base="base")
  ours = our_logits(loaded, adapter, options.scale)
  model = peft.PeftModel.from_pretrained(make(), tmp_path / "adapter")
  assert tiny.relative_error(ours, tiny.hf_logits(model, TOKENS)) < 1e-5
  with model.disable_adapter():
    assert tiny.relative_error(tiny.hf_logits(model, TOKENS), ours) > 0.05  # the adapter counts.

  joined = lora.join(loaded.params, adapter, options.scale)
  export.to_huggingface(joined, loaded.config, tmp_path / "export")
  merged = eager(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export"))
  assert tiny.relative_error(ours, tiny.hf_logits(merged, TOKENS)) < 1e-5


@pytest.mark.parametrize("without", [False, True])
@pytest.mark.parametrize("kernel", lora.MODULES)
def test_peft_finds_every_kernel(kernel, without, one_layer, tmp_path):
  """A kernel alone, and all the others: what PEFT adds to each weight is s A B."""
  targets = tuple(each for each in lora.MODULES if (each == kernel) != without)
  options = lora.AdapterOptions(RANK, ALPHA, targets)
  adapter = random_adapter(one_layer.config, options)
  adapter_files.write(adapter, one_layer.config, options, tmp_path, base="base")
  model = peft.PeftModel.from_pretrained(tiny.hf_model("llama", num_hidden_layers=1), tmp_path)
  found = deltas(model)
  assert {*found} == {*targets}
  for each in targets:
    wanted = options.scale * adapter[each]["a"][0] @ adapter[each]["b"][0]
    assert tiny.relative_error(found[each], wanted.T) < 1e-6
  read = adapter_files.read(tmp_path, one_layer.config)
  assert jax.tree.all(jax.tree.map(np.array_equal, read, adapter))
  assert adapter_files.look(tmp_path, one_layer.config) == adapter_files.options(tmp_path)
  assert adapter_files.options(tmp_path) == dataclasses.replace(options, targets=targets)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
  return tiny.saved(tiny.hf_model("llama", num_hidden_layers=1), tmp_path_factory.mktemp("one"))


def deltas(model):
  """Returns what PEFT adds to the weights of the first layer, by our names of kernels."""
  found = {}
  for kernel, module in lora.MODULES.items():
    layer = model.get_submodule(f"base_model.model.model.layers.0.{module}")
    if hasattr(layer, "get_delta_weight"):
      found[kernel] = layer.get_delta_weight("default").detach().numpy()
  return found


def peft_adapter(base, **options):
  """Returns a model of PEFT's with a random adapter."""
  made = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", **options)
  model = peft.get_peft_model(base, made).eval()
  generator = torch.Generator().manual_seed(3)
  with torch.no_grad():
    for name, weight in model.named_parameters():
      if "lora_" in name:
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15)
  return model


@pytest.mark.parametrize(
  "options",
  [
    {"target_modules": "all-linear", "use_rslora": True},
    {"target_modules": ["q_proj", "mlp.up_proj"], "use_rslora": True},
    {"target_modules": r".*\.(k_proj|down_proj)", "lora_dropout": 0.5},
    {"target_modules": ["o_proj"], "init_lora_weights": "gaussian"},
    {"target_modules": "all-linear", "exclude_modules": ["gate_proj", "self_attn.q_proj"]},
    {"target_modules": ["model.layers.0.mlp.down_proj", "v_proj"]},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*v_proj"},
  ],
  ids=str,
)
def test_an_adapter_of_peft_is_read(options, one_layer, tmp_path):
  model = peft_adapter(tiny.hf_model("llama", num_hidden_layers=1), **options)
  model.save_pretrained(tmp_path)
  scale = adapter_files.look(tmp_path, one_layer.config).scale
  adapter = adapter_files.read(tmp_path, one_layer.config)
  wanted = deltas(model)
  assert {*adapter} == {*wanted}
  for kernel, own in adapter.items():
    found = scale * np.asarray(own["a"][0]) @ np.asarray(own["b"][0])
    assert tiny.relative_error(found.T, wanted[kernel]) < 1e-6


def test_ours_computes_the_logits_of_an_adapter_of_peft(base, tmp_path):
  make, loaded = base
  model = peft_adapter(make(), target_modules="all-linear", use_rslora=True)  # as above.
  model.save_pretrained(tmp_path)
  adapter = adapter_files.read(tmp_path, loaded.config)
  ours = our_logits(loaded, adapter, adapter_files.options(tmp_path).scale)
  assert tiny.relative_error(ours, tiny.hf_logits(model, TOKENS)) < 1e-5


GRADIENTS = """
import sys

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
jnp.float32 = jnp.float64  # the model's code says float32 where it wants its highest precision.
from grpo_jax.models import loading, lora, rotary, transformer

angles = lambda size, theta, _: theta ** (-np.arange(0, size, 2) / size)
rotary.frequencies = angles
data = dict(np.load(sys.argv[1]))
loaded = loading.load(sys.argv[2], dtype=np.float64)
adapter = {}
for name, values in data.items():
  if "/" in name:
    kernel, part = name.split("/")
    adapter.setdefault(kernel, {})[part] = jnp.asarray(values)


def loss(adapter):
  tokens = jnp.asarray(data["tokens"])
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  params = lora.join(loaded.params, adapter, float(data["scale"]))
  ones = jnp.ones_like(tokens)
  hidden = transformer.hidden_states(params, loaded.config, tokens, positions, ones)
  head, layout = transformer.head(params, loaded.config)
  logits = hidden @ (head.T if layout == "vd" else head)
  return jnp.sum(logits * data["weights"]), logits


quick = {"xla_backend_optimization_level": 0}
compute = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=quick)
(_, logits), found = compute(adapter)
made = {f"{kernel}/{part}": x for kernel, own in found.items() for part, x in own.items()}
np.savez(sys.argv[1], logits=logits, **made)
"""


def double(model, monkeypatch):
  """Makes transformers compute in float64 where its code says float32."""
  model = model.double()
  rotary = model.base_model.model.model.rotary_emb
  size = 2 * len(rotary.inv_freq)
  rotary.inv_freq = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
  monkeypatch.setattr(torch, "float32", torch.float64)
  monkeypatch.setattr(torch, "float", torch.float64)
  monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
  return model


@pytest.mark.long
def test_gradients_of_an_adapter_are_those_of_peft_in_float64(tmp_path, monkeypatch):
  compare_in_float64(lambda: tiny.hf_model("qwen3"), tmp_path, monkeypatch)


def compare_in_float64(make, folder, monkeypatch):
  """Compares logits and the gradients of a random adapter on all kernels with those of PEFT.

  Args:
    make: Function that returns transformers' model.
    folder: Folder for files.
    monkeypatch: Fixture of the test.

  Returns:
    The adapter.
  """
  loaded = tiny.saved(make(), folder / "base")
  options = lora.AdapterOptions(RANK, ALPHA)
  adapter = random_adapter(loaded.config, options)
  adapter_files.write(adapter, loaded.config, options, folder / "adapter", base="base")
  weights = np.random.default_rng(2).standard_normal((*TOKENS.shape, 61))
  own = {f"{k}/{p}": np.float64(x) for k, parts in adapter.items() for p, x in parts.items()}
  file = folder / "data.npz"
  np.savez(file, tokens=TOKENS, scale=options.scale, weights=weights, **own)
  command = [sys.executable, "-c", GRADIENTS, str(file), str(folder / "base")]
  done = subprocess.run(command, capture_output=True, text=True, cwd=pathlib.Path.cwd())
  assert done.returncode == 0, done.stderr
  ours = np.load(file)

  model = peft.PeftModel.from_pretrained(make(), folder / "adapter", is_trainable=True)
  model = double(model, monkeypatch)
  logits = model(torch.tensor(TOKENS)).logits
  assert logits.dtype == torch.float64
  assert tiny.relative_error(ours["logits"], logits.detach().numpy()) < 1e-11
  (logits * torch.tensor(weights)).sum().backward()
  theirs = {
    name.replace(".default", ""): weight.grad.numpy()
    for name, weight in model.named_parameters()
    if weight.grad is not None
  }
  found = peft_format.stored(loaded.config, options)
  assert {each.name for each in found} == {*theirs}
  for each in found:
    gradients = [ours[f"{kernel}/{each.part}"][each.layer] for kernel in each.kernels]
    gradient = each.in_file(gradients, np.float64)
    assert tiny.relative_error(gradient, theirs[each.name]) < 1e-9, each.name
  with model.disable_adapter():
    other = model(torch.tensor(TOKENS)).logits.detach().numpy()
  assert tiny.relative_error(ours["logits"], other) > 0.05, "the adapter counts"
  return adapter
