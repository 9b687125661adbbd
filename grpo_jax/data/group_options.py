"""How recorded groups are read, rewarded and compared: the section `offline` of a config. Pure.

Every run checks these options; only an offline run imports the rest of this folder.
"""

import dataclasses
from typing import Any

from grpo_jax.data import ranks
from grpo_jax.data.options import OfflineOptions
from grpo_jax.data.recorded import Style
from grpo_jax.values import options


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedOptions(OfflineOptions):
  """How recorded attempts are read, rewarded and compared, checked when made."""

  def __post_init__(self):
    options.require(self, of="offline")
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
