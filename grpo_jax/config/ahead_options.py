"""The options of sampling ahead of learning, made from `config.rollout` and checked."""

from collections.abc import Iterator

from grpo_jax.config import modes
from grpo_jax.config.options import Config
from grpo_jax.rollouts.admission import AdmissionRule


def is_ahead(config: Config) -> bool:
  """Returns whether groups are sampled ahead of the steps that learn from them."""
  return config.rollout.max_staleness > 0


def rule(config: Config) -> AdmissionRule:
  """Returns the rule of admission, and of the order in which groups are learned from."""
  return AdmissionRule(
    max_staleness=config.rollout.max_staleness,
    groups_per_step=config.rollout.prompts_per_step,
  )


def block(config: Config) -> int:
  """Returns the number of prompts that are read together."""
  of_round = config.dynamic_sampling.prompts_per_round if config.dynamic_sampling.enabled else None
  return of_round or config.rollout.prompts_per_step


def updates_in_flight(config: Config) -> bool:
  """Returns whether the engine gets new weights while completions are under way."""
  return not rule(config).in_turn


def problems(config: Config) -> Iterator[str]:
  """Yields a message for each combination of these options that cannot work."""
  rollout = config.rollout
  if not is_ahead(config):
    if config.loss.old_logprobs == "interpolated":
      yield (
        "loss.old_logprobs='interpolated' needs rollout.max_staleness above 0: it interpolates"
        " between versions of the weights, and without it every token is of the newest"
      )
    return
  if modes.is_offline(config):
    yield (
      f"rollout.max_staleness={rollout.max_staleness} is about sampling, and mode='offline' samples"
      " nothing: set it to 0"
    )
  room = rollout.max_staleness * rollout.prompts_per_step
  if block(config) > room:
    yield (
      f"dynamic_sampling.prompts_per_round={block(config)} must be at most rollout.max_staleness"
      f" * rollout.prompts_per_step, which is {room}: a round is sampled ahead as a whole"
    )


def warning(config: Config) -> str | None:
  """Returns a warning about a loss that treats old completions as new ones; None: it does not."""
  if not is_ahead(config) or config.loss.importance_correction != "none":
    return None
  if config.loss.use_behavior_logprobs:
    return None
  return (
    f"rollout.max_staleness={config.rollout.max_staleness} with loss.importance_correction='none':"
    " completions of older weights are learned from as if the newest had sampled them;"
    " 'token' weighs them (docs/async.md)"
  )
