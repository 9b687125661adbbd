"""The OLMo 2 family: norms behind attention and MLP, and of whole queries and keys. Pure."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.models import hf_layers, llama, qwen3
from grpo_jax.models.fields import Fields

ARCHITECTURE = "Olmo2ForCausalLM"
CLASSIFIER = "Olmo2ForSequenceClassification"
MODEL_TYPE = "olmo2"
DEFAULTS: Mapping[str, Any] = {
  "max_position_embeddings": 2048,
  "rms_norm_eps": 1e-5,
  "pad_token_id": 1,
  "eos_token_id": 50279,
}
ROPES = llama.ROPES
TOP_NAMES = llama.TOP_NAMES
LAYER_PREFIX = llama.LAYER_PREFIX
LAYER_NAMES: Mapping[str, str] = {
  **{name: of for name, of in qwen3.LAYER_NAMES.items() if name not in ("input_norm", "mlp_norm")},
  "post_attention_norm": "post_attention_layernorm.weight",
  "post_mlp_norm": "post_feedforward_layernorm.weight",
}


def switches(fields: Fields) -> dict[str, bool]:
  """Returns the switches of `ModelConfig` that config.json sets in this family."""
  attention_bias = fields.boolean("attention_bias", default=False)
  return {
    "qkv_bias": attention_bias,
    "o_bias": attention_bias,
    "wide_qk_norm": True,
    "pre_norms": False,
    "post_norms": True,
  }


layer_kinds = hf_layers.without_windows


def hf_switches(config: Any) -> dict[str, Any]:
  """Returns the fields of config.json that describe a `ModelConfig`'s switches."""
  return {"attention_bias": config.qkv_bias}
