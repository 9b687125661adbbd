"""config.json → ModelConfig and back."""

import copy
import dataclasses
import itertools
import re

import numpy as np
import pytest
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from grpo_jax.models import config as model_config
from grpo_jax.models import rotary, unsupported
from grpo_jax.models.errors import ModelError

LLAMA = {
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": 128,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
}
LLAMA3_ROPE = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 64,
}


def test_both_styles_of_rotary_settings_read_alike():
  old = model_config.from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE})
  new = model_config.from_hf({**LLAMA, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}})
  assert old == new
  assert old.rope_theta == 5e5
  assert old.rope_scaling == model_config.RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


def test_old_spelling_type_is_read_as_rope_type():
  config = model_config.from_hf({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}})
  assert config.rope_scaling == model_config.RopeScaling("linear", 2.0)


def spellings():
  """Yields the rotary settings of a config.json, in every place of each."""
  plain, linear = {"rope_type": "default"}, {"type": "linear", "factor": 2.0}
  bare = {name: LLAMA3_ROPE[name] for name in LLAMA3_ROPE if not name.startswith("original")}
  parts = (None, {}, plain, linear, LLAMA3_ROPE, bare, {"factor": 2.0})
  for scaling, parameters in itertools.product(parts, parts):
    thetas = itertools.product(
      (None, 500.0) if scaling else (None,), (None, 500.0) if parameters else (None,), (None, 700)
    )
    for theirs, new, top in thetas:
      for original in (None, 64, 96) if LLAMA3_ROPE in (scaling, parameters) else (None,):
        yield {
          "rope_scaling": scaling and {**scaling, **({"rope_theta": theirs} if theirs else {})},
          "rope_parameters": parameters and {**parameters, **({"rope_theta": new} if new else {})},
          **({"rope_theta": top} if top else {}),
          **({"original_max_position_embeddings": original} if original else {}),
        }


def test_rotary_settings_are_read_as_in_transformers_or_refused():
  """Frequencies of hundreds of spellings; those that contradict themselves are refused."""
  equal = refused = 0
  for spelling in spellings():
    content = {**LLAMA, **copy.deepcopy(spelling)}
    theirs = transformers.LlamaConfig(**copy.deepcopy(content))
    try:
      found = model_config.from_hf(content)
    except ModelError as error:
      assert re.search("otherwise; rope_scaling|needs \\['original_max", str(error)), error
      refused += 1
      continue
    wanted = LlamaRotaryEmbedding(theirs).inv_freq.numpy()
    got = rotary.frequencies(found.head_dim, found.rope_theta, found.rope_scaling)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, err_msg=str(spelling))
    equal += 1
  assert equal > 70 and refused > 100


@pytest.mark.parametrize(
  ("given", "message"),
  [
    (
      {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5e2}},
      "rope_theta is 500.0 in rope_parameters and 10000.0 otherwise",
    ),
    (
      {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": LLAMA3_ROPE},
      "rope_type is 'llama3' in rope_parameters and 'linear' otherwise",
    ),
    (
      {"rope_scaling": LLAMA3_ROPE, "original_max_position_embeddings": 32},
      "original_max_position_embeddings is 32 at the top level and 64 otherwise",
    ),
    (
      {"rope_scaling": {"type": "linear", "rope_type": "default"}},
      "type is 'linear' in rope_scaling and 'default' otherwise",
    ),
    (
      {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}},
      "rope_theta is 1000000.0 at the top level and 10000.0 otherwise",
    ),
  ],
)
def test_rotary_settings_that_contradict_each_other_are_refused(given, message):
  with pytest.raises(ModelError, match=message):
    model_config.from_hf({**LLAMA, **given})


def test_the_scaling_of_a_model_card_is_added_to_a_config_of_transformers_5():
  new = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 5e5}
  card = {"rope_scaling": {"type": "linear", "factor": 2.0}}
  found = model_config.from_hf({**LLAMA, **new, **card})
  assert (found.rope_theta, found.rope_scaling) == (5e5, model_config.RopeScaling("linear", 2.0))


def test_fields_that_are_left_out_are_what_transformers_assumes():
  bare = {name: LLAMA[name] for name in LLAMA if name != "num_key_value_heads"}
  config = model_config.from_hf(bare)
  assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 8, 10000.0)
  assert (config.tie_embeddings, config.rms_norm_eps) == (False, 1e-6)
  qwen3 = model_config.from_hf({**bare, "architectures": ["Qwen3ForCausalLM"]})
  assert (qwen3.head_dim, qwen3.qk_norm) == (128, True)
  qwen2 = model_config.from_hf({**bare, "architectures": ["Qwen2ForCausalLM"]})
  assert (qwen2.qkv_bias, qwen2.o_bias) == (True, False)


def test_family_is_taken_from_model_type_when_no_architecture_is_named():
  bare = {name: LLAMA[name] for name in LLAMA if name != "architectures"}
  assert model_config.from_hf({**bare, "model_type": "qwen2"}).family == "qwen2"


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM.*supported are.*Llama"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"hidden_act": "relu"}, "hidden_act='relu'.*silu"),
    ({"num_local_experts": 8}, "mixture of experts"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_scaling": {"rope_type": "su", "factor": 4.0}}, "'su'.*default.*linear.*llama3"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' needs .'original_max"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"vocab_size": None}, "lacks.*vocab_size"),
    ({"num_key_value_heads": 3}, "multiple"),
    ({"head_dim": 7}, "even head_dim"),
  ],
  ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused_by_name(change, message):
  with pytest.raises(ValueError, match=message):
    model_config.from_hf({**LLAMA, **change})


@pytest.mark.parametrize("architecture", sorted(model_config.FAMILIES))
def test_to_hf_and_from_hf_are_inverse(architecture):
  hf = {
    **LLAMA,
    "architectures": [architecture],
    "head_dim": 10,
    # The base for OLMo 3's windows; in the old style all layers have one.
    "rope_theta": 5e5 if architecture == "Olmo3ForCausalLM" else 123.0,
    "rope_scaling": LLAMA3_ROPE,
    "tie_word_embeddings": True,
  }
  config = model_config.from_hf(hf)
  assert model_config.from_hf(model_config.to_hf(config)) == config


def test_to_hf_refuses_what_the_family_cannot_say():
  config = model_config.from_hf({**LLAMA, "architectures": ["Qwen2ForCausalLM"]})
  with pytest.raises(ValueError, match="Qwen2 has biases"):
    model_config.to_hf(dataclasses.replace(config, qkv_bias=False))


def test_configs_can_be_static_arguments():
  assert hash(model_config.from_hf(LLAMA)) == hash(model_config.from_hf(dict(LLAMA)))


SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 6}


@pytest.mark.parametrize(
  ("change", "windows"),
  [
    ({}, [None, None]),
    ({"sliding_window": 6}, [None, None]),  # only with use_sliding_window.
    ({**WINDOW, "max_window_layers": 1}, [None, 6]),
    ({**WINDOW, "max_window_layers": 0}, [6, 6]),
    (WINDOW, [None, None]),  # max_window_layers is 28.
    ({**WINDOW, "layer_types": [SLIDING, FULL]}, [6, None]),
    ({"use_sliding_window": True, "max_window_layers": 1}, [None, 4096]),
    ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, [None, None]),
  ],
)
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_windows_of_qwen_are_read_as_transformers_reads_them(family, change, windows):
  hf = {**LLAMA, "architectures": [f"{family}ForCausalLM"], **change}
  config = model_config.from_hf(hf)
  assert [kind.window for kind in config.kinds] == windows
  assert model_config.from_hf(model_config.to_hf(config)) == config
  theirs = getattr(transformers, f"{family}Config")(**hf)
  by_kind = {SLIDING: theirs.sliding_window, FULL: None}
  assert [by_kind[name] for name in theirs.layer_types] == windows


@pytest.mark.parametrize(
  "change",
  [
    {},
    {"no_rope_layer_interval": 2},
    {"no_rope_layers": [0, 1]},
    {**WINDOW, "no_rope_layers": [0, 1]},
    {**WINDOW, "no_rope_layers": [1, 1], "layer_types": [SLIDING, FULL]},
  ],
)
def test_layers_of_smollm3_are_read_as_transformers_reads_them(change):
  hf = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"], **change}
  config = model_config.from_hf(hf)
  theirs = transformers.SmolLM3Config(**hf)
  assert [kind.rope is not None for kind in config.kinds] == [
    bool(x) for x in theirs.no_rope_layers
  ]
  slides = [kind.window is not None for kind in config.kinds]
  assert slides == [name == SLIDING for name in theirs.layer_types]
  assert (config.tie_embeddings, config.rope_theta) == (True, 2e6)
  assert model_config.from_hf(model_config.to_hf(config)) == config


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"layer_types": [FULL, SLIDING]}, "layer_types.*use_sliding_window=true"),
    ({**WINDOW, "layer_types": [FULL]}, "layer_types.*each of 2 layers"),
    ({**WINDOW, "layer_types": [FULL, "chunked_attention"]}, "layer_types.*sliding_attention"),
    ({**WINDOW, "sliding_window": 0}, "sliding_window needs a whole number from 1"),
    ({**WINDOW, "max_window_layers": -1}, "max_window_layers"),
    ({"use_sliding_window": "yes"}, "use_sliding_window needs true or false"),
    ({**WINDOW, "sliding_window": None, "layer_types": [SLIDING, FULL]}, "layer_types"),
  ],
)
def test_windows_that_make_no_sense_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    model_config.from_hf({**LLAMA, "architectures": ["Qwen2ForCausalLM"], **change})


@pytest.mark.parametrize("given", [[1], [1, 2], "11", [1, None]])
def test_no_rope_layers_need_a_0_or_a_1_for_each_layer(given):
  hf = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": given}
  with pytest.raises(ValueError, match="no_rope_layers needs a 0 or a 1 for each of 2 layers"):
    model_config.from_hf(hf)


@pytest.mark.parametrize(
  "change",
  [
    {"norm_offset": 1.0},
    {"post_norms": True},
    {"embedding_scale": 2.0},
    {"layer_kinds": (model_config.LayerKind(3), model_config.LayerKind())},
    {"layer_kinds": (model_config.LayerKind(None, None), model_config.LayerKind())},
    {"qk_norm": True},
  ],
  ids=lambda change: next(iter(change)),
)
def test_to_hf_refuses_what_a_config_json_would_lose(change):
  config = dataclasses.replace(model_config.from_hf(LLAMA), **change)
  with pytest.raises(ValueError, match=f"LlamaForCausalLM cannot describe .*{next(iter(change))}"):
    model_config.to_hf(config)


def test_to_hf_refuses_two_lengths_of_windows():
  config = model_config.from_hf({**LLAMA, "architectures": ["Qwen3ForCausalLM"]})
  kinds = (model_config.LayerKind(3), model_config.LayerKind(4))
  with pytest.raises(ValueError, match=r"one sliding_window, but the layers have \[3, 4\]"):
    model_config.to_hf(dataclasses.replace(config, layer_kinds=kinds))


@pytest.mark.parametrize("architecture", unsupported.ARCHITECTURES)
def test_known_architectures_are_refused_with_what_is_missing(architecture):
  """Each is one of transformers', so that a misspelt name is found, and none of ours."""
  assert architecture not in model_config.FAMILIES
  groups = (getattr(modeling_auto, name) for name in dir(modeling_auto) if name.endswith("_NAMES"))
  assert any(architecture in group.values() for group in groups)
  with pytest.raises(ModelError, match=f"{architecture}' is not supported: grpo_jax lacks .*Llama"):
    model_config.from_hf({**LLAMA, "architectures": [architecture]})


def test_what_is_missing_is_said_once_and_of_every_other_name_nothing():
  reason = unsupported.reason("NewForCausalLM", ["B", "A"])
  assert reason == "is not supported; supported are ['A', 'B']"
  for architecture, words in {
    "Qwen3_5ForCausalLM": "gated delta net",
    "DeepseekV3ForCausalLM": "latent attention",
    "GptOssForCausalLM": "MXFP4",
  }.items():
    assert words in unsupported.reason(architecture, [])
