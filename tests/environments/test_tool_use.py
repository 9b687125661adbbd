"""The calculator: what it computes, what it refuses, and the conversation around it."""

import asyncio
import math
import time

import numpy as np
import pytest

from grpo_jax import environments
from grpo_jax.environments import tool_use
from grpo_jax.environments.base import EnvironmentFactory
from grpo_jax.environments.grading.arithmetic import ExpressionError, evaluate, shown
from grpo_jax.types import FinishReason, Prompt


@pytest.mark.parametrize(
  ("expression", "result"),
  [
    ("37 * 89", "3293"),
    ("(3 + 4) * 12 / 7", "12"),
    ("1/3", "0.333333333333"),
    ("0.1 + 0.2", "0.3"),
    ("-7 // 2", "-4"),
    ("-7 % 3", "2"),
    ("2 ** 10", "1024"),
    ("2 ** -2", "0.25"),
    ("2 ** 0.5", "1.41421356237"),
    ("-2 ** 2", "-4"),  # as in Python: the power first.
    ("2 ** 3 ** 2", "512"),
    (".5 + 1. + 1e2", "101.5"),
    ("1e3", "1000"),
    ("2 ** 1000 // 2 ** 990", "1024"),
    ("(-1) ** 10000000000000000001", "-1"),
    ("123456789123456789 * 1000", "123456789123456789000"),
    ("max(3, 1, 2) - min(4, 5) + abs(-2)", "1"),
    ("round(2.567, 2) + round(2.5)", "4.57"),
    ("sqrt(144) + floor(2.9) + ceil(2.1)", "17"),
    ("sqrt(2)", "1.41421356237"),
    ("10 / 4 * 1e20", "2.5e+20"),
  ],
)
def test_arithmetic_has_the_values_of_python(expression, result):
  assert shown(evaluate(expression)) == result


@pytest.mark.parametrize(
  ("expression", "reason"),
  [
    ("9**9**9", "too large"),
    ("9**9**9**9**9", "too large"),
    ("(10**300)**(10**300)", "too large"),
    ("2**1024", "too large"),
    ("1e308 * 10", "not a number"),
    ("10.0 ** 400", "too large"),
    ("1e999", "not a number"),
    ("round(7, -1000000000000)", "digits must be"),
    ("(-8) ** 0.5", "not a real number"),
    ("sqrt(-1)", "not real"),
    ("1 / 0", "division by zero"),
    ("0 ** -1", "division by zero"),
    ("5 % 0", "division by zero"),
    ("1,000 + 1", "unexpected ','"),
    ("-(1, 2)", "not an arithmetic expression"),
    ("3 ^ 2", "cannot read '^ 2'"),
    ("x + 1", "'x' is not known"),
    ("open(1)", "'open' is not known"),
    ("abs()", "abs cannot be applied"),
    ("abs(1, 2)", "abs cannot be applied"),
    ("max(", "not an arithmetic expression"),
    ("2 (3)", "not an arithmetic expression"),
    ("(1).real", "cannot read '.real'"),
    ("__import__('os').system('id')", "cannot read '__import__"),
    ("().__class__", "cannot read '.__class__'"),
    ("lambda: 1", "cannot read ': 1'"),
    ("1 if 2 else 3", "not an arithmetic expression"),
    ("1 < 2", "cannot read '< 2'"),
    ("1_000", "cannot read '1_000'"),
    ("3j", "cannot read '3j'"),
    ("007", "not an arithmetic expression"),
    ("'a' * 9", "cannot read"),
    ("1 +\n2", "not an arithmetic expression"),
    ("max(*(1, 2))", "not an arithmetic expression"),
    ("round(1, ndigits(2))", "'ndigits' is not known"),
    ("", "is empty"),
    ("1+" * 200 + "1", "longer than 300 characters"),
    ("\x00", "cannot read"),
  ],
)
def test_everything_else_is_refused_at_once_with_a_reason(expression, reason):
  started = time.monotonic()
  with pytest.raises(ExpressionError, match=reason.replace("(", r"\(").replace("^", r"\^")):
    evaluate(expression)
  assert time.monotonic() - started < 0.5


def test_no_expression_takes_long_or_ends_the_process():
  rng = np.random.default_rng(0)
  parts = "9 99 1e9 ** ** // % * + - ( ) ( ) sqrt( round( max( , . 0.5".split()
  started = time.monotonic()
  for _ in range(3000):
    text = "".join(rng.choice(parts, size=rng.integers(1, 60)))
    try:
      assert math.isfinite(evaluate(text))
    except ExpressionError as error:
      assert str(error)
    except OverflowError:  # of isfinite: a whole number beyond the floats.
      assert evaluate(text).bit_length() <= 1024
  for nested in ("(" * 150 + "1" + ")" * 149, "-" * 299 + "1", "sqrt(" * 59 + "1" + ")" * 5):
    try:
      evaluate(nested)
    except ExpressionError:
      pass
  assert time.monotonic() - started < 10


def talk(*texts: str, expected="3293", **settings):
  """Holds one conversation; returns the results of its turns."""
  with environments.make(tool_use=settings) as made:
    prompt = Prompt("p:0:0", np.zeros(1, np.int32), "tool_use", {"expected_answer": expected})
    environment = made["tool_use"](prompt)

    async def body():
      await environment.start()
      empty = np.zeros(0, np.int32)
      results = [await environment.step(text, empty, FinishReason.STOP) for text in texts]
      await environment.close()
      return results

    return asyncio.run(body())


def test_a_call_gets_its_result_and_the_answer_is_judged():
  first, last = talk("I need <calculator>37 * 89</calculator>", "So it is <answer>3293</answer>.")
  assert (first.done, first.total, first.observation) == (False, 0.0, "\n<result>3293</result>\n")
  assert first.observation_role is None
  assert (last.done, last.total) == (True, 1.0)
  assert last.metrics == {
    "accuracy": 1.0,
    "has_answer": 1.0,
    "calls": 1.0,
    "failed_calls": 0.0,
    "used_tool": 1.0,
  }


@pytest.mark.parametrize(
  ("text", "observation"),
  [
    ("<calculator>9**9**9</calculator>", "\n<result>error: the result is too large</result>\n"),
    ("37 * 89</calculator>", "\n<result>error: no <calculator> before the closing tag</result>\n"),
    ("<calculator>1<calculator>2+2</calculator>", "\n<result>4</result>\n"),
    (
      "<calculator>1+1</calculator> and <calculator>2+2</calculator> then",
      "\n<result>2</result>\n<result>4</result>\n",
    ),
    ("<answer>3293</answer><calculator>1+1</calculator>", "\n<result>2</result>\n"),
  ],
)
def test_calls_of_every_kind_are_answered_and_the_conversation_continues(text, observation):
  (result,) = talk(text)
  assert not result.done and result.observation == observation and result.total == 0.0


@pytest.mark.parametrize(
  ("answer", "expected", "right"),
  [
    ("<answer>3,293</answer>", "3293", True),
    ("<answer>$12.50</answer>", "12.5", True),
    ("<answer>12.51</answer>", "12.5", False),
    ("<answer>8</answer>", "so 4 + 4 = 8\n#### 8", True),  # GSM8K's form.
    ("<answer>1/3</answer>", "0.333", False),
    ("it is 3293", "3293", False),  # no tag.
    ("<calculator>37 * 89", "3293", False),  # a call that does not close is no call.
    ("", "3293", False),
  ],
)
def test_answers_are_compared_as_text_and_as_decimal_numbers(answer, expected, right):
  (result,) = talk(answer, expected=expected)
  assert result.done and result.metrics["accuracy"] == float(right) == result.total


def test_calls_beyond_the_limit_end_the_conversation_as_wrong():
  call = "<calculator>1+1</calculator>"
  results = talk(call, call, f"<answer>3293</answer>{call}", max_calls=2)
  assert [r.done for r in results] == [False, False, True]
  assert sum(r.total for r in results) == 0.0 and results[-1].metrics["calls"] == 2.0


def test_rewards_add_up_to_right_or_wrong_and_a_first_result_pays_once():
  settings = dict(reward_correct=2.0, reward_wrong=-1.0, call_reward=0.25)
  bad, good = "<calculator>x</calculator>", "<calculator>1</calculator>"
  results = talk(bad, good, good, "<answer>3293</answer>", **settings)
  assert [r.components["call"] for r in results] == [0.0, 0.25, 0.0, 0.0]
  correct = [r.components["correct"] for r in results]
  # Until it is right a conversation counts as wrong, so that being cut does not pay.
  assert correct == [-1.0, 0.0, 0.0, 3.0] and sum(correct) == 2.0
  assert sum(r.components["correct"] for r in talk(good, "<answer>1</answer>", **settings)) == -1.0
  assert results[-1].metrics["failed_calls"] == 1.0


def test_the_name_of_the_tool_is_its_tag_and_its_stop_string():
  factory = tool_use.make(tool="python", observation_role="tool")
  assert isinstance(factory, EnvironmentFactory) and factory.stop_strings == ("</python>",)
  (result,) = talk("<python>6 * 7</python>", tool="python", observation_role="tool")
  assert result.observation == "\n<result>42</result>\n" and result.observation_role == "tool"


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (dict(tool="a b"), "tool must be a word"),
    (dict(max_calls=0), "max_calls must be an integer >= 1"),
    (dict(answer="tags"), "unknown answer form 'tags'.*did you mean 'tag'"),
  ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    environments.make(tool_use=settings)


def test_rows_without_an_answer_are_refused():
  with pytest.raises(ValueError, match="p:0:0: the tool_use environment needs expected_answer"):
    talk("x", expected=" ")
