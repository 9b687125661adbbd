"""The sizes of groups for which a run compiles the computation of advantages."""

from collections.abc import Sequence

from grpo_jax.config import modes
from grpo_jax.config.options import Config

# Sizes of recorded groups, whose maximum is unknown; larger groups compile when they appear.
_RECORDED_WIDTHS = (2, 4, 8, 16, 32, 64)


def widths_of(config: Config) -> Sequence[int]:
  """Returns the group sizes for which advantages are compiled."""
  if not modes.is_offline(config):
    return (config.rollout.group_size,)
  most = config.offline.group_size
  return _RECORDED_WIDTHS if most is None else (most,)


def room_of(config: Config) -> tuple[int, int]:
  """Returns the number of groups of a step and of places in a group; see `credit`."""
  return config.rollout.prompts_per_step, widths_of(config)[0]
