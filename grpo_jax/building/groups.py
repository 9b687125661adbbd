"""The prompts, environments and stream of groups of a run, made from its config."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from grpo_jax import data, environments
from grpo_jax.building.training_mode import ModeFunctions
from grpo_jax.config import ahead_options, configuration, data_options, modes, run_options
from grpo_jax.config.options import Config
from grpo_jax.data import recorded_calls
from grpo_jax.engines import multihost
from grpo_jax.environments.base import EnvironmentFactory
from grpo_jax.groups import filters
from grpo_jax.rollouts import ahead, group_source, stream

_log = logging.getLogger(__name__)


def make_prompts(
  config: Config, tokenizer: data.Tokenizer, opener: data.Opener, state: Mapping[str, Any]
) -> data.PromptStream:
  """Opens the prompts at the position in the stream's `state`; {} is the beginning."""
  options = data_options.stream_options(config)
  return data.make(tokenizer, state=state.get("prompts"), opener=opener, **options)


def with_tools(opener: data.Opener, made: environments.Environments) -> data.Opener:
  """Returns an opener of prompts whose chat template receives the tools of their environments.

  Args:
    opener: Opener of the mode. Recorded groups have their own tools.
    made: Environments of the run.

  Raises:
    ConfigError: An environment declares tools in another form.
  """
  found = {name: _tools_of(name, factory) for name, factory in made.items() if factory.tools}
  is_online = opener is data.open_dataset
  return functools.partial(opener, tools_of=found) if found and is_online else opener


def _tools_of(name: str, factory: EnvironmentFactory) -> tuple[Any, ...]:
  """Returns the tools that an environment declares, checked."""
  try:
    declared = tuple(factory.tools)
    recorded_calls.tools_of([*declared], f"environments.{name}.tools")
  except (TypeError, ValueError) as error:
    raise configuration.ConfigError(str(error)) from error
  if not all("function" in tool for tool in declared):
    raise configuration.ConfigError(
      f'environments.{name}.tools: each must be {{"type": "function", "function": {{"name",'
      f' "description", "parameters"}}}}, got {declared!r:.200}'
    )
  return declared


def make_stream(
  config: Config,
  prompts: Callable[[Mapping[str, Any]], group_source.PromptSource],
  parts: ModeFunctions,
  state: Mapping[str, Any],
  *,
  progress: stream.Progress,
  stop: Any,
) -> stream.OnlineStream:
  """Makes the stream of groups at the position in `state`; {} is the beginning.

  Args:
    config: Config of the run.
    prompts: Function that opens the prompts at a position.
    parts: Parts of the mode.
    state: Position of the run.
    progress: Function that shows how far a phase has come.
    stop: Flag that becomes true when the run is asked to end; see `interrupts.Flag`.
  """
  return stream.OnlineStream(
    _group_source(config, prompts, parts, state, progress=progress, stop=stop),
    prompts_per_step=config.rollout.prompts_per_step,
    dynamic=run_options.dynamic_sampling(config),
    keep=functools.partial(filters.apply, **run_options.filters_of(config)),
    surplus=state.get("surplus", ()),
  )


def _group_source(
  config: Config,
  prompts: Callable[[Mapping[str, Any]], group_source.PromptSource],
  parts: ModeFunctions,
  state: Mapping[str, Any],
  *,
  progress: stream.Progress,
  stop: Any,
) -> group_source.GroupSource:
  """Makes what samples groups when they are drawn, or ahead of that."""
  if not ahead_options.is_ahead(config):
    if ahead.is_split(state):
      raise configuration.ConfigError(
        "rollout.max_staleness=0 cannot continue this run: its checkpoint has prompts that later"
        " ones of the same block have overtaken (rollout.max_staleness above 1, or another"
        " rollout.prompts_per_step); keep rollout.max_staleness above 0"
      )
    return group_source.SynchronousSource(prompts(state), parts.sample)
  assert parts.attempts is not None  # validated.
  if found := ahead_options.warning(config):
    _log.warning("%s", found)
  known = state.get("ahead", {})
  rule = ahead_options.rule(config)
  return ahead.AheadSource(
    prompts({**state, "prompts": known["next"]} if known else state),
    parts.attempts(rule.in_turn),
    rule,
    block=ahead_options.block(config),
    max_error_share=config.rollout.max_error_share,
    total_steps=config.total_steps,
    reopen=prompts,
    progress=progress,
    state=state,
    stop=stop,
  )


def make_environments(config: Config) -> environments.Environments:
  """Makes the environments; {} if they do not score anything.

  Raises:
    ConfigError: A setting is wrong, or a host of the run cannot have them.
  """
  is_needed = modes.needs_environments(config)
  found = config.environments if is_needed else {}

  def make(_: Any) -> environments.Environments:
    try:
      return environments.make(**{name: _settled(config, name, own) for name, own in found.items()})
    except ValueError as error:
      raise configuration.ConfigError(f"environments: {error}") from error

  return multihost.together(make, what="the environments", failure=configuration.ConfigError)


def with_conversations(config: Config, made: environments.Environments) -> Config:
  """Returns the config, in which agents' environments make completions conversations."""
  if config.rollout.conversations is None and any(each.is_agent for each in made.values()):
    return configuration.replaced(config, {"rollout.conversations": True})
  return config


def _settled(config: Config, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the settings of an environment; one that computes attention gets `model.attention`."""
  if settings.get("attention") is None and environments.has_setting(name, settings, "attention"):
    return {**settings, "attention": config.model.attention}
  return dict(settings)
