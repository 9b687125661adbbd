"""Whether a run learns from completions that it samples or from recorded ones."""

from collections.abc import Iterator

from grpo_jax.config.options import Config


def is_offline(config: Config) -> bool:
  """Returns whether the groups are recorded."""
  return config.mode == "offline"


def needs_environments(config: Config) -> bool:
  """Returns whether completions are scored by environments."""
  return not is_offline(config) or config.offline.rewards == "environment"


def problems(config: Config) -> Iterator[str]:
  """Yields a message for each option that cannot work offline."""
  if config.data.task is not None:
    yield "mode='offline' needs recorded responses: a reasoning-gym task (data.task) has none"
  shaping = config.shaping
  if shaping.overlong_buffer_tokens is not None and shaping.max_completion_tokens is None:
    yield (
      "shaping.overlong_buffer_tokens needs shaping.max_completion_tokens where mode='offline': "
      "sampling.max_tokens does not bound recorded responses"
    )
  if config.loss.router_replay:
    yield (
      "loss.router_replay=True needs completions that are sampled: recorded groups have no experts"
    )
  if config.rollout.max_turns > 1 and config.offline.rewards == "environment":
    yield "offline.rewards='environment' scores responses of one turn: set rollout.max_turns=1"
