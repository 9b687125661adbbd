"""configs/math_1b.py with LoRA, on one chip of 16 GB, such as a TPU v5e.

    python -m grpo_jax.main --config=configs/math_1b_lora.py --workdir=runs/math_1b_lora

Everything is on the one chip:

    base in bfloat16; also the reference policy        3.09 GB
    adapter of rank 32, float32                        0.15 GB
    AdamW's two moments                                0.30 GB
    sum of the gradients, in updates                   0.15 GB
    embedded sampler: its own layout of the layers     2.62 GB
    embedded sampler: keys and values, while sampling  1.06 GB

The rest is for the temporaries of the programs: docs/lora.md has the compilers' numbers, and
`grpo-jax plan --config=math_1b_lora --topology=v5e-1` those of your settings. Full training would
need 31 GB for its arrays alone. On a GPU without bfloat16 units, such as a T4, add
--config.model.compute_dtype=float32: the base is still stored in bfloat16.
"""

from typing import Any

from grpo_jax import configuration


def get_config():
  """Returns the config."""
  config: Any = configuration.load("math_1b").unlock()
  config.model.lora.rank = 32
  config.optim.learning_rate = 5e-5  # ten times that of full training; docs/lora.md has sources.
  return config
