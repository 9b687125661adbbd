"""SQuAD's measures, on numbers worked by hand, and the environment around them."""

import asyncio

import numpy as np
import pytest

from grpo_jax import environments
from grpo_jax.environments import short_answer
from grpo_jax.types import FinishReason, Prompt


@pytest.mark.parametrize(
  ("answer", "expected", "f1", "exact"),
  [
    ("Saint Bernadette Soubirous", "Saint Bernadette Soubirous", 1.0, 1.0),
    ("the  saint Bernadette Soubirous.", "Saint Bernadette Soubirous", 1.0, 1.0),
    # 2 words in common, of 4 given and 3 wanted: 2·2/(4+3).
    ("Saint Bernadette of Lourdes", "Saint Bernadette Soubirous", 4 / 7, 0.0),
    ("no no", "no", 2 / 3, 0.0),  # a repeated word counts as often as it is wanted.
    ("", "no", 0.0, 0.0),
    # Gold answers of which normalizing leaves nothing.
    ("", "A", 0.0, 0.0),
    ("the", "A", 0.0, 0.0),
    ("?!", "The", 0.0, 0.0),
    ("a", "A", 1.0, 1.0),
    ("", "?", 0.0, 0.0),
    (" ? ", "?", 1.0, 1.0),
    ("!", "?", 0.0, 0.0),
    ("\u200b", "\u200b", 0.0, 0.0),
    # Other scripts and characters.
    ("北京。", "北京", 1.0, 1.0),
    ("¿“Paris”?", "paris", 1.0, 1.0),
    ("1914–1918", "1914-1918", 1.0, 1.0),
    ("STRASSE", "Straße", 1.0, 1.0),
    ("Beyonce\u0301", "Beyoncé", 1.0, 1.0),
    ("５", "5", 1.0, 1.0),
    # Signs and decimal points are not punctuation.
    ("−5", "-5", 1.0, 1.0),
    ("5", "-5", 0.0, 0.0),
    ("35", "3.5", 0.0, 0.0),
    ("1,000", "1000", 1.0, 1.0),
    ("10²", "102", 0.0, 0.0),
  ],
)
def test_measures_are_those_of_squad(answer, expected, f1, exact):
  assert short_answer.f1(answer, expected) == pytest.approx(f1)
  assert short_answer.exact_match(answer, expected) == exact


def judged(info, text, **settings):
  factory = environments.make(short_answer=settings)["short_answer"]
  environment = factory(Prompt("p", np.zeros(1, np.int32), "short_answer", info))
  return asyncio.run(environment.step(text, np.zeros(0, np.int32), FinishReason.STOP))


def test_the_nearest_of_several_right_answers_counts():
  info = {"expected_answer": "in 1858", "answers": {"text": ["in 1858", "1858"]}}
  result = judged(info, "1858")
  assert (result.reward, result.done) == (1.0, True)
  assert result.metrics == {"accuracy": 1.0, "f1": 1.0}


def test_reward_is_the_measure_that_is_asked_for():
  info = {"expected_answer": "Saint Bernadette Soubirous"}
  assert judged(info, "Saint Bernadette").reward == pytest.approx(4 / 5)
  assert judged(info, "Saint Bernadette", reward="exact_match").reward == 0.0


def test_a_missing_setting_or_answer_is_reported():
  with pytest.raises(ValueError, match="unknown reward 'f2'.*f1"):
    environments.make(short_answer={"reward": "f2"})
  with pytest.raises(ValueError, match="needs expected_answer"):
    judged({}, "x")
