"""An option has one default: the config and everything that takes the option agree on it.

The parts that a section feeds are listed here. What they share with the section is found by
looking at their signatures, so that a new field or a new argument is compared as soon as it exists.
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence

import pytest

from grpo_jax import batching, data
from grpo_jax.batching import packing
from grpo_jax.building import phases
from grpo_jax.config import base, configuration
from grpo_jax.data import group_options, parts, prompts, sources, tokenizer
from grpo_jax.engines import base as engines
from grpo_jax.engines import (
  jax_sampler,
  launching,
  server,
  sglang,
  sglang_client,
  sglang_options,
)
from grpo_jax.environments import math as math_environment
from grpo_jax.groups import filters, shaping
from grpo_jax.learn import monitoring, optim, sharding, train_step
from grpo_jax.models import export, lora, products, transformer
from grpo_jax.models import sources as model_sources
from grpo_jax.processes import exchanges, starting
from grpo_jax.rl import advantages, distillation, estimators, objective_options
from grpo_jax.rollouts import collecting, evaluation, stream
from grpo_jax.run_folder import checkpointing, loggers
from grpo_jax.run_folder.sinks import wandb
from grpo_trackers import mlflow, swanlab, trackio

FIELDS = configuration.plain_fields(base.get_config())

# Section -> the functions and classes that are given its fields.
TAKERS = {
  "": (data.make, loggers.make, optim.make, monitoring.Monitor),
  "advantages": (
    *(estimators.make, estimators.Estimator),
    *(advantages.group_relative, advantages.grpo, advantages.gdpo),
  ),
  "batching": (packing.plan, batching.assemble),
  "checkpoint": (checkpointing.open, checkpointing.Checkpoints),
  "data": (
    *(prompts.open_dataset, prompts.make_task, prompts.PromptDataset, sources.SourceConfig),
    *(parts.Part, data.make, data.make_dataloader),
  ),
  "distributed": (starting.start,),
  "dynamic_sampling": (stream.DynamicSampling,),
  "engine": (jax_sampler.make, jax_sampler.JaxSampler, sglang.make, sglang.SGLangEngine),
  "engine.sglang": (
    *(sglang_options.SGLangOptions, sglang.SGLangEngine),
    *(launching.LaunchOptions, server.Options, sglang_client.Timeouts),
  ),
  "environments.math": (math_environment.make, math_environment.MathEnvironments),
  "evaluation": (evaluation.run, data.make_held_out, prompts.held_out),
  "export": (export.to_huggingface, export.jobs),
  "model.lora": (lora.Options,),
  "filters": (filters.apply,),
  "learn": (train_step.make_update, monitoring.Monitor, monitoring.jobs, batching.assemble),
  "logging": (loggers.make,),
  "logging.mlflow": (mlflow.make,),
  "logging.swanlab": (swanlab.make,),
  "logging.trackio": (trackio.make,),
  "logging.wandb": (wandb.make,),
  "loss": (objective_options.Options,),
  "mesh": (sharding.make_mesh, sharding.mesh_sizes),
  "model": (
    *(model_sources.find, tokenizer.load, products.Products),
    *(train_step.make_logprobs, train_step.make_token_loss),
    *(transformer.Transformer, transformer.hidden_states),
    *(jax_sampler.make, jax_sampler.JaxSampler, sglang.make, sglang.SGLangEngine),
  ),
  "offline": (group_options.Options,),
  "optim": (optim.make, optim.make_schedule),
  "reference": (phases.ReferenceUpdate,),
  "rollout": (collecting.Limits, collecting.collect, stream.Sampler),
  "sampling": (engines.SamplingParams,),
  "shaping": (shaping.make, shaping.Shaping),
  "teacher": (distillation.Distillation,),
}
# Sections of placeholders, None for "as in config.data" or "as in config.sampling", and sections
# whose names the user chooses.
INHERITED = ("evaluation.data", "evaluation.sampling")
OPEN = ("data.tasks", "data.task_args", "data.dataloader_args", "optim.options", "engine.options")

# What a field is called where it is taken: (taker, its argument) -> field.
OTHER_NAMES = {
  (checkpointing.open, "mode"): "checkpoint.best_mode",
  (checkpointing.Checkpoints, "mode"): "checkpoint.best_mode",
  (evaluation.run, "schedule"): None,  # the order of requests.
  (collecting.collect, "schedule"): None,
  (launching.LaunchOptions, "dtype"): None,  # compute_dtype of the trainer.
  (launching.LaunchOptions, "max_running"): "engine.max_rows",
  (sglang.make, "dtype"): None,
  (sglang_client.Timeouts, "generate_s"): "engine.sglang.request_timeout_s",
  (sglang_client.Timeouts, "control_s"): "engine.sglang.control_timeout_s",
  (sglang_client.Timeouts, "health_s"): "engine.sglang.health_timeout_s",
  (train_step.make_logprobs, "implementation"): "model.logprobs",
  (train_step.make_logprobs, "temperature"): "sampling.temperature",
  (train_step.make_token_loss, "temperature"): "sampling.temperature",
}

# Where a default differs on purpose: (taker, field) -> why.
EXCEPTIONS = {
  **dict.fromkeys(
    [
      *((taker, "advantages.baseline") for taker in (advantages.group_relative, advantages.gdpo)),
      *((estimators.Estimator, f"advantages.{name}") for name in ("baseline", "scale")),
      (advantages.group_relative, "advantages.scale"),
    ],
    "None in the config keeps the setting of the estimator; GRPO's is the function's default",
  ),
  (checkpointing.open, "checkpoint.keep_best"): (
    "ranking needs a metric: a run knows its evaluation sets, a caller of the function names one"
  ),
  (checkpointing.open, "checkpoint.best_metric"): "None in the config: named by the evaluation set",
  **dict.fromkeys(
    [(taker, "data.split_seed") for taker in (prompts.open_dataset, parts.Part)],
    "None in the config is the seed of the run, which the function does not know",
  ),
  (data.make, "seed"): "the seed of a run is a field of its own; the function's is of one order",
  (launching.LaunchOptions, "engine.sglang.device"): "None in the config: what the machine has",
  (server.Options, "engine.sglang.probe_tolerance"): "None in the config: that of the dtype",
  (loggers.make, "total_steps"): "a log can be written without knowing where it ends",
  **dict.fromkeys(
    [
      *((t, "model.compute_dtype") for t in (products.Products, sglang.make, sglang.SGLangEngine)),
      (jax_sampler.JaxSampler, "model.compute_dtype"),
    ],
    "functions compute exactly unless told otherwise; a run of a real model is in bfloat16",
  ),
  **dict.fromkeys(
    [
      *((t, "model.attention") for t in (train_step.make_logprobs, train_step.make_token_loss)),
      *((t, "model.attention") for t in (transformer.Transformer, transformer.hidden_states)),
      *((t, "model.attention") for t in (sglang.make, sglang.SGLangEngine)),
      (jax_sampler.JaxSampler, "model.attention"),
    ],
    "None in the config is an Attention that chooses by itself",
  ),
  **dict.fromkeys(
    [(taker, "model.remat") for taker in (transformer.Transformer, transformer.hidden_states)],
    "there is no backward pass to save memory for, unless a caller differentiates",
  ),
}


# Sections of which no function takes a field under its own name and with a default.
NO_DEFAULTS = ("distributed", "evaluation", "reference")


def defaults(taker):
  """Returns the default of every argument, or field of a dataclass, that has one."""
  made = {}
  if dataclasses.is_dataclass(taker):
    factories = {f.name: f.default_factory for f in dataclasses.fields(taker)}
    made = {n: f() for n, f in factories.items() if f is not dataclasses.MISSING}
  parameters = inspect.signature(taker).parameters.values()
  return {p.name: p.default for p in parameters if p.default is not p.empty} | made


def shared():
  """Yields the taker, the field and the taker's default of everything that is shared."""
  for section, takers in TAKERS.items():
    for taker in takers:
      for name, default in defaults(taker).items():
        field = OTHER_NAMES.get((taker, name), f"{section}.{name}".removeprefix("."))
        if field in FIELDS:
          yield taker, field, default


def is_same(configured, default):
  """Returns whether two defaults mean the same; an empty mapping or list may also be None."""
  empty = (Mapping, Sequence)
  if isinstance(configured, empty) and not isinstance(configured, str) and not configured:
    return default is None or (isinstance(default, empty) and not default)
  if isinstance(default, type) or hasattr(default, "dtype"):
    return configured == getattr(default, "__name__", default)
  return type(configured) is type(default) and configured == default


SHARED = list(shared())


def test_every_shared_field_has_one_default():
  assert len(SHARED) > 200
  different = {
    (taker, field): f"{taker.__module__}.{taker.__qualname__}: {field} is {FIELDS[field]!r} in the"
    f" config and {default!r} there"
    for taker, field, default in SHARED
    if not is_same(FIELDS[field], default)
  }
  assert [text for key, text in different.items() if key not in EXCEPTIONS] == []
  unneeded = [key for key in EXCEPTIONS if key not in different]
  assert unneeded == [], "these do not differ any more"


def test_every_section_of_the_config_is_compared():
  sections = {name.rpartition(".")[0] for name in FIELDS}
  assert sections - set(TAKERS) - set(INHERITED) - set(OPEN) == set()
  fields = {field for _, field, _ in SHARED}
  empty = [s for s in TAKERS if not any(field.rpartition(".")[0] == s for field in fields)]
  assert empty == list(NO_DEFAULTS)


def test_times_of_a_config_without_distributed_are_its_defaults():
  times = {f"distributed.{name}": default for name, default in starting.DEFAULTS.items()}
  assert times == {name: FIELDS[name] for name in times}
  assert len(times) == 3
  assert exchanges.wait_s == FIELDS["distributed.wait_s"]


def test_sections_that_feed_one_part_are_made_of_it():
  for section, taker in {
    "engine.sglang": sglang_options.SGLangOptions,
    "loss": objective_options.Options,
    "offline": group_options.Options,
    "shaping": shaping.Shaping,
  }.items():
    of_section = {n.rpartition(".")[2] for n in FIELDS if n.rpartition(".")[0] == section}
    of_taker = set(inspect.signature(taker).parameters)
    assert of_section - {"loss_args"} == of_taker, section  # see own_functions.py.


@pytest.mark.parametrize("default", [0, 0.1, "a", None, (1,), True])
def test_the_comparison_sees_a_difference(default):
  others = [other for other in (0, 0.1, "a", None, (1,), True, 1) if repr(other) != repr(default)]
  assert is_same(default, default)
  assert not [other for other in others if is_same(default, other)]
