"""Qwen3-30B-A3B, a mixture of experts, on eight devices of 80 GB: an adapter of attention.

grpo-jax train qwen3_30b_a3b --workdir=runs/qwen3_30b_a3b
"""

from typing import Any

from grpo_jax import configuration


def get_config():
  """Returns the config."""
  config: Any = configuration.load("math_1b").unlock()
  config.model.path = "Qwen/Qwen3-30B-A3B"
  config.model.chat_template_args = {"enable_thinking": False}
  config.model.lora.rank = 32
  config.model.lora.targets = ("q", "k", "v", "o")  # "mlp.*" adds the experts: docs/lora.md.
  config.optim.learning_rate = 1e-5
  config.mesh.data = 1
  config.mesh.fsdp = -1
  return config
