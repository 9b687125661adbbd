"""Qwen3-8B with LoRA on one GPU of 80 GB, shared by the trainer and an SGLang server.

    make sglang-cuda
    XLA_PYTHON_CLIENT_MEM_FRACTION=.40 python -m grpo_jax.main --config=configs/math_8b_lora.py \\
        --workdir=runs/math_8b_lora

JAX takes 40 % of the memory, 34 GB, for the trainer, which needs 26 GB:

    base in bfloat16; also the reference policy        16.38 GB
    adapter of rank 32, float32                         0.35 GB
    AdamW's two moments                                 0.70 GB
    sum of the gradients, in updates                    0.35 GB
    temporaries of the update, by the compiler          8.6 GB

SGLang takes 48 % (engine.sglang.arguments), 41 GB: 16.4 GB are its own copy of the base, the rest
is cache, some 160 000 tokens. It loads the adapter of every step beside the base (model.lora.sync).
Full training would need 164 GB for the trainer's arrays alone. Never run on a GPU yet; docs/lora.md
has the numbers, `grpo-jax plan --config=math_8b_lora --topology=h100:1` those of your settings.
"""

from typing import Any

from grpo_jax import configuration


def get_config():
  """Returns the config."""
  config: Any = configuration.load("math_1b_gpu").unlock()
  config.model.path = "Qwen/Qwen3-8B"
  config.model.chat_template_args = dict(enable_thinking=False)
  config.model.lora.rank = 32
  config.model.lora.sync = "adapter"
  config.engine.sglang.arguments = ("--mem-fraction-static=0.48",)
  config.batching.microbatch_tokens = 8192
  config.optim.learning_rate = 1e-5  # as published for LoRA of 3B and 4B: docs/lora.md.
  return config
