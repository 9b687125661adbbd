"""configs/math_1b.py on GPUs of 80 GB, one or several, shared by the trainer and an SGLang server.

    make sglang-cuda
    XLA_PYTHON_CLIENT_MEM_FRACTION=.62 python -m grpo_jax.main --config=configs/math_1b_gpu.py \\
        --workdir=runs/math_1b_gpu

JAX takes 62 % of the memory, SGLang 28 % (engine.sglang.arguments), the rest is slack. Training
takes 20 bytes a parameter: 31 GB for 1.5 B parameters, and some 8 GB of temporaries; without the
reference policy (loss.kl_coef=0.0) it takes 16 (`grpo-jax plan`, docs/sglang_gpu.md). For a
larger model, have the server give its memory back during updates:
engine.sglang.release_memory=True, and JAX allocate as it goes:
XLA_PYTHON_CLIENT_ALLOCATOR=platform. On several GPUs weights and optimizer are split over all that
are visible, and the server shares the first one. To keep them apart, give the trainer its own by
CUDA_VISIBLE_DEVICES, and the servers theirs by engine.sglang.gpus. More: docs/sglang_gpu.md.
"""

from typing import Any

from grpo_jax import configuration


def get_config():
  """Returns the config."""
  config: Any = configuration.load("math_1b").unlock()
  config.engine.name = "sglang"
  config.engine.max_rows = 512
  config.engine.sglang.arguments = ("--mem-fraction-static=0.28",)
  config.engine.sglang.deterministic = False  # SGLang's batch-invariant kernels are slower.
  config.batching.microbatch_tokens = 16384
  # The server computes in bfloat16, with other kernels than the trainer: token-wise correction.
  config.loss.importance_correction = "token"
  config.loss.importance_truncation = "tis"
  config.loss.importance_high = 2.0
  return config
