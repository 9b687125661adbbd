"""Short answers in words, as in SQuAD: the reward is the overlap with the closest right answer.

The right answers are `info["expected_answer"]` and, if a row has several, SQuAD's own column
`info["answers"]["text"]`.
"""

import collections
import re
import string
import unicodedata
from collections.abc import Mapping
from typing import Any

from grpo_jax.environments.base import AnyFactory, Environment, SingleTurn, StepResult
from grpo_jax.environments.grading import notation
from grpo_jax.registry import choose
from grpo_jax.types import Prompt

_ARTICLES = {"a", "an", "the"}
_MAX_WORD = 200  # characters: normalizing takes time quadratic in the marks of a word.
_RAISED = re.compile("[⁰¹²³⁴-⁹ⁱⁿ₀-₉½⅓⅔¼¾⅕-⅞]")  # 10² is not 102.
# A minus and a decimal point are no punctuation: they pass as characters of private use.
_SIGN = re.compile(r"(?P<minus>(?<!\w)-(?=[$€£¥]?\.?\d))|(?<=\d)\.(?=\d)")
_MINUS, _POINT = "\ue000", "\ue001"


class _NoPunctuation(dict[int, str]):
  """A table for `str.translate` without punctuation of any script, nor ASCII's symbols."""

  def __missing__(self, code: int) -> str:
    char = chr(code)
    is_left_out = char in string.punctuation or unicodedata.category(char)[0] == "P"
    self[code] = "" if is_left_out else char
    return self[code]


_NO_PUNCTUATION = _NoPunctuation({ord(_MINUS): "-", ord(_POINT): "."})


def normalized(text: str) -> str:
  """Returns text without case, punctuation, articles and double spaces, as SQuAD does.

  Unlike there, these count for every script, composed characters equal decomposed ones, a minus
  and a decimal point stay, and articles stay where nothing else is left.
  """
  if not text.isascii():
    text = " ".join(map(_composed, notation.characters(text).split()))
  text = text.casefold()
  text = _SIGN.sub(lambda found: _MINUS if found["minus"] else _POINT, text)
  words = text.translate(_NO_PUNCTUATION).split()
  return " ".join([word for word in words if word not in _ARTICLES] or words)


def _composed(word: str) -> str:
  """Returns a word in the composed form of its characters."""
  if word.isascii() or len(word) > _MAX_WORD:
    return word
  return unicodedata.normalize("NFC" if _RAISED.search(word) else "NFKC", word)


def exact_match(answer: str, expected: str) -> float:
  """Returns 1 if two texts are the same when normalised, else 0; text of punctuation as it is."""
  given, wanted = normalized(answer), normalized(expected)
  if given or wanted:
    return float(given == wanted)
  shown, sought = (notation.characters(text).split() for text in (answer, expected))
  return float(shown == sought != [])


def f1(answer: str, expected: str) -> float:
  """Returns the harmonic mean of precision and recall of the words.

  Reference:
    Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1.
  """
  given, wanted = normalized(answer).split(), normalized(expected).split()
  if not given or not wanted:
    return exact_match(answer, expected)
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
