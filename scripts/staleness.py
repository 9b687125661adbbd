"""Measures what staleness costs: the same training with older and older completions.

    python -m scripts.staleness
    python -m scripts.staleness --staleness 0,1,8 --seeds 0 --config.optim.learning_rate=3e-3
    python -m scripts.staleness --config=quickstart --corrections token --workdir=FOLDER

For each value of rollout.max_staleness, with and without loss.importance_correction="token" (with
0 only the first of these), one run for each seed. Without --config it is a toy task that takes
seconds a run on a CPU: a random model of two layers learns to write vowels, and its reward is their
share. Printed is the mean reward, in percent, of an evaluation at the end, by the trained weights;
for a config with evaluations, the accuracies of all of them. Overrides are those of grpo-jax train.

This measures learning and not speed. With 0 and 1 runs are deterministic; with more they depend on
timing. docs/async.md has the table.
"""

import argparse
import json
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_jax import train
from grpo_jax.commands import cli
from grpo_jax.config import base, command_line
from grpo_jax.models import tiny

STALENESS = (0, 1, 2, 4, 8)
SEEDS = (0, 1, 2)
CORRECTIONS = ("token", "none")
TOY = {
  "total_steps": 20,
  "model.compute_dtype": "float32",
  "data.environment": "vowels",
  "rollout.prompts_per_step": 4,
  "rollout.group_size": 8,
  "rollout.max_tokens": 96,
  "sampling.max_tokens": 8,
  "engine.max_rows": 32,
  "batching.row_tokens": 128,
  "loss.kl_coef": 0.0,
  "optim.learning_rate": 1e-2,
  "evaluation.every_steps": 0,
  "evaluation.at_start": False,
  "evaluation.num_prompts": 64,
  "evaluation.group_size": 4,
  "checkpoint.every_steps": 0,
  "logging.sinks": ("jsonl", "console"),
}


def vowels(prompt: str, completion: str, info: Any) -> float:
  """Returns the share of vowels among eight letters."""
  del prompt, info
  return sum(letter in "aeiou" for letter in completion[:8]) / 8


def get_config() -> Any:
  """Returns the config of the toy task, without model and data."""
  config = base.get_config()
  config.environments = {"vowels": {"module": "function", "path": "scripts.staleness.vowels"}}
  config.update_from_flattened_dict(TOY)
  return config


def toy_flags(folder: pathlib.Path) -> list[str]:
  """Writes model and data of the toy task into a folder, and returns the flags that name them."""
  rows = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(64)]
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  (folder / "rows.jsonl").write_text(lines)
  return [
    f"--config={__file__}",
    f"--config.model.path={tiny.write(folder / 'model')}",
    f"--config.data.path={folder / 'rows.jsonl'}",
    f"--config.evaluation.data.path={folder / 'rows.jsonl'}",
  ]


def outcomes(workdir: pathlib.Path) -> list[float]:
  """Returns accuracies of all evaluations of a run, in percent; for the toy, mean rewards."""
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  found = []
  for row in rows:
    values = {name.rpartition("/")[2]: v for name, v in row.items() if name.startswith("eval/")}
    if values:
      found.append(100 * values.get("accuracy", values["reward_mean"]))
  return found


def measured(
  flags: Sequence[str], staleness: int, correction: str, seed: int, workdir: pathlib.Path
) -> list[float]:
  """Trains once and returns what its evaluations found."""
  varied = {
    "seed": seed,
    "rollout.max_staleness": staleness,
    "loss.importance_correction": correction,
  }
  command = command_line.parse([*flags, *(f"--config.{n}={v}" for n, v in varied.items())])
  train.train(command.config, workdir)
  return outcomes(workdir)


def main(arguments: Sequence[str]) -> int:
  """Prints a line for each case; returns the exit code.

  Args:
    arguments: Words after the name of the script.
  """
  parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
  numbers = lambda text: [int(word) for word in text.split(",")]
  parser.add_argument("--staleness", type=numbers, default=STALENESS)
  parser.add_argument("--seeds", type=numbers, default=SEEDS)
  parser.add_argument("--corrections", type=lambda text: text.split(","), default=CORRECTIONS)
  parser.add_argument("--config")
  parser.add_argument("--workdir", type=pathlib.Path)
  options, overrides = parser.parse_known_args(arguments)
  if wrong := [word for word in overrides if not word.startswith(("--config.", "--noconfig."))]:
    parser.error(f"unrecognized arguments: {' '.join(wrong)}")
  with tempfile.TemporaryDirectory() as scratch:
    folder = options.workdir or pathlib.Path(scratch)
    folder.mkdir(parents=True, exist_ok=True)
    flags = [f"--config={options.config}"] if options.config else toy_flags(folder)
    lines = ["staleness  correction  of each seed"]
    for staleness in options.staleness:
      for correction in options.corrections[: 1 if staleness == 0 else None]:
        found = []
        for seed in options.seeds:
          workdir = folder / f"k{staleness}_{correction}_seed{seed}"
          found.append(measured([*flags, *overrides], staleness, correction, seed, workdir))
        shown = ["→".join(f"{value:.1f}" for value in each) for each in found]
        mean = np.mean([each[-1] for each in found])
        lines.append(f"{staleness:9d}  {correction:10s}  {'  '.join(shown)}  mean {mean:.1f}")
        print("\n".join(lines), flush=True)  # between what the runs print.
  return 0


if __name__ == "__main__":
  sys.exit(cli.reported(main, sys.argv[1:]))
