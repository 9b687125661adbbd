"""Tiny models of every family, for tests that hold whatever the family: a row each.

A row is what transformers' config takes besides `SIZES`. A new family adds its classes to `CLASSES`
and its rows to `CASES`, with odd sizes and every kind of layer that it has.
"""

import dataclasses
from typing import Any

import transformers

SIZES = {
  "vocab_size": 61,
  "hidden_size": 24,
  "intermediate_size": 37,
  "num_hidden_layers": 2,
  "num_attention_heads": 6,
  "num_key_value_heads": 2,
  "max_position_embeddings": 128,
}
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 32}


@dataclasses.dataclass(frozen=True)
class Family:
  """Transformers' classes of a family.

  Attributes:
    config: Class of the config.
    model: Class of the model.
  """

  config: Any
  model: Any


CLASSES = {
  "gemma3_text": Family(transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
  "llama": Family(transformers.LlamaConfig, transformers.LlamaForCausalLM),
  "qwen2": Family(transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
  "qwen3": Family(transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
  "smollm3": Family(transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
  "mistral": Family(transformers.MistralConfig, transformers.MistralForCausalLM),
  "ministral": Family(transformers.MinistralConfig, transformers.MinistralForCausalLM),
  "olmo2": Family(transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
  "olmo3": Family(transformers.Olmo3Config, transformers.Olmo3ForCausalLM),
  "seed_oss": Family(transformers.SeedOssConfig, transformers.SeedOssForCausalLM),
  "qwen2_moe": Family(transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
  "qwen3_moe": Family(transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}

# Name of a case → family, and what differs from `SIZES`.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
  "llama-llama3": (
    "llama",
    {
      "head_dim": 16,
      "tie_word_embeddings": True,
      "rope_parameters": {
        **YARN,
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
      },
    },
  ),
  "llama-longrope-biases": (
    "llama",
    {
      "attention_bias": True,
      "mlp_bias": True,
      "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 300.0,
        "short_factor": [1.3, 2.1],
        "long_factor": [4.0, 5.0],
        "original_max_position_embeddings": 32,
      },
    },
  ),
  "qwen2-late-windows": (
    "qwen2",
    {
      "use_sliding_window": True,
      "sliding_window": 7,
      "num_hidden_layers": 3,
      "max_window_layers": 1,
      "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0},
    },
  ),
  "qwen3-mixed-windows": (
    "qwen3",
    {
      "head_dim": 6,
      "attention_bias": True,
      "use_sliding_window": True,
      "sliding_window": 5,
      "layer_types": [SLIDING, FULL],
    },
  ),
  "smollm3": ("smollm3", {"pad_token_id": 0, "no_rope_layer_interval": 2}),
  "mistral-window": ("mistral", {"sliding_window": 5, "head_dim": 10}),
  "mistral-no-window": (
    "mistral",
    {"sliding_window": None, "num_key_value_heads": 3, "tie_word_embeddings": True},
  ),
  "mistral-yarn": ("mistral", {"sliding_window": None, "rope_parameters": YARN}),
  "ministral-mixed": (
    "ministral",
    {
      "head_dim": 6,
      "sliding_window": 4,
      "num_hidden_layers": 3,
      "layer_types": [SLIDING, FULL, SLIDING],
    },
  ),
  "ministral-all": ("ministral", {"sliding_window": 7, "hidden_size": 30, "head_dim": 14}),
  "olmo2": ("olmo2", {"pad_token_id": 0, "num_key_value_heads": 6}),
  "olmo2-grouped-biases": (
    "olmo2",
    {"pad_token_id": 0, "attention_bias": True, "rms_norm_eps": 0.05, "intermediate_size": 29},
  ),
  "olmo2-tied-odd": (
    "olmo2",
    {"pad_token_id": 0, "tie_word_embeddings": True, "num_key_value_heads": 1, "hidden_size": 60},
  ),
  "olmo3-default": ("olmo3", {"pad_token_id": 0, "sliding_window": 5, "num_hidden_layers": 5}),
  "olmo3-yarn": (
    "olmo3",
    {
      "pad_token_id": 0,
      "sliding_window": 3,
      "layer_types": [FULL, SLIDING],
      "rope_parameters": {
        FULL: {**YARN, "attention_factor": 1.3},
        SLIDING: {"rope_type": "default", "rope_theta": 77.0},
      },
    },
  ),
  "olmo3-full": ("olmo3", {"pad_token_id": 0, "layer_types": [FULL, FULL]}),
  "seed_oss": ("seed_oss", {"head_dim": 10, "pad_token_id": 0}),
  "seed_oss-biases": (
    "seed_oss",
    {
      "head_dim": 6,
      "pad_token_id": 0,
      "attention_bias": False,
      "attention_out_bias": True,
      "mlp_bias": True,
      "tie_word_embeddings": True,
    },
  ),
  "seed_oss-linear": (
    "seed_oss",
    {
      "head_dim": 4,
      "pad_token_id": 0,
      "hidden_act": "gelu_pytorch_tanh",
      "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0},
    },
  ),
}

# One case of each family, for tests that need no more.
ONE_OF_EACH = {CASES[name][0]: name for name in reversed(CASES)}


def options(family: str) -> dict[str, Any]:
  """Returns the options of the first case of a family; none if it has no case."""
  return CASES[ONE_OF_EACH[family]][1] if family in ONE_OF_EACH else {}
