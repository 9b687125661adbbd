"""The models that are measured, with random weights of their sizes. Pure."""

from typing import Any

# Small enough for CI.
_TINY: dict[str, Any] = {
  "architectures": ["Qwen2ForCausalLM"],
  "model_type": "qwen2",
  "vocab_size": 264,
  "hidden_size": 32,
  "intermediate_size": 64,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 2048,
  "tie_word_embeddings": True,
}


def huggingface(name: str) -> dict[str, Any]:
  """Returns the config.json of a model: "tiny", or a name in `architectures.SHAPES`."""
  from grpo_plan import architectures

  return _TINY if name == "tiny" else architectures.SHAPES[name]


def config_of(name: str) -> Any:
  """Returns the sizes of a model, a `ModelConfig`."""
  from grpo_jax.models import config

  return config.from_hf(huggingface(name))


def random_weights(config: Any) -> Any:
  """Returns float32 weights on the device, made by one program."""
  import jax

  from grpo_jax.models import transformer

  return jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), config)
