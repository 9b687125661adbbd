"""configs/quickstart.py with LoRA; docs/lora.md has its accuracy beside that of full training.

python -m grpo_jax.main --config=configs/quickstart_lora.py --workdir=runs/quickstart_lora
"""

from typing import Any

from grpo_jax import configuration


def get_config():
  config: Any = configuration.load("quickstart").unlock()
  config.model.lora.rank = 32
  config.model.lora.base_dtype = "float32"  # the model's 4-bit file is not exact in bfloat16.
  config.optim.learning_rate = 1e-4  # ten times that of full training; docs/lora.md has sources.
  return config
