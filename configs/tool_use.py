"""Tool use: Qwen2.5-1.5B-Instruct learns to call a calculator for products it cannot do alone.

python -m grpo_jax.main --config=configs/tool_use.py --workdir=runs/tool_use

`configs/tool_use.py:functions` declares the calculator to the chat template, and the model calls it
in the form of its family; the default is a tag in the model's text, which every model can learn.

Problems are generated (`grpo_jax/data/arithmetic_problems.py`). For word problems from a file of
{"question", "answer"} rows, such as GSM8K's:

    --config.data.kind=jsonl --config.data.path=train.jsonl --config.data.input_key=question \\
    --config.data.output_key=answer --config.evaluation.data.path=test.jsonl
"""

from grpo_jax.config import base

SYSTEM = (
  "You can use a calculator: write <calculator>expression</calculator>, for example "
  "<calculator>(3 + 4) * 12</calculator>, and its result comes back. It knows + - * / // % **, "
  "parentheses, abs, min, max, round, sqrt, floor and ceil. "
  "Give the final answer as <answer>number</answer>."
)
ANSWER = "Give the final answer as <answer>number</answer>."


def get_config(calls: str = "text"):
  """Returns the config of one of two ways to call the calculator: "text", "functions"."""
  if calls not in ("text", "functions"):
    raise ValueError(f"calls are 'text' or 'functions', got {calls!r}")
  config = base.get_config()
  config.total_steps = 500

  config.model.path = "Qwen/Qwen2.5-1.5B-Instruct"
  config.mesh.data = 1
  config.mesh.fsdp = -1

  config.data.kind = "function"
  config.data.task = "grpo_jax.data.arithmetic_problems.products"
  config.data.task_args = dict(min_terms=2, max_terms=3, min_digits=2, max_digits=4)
  config.data.task_seed = 1
  config.data.size = 100_000
  config.data.system_prompt = SYSTEM if calls == "text" else ANSWER
  config.data.environment = "tool_use"
  # Tools may also be modules and functions of your own; docs/tools.md
  declared = dict(tools=("calculator",)) if calls == "functions" else {}
  config.environments = dict(
    tool_use=dict(module="tool_use", answer="tag", max_calls=6, call_reward=0.0, **declared)
  )

  config.rollout.prompts_per_step = 32
  config.rollout.group_size = 16
  config.rollout.max_turns = 8  # calls, and the answer.
  config.rollout.max_tokens = 1024
  config.sampling.max_tokens = 256  # of a turn; a call ends it.

  config.loss.kl_coef = 0.0
  config.optim.learning_rate = 2e-6
  config.optim.warmup_steps = 10

  config.evaluation.data.task_seed = 1_000_000_001
  return config
