"""What the weights of a run's policy are, as seen by those who compute with them. Pure.

`TrainState.params` holds what is trained. Engines, scorers, evaluation and export need the
full weights. Today the two are the same arrays; with adapters the full weights would be a
frozen base and what is trained, and the reference policy would be that base.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Policy:
  """The policy of a run.

  Attributes:
    frozen: Parameters of the reference policy, which training never changes; None: the loss
      needs no reference.
  """

  frozen: Any = None

  def full(self, trainable: Any) -> Any:
    """Returns the full weights of the policy. Nothing is copied or computed.

    Args:
      trainable: Parameters that are trained, as in `TrainState.params`; donated by updates.
    """
    return trainable

  def reference(self) -> Any:
    """Returns the full weights of the reference policy; None if the loss needs none."""
    return self.frozen
