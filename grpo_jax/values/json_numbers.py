"""Numbers in strict JSON, which has neither NaN nor infinity. Pure."""

import math
import numbers
from typing import Any, SupportsFloat


def finite(value: Any) -> float | None:
  """Returns the number as a float; None, written as null, if the number is not finite.

  For files that other programs read: metrics, rollouts, the report.

  Args:
    value: Number; any other value gives None.
  """
  if not isinstance(value, numbers.Real):
    return None
  try:
    number = float(value)
  except OverflowError:  # an integer beyond every float.
    return None
  return number if math.isfinite(number) else None


def encoded(value: SupportsFloat) -> float | str:
  """Returns the number, or "nan", "inf" or "-inf", for files that we read back; see `decoded`."""
  number = float(value)
  return number if math.isfinite(number) else str(number)


def decoded(value: float | str | None) -> float:
  """Returns the number that `encoded` encoded; None is NaN, as in older files."""
  return math.nan if value is None else float(value)
