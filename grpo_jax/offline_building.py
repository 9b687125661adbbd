"""From a config with mode = "offline" to the parts that are not those of online training."""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from grpo_jax import data, offline, rollout, scoring
from grpo_jax.data.groups import GroupDataset, OfflineGroup
from grpo_jax.data.prompts import prompt_style
from grpo_jax.data.sources import SourceConfig, open_source
from grpo_jax.environments.base import EnvironmentFactory
from grpo_jax.learn import train_step

# An ml_collections.ConfigDict, whose fields a type checker cannot know.
Config = Any

MODES = ("online", "offline")


def is_offline(config: Config) -> bool:
  """Returns whether the groups are recorded ones."""
  return config.mode == "offline"


def needs_environments(config: Config) -> bool:
  """Returns whether completions are scored by environments."""
  return not is_offline(config) or config.offline.rewards == "environment"


def problems(config: Config) -> Iterator[str]:
  """Yields what cannot work offline."""
  try:
    offline.Options(**config.offline)
  except ValueError as error:
    yield str(error)
  if config.data.kind == "reasoning_gym":
    yield "mode='offline' needs recorded responses: data.kind='reasoning_gym' has none"
  if config.rollout.max_turns > 1 and config.offline.rewards == "environment":
    yield "offline.rewards='environment' is for responses of one turn: rollout.max_turns=1"


def open_groups(config: Config, tokenizer: data.Tokenizer) -> offline.RecordedGroups:
  """Opens the groups to train on, at their beginning."""
  return offline.RecordedGroups(
    _dataset(config, config.data.to_dict(), tokenizer),
    shuffle=config.data.shuffle,
    seed=config.seed,
    epochs=config.data.epochs,
    on_error=config.data.on_error,
    group_size=config.offline.group_size,
  )


def make_scorer(config: Config, score: train_step.Scorer, mesh: Mesh) -> scoring.GroupScorer:
  """Makes what gives logprobs of whole groups, in rows as the update has them."""
  return scoring.GroupScorer(
    score,
    mesh,
    groups_at_once=config.rollout.prompts_per_step,
    row_tokens=config.batching.row_tokens,
    microbatch_tokens=config.batching.microbatch_tokens,
    row_buckets=config.batching.row_buckets,
  )


def fill_behavior(
  config: Config,
  source: offline.RecordedGroups,
  scorer: scoring.GroupScorer,
  params: Any,
  workdir: pathlib.Path,
) -> None:
  """Has the initial policy score the responses whose logprobs are not recorded."""
  has_dynamic_sampling = config.dynamic_sampling.enabled
  source.fill_behavior(
    workdir / "behavior_logprobs",
    lambda groups: scorer(params, groups),
    wanted=None if has_dynamic_sampling else config.total_steps * config.rollout.prompts_per_step,
    source=config.offline.behavior,
    on_progress=lambda done, total: print(
      f"scoring under the initial policy: {done} of {total} groups at most", flush=True
    ),
  )


def place(
  config: Config,
  source: offline.RecordedGroups,
  cursor: int,
  *,
  environments: Mapping[str, EnvironmentFactory],
  tokenizer: data.Tokenizer,
  limits: rollout.Limits,
) -> None:
  """Sets the groups to where the run goes on, and has environments score them, if they are to."""
  source.seek(cursor)
  if needs_environments(config):
    source.rescore_with(
      lambda groups: offline.rescored(groups, environments, tokenizer, limits=limits)
    )


def make_evaluation(
  config: Config,
  settings: Mapping[str, Any],
  scorer: scoring.GroupScorer,
  *,
  environments: Mapping[str, EnvironmentFactory],
  tokenizer: data.Tokenizer,
  limits: rollout.Limits,
) -> offline.Evaluation:
  """Reads the groups that are held out; none if nothing is ever evaluated.

  Args:
    config: of the run.
    settings: of the data, with what differs for evaluation.
    scorer: see `make_scorer`.
    environments: score the responses, if they are to.
    tokenizer: of the model.
    limits: of the environments.
  """
  options = config.evaluation
  items: Sequence[OfflineGroup] = []
  if options.at_start or options.at_end or options.every_steps:
    items = offline.held_out(
      _dataset(config, settings, tokenizer),
      limit=options.num_prompts,
      on_error=settings["on_error"],
    )
  if needs_environments(config) and items:
    groups = offline.rescored(
      [item.group for item in items], environments, tokenizer, limits=limits
    )
    items = [
      dataclasses.replace(item, group=group) for item, group in zip(items, groups, strict=True)
    ]
  return offline.Evaluation(items, scorer, name=options.name, score=config.offline.score)


def _dataset(
  config: Config, settings: Mapping[str, Any], tokenizer: data.Tokenizer
) -> GroupDataset:
  """Opens a file of recorded groups."""
  fields = {field.name for field in dataclasses.fields(SourceConfig)}
  source = open_source(
    SourceConfig(**{name: settings[name] for name in fields if name in settings})
  )
  style = {k: settings[k] for k in ("system_prompt", "system_prompt_file", "prompt_template")}
  return offline.open_groups(
    source,
    tokenizer,
    offline.Options(**config.offline),
    style=prompt_style(**style, prompt_file=settings["prompt_file"]),
    format=settings["format"],
    input_key=settings["input_key"],
    output_key=settings["output_key"] or None,
    environment=settings["environment"],
    max_prompt_tokens=settings["max_prompt_tokens"],
    max_tokens=min(config.rollout.max_tokens, config.batching.row_tokens),
    overlong=settings["overlong"],
    on_error=settings["on_error"],
  )
