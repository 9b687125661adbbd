"""How old tokens are, and the ranges of age over which metrics are split. Pure, NumPy.

The weights of version v exist after v training steps, and step s begins with those of version s.
The age (staleness) of a token is s - v: the number of training steps between the weights that
sampled it and those that the step begins with. A completion can hold tokens of several ages.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

UNKNOWN = -1  # age of a token whose weights are not known, and of padding.


class Range(NamedTuple):
  """Ages over which metrics are computed together."""

  name: str  # in the names of metrics.
  first: int
  last: int  # inclusive.


_ENDLESS = int(np.iinfo(np.int32).max)
RANGES = (
  Range("0", 0, 0),
  Range("1", 1, 1),
  Range("2_3", 2, 3),
  Range("4_7", 4, 7),
  Range("8_plus", 8, _ENDLESS),
)


def ages(weight_versions: Int[np.ndarray, " n"], step: int) -> Int[np.ndarray, " n"]:
  """Computes the age of each token, in training steps.

  Args:
    weight_versions: Version of the weights that sampled each token; -1: not sampled, or not known.
    step: Number of the training step, which is the version of the weights that it begins with.

  Returns:
    Age of each token, int32; `UNKNOWN` where the version is not known.

  Raises:
    ValueError: A token was sampled by weights that do not exist before the step.
  """
  newest = int(weight_versions.max(initial=-1))
  if newest > step:
    raise ValueError(
      f"the tokens of step {step} must be sampled by weights of at most version {step}, got"
      f" version {newest}"
    )
  known = weight_versions >= 0
  return np.where(known, step - weight_versions, UNKNOWN).astype(np.int32)
