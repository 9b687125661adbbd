"""Qwen2.5-1.5B-Instruct with LoRA on GSM8K, on one TPU chip: v5e-1 (16 GB) or v6e-1.

    python -m grpo_jax.main --config=configs/gsm8k_tpu.py --workdir=runs/gsm8k_tpu

The dataset comes from the Hugging Face hub. notebooks/colab_tpu.ipynb does the same in Colab.

By the plan, never checked against a TPU (`grpo-jax plan --config=gsm8k_tpu --topology=v5e-1`,
2026-11-28, jax 0.11.2, libtpu 0.0.48.1): an update takes 11.4 of the 15.75 GiB of a v5e, sampling
8.8. A step takes at least 1.9 s on a v5e and 0.7 s on a v6e with solutions of 200 tokens.
"""

from typing import Any

from grpo_jax import configuration


def get_config():
  """Returns the config."""
  config: Any = configuration.load("gsm8k").unlock()
  config.total_steps = 50

  config.model.path = "Qwen/Qwen2.5-1.5B-Instruct"
  config.model.fallback = None
  config.model.compute_dtype = "bfloat16"
  config.model.lora.rank = 32
  config.optim.learning_rate = 5e-5

  config.rollout.prompts_per_step = 16
  config.batching.microbatch_tokens = 4096

  config.evaluation.every_steps = 10
  config.checkpoint.every_steps = 10
  return config
