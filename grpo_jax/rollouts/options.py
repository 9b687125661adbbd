"""The options of rollouts and of dynamic sampling."""

import dataclasses
from typing import Literal

from grpo_jax.values import checked
from grpo_jax.values.options import option

SCHEDULES = ("rounds", "free")
_SIZE = checked.whole(low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutOptions:
  """What a training step samples: the section `rollout` of a config."""

  prompts_per_step: int = option(32, "number of prompts of a step, P", _SIZE)
  group_size: int = option(16, "number of completions of each prompt, G", _SIZE)
  max_turns: int = option(
    1, "largest number of turns of a conversation with the environment", checked.whole(low=1)
  )
  conversations: bool | None = option(
    None,
    "whether completions have several turns; None: with max_turns > 1, or with an agent's"
    " environment",
  )
  max_tokens: int = option(
    1024, "longest prompt with its completion, all turns together", checked.whole(low=2)
  )
  environment_timeout_s: float = option(
    60.0, "time limit of one call of an environment", checked.number(above=0)
  )
  environment_concurrency: int = option(
    16, "environment calls that run at the same time", checked.whole(low=1)
  )
  agent_timeout_s: float = option(
    600.0, "time limit of an attempt by an agent (docs/serving.md)", checked.number(above=0)
  )
  agent_concurrency: int = option(256, "attempts by agents at the same time", checked.whole(low=1))
  max_error_share: float = option(
    0.2, "the run stops if a larger share of a step's rollouts fails", checked.number(low=0, high=1)
  )
  schedule: Literal["rounds", "free"] = option(
    "rounds",
    'when later turns are sampled: "rounds": each turn of all conversations together; "free":'
    " each conversation as soon as its environment has answered. docs/environments.md",
    checked.choice(SCHEDULES),
  )
  max_staleness: int = option(
    0,
    "asynchronous training (docs/async.md): largest number of versions by which the weights"
    " that sampled a token may be older than those of the step that learns from it; 0:"
    " synchronous; 1: one step ahead, repeatable bit for bit; more: new weights while"
    " completions are under way",
    checked.whole(low=0),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicOptions:
  """Bounds of drawing prompts: the section `dynamic_sampling` of a config."""

  enabled: bool = option(False, "also turns filters.drop_no_signal on")
  max_rounds: int = option(
    10, "largest number of rounds of sampling in a step", checked.whole(low=1)
  )
  prompts_per_round: int | None = option(
    None, "prompts of a round; None: rollout.prompts_per_step", checked.whole(low=1, none=True)
  )
  on_limit: Literal["raise", "train"] = option(
    "raise", 'at max_rounds: "raise", or "train" on the groups found, with a warning'
  )
