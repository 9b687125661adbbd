"""The Qwen2 and Qwen2.5 family, dense: switches and Hugging Face names. Pure."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.models import hf_layers, llama
from grpo_jax.models.fields import Fields

ARCHITECTURE = "Qwen2ForCausalLM"
CLASSIFIER = "Qwen2ForSequenceClassification"
MODEL_TYPE = "qwen2"
DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 32768}
ROPES = llama.ROPES
TOP_NAMES = llama.TOP_NAMES
LAYER_PREFIX = llama.LAYER_PREFIX
LAYER_NAMES = llama.LAYER_NAMES


def switches(fields: Fields) -> dict[str, bool]:
  """Returns the switches of `ModelConfig`: biases on q, k and v, whatever config.json says."""
  del fields
  return {"qkv_bias": True, "o_bias": False, "mlp_bias": False, "qk_norm": False}


layer_kinds = hf_layers.from_a_layer_on


def hf_switches(config: Any) -> dict[str, Any]:
  """Returns the fields of config.json that describe a `ModelConfig`'s switches.

  Raises:
    ValueError: Qwen2's config.json cannot describe them.
  """
  if not config.qkv_bias or config.o_bias or config.mlp_bias:
    raise ValueError("Qwen2 has biases on q, k and v, and nowhere else")
  return hf_layers.to_hf(config.kinds)
