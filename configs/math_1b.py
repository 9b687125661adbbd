"""Qwen2.5-1.5B-Instruct on OpenMathInstruct-2, with the settings of NeMo RL's `grpo_math_1B.yaml`.

    python -m grpo_jax.main --config=configs/math_1b.py --workdir=runs/math_1b

The model (3.1 GB) and the data (train_1M, 0.6 GB) come from the Hugging Face hub; 5 % of the rows
are held out, as there. Your own rows, JSONL with {"problem": ..., "expected_answer": ...}, take
their place with --config.data.path=FILE, and 5 % of them are held out, too. With a file of held-out
rows add --config.data.split_validation_size=0 --config.evaluation.data.path=FILE.

docs/coming_from_nemo_rl.md maps every key of the YAML file. Weights and optimizer state are split
over all devices. By the compilers' numbers, eight TPU v5e or one H100 are enough; `grpo-jax plan`
says whether it still fits with other settings (docs/plan.md).
"""

from grpo_jax.config import base

COT = (
  "Think step-by-step to solve the following problem. Output your answer inside of \\boxed{} tags.:"
  "\n{}\n\nLet's think step-by-step"
)


def get_config():
  """Returns the config."""
  config = base.get_config()
  config.seed = 42
  config.total_steps = 1000

  config.model.path = "Qwen/Qwen2.5-1.5B-Instruct"
  config.mesh.data = 1
  config.mesh.fsdp = -1

  config.data.dataset = "OpenMathInstruct-2"
  config.data.split_validation_size = 0.05
  config.data.prompt_template = COT
  config.data.max_prompt_tokens = 512

  config.rollout.prompts_per_step = 32
  config.rollout.group_size = 16
  config.rollout.max_tokens = 512
  config.sampling.max_tokens = 512

  config.advantages.baseline = "leave_one_out"
  config.loss.kl_coef = 0.01
  config.optim.learning_rate = 5e-6
  config.optim.warmup_steps = 50
  config.optim.weight_decay = 0.01
  config.optim.max_grad_norm = 1.0

  config.evaluation.every_steps = 10
  config.evaluation.at_start = False
  config.evaluation.num_prompts = 256
  config.checkpoint.every_steps = 10
  config.checkpoint.keep_best = 3
  return config
