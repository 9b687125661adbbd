"""Mathematics and programs in one run: a row names its task, the task its environment.

    python -m grpo_jax.main --config=configs/math_and_code.py --config.data.path=train.jsonl \\
        --config.evaluation.data.path=validation.jsonl --workdir=runs/math_and_code

Rows of both tasks, in any order:

    {"task_name": "math", "problem": "What is 1+1?", "expected_answer": "2"}
    {"task_name": "code", "prompt": a function's head and docstring, "test": code with
     check(candidate), "entry_point": its name}

Metrics are logged by environment: env/math/*, env/code/*, eval/NAME/math/accuracy. Programs run in
bubblewrap (`apt-get install bubblewrap`); docs/code_environment.md has their other shapes.
"""

from typing import Any

from grpo_jax import configuration


def get_config():
  """Returns the config."""
  config: Any = configuration.load("code_humaneval").unlock()
  config.model.path = "Qwen/Qwen2.5-1.5B-Instruct"

  code = {key: config.data[key] for key in ("input_key", "output_key", "prompt_template")}
  config.data.input_key = "problem"
  config.data.output_key = "expected_answer"
  config.data.prompt_template = "{}"
  config.data.tasks = dict(
    math=dict(
      environment="math",
      prompt_template="{}\n\nPut the final answer inside \\boxed{{}}.",
    ),
    code=dict(environment="code", **code),
  )
  config.evaluation.data.path = "validation.jsonl"
  config.evaluation.num_prompts = 256
  config.environments.math = dict(module="math", answer="boxed")
  return config
