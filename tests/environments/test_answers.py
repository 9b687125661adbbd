r"""Where the answer stands in a text, and what is equal as text. All expectations by hand."""

import time

import pytest

from grpo_jax.environments.grading.answers import EXTRACTORS, equal_as_text, gold

CASES = [
  # boxed
  ("boxed", r"so \boxed{72}", "72"),
  ("boxed", r"\boxed{\frac{1}{2}} units", r"\frac{1}{2}"),
  ("boxed", r"\boxed{1}, no: \boxed{2}.", "2"),  # the last one counts.
  ("boxed", r"\boxed{1} and then \boxed{2", "1"),  # the last one that closes.
  ("boxed", r"\boxed{\text{A } \boxed{3}}", "3"),  # the inner one begins last.
  ("boxed", r"\boxed{\{1,2\}}", r"\{1,2\}"),
  ("boxed", r"\boxed{\left\{x\right\}}", r"\left\{x\right\}"),
  ("boxed", r"a stray } and { then \boxed{5}", "5"),
  ("boxed", r"\boxed {5}", "5"),
  ("boxed", r"\boxed 5.", "5"),
  ("boxed", r"\fbox{9}", "9"),
  ("boxed", r"\boxed{ }", None),
  ("boxed", "The answer is 72.", None),  # strict: no box, no answer.
  ("boxed", r"\boxed{72", None),
  ("boxed", "", None),
  # hash
  ("hash", "48/2 = 24\n#### 72", "72"),
  ("hash", "####72\nBut wait.", "72"),
  ("hash", "#### 1\n#### 2", "2"),
  ("hash", "#### $1,200 ", "$1,200"),
  ("hash", "72", None),
  ("hash", "####", None),
  ("hash", "####\n72", None),  # on the same line.
  # tag
  ("tag", "<think>1</think><answer> 7 </answer>", "7"),
  ("tag", "<answer>1</answer><answer>2\n3</answer> ok", "2\n3"),
  ("tag", "<answer>1", None),
  ("tag", "1</answer>", None),
  # last_number
  ("last_number", "First 3, then 72.", "72"),
  ("last_number", "It costs $1,234.50!", "$1,234.50"),
  ("last_number", "about -5 degrees", "-5"),
  ("last_number", "10-5", "5"),  # a difference, no sign.
  ("last_number", "3/4 of it", "3/4"),
  ("last_number", "That is 40%.", "40%"),
  ("last_number", "room b12 or 7", "7"),
  ("last_number", "12, 13, and that is all,", "13"),
  ("last_number", "none", None),
  # line
  ("line", "Answer: 7", "7"),
  ("line", "so Answer: 7\nAnswer:  $8$ \nbye", "$8$"),
  ("line", "**ANSWER :\n9", "9"),
  ("line", "7", None),
  ("line", "Answer: 7" + " and on" * 60, None),  # not near the end.
  # any, raw
  ("any", r"#### 1 \boxed{2} 3", "2"),
  ("any", "#### 1\nor 3", "1"),
  ("any", "or 3", "3"),
  ("raw", "  72\n", "72"),
  ("raw", " \n", None),
]


@pytest.mark.parametrize(("form", "text", "answer"), CASES, ids=[repr(c) for c in CASES])
def test_answer_is_found_where_it_must_stand(form, text, answer):
  assert EXTRACTORS[form](text) == answer


@pytest.mark.parametrize(
  ("text", "answer"),
  [
    ("She sold 48/2=<<48/2=24>>24.\n#### 72", "72"),
    (r"Thus \boxed{p - q}.", "p - q"),
    (" 3 ", "3"),
  ],
)
def test_gold_answer_is_found_in_a_solution_or_is_all_of_it(text, answer):
  assert gold(text) == answer


@pytest.mark.parametrize(
  ("left", "right", "expected"),
  [
    ("72", "72", True),
    ("72", " 72. ", True),
    ("1,000", "1000", True),
    ("80{,}000", "80000", True),
    ("18", r"\$18", True),
    ("72", "72.00", True),
    ("007", "7", True),
    ("72", "73", False),
    ("72", "-72", False),
    (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
    (r"\text{Evelyn}", "Evelyn", True),
    ("1 1/2", "11/2", None),  # a space may mean something.
    ("0.5", r"\frac{1}{2}", None),  # takes mathematics.
    ("1,2", "12", None),  # a list, no thousands.
    ("", "", False),
    ("4", "4 balls", True),
    ("2,125", "2125 toy blocks.", True),
    ("4", "8 balls", False),
    ("4", "4 million", None),  # no unit.
    ("4", "4 x", None),
  ],
)
def test_answers_are_compared_as_text_where_that_is_safe(left, right, expected):
  assert equal_as_text(left, right) is expected


@pytest.mark.parametrize("form", EXTRACTORS)
@pytest.mark.parametrize(
  "unit", [r"\boxed{", r"\boxed{1}", "<answer>", "####", "1", "1,", "$", "{", r"\text{", " "]
)
def test_endless_text_is_read_in_linear_time(form, unit):
  text = unit * 100_000
  start = time.perf_counter()
  answer = EXTRACTORS[form](text)
  equal_as_text("5", answer or text)
  assert time.perf_counter() - start < 5.0  # a quadratic reader takes minutes.
