"""Qwen2.5-0.5B-Instruct with LoRA on GSM8K, on one GPU of 16 GB without bfloat16 units: a T4.

    python -m grpo_jax.main --config=configs/gsm8k_t4.py --workdir=runs/gsm8k_t4

The dataset comes from the Hugging Face hub. notebooks/colab_t4.ipynb does the same in Colab. The
base is stored in bfloat16, products are float32: docs/lora.md says why on a T4. On GPUs with
bfloat16 units set --config.model.compute_dtype=bfloat16.

By the plan, never checked against a T4 (`grpo-jax plan --config=gsm8k_t4 --topology=t4:1`,
2026-11-28, jax 0.11.2): an update takes 8.9 GiB and sampling 3.8, of the 13.4 GiB that a run takes
of a T4. A step takes at least 6.2 s with solutions of 200 tokens.
"""

from typing import Any

from grpo_jax import configuration


def get_config():
  """Returns the config."""
  config: Any = configuration.load("gsm8k").unlock()
  config.total_steps = 20

  config.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
  config.model.fallback = None
  config.model.compute_dtype = "float32"
  config.model.lora.rank = 32
  config.optim.learning_rate = 5e-5

  config.batching.microbatch_tokens = 2048

  config.evaluation.every_steps = 10
  config.checkpoint.every_steps = 10
  return config
