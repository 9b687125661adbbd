"""Qwen2.5-0.5B-Instruct, rewarded by a reward model of another family, whose logit is the reward.

    python -m grpo_jax.main --config=configs/reward_model.py --config.data.path=prompts.jsonl \\
        --config.evaluation.data.path=held_out.jsonl --workdir=runs/reward_model

The files are JSONL with {"problem": ...} or chats, {"messages": [...]}; no answers are needed. The
reward model is any LlamaForSequenceClassification, Qwen2ForSequenceClassification or
Qwen3ForSequenceClassification, a folder or a hub name. To try it without a download:

    python -m grpo_jax.models.tiny /tmp/policy qwen2
    python -m grpo_jax.models.tiny /tmp/rewarder qwen3 reward_model

and --config.model.path=/tmp/policy --config.environments.reward_model.path=/tmp/rewarder.
"""

from grpo_jax.config import base


def get_config():
  """Returns the config."""
  config = base.get_config()
  config.total_steps = 500

  config.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
  config.data.path = "prompts.jsonl"
  config.data.output_key = ""  # rows have no answer.
  config.data.environment = "reward_model"
  config.evaluation.data.path = "held_out.jsonl"
  config.environments = dict(
    reward_model=dict(
      module="reward_model",
      path="Skywork/Skywork-Reward-V2-Qwen3-0.6B",
      max_tokens=2048,  # of the conversation, in the reward model's tokens.
      batch_size=16,  # conversations scored side by side.
      compute_dtype="bfloat16",
      shift=0.0,  # the reward is (logit - shift) * scale.
      scale=1.0,
    )
  )
  config.rollout.environment_concurrency = 32  # enough calls at a time to fill batches.

  config.rollout.prompts_per_step = 16
  config.rollout.group_size = 8
  config.loss.kl_coef = 0.02  # a learned reward is hacked: stay near the reference.
  config.optim.learning_rate = 1e-6
  config.checkpoint.best_metric = "eval/heldout/reward_mean"
  return config
