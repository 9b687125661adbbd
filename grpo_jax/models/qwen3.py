"""The Qwen3 family, dense: switches and Hugging Face names. Pure."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.models import hf_layers, llama
from grpo_jax.models.fields import Fields

ARCHITECTURE = "Qwen3ForCausalLM"
CLASSIFIER = "Qwen3ForSequenceClassification"
MODEL_TYPE = "qwen3"
DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 32768, "head_dim": 128}
ROPES = llama.ROPES
TOP_NAMES = llama.TOP_NAMES
LAYER_PREFIX = llama.LAYER_PREFIX
LAYER_NAMES: Mapping[str, str] = {
  **llama.LAYER_NAMES,
  "q_norm": "self_attn.q_norm.weight",
  "k_norm": "self_attn.k_norm.weight",
}


def switches(fields: Fields) -> dict[str, bool]:
  """Returns the switches of `ModelConfig`: RMS norm of every query and key head."""
  attention_bias = fields.boolean("attention_bias", default=False)
  return {
    "qkv_bias": attention_bias,
    "o_bias": attention_bias,
    "mlp_bias": False,
    "qk_norm": True,
  }


layer_kinds = hf_layers.from_a_layer_on


def hf_switches(config: Any) -> dict[str, Any]:
  """Returns the fields of config.json that describe a `ModelConfig`'s switches.

  Raises:
    ValueError: Qwen3's config.json cannot describe them.
  """
  if config.qkv_bias != config.o_bias or config.mlp_bias:
    raise ValueError("Qwen3 has biases on all of q, k, v and o, or on none, and none in the MLP")
  return {"attention_bias": config.qkv_bias, **hf_layers.to_hf(config.kinds)}
