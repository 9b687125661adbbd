"""The first cell of a notebook in tests, before its own: a run has a tiny model and two steps.

tests/notebooks/executing.py puts this file into the notebook's kernel.
"""

import functools
import json
import pathlib

import grpo_jax
from grpo_jax.models import tiny

TINY = {
  "model.path": str(tiny.write("tiny")),
  "rollout.prompts_per_step": 4,
  "rollout.group_size": 4,
  "sampling.max_tokens": 8,
  "evaluation.num_prompts": 4,
  "learn.report_all_every_steps": 0,
  "learn.report_kl_every_steps": 0,
}


# What is read from a hub: rows of GSM8K, for training and for evaluation.
for name in ("train", "test"):
  row = {"question": f"How many letters has {name}?", "answer": f"{len(name)}\n#### {len(name)}"}
  pathlib.Path(f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 4)


def letters(prompt, completion, info):
  """A reward that a random model can earn."""
  return sum(map(ord, completion)) % 7 / 6


@functools.wraps(grpo_jax.api.train)
def train(config, workdir, *, reward=letters, total_steps=2, **arguments):
  if grpo_jax.configuration.load(config).data.dataset:
    arguments |= {"data.path": "train.jsonl", "evaluation.data.path": "test.jsonl"}
  arguments |= TINY | {"reward": reward, "total_steps": min(total_steps, 2)}
  return grpo_jax.api.train(config, workdir, **arguments)


grpo_jax.train = train  # in place of the module, which the package has imported already.
