"""The SmolLM3 family: Llama with some layers that have no rotary embedding. Pure."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.models import hf_layers, hf_rope, llama
from grpo_jax.models.fields import Fields
from grpo_jax.models.layer_kinds import LayerKind

ARCHITECTURE = "SmolLM3ForCausalLM"
CLASSIFIER = "SmolLM3ForSequenceClassification"
MODEL_TYPE = "smollm3"
DEFAULTS: Mapping[str, Any] = {
  "max_position_embeddings": 32768,
  "tie_word_embeddings": True,
  "bos_token_id": 128000,
  "eos_token_id": 128001,
  "pad_token_id": 128004,
}
ROPES = hf_rope.OneTable(2000000.0)
TOP_NAMES = llama.TOP_NAMES
LAYER_PREFIX = llama.LAYER_PREFIX
LAYER_NAMES = llama.LAYER_NAMES

switches = llama.switches


def layer_kinds(fields: Fields, count: int) -> tuple[LayerKind, ...]:
  """Returns the kind of each layer, from `no_rope_layers`, `layer_types` and `sliding_window`."""
  rotates = hf_layers.rotates(fields, count)
  window = hf_layers.window(fields, default=None)
  # As transformers has it: by default the window is for the layers without a rotary table.
  without = [window is not None and not each for each in rotates]
  slides = hf_layers.slides(fields, without, window)
  return tuple(
    LayerKind(window if slide else None, 0 if rotate else None)
    for slide, rotate in zip(slides, rotates, strict=True)
  )


def hf_switches(config: Any) -> dict[str, Any]:
  """Returns the fields of config.json that describe these switches."""
  rotates = [kind.rope is not None for kind in config.kinds]
  return {
    **llama.hf_switches(config),
    **hf_layers.to_hf(config.kinds),
    "no_rope_layers": [int(each) for each in rotates],
  }
