"""The Ministral family: Mistral with a sliding window on some layers. Pure."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.models import hf_layers, mistral

ARCHITECTURE = "MinistralForCausalLM"
CLASSIFIER = "MinistralForSequenceClassification"
MODEL_TYPE = "ministral"
DEFAULTS: Mapping[str, Any] = mistral.DEFAULTS
ROPES = mistral.ROPES
TOP_NAMES = mistral.TOP_NAMES
LAYER_PREFIX = mistral.LAYER_PREFIX
LAYER_NAMES = mistral.LAYER_NAMES

switches = mistral.switches
layer_kinds = hf_layers.by_window


def hf_switches(config: Any) -> dict[str, Any]:
  """Returns the fields of config.json that describe a `ModelConfig`'s layers."""
  return hf_layers.window_to_hf(config.kinds)
