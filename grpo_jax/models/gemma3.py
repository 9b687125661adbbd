"""The Gemma 3 family, text only: switches and Hugging Face names. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.models import hf_layers, hf_rope, llama, qwen3
from grpo_jax.models.fields import Fields
from grpo_jax.models.layer_kinds import LayerKind

ARCHITECTURE = "Gemma3ForCausalLM"
CLASSIFIER = "Gemma3TextForSequenceClassification"
MODEL_TYPE = "gemma3_text"
# Sizes too, since the config.json of a multimodal folder leaves out what is as in transformers.
DEFAULTS: Mapping[str, Any] = {
  "vocab_size": 262208,
  "hidden_size": 2304,
  "intermediate_size": 9216,
  "num_hidden_layers": 26,
  "num_attention_heads": 8,
  "num_key_value_heads": 4,
  "head_dim": 256,
  "max_position_embeddings": 131072,
  "tie_word_embeddings": True,
  "hidden_activation": "gelu_pytorch_tanh",
  "query_pre_attn_scalar": 256,
  "sliding_window": 4096,
  "bos_token_id": 2,
  "eos_token_id": 1,
  "pad_token_id": 0,
}
ROPES = hf_rope.ByType(1e6, 1e4, "rope_local_base_freq")
TOP_NAMES = llama.TOP_NAMES
LAYER_PREFIX = llama.LAYER_PREFIX
LAYER_NAMES: Mapping[str, str] = {
  **qwen3.LAYER_NAMES,
  "post_attention_norm": "post_attention_layernorm.weight",
  "mlp_norm": "pre_feedforward_layernorm.weight",
  "post_mlp_norm": "post_feedforward_layernorm.weight",
}
_ACTIVATION = "gelu_pytorch_tanh"
_PATTERN = 6  # one layer in this many has no window.


def switches(fields: Fields) -> dict[str, Any]:
  """Returns the switches of `ModelConfig`: norms as 1 + w, behind attention and MLP too; GeGLU.

  Raises:
    ModelError: Soft caps, attention in both directions or another activation.
  """
  for name in ("attn_logit_softcapping", "final_logit_softcapping"):
    if name in fields:
      raise fields.wrong(name, "null; soft caps of logits are not supported")
  if fields.boolean("use_bidirectional_attention", default=False):
    raise fields.wrong("use_bidirectional_attention", "false; a decoder sees earlier tokens only")
  for name in ("hidden_activation", "hidden_act"):
    if fields.string(name) not in (None, _ACTIVATION):
      raise fields.wrong(name, f"{_ACTIVATION!r} in this family")
  attention_bias = fields.boolean("attention_bias", default=False)
  head_dim = fields.integer("head_dim", low=2, high=2**20)
  scalar = fields.number("query_pre_attn_scalar", above=0.0)
  return {
    "qkv_bias": attention_bias,
    "o_bias": attention_bias,
    "mlp_bias": False,
    "qk_norm": True,
    "activation": "gelu_tanh",
    "norm_offset": 1.0,
    "post_norms": True,
    "embedding_scale": math.sqrt(fields.integer("hidden_size", low=1, high=2**20)),
    "query_scalar": None if scalar == head_dim else scalar,
  }


def layer_kinds(fields: Fields, count: int) -> tuple[LayerKind, ...]:
  """Returns the kinds of layers: of six, five have a window and the second rotary table.

  `layer_types` says which, else `sliding_window_pattern`.

  Raises:
    ModelError: The two contradict each other, or there are sliding layers without a window.
  """
  by_number = _by_pattern(fields.integer("sliding_window_pattern", _PATTERN, low=1, high=2**31 - 1))
  wanted = [by_number(number) for number in range(count)]
  length = None
  if fields.boolean("use_sliding_window", default=True):
    length = fields.integer("sliding_window", low=1, high=hf_layers.LONGEST)
  elif "layer_types" not in fields and any(wanted):
    raise fields.wrong("sliding_window", "a whole number, since layers slide")
  slides = hf_layers.slides(fields, wanted, length)
  if "sliding_window_pattern" in fields and slides != wanted:
    raise fields.wrong("sliding_window_pattern", "the pattern of layer_types, or nothing")
  return tuple(LayerKind(length, 1) if slide else LayerKind() for slide in slides)


def hf_switches(config: Any) -> dict[str, Any]:
  """Returns the fields of config.json that describe a `ModelConfig`'s switches.

  Raises:
    ValueError: Gemma 3's config.json cannot describe them.
  """
  if config.qkv_bias != config.o_bias or config.mlp_bias:
    raise ValueError("Gemma 3 has biases on all of q, k, v and o, or on none, and none in the MLP")
  scalar = config.head_dim if config.query_scalar is None else config.query_scalar
  windows = hf_layers.to_hf(config.kinds)
  slides = [kind.window is not None for kind in config.kinds]
  types = ["sliding_attention" if slide else "full_attention" for slide in slides]
  return {
    "attention_bias": config.qkv_bias,
    "hidden_activation": _ACTIVATION,
    "query_pre_attn_scalar": int(scalar) if float(scalar).is_integer() else scalar,
    "sliding_window": windows.get("sliding_window", DEFAULTS["sliding_window"]),
    "layer_types": types,
    **_pattern_of(slides),
  }


def _by_pattern(every: int) -> Any:
  """Returns the function from the number of a layer to whether it slides."""
  return lambda number: (number + 1) % every != 0


def _pattern_of(slides: Sequence[bool]) -> dict[str, int]:
  """Returns `sliding_window_pattern`, for programs that read no layer_types; {} without one."""
  for every in range(1, len(slides) + 2):
    if list(slides) == [_by_pattern(every)(number) for number in range(len(slides))]:
      return {"sliding_window_pattern": every}
  return {}
