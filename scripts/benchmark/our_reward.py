"""The benchmark's reward as a function that `environments/function.py` imports by its path."""

from collections.abc import Mapping
from typing import Any

import workload as workloads


def score(prompt: str, completion: str, info: Mapping[str, Any]) -> float:
  """Scores one completion of the row whose fields are `info`."""
  return workloads.reward(completion, info["expected_answer"])
