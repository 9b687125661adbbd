"""A curriculum: easy datasets first, harder ones once the easy ones are solved. Pure."""

import math
from collections.abc import Mapping
from typing import Any

from grpo_jax.data.loaders import MAX_RECORDS, Loader, Records
from grpo_jax.types import Prompt

METRICS = ("reward_mean", "accuracy")  # metrics of a dataset that rise as it is solved.


def by_success(
  loaders: Mapping[str, Loader],
  *,
  num_prompts: int,
  records: Records,
  memory: dict[str, Any],
  threshold: float = 0.7,
  metric: str = "reward_mean",
  window: int = 2,
  review_share: float = 0.0,
) -> list[Prompt]:
  """Takes prompts from one dataset until it is solved, then from the next in the list.

  Args:
    loaders: Loaders by name, the easiest first.
    num_prompts: Number of prompts to return.
    records: Metrics of past steps; `data/NAME/METRIC` of the present dataset is read.
    memory: The level, and the first step of it.
    threshold: Mean of the metric over `window` steps at which a dataset counts as solved.
    metric: "reward_mean", or "accuracy" if the environment reports it.
    window: Number of steps of a dataset before it is judged.
    review_share: Share of the prompts that still comes from the datasets already solved.

  Returns:
    The prompts; those of solved datasets last.

  Raises:
    ValueError: The records of the present dataset lack the metric.
  """
  names = list(loaders)
  level = min(memory.setdefault("level", 0), len(names) - 1)
  since = memory.setdefault("since", 0)
  at_level = [record for record in records if record["step"] >= since]
  key, prompts_key = f"data/{names[level]}/{metric}", f"data/{names[level]}/prompts"
  if any(prompts_key in record and key not in record for record in at_level):
    raise ValueError(f"by_success: no metric {key!r} is reported for the dataset's prompts")
  values = [record[key] for record in at_level if key in record][-window:]
  if len(values) == window and sum(values) / window >= threshold and level + 1 < len(names):
    memory["level"] = level = level + 1
    memory["since"] = int(records[-1]["step"]) + 1
  review = int(num_prompts * review_share) if level else 0
  prompts = loaders[names[level]].take(num_prompts - review)
  for solved in range(review):
    prompts += loaders[names[solved % level]].take(1)
  return prompts


def check(
  *,
  threshold: object = 0.7,
  metric: object = "reward_mean",
  window: object = 2,
  review_share: object = 0.0,
) -> None:
  """Raises ValueError for arguments of `by_success` that are invalid or can never be reached."""
  if not isinstance(threshold, (int, float)) or not math.isfinite(threshold):
    raise ValueError(f"by_success: threshold must be a number, got {threshold!r}")
  if metric not in METRICS:
    raise ValueError(f"by_success: metric must be one of {', '.join(METRICS)}, got {metric!r}")
  if type(window) is not int or not 1 <= window <= MAX_RECORDS:
    raise ValueError(f"by_success: window must be 1 to {MAX_RECORDS} steps, got {window!r}")
  if not isinstance(review_share, (int, float)) or not 0 <= review_share < 1:
    raise ValueError(f"by_success: review_share must be from 0 to below 1, got {review_share!r}")
