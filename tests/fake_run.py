"""A run folder as a run would leave it, without a model: for tests and for looking at reports.

PYTHONPATH=.:tests python tests/fake_run.py RUN_DIR   writes one and its report.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np

from grpo_jax.metrics import scored_groups
from grpo_jax.run_folder import console, loggers
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup

CONFIG = {
  "seed": 0,
  "total_steps": 60,
  "model": {"path": "HuggingFaceTB/SmolLM2-135M-Instruct", "compute_dtype": "float32"},
  "data": {"source": "reasoning_gym", "task": "chain_sum"},
  "engine": {"name": "jax_sampler"},
  "sampling": {"temperature": 1.0, "max_tokens": 64},
  "rollout": {"prompts_per_step": 8, "group_size": 8},
  "loss": {"kl_coef": 0.0, "clip_high": 0.28},
  "optim": {"optimizer": "adamw", "learning_rate": 1e-5},
}
WORDS = [
  " the",
  " sum",
  " is",
  " 12",
  " +",
  " 7",
  " =",
  " 19",
  ".",
  "\n",
  " so",
  " é",
  " answer",
  ":",
]
STOP = len(WORDS)


def decode(ids) -> str:
  """Text of token ids."""
  return "".join("<|im_end|>" if i == STOP else WORDS[i] for i in ids)


def make_group(rng: np.random.Generator, step: int, index: int, skill: float, size: int = 8):
  """One prompt and its rollouts, better with skill."""
  a, b = rng.integers(1, 100, 2)
  rollouts = []
  for _ in range(size):
    cut = rng.random() < 0.15 * (1 - skill)
    length = int(rng.integers(8, 40)) if not cut else 64
    ids = rng.integers(0, STOP, length).astype(np.int32)
    if not cut:
      ids[-1] = STOP
    right = rng.random() < skill
    rollouts.append(
      Rollout(
        completion_ids=ids,
        loss_mask=np.ones(length, bool),
        behavior_logprobs=-rng.exponential(0.6 - 0.4 * skill, length).astype(np.float32),
        weight_versions=np.full(length, step, np.int32),
        finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
        reward=float(right and not cut),
        text=decode(ids),
        metrics={"accuracy": float(right and not cut)},
        reward_components={"correct": float(right), "format": float(not cut)},
      )
    )
  text = f"<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n"
  prompt = Prompt(
    f"chain_sum-{step * 8 + index}",
    np.arange(20, dtype=np.int32),
    "reasoning_gym",
    text=text,
    info={"expected_answer": str(a + b)},
  )
  return RolloutGroup(prompt, tuple(rollouts))


def advantages_of(groups) -> list[np.ndarray]:
  """Centred and scaled rewards."""
  return [(g.rewards - g.rewards.mean()) / (g.rewards.std() + 1e-6) for g in groups]


def write_steps(logger: loggers.Logger, first: int, end: int, *, seed: int = 0, total: int = 60):
  """Writes steps first <= step < end as the loop does; equal steps are equal in every call."""
  for step in range(first, end):
    rng = np.random.default_rng([seed, step])
    skill = 0.08 + 0.75 / (1 + math.exp(-(step - 0.4 * total) / (0.12 * total)))
    groups = [make_group(rng, step, index, skill) for index in range(8)]
    noise = [
      [
        r.behavior_logprobs + rng.normal(0, 3e-7, len(r.completion_ids)).astype(np.float32)
        for r in g.rollouts
      ]
      for g in groups
    ]
    values = {"weight_version": step} | scored_groups.rollout_metrics(groups, step=step)
    values["signal/lost_share"] = values["rollout/no_signal_share"]
    values |= {
      "train/loss": rng.normal(0, 0.01),
      "train/grad_norm": math.exp(rng.normal(0.0, 0.3)),
      "train/entropy": 1.2 - 0.9 * skill + rng.normal(0, 0.03),
      **({"all/entropy": 1.1 - 0.9 * skill} if step % 10 == 0 else {}),
      "train/kl_to_reference": 0.002 * step + abs(rng.normal(0, 0.002)),
      "train/clip_low_share": abs(rng.normal(0.0, 0.002)),
      "train/clip_high_share": abs(rng.normal(0.0, 0.001)),
      "mismatch/abs_logprob_max": math.exp(rng.normal(-13.5, 0.3)),
      "mismatch/token_mult_prob_error": 1 + abs(rng.normal(0, 1e-6)),
      "mismatch/gen_kl_error": math.exp(rng.normal(-28, 0.3)),
      "time/sample_s": 5.5 + rng.normal(0, 0.2),
      "time/score_s": 0.1,
      "time/learn_s": 3.1 + rng.normal(0, 0.1),
      "time/sync_s": 0.05,
      "perf/tokens_per_s": 230 + rng.normal(0, 8),
      "perf/peak_rss_gib": 2.9,
    }
    parts = sum(value for name, value in values.items() if name.startswith("time/"))
    values["time/step_s"] = parts + 0.3
    if step % (total // 6) == 0:
      held_out = [make_group(rng, 10_000 + step, index, skill) for index in range(32)]
      logger.write(
        step,
        scored_groups.evaluation_metrics(held_out, name="heldout", pass_k=(1, 4))
        | {"time/evaluate_s": 6.0},
      )
    logger.write_rollouts(step, groups, advantages_of(groups), noise)
    logger.write(step, values)


def make_run(
  workdir: Path, *, steps: int = 60, screen: console.TrainingScreen | None = None, **options
) -> Path:
  """Writes a whole run folder and returns it."""
  workdir.mkdir(parents=True, exist_ok=True)
  (workdir / "config.json").write_text(json.dumps(CONFIG | {"total_steps": steps}))
  logger = loggers.make(workdir, total_steps=steps, decode=decode, screen=screen, **options)
  write_steps(logger, 0, steps, total=max(steps, 6))
  rng = np.random.default_rng(1)
  groups = [make_group(rng, steps, index, 0.83) for index in range(32)]
  logger.write(steps, scored_groups.evaluation_metrics(groups, name="heldout", pass_k=(1, 4)))
  logger.close()
  return workdir


if __name__ == "__main__":
  from grpo_jax import report

  print(
    report.write(make_run(Path(sys.argv[1]), steps=int(sys.argv[2]) if len(sys.argv) > 2 else 60))
  )
