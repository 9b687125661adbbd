"""The Mistral family: Llama with a sliding window on every layer, or on none. Pure."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.models import hf_layers, hf_rope, llama
from grpo_jax.models.fields import Fields
from grpo_jax.models.layer_kinds import LayerKind

ARCHITECTURE = "MistralForCausalLM"
CLASSIFIER = "MistralForSequenceClassification"
MODEL_TYPE = "mistral"
DEFAULTS: Mapping[str, Any] = {
  "max_position_embeddings": 131072,
  "num_key_value_heads": 8,
  "sliding_window": 4096,
  "bos_token_id": 1,
  "eos_token_id": 2,
}
ROPES = hf_rope.OneTable()
TOP_NAMES = llama.TOP_NAMES
LAYER_PREFIX = llama.LAYER_PREFIX
LAYER_NAMES = llama.LAYER_NAMES


def switches(fields: Fields) -> dict[str, bool]:
  """Returns the switches of `ModelConfig`: no biases, whatever config.json says."""
  del fields
  return {}


def layer_kinds(fields: Fields, count: int) -> tuple[LayerKind, ...]:
  """Returns the kinds of layers, all alike.

  Raises:
    ModelError: `layer_types` names two types, which transformers does not compute in this family.
  """
  found = hf_layers.by_window(fields, count)
  if any((kind.window is None) != ("sliding_window" not in fields) for kind in found):
    raise fields.wrong("layer_types", "one type for all layers (others are MinistralForCausalLM)")
  return found


def hf_switches(config: Any) -> dict[str, Any]:
  """Returns the fields of config.json that describe a `ModelConfig`'s layers."""
  return {"sliding_window": hf_layers.window_to_hf(config.kinds)["sliding_window"]}
