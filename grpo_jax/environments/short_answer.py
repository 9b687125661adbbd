"""Short answers in words, as in SQuAD: the reward is the overlap with the closest right answer.

The right answers are `info["expected_answer"]` and, if a row has several, SQuAD's own column
`info["answers"]["text"]`.
"""

import collections
import re
import string
from collections.abc import Mapping
from typing import Any

from grpo_jax.environments.base import AnyFactory, Environment, SingleTurn, StepResult
from grpo_jax.registry import choose
from grpo_jax.types import Prompt

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
  """Returns text in lower case, without punctuation, articles and double spaces."""
  return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, expected: str) -> float:
  """Returns 1 if two texts are the same when normalised, else 0."""
  return float(normalized(answer) == normalized(expected))


def f1(answer: str, expected: str) -> float:
  """Returns the harmonic mean of precision and recall of the words.

  Reference:
    Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1.
  """
  given, wanted = normalized(answer).split(), normalized(expected).split()
  if not given or not wanted:
    return float(given == wanted)
  common = sum((collections.Counter(given) & collections.Counter(wanted)).values())
  return 2 * common / (len(given) + len(wanted))


def expected_answers(info: Mapping[str, Any]) -> list[str]:
  """Returns all right answers of a row."""
  several = info.get("answers")
  texts = several.get("text", []) if isinstance(several, Mapping) else []
  return [text for text in [info.get("expected_answer"), *texts] if isinstance(text, str)]


def make(*, reward: str = "f1") -> AnyFactory:
  """Makes the environment.

  Args:
    reward: "f1" (share of words in common) or "exact_match".

  Returns:
    A factory of environments. Metrics of an attempt: accuracy (exact match) and f1.

  Raises:
    ValueError: The reward is unknown.
  """
  choose("reward", reward, REWARDS)

  def judge(prompt: Prompt, text: str) -> StepResult:
    expected = expected_answers(prompt.info)
    scores = {name: max(score(text, each) for each in expected) for name, score in REWARDS.items()}
    metrics = {"accuracy": scores["exact_match"], "f1": scores["f1"]}
    return StepResult(reward=scores[reward], done=True, metrics=metrics)

  def factory(prompt: Prompt) -> Environment:
    if not expected_answers(prompt.info):
      raise ValueError(f"prompt {prompt.prompt_id}: short_answer needs expected_answer")
    return SingleTurn(judge, prompt)

  return factory


REWARDS = {"f1": f1, "exact_match": exact_match}
