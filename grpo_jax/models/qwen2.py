"""The Qwen2 and Qwen2.5 family, dense: switches and Hugging Face names. Pure."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.models import llama
from grpo_jax.models.fields import Fields

ARCHITECTURE = "Qwen2ForCausalLM"
MODEL_TYPE = "qwen2"
DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 32768}
TOP_NAMES = llama.TOP_NAMES
LAYER_PREFIX = llama.LAYER_PREFIX
LAYER_NAMES = llama.LAYER_NAMES


def switches(fields: Fields) -> dict[str, bool]:
  """Returns the switches of `ModelConfig`: biases on q, k and v, whatever config.json says."""
  del fields
  return {"qkv_bias": True, "o_bias": False, "mlp_bias": False, "qk_norm": False}


def hf_switches(*, qkv_bias: bool, o_bias: bool, mlp_bias: bool) -> dict[str, Any]:
  """Returns the fields of config.json that say the same as these switches: none.

  Raises:
    ValueError: if Qwen2's config.json cannot say it.
  """
  if not qkv_bias or o_bias or mlp_bias:
    raise ValueError("Qwen2 has biases on q, k and v, and nowhere else")
  return {"use_sliding_window": False}
