"""The OLMo 3 family: OLMo 2 with sliding windows, and scaled rotary tables elsewhere. Pure."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.models import hf_layers, hf_rope, olmo2
from grpo_jax.models.fields import Fields
from grpo_jax.models.layer_kinds import LayerKind

ARCHITECTURE = "Olmo3ForCausalLM"
CLASSIFIER = "Olmo3ForSequenceClassification"
MODEL_TYPE = "olmo3"
DEFAULTS: Mapping[str, Any] = {**olmo2.DEFAULTS, "sliding_window": 4096}
ROPES = hf_rope.ByType(theta=500000.0, sliding_theta=500000.0)
TOP_NAMES = olmo2.TOP_NAMES
LAYER_PREFIX = olmo2.LAYER_PREFIX
LAYER_NAMES = olmo2.LAYER_NAMES

switches = olmo2.switches


def layer_kinds(fields: Fields, count: int) -> tuple[LayerKind, ...]:
  """Returns the kinds of layers: by default three of four have the window.

  Raises:
    ModelError: `layer_types` does not fit, or no length of the window is known.
  """
  if "sliding_window" not in fields and "layer_types" not in fields:
    raise fields.wrong("sliding_window", "a whole number, as most layers have a window")
  return hf_layers.by_window(fields, count, rope=1, every=4)


def hf_switches(config: Any) -> dict[str, Any]:
  """Returns the fields of config.json that describe a `ModelConfig`'s switches and layers."""
  return {**olmo2.hf_switches(config), **hf_layers.window_to_hf(config.kinds)}
