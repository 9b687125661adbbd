"""A code model on problems with tests, of the shape of HumanEval.

    python -m grpo_jax.main --config=configs/code_humaneval.py --config.data.path=train.jsonl \\
        --config.evaluation.data.path=HumanEval.jsonl --workdir=runs/code

A row is {"prompt": a function's head and docstring, "test": code with check(candidate),
"entry_point": its name}; docs/code_environment.md has the other shapes. HumanEval itself is for
evaluation: train on other problems. Programs run in bubblewrap (`apt-get install bubblewrap`).
"""

from grpo_jax.config import base

INSTRUCTION = (
  "Complete the following Python function. Answer with the whole function in one ```python block."
  "\n\n```python\n{}```"
)


def get_config():
  """Returns the config."""
  config = base.get_config()
  config.total_steps = 200

  config.model.path = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
  config.mesh.data = 1
  config.mesh.fsdp = -1

  config.data.path = "train.jsonl"
  config.data.input_key = "prompt"
  config.data.output_key = ""  # the rows have tests in place of an answer.
  config.data.prompt_template = INSTRUCTION
  config.data.max_prompt_tokens = 1024
  config.data.environment = "code"
  config.evaluation.data.path = "HumanEval.jsonl"
  config.environments = dict(
    code=dict(
      module="code",
      code="fence",  # where the program must stand: fence (```), tag (<code>), raw, any.
      partial=False,  # True: the reward is the share of the tests that pass.
      format_reward=0.0,  # added if there is a program where it must stand.
      sandbox="bubblewrap",  # or "landlock", "limits", which leave more open.
      workers=4,  # programs that run at the same time.
      timeout_s=5.0,  # longest run of a program with its tests.
      total_timeout_s=20.0,  # of its runs on all inputs of a row.
      memory_mib=512,  # of a program.
      output_kib=1024,  # of what it prints, or a function returns.
      scratch_mib=16,  # of the files that it writes.
    )
  )

  config.rollout.prompts_per_step = 16
  config.rollout.group_size = 8
  config.rollout.max_tokens = 2048
  config.rollout.environment_concurrency = 4  # as many as workers: none waits on its time-out.
  config.sampling.max_tokens = 1024

  config.loss.kl_coef = 0.0
  config.loss.clip_high = 0.28
  config.optim.learning_rate = 1e-6
  config.optim.warmup_steps = 10
  config.filters.drop_no_signal = True

  config.evaluation.num_prompts = 164
  config.evaluation.sampling.temperature = 0.0
  return config
