"""The quickstart as it is shipped, to its second evaluation."""

import json
import pathlib
from typing import Any

from gpu_day_parts import child, running

# The metrics of metrics.jsonl that are kept.
_METRICS = ("step", "time/", "mismatch/", "perf/", "train/loss", "rollout/reward_mean", "eval/")


TITLE = "the quickstart as shipped, to its second evaluation"
LIMIT_S = 240.0
SIZES = {"total_steps": 7, "checkpoint.every_steps": 0}  # fields of the configuration.
TINY = {
  **{"total_steps": 2, "rollout.prompts_per_step": 2, "rollout.group_size": 4},
  **{"sampling.max_tokens": 4, "evaluation.num_prompts": 2},
}


def measure(record: child.Record, settings: running.Settings) -> None:
  """Runs the quickstart.

  Raises:
    Skipped: The model is not on this machine.
  """
  child.open_device(record, settings)
  from grpo_jax import train
  from grpo_jax.config import configuration
  from grpo_jax.models import sources, tiny
  from grpo_jax.models.errors import ModelError

  config: Any = configuration.load(str(running.ROOT / "configs" / "quickstart.py"))
  folder = pathlib.Path(settings.scratch)
  config.update_from_flattened_dict(vars(settings.sizes(SIZES, TINY)))
  if settings.model or settings.tiny:
    config.model.path = settings.model or str(tiny.write(folder / "model"))
  try:
    record.put(model=sources.find(config.model.path, fallback=config.model.fallback).taken)
  except (ModelError, OSError) as error:
    raise child.Skipped(child.first_line(error)) from error
  metrics = folder / "quickstart" / "metrics.jsonl"
  try:
    train.train(config, metrics.parent)
  finally:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    steps = [json.loads(line) for line in lines]
    kept = [{k: v for k, v in step.items() if k.startswith(_METRICS)} for step in steps]
    record.put(steps=kept, headline=headline(kept))


def headline(steps: list[dict[str, Any]]) -> str:
  """Returns what the steps say about learning, speed, compilation and mismatch."""
  of = lambda ending: [
    value for step in steps for name, value in step.items() if name.endswith(ending)
  ]
  if not of("time/step_s"):
    return "no step ended"
  return (
    f"{len(of('time/step_s'))} steps, the last in {of('time/step_s')[-1]:.2f} s; right answers"
    f" {' → '.join(f'{x:.1%}' for x in of('/accuracy'))};"
    f" {sum(of('perf/compilations')):.0f} programs compiled;"
    f" |Δ logprob| of engine and trainer at most {max(of('mismatch/abs_logprob_mean')):.1e} nats"
  )
