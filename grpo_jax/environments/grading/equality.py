r"""Decides by math-verify whether two answers are equal. Run in a worker: it may never end.

math-verify's own time-outs (signals) are off; the pool kills the worker from outside.
Answers are parsed as LaTeX only: its other parser evaluates Python expressions.
"""

import functools
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

_LATEX = (LatexExtractionConfig(boxed_match_priority=0),)


def equal(gold: str, answer: str) -> bool:
  r"""Returns whether `answer` means the same as `gold`; False if it cannot be read.

  Args:
    gold: the reference, as it would stand in \boxed{}.
    answer: the model's.
  """
  answer = answer.rstrip(".").strip()
  return bool(verify(_parsed_gold(gold), _parse(answer), timeout_seconds=None))


def _parse(answer: str) -> list[Any]:
  return parse(rf"\boxed{{{answer}}}", _LATEX, parsing_timeout=None)  # pyright: ignore[reportArgumentType] None turns it off


@functools.lru_cache(maxsize=256)
def _parsed_gold(answer: str) -> list[Any]:
  return _parse(answer)


# What the libraries load when first used is loaded before the time of a call runs.
equal(r"\frac{1}{2}", "0.5")
