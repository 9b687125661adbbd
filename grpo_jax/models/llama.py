"""The Llama family (Llama 2 and 3, SmolLM2): switches and Hugging Face names. Pure."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.models import hf_layers, hf_rope
from grpo_jax.models.fields import Fields

ARCHITECTURE = "LlamaForCausalLM"
CLASSIFIER = "LlamaForSequenceClassification"
MODEL_TYPE = "llama"

# Defaults of `transformers` for fields that config.json lacks.
DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 2048}

ROPES = hf_rope.OneTable()

# Our names → Hugging Face's, for the tensors outside the layers. Files hold kernels ([in, out]
# here) transposed; see `leaves.Leaf.is_kernel`.
TOP_NAMES: Mapping[str, str] = {
  "embed": "model.embed_tokens.weight",
  "final_norm": "model.norm.weight",
  "head": "lm_head.weight",
}

# The same for the tensors of layer i, below `LAYER_PREFIX.format(i)`.
LAYER_PREFIX = "model.layers.{}."
LAYER_NAMES: Mapping[str, str] = {
  "input_norm": "input_layernorm.weight",
  "q": "self_attn.q_proj.weight",
  "k": "self_attn.k_proj.weight",
  "v": "self_attn.v_proj.weight",
  "o": "self_attn.o_proj.weight",
  "q_bias": "self_attn.q_proj.bias",
  "k_bias": "self_attn.k_proj.bias",
  "v_bias": "self_attn.v_proj.bias",
  "o_bias": "self_attn.o_proj.bias",
  "mlp_norm": "post_attention_layernorm.weight",
  "gate": "mlp.gate_proj.weight",
  "up": "mlp.up_proj.weight",
  "down": "mlp.down_proj.weight",
  "gate_bias": "mlp.gate_proj.bias",
  "up_bias": "mlp.up_proj.bias",
  "down_bias": "mlp.down_proj.bias",
}


def switches(fields: Fields) -> dict[str, bool]:
  """Returns the switches of `ModelConfig` that config.json sets in this family."""
  attention_bias = fields.boolean("attention_bias", default=False)
  return {
    "qkv_bias": attention_bias,
    "o_bias": attention_bias,
    "mlp_bias": fields.boolean("mlp_bias", default=False),
    "qk_norm": False,
  }


layer_kinds = hf_layers.without_windows


def hf_switches(config: Any) -> dict[str, Any]:
  """Returns the fields of config.json that describe a `ModelConfig`'s switches.

  Raises:
    ValueError: Llama's config.json cannot describe them.
  """
  if config.qkv_bias != config.o_bias:
    raise ValueError("a Llama config has biases on all of q, k, v and o, or on none of them")
  return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
