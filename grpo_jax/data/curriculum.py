"""A curriculum: easy datasets first, harder ones once the easy ones are solved. Pure."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.data.loaders import Loader, Records
from grpo_jax.types import Prompt


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
  """Takes prompts from one dataset until it is solved, then from the next one of the list.

  Args:
    loaders: by name, the easiest first.
    num_prompts: to be returned.
    records: of past steps; `data/NAME/METRIC` of the present dataset is read.
    memory: the level, and the first step of it.
    threshold: mean of the metric over `window` steps from which on a dataset counts as solved.
    metric: "reward_mean", "accuracy", or another that is told of every dataset.
    window: steps of a dataset before it is judged.
    review_share: share of the prompts that goes on coming from the datasets already solved.

  Returns:
    The prompts; those of solved datasets last.

  Raises:
    ValueError: the records of the present dataset lack the metric.
  """
  names = list(loaders)
  level = memory.setdefault("level", 0)
  since = memory.setdefault("since", 0)
  of_level = [record for record in records if record["step"] >= since]
  key, prompts_key = f"data/{names[level]}/{metric}", f"data/{names[level]}/prompts"
  if any(prompts_key in record and key not in record for record in of_level):
    raise ValueError(f"by_success: no metric {key!r} is told of the dataset's prompts")
  values = [record[key] for record in of_level if key in record][-window:]
  if len(values) == window and sum(values) / window >= threshold and level + 1 < len(names):
    memory["level"] = level = level + 1
    memory["since"] = int(records[-1]["step"]) + 1
  review = int(num_prompts * review_share) if level else 0
  prompts = loaders[names[level]].take(num_prompts - review)
  for solved in range(review):
    prompts += loaders[names[solved % level]].take(1)
  return prompts
