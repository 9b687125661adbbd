"""Rows → records: what is read, and what every broken row says."""

import json

import numpy as np
import pytest

from grpo_jax.data import skipped_rows
from grpo_jax.data.formats import (
  FORMATS,
  PromptStyle,
  RowError,
  fill_template,
  from_any,
  from_problem,
  parse_line,
)

STYLE = PromptStyle()


def read(row: dict, **style):
  return from_any(row, "data.jsonl:7", PromptStyle(**style))


def test_problem_row_keeps_its_other_fields_untouched():
  row = {"problem": "1+1?", "expected_answer": "2", "level": 3, "tags": ["a", {"b": None}]}
  record = read(row)
  assert record.messages == ({"role": "user", "content": "1+1?"},)
  assert record.info == row


def test_problem_row_under_other_names_has_the_standard_ones_in_info():
  record = read(
    {"question": "q", "answer": "#### 4", "problem": "not this"},
    input_key="question",
    output_key="answer",
  )
  assert record.messages[-1]["content"] == "q"
  assert record.info == {"problem": "q", "expected_answer": "#### 4", "row/problem": "not this"}


def test_a_number_is_an_answer_in_digits():
  texts = {72: "72", 0.5: "0.5", "72": "72", 18.0: "18.0", 10**20: "100000000000000000000"}
  texts |= {1e-5: "0.00001", -2.5e-7: "-0.00000025", 1e16: "10000000000000000", "1e-5": "1e-5"}
  texts |= {6.02e23: "602000000000000000000000", np.float64(0.1): "0.1"}
  found = {v: read({"problem": "q", "expected_answer": v}).info["expected_answer"] for v in texts}
  assert found == texts


def test_rows_without_answers_are_read_when_no_answer_is_asked_for():
  assert read({"problem": "q"}, output_key=None).info == {"problem": "q"}


def test_chat_takes_the_last_assistant_message_as_the_answer():
  chat = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c?"},
    {"role": "assistant", "content": "d"},
  ]
  record = read({"messages": chat, "task_name": "math"}, system_prompt="not this one")
  assert list(record.messages) == chat[:4]
  assert record.info == {"problem": "c?", "expected_answer": "d", "task_name": "math"}


def test_chat_without_answer_message_takes_the_answer_field_if_there_is_one():
  chat = {"messages": [{"role": "user", "content": "a?"}]}
  assert read(chat).info == {"problem": "a?"}
  assert read({**chat, "expected_answer": "b"}).info["expected_answer"] == "b"


def test_system_prompt_and_template_are_put_around_the_last_user_message():
  style = dict(system_prompt="S", prompt_template="Solve: {}!")
  assert read({"problem": "x", "expected_answer": "1"}, **style).messages == (
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Solve: x!"},
  )
  chat = [{"role": r, "content": c} for r, c in [("user", "u"), ("assistant", "v"), ("user", "w")]]
  assert [m["content"] for m in read({"messages": chat}, **style).messages] == [
    "S", "u", "v", "Solve: w!",
  ]  # fmt: skip


@pytest.mark.parametrize(
  ("template", "filled"),
  [
    ("{}", r"\frac{a}{b} {}"),
    ("Q: {}\nA:", "Q: \\frac{a}{b} {}\nA:"),
    (r"Answer in \boxed{}: {}", r"Answer in \boxed{}: \frac{a}{b} {}"),  # LaTeX braces stay.
    (r"Answer in \boxed{{}}: {}", r"Answer in \boxed{}: \frac{a}{b} {}"),  # escaped as in format.
    ('{"json": "{}"}', r'{"json": "\frac{a}{b} {}"}'),
  ],
)
def test_template_puts_the_problem_at_its_place_only(template, filled):
  assert fill_template(template, r"\frac{a}{b} {}") == filled


def test_template_without_place_is_refused_when_the_style_is_made():
  with pytest.raises(ValueError, match=r"needs \{\} for the problem, got 'Solve this'"):
    PromptStyle(prompt_template="Solve this")


def line(value) -> bytes:
  return json.dumps(value).encode()


BROKEN = {
  "bad_json": (b'{"problem": "a",}', "invalid JSON at column 17"),
  "cut": (b'{"problem": "a', "invalid JSON at column 13"),
  "two_objects": (b'{"a": 1} {"b": 2}', "invalid JSON at column 10"),
  "nan": (b'{"problem": NaN}', "invalid JSON: NaN is not JSON"),
  "deep": (b"[" * 100_000, "invalid JSON"),
  "huge_number": (b'{"problem": ' + b"9" * 5000 + b"}", "invalid JSON"),
  "utf8": (b'{"problem": "caf\xe9"}', "invalid UTF-8 at byte 17 of the line"),
  "list": (b'["a"]', "a row must be a JSON object, got a list"),
  "no_key": (
    line({"problm": "a"}),
    "no key 'problem' (did you mean 'problm'?); the row has 'problm'",
  ),
  "no_answer": (line({"problem": "a"}), "no key 'expected_answer'"),
  "empty_row": (b"{}", "no key 'problem'; the row has no keys at all"),
  "type": (line({"problem": 3}), "'problem' must be a string, got a number"),
  "null": (
    line({"problem": "a", "expected_answer": None}),
    "'expected_answer' must be a string, got null",
  ),
  "boolean": (
    line({"problem": "a", "expected_answer": True}),
    "'expected_answer' must be a string, got a boolean",
  ),
  "infinite": (b'{"problem": "a", "expected_answer": 1e999}', "'expected_answer' must be finite"),
  "empty": (line({"problem": " \n"}), "'problem' is empty"),
  "empty_answer": (line({"problem": "a", "expected_answer": ""}), "'expected_answer' is empty"),
  "surrogate": (b'{"problem": "a\\ud800"}', "'problem' holds half a surrogate pair"),
  "messages_type": (
    line({"messages": "hi"}),
    "'messages' must be a list of messages, got a string",
  ),
  "messages_empty": (line({"messages": []}), "'messages' must be a list of messages, got an empty"),
  "message_type": (line({"messages": ["hi"]}), "message 1 must be an object, got a string"),
  "role": (
    line({"messages": [{"role": "human", "content": "a"}]}),
    "message 1 has role 'human'; there are: system",
  ),
  "content": (
    line({"messages": [{"role": "user", "contents": "a"}]}),
    "message 1: no key 'content' (did you mean 'contents'?)",
  ),
  "only_assistant": (
    line({"messages": [{"role": "assistant", "content": "a"}]}),
    "a chat needs a message of the user before the answer",
  ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_says_where_and_why(name):
  text, reason = BROKEN[name]
  with pytest.raises(RowError) as caught:
    from_any(parse_line(text, "data.jsonl:7"), "data.jsonl:7", STYLE)
  assert str(caught.value).startswith("data.jsonl:7: ")
  assert reason in str(caught.value)


def test_byte_order_mark_is_allowed():
  assert parse_line(b'\xef\xbb\xbf{"problem": "a"}\r\n', "x:1") == {"problem": "a"}


def test_auto_prefers_the_input_key_over_messages():
  row = {"messages": [], "problem": "p", "expected_answer": "a"}
  assert read(row).messages[0]["content"] == "p"
  assert read(row).info["messages"] == []


def test_every_format_is_named_once():
  assert sorted(FORMATS) == ["auto", "messages", "problem", "task"]


PROBLEM = "data.input_key names the field of the problem"
ANSWER = "data.output_key names the field of the answer"


@pytest.mark.parametrize(
  ("row", "style", "remedy"),
  [
    ({"question": "a", "answer": "b"}, {}, f"{PROBLEM}: set it to 'question'"),
    ({"problm": "a", "answer": "b"}, {}, f"{PROBLEM}: set it to 'problm'"),
    ({"x": "a", "y": "b"}, {}, PROBLEM),
    ({"prompt": ["a"]}, {"input_key": "prompt.9"}, PROBLEM),
    ({"problem": "a", "answer": "b"}, {}, f"{ANSWER}: set it to 'answer'; '' means"),
    ({"problem": "a"}, {"output_key": "gold.value"}, f"{ANSWER}; '' means that the rows have none"),
    ({"problem": "", "answer": "b"}, {}, "data.on_error='skip' leaves such rows out"),
  ],
)
def test_a_missing_field_names_the_option_and_not_how_to_skip_the_row(row, style, remedy):
  with pytest.raises(RowError) as caught:
    skipped_rows.SkippedRows().guard(lambda: from_problem(row, "x:1", PromptStyle(**style)), "stop")
  said = str(caught.value)
  assert f"; {remedy}" in said and ("on_error" in said) == ("on_error" in remedy)
