"""The types and ranges of all fields of a config, by dotted name, and whether None is allowed.
Pure.

Rows come from the parts that take the options where such a part exists; the rest is here.
A test finds fields of `base` without a row.
"""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from grpo_jax import environments
from grpo_jax.compilation import precision
from grpo_jax.config import modes, sections
from grpo_jax.data import field_kinds as of_data
from grpo_jax.data import group_options as offline
from grpo_jax.engines import base as engines
from grpo_jax.engines import prompt_scoring, sglang_options
from grpo_jax.groups import filters, shaping
from grpo_jax.learn import optim
from grpo_jax.models import lora
from grpo_jax.rl import distillation, estimators, objective_options
from grpo_jax.rollouts import collecting as rollout
from grpo_jax.rollouts import stream
from grpo_jax.values import checked, names

STAND_IN = "(any word)"  # see `stand_ins`.
_SIZE = checked.whole(low=1)
_SINK = checked.Kind(
  "the name of a sink, or a mapping with its name and its options",
  lambda x: checked.text().fits(x.get("name") if isinstance(x, Mapping) else x),
)
_EVERY = checked.whole(low=0)
_NAMES = checked.several(checked.nonempty(), least=1)
_TARGETS = checked.Kind(
  f"{lora.ALL!r}, or {_NAMES.needed}", lambda x: x == lora.ALL or _NAMES.fits(x)
)
_AXIS = checked.Kind(
  "an integer >= 1, or -1 for the rest of the devices",
  lambda x: checked.whole(low=-1).fits(x) and x != 0,
)


def _section(name: str, kinds: Mapping[str, checked.Kind], *left_out: str) -> dict[str, Any]:
  return {f"{name}.{field}": kind for field, kind in kinds.items() if field not in left_out}


def _optional(kinds: Mapping[str, checked.Kind], *names: str) -> dict[str, checked.Kind]:
  return {name: checked.optional(kinds[name]) for name in names or kinds}


KINDS: Mapping[str, checked.Kind] = {
  "seed": checked.whole(low=0, high=2**32 - 1),
  "total_steps": _SIZE,
  "mode": checked.choice(modes.MODES),
  "model.path": checked.path(),
  "model.fallback": checked.text(empty=True, none=True),
  "model.cache_dir": checked.path(none=True),
  "model.chat_template": checked.text(none=True),
  "model.chat_template_args": checked.mapping(),
  "model.tool_calls": checked.text(none=True),
  "model.compute_dtype": checked.choice(("float32", "bfloat16")),
  "model.product_dtype": checked.choice(("float32", "bfloat16"), none=True),
  "model.matmul_precision": checked.choice(precision.PRECISIONS, none=True),
  "model.remat": checked.choice(("full", "dots", "none")),
  "model.logprobs": checked.text(none=True),
  "model.attention": checked.text(none=True),
  "model.lora.rank": checked.whole(low=1, none=True),
  "model.lora.alpha": checked.number(above=0),
  "model.lora.targets": _TARGETS,
  "model.lora.init": checked.choice(lora.INITIALIZERS),
  "model.lora.rank_stabilized": checked.switch(),
  "model.lora.base_dtype": checked.choice(lora.BASE_DTYPES),
  "model.lora.path": checked.path(none=True),
  "model.lora.sync": checked.choice(("merged", "adapter"), none=True),
  "mesh.data": _AXIS,
  "mesh.fsdp": _AXIS,
  "mesh.tensor": _AXIS,
  "distributed.coordinator": checked.text(none=True),
  "distributed.processes": checked.whole(low=1, none=True),
  "distributed.index": checked.whole(low=0, none=True),
  "distributed.secret_env": checked.text(none=True),
  "distributed.join_s": checked.number(above=0),
  "distributed.heartbeat_s": checked.number(above=0),
  "distributed.wait_s": checked.number(above=0),
  **_section("data", of_data.DATASET, "side", "for_evaluation", "weight"),
  **_section("data", of_data.ORDER),
  **_section("offline", offline.KINDS),
  "engine.name": checked.text(),
  "engine.max_rows": _SIZE,
  "engine.devices": checked.several(checked.whole(low=0), least=1, none=True),
  "engine.options": checked.mapping(),
  **_section("engine.sglang", sglang_options.KINDS),
  **_section("sampling", engines.SAMPLING_KINDS, "stop_ids"),
  "rollout.prompts_per_step": _SIZE,
  "rollout.group_size": _SIZE,
  **_section("rollout", rollout.LIMIT_KINDS),
  "rollout.max_tokens": checked.whole(low=2),
  "rollout.schedule": checked.choice(rollout.SCHEDULES),
  "rollout.max_staleness": checked.whole(low=0),
  "rollout.conversations": checked.optional(checked.switch()),
  "dynamic_sampling.enabled": checked.switch(),
  **_section("dynamic_sampling", stream.DYNAMIC_KINDS),
  **_section("shaping", shaping.KINDS),
  **_section("filters", filters.KINDS, "by_component"),
  **_section("advantages", estimators.KINDS),
  "advantages.estimator": checked.text(),
  "advantages.estimator_args": checked.mapping(),
  "advantages.ddof": checked.whole(low=0, high=1),
  "advantages.eps": checked.number(low=0),
  **_section("loss", objective_options.KINDS),
  "loss.loss": checked.text(),
  "loss.loss_args": checked.mapping(),
  "reference.update_every_steps": _EVERY,
  "reference.mixup": checked.number(above=0, high=1),
  "reference.reset_optimizer": checked.switch(),
  **_section("teacher", distillation.KINDS),
  "teacher.path": checked.path(none=True),
  "teacher.urls": checked.several(checked.text()),
  "teacher.temperature": checked.number(above=0, none=True),
  "teacher.dtype": checked.choice(("float32", "bfloat16"), none=True),
  "teacher.api": checked.choice(tuple(prompt_scoring.APIS)),
  "teacher.model": checked.text(none=True),
  "teacher.api_key_env": checked.text(none=True),
  "teacher.timeout_s": checked.number(above=0),
  "teacher.retries": _EVERY,
  "teacher.concurrency": _SIZE,
  "batching.row_tokens": checked.whole(low=2, none=True),
  "batching.microbatch_tokens": checked.whole(low=1, none=True),
  "batching.row_buckets": checked.several(checked.whole(low=2), least=1, none=True),
  "batching.drop_truncated": checked.switch(),
  "batching.skip_zero_advantage": checked.switch(),
  "batching.share_prefixes": checked.switch(),
  "batching.pack": checked.switch(),
  **_section("optim", optim.KINDS, "total_steps"),
  "optim.schedule": checked.text(),
  "optim.schedule_args": checked.mapping(),
  "optim.options": checked.mapping(),
  "learn.epochs": _SIZE,
  "learn.minibatches": _SIZE,
  "learn.report_entropy": checked.switch(),
  "learn.gradient_in_forward": checked.switch(),
  "learn.max_skipped_steps": _SIZE,
  "learn.report_all_every_steps": _EVERY,
  "learn.report_kl_every_steps": _EVERY,
  "evaluation.every_steps": _EVERY,
  "evaluation.at_start": checked.switch(),
  "evaluation.at_end": checked.switch(),
  "evaluation.num_prompts": _SIZE,
  "evaluation.group_size": _SIZE,
  "evaluation.pass_k": checked.several(_SIZE),
  "evaluation.keep_mb": checked.number(low=0),
  "evaluation.name": checked.text(),
  **_section("evaluation.data", _optional(of_data.DATASET)),
  "evaluation.datasets": checked.several(checked.mapping()),
  **_section("evaluation.sampling", _optional(engines.SAMPLING_KINDS), "stop_ids", "logprobs"),
  "checkpoint.every_steps": _EVERY,
  "checkpoint.keep_last": checked.whole(low=1, none=True),
  "checkpoint.keep_best": _EVERY,
  "checkpoint.best_metric": checked.text(none=True),
  "checkpoint.best_mode": checked.choice(("max", "min")),
  "logging.sinks": checked.several(_SINK, least=1),
  "logging.tensorboard": checked.switch(),
  "logging.samples_every_steps": _EVERY,
  "logging.rollouts_every_steps": _EVERY,
  "logging.timeout_s": checked.number(above=0),
  "logging.wandb.project": checked.text(),
  **{f"logging.wandb.{name}": checked.text(none=True) for name in ("entity", "name", "group")},
  "logging.wandb.tags": checked.several(checked.text()),
  "logging.wandb.mode": checked.choice(("online", "offline", "disabled"), none=True),
  "logging.mlflow.experiment": checked.text(),
  **{f"logging.mlflow.{name}": checked.text(none=True) for name in ("tracking_uri", "name")},
  "logging.trackio.project": checked.text(),
  **{f"logging.trackio.{name}": checked.text(none=True) for name in ("name", "space_id")},
  "logging.swanlab.project": checked.text(),
  **{f"logging.swanlab.{name}": checked.text(none=True) for name in ("workspace", "name")},
  "logging.swanlab.tags": checked.several(checked.text()),
  "logging.swanlab.mode": checked.choice(("online", "offline", "local", "disabled"), none=True),
  "export.dtype": checked.choice(("float32", "bfloat16", "float16"), none=True),
  "export.max_shard_gb": checked.number(above=0, none=True),
}

# The part that takes the fields below these knows their names and rejects unknown ones.
OPEN = (
  "advantages.estimator_args.*",
  "data.dataloader_args.*",
  "data.task_args.*",
  "data.tasks.*",
  "engine.options.*",
  "engine.sglang.environment.*",
  "environments.*",
  "loss.loss_args.*",
  "model.chat_template_args.*",
  "optim.options.*",
  "optim.schedule_args.*",
)


def wrong(fields: Mapping[str, Any]) -> dict[str, str]:
  """Returns messages, by name, for known fields that have the wrong type or are out of range."""
  found = {
    name: KINDS[name].problem(name, value) for name, value in fields.items() if name in KINDS
  }
  return {name: problem for name, problem in found.items() if problem}


def stand_ins(name: str) -> tuple[Any, Any]:
  """Returns two valid values of a field, with which rules about other fields can be tried.

  They differ if possible: a complaint that appears with both does not depend on this field.
  """
  kind = KINDS[name]
  some = (
    None,
    *kind.words,
    8,
    1,
    0.5,
    False,
    True,
    (),
    (8,),
    (0.0, 1.0),
    (STAND_IN,),
    {},
    10**6,
    STAND_IN,
  )
  fitting = [value for value in some if kind.fits(value)]
  return fitting[0], fitting[-1]


def problems(
  fields: Mapping[str, Any], place_of: Callable[[str], str] = lambda name: ""
) -> Iterator[str]:
  """Yields a message for every field that is unknown, has the wrong type or is out of range.

  Args:
    fields: Values by dotted name, from `configuration.plain_fields`.
    place_of: Function that returns "file:line: " where a field is set; "" if it is not known.
  """
  yield from wrong(fields).values()
  of_environments: dict[str, dict[str, Any]] = {}
  for name, value in fields.items():
    section, _, rest = name.partition(".")
    if section == "environments" and rest:
      environment, _, setting = rest.partition(".")
      if not setting and value:  # an empty section has no settings.
        yield f"{name} must be a mapping of settings, got {checked.shown(value)}"
      elif setting:
        of_environments.setdefault(environment, {})[setting] = value
    elif name not in KINDS and not any(fnmatchcase(name, pattern) for pattern in OPEN):
      is_empty = isinstance(value, Mapping) and not value
      if not is_empty:
        close = names.nearest_field(name, KINDS, cutoff=0.8)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        unknown = f"there is no field {name!r}{hint}, but it is set to {checked.shown(value)}"
        yield place_of(name) + (sections.left_out(name) or unknown)
  for environment, settings in of_environments.items():
    yield from environments.problems(environment, settings)
