"""The models that are measured, with random weights of their sizes. Pure."""

from typing import Any

import jax

from grpo_jax.models import config as model_config
from grpo_jax.models import transformer
from grpo_plan import architectures as model_shapes

# Small enough for CI.
_TINY: dict[str, Any] = {
  "architectures": ["Qwen2ForCausalLM"],
  "vocab_size": 264,
  "hidden_size": 32,
  "intermediate_size": 64,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 2048,
  "tie_word_embeddings": True,
}


def config_of(name: str) -> model_config.ModelConfig:
  """Returns the sizes of a model: "tiny", or a name in `model_shapes.SHAPES`."""
  return model_config.from_hf(_TINY if name == "tiny" else model_shapes.SHAPES[name])


def random_weights(config: model_config.ModelConfig) -> Any:
  """Returns float32 weights on the device, made by one program."""
  return jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), config)
