"""How recorded groups are read, rewarded and compared: the section `offline` of a config. Pure.

Every run checks these options; only an offline run imports the rest of this folder.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from grpo_jax.data import ranks
from grpo_jax.data.recorded import REASONING, TOOLS, Style
from grpo_jax.values import checked

# Sources of the logprobs under the policy that sampled a response; see `behavior`.
SOURCES = ("auto", "file", "initial")
# Ways to turn the tokens' logprobs into the score of a response; see `ranking`.
SCORES = ("mean", "sum")

KINDS: Mapping[str, checked.Kind] = {
  "rewards": checked.choice(("file", "environment")),
  "reward_key": checked.text(),
  "rank_reward": checked.text(),
  "rank_ties": checked.choice(tuple(ranks.TIES)),
  "rank_best": checked.choice(tuple(ranks.BEST)),
  "rank_temperature": checked.number(above=0),
  "group_size": checked.whole(low=2, none=True),
  "type_key": checked.text(),
  "behavior": checked.choice(SOURCES),
  "score": checked.choice(SCORES),
  "reasoning": checked.choice(REASONING),
  "tools": checked.choice(TOOLS),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
  """How recorded attempts are read, rewarded and compared; the section `offline` of a config."""

  rewards: Literal["file", "environment"] = "file"
  reward_key: str = "reward"
  rank_reward: str = "linear"
  rank_ties: str = "mean"
  rank_best: str = "lowest"
  rank_temperature: float = 1.0
  group_size: int | None = None
  type_key: str = "group_type"
  behavior: Literal["auto", "file", "initial"] = "auto"
  score: str = "mean"
  reasoning: str = "think"
  tools: str = "refuse"

  def __post_init__(self):
    checked.require(KINDS, checked.fields_of(self), of="offline")
    ranks.check(**self.ranking())
    Style(reasoning=self.reasoning, tools=self.tools)

  def ranking(self) -> dict[str, Any]:
    """Returns the arguments of `ranks.rewards`."""
    return {
      "mapping": self.rank_reward,
      "ties": self.rank_ties,
      "best": self.rank_best,
      "temperature": self.rank_temperature,
    }
