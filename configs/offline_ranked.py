"""Learns from groups of ranked responses, without sampling: a chat model on human rankings.

    python -m grpo_jax.main --config=configs/offline_ranked.py --config.data.path=train.json \\
        --config.evaluation.data.path=val.json --workdir=runs/ranked

The files are JSON (one list) or JSONL of {"prompt": …, "group": [{"response": …, "rank": 1}, …]},
rank 1 the best; docs/offline.md. Evaluated is how well the policy ranks the held-out groups, in all
and by their "group_type". Learning rate, warm-up and epochs are those of NeMo RL's GRPO tutorial.
"""

from grpo_jax.config import base


def get_config():
  """Returns the config."""
  config = base.get_config()
  config.mode = "offline"
  config.total_steps = 1000

  config.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
  config.data.path = "train.json"
  config.data.epochs = 3
  config.data.max_prompt_tokens = 384
  config.evaluation.data.path = "val.json"

  config.offline.rank_reward = "linear"
  config.rollout.prompts_per_step = 8  # groups a step; of all the responses they have.
  config.rollout.max_tokens = 512

  # The responses are not the policy's own: old/behavior weighs them, and is bounded.
  config.loss.importance_correction = "token"
  config.loss.importance_truncation = "tis"
  config.loss.importance_high = 2.0
  config.loss.kl_coef = 0.01
  config.optim.learning_rate = 5e-6
  config.optim.warmup_steps = 100

  config.evaluation.every_steps = 50
  config.checkpoint.every_steps = 50
  return config
