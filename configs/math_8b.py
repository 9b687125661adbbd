"""Llama-3.1-8B-Instruct, all weights, on eight GPUs of 80 GB: settings of `grpo_math_8B.yaml`.

    grpo-jax train math_8b --workdir=runs/math_8b

The data are those of configs/math_1b.py. Weights and optimizer state are split over all devices,
and the embedded sampler is on the same ones. GiB of each of eight H100s, by `grpo-jax plan math_8b
--topology=h100:8` (2026-11-28); no such run was made yet:

    weights and AdamW's two moments, float32           11.2
    reference policy                                    3.7
    while it samples: weights in bfloat16               1.8
                      keys and values, 128 rows        12.0
    while it learns:  sum of the gradients              3.7
                      temporaries, a row of 7680       36.2
    largest sum, in the update                         54.9 of 72.8

The hub gives Llama's weights to those who accept its license. Qwen3-8B needs as much:
--config.model.path=Qwen/Qwen3-8B --config.model.chat_template_args="dict(enable_thinking=False)".
For SGLang's servers in place of the embedded sampler: docs/sglang_gpu.md. On one GPU of 80 GB,
configs/math_8b_lora.py trains an adapter.
"""

from typing import Any

from grpo_jax import configuration


def get_config():
  """Returns the config."""
  config: Any = configuration.load("math_1b").unlock()
  config.model.path = "meta-llama/Llama-3.1-8B-Instruct"
  config.rollout.prompts_per_step = 64
  config.rollout.group_size = 32
  config.rollout.max_tokens = 4096
  config.sampling.max_tokens = 4096
  config.learn.minibatches = 4  # of 512 completions.
  config.optim.learning_rate = 3e-7
  config.optim.warmup_steps = 52  # 13 steps.
  return config
