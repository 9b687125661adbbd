"""DAPO on mathematics: clip-higher, overlong shaping, dynamic sampling, token mean, no KL.

    python -m grpo_jax.main --config=configs/dapo_math.py --config.data.path=train.jsonl \\
        --config.evaluation.data.path=validation.jsonl --workdir=runs/dapo_math

The files are JSONL with {"problem": ..., "expected_answer": ...}, one problem a line. Settings are
those of the paper (Yu et al. 2025, arXiv:2503.14476), with the dual clip of NeMo RL's recipe; but
lengths and the number of prompts are those of one machine: the paper has 512 prompts a step, 20480
tokens a completion and a buffer of 4096. docs/rewards.md explains shaping and dynamic sampling.
Weights and optimizer state are split over all devices.
"""

from grpo_jax.config import base


def get_config():
  """Returns the config."""
  config = base.get_config()
  config.seed = 42
  config.total_steps = 1000

  config.model.path = "Qwen/Qwen2.5-7B"
  config.mesh.data = 1
  config.mesh.fsdp = -1

  config.data.path = "train.jsonl"
  config.data.prompt_template = (
    "Solve the following math problem step by step, and put the final answer inside \\boxed{{}}."
    "\n\n{}"
  )
  config.data.max_prompt_tokens = 1024
  config.evaluation.data.path = "validation.jsonl"

  config.rollout.prompts_per_step = 64
  config.rollout.group_size = 16
  config.rollout.max_tokens = 3072
  config.sampling.max_tokens = 2048

  # Groups that are all right or all wrong are replaced; a surplus waits for the next step.
  # Its weights are then one step older, so the ratio to them is corrected.
  config.dynamic_sampling.enabled = True
  config.dynamic_sampling.max_rounds = 10
  config.loss.importance_correction = "token"
  config.loss.importance_truncation = "tis"
  config.loss.importance_high = 2.0

  config.shaping.scale_from = (0.0, 1.0)  # wrong and right, as the environment has them,
  config.shaping.scale_to = (-1.0, 1.0)  # and as the paper has.
  config.shaping.overlong_buffer_tokens = 512
  config.shaping.overlong_penalty = 1.0

  config.loss.loss = "clipped"
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.28
  config.loss.dual_clip = 10.0
  config.loss.kl_coef = 0.0
  config.loss.aggregation = "token_mean"
  config.learn.minibatches = 16

  config.optim.learning_rate = 1e-6
  config.optim.warmup_steps = 20
  config.optim.weight_decay = 0.1
  config.optim.max_grad_norm = 1.0

  config.evaluation.every_steps = 20
  config.evaluation.at_start = False
  config.evaluation.num_prompts = 30
  config.evaluation.group_size = 16
  config.evaluation.sampling.top_p = 0.7
  config.checkpoint.every_steps = 20
  config.checkpoint.keep_best = 3
  return config
