"""config.json → ModelConfig and back."""

import dataclasses

import pytest

from grpo_jax.models import config as model_config

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
    ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM.*supported are.*Llama"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"hidden_act": "relu"}, "hidden_act='relu'.*silu"),
    ({"num_local_experts": 8}, "mixture of experts"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'.*default.*linear.*llama3"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic'"),
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
    "rope_theta": 123.0,
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
