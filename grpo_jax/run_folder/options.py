"""The options of checkpoints, logs and trackers."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from grpo_jax.values import checked
from grpo_jax.values.options import option, section

_EVERY = checked.whole(low=0)
_SINK = checked.Kind(
  "the name of a sink, or a mapping with its name and its options",
  lambda x: checked.text().fits(x.get("name") if isinstance(x, Mapping) else x),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
  """Checkpoints: the section `checkpoint` of a config."""

  every_steps: int = option(10, "0: only at the end", _EVERY)
  keep_last: int | None = option(
    2, "number of newest checkpoints to keep; None: all", checked.whole(low=1, none=True)
  )
  keep_best: int = option(1, "number of best checkpoints to keep as well, by `best_metric`", _EVERY)
  best_metric: str | None = option(
    None,
    "None: accuracy of the first evaluation set, or its mean reward if accuracy is not measured",
  )
  best_mode: Literal["max", "min"] = option("max", '"max" or "min" of best_metric')


@dataclasses.dataclass(frozen=True, kw_only=True)
class WandbOptions:
  """The tracker "wandb": the section `logging.wandb` of a config."""

  project: str = option("grpo_jax", "project of the run")
  entity: str | None = option(None, "user or team; None: the default of the account")
  name: str | None = option(None, "name of the run; None: that of the run folder")
  group: str | None = option(None, "group of runs")
  tags: tuple[str, ...] = option((), "tags of the run")
  mode: str | None = option(
    None,
    '"online", "offline" or "disabled"; None: WANDB_MODE, or online',
    checked.choice(("online", "offline", "disabled"), none=True),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingOptions:
  """What a run writes and prints: the section `logging` of a config."""

  sinks: tuple[str | Mapping[str, Any], ...] = option(
    ("jsonl", "tensorboard", "console"),
    'where steps are logged; a sink of your own is "module.Class" or dict(name=…): docs/metrics.md',
    checked.several(_SINK, least=1),
  )
  samples_every_steps: int = option(
    10, "print a group of completions, and send some to the trackers; 0: never", _EVERY
  )
  rollouts_every_steps: int = option(1, "write rollouts/step_NNNNNN.jsonl; 0: never", _EVERY)
  timeout_s: float = option(
    60.0,
    "a tracker, or a sink of your own, that does not answer for so long is not used again",
    checked.number(above=0),
  )
  wandb: WandbOptions = section(
    WandbOptions, 'the sink "wandb": Weights & Biases; others: docs/trackers.md'
  )
