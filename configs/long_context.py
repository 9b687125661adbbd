"""Completions of up to 30720 tokens, with the places of each row divided over eight devices.

    grpo-jax train long_context --workdir=runs/long_context

The model, the data and the loss are those of configs/math_1b.py. A row has up to 32768 tokens, the
context of Qwen2.5-1.5B-Instruct; each device computes 4096 of them, and gathers keys and values for
attention (docs/sharding.md). Weights and optimizer state are split over the same devices. With more
devices rows are split over data as well: --config.mesh.data=-1 --config.mesh.fsdp=1.

No such run was made yet. Attention is a kernel of its own on TPUs and on Hopper GPUs; for rows that
are divided it was compared in their simulators and compiled for an H100, and not run on either.
"""

from typing import Any

from grpo_jax import configuration


def get_config():
  """Returns the config."""
  config: Any = configuration.load("math_1b").unlock()
  config.mesh.context = 8
  config.data.max_prompt_tokens = 2048
  config.rollout.prompts_per_step = 16
  config.rollout.group_size = 8
  config.rollout.max_tokens = 32768
  config.sampling.max_tokens = 30720
  config.batching.row_tokens = 32768
  config.batching.microbatch_tokens = 4096  # of a device: one row.
  config.evaluation.num_prompts = 32
  return config
