"""The models that are measured, by their shapes; weights are random. Pure."""

from typing import Any

import jax

from grpo_jax.models import config as model_config
from grpo_jax.models import transformer

# As in their config.json on the hub.
_SHAPES: dict[str, dict[str, Any]] = {
  "Qwen2.5-1.5B": {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
  },
  "SmolLM2-135M": {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
  },
  "tiny": {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
  },
}


def config_of(name: str) -> model_config.ModelConfig:
  """Returns the shapes of a model by name."""
  return model_config.from_hf(_SHAPES[name])


def random_weights(config: model_config.ModelConfig) -> Any:
  """Returns float32 weights on the device, made by one program."""
  return jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), config)
