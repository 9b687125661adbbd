"""One run of this trainer, through the same `train` that a user's command runs.

Run by compare.py:
  PYTHON ours.py WORKLOAD.json RECORD.json

Evaluation, samples, recorded rollouts and the measurement of all completions (every tenth step and
the last one by default) are off; everything else is as in `grpo_jax/config/base.py`. Sampling
includes scoring the completions; all other time of a step counts as training.
"""

import ast
import json
import pathlib
import tempfile
from typing import Any

import ml_collections
import record
import workload as workloads

from grpo_jax import metrics, train
from grpo_jax.config import base

MAX_PROMPT_TOKENS = 128  # prompts of the workloads have about 38.


def fields(workload: workloads.Workload) -> dict[str, Any]:
  """Returns the workload as config fields: one optimizer step per batch, no KL."""
  return {
    "seed": workload.seed,
    "total_steps": workload.steps,
    "model.path": workload.model,
    "model.compute_dtype": workload.dtype,
    "data.kind": "jsonl",
    "data.path": workload.problems,
    "data.input_key": "question",
    "data.output_key": "answer",
    "data.system_prompt": workloads.SYSTEM_PROMPT,
    "data.shuffle": False,
    "data.environment": "benchmark",
    "rollout.prompts_per_step": workload.prompts,
    "rollout.group_size": workload.group,
    "sampling.max_tokens": workload.completion,
    "engine.max_rows": workload.prompts * workload.group,
    "data.max_prompt_tokens": MAX_PROMPT_TOKENS,
    "loss.kl_coef": 0.0,
    "loss.aggregation": "token_mean",
    "optim.optimizer": "adamw",
    "optim.learning_rate": workload.learning_rate,
    "optim.weight_decay": 0.0,
    "optim.max_grad_norm": None,
    "learn.report_all_every_steps": 0,
    "learn.report_kl_every_steps": 0,
    "evaluation.every_steps": 0,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "checkpoint.every_steps": 0,
    "logging.sinks": ("jsonl", "console"),
    "logging.samples_every_steps": 0,
    "logging.rollouts_every_steps": 0,
  }


def make_config(workload: workloads.Workload) -> ml_collections.ConfigDict:
  """Returns the base configuration with the workload's fields, and then its overrides."""
  config = base.get_config()
  config.environments = {"benchmark": {"module": "function", "path": "our_reward.score"}}
  config.lock()  # from here on, an unknown field is an error.
  config.update_from_flattened_dict(fields(workload))
  config.update_from_flattened_dict(dict(map(parse_override, workload.overrides)))
  return config


def parse_override(text: str) -> tuple[str, Any]:
  """Parses "section.field=value"; a value that is not a Python literal is a string."""
  field, _, value = text.partition("=")
  try:
    return field, ast.literal_eval(value)
  except (ValueError, SyntaxError):
    return field, value


def step_of(row: dict[str, Any], workload: workloads.Workload) -> record.Step:
  """Makes the step of one line of `metrics.jsonl`."""
  prompt_tokens = round(row["rollout/prompt_tokens_mean"] * workload.prompts)
  completions = workload.prompts * workload.group
  completion_tokens = round(row["rollout/completion_tokens_mean"] * completions)
  places = row["batch/rows"] * row["batch/row_tokens"]
  return record.Step(
    wall_s=row["time/step_s"],
    generate_s=row["time/sample_s"],
    train_s=row["time/step_s"] - row["time/sample_s"],
    prompt_tokens=prompt_tokens,
    completion_tokens=completion_tokens,
    trained_tokens=round(places * row["batch/packing_efficiency"]) if places else 0,
    reward_mean=row["rollout/reward_mean"],
  )


def main(workload_path: str, record_path: str) -> None:
  """Runs the workload and writes its record."""
  workload = workloads.read(workload_path)
  config = make_config(workload)
  with tempfile.TemporaryDirectory() as folder:
    train.train(config, pathlib.Path(folder))
    rows, _ = metrics.parse_lines((pathlib.Path(folder) / "metrics.jsonl").read_text())
  steps = [step_of(row, workload) for row in rows if "time/step_s" in row]
  record.write(
    record_path,
    program="ours",
    workload=workload,
    steps=steps,
    settings=json.loads(config.to_json_best_effort(), parse_constant=str),
    packages=record.versions("grpo-jax", "jax", "jaxlib", "flax", "optax", "transformers"),
  )


if __name__ == "__main__":
  main(*workloads.command_line(__doc__))
