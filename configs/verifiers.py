"""An environment of the package verifiers trains Qwen2.5-1.5B-Instruct.

python -m grpo_jax.main --config=configs/verifiers.py:NAME --workdir=runs/verifiers

NAME is the name of an installed environment, or its module: `pip install "verifiers<0.5"`, and
the environment's own package. Its arguments are `--config.data.task_args.ARGUMENT=VALUE`. An
environment is code of another author, which runs in this process. docs/third_party_environments.md.
"""

from grpo_jax.config import base


def get_config(name: str = ""):
  """Returns the config for an environment of that name."""
  config = base.get_config()
  config.total_steps = 500

  config.model.path = "Qwen/Qwen2.5-1.5B-Instruct"
  config.mesh.data = 1
  config.mesh.fsdp = -1

  config.data.kind = "grpo_environments.verifiers.rows"
  config.data.task = name or None
  config.data.output_key = ""  # the environment knows the answers.
  config.data.environment = "verifiers"
  config.environments = dict(verifiers=dict(module="verifiers"))
  # A twentieth of the tasks is for evaluation; before verifiers 0.4, environments may have a data
  # set of their own for it: config.evaluation.data.split = "eval", and 0 here.
  config.data.split_validation_size = 0.05

  config.rollout.prompts_per_step = 32
  config.rollout.group_size = 16
  config.rollout.max_turns = 16
  config.rollout.max_tokens = 4096
  config.sampling.max_tokens = 1024  # of a turn.

  config.loss.kl_coef = 0.0
  config.optim.learning_rate = 2e-6
  config.optim.warmup_steps = 10
  return config
