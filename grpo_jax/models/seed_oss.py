"""The Seed-OSS family: Llama with biases on q, k and v, and a width of heads of its own. Pure."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.models import hf_layers, llama
from grpo_jax.models.fields import Fields

ARCHITECTURE = "SeedOssForCausalLM"
CLASSIFIER = "SeedOssForSequenceClassification"
MODEL_TYPE = "seed_oss"
DEFAULTS: Mapping[str, Any] = {
  "max_position_embeddings": 524288,
  "head_dim": 128,
  "num_key_value_heads": 8,
  "bos_token_id": 0,
  "eos_token_id": 2,
  "pad_token_id": 1,
}
ROPES = llama.ROPES
TOP_NAMES = llama.TOP_NAMES
LAYER_PREFIX = llama.LAYER_PREFIX
LAYER_NAMES = llama.LAYER_NAMES


def switches(fields: Fields) -> dict[str, bool]:
  """Returns the switches of `ModelConfig` that config.json sets in this family."""
  return {
    "qkv_bias": fields.boolean("attention_bias", default=True),
    "o_bias": fields.boolean("attention_out_bias", default=False),
    "mlp_bias": fields.boolean("mlp_bias", default=False),
  }


layer_kinds = hf_layers.without_windows


def hf_switches(config: Any) -> dict[str, Any]:
  """Returns the fields of config.json that describe a `ModelConfig`'s switches."""
  return {
    "attention_bias": config.qkv_bias,
    "attention_out_bias": config.o_bias,
    "mlp_bias": config.mlp_bias,
  }
