"""Adapters of the experts of mixtures: PEFT's values and files, meshes, what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers

from grpo_jax.learn import adapters, sharding
from grpo_jax.models import (
  adapter_files,
  export,
  leaves,
  lora,
  merged_tensors,
  peft_format,
  safetensors,
  transformer,
)
from grpo_jax.models.errors import ModelError
from grpo_jax.models.mixture import Mixture
from grpo_jax.models.placement import MeshPlacement
from grpo_jax.models.products import LowRank, Products
from tests.models import test_peft, tiny

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

SIZES = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 7, "head_dim": 4}
SHARED = {**SIZES, "shared_expert_intermediate_size": 9}
RANK, ALPHA = test_peft.RANK, test_peft.ALPHA


def qwen3(**more):
  """Returns a model of transformers'; its grouped products need multiples of 4."""
  model = tiny.hf_model("qwen3_moe", **{**SIZES, "num_hidden_layers": 1, **more})
  model.set_experts_implementation("eager")
  return model


def qwen2():
  model = tiny.hf_model("qwen2_moe", **SHARED, num_hidden_layers=2)
  model.set_experts_implementation("eager")
  return model


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
  return tiny.saved(qwen3(), tmp_path_factory.mktemp("one"))


# PEFT's values.


@pytest.mark.long
def test_logits_and_gradients_are_those_of_peft_in_float64(tmp_path, monkeypatch):
  adapter = test_peft.compare_in_float64(qwen2, tmp_path, monkeypatch)
  assert {*adapter} == {*"qkvo", *leaves.EXPERTS, *leaves.SHARED}


GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


@pytest.mark.parametrize(
  ("options", "kernels"),
  [
    (
      {"target_modules": ["q_proj"], "target_parameters": [GATE_UP, DOWN]},
      ("q", *leaves.EXPERTS),
    ),
    ({"target_modules": [], "target_parameters": ["gate_up_proj"]}, leaves.EXPERTS[:2]),
    ({"target_modules": [], "target_parameters": ["experts.down_proj"]}, leaves.EXPERTS[2:]),
    (
      {"target_modules": ".*(v|o)_proj", "target_parameters": [DOWN], "use_rslora": True},
      ("v", "o", leaves.EXPERTS[2]),
    ),
  ],
  ids=str,
)
def test_an_adapter_of_peft_is_read_and_written_as_it_was(options, kernels, one_layer, tmp_path):
  model = test_peft.peft_adapter(qwen3(), **options)
  model.save_pretrained(tmp_path / "theirs")
  adapter = adapter_files.read(tmp_path / "theirs", one_layer.config)
  found = adapter_files.look(tmp_path / "theirs", one_layer.config)
  assert {*adapter} == {*kernels} and found.targets == kernels
  ours = test_peft.our_logits(one_layer, adapter, found.scale)
  assert tiny.relative_error(ours, tiny.hf_logits(model, test_peft.TOKENS)) < 1e-5
  with model.disable_adapter():
    assert tiny.relative_error(tiny.hf_logits(model, test_peft.TOKENS), ours) > 0.01

  adapter_files.write(adapter, one_layer.config, found, tmp_path / "ours", base="base")
  again, before = (
    safetensors.Folder(safetensors.open_file(tmp_path / name / "adapter_model.safetensors"))
    for name in ("ours", "theirs")
  )
  assert {*again.shapes} == {*before.shapes}
  for name in before.shapes:
    np.testing.assert_array_equal(again.read(name), before.read(name))
  model = peft.PeftModel.from_pretrained(qwen3(), tmp_path / "ours")
  assert tiny.relative_error(ours, tiny.hf_logits(model, test_peft.TOKENS)) < 1e-5


# Merged kernels, on one device and on a mesh.

CONFIG = tiny.config(
  family="qwen2_moe",
  hidden_size=16,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  num_layers=2,
  tie_embeddings=False,
  qkv_bias=True,
  mixture=Mixture(4, 2, 8, normalised=True, shared_width=12),
)
OPTIONS = lora.AdapterOptions(rank=3, alpha=6.0)
INPUTS = tiny.plain(tiny.tokens((4, 6)))


@functools.cache
def base():
  return tiny.random_params(CONFIG)


@functools.cache
def adapter():
  return test_peft.random_adapter(CONFIG, OPTIONS)


def whole():
  """Returns the base with its adapter added by NumPy, expert by expert."""
  stack = {name: np.array(x, np.float64) for name, x in base()["layers"].items()}
  for name, parts in adapter().items():
    a = adapter()["expert_gate" if name == "expert_up" else name]["a"]
    for place in np.ndindex(a.shape[:-2]):
      stack[name][place] += OPTIONS.scale * np.float64(a[place]) @ parts["b"][place]
  return {**base(), "layers": {name: np.float32(x) for name, x in stack.items()}}


def loss(own, frozen, inputs, **settings):
  joined = lora.join(frozen, own, OPTIONS.scale)
  states = transformer.hidden_states(joined, CONFIG, *inputs, **settings)
  return jnp.sum(jnp.sin(states)), states


def of(own, frozen, inputs=INPUTS, **settings):
  """Returns hidden states, and the gradients of the adapter."""
  run = jax.grad(functools.partial(loss, **settings), has_aux=True)
  gradients, states = tiny.jit(run)(own, frozen, inputs)
  return states, gradients


@functools.cache
def expected():
  return of(adapter(), base(), remat="full")


@pytest.mark.long
def test_experts_are_merged_and_their_gradients_are_those_of_the_merged_kernels():
  states, gradients = expected()

  def loss_of(params):
    found = transformer.hidden_states(params, CONFIG, *INPUTS)
    return jnp.sum(jnp.sin(found)), found

  plain = tiny.jit(jax.grad(loss_of, has_aux=True))
  of_whole, wanted_states = plain(whole())
  np.testing.assert_allclose(states, wanted_states, atol=1e-5)
  assert tiny.relative_error(states, plain(base())[1]) > 0.05
  of_whole = of_whole["layers"]
  gate, up, down = (np.float64(of_whole[name]) for name in leaves.EXPERTS)
  a, s = np.float64(adapter()["expert_gate"]["a"]), OPTIONS.scale
  b = {name: np.float64(adapter()[name]["b"]).swapaxes(-1, -2) for name in leaves.EXPERTS}
  wanted = {
    ("expert_gate", "a"): s * (gate @ b["expert_gate"] + up @ b["expert_up"]),
    ("expert_gate", "b"): s * a.swapaxes(-1, -2) @ gate,
    ("expert_up", "b"): s * a.swapaxes(-1, -2) @ up,
    ("expert_down", "a"): s * down @ b["expert_down"],
  }
  for (name, part), gradient in wanted.items():
    assert tiny.relative_error(gradients[name][part], gradient) < 1e-4, (name, part)


@pytest.mark.long
def test_a_mesh_with_the_axis_expert_computes_what_one_device_does():
  mesh = sharding.make_mesh(data=1, fsdp=2, expert=2, tensor=2)
  place = lambda tree, axes: jax.device_put(tree, sharding.param_shardings(axes, mesh, shapes=tree))
  axes = jax.tree.map(lambda leaf: leaf.axes, lora.tree(CONFIG, OPTIONS))
  own, frozen = place(adapter(), axes), place(base(), transformer.logical_axes(CONFIG))
  a, b = own["expert_gate"]["a"], own["expert_up"]["b"]
  assert a.sharding.shard_shape(a.shape) == (2, 2, 8, 3)  # experts and width are divided.
  assert b.sharding.shard_shape(b.shape) == (2, 2, 3, 4)
  settings = {"products": Products(placement=MeshPlacement(mesh)), "remat": "dots"}
  states, gradients = of(own, frozen, sharding.put(INPUTS, mesh), **settings)
  np.testing.assert_allclose(states, expected()[0], atol=1e-5)
  for found, wanted in zip(*map(jax.tree.leaves, (gradients, expected()[1])), strict=True):
    assert tiny.relative_error(found, wanted) < 1e-4


def test_one_layer_of_merged_experts_is_kept_at_most():
  """Differentiation keeps no merged kernels, which would be the base once more in float32."""
  frozen = {**base(), "layers": {k: v.astype(jnp.bfloat16) for k, v in base()["layers"].items()}}
  products = Products(jnp.bfloat16)
  run = lambda own: jax.vjp(
    lambda own: loss(own, frozen, INPUTS, products=products, remat="none")[0], own
  )[1]
  kept = jax.tree.leaves(jax.eval_shape(run, adapter()))
  shapes = [x.shape for x in kept if x.dtype == jnp.float32]
  assert (2, 4, 16, 3) in shapes and (2, 4, 16, 8) not in shapes


def test_a_new_adapter_is_drawn_as_peft_does_it_for_every_expert(one_layer):
  torch.manual_seed(0)
  made = peft.LoraConfig(r=50, target_modules=[], target_parameters=[GATE_UP, DOWN])
  theirs = {
    name: weight.detach().numpy()
    for name, weight in peft.get_peft_model(qwen3(), made).named_parameters()
    if "lora_" in name
  }
  options = lora.AdapterOptions(50, targets=("mlp.experts.*",))
  own = lora.init(jax.random.key(0), one_layer.config, options)
  assert {*own["expert_up"]} == {"b"}
  for name, parts in own.items():
    assert not np.any(parts["b"]), name
  for each in peft_format.stored(one_layer.config, options):
    (found,) = [x for name, x in theirs.items() if name.replace(".default", "") == each.name]
    assert found.shape == each.shape
    if each.part == "a":
      ours = np.asarray(own[each.kernels[0]]["a"])
      assert np.std(ours) == pytest.approx(np.std(found), rel=0.05)
      assert np.abs(ours).max() == pytest.approx(np.abs(found).max(), rel=0.02)
      assert not np.array_equal(ours[0, 0], ours[0, 1]), "each expert has its own"


# Targets and files.


@pytest.mark.parametrize(
  ("patterns", "found"),
  [
    (["all"], ("q", "k", "v", "o", *leaves.EXPERTS, *leaves.SHARED)),
    (["mlp.*"], (*leaves.EXPERTS, *leaves.SHARED)),
    (["gate", "up"], (*leaves.EXPERTS[:2], *leaves.SHARED[:2])),
    (["down_proj", "q"], ("q", "expert_down", "shared_down")),
    (["mlp.experts.*"], leaves.EXPERTS),
    (["gate_up_proj"], leaves.EXPERTS[:2]),
    (["mlp.experts.gate_proj", "experts.up_proj"], leaves.EXPERTS[:2]),
    (["mlp.experts.down_proj"], leaves.EXPERTS[2:]),
    (["expert_*"], leaves.EXPERTS),
    (["shared_gate", "mlp.shared_expert.down_proj"], ("shared_gate", "shared_down")),
  ],
)
def test_targets_of_a_mixture(patterns, found):
  options = lora.AdapterOptions(2, targets=lora.targets(patterns))
  assert lora.kernels(CONFIG, options) == found
  assert tuple(lora.tree(CONFIG, options)) == found


@pytest.mark.parametrize(
  ("config", "patterns", "message"),
  [
    (CONFIG, ["gate", "down"], "has expert_gate of a mixture without expert_up: .* one tensor"),
    (CONFIG, ["experts.up_proj"], "has expert_up of a mixture without expert_gate"),
    (tiny.config(), ["q", "mlp.experts.*"], "has expert_gate, but .* has no mixture of experts"),
    (tiny.config(), ["shared_up"], "has shared_up, but .* has no mixture of experts"),
  ],
)
def test_targets_that_a_model_does_not_have_are_refused(config, patterns, message):
  with pytest.raises(ValueError, match=f"model.lora.targets {message}"):
    lora.tree(config, lora.AdapterOptions(2, targets=lora.targets(patterns)))


def test_merged_files_are_those_of_merged_weights(tmp_path):
  """From devices and, tensor by tensor, from files: expert for expert, as transformers reads."""
  joined = lora.join(base(), adapter(), OPTIONS.scale)
  export.to_huggingface(joined, CONFIG, tmp_path / "merged")
  export.to_huggingface(base(), CONFIG, tmp_path / "base")
  adapter_files.write(adapter(), CONFIG, OPTIONS, tmp_path / "adapter", base="base")
  files = safetensors.open_folder(tmp_path / "merged")
  on_host = merged_tensors.MergedTensors(
    safetensors.open_folder(tmp_path / "base"),
    adapter_files.FolderAdapter(tmp_path / "adapter", CONFIG),
    CONFIG,
    rounded=lambda values, leaf: values,
  )
  stack = whole()["layers"]
  names = [each for each in leaves.stored(CONFIG) if each.path[-1] in adapter()]
  assert len(names) == 2 * (4 + 3 * 4 + 3)
  for each in names:
    wanted = stack[each.path[-1]][each.index].T
    assert tiny.relative_error(files.read(each.name), wanted) < 1e-6, each.name
    assert tiny.relative_error(on_host.read(each.name), wanted) < 1e-6, each.name
  model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
  gate_up = model.model.layers[1].mlp.experts.gate_up_proj[3].detach().numpy()
  np.testing.assert_allclose(gate_up[8:], stack["expert_up"][1, 3].T, atol=1e-6)


def test_the_norm_and_the_share_of_an_adapter_count_its_experts():
  joined = lora.join(base(), adapter(), OPTIONS.scale)["layers"]
  kernels = {name: x for name, x in joined.items() if isinstance(x, LowRank)}
  changes = [whole()["layers"][name] - np.asarray(base()["layers"][name]) for name in kernels]
  norm = sum(np.sum(np.square(x, dtype=np.float64)) for x in changes)
  found = adapters.squared_norm(adapter(), scale=OPTIONS.scale)
  assert float(found) == pytest.approx(norm, rel=1e-4)
  assert {*lora.merged_always(kernels)} == {*leaves.EXPERTS}
  of_experts = lora.merged_always(kernels)
  assert float(lora.merged_share(of_experts, jnp.float32)) == pytest.approx(1, abs=1e-3)
  rounded = lambda x: x.base.astype(jnp.bfloat16)
  small = {name: LowRank(rounded(x), x.a, 1e-6 * x.b, 1.0) for name, x in of_experts.items()}
  assert float(lora.merged_share(small, jnp.bfloat16)) == 0


def test_files_that_do_not_fit_are_refused(one_layer, tmp_path):
  options = lora.AdapterOptions(2, targets=("mlp.experts.*",))
  made = test_peft.random_adapter(one_layer.config, options)
  adapter_files.write(made, one_layer.config, options, tmp_path / "a", base="base")
  with pytest.raises(ModelError, match="has expert_gate, but .* has no mixture of experts"):
    adapter_files.look(tmp_path / "a", tiny.config(num_layers=1))
  file = tmp_path / "a" / "adapter_config.json"
  text = file.read_text()
  file.write_text(text.replace("mlp.experts.down_proj", "mlp.gate.weight"))
  with pytest.raises(ModelError, match="target_parameters needs those of experts: mlp.experts.do"):
    adapter_files.look(tmp_path / "a", one_layer.config)
  file.write_text(text.replace('"mlp.experts.down_proj",', ""))
  with pytest.raises(ModelError, match="unexpected: .*experts.base_layer.lora_A"):
    adapter_files.look(tmp_path / "a", one_layer.config)
