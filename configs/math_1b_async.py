"""configs/math_1b.py with sampling and learning at the same time, on two GPUs of 80 GB.

    make sglang-cuda
    CUDA_VISIBLE_DEVICES=0 python -m grpo_jax.main --config=configs/math_1b_async.py \\
        --workdir=runs/math_1b_async

GPU 0 is the trainer's, since JAX sees no other, and GPU 1 the SGLang server's
(engine.sglang.gpus, by the numbers that nvidia-smi shows), which takes 85 % of its memory. On eight
GPUs, half for each:

    CUDA_VISIBLE_DEVICES=0,1,2,3 python -m grpo_jax.main --config=configs/math_1b_async.py \\
        --config.engine.sglang.servers=4 --config.engine.sglang.gpus="(4, 5, 6, 7)" ...

Servers sample up to two steps ahead of the trainer and take new weights while completions are under
way. Token-wise weights correct for older weights and for the server's other numerics alike. A step
learns from the groups that finish first, and none is overtaken for long. docs/async.md describes
the options, and how to divide the GPUs from the times of a synchronous run.
"""

from typing import Any

from grpo_jax import configuration


def get_config():
  """Returns the config."""
  config: Any = configuration.load("math_1b_gpu").unlock()
  config.engine.sglang.gpus = (1,)
  config.engine.sglang.arguments = ("--mem-fraction-static=0.85",)  # the GPU is the server's own.
  config.rollout.max_staleness = 2
  return config
