"""A conversation of many turns: Qwen2.5-1.5B-Instruct solves sliding puzzles, a move a turn.

python -m grpo_jax.main --config=configs/sliding_puzzle.py --workdir=runs/sliding_puzzle

Settings of NeMo RL's example of several turns (`grpo_sliding_puzzle.yaml`): boards of 2×2 to
5×5, up to 15 random moves away from order, at most 50 moves. Unlike there, nothing is cut off the
distribution that is sampled from. The puzzles are generated, no file is needed. For a small
model and one device, begin with the easiest ones:

    --config.data.task_args.size=2 --config.data.task_args.shuffle_moves=1
"""

from grpo_jax.config import base


def get_config():
  """Returns the config."""
  config = base.get_config()
  config.total_steps = 10000

  config.model.path = "Qwen/Qwen2.5-1.5B-Instruct"
  config.mesh.data = 1
  config.mesh.fsdp = -1

  config.data.kind = "function"
  config.data.task = "grpo_environments.sliding_puzzle.puzzle"
  config.data.task_args = dict(size=5, min_size=2, shuffle_moves=15)
  config.data.task_seed = 1
  config.data.size = 1_000_000
  config.data.output_key = ""  # a board has no expected answer.
  config.data.environment = "sliding_puzzle"
  config.environments = dict(sliding_puzzle=dict(module="sliding_puzzle", max_moves=50))

  config.rollout.prompts_per_step = 32
  config.rollout.group_size = 16
  config.rollout.max_turns = 50
  config.rollout.max_tokens = 3072
  config.sampling.max_tokens = 512  # of a turn; </action> ends it.

  config.advantages.baseline = "leave_one_out"
  config.loss.kl_coef = 0.01
  config.optim.learning_rate = 5e-6
  config.optim.warmup_steps = 50

  config.evaluation.every_steps = 10
  config.evaluation.num_prompts = 256
  config.evaluation.data.task_seed = 2_000_000_001  # no puzzle of the training.
  config.checkpoint.every_steps = 10
  config.checkpoint.keep_best = 3
  return config
