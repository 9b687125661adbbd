"""The Qwen1.5-MoE and Qwen2-MoE family: Qwen2 with experts, one of them shared. Pure."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.models import hf_layers, mixture, qwen2, qwen3_moe
from grpo_jax.models.fields import Fields

ARCHITECTURE = "Qwen2MoeForCausalLM"
CLASSIFIER = "Qwen2MoeForSequenceClassification"
MODEL_TYPE = "qwen2_moe"
DEFAULTS: Mapping[str, Any] = {
  "max_position_embeddings": 32768,
  "num_experts_per_tok": 4,
  "moe_intermediate_size": 1408,
  "shared_expert_intermediate_size": 5632,
}
ROPES = qwen2.ROPES
TOP_NAMES = qwen2.TOP_NAMES
LAYER_PREFIX = qwen2.LAYER_PREFIX
LAYER_NAMES: Mapping[str, str] = {
  **qwen3_moe.LAYER_NAMES,
  "shared_gate": "mlp.shared_expert.gate_proj.weight",
  "shared_up": "mlp.shared_expert.up_proj.weight",
  "shared_down": "mlp.shared_expert.down_proj.weight",
  "shared_switch": "mlp.shared_expert_gate.weight",
}


def switches(fields: Fields) -> dict[str, Any]:
  """Returns the switches of `ModelConfig`: biases on q, k and v or none, and the experts."""
  experts = mixture.from_fields(fields, default_experts=60, has_shared=True)
  biased = fields.boolean("qkv_bias", default=True)
  return {**qwen2.switches(fields), "qkv_bias": biased, "mixture": experts}


layer_kinds = hf_layers.without_windows


def hf_switches(config: Any) -> dict[str, Any]:
  """Returns the fields of config.json that describe a `ModelConfig`'s switches.

  Raises:
    ValueError: Qwen2-MoE's config.json cannot describe them.
  """
  if config.mixture is None or config.mixture.shared_width is None:
    raise ValueError("Qwen2-MoE has a mixture of experts with a shared one in every layer")
  if config.o_bias or config.mlp_bias:
    raise ValueError("Qwen2-MoE has biases on q, k and v, and nowhere else")
  kinds = hf_layers.to_hf(config.kinds)
  return {"qkv_bias": config.qkv_bias, **kinds, **mixture.to_hf(config.mixture)}
