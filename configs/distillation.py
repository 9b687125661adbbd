"""SmolLM2-135M-Instruct learns arithmetic from the larger SmolLM2-360M-Instruct.

python -m grpo_jax.main --config=configs/distillation.py --workdir=runs/distillation

The policy samples answers, and every token of them is compared with what the teacher would have
written there: on-policy distillation (docs/distillation.md). Rewards are measured and not learned
from, unless teacher.reward_coef says so. The teacher stays in memory: 2 bytes per parameter in
bfloat16, 4 in float32. Any model with the same tokenizer can teach, and so can servers
(teacher.urls).
"""

from grpo_jax.config import base


def get_config():
  """Returns the config."""
  config = base.get_config()
  config.seed = 0
  config.total_steps = 100

  config.model.path = "HuggingFaceTB/SmolLM2-135M-Instruct"
  config.model.compute_dtype = "float32"
  config.teacher.path = "HuggingFaceTB/SmolLM2-360M-Instruct"
  config.teacher.dtype = "bfloat16"

  config.data.kind = "function"
  config.data.task = "grpo_jax.data.arithmetic_problems.chain_sum"
  config.data.task_args = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2)
  config.data.task_seed = 1
  config.data.size = 20000
  config.data.environment = "arithmetic"
  config.environments = dict(arithmetic=dict(module="math", answer="last_number", workers=1))

  # A group of one is enough: no completion is compared with another.
  config.rollout.prompts_per_step = 16
  config.rollout.group_size = 4
  config.sampling.max_tokens = 64
  config.batching.microbatch_tokens = 1024

  config.loss.loss = "clipped"
  config.loss.kl_coef = 0.0
  config.optim.learning_rate = 1e-5
  config.optim.weight_decay = 0.0

  config.evaluation.every_steps = 20
  config.evaluation.num_prompts = 100
  config.evaluation.data.task_seed = 1_000_003
  config.evaluation.sampling.temperature = 0.0
  config.checkpoint.every_steps = 20
  return config
