"""Scores an answer by a reasoning-gym task's own scorer, which may be anything.

The package takes seconds to import, which a worker does before the time of its first call runs.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset


def score(task: str, args: Mapping[str, Any], answer: str, entry: dict[str, Any]) -> float:
  """Returns the task's score of an answer, usually in [0, 1].

  Args:
    task: name of the reasoning-gym dataset.
    args: its arguments, size and seed included.
    answer: what the model answered.
    entry: the row: question, answer, metadata.
  """
  return float(dataset(task, json.dumps(args)).score_answer(answer, entry))


def has_plain_scorer(task: str, args: Mapping[str, Any]) -> bool:
  """Tells whether the task compares texts only, which needs no guard."""
  scorer = type(dataset(task, json.dumps(args))).score_answer
  return scorer is ProceduralDataset.score_answer


@functools.lru_cache(maxsize=64)
def dataset(task: str, args: str) -> Any:
  """Creates a dataset from its arguments in JSON."""
  return reasoning_gym.create_dataset(task, **json.loads(args))
