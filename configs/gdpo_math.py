"""GDPO with three rewards on GSM8K, with the settings of NeMo RL's `gdpo_math_1B.yaml`.

    python -m grpo_jax.main --config=configs/gdpo_math.py --workdir=runs/gdpo_math \\
        --config.data.path=gsm8k_train.jsonl --config.evaluation.data.path=gsm8k_test.jsonl

Without the paths the dataset comes from the Hugging Face hub.
The rewards are `env/math/reward/correct`, `format` (thoughts and answer in tags) and `integer`.
Each is normalised within its group by itself, so that the easy ones do not hide the hard one. The
paper (Liu et al. 2026, arXiv:2601.05242) compares this with a normalised sum of the three:
`--config.advantages.estimator=grpo --config.advantages.weights=None`. Weights and optimizer state
are split over all devices.
"""

from grpo_jax.config import base

FORMAT = (
  "Think about the problem first, and then give the answer as a whole number. Write your thoughts"
  " between <think> and </think>, and on the next line the answer, digits only, between <answer>"
  " and </answer>:\n<think>thoughts</think>\n<answer>answer</answer>"
)


def get_config():
  """Returns the config."""
  config = base.get_config()
  config.seed = 42
  config.total_steps = 1000

  config.model.path = "Qwen/Qwen2.5-1.5B-Instruct"
  config.mesh.data = 1
  config.mesh.fsdp = -1

  config.data.dataset = "GSM8K"
  config.data.system_prompt = FORMAT
  config.data.max_prompt_tokens = 512
  config.environments.math = {"module": "math_multi_reward"}

  config.rollout.prompts_per_step = 32
  config.rollout.group_size = 16
  config.rollout.max_tokens = 1024
  config.sampling.max_tokens = 512

  config.advantages.estimator = "gdpo"
  config.advantages.weights = (1.0, 1.0, 1.0)  # of correct, format and integer.
  config.loss.kl_coef = 0.01
  config.optim.learning_rate = 5e-6
  config.optim.schedule = "cosine"
  config.optim.warmup_steps = 10
  config.optim.weight_decay = 0.0
  config.optim.max_grad_norm = 1.0

  config.evaluation.every_steps = 10
  config.evaluation.at_start = False
  config.evaluation.num_prompts = 256
  config.checkpoint.every_steps = 10
  config.checkpoint.keep_best = 3
  return config
