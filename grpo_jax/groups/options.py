"""The options of shaping and filters. Pure."""

import dataclasses
import math

from grpo_jax.values import checked
from grpo_jax.values.options import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapingOptions:
  """How rewards are changed after the filters: the section `shaping` of a config."""

  scale_from: tuple[float, float] | None = option(
    None,
    "(low, high): rewards are clamped to this range and mapped linearly to scale_to",
    checked.several(checked.number(), length=2, none=True),
  )
  scale_to: tuple[float, float] = option(
    (0.0, 1.0),
    "(low, high); scale_from=None: no scaling",
    checked.several(checked.number(), length=2),
  )
  stop_properly_coef: float | None = option(
    None,
    "multiplies the reward of truncated completions; in [0, 1]",
    checked.number(low=0, high=1, none=True),
  )
  overlong_buffer_tokens: int | None = option(
    None, "length of the penalty ramp before the limit, in tokens", checked.whole(low=1, none=True)
  )
  overlong_penalty: float = option(
    1.0, "penalty at the limit; it grows linearly along the ramp", checked.number(above=0)
  )
  overlong_floor: bool = option(
    True, "no larger penalty beyond the limit (DAPO); False: it grows (NeMo RL)"
  )
  max_completion_tokens: int | None = option(
    None, "the limit; None: sampling.max_tokens", checked.whole(low=1, none=True)
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterOptions:
  """Which groups a step leaves out: the section `filters` of a config."""

  drop_no_signal: bool = option(False, "drop a group if all its rewards are equal")
  min_scored: int = option(
    1, "drop a group if fewer completions have a finite reward", checked.whole(low=0)
  )
  min_reward_mean: float = option(
    -math.inf, "drop a group if its mean reward is lower", checked.number(infinite=True)
  )
  max_reward_mean: float = option(
    math.inf, "drop a group if its mean reward is higher", checked.number(infinite=True)
  )
  max_truncated_share: float = option(
    1.0,
    "drop a group if a larger share of its completions was truncated",
    checked.number(low=0, high=1),
  )
