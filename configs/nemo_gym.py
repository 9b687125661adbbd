"""Learns from rollouts that NeMo Gym has collected, without sampling.

    python -m grpo_jax.main --config=configs/nemo_gym.py --config.data.path=rollouts.jsonl \\
        --workdir=runs/nemo_gym

The file is what NeMo Gym writes, or {"input", "output", "reward"} rows, made of it by
scripts/convert_nemo_gym.py; rollouts of one task form a group, also a group of one. Without
`reward` in the rows, `--config.offline.rewards=environment` has `data.environment` compute it.

configs/nemo_gym.py:online samples on the same tasks, or on the tasks of NeMo Gym's environments
(rows with `responses_create_params`), and has NeMo Gym's own resources server verify the samples:

    python -m grpo_jax.main --config=configs/nemo_gym.py:online --config.data.path=tasks.jsonl \\
        --config.environments.nemo_gym.url=http://127.0.0.1:8000 --workdir=runs/nemo_gym

To score with an environment of yours instead, name it in `data.environment`. docs/offline.md,
docs/third_party_environments.md.
"""

from grpo_jax.config import base


def get_config(mode: str = "offline"):
  """Returns the config; "online" reads the prompts of the same files, and samples."""
  config = base.get_config()
  config.mode = mode
  config.total_steps = 1000

  config.model.path = "Qwen/Qwen2.5-1.5B-Instruct"
  config.data.path = "rollouts.jsonl"
  config.data.format = "nemo_gym" if mode == "online" else "auto"
  config.data.epochs = 3
  config.data.max_prompt_tokens = 1024
  # A twentieth of the groups is for evaluation.
  config.data.split_validation_size = 0.05

  config.rollout.prompts_per_step = 32
  config.rollout.max_tokens = 2048
  config.batching.microbatch_tokens = 8192

  if mode == "online":
    config.data.environment = "nemo_gym"
    config.data.output_key = ""  # the resources server knows the answers.
    config.environments.nemo_gym = dict(module="nemo_gym", url="http://127.0.0.1:8000")
  if mode == "offline":
    # NeMo Gym often attempts a task once: alone in its group, a response has nothing to be better
    # than. This estimator compares with all responses of the step. docs/offline.md.
    config.advantages.estimator = "reinforce_pp"
    config.loss.importance_correction = "token"
    config.loss.importance_truncation = "tis"
    config.loss.importance_high = 2.0
  config.loss.kl_coef = 0.01
  config.optim.learning_rate = 1e-6

  config.evaluation.every_steps = 20
  config.checkpoint.every_steps = 20
  return config
