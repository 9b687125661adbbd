"""What looks at a model's text takes time linear in it, whatever the text is."""

import gc
import time

import pytest

from grpo_environments import nemo_gym, openenv, sliding_puzzle
from grpo_jax.environments import (
  math_multi_reward,
  short_answer,
  tool_use,
)
from grpo_jax.environments.grading import (
  answers,
  arithmetic,
  choices,
  comparison,
  evaluated,
  minerva,
  notation,
  programs,
)
from grpo_jax.environments.scoring import formats

MEBI = 1 << 20
SMALL = MEBI // 16
LARGE = 8  # of the texts of all kinds that are read at half a mebibyte.
OPTIONS = {"A": "seven", "B": "eight"}


def expression(text):
  try:
    arithmetic.evaluate(text)
  except arithmetic.ExpressionError:
    pass


READERS = {
  **{f"programs.{name}": lambda t, f=f: f(t, "f") for name, f in programs.EXTRACTORS.items()},
  "programs.defines": lambda t: programs.defines(t, "f"),
  **{f"answers.{name}": f for name, f in answers.EXTRACTORS.items()},
  "notation.latex": lambda t: notation.latex(t[: notation.MAX_CHARS]),
  "comparison": lambda t: comparison.equal_as_text("5 km", t),
  "comparison.short": lambda t: comparison.equal_as_text("5 km", t[: notation.MAX_CHARS]),
  "choices.find": lambda t: choices.find(t, OPTIONS),
  "choices.letter": lambda t: choices.letter(t, OPTIONS),
  "minerva": lambda t: minerva.equal("5", t),
  "arithmetic": expression,
  "evaluated": lambda t: evaluated.left_undone("5", t),
  "tool_use": lambda t: tool_use.is_equal("5", t),
  "sliding_puzzle": lambda t: sliding_puzzle.act(sliding_puzzle.solved(3), t),
  "short_answer": lambda t: short_answer.f1(t, "seven words"),
  "math_multi_reward": lambda t: math_multi_reward.components(t, "18"),
  "nemo_gym": nemo_gym.split_thoughts,
  "openenv": lambda t: openenv.action_of(t, {"properties": {"text": {"type": "string"}}}),
  "judge": lambda t: formats.re.findall(formats.JUDGE_PATTERN, t),
}
# Repeated up to the length; or (what comes first, what is repeated, what comes last).
TEXTS = [
  "```py\n",
  ("```", " ", "`"),
  r"```py\boxed{<code><answer>1 #### Answer: {",
  r"\boxed{",
  "<code>",
  ("1", " ", "x"),
  "\u0315\u0300",  # marks, in an order that normalizing changes.
  "1,",  # these at half a mebibyte, too: LARGE.
  *("```a", "```\n", ("```", "a", "`"), ("", "<code>", "</code>"), "</code><code>", "<answer>"),
  *("<action>", "<action></action", (r"\boxed{", "}{", ""), r"\boxed ", (r"\boxed", " ", "{")),
  *(r"\text{", (r"\text", " ", "x"), r"\frac", "{", "}", "(", "()", "-", "1", "1 ", " ", "\n"),
  *(" \n", ("", " ", "x\n"), ("def", " ", "x"), "async ", "####", "Answer:", "answer is "),
  *(("answer", " ", ":"), ("Answer: A", " ", "or"), "A ", "\ufdfa", "Score: ", "$", "|", "= "),
  *(r"\begin{", "x^", "1 111 ", ("", "111 ", "1"), "1,111,", "12,34,", "1'111'", "−", "- ", "1½"),
  *("⁰₀", r"\mathbf{", r"\text{a}", r"\color{", "**a", "__", "^(", r"1\text{ km}", "km ", "1 km/"),
  *("~~~\n", "````\n```\n", "x```\n", "> ```\n", "<a>```\n", r"\\boxed{}", "答は", "B입니다 "),
  *("</think>", "\u200b", "e\u0301", "”", "p.m. ", "x10^", r"\left", "1e5", "0.1\\overline{2}"),
  ("<think>", "</think>\n", "<answer></answer>."),
]


def text_of(pattern, size):
  first, repeated, last = ("", pattern, "") if isinstance(pattern, str) else pattern
  return first + repeated * (size // len(repeated)) + last


def seconds(reader, pattern, size):
  text = text_of(pattern, size)
  gc.disable()
  start = time.process_time()
  READERS[reader](text)
  spent = time.process_time() - start
  gc.enable()
  return spent


@pytest.mark.long
@pytest.mark.parametrize("reader", READERS)
def test_any_text_is_read_in_linear_time(reader):
  small = {str(pattern): seconds(reader, pattern, SMALL) for pattern in TEXTS}
  assert max(small.values()) < 0.5, small
  for pattern in TEXTS[:LARGE]:
    # Eight times as long: 64 times the seconds at a quadratic cost.
    assert seconds(reader, pattern, MEBI // 2) < 3 * 8 * max(small[str(pattern)], 0.01), pattern


def test_a_long_fence_of_an_action_is_read_in_linear_time():
  text = f"{'`' * MEBI}\n{'`' * 2 * MEBI}x"
  start = time.process_time()
  assert openenv.action_of(text, {"properties": {"text": {"type": "string"}}}) == {"text": text}
  assert time.process_time() - start < 2  # hours at a quadratic cost.


def test_a_long_answer_is_not_read_for_its_operations():
  assert evaluated.left_undone("5", "5" + " " * MEBI) == {"length"}


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("```python\nf = 1\n```", "f = 1\n"),
    ("```python\nf = 1\n```\n```python\ng = 2\n```", "f = 1\n"),  # the one that defines f.
    ("```\nf = 1\n```\n```py\ng = 2\n```", "g = 2\n"),
    ("```py\nopen", None),
    ("```py\n```bash\nx\n```", "```bash\nx\n"),
    ("  ```py\n    a\n      b\n  ```\t", "a\n  b\n"),
    ("text ```py\na\n```", "a\n"),
    ("text ```\na\n```", None),  # may be the end of a span.
    ("````python\n```\na\n```\n````", "```\na\n```\n"),
    ("```py\na\n`````", "a\n"),  # longer than the opening one.
    ("````py\na\n```\n", None),  # shorter.
    ("~~~ python title=`x`\na\n~~~", "a\n"),
    ("```py\na\n~~~\nb\n```", "a\n~~~\nb\n"),
    ("<answer>```py\na\n```</answer>", "a\n"),
    ("```py\na\n```.", "a\n"),
    ("```py\na\n```**", "a\n"),
    ("```py\na```", "a"),
    ("```py\na```\nor\n```py\nb\n```", "b\n"),
    ("```py\na = '```'\nb\n```", "a = '```'\nb\n"),
    ("> ```py\n> a\n>   b\n> ```", "a\n  b\n"),
    ("\ufeff```python3.11\na\n```", "a\n"),
    ("<think>```py\nf = 0\n```</think>\n```py\nf = 1\n```", "f = 1\n"),
    ("<think>\n```py\nf = 0\n</think>\n```py\na\n```", "a\n"),  # never closed in the thought.
    ("<think>\n```py\nf = 0\n```\n</think>\nThat is all.", "f = 0\n"),
    ("```py `x`\na\n```\nb\n```", "b\n"),
    ("```js\na\n```", None),
    ("```py\n```", ""),
    ("```py\r\na\r\n```\r\n", "a\r\n"),
  ],
)
def test_blocks_are_found_between_fences(text, expected):
  assert programs.fenced(text, "f") == expected


def test_tags_are_found_from_the_left():
  assert programs.tagged("<code>a</code> <code>b<code>c</code> </code>") == "b<code>c"
  assert programs.tagged("</code><code>a") is None


def test_full_width_and_decomposed_statements_are_still_read():
  assert choices.find("Answer：Ｂ", {}) == "B"
  assert choices.find("La re\u0301ponse est C", {}) == "C"
