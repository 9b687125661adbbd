"""Numbers in strict JSON, which has neither NaN nor infinity. Pure."""

import math
import numbers
from typing import Any, SupportsFloat


def finite(value: Any) -> float | None:
  """Returns the number as a float; None, which is written as null, if it is not finite.

  For files that others read: metrics, rollouts, the report.

  Args:
    value: Number; what is not a number gives None.
  """
  return float(value) if isinstance(value, numbers.Real) and math.isfinite(value) else None


def encoded(value: SupportsFloat) -> float | str:
  """Returns the number, or "nan", "inf" or "-inf", for files that are read back; see `decoded`."""
  number = float(value)
  return number if math.isfinite(number) else str(number)


def decoded(value: float | str | None) -> float:
  """Returns the number that `encoded` was given; None is NaN, as older files have it."""
  return math.nan if value is None else float(value)
