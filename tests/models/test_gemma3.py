"""Gemma 3 against transformers: logits and all gradients in float64, files, refusals."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from transformers.models.gemma3 import modeling_gemma3

from grpo_jax.models import (
  adapter_files,
  export,
  layers,
  loading,
  lora,
  multimodal,
  safetensors,
)
from grpo_jax.models import config as model_config
from grpo_jax.models.config import LayerKind, Rope
from grpo_jax.models.errors import ModelError
from grpo_jax.models.products import Products
from tests.models import tiny

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = {"num_hidden_layers": 3, "head_dim": 6, "query_pre_attn_scalar": 6, "sliding_window": 5}
# As of transformers 4: what a model card of the hub has.
OLD_ROPE = {
  "rope_theta": 50.0,
  "rope_local_base_freq": 9.0,
  "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
CASES = {
  "as it is": {},
  "pattern of 2": {"sliding_window_pattern": 2, "rms_norm_eps": 0.05},
  "pattern of 1": {"sliding_window_pattern": 1, "num_hidden_layers": 2},
  "all slide": {"layer_types": [SLIDING] * 2, "num_hidden_layers": 2},
  "irregular": {"layer_types": [FULL, SLIDING, SLIDING], "head_dim": 14},
  "one layer": {"num_hidden_layers": 1, "tie_word_embeddings": False},
  "window of 2": {"sliding_window": 2, "layer_types": [FULL, SLIDING], "num_hidden_layers": 2},
  "window beyond": {"sliding_window": 64, "sliding_window_pattern": 3, "num_key_value_heads": 6},
  "wide heads": {"head_dim": 32, "hidden_size": 12, "query_pre_attn_scalar": 32},
  "query scale": {"query_pre_attn_scalar": 21, "sliding_window_pattern": 2},
  "one key head": {"num_key_value_heads": 1, "sliding_window_pattern": 2, "attention_bias": True},
  "linear, old style": {**OLD_ROPE, "sliding_window_pattern": 2},
}
TOKENS = 1 + tiny.tokens((2, 19), vocab_size=60)  # torch skips the gradient of padding, id 0.
WEIGHTS = np.random.default_rng(2).standard_normal((2, 19, 61))


def made(**options):
  """Returns transformers' model with every weight random; norms, which multiply 1 + w, around 0."""
  config = transformers.Gemma3TextConfig(**{**tiny.SIZES, **SIZES, **options})
  model = transformers.Gemma3ForCausalLM._from_config(config, attn_implementation="eager").eval()
  generator = torch.Generator().manual_seed(0)
  with torch.no_grad():
    for weight in model.parameters():
      weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15)
  return model


OURS = """
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
jnp.float32 = jnp.float64  # the model's code says float32 where it wants its highest precision.
from grpo_jax.models import leaves, loading, rotary, transformer



def frequencies(size, theta, scaling):
  return theta ** (-np.arange(0, size, 2) / size) / getattr(scaling, "factor", 1.0)


rotary.frequencies = frequencies
place = pathlib.Path(sys.argv[1])
data = np.load(place / "data.npz")


def loss(params, config):
  tokens = jnp.asarray(data["tokens"])
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden = transformer.hidden_states(params, config, tokens, positions, jnp.ones_like(tokens))
  head, layout = transformer.head(params, config)
  logits = hidden @ (head.T if layout == "vd" else head)
  return jnp.sum(logits * data["weights"]), logits


quick = {"xla_backend_optimization_level": 0}
found = jax.jit(
  jax.value_and_grad(loss, has_aux=True), static_argnums=1, compiler_options=quick
)
for folder in sorted(each for each in place.iterdir() if each.is_dir()):
  loaded = loading.load(folder, dtype=np.float64)
  (_, logits), gradients = found(loaded.params, loaded.config)
  named = {}
  for each in leaves.stored(loaded.config):
    leaf = gradients
    for key in each.path:
      leaf = leaf[key]
    leaf = leaf if each.layer is None else leaf[each.layer]
    named[each.name] = leaf.T if each.leaf.is_kernel else leaf
  np.savez(f"{folder}.npz", **{"the logits": logits, **named})
"""


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
  """Returns our logits and gradients of all cases, by the names of tensors, in float64."""
  place = tmp_path_factory.mktemp("gemma")
  np.savez(place / "data.npz", tokens=TOKENS, weights=WEIGHTS)
  for case, options in CASES.items():
    made(**options).save_pretrained(place / case)
    if "rope_scaling" in options:
      in_old_style(place / case / "config.json")
  command = [sys.executable, "-c", OURS, str(place)]
  done = subprocess.run(command, capture_output=True, text=True, cwd=pathlib.Path.cwd())
  assert done.returncode == 0, done.stderr
  return {case: read(place / f"{case}.npz") for case in CASES}


def read(file):
  with np.load(file) as found:
    return dict(found)


def in_old_style(file):
  """Rewrites a config.json as transformers 4 has it."""
  content = json.loads(file.read_text())
  del content["rope_parameters"], content["layer_types"]
  file.write_text(json.dumps({**content, **OLD_ROPE}))


def double(model, monkeypatch):
  """Makes transformers compute in float64 where its code says float32."""
  model = model.double()
  text = model.model
  text.embed_tokens.embed_scale = torch.tensor(model.config.hidden_size**0.5, dtype=torch.float64)
  size = model.config.head_dim
  for kind in set(model.config.layer_types):
    settings = model.config.rope_parameters[kind]
    powers = -torch.arange(0, size, 2, dtype=torch.float64) / size
    table = settings["rope_theta"] ** powers / settings.get("factor", 1.0)
    setattr(text.rotary_emb, f"{kind}_inv_freq", table)
  for name in ("float32", "float"):
    monkeypatch.setattr(torch, name, torch.float64)
  monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
  return model


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_logits_and_all_gradients_are_those_of_transformers_in_float64(case, ours, monkeypatch):
  model = double(made(**CASES[case]), monkeypatch)
  logits = model(torch.tensor(TOKENS)).logits
  assert logits.dtype == torch.float64
  (logits * torch.tensor(WEIGHTS)).sum().backward()
  theirs = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
  found = ours[case]
  assert {*found} == {"the logits", *theirs}
  for name, wanted in {"the logits": logits.detach().numpy(), **theirs}.items():
    assert tiny.relative_error(found[name], wanted) < 1e-9, name


def test_the_scale_of_embeddings_is_rounded_as_transformers_rounds_it():
  """In bfloat16 √24 is 4.90625, 0.15 % more, whatever the embedding."""
  table = torch.randn((61, 24), generator=torch.Generator().manual_seed(0)).bfloat16()
  theirs = modeling_gemma3.Gemma3TextScaledWordEmbedding(61, 24, 0, embed_scale=24**0.5).bfloat16()
  theirs.weight.data = table
  wanted = theirs(torch.tensor(TOKENS)).detach()
  config = tiny.config(**tiny.GEMMA3)

  def ours(dtype):
    arrays = jnp.asarray(table.float().numpy()), jnp.asarray(TOKENS)
    return layers.embed(*arrays, config=config, products=Products(dtype))

  got = ours("bfloat16")
  np.testing.assert_array_equal(got.astype(jnp.bfloat16).astype(np.float32), wanted.float())
  assert float(jnp.abs(got / ours("float32") - 1).max()) == pytest.approx(1.485e-3, rel=1e-3)


VISION = {
  "hidden_size": 16,
  "intermediate_size": 16,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "image_size": 28,
  "patch_size": 14,
}
# Beginnings of names in the files of the hub and in those that transformers 5 may save.
HUB = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
SAVED = {"model.": "model.language_model."}


@pytest.fixture(scope="module")
def around(tmp_path_factory):
  """Returns transformers' model of images and text, and its folder."""
  text = made(sliding_window_pattern=2).config.to_dict()
  config = transformers.Gemma3Config(
    text_config=text, vision_config=VISION, mm_tokens_per_image=4, eos_token_id=[1, 3]
  )
  model = transformers.Gemma3ForConditionalGeneration(config).eval()
  own = made(sliding_window_pattern=2).state_dict()
  model.model.language_model.load_state_dict(
    {name.removeprefix("model."): x for name, x in own.items() if name != "lm_head.weight"}
  )
  model.tie_weights()
  folder = tmp_path_factory.mktemp("around")
  model.save_pretrained(folder)
  return model, folder


@pytest.mark.parametrize("names", [HUB, SAVED], ids=["hub", "saved"])
def test_the_text_model_inside_of_a_multimodal_folder_is_read(names, around, tmp_path):
  model, folder = around
  found = safetensors.open_folder(folder)
  tensors = []
  for name in found.shapes:
    own = multimodal.own_name(name, {"architectures": ["Gemma3ForConditionalGeneration"]})
    begin = next((each for each in names if own and own.startswith(each)), "")
    new = names[begin] + own.removeprefix(begin) if own else name
    of = found.read(name)
    tensors.append(safetensors.ToWrite(new, of.shape, of.dtype, lambda of=of: of))
  assert any("vision_tower" in each.name for each in tensors)
  safetensors.write_folder(tmp_path, tensors)
  content = json.loads((folder / "config.json").read_text())
  for name in ("head_dim", "hidden_activation", "rms_norm_eps", "tie_word_embeddings"):
    if content["text_config"].get(name) == model_config.FAMILIES_BY_NAME[
      "gemma3_text"
    ].DEFAULTS.get(name):
      del content["text_config"][name]
  (tmp_path / "config.json").write_text(json.dumps(content))
  assert loading.look(tmp_path).num_layers == 3
  loaded = loading.load(tmp_path)
  tokens = TOKENS[:1]
  got = tiny.logits(loaded.params, loaded.config, *tiny.plain(tokens))
  with torch.no_grad():
    wanted = model(torch.tensor(tokens)).logits.numpy()
  assert tiny.relative_error(got, wanted) < 1e-5
  export.to_huggingface(loaded.params, loaded.config, tmp_path / "text", source_directory=tmp_path)
  alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
  assert type(alone) is transformers.Gemma3ForCausalLM and alone.config.eos_token_id == [1, 3]
  assert tiny.relative_error(tiny.hf_logits(alone, tokens), wanted) < 1e-5


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_finds_the_kernels_of_an_adapter_in_the_model_of_images_and_text(around, tmp_path):
  _, folder = around
  loaded, options = loading.load(folder), lora.AdapterOptions(3, 5.0)
  rng = np.random.default_rng(1)
  draw = lambda leaf: (rng.standard_normal(leaf.shape) * 0.15).astype(np.float32)
  adapter = jax.tree.map(draw, lora.tree(loaded.config, options))
  adapter_files.write(adapter, loaded.config, options, tmp_path, base=str(folder))
  joined, tokens = lora.join(loaded.params, adapter, options.scale), TOKENS[:1]
  ours = tiny.logits(joined, loaded.config, *tiny.plain(tokens))
  config = peft.LoraConfig.from_pretrained(tmp_path)
  config.exclude_modules = ".*vision_tower.*"  # as docs/lora.md says; without it PEFT warns.
  base = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
  names = multimodal.peft_names(json.loads((folder / "config.json").read_text()))
  model = peft.PeftModel.from_pretrained(base, tmp_path, config=config, key_mapping=names)
  with torch.no_grad():
    assert tiny.relative_error(model(torch.tensor(tokens)).logits.numpy(), ours) < 1e-5
    with model.disable_adapter():
      assert tiny.relative_error(model(torch.tensor(tokens)).logits.numpy(), ours) > 0.1


def test_two_tensors_of_one_name_are_refused(around, tmp_path):
  _, folder = around
  one = np.zeros(3, np.float32)
  names = ("language_model.model.norm.weight", "model.language_model.norm.weight")
  tensors = [safetensors.ToWrite(name, one.shape, one.dtype, lambda: one) for name in names]
  safetensors.write_folder(tmp_path, tensors)
  (tmp_path / "config.json").write_text((folder / "config.json").read_text())
  with pytest.raises(ModelError, match="two of its tensors are model.norm.weight"):
    loading.open_tensors(tmp_path, loading.read_config(tmp_path))


HF = {
  "architectures": ["Gemma3ForCausalLM"],
  "model_type": "gemma3_text",
  "num_hidden_layers": 6,
  "hidden_size": 24,
}
AROUND = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}


def test_what_text_config_leaves_out_is_as_in_transformers():
  """The config.json of the hub's 4b and 27b, without the parts that do not matter here."""
  rope = {"factor": 8.0, "rope_type": "linear"}
  four = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
  more = {"model_type": "gemma3_text", "rope_scaling": rope, "sliding_window": 1024}
  hf = {**AROUND, "eos_token_id": [1, 106], "text_config": {**four, **more}, "vision_config": {}}
  found = model_config.from_hf(hf)
  wanted = transformers.Gemma3TextConfig(**four, **more).to_dict()
  assert found == model_config.from_hf({**wanted, "architectures": ["Gemma3ForCausalLM"]})
  assert (found.vocab_size, found.head_dim, found.num_kv_heads) == (262208, 256, 4)
  assert found.kinds[:6] == (LayerKind(1024, 1),) * 5 + (LayerKind(),)
  assert found.ropes[1] == Rope(1e4) and found.rope_scaling == model_config.RopeScaling("linear", 8)
  heads = {"num_attention_heads": 32, "head_dim": 128, "query_pre_attn_scalar": 168}
  assert model_config.from_hf({**hf, "text_config": heads}).query_scalar == 168
  assert model_config.from_hf(model_config.to_hf(found)) == found
  assert (
    model_config.from_hf({**AROUND, "architectures": None, "text_config": four}).num_layers == 34
  )


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping needs null; soft caps"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping needs null; soft caps"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention needs false"),
    ({"hidden_activation": "gelu"}, "hidden_activation needs 'gelu_pytorch_tanh'"),
    ({"hidden_act": "silu"}, "hidden_act needs 'gelu_pytorch_tanh'"),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar needs a finite number above 0"),
    ({"sliding_window": None}, "sliding_window needs a whole number, since layers slide"),
    (
      {"layer_types": [FULL] * 6, "sliding_window_pattern": 6},
      "sliding_window_pattern needs the pattern of layer_types",
    ),
    ({"num_experts": 4}, "mixture of experts"),
    ({"architectures": ["Gemma3nForCausalLM"]}, "Gemma3nForCausalLM' is not supported"),
    ({**AROUND, "text_config": {"model_type": "gemma2"}}, "text_config has model_type 'gemma2'"),
  ],
  ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_gemma_3_does_not_have_is_refused_by_name(change, message):
  assert model_config.from_hf(HF).num_layers == 6
  with pytest.raises(ModelError, match=message):
    model_config.from_hf({**HF, **change})


def test_a_multimodal_classifier_is_refused():
  with pytest.raises(ModelError, match="Gemma3ForSequenceClassification' is not a supported"):
    model_config.classifier_from_hf({**HF, "architectures": ["Gemma3ForSequenceClassification"]})
