"""The Qwen3-MoE family: Qwen3 with a mixture of experts in every layer. Pure."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.models import hf_layers, mixture, qwen3
from grpo_jax.models.fields import Fields

ARCHITECTURE = "Qwen3MoeForCausalLM"
CLASSIFIER = "Qwen3MoeForSequenceClassification"
MODEL_TYPE = "qwen3_moe"
DEFAULTS: Mapping[str, Any] = {
  "max_position_embeddings": 32768,
  "num_experts_per_tok": 8,
  "moe_intermediate_size": 768,
}
ROPES = qwen3.ROPES
TOP_NAMES = qwen3.TOP_NAMES
LAYER_PREFIX = qwen3.LAYER_PREFIX
# The number of an expert stands for "{}".
LAYER_NAMES: Mapping[str, str] = {
  **qwen3.LAYER_NAMES,
  "router": "mlp.gate.weight",
  "expert_gate": "mlp.experts.{}.gate_proj.weight",
  "expert_up": "mlp.experts.{}.up_proj.weight",
  "expert_down": "mlp.experts.{}.down_proj.weight",
}


def switches(fields: Fields) -> dict[str, Any]:
  """Returns the switches of `ModelConfig`: those of Qwen3, and the experts."""
  experts = mixture.from_fields(fields, default_experts=128, has_shared=False)
  return {**qwen3.switches(fields), "mixture": experts}


layer_kinds = hf_layers.without_windows


def hf_switches(config: Any) -> dict[str, Any]:
  """Returns the fields of config.json that describe a `ModelConfig`'s switches.

  Raises:
    ValueError: Qwen3-MoE's config.json cannot describe them.
  """
  if config.mixture is None or config.mixture.shared_width is not None:
    raise ValueError("Qwen3-MoE has a mixture of experts without a shared one in every layer")
  return {**qwen3.hf_switches(config), **mixture.to_hf(config.mixture)}
